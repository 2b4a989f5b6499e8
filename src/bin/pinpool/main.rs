//! The `pinpool` command line: looks the machine at hand over, measures what a pool saves on it,
//! puts one under load for hours, and looks into one in another process.
//!
//! Results go to stdout, everything else to stderr. The exit code is 0 when all went well, 1 when
//! something failed, 2 when the call was wrong or the device is not there, 130 after an interrupt.

mod bench;
mod cli;
mod doctor;
mod soak;
mod top;

use std::process::ExitCode;

use crate::cli::{Cli, Command, Failure};

fn main() -> ExitCode {
    match Cli::read().and_then(|cli| run(&cli.command)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report(),
    }
}

fn run(command: &Command) -> Result<(), Failure> {
    match command {
        Command::Doctor(args) => doctor::run(args),
        Command::Bench(bench) => bench::run(bench),
        Command::Soak(args) => soak::run(args),
        Command::Top(args) => top::run(args),
    }
}
