//! `pinpool bench alloc|handoff|churn|threads`: the pool against floors, general allocators and other
//! pools. What is measured and how is in `contest/`.

use serde_json::Value;

use super::{
    Bench, Report,
    contest::{self, Group, METHOD, Options},
    figures::{Axis, Panel, Point, Unit},
    interrupted,
    report::Progress,
};
use crate::cli::{Failure, say, show_bytes};

/// Which cases to run and how long.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Repetitions for each contender and case [default: 11, with --quick 3]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1000))]
    reps: Option<u16>,
    /// Only these cases
    #[arg(long = "case", value_name = "NAME,..", value_delimiter = ',')]
    cases: Vec<String>,
    /// Only these contenders; ratios are to what is among them
    #[arg(long = "contender", value_name = "NAME,..", value_delimiter = ',')]
    contenders: Vec<String>,
}

/// One group of cases.
pub(crate) struct Contest(pub(crate) Group);

impl Bench for Contest {
    type Args = Args;

    fn name(&self) -> &'static str {
        self.0.name()
    }

    fn about(&self) -> Option<&'static str> {
        Some(match self.0 {
            Group::Alloc => {
                "Compare alloc + free with general allocators, other pools and the floor"
            }
            Group::Handoff => "Compare passing buffers from one thread to another",
            Group::Churn => "Compare a mix of sizes that come and go",
            Group::Threads => "Compare alloc + free on 1, 2 and 16 threads",
        })
    }

    fn method(&self) -> &'static str {
        METHOD
    }

    fn run(&self, args: &Args, quick: bool) -> Result<Report, Failure> {
        let options = Options {
            reps: args.reps.map_or_else(|| Options::default_reps(quick), usize::from),
            quick,
            cases: args.cases.clone(),
            contenders: args.contenders.clone(),
        };
        options.check(&[self.0]).map_err(Failure::Usage)?;
        let progress = Progress::new(1);
        let step = |what: &str, share: f64| {
            progress.at(what);
            progress.share(share);
            !interrupted()
        };
        let found = contest::run(&[self.0], &options, step).map_err(Failure::Failed)?;
        drop(progress);
        if !cfg!(feature = "rivals") {
            say("built without the feature `rivals`: most other allocators are left out");
        }
        Ok(Report { object: found.json(), text: found.text(), failures: Vec::new() })
    }

    fn panels(&self, object: &Value) -> Vec<Panel> {
        let mut panels: Vec<Panel> = Vec::new();
        for row in object["rows"].as_array().into_iter().flatten() {
            for (new, point) in figures_of(self.0, row) {
                match panels.iter_mut().find(|p| p.id == new.id) {
                    Some(panel) => panel.points.extend(point),
                    None => panels.push(Panel { points: Vec::from_iter(point), ..new }),
                }
            }
        }
        // A case with one size is no matter of sizes.
        for panel in panels.iter_mut().filter(|p| p.axis == Axis::Bytes) {
            if let [only] = panel.places()[..] {
                panel.title.push_str(&format!(", {}", panel.axis.show(only)));
                panel.axis = Axis::None;
            }
        }
        panels
    }
}

/// The figures of one row, each with the panel that it belongs into.
fn figures_of(group: Group, row: &Value) -> Vec<(Panel, Option<Point>)> {
    let text = |key: &str| row[key].as_str().unwrap_or_default();
    let number = |key: &str| row[key].as_f64().unwrap_or_default();
    let (case, contender, bytes) = (text("case"), text("contender"), number("bytes"));
    let op = row["op"].as_str();
    let id = op.map_or_else(|| case.to_owned(), |op| format!("{case}-{op}"));
    let panel = |title: &str, axis| Panel::new(&id, title, Unit::Time, axis, Vec::new());
    let time =
        |title: &str, axis, x| vec![(panel(title, axis), Point::of(contender, x, &row["ns"]))];
    match case {
        "pair" if group == Group::Threads => {
            let title = format!("One buffer of {} out and back", show_bytes(bytes as usize));
            let title = format!("{title}: time through pairs of all threads");
            time(&title, Axis::Threads, number("threads"))
        }
        "pair" => time("One buffer out and back", Axis::Bytes, bytes),
        "batch-lifo" => time("64 out and 64 back, the last first: a pair", Axis::Bytes, bytes),
        "batch-random" => time("64 out and 64 back, in random order: a pair", Axis::Bytes, bytes),
        "burst" => {
            let op = op.unwrap_or_default();
            time(&format!("1,024 out, then 1,024 back, each timed alone: {op}"), Axis::Bytes, bytes)
        }
        "handoff" => time("From thread to thread", Axis::Bytes, bytes),
        "keys-of" => {
            let arenas = number("arenas") as u64;
            let name = format!("{contender}, {arenas} arena{}", if arenas == 1 { "" } else { "s" });
            let point = Point::of(&name, number("live"), &row["ns"]);
            vec![(panel("The keys of a random live pointer", Axis::Live), point)]
        }
        "fill" => {
            let share = |id: &str, title: &str, key: &str| {
                let point = row[key].as_f64().map(|v| Point::single(contender, 0.0, v));
                (Panel::new(id, title, Unit::Share, Axis::None, Vec::new()), point)
            };
            vec![
                share(
                    "fill-requested",
                    "Part of the capacity that is out at the first failure, as asked",
                    "requested_over_capacity",
                ),
                share(
                    "fill-blocks",
                    "Part of the capacity that is out at the first failure, as blocks",
                    "blocks_over_capacity",
                ),
            ]
        }
        _ => {
            let range = format!(
                "{} to {}",
                show_bytes(bytes as usize),
                show_bytes(number("bytes_max") as usize)
            );
            time(&format!("1,024 live, a random one replaced, {range}"), Axis::None, 0.0)
        }
    }
}
