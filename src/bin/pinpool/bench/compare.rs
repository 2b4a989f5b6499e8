//! What got slower since an older report.

use std::{fs, path::Path};

use serde_json::{Value, json};

use super::{
    figures::{Panel, Section, Unit, place},
    panels_of,
    report::Table,
};

/// Medians that differ by less are called equal.
const LEAST: f64 = 1.10;
/// Where both have a minimum, it must have got worse by this as well: a disturbed machine spoils medians,
/// and hardly ever every sample.
const LEAST_OF_MIN: f64 = 1.05;

/// An older report.
pub(super) struct Old {
    file: String,
    /// Each bench's object, with its figures.
    objects: Vec<(Value, Vec<Panel>)>,
}

impl Old {
    /// Reads what `--json` printed, of one bench or of all.
    pub(super) fn read(path: &Path) -> Result<Self, String> {
        let file = path.display().to_string();
        let text = fs::read_to_string(path).map_err(|e| format!("{file} cannot be read: {e}"))?;
        let object: Value =
            serde_json::from_str(&text).map_err(|e| format!("{file} is no JSON: {e}"))?;
        let all = match object["benches"].as_array() {
            Some(all) => all.clone(),
            None => vec![object],
        };
        let objects = all.into_iter().filter_map(|o| Some((panels_of(&o)?, o)));
        let objects: Vec<_> = objects.map(|(panels, o)| (o, panels)).collect();
        match objects.is_empty() {
            true => Err(format!("{file} holds no bench's output; --json prints such a file")),
            false => Ok(Self { file, objects }),
        }
    }

    /// Compares what both have.
    pub(super) fn compare(&self, sections: &[Section]) -> Comparison {
        let mut found = Comparison {
            file: self.file.clone(),
            elsewhere: None,
            compared: 0,
            slower: Vec::new(),
            faster: 0,
        };
        for section in sections {
            let old = self.objects.iter().find(|(o, _)| o["bench"] == section.name);
            let Some((object, old)) = old else { continue };
            let (was, is) = (place(object), section.place());
            if was != is {
                found.elsewhere = Some(format!("{}: {was}; now {is}", section.name));
            }
            for panel in &section.panels {
                if let Some(old) = old.iter().find(|p| p.id == panel.id && p.unit == panel.unit) {
                    found.panel(section.name, old, panel);
                }
            }
        }
        // The worst first.
        found.slower.sort_by(|a, b| b.factor.total_cmp(&a.factor));
        found
    }
}

/// A figure that got worse.
struct Slower {
    bench: &'static str,
    panel: String,
    contender: String,
    x: f64,
    place: String,
    unit: Unit,
    old: f64,
    new: f64,
    factor: f64,
}

/// What came of it.
pub(super) struct Comparison {
    file: String,
    /// Where a bench ran when that is not where it ran now.
    elsewhere: Option<String>,
    compared: usize,
    slower: Vec<Slower>,
    faster: usize,
}

impl Comparison {
    fn panel(&mut self, bench: &'static str, old: &Panel, new: &Panel) {
        // By how much it got worse; below 1 where it got better.
        let worse = |was: f64, is: f64| match new.unit.more_is_better() {
            true => was / is,
            false => is / was,
        };
        for point in &new.points {
            let Some(before) = old.at(&point.contender, point.x) else { continue };
            self.compared += 1;
            let factor = worse(before.median, point.median);
            let of_min = match (before.min, point.min) {
                (Some(was), Some(is)) if !new.unit.more_is_better() => worse(was, is),
                _ => factor,
            };
            if factor >= LEAST && of_min >= LEAST_OF_MIN {
                self.slower.push(Slower {
                    bench,
                    panel: new.id.clone(),
                    contender: point.contender.clone(),
                    x: point.x,
                    place: new.axis.show(point.x),
                    unit: new.unit,
                    old: before.median,
                    new: point.median,
                    factor,
                });
            } else if 1.0 / factor >= LEAST {
                self.faster += 1;
            }
        }
    }

    /// One sentence on the whole.
    pub(super) fn summary(&self) -> String {
        let percent = (LEAST - 1.0) * 100.0;
        let mut text = format!(
            "Compared with {}: of {} figures {} got slower by more than {percent:.0} %, {} faster.",
            self.file,
            self.compared,
            self.slower.len(),
            self.faster,
        );
        if let Some(elsewhere) = &self.elsewhere {
            text.push_str(&format!(" It is not from the same place: {elsewhere}."));
        }
        text
    }

    /// What got slower, the worst first: bench and figure, contender, place, before, now, factor.
    pub(super) fn rows(&self) -> impl Iterator<Item = [String; 6]> {
        self.slower.iter().map(|s| {
            [
                format!("{} {}", s.bench, s.panel),
                s.contender.clone(),
                s.place.clone(),
                s.unit.show(s.old),
                s.unit.show(s.new),
                format!("{:.2}", s.factor),
            ]
        })
    }

    /// The heads of [`rows`](Comparison::rows).
    pub(super) const HEADS: [&str; 6] =
        ["figure", "contender", "at", "before", "now", "times slower"];

    /// All of it as text.
    pub(super) fn lines(&self) -> Vec<String> {
        let mut lines = vec![self.summary()];
        if !self.slower.is_empty() {
            let mut table = Table::new(&Self::HEADS);
            self.rows().for_each(|row| table.row(row.to_vec()));
            lines.extend(table.to_string().lines().map(str::to_owned));
        }
        lines
    }

    /// All of it for programs.
    pub(super) fn json(&self) -> Value {
        let slower = |s: &Slower| {
            json!({
                "bench": s.bench,
                "figure": s.panel,
                "contender": s.contender,
                "x": s.x,
                "unit": s.unit.name(),
                "old": s.old,
                "new": s.new,
                "factor": (s.factor * 1e3).round() / 1e3,
            })
        };
        json!({
            "with": self.file,
            "elsewhere": self.elsewhere,
            "compared": self.compared,
            "slower": self.slower.iter().map(slower).collect::<Vec<_>>(),
            "faster": self.faster,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::figures::{Axis, Point};

    fn point(contender: &str, min: f64, median: f64) -> Point {
        Point { min: Some(min), ..Point::single(contender, 4096.0, median) }
    }

    fn compared(unit: Unit, old: Vec<Point>, new: Vec<Point>) -> Comparison {
        let panel = |points| Panel::new("time", "", unit, Axis::Bytes, points);
        let (file, elsewhere, slower) = ("old.json".to_owned(), None, Vec::new());
        let mut found = Comparison { file, elsewhere, compared: 0, slower, faster: 0 };
        found.panel("transfer", &panel(old), &panel(new));
        found
    }

    #[test]
    fn only_what_got_clearly_worse_is_slower() {
        let old = ["a", "b", "c", "d"].map(|c| point(c, 10.0, 20.0)).to_vec();
        let new = vec![
            point("a", 15.0, 30.0),
            // Its samples are as fast as ever.
            point("b", 10.0, 30.0),
            point("c", 10.0, 21.0),
            point("d", 5.0, 10.0),
            point("new", 1.0, 1.0),
        ];
        let found = compared(Unit::Time, old, new);
        assert_eq!((found.compared, found.faster, found.slower.len()), (4, 1, 1));
        let row = found.rows().next().expect("a row");
        assert_eq!(row, ["transfer time", "a", "4 KiB", "20.0 ns", "30.0 ns", "1.50"]);
    }

    #[test]
    fn of_rates_less_is_slower() {
        let found = compared(
            Unit::Rate,
            vec![point("a", 90.0, 100.0), point("b", 90.0, 100.0)],
            vec![point("a", 45.0, 50.0), point("b", 150.0, 200.0)],
        );
        assert_eq!((found.slower.len(), found.faster), (1, 1));
        assert_eq!(found.slower[0].factor, 2.0);
    }
}
