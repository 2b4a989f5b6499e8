//! `pinpool bench transfer`: messages over the device, whose buffers come from the pool, are registered for
//! each message, are looked up in a registration cache, or are copied through one registered buffer.

mod outcome;
mod reg_cache;
mod ways;

use std::{
    ops::RangeInclusive,
    time::{Duration, Instant},
};

use nix::time::{ClockId, clock_gettime};
use pinpool::Device;

use self::{
    outcome::{Outcome, Row},
    ways::{Needs, Way, Ways},
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

/// Compare messages from pool buffers with messages that register theirs
///
/// RC messages from one queue pair of the device to another, one at a time: pool buffers, register-
/// per-message, a registration cache, and copying through one registered bounce buffer.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    device: DeviceArgs,
    /// Message sizes, 4K to 16M, in whole 4 KiB
    #[arg(long, value_name = "SIZE,..", value_delimiter = ',', value_parser = parse_size)]
    #[arg(default_value = "4K,16K,64K,256K,1M")]
    sizes: Vec<usize>,
    /// Bytes of each buffer that receives: the longest message that may come [default: 1M, or the largest
    /// of --sizes]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    receive: Option<usize>,
    /// Seconds that each size takes, once each way had 21 turns [default: 6, with --quick 0.8 and 7]
    #[arg(long, value_name = "SECONDS", value_parser = report::parse_seconds)]
    row_seconds: Option<f64>,
    /// The application's buffers at each end; each message takes one at random
    #[arg(long, value_name = "N", default_value_t = 64)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=4096))]
    buffers: u32,
    /// Ranges in the registration cache; twice --buffers has it hit always
    #[arg(long, value_name = "N", default_value_t = 64)]
    #[arg(value_parser = clap::value_parser!(u32).range(reg_cache::FEWEST as i64..=8192))]
    cached: u32,
    /// The pages of all buffers
    #[arg(long, value_enum, default_value_t = PageChoice::Base)]
    pages: PageChoice,
}

const METHOD: &str = "\
Method: One thread sends a message from one queue pair to another of the same device, and waits until \
both ends have their completions; then comes the next (one message at a time). Each end needs a \
registered buffer: the sender's is as long as the message, the receiver's as long as the longest one \
(--receive), for a receive is posted before anybody knows what will come. pool: both are taken from the \
pool and freed. register-per-message: both of the application's buffers are registered, and deregistered \
after it. registration-cache: both are looked up, least recently used ranges give way. bounce-buffer: the \
message is copied into, and out of, one buffer that was registered at the start. Timed is what a message costs: getting ready, copying, \
sending, giving back; not timed are writing the message into the application's buffer and comparing \
every byte of it where it arrives. The ways take turns of some 10 ms, the first one changing, and the \
first message of a turn is not counted. A rate is a turn's messages through their time, and the median \
over turns is shown; percentiles are over all messages; processor time is that of this process while the \
clock runs. All buffers lie on pages of one kind, mapped and faulted in beforehand.

Bias: Receive buffers that are longer than what comes cost the one that registers them; with --receive as \
short as the message they do not. Each message takes one of the application's buffers at random (--buffers \
at each end), and the cache holds half of these ranges (--cached): its hits are shown. With all hits it costs a look-up and is as \
fast as the pool; what it costs otherwise is written in its source: it does not learn of unmapped \
memory, pins what is no longer used, and has no lock here. One message at a time shows all of a \
registration's time; with many under way a part of it is hidden behind others. The wait polls, so that \
processor time includes waiting, and the kernel's work for a software device (rxe) partly runs in \
other threads, which are not counted. Both ends run on one machine, on its own memory. On --soft there \
is no device: the peer copies, registering is mlock.

Proof: Every message differs from the one before on every page; each is compared as a whole. What is \
registered at the end must be what was at the start.";

const LARGEST: usize = 16 << 20;
/// Seconds of one way's turn, and how many messages it has.
const TURN: f64 = 0.010;
const MESSAGES: RangeInclusive<usize> = 2..=2000;
/// Failed messages after which a way is given up at a size.
const MOST_ERRORS: u64 = 15;

fn parse_size(text: &str) -> Result<usize, String> {
    parse_granules(text, LARGEST)
}

pub(crate) struct Transfer;

impl Bench for Transfer {
    type Args = Args;

    fn name(&self) -> &'static str {
        "transfer"
    }

    fn method(&self) -> &'static str {
        METHOD
    }

    fn run(&self, args: &Args, quick: bool) -> Result<Report, Failure> {
        let _no_thp = NoThp::for_pages(args.pages.pages())?;
        let device = args.device.open()?;
        let outcome = Run::start(args, quick, &device)?.outcome();
        Ok(Report { object: outcome.json(), text: outcome.text(), failures: outcome.failures })
    }

    fn panels(&self, object: &serde_json::Value) -> Vec<Panel> {
        outcome::panels(object)
    }
}

/// Wall and processor time, of what is timed.
#[derive(Clone, Copy, Default)]
struct Spent {
    wall: Duration,
    cpu: Duration,
}

/// Runs between `start` and `stop`, as often as wanted.
struct Stopwatch {
    spent: Spent,
    /// What reading the clocks adds each time.
    cost: Spent,
}

impl Stopwatch {
    fn new() -> Self {
        let mut watch = Self { spent: Spent::default(), cost: Spent::default() };
        let once = |_| {
            watch.spent = Spent::default();
            watch.time(|| ());
            watch.spent
        };
        let all: Vec<Spent> = (0..1000).map(once).collect();
        let least = |f: fn(&Spent) -> Duration| all.iter().map(f).min().unwrap_or_default();
        watch.cost = Spent { wall: least(|s| s.wall), cpu: least(|s| s.cpu) };
        watch
    }

    fn time<T>(&mut self, body: impl FnOnce() -> T) -> T {
        let cpu = processor_time();
        let start = Instant::now();
        let result = body();
        let wall = start.elapsed();
        let cpu = processor_time().saturating_sub(cpu);
        self.spent.wall += wall.saturating_sub(self.cost.wall);
        self.spent.cpu += cpu.saturating_sub(self.cost.cpu);
        result
    }
}

fn processor_time() -> Duration {
    clock_gettime(ClockId::CLOCK_PROCESS_CPUTIME_ID).map(Duration::from).unwrap_or_default()
}

/// The bench while it runs.
struct Run {
    device: Device,
    ways: Ways,
    peer: Peer,
    watch: Stopwatch,
    /// The message, and its number.
    message: Vec<u8>,
    number: u64,
    seconds: f64,
    least_rounds: usize,
    rows: Vec<Row>,
    needs: Needs,
}

impl Run {
    /// Measures all sizes, smallest first, until the user wants no more.
    fn start(args: &Args, quick: bool, device: &Device) -> Result<Self, Failure> {
        let sizes = in_order(&args.sizes);
        let largest = sizes.last().copied().unwrap_or(GRANULE);
        let longest = args.receive.unwrap_or(largest.max(1 << 20));
        if longest < largest {
            let sizes = [largest, longest].map(show_bytes);
            let why = format!(
                "a message of {} needs --receive to be no less; it is {}",
                sizes[0], sizes[1]
            );
            return Err(Failure::Usage(why));
        }
        let needs = Needs {
            longest,
            buffers: args.buffers as usize,
            cached: args.cached as usize,
            pages: args.pages.pages(),
        };
        let mut run = Self {
            device: device.clone(),
            ways: Ways::build(device, &needs).map_err(Failure::Failed)?,
            peer: Peer::connect(device).map_err(Failure::Failed)?,
            watch: Stopwatch::new(),
            message: template(largest),
            number: 0,
            seconds: args.row_seconds.unwrap_or(if quick { 0.8 } else { 6.0 }),
            least_rounds: if quick { 7 } else { 21 },
            rows: Vec::new(),
            needs,
        };
        let mut progress = Progress::new(sizes.len());
        for bytes in sizes {
            progress.at(show_bytes(bytes));
            run.size(bytes, &progress);
            progress.step_done();
        }
        Ok(run)
    }

    /// All ways in turns at one size.
    fn size(&mut self, bytes: usize, progress: &Progress) {
        let mut ways = std::mem::take(&mut self.ways.ways);
        let mut rows: Vec<Row> = ways.iter().map(|w| Row::new(bytes, w.name())).collect();
        for (way, row) in ways.iter_mut().zip(&mut rows) {
            way.begin(bytes).unwrap_or_else(|e| row.error(e));
        }
        let n = ways.len();
        // A turn that is not counted warms up, and tells how many messages fit into one.
        let start = Instant::now();
        const TRIAL: usize = 4;
        for (way, row) in ways.iter_mut().zip(&mut rows) {
            self.turn(&mut **way, row, TRIAL, false);
        }
        let each = start.elapsed().as_secs_f64() / ((TRIAL + 1) * n) as f64;
        let messages = ((TURN / each.max(1e-9)) as usize).clamp(*MESSAGES.start(), *MESSAGES.end());
        let start = Instant::now();
        for round in 0.. {
            let of_time = start.elapsed().as_secs_f64() / self.seconds.max(1e-9);
            let share = of_time.min(round as f64 / self.least_rounds as f64);
            progress.share(share);
            if share >= 1.0 {
                break;
            }
            for turn in 0..n {
                if !interrupted() {
                    let at = (round + turn) % n;
                    self.turn(&mut *ways[at], &mut rows[at], messages, true);
                }
            }
            if interrupted() {
                break;
            }
        }
        for (way, row) in ways.iter_mut().zip(&mut rows) {
            row.hits = way.hits();
            way.end().unwrap_or_else(|e| row.error(e));
        }
        self.ways.ways = ways;
        self.rows.extend(rows);
    }

    /// Some messages of one way; the first is not counted, nor any if `counted` is not set.
    fn turn(&mut self, way: &mut dyn Way, row: &mut Row, messages: usize, counted: bool) {
        let mut sum = Spent::default();
        let mut sent = 0;
        if row.errors >= MOST_ERRORS {
            return;
        }
        for i in 0..=messages {
            match self.message(way, row.bytes) {
                Ok(spent) if counted && i > 0 => {
                    sum.wall += spent.wall;
                    sum.cpu += spent.cpu;
                    sent += 1;
                    row.ns.push(spent.wall.as_nanos() as f64);
                }
                Ok(_) => {}
                Err(e) => row.error(e),
            }
            if row.errors >= MOST_ERRORS {
                break;
            }
        }
        if sent > 0 {
            row.rates.push(f64::from(sent) / sum.wall.as_secs_f64().max(1e-9));
            row.cpu.push(sum.cpu.as_nanos() as f64 / (f64::from(sent) * row.bytes as f64));
        }
    }

    /// One message, there and compared.
    fn message(&mut self, way: &mut dyn Way, bytes: usize) -> Result<Spent, String> {
        let Self { peer, watch, message, number, .. } = self;
        peer.ready()?;
        *number += 1;
        let message = &mut message[..bytes];
        stamp(message, *number);
        watch.spent = Spent::default();
        way.choose();
        let sent = watch.time(|| way.ready(bytes)).and_then(|()| {
            way.source()[..bytes].copy_from_slice(message);
            watch.time(|| way.send(peer))?;
            match way.target()[..bytes] == *message {
                true => Ok(()),
                false => Err("what arrived is not what was sent".to_owned()),
            }
        });
        let done = watch.time(|| way.done());
        sent.and(done).map(|()| watch.spent)
    }

    /// Takes everything down and gathers what is to be said.
    fn outcome(self) -> Outcome {
        let Self { device, ways: Ways { ways, pool, counts }, peer, seconds, rows, needs, .. } =
            self;
        let page_size = pool.arenas().iter().map(|a| a.page_size).min().unwrap_or(0);
        drop(peer);
        drop(ways);
        let close_error = pool.close().err().map(|e| e.to_string());
        let mut failures = Vec::from_iter(close_error);
        failures.extend(rows.iter().filter_map(Row::failure));
        match counts.iter().map(|c| c.live()).sum::<u64>() {
            0 => {}
            n => failures.push(format!("{n} regions are still registered")),
        }
        Outcome { subject: Subject::of(&device), page_size, seconds, needs, rows, failures }
    }
}

/// Bytes that differ from place to place.
fn template(len: usize) -> Vec<u8> {
    let mut random = super::contest::random::Random::new(9);
    let mut bytes = vec![0; len];
    for chunk in bytes.chunks_mut(8) {
        // The low bits of such a generator are weak.
        let word = (random.next() >> 16).to_le_bytes();
        chunk.copy_from_slice(&word[..chunk.len()]);
    }
    bytes
}

/// Writes the message's number on each of its pages.
fn stamp(message: &mut [u8], number: u64) {
    for page in message.chunks_mut(GRANULE) {
        page[..8].copy_from_slice(&number.to_le_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_message_differs_from_the_last_on_every_page() {
        let mut message = template(3 * GRANULE);
        stamp(&mut message, 1);
        let first = message.clone();
        stamp(&mut message, 2);
        assert!(first.chunks(GRANULE).zip(message.chunks(GRANULE)).all(|(a, b)| a != b));
    }
}
