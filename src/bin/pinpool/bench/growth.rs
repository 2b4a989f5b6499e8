//! `pinpool bench growth`: what threads that allocate notice of a pool that grows beside them.

use std::{
    sync::{
        Arc, Barrier, OnceLock,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    thread,
    time::{Duration, Instant},
};

use pinpool::{Access, Event, Pool, Stats};
use serde_json::{Value, json};

use super::{
    Bench, Report,
    device::PageChoice,
    facts::Subject,
    figures::{Axis, Panel, Point, Unit},
    interrupted,
    report::{self, Progress, Summary, Table, show_count, show_ns},
};
use crate::cli::{DeviceArgs, Failure, parse_bytes, show_bytes};

/// Compare the slowest allocs while a pool grows with those while it does not.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    device: DeviceArgs,
    /// Bytes that the pool begins with [default: 512M, or an eighth of the memory available where that is less].
    /// Much smaller pools allow threads such small caches that these alone set the slowest allocs
    #[arg(long, value_name = "SIZE", value_parser = parse_capacity)]
    capacity: Option<usize>,
    /// Bytes that it grows to [default: twice as many]
    #[arg(long, value_name = "SIZE", value_parser = parse_capacity)]
    max_capacity: Option<usize>,
    /// Bytes of the arenas that come, a power of two [default: 64M, or an eighth of the maximum where that is
    /// less]
    #[arg(long, value_name = "SIZE", value_parser = parse_capacity)]
    arena: Option<usize>,
    /// How many threads allocate, one row each
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_values_t = [1, 2])]
    #[arg(value_parser = clap::value_parser!(u16).range(1..=256))]
    threads: Vec<u16>,
    /// The pages
    #[arg(long, value_enum, default_value_t = PageChoice::Base)]
    pages: PageChoice,
    /// How often each row is measured [default: 7, with --quick 3]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1000))]
    reps: Option<u16>,
}

const METHOD: &str = "\
Method: Threads take buffers of 64 bytes to 64 KiB, some dozen at a time, touch each, and give them back; each \
alloc is timed by itself. The growing side begins with the pool, whose watermark is such that it brings up one \
arena after the other until it is as large as it may be, and ends with that, so that a growth is under way at \
every sample but for the moments between two arenas. The quiet side runs for as long (at least a fifth of a second each), in equal parts, on pools that \
cannot grow, of each size that the other has on its way: how much threads may cache depends on that. The sides take turns in being first. What is shown is the median, \
over the repetitions, of the slowest of a thousand (p99.9), over all threads.

Bias: Both sides hold what reading the clock costs (the table shows it). Mapping and zeroing pages takes a \
processor: with as many threads as processors, the grower takes turns with them, and what that costs them is in \
the growing side. What others do on the machine meanwhile is in both.";

const STEP: usize = 1 << 20;
/// Allocs that are not counted at the start of each side.
const WARM_UP: usize = 20_000;

/// How long each of the pools that do not grow is looked at, at least: on slow processors warming up takes a part of it.
const SHORTEST: Duration = Duration::from_millis(200);
/// The most buffers that one thread holds.
const BURST: usize = 48;

fn parse_capacity(text: &str) -> Result<usize, String> {
    let size = parse_bytes(text)?;
    if !(STEP..=1 << 40).contains(&size) || !size.is_multiple_of(STEP) {
        return Err(format!("it is no multiple of {} up to 1 TiB", show_bytes(STEP)));
    }
    Ok(size)
}

/// Counts of times in nanoseconds: exact below a limit, and one by one above.
struct Times {
    below: Vec<u32>,
    above: Vec<u64>,
    count: u64,
}

impl Times {
    const LIMIT: usize = 1 << 16;

    fn new() -> Self {
        Self { below: vec![0; Self::LIMIT], above: Vec::with_capacity(1 << 16), count: 0 }
    }

    fn add(&mut self, time: Duration) {
        self.count += 1;
        let ns = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        match usize::try_from(ns).ok().and_then(|n| self.below.get_mut(n)) {
            Some(n) => *n += 1,
            None => self.above.push(ns),
        }
    }

    fn merge(&mut self, other: &Self) {
        self.below.iter_mut().zip(&other.below).for_each(|(a, b)| *a += b);
        self.above.extend(&other.above);
        self.count += other.count;
    }

    /// By nearest rank, so that it is a time that was measured.
    fn per_mille(&mut self, rank: u64) -> f64 {
        let mut left = (self.count * rank).div_ceil(1000);
        for (ns, &n) in self.below.iter().enumerate() {
            left = match left.checked_sub(u64::from(n)) {
                None | Some(0) => return ns as f64,
                Some(left) => left,
            };
        }
        self.above.sort_unstable();
        self.above.get(left as usize - 1).map_or(0.0, |&ns| ns as f64)
    }
}

/// Begins the error of a repetition that measured next to nothing.
const FEW: &str = "too few allocs";

/// What one thread does on one side, until `over`.
fn work(pool: &Pool, seed: u64, over: impl Fn() -> bool) -> Result<Times, String> {
    let mut times = Times::new();
    let mut held = Vec::with_capacity(BURST);
    let mut random = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = move || {
        // xorshift64
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        random
    };
    let mut done = 0;
    while !over() {
        for _ in 0..1 + next() as usize % BURST {
            // Log-uniform, by the power of two and what is between it and the next.
            let base = 64usize << (next() % 10);
            let len = base + next() as usize % base;
            let start = Instant::now();
            let got = pool.alloc(len);
            let took = start.elapsed();
            let mut buf = got.map_err(|e| e.to_string())?;
            buf[0] = 1;
            held.push(buf);
            done += 1;
            if done > WARM_UP {
                times.add(took);
            }
        }
        held.clear();
    }
    Ok(times)
}

/// What one repetition gave: p99.9 on both sides, how many allocs those were, and how long it grew.
struct Rep {
    quiet: f64,
    growing: f64,
    samples: u64,
    growths: u64,
    grew: Duration,
    took: Duration,
}

/// What one side of a repetition gave.
struct Side {
    times: Times,
    took: Duration,
    stats: Stats,
}

/// Which side comes first.
#[derive(Clone, Copy)]
enum Turn {
    GrowingFirst,
    /// For so long as the growing side took the last time.
    QuietFirst(Duration),
}

struct Job {
    capacity: usize,
    max_capacity: usize,
    arena: usize,
    reps: u16,
}

impl Job {
    fn of(args: &Args, quick: bool) -> Result<Self, Failure> {
        let eighth = (available() / 8 / STEP * STEP).max(STEP);
        let capacity = args.capacity.unwrap_or(eighth.min(512 << 20));
        let max_capacity = args.max_capacity.unwrap_or(capacity * 2);
        if max_capacity <= capacity {
            return Err(Failure::Usage(format!(
                "--max-capacity {} is not more than --capacity {}: the pool could not grow",
                show_bytes(max_capacity),
                show_bytes(capacity)
            )));
        }
        let eighth = (max_capacity / 8).next_power_of_two().max(STEP);
        let arena = args.arena.unwrap_or(eighth.min(64 << 20));
        let reps = args.reps.unwrap_or(if quick { 3 } else { 7 });
        Ok(Self { capacity, max_capacity, arena, reps })
    }

    /// One repetition, the quiet side first or last.
    fn rep(&self, args: &Args, threads: usize, turn: Turn) -> Result<Rep, Failure> {
        let mut quiet = match turn {
            Turn::QuietFirst(time) => Some(self.quiet(args, threads, time)?),
            Turn::GrowingFirst => None,
        };
        let mut growing = self.side(args, threads, None)?;
        let quiet = match &mut quiet {
            Some(quiet) => quiet,
            None => quiet.insert(self.quiet(args, threads, growing.took)?),
        };
        let count = growing.times.count.min(quiet.count);
        if count < 1000 {
            return Err(Failure::Failed(format!(
                "{FEW} ({count}) in the growth from {} to {}; make it longer with --max-capacity",
                show_bytes(self.capacity),
                show_bytes(self.max_capacity)
            )));
        }
        Ok(Rep {
            samples: growing.times.count,
            quiet: quiet.per_mille(999),
            growing: growing.times.per_mille(999),
            growths: growing.stats.growths,
            grew: growing.stats.growth_time,
            took: growing.took,
        })
    }

    /// Measures pools that do not grow, of each size that the growing one had, together for `time`.
    fn quiet(&self, args: &Args, threads: usize, time: Duration) -> Result<Times, Failure> {
        let sizes: Vec<usize> = (self.capacity..self.max_capacity).step_by(self.arena).collect();
        let mut times = Times::new();
        for &size in &sizes {
            let each = (time / sizes.len() as u32).max(SHORTEST);
            times.merge(&self.side(args, threads, Some((size, each)))?.times);
        }
        Ok(times)
    }

    /// Measures a pool that grows, until it cannot any more; or one of a size that does not, for so long.
    fn side(
        &self,
        args: &Args,
        threads: usize,
        quiet: Option<(usize, Duration)>,
    ) -> Result<Side, Failure> {
        let failed = Failure::Failed;
        let stop = Arc::new(AtomicBool::new(false));
        let (told, refused) = std::sync::mpsc::channel();
        let (told, stopped) = (std::sync::Mutex::new(told), stop.clone());
        let builder = Pool::builder()
            .device(args.device.open()?)
            .access(Access::LOCAL_WRITE)
            .pages(args.pages.pages())
            .arena_size(self.arena)
            .on_event(move |e| {
                if let (Event::GrowthFailed { error, .. }, Ok(told)) = (e, told.lock()) {
                    let _ = told.send(error.to_string());
                    stopped.store(true, Relaxed);
                }
            });
        let builder = match quiet {
            Some((size, _)) => builder.capacity(size),
            // Always short, until it can grow no more.
            None => builder
                .capacity(self.capacity)
                .max_capacity(self.max_capacity)
                .low_watermark(self.max_capacity - 1),
        };
        // The threads are there before the pool is, so that it does not grow while they start.
        let ready = Barrier::new(threads + 1);
        let handle: OnceLock<Result<Pool, String>> = OnceLock::new();
        let mut took = Duration::ZERO;
        let mut times = Times::new();
        thread::scope(|scope| {
            let workers: Vec<_> = (0..threads as u64)
                .map(|i| {
                    let (ready, handle, stop) = (&ready, &handle, &stop);
                    scope.spawn(move || {
                        ready.wait();
                        match handle.get() {
                            Some(Ok(pool)) => work(pool, i + 1, || {
                                let full = pool.capacity() >= pool.max_capacity();
                                (full && quiet.is_none()) || stop.load(Relaxed)
                            }),
                            _ => Ok(Times::new()),
                        }
                    })
                })
                .collect();
            let built = builder.build().map_err(|e| e.to_string());
            let pool = handle.get_or_init(|| built);
            let start = Instant::now();
            ready.wait();
            if let Ok(pool) = pool {
                // Looking at the books would have the threads take their slow paths.
                let over = || match quiet {
                    Some((_, time)) => start.elapsed() >= time,
                    None => pool.capacity() >= pool.max_capacity(),
                };
                while !over() && !stop.load(Relaxed) && !interrupted() {
                    thread::sleep(Duration::from_millis(2));
                }
                took = start.elapsed();
                stop.store(true, Relaxed);
            }
            for worker in workers {
                let done = worker.join().map_err(|_| failed("a thread panicked".to_owned()))?;
                times.merge(&done.map_err(failed)?);
            }
            Ok(())
        })?;
        if interrupted() {
            return Err(Failure::Interrupted);
        }
        if let Ok(e) = refused.try_recv() {
            return Err(failed(format!("the pool could not grow: {e}")));
        }
        let pool = handle.into_inner().unwrap_or_else(|| Err("there is no pool".to_owned()));
        let pool = pool.map_err(failed)?;
        let stats = pool.stats();
        pool.close().map_err(|e| failed(e.to_string()))?;
        Ok(Side { times, took, stats })
    }
}

/// Bytes of memory that are available.
fn available() -> usize {
    let info = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = info.lines().find_map(|l| l.strip_prefix("MemAvailable:"));
    let kb: usize = line.and_then(|l| l.split_whitespace().next()?.parse().ok()).unwrap_or(0);
    kb << 10
}

struct Row {
    threads: usize,
    /// How long the growing side took the last time.
    took: Option<Duration>,
    reps: Vec<Rep>,
}

impl Row {
    fn median(&self, part: impl Fn(&Rep) -> f64) -> f64 {
        let all: Vec<f64> = self.reps.iter().map(part).collect();
        Summary::of(&all).map_or(0.0, |s| s.median)
    }

    fn ratio(&self) -> f64 {
        self.median(|r| r.growing) / self.median(|r| r.quiet)
    }
}

/// The bench.
pub(crate) struct Growth;

impl Bench for Growth {
    type Args = Args;

    fn name(&self) -> &'static str {
        "growth"
    }

    fn method(&self) -> &'static str {
        METHOD
    }

    fn run(&self, args: &Args, quick: bool) -> Result<Report, Failure> {
        let job = Job::of(args, quick)?;
        let rows = measure(&job, args)?;
        let (object, text) = (object(&job, args, &rows)?, table(&job, args, &rows)?);
        Ok(Report { object, text, failures: Vec::new() })
    }

    fn panels(&self, object: &Value) -> Vec<Panel> {
        panels(object)
    }
}

/// Measures all rows in turns, until all is done or the user wants no more.
fn measure(job: &Job, args: &Args) -> Result<Vec<Row>, Failure> {
    let mut rows: Vec<Row> = args
        .threads
        .iter()
        .map(|&n| Row { threads: usize::from(n), took: None, reps: Vec::new() })
        .collect();
    let mut progress = Progress::new((usize::from(job.reps) + 1) * rows.len());
    'reps: for rep in 0..=job.reps {
        for row in &mut rows {
            if interrupted() {
                break 'reps;
            }
            progress.at(format!("{} threads", row.threads));
            let turn = match row.took {
                Some(took) if rep % 2 == 1 => Turn::QuietFirst(took),
                _ => Turn::GrowingFirst,
            };
            // On a busy machine a growth can be over before the threads have had a processor.
            let mut tries = 0;
            let done = loop {
                tries += 1;
                match job.rep(args, row.threads, turn) {
                    Err(Failure::Interrupted) => break 'reps,
                    Err(Failure::Failed(e)) if tries < 20 && e.starts_with(FEW) => {}
                    done => break done?,
                }
            };
            row.took = Some(done.took);
            progress.step_done();
            // The first round has the machine's memory and the program's code brought up.
            if rep > 0 {
                row.reps.push(done);
            }
        }
    }
    rows.retain(|row| !row.reps.is_empty());
    Ok(rows)
}

fn object(job: &Job, args: &Args, rows: &[Row]) -> Result<Value, Failure> {
    let hundredths = |n: f64| (n * 100.0).round() / 100.0;
    let row = |r: &Row| {
        json!({
            "threads": r.threads,
            "quiet_p999_ns": report::rounded(r.median(|r| r.quiet)),
            "growing_p999_ns": report::rounded(r.median(|r| r.growing)),
            "ratio": hundredths(r.ratio()),
            "samples": r.reps.iter().map(|r| r.samples).sum::<u64>(),
            "growths": r.reps.iter().map(|r| r.growths).sum::<u64>(),
            "ms_a_growth": hundredths(growth_ms(r)),
        })
    };
    let own = json!({
        "reps": job.reps,
        "capacity": job.capacity,
        "max_capacity": job.max_capacity,
        "arena": job.arena,
        "clock_ns": report::clock_cost().as_nanos() as u64,
        "rows": rows.iter().map(row).collect::<Vec<_>>(),
    });
    Ok(Subject::of(&args.device.open()?).object("growth", own))
}

fn growth_ms(row: &Row) -> f64 {
    let growths: u64 = row.reps.iter().map(|r| r.growths).sum();
    let time: Duration = row.reps.iter().map(|r| r.grew).sum();
    time.as_secs_f64() * 1e3 / growths.max(1) as f64
}

fn table(job: &Job, args: &Args, rows: &[Row]) -> Result<String, Failure> {
    let mut table = Table::new(&[
        "\nthreads",
        "quiet\np99.9",
        "growing\np99.9",
        "\nratio",
        "growing\nallocs",
        "one\ngrowth, ms",
    ]);
    for row in rows {
        table.row(vec![
            row.threads.to_string(),
            show_ns(row.median(|r| r.quiet)),
            show_ns(row.median(|r| r.growing)),
            format!("{:.2}", row.ratio()),
            show_count(row.reps.iter().map(|r| r.samples).sum()),
            format!("{:.1}", growth_ms(row)),
        ]);
    }
    Ok(format!(
        "{}\npool    {} growing to {} by {}\n\n{table}\n\
         medians of {}; of each time, about {} is reading the clock",
        Subject::of(&args.device.open()?),
        show_bytes(job.capacity),
        show_bytes(job.max_capacity),
        show_bytes(job.arena),
        job.reps,
        show_ns(report::clock_cost().as_nanos() as f64),
    ))
}

/// The figures of such an object.
fn panels(object: &Value) -> Vec<Panel> {
    let mut points = Vec::new();
    for row in object["rows"].as_array().into_iter().flatten() {
        let sides = [("while it grows", "growing_p999_ns"), ("while it does not", "quiet_p999_ns")];
        let threads = row["threads"].as_f64().unwrap_or_default();
        points.extend(
            sides
                .iter()
                .filter_map(|(name, key)| Some(Point::single(name, threads, row[key].as_f64()?))),
        );
    }
    let title = "The slowest of a thousand allocs (p99.9)";
    vec![Panel::new("p999", title, Unit::Time, Axis::Threads, points)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_times_that_were_measured() {
        let mut t = Times::new();
        (1..=999).for_each(|_| t.add(Duration::from_nanos(20)));
        t.add(Duration::from_millis(3));
        assert_eq!((t.per_mille(500), t.per_mille(999), t.per_mille(1000)), (20.0, 20.0, 3e6));
        let mut other = Times::new();
        (0..1000).for_each(|n| other.add(Duration::from_nanos(100 + n)));
        t.merge(&other);
        assert_eq!((t.count, t.per_mille(500), t.per_mille(999)), (2000, 100.0, 1098.0));
    }
}
