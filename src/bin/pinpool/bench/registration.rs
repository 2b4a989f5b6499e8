//! `pinpool bench registration`: what registering a buffer for each use costs, against taking one from
//! a pool that was registered once.

mod outcome;
mod sides;

use std::time::{Duration, Instant};

use pinpool::{Device, PageSize, Pages};
use serde_json::Value;

use self::{
    outcome::{Held, Outcome, Row},
    sides::Sides,
};
use super::{
    Bench, Report,
    device::{GRANULE, NoThp, PageChoice, in_order, parse_granules},
    facts::Subject,
    figures::Panel,
    interrupted,
    peer::Peer,
    report::{self, Progress},
};
use crate::cli::{DeviceArgs, Failure, show_bytes};

/// Compare registering a buffer for each use with taking it from a pool.
///
/// For each size, in turns: `ibv_reg_mr` + `ibv_dereg_mr` of a buffer that is mapped and in memory, and
/// alloc + free on a pool that was registered when it was built.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    device: DeviceArgs,
    /// Buffer sizes, 4K to 64M, in whole 4 KiB
    #[arg(long, value_name = "SIZE,..", value_delimiter = ',', value_parser = parse_size)]
    #[arg(default_value = "4K,16K,64K,256K,1M,4M,16M,64M")]
    sizes: Vec<usize>,
    /// Turns for each size, at most; each gives 1 sample of either side
    #[arg(long = "samples", value_name = "N", default_value_t = 500)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=100_000))]
    turns: u32,
    /// Seconds after which a size has turns enough, once it has 15 [default: 2, with --quick 0.5]
    #[arg(long, value_name = "SECONDS", value_parser = report::parse_seconds)]
    row_seconds: Option<f64>,
    /// The pages of both sides
    #[arg(long, value_enum, default_value_t = PageChoice::Base)]
    pages: PageChoice,
}

const METHOD: &str = "\
Method: Both sides use one device, one PD, the same rights, and pages of one size that were mapped \
and faulted in beforehand; neither touches its bytes while it is timed. A per-call sample is one \
register + deregister, less the least cost of reading the clock. A pool sample is the mean of a batch \
of alloc + free, so long that the clock does not count; each alloc yields address, lkey and rkey. The \
sides take turns, one per-call sample and one batch, and the sizes are gone through 5 times. A call \
that fails is counted and not timed. Building the pool (mapping, faulting in, registering) is timed \
apart.

Bias: One thread, one buffer at a time. A batch keeps the pool's few lines in the caches; a per-call \
sample finds the kernel's code as a message finds it that comes after other work. Base pages are 4 KiB \
throughout (transparent hugepages are turned off for this process), as the memory is that programs \
register per call; on hugepages registering is cheaper, see --pages 2M. \
The pool's min and p99 are those of batch means and hide slow single calls. The per-call side leaves \
out what a program pays that also maps and touches its buffers anew. In an emulated guest both sides \
are emulated.

Proof: First, each size is written and read by RDMA through the keys of both sides, and the smallest \
once more at the end. What is registered and pinned before and after must be the same.";

const LARGEST: usize = 64 << 20;
/// How often all sizes are gone through, so that what disturbs the machine for a while does not fall on
/// one size alone.
const PASSES: usize = 5;
/// Turns that a size gets in each pass whatever time they take.
const LEAST_TURNS: usize = 3;
/// How long a batch takes at least.
const BATCH_TIME: Duration = Duration::from_micros(100);
/// ... and this many times what reading the clock costs.
const BATCH_CLOCKS: u32 = 200;
const MOST_PAIRS: u32 = 1 << 20;

fn parse_size(text: &str) -> Result<usize, String> {
    parse_granules(text, LARGEST)
}

impl Args {
    /// Whether a per-call buffer on hugepages would be a part of one.
    fn cuts_hugepages(&self) -> bool {
        self.sizes.iter().any(|s| !s.is_multiple_of(PageSize::Huge2M.bytes()))
    }
}

pub(crate) struct Registration;

impl Bench for Registration {
    type Args = Args;

    fn name(&self) -> &'static str {
        "registration"
    }

    fn method(&self) -> &'static str {
        METHOD
    }

    fn run(&self, args: &Args, quick: bool) -> Result<Report, Failure> {
        let device = args.device.open()?;
        let before = Held::now(&device);
        let mut run = Run::start(args, quick, &device)?;
        let rows = run.rows(args);
        let outcome = run.finish(&device, before, rows);
        Ok(Report { object: outcome.json(), text: outcome.table(), failures: outcome.failures })
    }

    fn panels(&self, object: &Value) -> Vec<Panel> {
        outcome::panels(object)
    }
}

/// The bench while it runs.
struct Run {
    sides: Sides,
    peer: Peer,
    clock: Duration,
    /// Why hugepages are not used, or should not be.
    note: Option<&'static str>,
    /// What a size takes.
    seconds: f64,
    /// Until this goes, if pages shall be small.
    _no_thp: Option<NoThp>,
}

impl Run {
    fn start(args: &Args, quick: bool, device: &Device) -> Result<Self, Failure> {
        let largest = args.sizes.iter().copied().max().unwrap_or(GRANULE);
        let note = outcome::fork_note(device).filter(|_| args.cuts_hugepages());
        let pages = match args.pages.pages() {
            Pages::Prefer(_) if note.is_some() => Pages::Base,
            pages => pages,
        };
        let no_thp = NoThp::for_pages(pages)?;
        let sides = Sides::build(device, largest, pages);
        let sides = sides.map_err(Failure::of)?;
        let peer = Peer::connect(device).map_err(Failure::Failed)?;
        let seconds = args.row_seconds.unwrap_or(if quick { 0.5 } else { 2.0 });
        Ok(Self { sides, peer, clock: report::clock_cost(), note, seconds, _no_thp: no_thp })
    }

    /// Measures each size, smallest first, and all of them again in each pass, until the user wants no
    /// more.
    fn rows(&mut self, args: &Args) -> Vec<Row> {
        let sizes = in_order(&args.sizes);
        let turns = args.turns as usize;
        let mut rows: Vec<Row> =
            sizes.into_iter().map(|bytes| Row::new(bytes, turns, turns)).collect();
        let mut progress = Progress::new(rows.len() * (1 + PASSES));
        for row in &mut rows {
            progress.at(format!("checking data, {}", show_bytes(row.bytes)));
            self.verify(row);
            progress.step_done();
        }
        for pass in 0..PASSES {
            for row in &mut rows {
                progress.at(format!("timing, {}", show_bytes(row.bytes)));
                self.pass(row, turns * (pass + 1) / PASSES, &progress);
                progress.step_done();
            }
        }
        // The regions that came and went must not have harmed the pool's.
        if let Some(first) = rows.first_mut() {
            self.verify(first);
        }
        rows
    }

    /// Times both sides in turns, until there are so many or the pass's time is over.
    fn pass(&mut self, row: &mut Row, turns: usize, progress: &Progress) {
        if row.given_up() || interrupted() {
            return;
        }
        if let Err(e) = self.warm_up(row) {
            row.error(e);
            return;
        }
        let start = Instant::now();
        let before = row.pool.len();
        for turn in 0..turns.saturating_sub(before) {
            let share = start.elapsed().as_secs_f64() * PASSES as f64 / self.seconds;
            let enough = turn >= LEAST_TURNS && share >= 1.0;
            if enough || row.given_up() || interrupted() {
                break;
            }
            progress.share(share.max(turn as f64 / (turns - before) as f64));
            self.turn(row);
        }
    }

    /// One batch of the pool, and one per-call sample.
    fn turn(&mut self, row: &mut Row) {
        match self.sides.time_pool(row.bytes, row.pairs) {
            Ok(time) => row.pool.push(time.as_nanos() as f64 / f64::from(row.pairs)),
            Err(e) => row.error(e),
        }
        match self.sides.per_call.time(row.bytes) {
            Ok(time) => row.per_call.push(time.saturating_sub(self.clock).as_nanos() as f64),
            Err(e) => row.error(e),
        }
    }

    /// One untimed call of each side; the first time also batches of growing length, until one is long
    /// enough for the clock.
    fn warm_up(&mut self, row: &mut Row) -> Result<(), String> {
        self.sides.per_call.time(row.bytes).map_err(|e| e.to_string())?;
        let batch = |pairs| self.sides.time_pool(row.bytes, pairs).map_err(|e| e.to_string());
        if row.pairs > 0 {
            return batch(row.pairs).map(drop);
        }
        let enough = BATCH_TIME.max(self.clock * BATCH_CLOCKS);
        let mut pairs = 16;
        // The fastest of three, for the others may have been interrupted.
        while pairs < MOST_PAIRS && batch(pairs)?.min(batch(pairs)?).min(batch(pairs)?) < enough {
            pairs *= 2;
        }
        row.pairs = pairs;
        Ok(())
    }

    fn verify(&mut self, row: &mut Row) {
        if interrupted() {
            return;
        }
        let moved = self.sides.verify(&mut self.peer, row.bytes);
        row.verified = moved.is_ok();
        if let Err(e) = moved {
            row.error(e);
        }
    }

    /// Takes everything down and gathers what is to be said.
    fn finish(self, device: &Device, before: Held, rows: Vec<Row>) -> Outcome {
        let Self { sides: Sides { pool, per_call, pool_counts }, peer, clock, note, .. } = self;
        let arenas = pool.arenas();
        let per_call_memory = *per_call.arena();
        let per_call_counts = per_call.counts().clone();
        drop(peer);
        drop(per_call);
        let close_error = pool.close().err().map(|e| e.to_string());
        let mut outcome = Outcome {
            subject: Subject::of(device),
            fork: outcome::fork_support(device),
            arenas,
            per_call_memory,
            pool_calls: pool_counts.register_calls(),
            per_call_calls: per_call_counts.register_calls(),
            regions_left: pool_counts.live() + per_call_counts.live(),
            clock,
            note,
            before,
            after: Held::now(device),
            rows,
            failures: Vec::from_iter(close_error),
        };
        outcome.judge();
        outcome
    }
}
