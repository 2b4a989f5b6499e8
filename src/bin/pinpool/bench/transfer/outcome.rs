//! What a transfer bench came to: rows, the table, the object, and the figures of an object.

use serde_json::{Map, Value, json};

use super::ways::Needs;
use crate::{
    bench::{
        device::show_pages,
        facts::Subject,
        figures::{Axis, Panel, Point, Unit},
        report::{Summary, Table, rounded, show_count, show_ns},
    },
    cli::show_bytes,
};

/// What one way came to at one size.
pub(super) struct Row {
    pub(super) bytes: usize,
    pub(super) way: &'static str,
    /// Nanoseconds of each message.
    pub(super) ns: Vec<f64>,
    /// Messages a second, of each turn.
    pub(super) rates: Vec<f64>,
    /// Nanoseconds of processor time a byte, of each turn.
    pub(super) cpu: Vec<f64>,
    /// Look-ups that hit, and all of them.
    pub(super) hits: Option<(u64, u64)>,
    pub(super) errors: u64,
    first_error: Option<String>,
}

impl Row {
    pub(super) fn new(bytes: usize, way: &'static str) -> Self {
        let (ns, rates, cpu) = Default::default();
        Self { bytes, way, ns, rates, cpu, hits: None, errors: 0, first_error: None }
    }

    /// Counts a failed message.
    pub(super) fn error(&mut self, e: String) {
        self.errors += 1;
        self.first_error.get_or_insert(e);
    }

    pub(super) fn failure(&self) -> Option<String> {
        let (size, way) = (show_bytes(self.bytes), self.way);
        let first = self.first_error.as_ref()?;
        Some(format!("{size}, {way}: {} messages failed, first: {first}", self.errors))
    }

    fn json(&self) -> Value {
        let spread = |samples: &[f64], digits: fn(f64) -> Value| {
            let s = Summary::of(samples)?;
            Some(json!({ "min": digits(s.min), "median": digits(s.median), "max": digits(s.max) }))
        };
        let mut row = Map::new();
        let mut put = |key: &str, value: Value| row.insert(key.to_owned(), value);
        put("bytes", self.bytes.into());
        put("contender", self.way.into());
        put("messages", self.ns.len().into());
        put("messages_per_s", json!(spread(&self.rates, rounded)));
        put("cpu_ns_per_byte", json!(spread(&self.cpu, |v| json!((v * 1e4).round() / 1e4))));
        put("ns", json!(Summary::of(&self.ns).map(|s| s.json())));
        if let Some((hits, look_ups)) = self.hits {
            put("hits", hits.into());
            put("look_ups", look_ups.into());
        }
        put("errors", self.errors.into());
        Value::Object(row)
    }
}

/// All that is to be said.
pub(super) struct Outcome {
    pub(super) subject: Subject,
    pub(super) page_size: usize,
    pub(super) seconds: f64,
    pub(super) needs: Needs,
    pub(super) rows: Vec<Row>,
    pub(super) failures: Vec<String>,
}

impl Outcome {
    /// One object, for programs.
    pub(super) fn json(&self) -> Value {
        let own = json!({
            "page_size": self.page_size,
            "row_seconds": self.seconds,
            "receive_bytes": self.needs.longest,
            "buffers": self.needs.buffers,
            "cached": self.needs.cached,
            "rows": self.rows.iter().map(Row::json).collect::<Vec<_>>(),
            "failures": self.failures,
        });
        self.subject.object("transfer", own)
    }

    /// The facts and a table, for people.
    pub(super) fn text(&self) -> String {
        let Self { subject, .. } = self;
        let mut table = Table::new(&[
            "\nmessage",
            "\ncontender",
            "messages/s\nmedian",
            "× register-\nper-message",
            "CPU\nns/byte",
            "\nmin",
            "\np50",
            "\np99",
            "\np99.9",
            "\nhits",
            "\nerrors",
        ]);
        self.rows.iter().for_each(|row| table.row(self.cells(row)));
        format!(
            "{subject}\npages   {}\n\n{table}\n\
             one message at a time; rates and CPU are medians of turns; every byte compared;\n\
             received into {}; {} buffers at each end, {} ranges cached",
            show_pages(self.page_size, subject.environment.thp.as_ref()),
            show_bytes(self.needs.longest),
            self.needs.buffers,
            self.needs.cached,
        )
    }

    fn cells(&self, row: &Row) -> Vec<String> {
        let none = || "-".to_owned();
        let rate = |r: &Row| Summary::of(&r.rates).map(|s| s.median);
        let base =
            self.rows.iter().find(|r| r.bytes == row.bytes && r.way == super::ways::PER_MESSAGE);
        let ratio = rate(row).zip(base.and_then(rate)).map(|(a, b)| format!("{:.2}", a / b));
        let cpu = Summary::of(&row.cpu).map(|s| format!("{:.3}", s.median));
        let ns = match Summary::of(&row.ns) {
            Some(s) => [s.min, s.median, s.p99, s.p999].map(show_ns),
            None => [(); 4].map(|()| none()),
        };
        let hits = row.hits.filter(|(_, all)| *all > 0);
        let hits = hits.map(|(hits, all)| format!("{:.0} %", hits as f64 * 100.0 / all as f64));
        let mut cells = vec![
            show_bytes(row.bytes),
            row.way.to_owned(),
            rate(row).map_or_else(none, |r| show_count(r.round() as u64)),
            ratio.unwrap_or_else(none),
            cpu.unwrap_or_else(none),
        ];
        cells.extend(ns);
        cells.extend([hits.unwrap_or_default(), row.errors.to_string()]);
        cells
    }
}

/// The figures of such an object.
pub(super) fn panels(object: &Value) -> Vec<Panel> {
    let points = |key: &str| {
        let rows = object["rows"].as_array().into_iter().flatten();
        rows.filter_map(|row| {
            let x = row["bytes"].as_f64()?;
            Point::of(row["contender"].as_str()?, x, &row[key])
        })
        .collect()
    };
    let panel = |id, title, key, unit| Panel::new(id, title, unit, Axis::Bytes, points(key));
    vec![
        panel("rate", "Messages a second, one at a time", "messages_per_s", Unit::Rate),
        panel("time", "Time of a message", "ns", Unit::Time),
        panel("cpu", "Processor time a byte", "cpu_ns_per_byte", Unit::TimePerByte),
    ]
}
