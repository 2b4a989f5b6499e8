//! `pinpool bench registration`: what registering a buffer for each use costs, against taking one from
//! a pool that was registered once.

use std::{
    process::{self, Command},
    time::{Duration, Instant},
};

use clap::ValueEnum;
use pinpool::{ArenaInfo, Device, PageSize, Pages, device::DeviceInfo};
use serde_json::{Map, Value, json};

use super::{
    interrupted,
    peer::Peer,
    report::{self, Environment, Progress, Summary, Table, show_count, show_ns},
    sides::Sides,
};
use crate::cli::{DeviceArgs, Failure, parse_bytes, say, show_bytes};

/// Compare registering a buffer for each use with taking it from a pool.
///
/// For each size, in turns: `ibv_reg_mr` + `ibv_dereg_mr` of a buffer that is mapped and in memory, and
/// alloc + free on a pool that was registered when it was built.
#[derive(clap::Args)]
#[command(after_long_help = METHOD)]
pub(crate) struct Args {
    #[command(flatten)]
    device: DeviceArgs,
    /// Buffer sizes, 4K to 64M, in whole 4 KiB
    #[arg(long, value_name = "SIZE,..", value_delimiter = ',', value_parser = parse_size)]
    #[arg(default_value = "4K,16K,64K,256K,1M,4M,16M,64M")]
    sizes: Vec<usize>,
    /// Turns for each size, at most; each gives 8 samples of the per-call side and 1 of the pool
    #[arg(long = "samples", value_name = "N", default_value_t = 500)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=100_000))]
    turns: u32,
    /// Seconds after which a size has turns enough, once it has 15
    #[arg(long, value_name = "SECONDS", default_value_t = 2.0, value_parser = parse_seconds)]
    row_seconds: f64,
    /// The pages of both sides
    #[arg(long, value_enum, default_value_t = PageChoice::Prefer)]
    pages: PageChoice,
    /// Print one JSON object instead of a table
    #[arg(long)]
    json: bool,
}

const METHOD: &str = "\
Method: Both sides use one device, one PD, the same rights, and pages of one size that were mapped \
and faulted in beforehand; neither touches its bytes while it is timed. A per-call sample is one \
register + deregister, less the least cost of reading the clock. A pool sample is the mean of a batch \
of alloc + free, so long that the clock does not count; each alloc yields address, lkey and rkey. The \
sides take turns of 8 per-call samples and 1 batch, and the sizes are gone through 5 times. A call \
that fails is counted and not timed. \
Building the pool (mapping, faulting in, registering) is timed apart.

Bias: Both sides are measured in their steady state, caches warm, one thread, one buffer at a time. \
The pool's min and p99 are those of batch means and hide slow single calls. The per-call side leaves \
out what a program pays that also maps and touches its buffers anew. In an emulated guest both sides \
are emulated.

Proof: First, each size is written and read by RDMA through the keys of both sides, and the smallest \
once more at the end. What is registered and pinned before and after must \
be the same.

Exit code: 0 all went well; 1 something failed; 2 wrong call or no such device; 130 interrupted.";

/// Sizes are whole multiples of this.
pub(crate) const GRANULE: usize = 4 << 10;
const LARGEST: usize = 64 << 20;
/// How often all sizes are gone through, so that what disturbs the machine for a while does not fall on
/// one size alone.
const PASSES: usize = 5;
/// Turns that a size gets in each pass whatever time they take.
const LEAST_TURNS: usize = 3;
/// Samples that the per-call side takes in a turn, one after the other: the first call after the other
/// side's batch finds the kernel's code and data out of the caches and takes twice as long.
const RUN: usize = 8;
/// Failed calls after which a row is given up.
const MOST_ERRORS: u64 = 15;
/// How long a batch takes at least.
const BATCH_TIME: Duration = Duration::from_micros(100);
/// ... and this many times what reading the clock costs.
const BATCH_CLOCKS: u32 = 200;
const MOST_PAIRS: u32 = 1 << 20;

fn parse_size(text: &str) -> Result<usize, String> {
    let size = parse_bytes(text)?;
    if !(GRANULE..=LARGEST).contains(&size) {
        let (least, most) = (show_bytes(GRANULE), show_bytes(LARGEST));
        return Err(format!("sizes go from {least} to {most}"));
    }
    if !size.is_multiple_of(GRANULE) {
        return Err(format!("it is no multiple of {}", show_bytes(GRANULE)));
    }
    Ok(size)
}

fn parse_seconds(text: &str) -> Result<f64, String> {
    let seconds = text.parse::<f64>().ok().filter(|s| (0.0..=3600.0).contains(s));
    seconds.ok_or_else(|| "it is no number of seconds from 0 to 3600".to_owned())
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
enum PageChoice {
    /// The system's base pages
    Base,
    /// 2 MiB hugepages, or an error
    #[value(name = "2M")]
    Huge2M,
    /// 2 MiB hugepages if enough are free for both sides, else base pages
    Prefer,
}

impl PageChoice {
    fn pages(self) -> Pages {
        match self {
            Self::Base => Pages::Base,
            Self::Huge2M => Pages::Require(PageSize::Huge2M),
            Self::Prefer => Pages::Prefer(PageSize::Huge2M),
        }
    }
}

/// Measures, prints, and says whether anything failed.
pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let device = args.device.open()?;
    let before = Held::now(&device);
    let mut bench = Bench::start(args, &device)?;
    let rows = bench.rows(args);
    let mut report = bench.finish(&device, before, rows);
    if interrupted() {
        return Err(Failure::Interrupted);
    }
    report.judge();
    report::emit(&if args.json { report.json().to_string() } else { report.table() })?;
    match report.failures.as_slice() {
        [] => Ok(()),
        [rest @ .., last] => {
            rest.iter().for_each(|f| say(f));
            Err(Failure::Failed(last.clone()))
        }
    }
}

/// What this process holds of the device and of locked memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Held {
    /// Bytes pinned by RDMA.
    pinned: u64,
    /// Bytes locked.
    locked: u64,
    /// Regions on the device, if anybody but this program counts them.
    regions: Option<usize>,
}

impl Held {
    fn now(device: &Device) -> Self {
        let regions = match device.as_soft() {
            Some(soft) => Some(soft.regions()),
            None => kernel_regions(&device.info().name),
        };
        let [pinned, locked] = ["VmPin", "VmLck"].map(report::status_bytes);
        Self { pinned, locked, regions }
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

/// The bench while it runs.
struct Bench {
    sides: Sides,
    peer: Peer,
    clock: Duration,
}

/// What one size came to.
struct Row {
    bytes: usize,
    /// Nanoseconds of each call.
    per_call: Vec<f64>,
    /// Nanoseconds of a pair, the mean of each batch.
    pool: Vec<f64>,
    /// Pairs in a batch.
    pairs: u32,
    errors: u64,
    first_error: Option<String>,
    verified: bool,
}

impl Row {
    fn new(bytes: usize, turns: usize) -> Self {
        Self {
            bytes,
            per_call: Vec::with_capacity(turns * RUN),
            pool: Vec::with_capacity(turns),
            pairs: 0,
            errors: 0,
            first_error: None,
            verified: false,
        }
    }

    fn error(&mut self, e: impl ToString) {
        self.errors += 1;
        self.first_error.get_or_insert_with(|| e.to_string());
    }

    fn given_up(&self) -> bool {
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

impl Bench {
    fn start(args: &Args, device: &Device) -> Result<Self, Failure> {
        let largest = args.sizes.iter().copied().max().unwrap_or(GRANULE);
        let sides = Sides::build(device, largest, args.pages.pages())
            .map_err(|e| Failure::Failed(e.to_string()))?;
        let peer = Peer::connect(device).map_err(Failure::Failed)?;
        Ok(Self { sides, peer, clock: report::clock_cost() })
    }

    /// Measures each size, smallest first, and all of them again in each pass, until the user wants no
    /// more.
    fn rows(&mut self, args: &Args) -> Vec<Row> {
        let mut sizes = args.sizes.clone();
        sizes.sort_unstable();
        sizes.dedup();
        let turns = args.turns as usize;
        let mut rows: Vec<Row> = sizes.into_iter().map(|bytes| Row::new(bytes, turns)).collect();
        let mut progress = Progress::new(rows.len() * (1 + PASSES));
        for row in &mut rows {
            progress.at(format!("checking data, {}", show_bytes(row.bytes)));
            self.verify(row);
            progress.step_done();
        }
        for pass in 0..PASSES {
            for row in &mut rows {
                progress.at(format!("timing, {}", show_bytes(row.bytes)));
                self.pass(args, row, turns * (pass + 1) / PASSES, &progress);
                progress.step_done();
            }
        }
        // The regions that came and went must not have harmed the pool's.
        if let Some(first) = rows.first_mut() {
            self.verify(first);
        }
        rows
    }

    /// Times both sides in turns, until there are so many or the pass's time is over.
    fn pass(&mut self, args: &Args, row: &mut Row, turns: usize, progress: &Progress) {
        if row.given_up() || interrupted() {
            return;
        }
        if let Err(e) = self.warm_up(row) {
            row.error(e);
            return;
        }
        let start = Instant::now();
        let before = row.pool.len();
        for turn in 0..turns.saturating_sub(before) {
            let share = start.elapsed().as_secs_f64() * PASSES as f64 / args.row_seconds;
            let enough = turn >= LEAST_TURNS && share >= 1.0;
            if enough || row.given_up() || interrupted() {
                break;
            }
            progress.share(share.max(turn as f64 / (turns - before) as f64));
            self.turn(row);
        }
    }

    /// One batch of the pool, and a run of per-call samples.
    fn turn(&mut self, row: &mut Row) {
        match self.sides.time_pool(row.bytes, row.pairs) {
            Ok(time) => row.pool.push(time.as_nanos() as f64 / f64::from(row.pairs)),
            Err(e) => row.error(e),
        }
        for _ in 0..RUN {
            match self.sides.per_call.time(row.bytes) {
                Ok(time) => row.per_call.push(time.saturating_sub(self.clock).as_nanos() as f64),
                Err(e) => row.error(e),
            }
        }
    }

    /// One untimed call of each side; the first time also batches of growing length, until one is long
    /// enough for the clock.
    fn warm_up(&mut self, row: &mut Row) -> Result<(), String> {
        self.sides.per_call.time(row.bytes).map_err(|e| e.to_string())?;
        let batch = |pairs| self.sides.time_pool(row.bytes, pairs).map_err(|e| e.to_string());
        if row.pairs > 0 {
            return batch(row.pairs).map(drop);
        }
        let enough = BATCH_TIME.max(self.clock * BATCH_CLOCKS);
        row.pairs = 16;
        // The fastest of three, for the others may have been interrupted.
        while row.pairs < MOST_PAIRS
            && batch(row.pairs)?.min(batch(row.pairs)?).min(batch(row.pairs)?) < enough
        {
            row.pairs *= 2;
        }
        Ok(())
    }

    fn verify(&mut self, row: &mut Row) {
        if interrupted() {
            return;
        }
        let moved = self.sides.verify(&mut self.peer, row.bytes);
        row.verified = moved.is_ok();
        if let Err(e) = moved {
            row.error(e);
        }
    }

    /// Takes everything down and gathers what is to be said.
    fn finish(self, device: &Device, before: Held, rows: Vec<Row>) -> Report {
        let Self { sides: Sides { pool, per_call, pool_counts }, peer, clock } = self;
        let arenas = pool.arenas().to_vec();
        let per_call_memory = *per_call.arena();
        let per_call_counts = per_call.counts().clone();
        drop(peer);
        drop(per_call);
        let failures = pool.close().err().map(|e| e.to_string()).into_iter().collect();
        Report {
            device: device.info(),
            fork: fork_support(device),
            environment: Environment::read(),
            arenas,
            per_call_memory,
            pool_calls: pool_counts.register_calls(),
            per_call_calls: per_call_counts.register_calls(),
            regions_left: pool_counts.live() + per_call_counts.live(),
            clock,
            before,
            after: Held::now(device),
            rows,
            failures,
        }
    }
}

/// How registered memory fares at a fork; `None` where that is no matter of the device.
fn fork_support(device: &Device) -> Option<&'static str> {
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

/// All that is to be said.
struct Report {
    device: DeviceInfo,
    fork: Option<&'static str>,
    environment: Environment,
    arenas: Vec<ArenaInfo>,
    per_call_memory: ArenaInfo,
    pool_calls: u64,
    per_call_calls: u64,
    regions_left: u64,
    clock: Duration,
    before: Held,
    after: Held,
    rows: Vec<Row>,
    failures: Vec<String>,
}

impl Report {
    /// Finds whatever did not go as it must.
    fn judge(&mut self) {
        for row in &self.rows {
            if let Some(first) = &row.first_error {
                let size = show_bytes(row.bytes);
                self.failures.push(format!("{size}: {} errors, first: {first}", row.errors));
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
        if self.before != self.after {
            let (before, after) = (self.before, self.after);
            self.failures
                .push(format!("not everything was given back: {before:?}, then {after:?}"));
        }
    }

    /// The time that one part of building the pool took, over all arenas.
    fn build_time(&self, part: impl Fn(&ArenaInfo) -> Duration) -> Duration {
        self.arenas.iter().map(part).sum()
    }

    fn page_size(&self) -> usize {
        self.arenas.iter().map(|a| a.page_size).min().unwrap_or(0)
    }

    fn json(&self) -> Value {
        let ns = |d: Duration| d.as_nanos() as u64;
        let per_call = &self.per_call_memory;
        let held = |h: Held| json!({ "pinned": h.pinned, "locked": h.locked, "mrs": h.regions });
        json!({
            "bench": "registration",
            "device": self.device.name,
            "transport": self.device.transport,
            "kernel": self.environment.kernel,
            "page_size": self.page_size(),
            "arenas": self.arenas.len(),
            "reg_mr_calls": self.pool_calls,
            "rows": self.rows.iter().map(row_json).collect::<Vec<_>>(),
            "cpu": self.environment.cpu,
            "cpus": self.environment.cpus,
            "memlock": self.environment.memlock_json(),
            "thp": self.environment.thp,
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
            "failures": self.failures,
        })
    }

    fn fork_json(&self) -> Value {
        let mut fork = Map::new();
        fork.insert("support".into(), json!(self.fork));
        for name in FORK_SETTINGS {
            let value = std::env::var_os(name).map(|v| v.to_string_lossy().into_owned());
            fork.insert(name.into(), json!(value));
        }
        Value::Object(fork)
    }

    fn table(&self) -> String {
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
        let (info, env) = (&self.device, &self.environment);
        let bytes = self.arenas.iter().map(|a| a.len).sum();
        let arenas = match self.arenas.len() {
            1 => "1 arena".to_owned(),
            n => format!("{n} arenas"),
        };
        let settings = FORK_SETTINGS.map(|name| match std::env::var_os(name) {
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

    /// Base pages may be huge behind the scenes, for both sides alike.
    fn show_pages(&self) -> String {
        let size = self.page_size();
        let text = format!("{} on both sides", show_bytes(size));
        match &self.environment.thp {
            Some(thp) if size < PageSize::Huge2M.bytes() => {
                format!("{text}; transparent hugepages: {thp}")
            }
            _ => text,
        }
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
    super::sides::ACCESS.to_string()
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
