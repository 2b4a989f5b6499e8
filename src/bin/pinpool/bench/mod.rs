//! The benches, one file each: an `Args` for its flags and a `run` that measures and prints.
//!
//! To add one: a variant in [`Bench`], an arm in [`run`]. What they share is in `report.rs`.

mod alloc;
mod contest;
mod growth;
mod lease;
mod registration;
pub(crate) mod report;
mod startup;

use std::{
    process,
    sync::atomic::{AtomicBool, Ordering::Relaxed},
};

use clap::Subcommand;

use self::contest::Group;
use crate::cli::Failure;

/// What to measure.
#[derive(Subcommand)]
pub(crate) enum Bench {
    Registration(registration::Args),
    Startup(startup::Args),
    Growth(growth::Args),
    Lease(lease::Args),
    /// Compare alloc + free with general allocators, other pools and the floor
    Alloc(alloc::Args),
    /// Compare passing buffers from one thread to another
    Handoff(alloc::Args),
    /// Compare a mix of sizes that come and go
    Churn(alloc::Args),
    /// Compare alloc + free on 1, 2 and 16 threads
    Threads(alloc::Args),
}

/// Runs one bench. Its result is on stdout when this returns, also where something failed.
pub(crate) fn run(bench: &Bench) -> Result<(), Failure> {
    on_interrupt()?;
    match bench {
        Bench::Registration(args) => registration::run(args),
        Bench::Startup(args) => startup::run(args),
        Bench::Growth(args) => growth::run(args),
        Bench::Lease(args) => lease::run(args),
        Bench::Alloc(args) => alloc::run(Group::Alloc, args),
        Bench::Handoff(args) => alloc::run(Group::Handoff, args),
        Bench::Churn(args) => alloc::run(Group::Churn, args),
        Bench::Threads(args) => alloc::run(Group::Threads, args),
    }
}

static INTERRUPTED: AtomicBool = AtomicBool::new(false);

/// Whether the user wants it to end. Benches look between samples, give everything back and return
/// [`Failure::Interrupted`].
pub(crate) fn interrupted() -> bool {
    INTERRUPTED.load(Relaxed)
}

fn on_interrupt() -> Result<(), Failure> {
    ctrlc::set_handler(|| {
        if INTERRUPTED.swap(true, Relaxed) {
            // Asked twice: what is registered goes with the process.
            process::exit(130);
        }
    })
    .map_err(|e| Failure::Failed(format!("no handler for interrupts could be set: {e}")))
}
