//! The benches, one file each: an `Args` for its own flags and a [`Bench`] that measures.
//!
//! To add one: a file with both, and its entry in [`BENCHES`]. A bench gives one JSON object and a table
//! for people, and says which figures the object holds (`figures.rs`); all that is made of figures, and the
//! flags for it, is done here and in `output.rs` for all alike.

mod all;
mod compare;
mod contest;
mod contests;
mod csv;
pub(crate) mod device;
mod facts;
mod figures;
mod growth;
mod guards;
mod html;
mod lease;
mod output;
mod peer;
mod plot;
mod registration;
pub(crate) mod report;
mod startup;
mod transfer;

use std::{
    process,
    sync::atomic::{AtomicBool, Ordering::Relaxed},
};

use clap::{ArgMatches, Args, Command, Error, FromArgMatches, Subcommand, error::ErrorKind};
use serde_json::Value;

use self::{
    contest::Group,
    contests::Contest,
    figures::{Panel, Section},
    output::Output,
};
use crate::cli::Failure;

/// All benches, in the order of `bench all`.
static BENCHES: [&dyn AnyBench; 10] = [
    &registration::Registration,
    &transfer::Transfer,
    &startup::Startup,
    &growth::Growth,
    &lease::Leases,
    &guards::GuardCosts,
    &Contest(Group::Alloc),
    &Contest(Group::Handoff),
    &Contest(Group::Churn),
    &Contest(Group::Threads),
];

/// What a bench is.
trait Bench: Sync {
    /// Its own flags; those of [`Output`] come to them. The first lines of their documentation tell on the
    /// command line what it measures.
    type Args: Args;

    /// Its name on the command line and in its object.
    fn name(&self) -> &'static str;

    /// What it measures, if its flags' documentation does not say.
    fn about(&self) -> Option<&'static str> {
        None
    }

    /// What a reader must know to judge the figures: method and bias.
    fn method(&self) -> &'static str;

    /// Measures. When [`interrupted`] it gives everything back, and what it has so far.
    fn run(&self, args: &Self::Args, quick: bool) -> Result<Report, Failure>;

    /// The figures of such an object as `run` gives.
    fn panels(&self, object: &Value) -> Vec<Panel>;
}

/// What a bench came to.
struct Report {
    /// For programs. `bench`, `kernel`, `cpu`, `cpus` and `rows` are in it, `device`, `transport` and
    /// `page_size` if it had a device.
    object: Value,
    /// Facts and tables, for people.
    text: String,
    /// What went wrong.
    failures: Vec<String>,
}

/// A [`Bench`] whatever its flags.
trait AnyBench: Sync {
    fn name(&self) -> &'static str;
    fn command(&self) -> Command;
    fn panels(&self, object: &Value) -> Vec<Panel>;
    fn section(&self, matches: &ArgMatches, quick: bool) -> Result<Section, Failure>;
}

impl<B: Bench> AnyBench for B {
    fn name(&self) -> &'static str {
        Bench::name(self)
    }

    fn command(&self) -> Command {
        let own = B::Args::augment_args(Command::new(Bench::name(self)));
        let own = self.about().into_iter().fold(own, |c, about| c.about(about));
        Output::augment_args(own.after_long_help(format!("{}\n\n{}", self.method(), output::NOTE)))
    }

    fn panels(&self, object: &Value) -> Vec<Panel> {
        Bench::panels(self, object)
    }

    fn section(&self, matches: &ArgMatches, quick: bool) -> Result<Section, Failure> {
        let args = B::Args::from_arg_matches(matches).map_err(|e| Failure::Usage(e.to_string()))?;
        let Report { mut object, text, failures } = self.run(&args, quick)?;
        let partial = interrupted();
        if partial {
            object["partial"] = true.into();
        }
        let panels = Bench::panels(self, &object);
        let (name, method) = (Bench::name(self), self.method());
        Ok(Section { name, method, object, text, panels, failures, partial })
    }
}

/// The bench that was asked for, with its flags.
pub(crate) struct Asked {
    name: String,
    matches: ArgMatches,
}

impl FromArgMatches for Asked {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, Error> {
        let missing = || Error::new(ErrorKind::MissingSubcommand);
        let (name, matches) = matches.subcommand().ok_or_else(missing)?;
        Ok(Self { name: name.to_owned(), matches: matches.clone() })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

impl Subcommand for Asked {
    fn augment_subcommands(command: Command) -> Command {
        let all = BENCHES.iter().map(|b| b.command()).chain([all::command()]);
        command.subcommands(all).subcommand_required(true).arg_required_else_help(true)
    }

    fn augment_subcommands_for_update(command: Command) -> Command {
        Self::augment_subcommands(command)
    }

    fn has_subcommand(name: &str) -> bool {
        name == all::NAME || BENCHES.iter().any(|b| b.name() == name)
    }
}

/// Runs one bench, or all. What it found is on stdout and in files when this returns, also where something
/// failed.
pub(crate) fn run(asked: &Asked) -> Result<(), Failure> {
    if contest::served().map_err(Failure::Failed)? {
        return Ok(());
    }
    let output = Output::from_arg_matches(&asked.matches)
        .map_err(|e| Failure::Usage(e.to_string()))
        .and_then(|flags| flags.ready())?;
    on_interrupt()?;
    if asked.name == all::NAME {
        return all::run(&asked.matches, output);
    }
    let bench = BENCHES.iter().find(|b| b.name() == asked.name);
    let bench = bench.ok_or_else(|| Failure::Usage(format!("there is no bench {}", asked.name)))?;
    output.one(bench.section(&asked.matches, output.quick())?)
}

/// The figures of an object that some bench made; `None` if none of ours did.
fn panels_of(object: &Value) -> Option<Vec<Panel>> {
    let name = object["bench"].as_str()?;
    Some(BENCHES.iter().find(|b| b.name() == name)?.panels(object))
}

static INTERRUPTED: AtomicBool = AtomicBool::new(false);

/// Whether the user wants it to end. Benches look between samples, give everything back and return what
/// they have.
pub(crate) fn interrupted() -> bool {
    INTERRUPTED.load(Relaxed)
}

pub(crate) fn on_interrupt() -> Result<(), Failure> {
    ctrlc::set_handler(|| {
        if INTERRUPTED.swap(true, Relaxed) {
            // Asked twice: what is registered goes with the process.
            process::exit(130);
        }
    })
    .map_err(|e| Failure::Failed(format!("no handler for interrupts could be set: {e}")))
}
