//! What the benches share on the way out: sample statistics, progress, and a table for people.

use std::{
    fmt,
    sync::Mutex,
    time::{Duration, Instant},
};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde_json::{Map, Value, json};

/// Order statistics of samples.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct Summary {
    pub(crate) samples: usize,
    pub(crate) min: f64,
    pub(crate) median: f64,
    pub(crate) p99: f64,
    pub(crate) p999: f64,
    pub(crate) max: f64,
}

impl Summary {
    /// Sums up; `None` without samples. Percentiles are by nearest rank, so each is a sample, and with
    /// fewer samples than it takes to tell, it is the slowest.
    pub(crate) fn of(samples: &[f64]) -> Option<Self> {
        let mut s = samples.to_vec();
        s.sort_unstable_by(f64::total_cmp);
        let n = s.len();
        let rank = |per_mille: usize| s[(n * per_mille).div_ceil(1000) - 1];
        (n > 0).then(|| Self {
            samples: n,
            min: s[0],
            median: (s[(n - 1) / 2] + s[n / 2]) / 2.0,
            p99: rank(990),
            p999: rank(999),
            max: s[n - 1],
        })
    }

    /// The statistics as an object, to a tenth of a nanosecond.
    pub(crate) fn json(&self) -> Map<String, Value> {
        let pairs =
            [("min", self.min), ("median", self.median), ("p99", self.p99), ("p999", self.p999)];
        pairs.into_iter().map(|(k, v)| (k.to_owned(), rounded(v))).collect()
    }
}

/// A number to one decimal, and without it where it is whole.
pub(crate) fn rounded(value: f64) -> Value {
    let tenths = (value * 10.0).round();
    if tenths % 10.0 == 0.0 { json!((tenths / 10.0) as i64) } else { json!(tenths / 10.0) }
}

/// Nanoseconds as people write them, in three or four digits.
pub(crate) fn show_ns(ns: f64) -> String {
    let (value, unit) = match ns {
        _ if ns < 999.5 => (ns, "ns"),
        _ if ns < 999_500.0 => (ns / 1e3, "µs"),
        _ if ns < 999_500_000.0 => (ns / 1e6, "ms"),
        _ => (ns / 1e9, "s"),
    };
    let decimals = if value < 9.995 { 2 } else { usize::from(value < 99.95) };
    format!("{value:.decimals$} {unit}")
}

/// Reads a number of seconds from the command line.
pub(crate) fn parse_seconds(text: &str) -> Result<f64, String> {
    let seconds = text.parse::<f64>().ok().filter(|s| (0.0..=3600.0).contains(s));
    seconds.ok_or_else(|| "it is no number of seconds from 0 to 3600".to_owned())
}

/// A whole number with its thousands apart.
pub(crate) fn show_count(n: u64) -> String {
    let digits = n.to_string();
    let mut out = String::new();
    for (i, c) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(' ');
        }
        out.push(c);
    }
    out
}

/// What reading the clock twice costs, at least.
pub(crate) fn clock_cost() -> Duration {
    let once = |_| {
        let start = Instant::now();
        start.elapsed()
    };
    (0..1000).map(once).min().unwrap_or_default()
}

/// How far it is, on stderr; silent unless that is a terminal. Nothing is drawn between two calls, so
/// none of it falls into a sample.
pub(crate) struct Progress {
    bar: ProgressBar,
    done: u64,
}

/// A step is counted in hundredths.
const PARTS: u64 = 100;

/// Which of several benches is under way.
static STAGE: Mutex<String> = Mutex::new(String::new());

/// Names, for all progress to come, which of several benches is under way.
pub(crate) fn set_stage(stage: String) {
    *STAGE.lock().unwrap_or_else(|e| e.into_inner()) = stage;
}

impl Progress {
    /// Starts to show progress over that many steps.
    pub(crate) fn new(steps: usize) -> Self {
        let target = ProgressDrawTarget::stderr();
        let bar = ProgressBar::with_draw_target(Some(steps as u64 * PARTS), target);
        let template = "{prefix}{bar:30} {percent:>3} %  {eta} left  {msg}";
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style);
        }
        let stage = STAGE.lock().unwrap_or_else(|e| e.into_inner());
        if !stage.is_empty() {
            bar.set_prefix(format!("{stage}  "));
        }
        Self { bar, done: 0 }
    }

    /// Names what is under way.
    pub(crate) fn at(&self, what: impl Into<String>) {
        self.bar.set_message(what.into());
    }

    /// Shows the share of the step that is done.
    pub(crate) fn share(&self, share: f64) {
        let part = (share.clamp(0.0, 1.0) * PARTS as f64) as u64;
        if self.done + part > self.bar.position() {
            self.bar.set_position(self.done + part);
        }
    }

    /// Something that shows the share of the step at hand, for another thread.
    pub(crate) fn shower(&self) -> impl FnMut(f64) + Send + 'static {
        let (bar, done) = (self.bar.clone(), self.done);
        move |share| bar.set_position(done + (share.clamp(0.0, 1.0) * PARTS as f64) as u64)
    }

    /// Ends a step.
    pub(crate) fn step_done(&mut self) {
        self.done += PARTS;
        self.bar.set_position(self.done);
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

/// A table: right-aligned columns under heads, whose lines are told apart by `\n`.
pub(crate) struct Table {
    head: Vec<Vec<String>>,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// Starts a table with these heads.
    pub(crate) fn new(heads: &[&str]) -> Self {
        let lines = heads.iter().map(|h| h.split('\n').count()).max().unwrap_or(0);
        let line = |i| heads.iter().map(move |h| h.split('\n').nth(i).unwrap_or("").to_owned());
        Self { head: (0..lines).map(|i| line(i).collect()).collect(), rows: Vec::new() }
    }

    /// Adds a row.
    pub(crate) fn row(&mut self, cells: Vec<String>) {
        self.rows.push(cells);
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let columns = self.head.first().map_or(0, Vec::len);
        let lines = || self.head.iter().chain(&self.rows);
        let width = |c: usize| {
            lines().filter_map(|l| l.get(c)).map(|t| t.chars().count()).max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..columns).map(width).collect();
        for line in lines() {
            let cells = line.iter().zip(&widths).map(|(cell, width)| format!("{cell:>width$}"));
            writeln!(f, "{}", cells.collect::<Vec<_>>().join("  ").trim_end())?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_samples_by_nearest_rank() {
        let samples: Vec<f64> = (1..=1000).rev().map(f64::from).collect();
        let s = Summary::of(&samples).expect("samples");
        let [min, median, p99, p999, max] = [1.0, 500.5, 990.0, 999.0, 1000.0];
        let expected = Summary { samples: 1000, min, median, p99, p999, max };
        assert_eq!(s, expected);
        let one = Summary::of(&[7.0]).expect("one");
        assert_eq!((one.min, one.median, one.p99, one.p999), (7.0, 7.0, 7.0, 7.0));
        let few = Summary::of(&[3.0, 1.0, 2.0]).expect("few");
        assert_eq!((few.median, few.p99), (2.0, 3.0));
        assert_eq!(Summary::of(&[]), None);
    }

    #[test]
    fn numbers_are_shown_short() {
        for (ns, text) in [
            (7.04, "7.04 ns"),
            (999.4, "999 ns"),
            (999.6, "1.00 µs"),
            (12_345.0, "12.3 µs"),
            (999_600.0, "1.00 ms"),
            (2e9, "2.00 s"),
        ] {
            assert_eq!(show_ns(ns), text);
        }
        assert_eq!(show_count(7), "7");
        assert_eq!(show_count(1_234_567), "1 234 567");
        assert_eq!((rounded(3.0), rounded(2.54)), (json!(3), json!(2.5)));
    }

    #[test]
    fn columns_line_up() {
        let mut t = Table::new(&["a\nb", "\nlong"]);
        t.row(vec!["1 µs".into(), "2".into()]);
        assert_eq!(t.to_string(), "   a\n   b  long\n1 µs     2\n");
    }
}
