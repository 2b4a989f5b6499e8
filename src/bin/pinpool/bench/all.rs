//! `pinpool bench all`: every bench, one after the other, in one report.

use clap::{ArgMatches, Args as _, Command, FromArgMatches};

use super::{
    AnyBench, BENCHES,
    figures::Section,
    interrupted,
    output::{self, Output, Ready},
    report,
};
use crate::cli::{DeviceArgs, Failure};

pub(super) const NAME: &str = "all";

/// Run every bench with its defaults, one after the other, and report them together
#[derive(clap::Args)]
struct Args {
    #[command(flatten)]
    device: DeviceArgs,
}

const METHOD: &str = "\
Each bench's own help states its method and bias; the report has them beside the figures. Benches that \
compare allocators use the software device whatever --device says: no device has a part in what they \
measure. One that fails does not keep the others from running. The files of --html and --plot are \
written anew after each bench, and marked as partial until the last.";

/// How it is called.
pub(super) fn command() -> Command {
    let command = Args::augment_args(Command::new(NAME));
    Output::augment_args(command.after_long_help(format!("{METHOD}\n\n{}", output::NOTE)))
}

/// Runs all, and hands the results out.
pub(super) fn run(matches: &ArgMatches, output: Ready) -> Result<(), Failure> {
    let args = Args::from_arg_matches(matches).map_err(|e| Failure::Usage(e.to_string()))?;
    // An unfit call is answered before anything is measured.
    args.device.open()?;
    let mut sections = Vec::new();
    for (i, bench) in BENCHES.iter().enumerate() {
        if interrupted() {
            break;
        }
        report::set_stage(format!("{} of {}, {}", i + 1, BENCHES.len(), bench.name()));
        sections.push(section(*bench, &args.device, output.quick()));
        output.files(&sections, &names(i + 1))?;
    }
    let done = sections.len();
    output.all(&sections, &names(done))
}

fn names(from: usize) -> Vec<&'static str> {
    BENCHES[from..].iter().map(|b| b.name()).collect()
}

/// One bench's result; where it could not run, that is its result.
fn section(bench: &dyn AnyBench, device: &DeviceArgs, quick: bool) -> Section {
    let command = bench.command().no_binary_name(true);
    let takes_device = command.get_arguments().any(|a| a.get_id() == "device");
    let flags = if takes_device { device.flags() } else { Vec::new() };
    let done = command
        .try_get_matches_from(flags)
        .map_err(|e| Failure::Usage(e.to_string()))
        .and_then(|matches| bench.section(&matches, quick));
    done.unwrap_or_else(|failure| {
        Section::failed(bench.name(), format!("{}: {}", bench.name(), failure.text()))
    })
}
