//! What the tests of the command line share.
#![allow(dead_code)] // each test program uses a part

use std::process::{Command, Output};

use serde_json::Value;

/// The program, about to run.
pub(crate) fn pinpool(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pinpool"));
    command.args(args);
    command
}

/// What it left.
pub(crate) struct Left {
    pub(crate) code: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl From<Output> for Left {
    fn from(out: Output) -> Self {
        let text = |bytes| String::from_utf8(bytes).expect("UTF-8");
        Self { code: out.status.code(), stdout: text(out.stdout), stderr: text(out.stderr) }
    }
}

/// Runs it to its end, with both outputs in pipes.
pub(crate) fn run(args: &[&str]) -> Left {
    pinpool(args).output().expect("run").into()
}

impl Left {
    /// The one object that is all of stdout.
    #[track_caller]
    pub(crate) fn object(&self) -> Value {
        let v: Value = serde_json::from_str(&self.stdout)
            .unwrap_or_else(|e| panic!("{e} in {:?}; stderr: {}", self.stdout, self.stderr));
        assert!(v.is_object());
        v
    }

    /// Holds it to an answer to an unfit call: exit code 2 and one sentence on stderr that names `what`.
    #[track_caller]
    pub(crate) fn refused(&self, what: &str) {
        assert_eq!(self.code, Some(2), "{}", self.stderr);
        assert_eq!(self.stdout, "");
        assert_eq!(self.stderr.lines().count(), 1, "{}", self.stderr);
        assert!(self.stderr.contains(what), "{what:?} in {:?}", self.stderr);
    }
}

/// The keys of an object, in order.
pub(crate) fn keys(object: &Value) -> Vec<&str> {
    object.as_object().expect("an object").keys().map(String::as_str).collect()
}

/// Holds the object of a registration bench in which nothing failed to its form and to what must agree
/// in it. `sizes` are the rows, in order.
#[track_caller]
pub(crate) fn check_registration(v: &Value, sizes: &[u64]) {
    const FIRST: [&str; 8] =
        ["bench", "device", "transport", "kernel", "page_size", "arenas", "reg_mr_calls", "rows"];
    assert_eq!(keys(v)[..FIRST.len()], FIRST);
    assert_eq!(v["bench"], "registration");
    for text in ["device", "transport", "kernel", "cpu"] {
        assert!(v[text].as_str().is_some_and(|s| !s.is_empty()), "{text}");
    }
    assert_eq!(v["arenas"], v["reg_mr_calls"], "each arena is registered once");
    assert_eq!(v["failures"], Value::Array(Vec::new()));
    assert_eq!(v["before"], v["after"], "all was given back");
    let rows = v["rows"].as_array().expect("rows");
    assert_eq!(rows.iter().map(|r| r["bytes"].as_u64().expect("bytes")).collect::<Vec<_>>(), sizes);
    rows.iter().for_each(check_row);
}

#[track_caller]
fn check_row(row: &Value) {
    assert_eq!(keys(row)[..5], ["bytes", "per_call_ns", "pool_ns", "ratio", "errors"]);
    assert_eq!((&row["errors"], &row["verified"]), (&0.into(), &true.into()), "{row}");
    let number = |v: &Value| v.as_f64().unwrap_or_else(|| panic!("no number in {row}"));
    for side in ["per_call_ns", "pool_ns"] {
        let side = &row[side];
        assert_eq!(keys(side)[..3], ["min", "median", "p99"]);
        let [min, median, p99] = ["min", "median", "p99"].map(|k| number(&side[k]));
        assert!(0.0 < min && min <= median && median <= p99, "{row}");
        assert!(number(&side["samples"]) >= 1.0);
    }
    let ratio = number(&row["per_call_ns"]["median"]) / number(&row["pool_ns"]["median"]);
    let shown = number(&row["ratio"]);
    // All three are rounded to a tenth.
    assert!((shown / ratio - 1.0).abs() < 0.05 || (shown - ratio).abs() < 0.1, "{row}");
}

/// Holds the object of a transfer bench in which nothing failed to its form. `sizes` are in order.
#[track_caller]
pub(crate) fn check_transfer(v: &Value, sizes: &[u64]) {
    const WAYS: [&str; 4] = ["pool", "register-per-message", "registration-cache", "bounce-buffer"];
    assert_eq!(v["bench"], "transfer");
    for text in ["device", "transport", "kernel", "cpu"] {
        assert!(v[text].as_str().is_some_and(|s| !s.is_empty()), "{text}");
    }
    assert_eq!(v["failures"], Value::Array(Vec::new()));
    let rows = v["rows"].as_array().expect("rows");
    let found = rows.iter().map(|r| (r["bytes"].as_u64(), r["contender"].as_str()));
    let expected = sizes.iter().flat_map(|&s| WAYS.map(|w| (Some(s), Some(w))));
    assert_eq!(found.collect::<Vec<_>>(), expected.collect::<Vec<_>>());
    for row in rows {
        assert_eq!(row["errors"], 0, "{row}");
        let number = |v: &Value| v.as_f64().unwrap_or_else(|| panic!("no number in {row}"));
        assert!(number(&row["messages"]) >= 14.0, "{row}");
        for (side, parts) in [
            ("messages_per_s", &["min", "median", "max"][..]),
            ("cpu_ns_per_byte", &["min", "median", "max"]),
            ("ns", &["min", "median", "p99", "p999"]),
        ] {
            assert_eq!(keys(&row[side]), parts, "{row}");
            let parts: Vec<f64> = parts.iter().map(|p| number(&row[side][p])).collect();
            assert!(parts.is_sorted() && parts[1] > 0.0, "{row}");
        }
        let look_ups = row["look_ups"].as_u64();
        assert_eq!(look_ups.is_some(), row["contender"] == "registration-cache", "{row}");
        assert!(row["hits"].as_u64() <= look_ups, "{row}");
    }
}
