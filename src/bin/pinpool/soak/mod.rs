//! `pinpool soak`: hours of mixed load in bounded memory, with a fault injected every second, and all of it
//! accounted for. Manages generations of pools, faults and what is watched; the load is `load.rs`'s.

mod load;
mod watch;

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use pinpool::{
    Access, Buf, Device, Event, Pages, Pool,
    device::{Fault, FaultyMapping, FaultyRegistrar, MapFault, MapStep},
};
use serde_json::{Map, Value, json};

use self::{
    load::{Numbers, Shared, Worker},
    watch::Held,
};
use crate::{
    bench::{interrupted, on_interrupt},
    cli::{DeviceArgs, Failure, emit, parse_bytes, say, show_bytes},
};

/// Run mixed load for a time, with a fault injected every second, and account for all of it
///
/// Threads allocate and free by every front there is (plain, thread-local, batches, layouts, classes, shares,
/// waiting, futures, tokens, bare addresses, one thread's buffers freed by another), write what they have and check
/// it before they give it back, in a pool that grows and shrinks. Each second something fails or is delayed:
/// registering, mapping, faulting in, unmapping, memory runs out, and now and then a region is not let go of. Every
/// ten seconds the pool is taken down and another is built.
#[derive(clap::Args)]
#[command(after_long_help = "\
Checked: the books balance and all tables agree at each pool's end; no buffer is written over, overlaps, or has wrong
keys; regions and mappings are given back, but for what a device was told to keep; memory, descriptors, mappings and
threads of the process stay where they were after the first pool.

Exit code: 0 all was in order; 1 something was not, and is listed; 2 wrong call or no such device; 130 interrupted.")]
pub(crate) struct Args {
    #[command(flatten)]
    device: DeviceArgs,
    /// For how long
    #[arg(long, value_name = "N", default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=10_000_000))]
    seconds: u64,
    /// How many threads
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u64).range(1..=256))]
    threads: u64,
    /// The most bytes that the pool grows to; it begins with a quarter of it
    #[arg(long, value_name = "BYTES", default_value = "32M", value_parser = parse_bytes)]
    capacity: usize,
    /// Where the numbers begin that the load is made of; printed, to begin there again
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// Serve the pool's map on this Unix socket, for `pinpool top SOCKET`
    #[arg(long, value_name = "SOCKET")]
    map: Option<PathBuf>,
    /// Print one JSON object instead of text
    #[arg(long)]
    json: bool,
}

const ARENA: usize = 1 << 20;
/// The longest that one pool lives.
const GENERATION: Duration = Duration::from_secs(10);
/// How long threads may take to come to an end.
const PATIENCE: Duration = Duration::from_secs(120);
/// How often a device is told to keep a region: each costs an arena for ever.
const KEPT: u64 = 16;
/// What the process may have more at the end than after the first pool. The allocator of the process keeps some of
/// what threads freed.
const MORE_RSS_KIB: u64 = 48 << 10;
const MORE_MAPPINGS: u64 = 64;
const MORE_DESCRIPTORS: u64 = 2;

/// What a run comes to.
#[derive(Default)]
struct Tally {
    generations: u64,
    /// Pools that could not be built, since a fault met them there.
    not_built: u64,
    steps: u64,
    allocs: u64,
    refused: u64,
    growths: u64,
    shrinks: u64,
    growth_failures: u64,
    waits: u64,
    /// By kind.
    faults: Vec<(&'static str, u64)>,
    events: Arc<Events>,
    /// Arenas that a device was told to keep.
    kept: u64,
    wrong: Vec<String>,
    most: Held,
}

#[derive(Default)]
struct Events([AtomicU64; Self::NAMES.len()]);

impl Events {
    const NAMES: [&'static str; 7] = [
        "built",
        "build_failed",
        "grew",
        "shrank",
        "growth_failed",
        "deregister_failed",
        "unmap_failed",
    ];

    fn count(&self, event: &Event<'_>) {
        if let Some(i) = Self::NAMES.iter().position(|n| *n == event.name()) {
            self.0[i].fetch_add(1, Relaxed);
        }
    }

    fn of(&self, name: &str) -> u64 {
        let at = Self::NAMES.iter().position(|n| *n == name);
        at.map_or(0, |i| self.0[i].load(Relaxed))
    }
}

/// Runs it, prints what it came to, and says whether all was in order.
pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    if args.capacity < 16 * ARENA {
        let (asked, least) = (show_bytes(args.capacity), show_bytes(16 * ARENA));
        return Err(Failure::Usage(format!("--capacity {asked}: soak takes {least} or more")));
    }
    let device = args.device.open()?;
    on_interrupt()?;
    let (start, mut tally) = (Instant::now(), Tally::default());
    let length = Duration::from_secs(args.seconds);
    let mut first = None;
    let mut rng = Numbers::new(args.seed);
    while start.elapsed() < length && tally.wrong.is_empty() && !interrupted() {
        let time = (length - start.elapsed()).min(GENERATION);
        generation(args, &device, time, &mut rng, &mut tally)?;
        let now = quiet(first.map(|f: Held| f.threads));
        tally.most = tally.most.max(now);
        bounded(*first.get_or_insert(now), now, &mut tally);
    }
    let last = Held::now();
    let object = report(args, &device, &tally, start.elapsed(), first.unwrap_or(last), last);
    match args.json {
        true => emit(&format!("{object:#}"))?,
        false => emit(&text(&object))?,
    }
    match (tally.wrong.is_empty(), interrupted()) {
        (false, _) => Err(Failure::Failed(tally.wrong.join("; "))),
        (true, true) => Err(Failure::Interrupted),
        (true, false) => Ok(()),
    }
}

/// What the process has once its threads, a pool's grower among them, have come to an end; at least in a while.
fn quiet(threads: Option<u64>) -> Held {
    let start = Instant::now();
    loop {
        let now = Held::now();
        if start.elapsed() > Duration::from_secs(5) || threads.is_some_and(|t| now.threads <= t) {
            return now;
        }
        if threads.is_none() && start.elapsed() > Duration::from_millis(500) {
            return now;
        }
        thread::sleep(Duration::from_millis(5));
    }
}

/// Whether the process still has no more than after the first generation.
fn bounded(first: Held, now: Held, tally: &mut Tally) {
    // A region that is kept keeps its arena in memory, and its mapping.
    let kept_kib = pinpool::leaked_bytes() >> 10;
    let mut check = |what: &str, now: u64, most: u64| {
        if now > most {
            tally.wrong.push(format!("{what}: {now}, at most {most} expected"));
        }
    };
    check("KiB in memory", now.rss_kib, first.rss_kib + MORE_RSS_KIB + kept_kib);
    check("descriptors", now.descriptors, first.descriptors + MORE_DESCRIPTORS);
    check("mappings", now.mappings, first.mappings + MORE_MAPPINGS + 2 * tally.kept);
    check("threads", now.threads, first.threads);
}

/// One pool's life.
fn generation(
    args: &Args,
    device: &Device,
    time: Duration,
    rng: &mut Numbers,
    tally: &mut Tally,
) -> Result<(), Failure> {
    let registrar = FaultyRegistrar::new(device);
    let mapping = FaultyMapping::new();
    let events = tally.events.clone();
    tally.generations += 1;
    let builder = Pool::builder()
        .device(Device::custom(registrar.clone()))
        .access(Access::LOCAL_WRITE)
        .pages(Pages::Base)
        .arena_size(ARENA)
        .capacity(args.capacity / 4)
        .max_capacity(args.capacity)
        .shrink_after(Duration::from_millis(300))
        .class("shared", Access::LOCAL_WRITE | Access::REMOTE_READ, 4 * ARENA)
        .share("own", ARENA)
        .share_in("shared", "theirs", ARENA)
        .faulty_mapping(&mapping)
        .on_event(move |e| events.count(e));
    // Each third generation begins with a fault in its start, which must leave nothing.
    if tally.generations.is_multiple_of(3) {
        let registrar = registrar.clone().fault(Fault::Register(1 + rng.below(8) as u64, ENOMEM));
        tally.fault("register while building");
        let held = Held::now();
        match builder.build() {
            Ok(_) => tally.wrong.push("a pool was built though a register call failed".to_owned()),
            Err(_) => tally.not_built += 1,
        }
        if registrar.live() != 0 {
            tally.wrong.push(format!("{} regions are left of a failed start", registrar.live()));
        }
        let more = Held::now().mappings.saturating_sub(held.mappings);
        if more > MORE_MAPPINGS {
            tally.wrong.push(format!("{more} mappings are left of a failed start"));
        }
        return Ok(());
    }
    let pool = builder.build().map_err(Failure::of)?;
    let top = args.map.as_ref().map(|path| pool.serve_map(path)).transpose();
    let top = top.map_err(|e| Failure::Failed(format!("the map cannot be served: {e}")))?;
    let shared = Shared::new();
    let threads = workers(args, &pool, rng, &shared);
    conduct(&pool, time, &shared, &registrar, &mapping, rng, tally);
    shared.stop.store(true, Relaxed);
    drop(top);
    if !ended(threads, tally) {
        return Ok(());
    }
    shared.clear();
    tally.steps += shared.steps.load(Relaxed);
    tally.allocs += shared.allocs.load(Relaxed);
    tally.refused += shared.refused.load(Relaxed);
    let wrong = shared.wrong.lock().map(|w| w.clone()).unwrap_or_default();
    tally.wrong.extend(wrong);
    settle(pool, &registrar, tally);
    Ok(())
}

const ENOMEM: i32 = 12;
const EIO: i32 = 5;

fn workers(
    args: &Args,
    pool: &Pool,
    rng: &mut Numbers,
    shared: &Arc<Shared>,
) -> Vec<JoinHandle<()>> {
    let most = 2 * args.capacity / args.threads as usize;
    let make = |_| {
        let seed = rng.below(usize::MAX) as u64;
        let (pool, shared) = (pool.clone(), shared.clone());
        thread::spawn(move || {
            let heaps = pool.class("shared").map(|class| {
                let shares = [pool.share("own").ok(), pool.share("theirs").ok()];
                (class, shares)
            });
            match heaps {
                Ok((class, [Some(own), Some(theirs)])) => {
                    Worker::new(&pool, &class, [own, theirs], most, seed, &shared).run();
                }
                _ => shared.wrong("a class or a share that was asked for is not there".to_owned()),
            }
        })
    };
    (0..args.threads).map(make).collect()
}

/// Injects a fault every second until the time is over. Two seconds in four the load is light, so that the pool
/// shrinks.
fn conduct(
    pool: &Pool,
    time: Duration,
    shared: &Shared,
    registrar: &FaultyRegistrar,
    mapping: &FaultyMapping,
    rng: &mut Numbers,
    tally: &mut Tally,
) {
    let start = Instant::now();
    let next = |step| mapping.calls(step) + 1;
    while start.elapsed() < time && !interrupted() {
        let ease = start.elapsed().as_secs() % 4 >= 2;
        shared.ease.store(ease, Relaxed);
        if ease {
            shared.clear();
        }
        let kind = rng.below(8);
        let kind = match kind {
            0 => {
                drop(
                    registrar
                        .clone()
                        .fault(Fault::Register(registrar.register_calls() + 1, ENOMEM)),
                );
                "register"
            }
            1 => {
                let late = Duration::from_millis(200);
                drop(registrar.clone().fault(Fault::Delay(registrar.register_calls() + 1, late)));
                "register late"
            }
            2 if tally.kept < KEPT => {
                let n = registrar.deregister_calls() + 1;
                drop(registrar.clone().fault(Fault::Deregister(n, EIO)));
                // Whether it comes to that, the next shrink or the end decides: see `settle`.
                "deregister"
            }
            3 => {
                drop(mapping.clone().fault(MapFault::Fail(
                    MapStep::Map,
                    next(MapStep::Map),
                    ENOMEM,
                )));
                "map"
            }
            4 => {
                let n = next(MapStep::FaultIn);
                drop(mapping.clone().fault(MapFault::Fail(MapStep::FaultIn, n, ENOMEM)));
                "fault in"
            }
            5 => {
                let n = next(MapStep::FaultIn);
                let late = Duration::from_millis(100);
                drop(mapping.clone().fault(MapFault::Delay(MapStep::FaultIn, n, late)));
                "fault in late"
            }
            _ => {
                // All memory is taken for a moment, which makes the pool grow, and shrink after it.
                let took: Vec<Buf> = std::iter::from_fn(|| pool.alloc(64 << 10).ok()).collect();
                thread::sleep(Duration::from_millis(50));
                drop(took);
                "exhaust"
            }
        };
        tally.fault(kind);
        tally.most = tally.most.max(Held::now());
        let second = Instant::now();
        while second.elapsed() < Duration::from_secs(1) && start.elapsed() < time && !interrupted()
        {
            thread::sleep(Duration::from_millis(20));
        }
    }
}

/// Waits for the threads; false, and says so, if they do not come to an end.
fn ended(threads: Vec<JoinHandle<()>>, tally: &mut Tally) -> bool {
    let start = Instant::now();
    while !threads.iter().all(JoinHandle::is_finished) {
        if start.elapsed() > PATIENCE {
            let n = threads.iter().filter(|t| !t.is_finished()).count();
            let wrong = format!("{n} threads did not end within {} s", PATIENCE.as_secs());
            tally.wrong.push(wrong);
            return false;
        }
        thread::sleep(Duration::from_millis(5));
    }
    for thread in threads {
        if thread.join().is_err() {
            tally.wrong.push("a thread of the load panicked".to_owned());
        }
    }
    true
}

/// At the end of a pool's life, when nothing is out: the books, the tables, and what is given back.
fn settle(pool: Pool, registrar: &FaultyRegistrar, tally: &mut Tally) {
    if catch_unwind(AssertUnwindSafe(|| pool.check())).is_err() {
        tally.wrong.push("the pool's tables contradict each other (above)".to_owned());
    }
    let s = pool.stats();
    if !s.balanced() || s.live != 0 || s.live_buffers != 0 || s.in_flight != 0 || s.waiting != 0 {
        tally.wrong.push(format!("the books do not balance, or something is out: {s:?}"));
    }
    tally.growths += s.growths;
    tally.shrinks += s.shrinks;
    tally.growth_failures += s.growth_failures;
    tally.waits += s.waits;
    let before = tally.kept;
    drop(pool);
    // The grower lets go of what it has in hand.
    let start = Instant::now();
    let kept = || registrar.live();
    while kept() > tally.events.of("deregister_failed") - before && start.elapsed() < PATIENCE {
        thread::sleep(Duration::from_millis(5));
    }
    tally.kept = tally.events.of("deregister_failed");
    if kept() != tally.kept - before {
        let expected = tally.kept - before;
        tally
            .wrong
            .push(format!("{} regions are left, {expected} that were kept expected", kept()));
    }
    let (leaked, expected) = (pinpool::leaked_bytes(), tally.kept * ARENA as u64);
    if leaked != expected {
        tally.wrong.push(format!("{leaked} bytes count as leaked, {expected} expected"));
    }
}

impl Tally {
    fn fault(&mut self, kind: &'static str) {
        match self.faults.iter_mut().find(|f| f.0 == kind) {
            Some(f) => f.1 += 1,
            None => self.faults.push((kind, 1)),
        }
    }
}

fn report(
    args: &Args,
    device: &Device,
    tally: &Tally,
    took: Duration,
    first: Held,
    last: Held,
) -> Value {
    let held = |h: Held| {
        json!({
            "rss_kib": h.rss_kib, "descriptors": h.descriptors,
            "mappings": h.mappings, "threads": h.threads,
        })
    };
    let faults: Map<_, _> = tally.faults.iter().map(|(k, n)| ((*k).to_owned(), json!(n))).collect();
    let events: Map<_, _> =
        Events::NAMES.iter().map(|n| ((*n).to_owned(), json!(tally.events.of(n)))).collect();
    json!({
        "soak": device.info().name,
        "seconds": took.as_secs(),
        "threads": args.threads,
        "capacity": args.capacity,
        "seed": args.seed,
        "pools": tally.generations,
        "pools_not_built": tally.not_built,
        "steps": tally.steps,
        "allocs": tally.allocs,
        "refused": tally.refused,
        "waits": tally.waits,
        "growths": tally.growths,
        "shrinks": tally.shrinks,
        "growth_failures": tally.growth_failures,
        "faults": faults,
        "events": events,
        "leaked_bytes": pinpool::leaked_bytes(),
        "held": { "after_first": held(first), "most": held(tally.most), "last": held(last) },
        "wrong": tally.wrong,
    })
}

/// For people: a line for each number.
fn text(object: &Value) -> String {
    let mut lines = Vec::new();
    let plain = |v: &Value| v.as_str().map_or_else(|| v.to_string(), str::to_owned);
    for (name, value) in object.as_object().into_iter().flatten() {
        let value = match value {
            Value::Object(parts) => parts
                .iter()
                .map(|(k, v)| format!("{k} {}", plain(v)))
                .collect::<Vec<_>>()
                .join(", "),
            Value::Array(parts) if parts.is_empty() => "nothing".to_owned(),
            other => plain(other),
        };
        lines.push(format!("{name:>16}  {value}"));
    }
    if object["wrong"].as_array().is_some_and(|w| !w.is_empty()) {
        say("not all was in order");
    }
    lines.join("\n")
}
