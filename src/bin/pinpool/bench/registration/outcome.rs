//! What a registration bench came to: what went wrong, the table, the object.

use std::{
    env,
    process::{self, Command},
    time::Duration,
};

use pinpool::{ArenaInfo, Bytes, Device};
use serde_json::{Map, Value, json};

use super::sides;
use crate::{
    bench::{
        device::{build_time, show_pages},
        facts::{Subject, status_bytes},
        figures::{Axis, Panel, Point, Unit},
        report::{self, Summary, Table, show_count, show_ns},
    },
    cli::show_bytes,
};

/// Failed calls after which a row is given up.
const MOST_ERRORS: u64 = 15;

/// What this process holds of the device and of locked memory.
#[derive(Clone, Copy)]
pub(super) struct Held {
    /// Bytes pinned by RDMA.
    pinned: u64,
    /// Bytes locked.
    locked: u64,
    /// Regions on the device, if anybody but this program counts them.
    regions: Option<usize>,
}

impl Held {
    /// Looks now.
    pub(super) fn now(device: &Device) -> Self {
        let regions = match device.as_soft() {
            Some(soft) => Some(soft.regions()),
            None => kernel_regions(&device.info().name),
        };
        let [pinned, locked] = ["VmPin", "VmLck"].map(status_bytes);
        Self { pinned, locked, regions }
    }

    /// Says what is not as it was before.
    fn changed_from(&self, before: &Self) -> Option<String> {
        let regions = before.regions.zip(self.regions).unwrap_or_default();
        let bytes = |n: u64| Bytes(n).to_string();
        let (was, is) = (before, self);
        [
            (bytes(was.pinned), bytes(is.pinned), "pinned"),
            (bytes(was.locked), bytes(is.locked), "locked"),
            (regions.0.to_string(), regions.1.to_string(), "regions"),
        ]
        .into_iter()
        .find(|(was, is, _)| was != is)
        .map(|(was, is, what)| format!("not all was given back: {what} {was} before, {is} after"))
    }
}

/// How many regions of this process the kernel knows on a device; `None` where the tool that asks it
/// (`rdma` of iproute2) is missing or has no answer.
fn kernel_regions(device: &str) -> Option<usize> {
    let out = Command::new("rdma").args(["-j", "resource", "show", "mr"]).output().ok()?;
    let list: Value = serde_json::from_slice(&out.stdout).ok().filter(|_| out.status.success())?;
    let ours = |mr: &&Value| mr["ifname"] == device && mr["pid"] == process::id();
    Some(list.as_array()?.iter().filter(ours).count())
}

/// What one size came to.
pub(super) struct Row {
    pub(super) bytes: usize,
    /// Nanoseconds of each call.
    pub(super) per_call: Vec<f64>,
    /// Nanoseconds of a pair, the mean of each batch.
    pub(super) pool: Vec<f64>,
    /// Pairs in a batch.
    pub(super) pairs: u32,
    pub(super) errors: u64,
    pub(super) first_error: Option<String>,
    pub(super) verified: bool,
}

impl Row {
    /// An empty row with room for so many samples of each side.
    pub(super) fn new(bytes: usize, per_call: usize, pool: usize) -> Self {
        Self {
            bytes,
            per_call: Vec::with_capacity(per_call),
            pool: Vec::with_capacity(pool),
            pairs: 0,
            errors: 0,
            first_error: None,
            verified: false,
        }
    }

    /// Counts a failed call.
    pub(super) fn error(&mut self, e: impl ToString) {
        self.errors += 1;
        self.first_error.get_or_insert_with(|| e.to_string());
    }

    /// Whether more calls are not worth while.
    pub(super) fn given_up(&self) -> bool {
        self.errors >= MOST_ERRORS
    }

    fn sides(&self) -> [Option<Summary>; 2] {
        [Summary::of(&self.per_call), Summary::of(&self.pool)]
    }

    fn ratio(&self) -> Option<f64> {
        let [per_call, pool] = self.sides();
        Some(per_call?.median / pool?.median)
    }
}

/// How registered memory fares at a fork; `None` where that is no matter of the device.
pub(super) fn fork_support(device: &Device) -> Option<&'static str> {
    #[cfg(any(feature = "rdma-sys", feature = "rdma-mummy-sys"))]
    if let Some(verbs) = device.as_verbs() {
        use pinpool::device::ForkSupport;
        return Some(match verbs.fork_support() {
            ForkSupport::CopyOnFork => "copied at a fork by the kernel",
            ForkSupport::HiddenFromChildren => "hidden from children by libibverbs",
            _ => "not safe",
        });
    }
    let _ = device;
    None
}

const FORK_SETTINGS: [&str; 2] = ["RDMAV_FORK_SAFE", "RDMAV_HUGEPAGES_SAFE"];

/// Says why parts of hugepages cannot be registered, where that is so: libibverbs then hides each
/// registered range from children, which the kernel can do with whole hugepages only, and refuses with
/// EINVAL. The pool registers none but whole ones.
pub(super) fn fork_note(device: &Device) -> Option<&'static str> {
    #[cfg(any(feature = "rdma-sys", feature = "rdma-mummy-sys"))]
    if let Some(verbs) = device.as_verbs() {
        use pinpool::device::ForkSupport;
        let set = |name| env::var_os(name).is_some();
        let hides = verbs.fork_support() == ForkSupport::HiddenFromChildren
            || set("RDMAV_FORK_SAFE")
            || set("IBV_FORK_SAFE");
        return (hides && !set("RDMAV_HUGEPAGES_SAFE")).then_some(
            "fork support without RDMAV_HUGEPAGES_SAFE=1 lets no part of a hugepage be registered",
        );
    }
    let _ = device;
    None
}

/// All that is to be said.
pub(super) struct Outcome {
    pub(super) subject: Subject,
    pub(super) fork: Option<&'static str>,
    pub(super) arenas: Vec<ArenaInfo>,
    pub(super) per_call_memory: ArenaInfo,
    pub(super) pool_calls: u64,
    pub(super) per_call_calls: u64,
    pub(super) regions_left: u64,
    pub(super) clock: Duration,
    pub(super) note: Option<&'static str>,
    pub(super) before: Held,
    pub(super) after: Held,
    pub(super) rows: Vec<Row>,
    pub(super) failures: Vec<String>,
}

impl Outcome {
    /// Finds whatever did not go as it must.
    pub(super) fn judge(&mut self) {
        for row in &self.rows {
            if let Some(first) = &row.first_error {
                let size = show_bytes(row.bytes);
                let errors = match row.errors {
                    1 => "1 error".to_owned(),
                    n => format!("{n} errors, first"),
                };
                let note = self.note.map(|n| format!("; {n}")).unwrap_or_default();
                self.failures.push(format!("{size}: {errors}: {first}{note}"));
            }
        }
        if self.pool_calls != self.arenas.len() as u64 {
            let arenas = self.arenas.len();
            let calls = self.pool_calls;
            self.failures.push(format!("{arenas} arenas took {calls} register calls"));
        }
        if self.regions_left != 0 {
            self.failures.push(format!("{} regions are still registered", self.regions_left));
        }
        self.failures.extend(self.after.changed_from(&self.before));
    }

    /// What one part of building the pool took.
    fn build_time(&self, part: impl Fn(&ArenaInfo) -> Duration) -> Duration {
        build_time(&self.arenas, part)
    }

    fn page_size(&self) -> usize {
        self.arenas.iter().map(|a| a.page_size).min().unwrap_or(0)
    }

    /// One object, for programs.
    pub(super) fn json(&self) -> Value {
        let ns = |d: Duration| d.as_nanos() as u64;
        let per_call = &self.per_call_memory;
        let held = |h: Held| json!({ "pinned": h.pinned, "locked": h.locked, "mrs": h.regions });
        let environment = &self.subject.environment;
        let own = json!({
            "page_size": self.page_size(),
            "arenas": self.arenas.len(),
            "reg_mr_calls": self.pool_calls,
            "rows": self.rows.iter().map(row_json).collect::<Vec<_>>(),
            "memlock": environment.memlock_json(),
            "thp": environment.thp,
            "fork": self.fork_json(),
            "pool": {
                "bytes": self.arenas.iter().map(|a| a.len).sum::<usize>(),
                "map_ns": ns(self.build_time(|a| a.map_time)),
                "fault_in_ns": ns(self.build_time(|a| a.fault_in_time)),
                "register_ns": ns(self.build_time(|a| a.register_time)),
            },
            "per_call": {
                "page_size": per_call.page_size,
                "map_ns": ns(per_call.map_time),
                "fault_in_ns": ns(per_call.fault_in_time),
                "reg_mr_calls": self.per_call_calls,
            },
            "access": access(),
            "clock_ns": ns(self.clock),
            "before": held(self.before),
            "after": held(self.after),
            "note": self.note,
            "failures": self.failures,
        });
        self.subject.object("registration", own)
    }

    fn fork_json(&self) -> Value {
        let mut fork = Map::new();
        fork.insert("support".into(), json!(self.fork));
        for name in FORK_SETTINGS {
            let value = env::var_os(name).map(|v| v.to_string_lossy().into_owned());
            fork.insert(name.into(), json!(value));
        }
        Value::Object(fork)
    }

    /// The facts and a table, for people.
    pub(super) fn table(&self) -> String {
        let mut out = String::new();
        for (name, text) in self.facts() {
            out.push_str(&format!("{name:<9} {text}\n"));
        }
        let mut table = Table::new(&[
            "\nbuffer",
            "per call\nmin",
            "per call\nmedian",
            "per call\np99",
            "pool\nmin",
            "pool\nmedian",
            "pool\np99",
            "\nratio",
            "\nerrors",
        ]);
        self.rows.iter().for_each(|r| table.row(row_cells(r)));
        format!("{out}\n{table}\n{}", self.closing())
    }

    fn facts(&self) -> Vec<(&'static str, String)> {
        let ns = |d: Duration| show_ns(d.as_nanos() as f64);
        let Subject { device: info, environment: env } = &self.subject;
        let bytes = self.arenas.iter().map(|a| a.len).sum();
        let arenas = match self.arenas.len() {
            1 => "1 arena".to_owned(),
            n => format!("{n} arenas"),
        };
        let settings = FORK_SETTINGS.map(|name| match env::var_os(name) {
            Some(v) => format!("{name}={}", v.to_string_lossy()),
            None => format!("{name} unset"),
        });
        let fork = self.fork.unwrap_or("no matter of this device");
        vec![
            ("device", format!("{} ({}), rights {}", info.name, info.transport, access())),
            ("kernel", env.kernel.clone()),
            ("cpu", format!("{} × {}", env.cpus, env.cpu)),
            ("pages", self.show_pages()),
            ("memlock", env.show_memlock()),
            ("fork", format!("{fork}; {}", settings.join(", "))),
            (
                "pool",
                format!(
                    "{} in {arenas}, register calls {}: map {}, fault in {}, register {}",
                    show_bytes(bytes),
                    self.pool_calls,
                    ns(self.build_time(|a| a.map_time)),
                    ns(self.build_time(|a| a.fault_in_time)),
                    ns(self.build_time(|a| a.register_time)),
                ),
            ),
        ]
    }

    fn show_pages(&self) -> String {
        let mut text = show_pages(self.page_size(), self.subject.environment.thp.as_ref());
        if let Some(note) = self.note {
            text.push_str(&format!("; {note}"));
        }
        text
    }

    fn closing(&self) -> String {
        let turns = self.rows.iter().map(|r| r.pool.len());
        let turns = match (turns.clone().min(), turns.max()) {
            (Some(least), Some(most)) if least < most => format!("{least} to {most} turns"),
            (n, _) => format!("{} turns", n.unwrap_or(0)),
        };
        let checked = match self.rows.iter().filter(|r| r.verified).count() {
            n if n == self.rows.len() => "data checked by RDMA through both sides".to_owned(),
            n => format!("data checked in {n} of {} sizes", self.rows.len()),
        };
        format!(
            "per call: register + deregister, singly; pool: alloc + free, means of batches; {turns}\n\
             {checked}; regions left {}, pinned {} before and {} after",
            self.regions_left,
            show_bytes((self.before.pinned + self.before.locked) as usize),
            show_bytes((self.after.pinned + self.after.locked) as usize),
        )
    }
}

fn access() -> String {
    sides::ACCESS.to_string()
}

fn row_json(row: &Row) -> Value {
    let [per_call, pool] = row.sides().map(|side| {
        side.map(|s| {
            let mut object = s.json();
            object.remove("p999");
            object.insert("samples".into(), json!(s.samples));
            object
        })
    });
    json!({
        "bytes": row.bytes,
        "per_call_ns": per_call,
        "pool_ns": pool,
        "ratio": row.ratio().map(report::rounded),
        "errors": row.errors,
        "pool_batch": row.pairs,
        "verified": row.verified,
    })
}

fn row_cells(row: &Row) -> Vec<String> {
    let sides = row.sides().map(|side| match side {
        Some(s) => [s.min, s.median, s.p99].map(show_ns),
        None => [(); 3].map(|()| "-".to_owned()),
    });
    let ratio = row.ratio().map_or("-".to_owned(), |r| match r {
        _ if r < 10.0 => format!("{r:.1}"),
        _ => show_count(r.round() as u64),
    });
    let mut cells = vec![show_bytes(row.bytes)];
    cells.extend(sides.into_iter().flatten());
    cells.extend([ratio, row.errors.to_string()]);
    cells
}

/// The figures of such an object.
pub(super) fn panels(object: &Value) -> Vec<Panel> {
    let mut points = Vec::new();
    for row in object["rows"].as_array().into_iter().flatten() {
        let sides = [("register + deregister", "per_call_ns"), ("pool: alloc + free", "pool_ns")];
        let x = row["bytes"].as_f64().unwrap_or_default();
        points.extend(sides.into_iter().filter_map(|(name, key)| Point::of(name, x, &row[key])));
    }
    let title = "A registered buffer for each use";
    vec![Panel::new("time", title, Unit::Time, Axis::Bytes, points)]
}
