//! The common shape of what benches find: figures. Each bench gives the figures of its JSON object, this
//! run's or an old one's, and from them alone come plots, CSV, the report's tables and comparisons.

use serde_json::Value;

use super::report::{show_count, show_ns};
use crate::cli::show_bytes;

/// What a figure counts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Unit {
    /// Nanoseconds.
    Time,
    /// Nanoseconds a byte.
    TimePerByte,
    /// So many a second.
    Rate,
    /// A part of a whole, from 0 to 1.
    Share,
}

impl Unit {
    /// Its name in CSV.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Time => "ns",
            Self::TimePerByte => "ns/byte",
            Self::Rate => "1/s",
            Self::Share => "share",
        }
    }

    /// Whether more is better.
    pub(crate) fn more_is_better(self) -> bool {
        matches!(self, Self::Rate | Self::Share)
    }

    /// A round figure, at an axis.
    pub(crate) fn show_tick(self, value: f64) -> String {
        let text = self.show(value);
        let (number, unit) = text.split_once([' ', '/']).unwrap_or((&text, ""));
        // Only in a fraction do zeros say nothing.
        let number = match number.contains('.') {
            true => number.trim_end_matches('0').trim_end_matches('.'),
            false => number,
        };
        format!("{number}{}", &text[text.len() - unit.len() - usize::from(!unit.is_empty())..])
    }

    /// A figure as people write it.
    pub(crate) fn show(self, value: f64) -> String {
        match self {
            Self::Time => show_ns(value),
            Self::TimePerByte if value < 0.9995 => format!("{} ns/byte", digits(value)),
            Self::TimePerByte => format!("{}/byte", show_ns(value)),
            Self::Rate => format!("{}/s", short(value)),
            Self::Share => format!("{:.1} %", value * 100.0),
        }
    }
}

/// Three digits or so.
fn digits(value: f64) -> String {
    match value {
        _ if value >= 99.95 => show_count(value.round() as u64),
        _ if value >= 9.995 => format!("{value:.1}"),
        _ if value >= 0.9995 => format!("{value:.2}"),
        _ if value >= 0.0995 => format!("{value:.3}"),
        _ => format!("{value:.4}"),
    }
}

/// A count in thousands, millions.
fn short(value: f64) -> String {
    match value {
        _ if value >= 999_500.0 => format!("{} M", digits(value / 1e6)),
        _ if value >= 9_995.0 => format!("{} k", digits(value / 1e3)),
        _ => digits(value),
    }
}

/// What points of one contender differ in.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Axis {
    /// Nothing: there is one each.
    None,
    /// Bytes of a buffer or a message.
    Bytes,
    /// Threads.
    Threads,
    /// Live buffers.
    Live,
}

impl Axis {
    /// What it is, for a plot and a table.
    pub(crate) fn title(self) -> &'static str {
        match self {
            Self::None => "",
            Self::Bytes => "bytes",
            Self::Threads => "threads",
            Self::Live => "live buffers",
        }
    }

    /// A place on it as people write it.
    pub(crate) fn show(self, x: f64) -> String {
        match self {
            Self::None => String::new(),
            Self::Bytes => show_bytes(x as usize),
            Self::Threads | Self::Live => show_count(x as u64),
        }
    }
}

/// One contender at one place.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Point {
    pub(crate) contender: String,
    pub(crate) x: f64,
    pub(crate) median: f64,
    pub(crate) min: Option<f64>,
    pub(crate) p99: Option<f64>,
    pub(crate) p999: Option<f64>,
    pub(crate) max: Option<f64>,
}

impl Point {
    /// Reads an object with `median`, and `min`, `p99`, `p999` and `max` if it has them; `None` where
    /// nothing was measured.
    pub(crate) fn of(contender: &str, x: f64, spread: &Value) -> Option<Self> {
        let at = |key: &str| spread[key].as_f64();
        Some(Self {
            contender: contender.to_owned(),
            x,
            median: at("median")?,
            min: at("min"),
            p99: at("p99"),
            p999: at("p999"),
            max: at("max"),
        })
    }

    /// A figure that has no spread.
    pub(crate) fn single(contender: &str, x: f64, value: f64) -> Self {
        let contender = contender.to_owned();
        Self { contender, x, median: value, min: None, p99: None, p999: None, max: None }
    }

    /// The least and the most that is worth showing: to the 99th percentile, for the slowest of all says
    /// more of the machine.
    pub(crate) fn range(&self) -> (f64, f64) {
        (self.min.unwrap_or(self.median), self.p99.or(self.max).unwrap_or(self.median))
    }
}

/// Figures that belong into one plot.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Panel {
    /// Its name among the bench's, fit for a file.
    pub(crate) id: String,
    pub(crate) title: String,
    pub(crate) unit: Unit,
    pub(crate) axis: Axis,
    pub(crate) points: Vec<Point>,
}

impl Panel {
    /// Puts it together.
    pub(crate) fn new(id: &str, title: &str, unit: Unit, axis: Axis, points: Vec<Point>) -> Self {
        Self { id: id.to_owned(), title: title.to_owned(), unit, axis, points }
    }

    /// The contenders, in the order in which they come.
    pub(crate) fn contenders(&self) -> Vec<&str> {
        let mut names: Vec<&str> = Vec::new();
        for point in &self.points {
            if !names.contains(&point.contender.as_str()) {
                names.push(&point.contender);
            }
        }
        names
    }

    /// The places, in rising order.
    pub(crate) fn places(&self) -> Vec<f64> {
        let mut places: Vec<f64> = self.points.iter().map(|p| p.x).collect();
        places.sort_by(f64::total_cmp);
        places.dedup();
        places
    }

    /// One contender's point at a place.
    pub(crate) fn at(&self, contender: &str, x: f64) -> Option<&Point> {
        self.points.iter().find(|p| p.contender == contender && p.x == x)
    }
}

/// One bench's part of what is shown.
#[derive(Clone, Debug)]
pub(crate) struct Section {
    /// The bench.
    pub(crate) name: &'static str,
    pub(crate) method: &'static str,
    /// Its object, as `--json` prints it.
    pub(crate) object: Value,
    /// Its tables, for people.
    pub(crate) text: String,
    /// The figures of the object.
    pub(crate) panels: Vec<Panel>,
    pub(crate) failures: Vec<String>,
    /// Whether it ended before its time.
    pub(crate) partial: bool,
}

impl Section {
    /// Of a bench that could not run.
    pub(crate) fn failed(name: &'static str, why: String) -> Self {
        Self {
            name,
            method: "",
            object: serde_json::json!({ "bench": name, "rows": [], "failures": [why] }),
            text: why.clone(),
            panels: Vec::new(),
            failures: vec![why],
            partial: false,
        }
    }

    /// Where it ran, in one line.
    pub(crate) fn place(&self) -> String {
        place(&self.object)
    }
}

/// Where an object's bench ran, in one line.
pub(crate) fn place(object: &Value) -> String {
    let text = |key: &str| object[key].as_str().unwrap_or_default();
    let device = match (text("device"), text("transport")) {
        // The contest has no other.
        ("", _) | ("soft", _) => "software device".to_owned(),
        (name, transport) => format!("device {name} ({transport})"),
    };
    let sizes = object["page_sizes"].as_array().into_iter().flatten();
    // Rows of a start-up have it each, and all the same.
    let sizes = sizes.chain([&object["page_size"], &object["rows"][0]["page_size"]]);
    let sizes = sizes.filter_map(Value::as_u64);
    let pages: Vec<String> = sizes.map(|n| show_bytes(n as usize)).collect();
    let pages = match pages.is_empty() {
        true => String::new(),
        false => format!(" · pages of {}", pages.join(" and ")),
    };
    format!("{device} · Linux {} · {} × {}{pages}", text("kernel"), object["cpus"], text("cpu"))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn figures_are_shown_short() {
        for (unit, value, text) in [
            (Unit::Time, 1234.0, "1.23 µs"),
            (Unit::TimePerByte, 0.01234, "0.0123 ns/byte"),
            (Unit::TimePerByte, 1234.0, "1.23 µs/byte"),
            (Unit::Rate, 1234.0, "1 234/s"),
            (Unit::Rate, 123_456.0, "123 k/s"),
            (Unit::Rate, 1_234_567.0, "1.23 M/s"),
            (Unit::Share, 0.9349, "93.5 %"),
        ] {
            assert_eq!(unit.show(value), text);
        }
        for (unit, value, text) in [
            (Unit::Time, 2000.0, "2 µs"),
            (Unit::Time, 0.5, "0.5 ns"),
            (Unit::Rate, 200.0, "200/s"),
            (Unit::Rate, 20_000.0, "20 k/s"),
            (Unit::Rate, 2_000.0, "2 000/s"),
            (Unit::TimePerByte, 0.5, "0.5 ns/byte"),
            (Unit::Share, 0.6, "60 %"),
        ] {
            assert_eq!(unit.show_tick(value), text);
        }
    }

    #[test]
    fn a_point_needs_a_median_and_nothing_more() {
        assert_eq!(Point::of("a", 1.0, &json!(null)), None);
        let point = Point::of("a", 1.0, &json!({"median": 2, "p99": 3.5})).expect("a point");
        assert_eq!((point.range(), point.p999), ((2.0, 3.5), None));
    }

    #[test]
    fn the_place_names_device_kernel_and_pages() {
        let object = json!({"device": "rxe0", "transport": "rxe", "kernel": "6.1", "cpu": "C",
            "cpus": 2, "page_size": 4096});
        assert_eq!(place(&object), "device rxe0 (rxe) · Linux 6.1 · 2 × C · pages of 4 KiB");
        let object = json!({"kernel": "6.1", "cpu": "C", "cpus": 2, "page_sizes": [4096, 2097152]});
        assert!(place(&object).starts_with("software device"), "{}", place(&object));
        assert!(place(&object).ends_with("pages of 4 KiB and 2 MiB"), "{}", place(&object));
    }
}
