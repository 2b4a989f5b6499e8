//! The result: rows of numbers, as tables for people and as one JSON object for programs.

use std::{collections::BTreeSet, fmt::Write};

use serde_json::{Map, Value as Json, json};

use super::{
    cpu,
    fill::Filled,
    registry::{self, Kind},
    spec::{Case, Group, Spec},
};

/// Nanoseconds an operation.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct Ns {
    pub(crate) min: f64,
    pub(crate) median: f64,
    pub(crate) p99: f64,
    pub(crate) p999: f64,
}

#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) enum Value {
    Ns(Ns),
    Filled(Filled),
}

/// One contender in one case.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Row {
    pub(crate) spec: Spec,
    pub(crate) contender: &'static str,
    pub(crate) op: Option<&'static str>,
    pub(crate) value: Value,
}

/// All that one run found.
#[derive(Debug)]
pub(crate) struct Report {
    bench: String,
    reps: usize,
    pub(crate) pinned: bool,
    /// Of all arenas of all cases.
    pub(crate) page_sizes: BTreeSet<usize>,
    pub(crate) rows: Vec<Row>,
    left_out: Vec<LeftOut>,
}

#[derive(PartialEq, Debug)]
struct LeftOut {
    contender: &'static str,
    /// All, if `None`.
    case: Option<String>,
    why: String,
}

/// What a reader must know to judge the numbers.
pub(crate) const METHOD: &str = "\
Method: All contenders run in one process and take turns, one repetition each, the first one \
changing; jemalloc-tuned, whose options are global, runs in a second process in the same turns. \
Threads are pinned. A repetition has slices of some 4 µs. min and median are of the repetitions' \
means, without slices in which another program had the processor (half a millisecond longer than \
most); p99 and p99.9 are of all slices in a repetition (the median repetition's). In burst each operation is timed alone, the \
clock's own time in it, and all figures are of single operations. The first byte of each buffer is \
written; in handoff the receiver reads it. Sizes are not known to the compiler. Before it is timed \
each contender is checked: buffers do not overlap, contents stay, keys are those of keys_of.

Bias: For the pool: it is filled and on hugepages where those are reserved, and the floors and lists \
borrow their buffers from it, while general allocators have memory of their own, on the pages that \
the system gives them. Against it: its every alloc yields both keys, which the others do not know; \
its blocks are aligned to pages, so that first bytes share a few sets of the first cache; general \
allocators are told the size in free where they can use it, and ruapc-bufpool is not asked for keys.";

/// A case in words.
pub(crate) fn title(spec: &Spec) -> String {
    let size = match spec.is_mixed() {
        true => format!("{} to {}", bytes(spec.bytes), bytes(spec.bytes_max)),
        false => bytes(spec.bytes),
    };
    let name = spec.case.name();
    let what = match spec.case {
        Case::Pair if spec.threads > 1 => {
            return format!("{name}, {size}, {} threads", spec.threads);
        }
        Case::Pair => "one buffer out and back",
        Case::BatchLifo => "64 out, 64 back, the last first",
        Case::BatchRandom => "64 out, 64 back in random order",
        Case::Burst => "1024 out, 1024 back, each timed alone",
        Case::Churn => "1024 live, a random one replaced",
        Case::Handoff => "from thread to thread",
        Case::KeysOf => return format!("{name}, the keys of a random live pointer"),
        Case::Fill => "shares of the capacity at the first failure",
    };
    format!("{name}, {size}: {what}")
}

fn bytes(n: usize) -> String {
    match n {
        _ if n >= 1 << 20 && n.is_multiple_of(1 << 20) => format!("{} MiB", n >> 20),
        _ if n >= 1 << 10 && n.is_multiple_of(1 << 10) => format!("{} KiB", n >> 10),
        _ => format!("{n} B"),
    }
}

impl Report {
    pub(crate) fn new(groups: &[Group], reps: usize) -> Self {
        let bench = match groups {
            [one] => one.name(),
            _ => "all",
        };
        Self {
            bench: bench.to_owned(),
            reps,
            pinned: false,
            page_sizes: BTreeSet::new(),
            rows: Vec::new(),
            left_out: Vec::new(),
        }
    }

    /// Notes that a contender does not take part in a case, or in none at all.
    pub(crate) fn left_out(&mut self, contender: &'static str, spec: Option<&Spec>, why: &str) {
        let case = spec.map(title);
        self.left_out.push(LeftOut { contender, case, why: why.to_owned() });
    }

    /// The result as one object.
    pub(crate) fn json(&self) -> Json {
        let left_out =
            |l: &LeftOut| json!({"contender": l.contender, "case": l.case, "why": l.why});
        json!({
            "bench": self.bench,
            "kernel": cpu::kernel(),
            "cpu": cpu::model(),
            "cpus": cpu::count(),
            "pinned": self.pinned,
            "page_sizes": self.page_sizes,
            "repetitions": self.reps,
            "left_out": self.left_out.iter().map(left_out).collect::<Vec<_>>(),
            "rows": self.rows.iter().map(Row::json).collect::<Vec<_>>(),
        })
    }

    /// The result as tables.
    pub(crate) fn text(&self) -> String {
        let pages: Vec<String> = self.page_sizes.iter().map(|&n| bytes(n)).collect();
        let mut text = format!(
            "{}, {} processors, kernel {}\n{} repetitions, threads {}pinned, pool on pages of {}\n",
            cpu::model(),
            cpu::count(),
            cpu::kernel(),
            self.reps,
            if self.pinned { "" } else { "not " },
            pages.join(" and "),
        );
        let mut shown: Vec<(Case, Spec, Option<&str>)> = Vec::new();
        for row in &self.rows {
            // Look-ups are one table.
            let spec = match row.spec.case {
                Case::KeysOf => Spec { arenas: 0, live: 0, bytes: 0, bytes_max: 0, ..row.spec },
                _ => row.spec,
            };
            let key = (spec.case, spec, row.op);
            if shown.contains(&key) {
                continue;
            }
            shown.push(key);
            let op = row.op.map(|op| format!(", {op}")).unwrap_or_default();
            let _ = write!(text, "\n{}{op}\n{}", title(&row.spec), self.table(row));
        }
        for l in &self.left_out {
            let case = l.case.as_ref().map(|c| format!(" in {c}")).unwrap_or_default();
            let _ = write!(text, "\nLeft out{case}: {}, {}", l.contender, l.why);
        }
        if !self.left_out.is_empty() {
            text.push('\n');
        }
        let _ = write!(text, "\n{METHOD}\n");
        text
    }

    /// The rows that stand beside one.
    fn beside<'a>(&'a self, row: &'a Row) -> impl Iterator<Item = &'a Row> {
        let same = |r: &&Row| match row.spec.case {
            Case::KeysOf => r.spec.case == Case::KeysOf,
            _ => r.spec == row.spec && r.op == row.op,
        };
        self.rows.iter().filter(same)
    }

    fn table(&self, row: &Row) -> String {
        match row.spec.case {
            Case::KeysOf => self.keys_of_table(row),
            Case::Fill => self.fill_table(row),
            _ => self.ns_table(row),
        }
    }

    fn ns_table(&self, row: &Row) -> String {
        let of = |kind| {
            let rows = self.beside(row).filter(move |r| registry::kind(r.contender) == Some(kind));
            rows.min_by(|a, b| a.judged().total_cmp(&b.judged()))
        };
        let floor = self.beside(row).find(|r| registry::kind(r.contender) == Some(Kind::Floor));
        let best = of(Kind::General);
        let mut head = ["ns", "median", "min", "p99", "p99.9"].map(String::from).to_vec();
        for other in [floor, best].into_iter().flatten() {
            head.push(format!("× {}", other.contender));
        }
        let alone = |r: &Row| {
            let one = Spec { threads: 1, ..r.spec };
            let rows = &mut self.rows.iter();
            rows.find(|o| o.spec == one && o.contender == r.contender).map(Row::judged)
        };
        let scaled = row.spec.case == Case::Pair && row.spec.threads > 1;
        if scaled {
            head.push("speed-up".to_owned());
        }
        let mut lines = vec![head];
        for r in self.beside(row) {
            let Value::Ns(ns) = r.value else { continue };
            let mut line = vec![r.contender.to_owned()];
            line.extend([ns.median, ns.min, ns.p99, ns.p999].map(digits));
            for other in [floor, best].into_iter().flatten() {
                line.push(format!("{:.2}", r.judged() / other.judged()));
            }
            if scaled {
                line.push(alone(r).map_or(String::new(), |ns| format!("{:.2}", ns / r.judged())));
            }
            lines.push(line);
        }
        aligned(&lines)
    }

    fn keys_of_table(&self, row: &Row) -> String {
        let head = ["arenas", "live", "median ns", "min", "p99", "p99.9"];
        let mut lines = vec![head.map(String::from).to_vec()];
        for r in self.beside(row) {
            let Value::Ns(ns) = r.value else { continue };
            let mut line = vec![r.spec.arenas.to_string(), r.spec.live.to_string()];
            line.extend([ns.median, ns.min, ns.p99, ns.p999].map(digits));
            lines.push(line);
        }
        aligned(&lines)
    }

    fn fill_table(&self, row: &Row) -> String {
        let mut lines = vec![["share", "requested", "in blocks", "of"].map(String::from).to_vec()];
        for r in self.beside(row) {
            let Value::Filled(filled) = r.value else { continue };
            let percent = |share: f64| format!("{:.1} %", share * 100.0);
            let mut line = vec![r.contender.to_owned()];
            line.extend([filled.requested, filled.blocks].map(percent));
            line.push(bytes(filled.capacity));
            lines.push(line);
        }
        aligned(&lines)
    }
}

impl Row {
    /// The number that ratios are made of: in bursts the tail, for that is what they are about.
    fn judged(&self) -> f64 {
        match self.value {
            Value::Ns(ns) if self.spec.case == Case::Burst => ns.p999,
            Value::Ns(ns) => ns.median,
            Value::Filled(filled) => filled.requested,
        }
    }

    fn json(&self) -> Json {
        let mut row = Map::new();
        let mut put = |key: &str, value: Json| row.insert(key.to_owned(), value);
        let spec = &self.spec;
        put("case", spec.case.name().into());
        put("bytes", spec.bytes.into());
        if spec.is_mixed() {
            put("bytes_max", spec.bytes_max.into());
        }
        put("threads", spec.threads.into());
        if spec.case == Case::KeysOf {
            put("arenas", spec.arenas.into());
            put("live", spec.live.into());
        }
        put("contender", self.contender.into());
        if let Some(op) = self.op {
            put("op", op.into());
        }
        let short = |x: f64, digits: i32| {
            let scale = 10f64.powi(digits);
            (x * scale).round() / scale
        };
        match self.value {
            Value::Ns(ns) => put(
                "ns",
                json!({
                    "min": short(ns.min, 2), "median": short(ns.median, 2),
                    "p99": short(ns.p99, 2), "p999": short(ns.p999, 2),
                }),
            ),
            Value::Filled(filled) => {
                put("capacity", filled.capacity.into());
                put("requested_over_capacity", short(filled.requested, 4).into());
                put("blocks_over_capacity", short(filled.blocks, 4).into())
            }
        };
        Json::Object(row)
    }
}

/// Three digits or so.
fn digits(ns: f64) -> String {
    let places = if ns < 10.0 { 2 } else { usize::from(ns < 100.0) };
    format!("{ns:.places$}")
}

/// Lines of cells, the first column to the left and the others to the right.
fn aligned(lines: &[Vec<String>]) -> String {
    let columns = lines.iter().map(Vec::len).max().unwrap_or(0);
    let width = |c: usize| lines.iter().filter_map(|l| l.get(c)).map(|t| t.chars().count()).max();
    let widths: Vec<usize> = (0..columns).map(|c| width(c).unwrap_or(0)).collect();
    let mut text = String::new();
    for line in lines {
        for (c, (cell, width)) in line.iter().zip(&widths).enumerate() {
            let _ = match c {
                0 => write!(text, "  {cell:<width$}"),
                _ => write!(text, "  {cell:>width$}"),
            };
        }
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report() -> Report {
        let mut report = Report::new(&[Group::Threads], 7);
        for (spec, ns) in Group::Threads.specs().iter().zip([2.0, 1.0, 1.1]) {
            let mut row = |contender, ns| {
                let value = Value::Ns(Ns { min: ns - 0.125, median: ns, p99: ns, p999: ns });
                report.rows.push(Row { spec: *spec, contender, op: None, value });
            };
            row("floor-vec", ns / 2.0);
            row("pool", ns);
            row("system", ns * 10.0);
            row("mimalloc", ns * 5.0);
        }
        report
    }

    #[test]
    fn the_object_has_its_fields() {
        let json = report().json();
        assert_eq!(json["bench"], "threads");
        let row = &json["rows"][5];
        let expected = json!({
            "case": "pair", "bytes": 4096, "threads": 2, "contender": "pool",
            "ns": {"min": 0.88, "median": 1.0, "p99": 1.0, "p999": 1.0},
        });
        assert_eq!(*row, expected);
    }

    #[test]
    fn ratios_are_to_the_floor_and_to_the_best() {
        let text = report().text();
        let line = text.lines().filter(|l| l.starts_with("  pool")).nth(1).expect("two threads");
        let cells: Vec<&str> = line.split_whitespace().collect();
        assert_eq!(cells, ["pool", "1.00", "0.88", "1.00", "1.00", "2.00", "0.20", "2.00"]);
        assert!(text.contains("× floor-vec  × mimalloc  speed-up"), "{text}");
    }
}
