//! The grower: brings arenas up before they are needed, and takes those down that long were not, on a
//! thread of its own.
//!
//! It sleeps until somebody rings its bell, or until the time that it set itself. All it does happens in
//! [`Core::tick`], which is told the time, so that tests need neither thread nor clock. While it maps and
//! registers it holds `arenas`, a lock that alloc, free and the books never take; the slabs' lock it takes
//! for moments.
//!
//! | | `open` | the bell rings below |
//! |---|---|---|
//! | asleep | yes | the watermark; half of it, if what is in caches makes up for the rest |
//! | at work, or waiting after a failure | no | 0 (never) |
//! | the pool is as large as it may be | no | 0 (never) |

use std::{
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    thread,
    time::{Duration, Instant},
};

use parking_lot::Mutex;

use super::{Core, rails::Changes};
use crate::{
    arena::{Arenas, Standing, Told},
    bell::Bell,
    config::{self, Event, EventHook, Plan},
    error::BuildError,
    stats::Stats,
    sys::signals,
};

/// What is known of growing and shrinking, and who does it.
pub(super) struct Grower {
    bell: Arc<Bell>,
    /// An arena could come now: a refused alloc may ring.
    open: AtomicBool,
    /// An alloc was refused.
    wanted: AtomicBool,
    /// The pool is at its end.
    stop: AtomicBool,
    by_hand: bool,
    /// How many slots the pool begins with.
    first: usize,
    /// The longest arena that can come; 0 if none can.
    longest: usize,
    watermark: usize,
    shrink_after: Duration,
    pub(super) max_capacity: usize,
    pub(super) hook: Option<EventHook>,
    /// Held for the length of a tick.
    clock: Mutex<Clock>,
    pub(super) changes: Changes,
    /// Whether the thread runs.
    started: Mutex<bool>,
    born: Instant,
    growths: AtomicU64,
    shrinks: AtomicU64,
    failures: AtomicU64,
    nanos: AtomicU64,
}

#[derive(Default)]
struct Clock {
    /// Failures since the last success.
    failures: u32,
    retry_at: Option<Duration>,
    look_at: Option<Duration>,
    /// By slot, counted from the first that can grow: since when it was found free.
    free_since: Vec<Option<Duration>>,
}

/// An event that is told once no lock is held.
enum Later {
    Told(Told),
    Grew { len: usize, capacity: usize, took: Duration },
    Shrank { len: usize, capacity: usize },
    Failed { len: usize, failures: u32, retry_after: Duration, error: BuildError },
}

const FIRST_RETRY: Duration = Duration::from_millis(100);
const LAST_RETRY: Duration = Duration::from_secs(60);
/// How many looks fall into the time that an arena must have been free.
const LOOKS: u32 = 8;
const SHORTEST_LOOK: Duration = Duration::from_millis(10);

impl Grower {
    pub(super) fn new(plan: &Plan, bell: Arc<Bell>) -> Self {
        let growth = &plan.growth;
        Self {
            bell,
            open: AtomicBool::new(false),
            wanted: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            by_hand: growth.by_hand,
            first: plan.arenas.len(),
            longest: growth.more.iter().copied().max().unwrap_or(0),
            watermark: growth.watermark,
            shrink_after: growth.shrink_after,
            max_capacity: plan.max_capacity(),
            hook: plan.hook.clone(),
            clock: Mutex::new(Clock {
                free_since: vec![None; growth.more.len()],
                ..Clock::default()
            }),
            changes: Changes::default(),
            started: Mutex::new(false),
            born: Instant::now(),
            growths: AtomicU64::new(0),
            shrinks: AtomicU64::new(0),
            failures: AtomicU64::new(0),
            nanos: AtomicU64::new(0),
        }
    }

    /// A share's: there is nothing to grow, and no device of its own.
    pub(super) fn none() -> Self {
        Self {
            bell: Arc::new(Bell::new()),
            open: AtomicBool::new(false),
            wanted: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            by_hand: true,
            first: 0,
            longest: 0,
            watermark: 0,
            shrink_after: Duration::ZERO,
            max_capacity: 0,
            hook: None,
            clock: Mutex::new(Clock::default()),
            changes: Changes::default(),
            started: Mutex::new(false),
            born: Instant::now(),
            growths: AtomicU64::new(0),
            shrinks: AtomicU64::new(0),
            failures: AtomicU64::new(0),
            nanos: AtomicU64::new(0),
        }
    }

    pub(super) fn can_grow(&self) -> bool {
        self.longest > 0
    }

    /// Starts the thread, unless it runs or ticks come by hand.
    pub(super) fn start(&self, core: &Weak<Core>) -> std::io::Result<()> {
        let mut started = self.started.lock();
        if *started || self.by_hand {
            return Ok(());
        }
        let (core, bell) = (core.clone(), self.bell.clone());
        let thread = thread::Builder::new().name("pinpool-grower".to_owned());
        let handle = thread.spawn(move || run(&core, &bell))?;
        self.bell.attach(handle.thread().clone());
        *started = true;
        // Whoever rang before the bell knew the thread is heard now.
        self.bell.ring();
        // The thread is not waited for: `tear_down` waits for what it has in hand, and that is enough.
        Ok(())
    }

    /// Has the grower look at what was asked of it.
    pub(super) fn ring(&self) {
        self.bell.ring();
    }

    /// An alloc of `len` bytes was refused for want of memory.
    pub(super) fn refused(&self, len: usize) {
        if self.open.load(Relaxed) && len <= self.longest {
            // Ordered before the grower's swap by the bell.
            self.wanted.store(true, Relaxed);
            self.bell.ring();
        }
    }

    /// Tells the grower that the pool is at its end: it ends what it has in hand as soon as it can.
    pub(super) fn stop(&self) {
        self.stop.store(true, Relaxed);
        self.bell.ring();
    }

    pub(super) fn stop_flag(&self) -> &AtomicBool {
        &self.stop
    }

    pub(super) fn count_into(&self, stats: &mut Stats) {
        stats.max_capacity = self.max_capacity;
        stats.growths = self.growths.load(Relaxed);
        stats.shrinks = self.shrinks.load(Relaxed);
        stats.growth_failures = self.failures.load(Relaxed);
        stats.growth_time = Duration::from_nanos(self.nanos.load(Relaxed));
    }
}

/// The thread. Has no share in the core while it sleeps.
fn run(core: &Weak<Core>, bell: &Bell) {
    signals::block_all();
    loop {
        let Some(core) = core.upgrade() else { return };
        if core.grower.stop.load(Relaxed) || core.foreign_process() {
            return;
        }
        let next = core.tick(core.grower.born.elapsed());
        drop(core);
        bell.wait(next);
    }
}

impl Core {
    /// Does what there is to do at a time, which is counted from the pool's birth and never goes back: device
    /// changes, growing, shrinking. Says after how long it wants to be called at the latest.
    pub(super) fn tick(&self, now: Duration) -> Option<Duration> {
        if self.foreign() {
            return None;
        }
        let g = &self.grower;
        let mut later = Vec::new();
        let mut clock = g.clock.lock();
        let mut told = Vec::new();
        self.make_changes(&mut told);
        later.extend(told.into_iter().map(Later::Told));
        let next = if g.can_grow() {
            self.grow_while_short(&mut clock, now, &mut later);
            self.shrink_what_is_free(&mut clock, now, &mut later);
            // What shrank can grow again.
            self.arm(&clock, now);
            [clock.retry_at, clock.look_at].into_iter().flatten().min()
        } else {
            None
        };
        drop(clock);
        for event in &later {
            self.tell(event);
        }
        next.map(|at| at.saturating_sub(now))
    }

    fn tell(&self, event: &Later) {
        let hook = self.grower.hook.as_ref();
        match event {
            Later::Told(told) => told.tell(hook),
            &Later::Grew { len, capacity, took } => {
                config::tell(hook, &Event::Grew { len, capacity, took });
            }
            &Later::Shrank { len, capacity } => {
                config::tell(hook, &Event::Shrank { len, capacity });
            }
            &Later::Failed { len, failures, retry_after, ref error } => {
                let (capacity, max_capacity) = (self.slabs.capacity(), self.grower.max_capacity);
                let event = Event::GrowthFailed {
                    len,
                    capacity,
                    max_capacity,
                    failures,
                    retry_after,
                    error,
                };
                config::tell(hook, &event);
            }
        }
    }

    /// Sets the bell for the first shortage.
    pub(super) fn arm_first(&self) {
        if self.grower.can_grow() {
            let clock = self.grower.clock.lock();
            self.arm(&clock, Duration::ZERO);
        }
    }

    /// Sets the bell for the next shortage, and rings it if there is one already.
    fn arm(&self, clock: &Clock, now: Duration) {
        let g = &self.grower;
        let vacant = self.arenas.lock().as_ref().is_some_and(|a| a.vacancy().is_some());
        let waiting = clock.retry_at.is_some_and(|at| now < at);
        if !vacant || waiting || g.stop.load(Relaxed) {
            return;
        }
        g.open.store(true, Relaxed);
        // More than half of the watermark is left here, or there is enough again.
        let idle = self.slabs.idle();
        let below =
            if idle < g.watermark { g.watermark.div_ceil(2).min(idle) } else { g.watermark };
        if self.slabs.ring_below(below) || g.wanted.load(Relaxed) {
            g.bell.ring();
        }
    }

    fn disarm(&self) {
        self.grower.open.store(false, Relaxed);
        self.slabs.ring_below(0);
    }

    /// Whether less than the watermark is left, in slabs and caches together.
    fn is_short(&self) -> bool {
        let watermark = self.grower.watermark;
        let idle = self.slabs.idle();
        if idle >= watermark {
            return false;
        }
        // What is in quarantine stays there: that is what it is for, and the pool may grow. More may have come into it
        // since the caches were counted.
        let cached = self.cached().bytes().saturating_sub(self.guard_stats().quarantined);
        if idle + cached < watermark {
            return true;
        }
        if idle < watermark.div_ceil(2) {
            // It is in caches, where a look at the slabs does not see it go. At least half of the watermark
            // went there since this was done last.
            self.empty_caches();
        }
        false
    }

    fn grow_while_short(&self, clock: &mut Clock, now: Duration, later: &mut Vec<Later>) {
        let g = &self.grower;
        if clock.retry_at.is_some_and(|at| now < at) {
            return;
        }
        clock.retry_at = None;
        // Who waits is short of something, whatever is left.
        let short = || g.wanted.swap(false, Relaxed) || self.waiters.any() || self.is_short();
        while !g.stop.load(Relaxed) && short() {
            self.disarm();
            let mut guard = self.arenas.lock();
            let Some(arenas) = guard.as_mut() else { return };
            let Some((slot, len)) = arenas.vacancy() else { return };
            let start = Instant::now();
            let mut told = Vec::new();
            let grown = arenas.grow(slot, &g.stop, &mut told);
            let took = start.elapsed();
            g.nanos.fetch_add(u64::try_from(took.as_nanos()).unwrap_or(u64::MAX), Relaxed);
            later.extend(told.into_iter().map(Later::Told));
            match grown {
                Ok(Some(standing)) => {
                    self.slabs.prepare_arena(standing.offset, standing.len);
                    self.prepare_guarded(standing.offset, standing.len, true);
                    self.publish(&standing);
                    // Before the capacity can be seen: who sees that finds it counted.
                    g.growths.fetch_add(1, Relaxed);
                    self.slabs.add_arena(standing.offset, standing.len);
                    self.depot.limits.follow(self.slabs.capacity());
                    self.show(arenas);
                    drop(guard);
                    let capacity = self.slabs.capacity();
                    later.push(Later::Grew { len: standing.len, capacity, took });
                    self.wake_waiters();
                    clock.failures = 0;
                    if clock.look_at.is_none() {
                        clock.look_at = Some(now + g.look_interval());
                    }
                }
                Ok(None) => return,
                Err(error) => {
                    self.show(arenas);
                    drop(guard);
                    g.failures.fetch_add(1, Relaxed);
                    let times = 1u32 << clock.failures.min(16);
                    let retry_after = FIRST_RETRY.saturating_mul(times).min(LAST_RETRY);
                    clock.failures = clock.failures.saturating_add(1);
                    clock.retry_at = Some(now + retry_after);
                    let failures = clock.failures;
                    later.push(Later::Failed { len, failures, retry_after, error });
                    return;
                }
            }
        }
    }

    /// Writes an arena's keys to where look-ups find them. Before its first block can be had.
    pub(super) fn publish(&self, standing: &Standing) {
        let mut keys = crate::access::PackedKeys::from_word(0);
        match &self.rails {
            Some(table) => {
                for &(rail, keys) in &standing.keys {
                    table.set(standing.slot, rail, keys.word());
                }
            }
            None => keys = standing.keys.first().map_or(keys, |k| k.1),
        }
        self.slabs.map().publish(standing.offset, standing.len, keys);
    }

    fn shrink_what_is_free(&self, clock: &mut Clock, now: Duration, later: &mut Vec<Later>) {
        let g = &self.grower;
        let slots = self.slabs.arenas_from(g.first);
        let Some(shortest) = slots.iter().map(|s| s.1).min() else {
            clock.look_at = None;
            return;
        };
        if clock.look_at.is_some_and(|at| now < at) {
            return;
        }
        clock.look_at = Some(now + g.look_interval());
        // What must stay free for an arena to go.
        let keep = g.watermark.saturating_mul(2);
        let least = keep.saturating_add(shortest);
        let idle = self.slabs.idle();
        // Blocks in caches keep an arena, or hide that there is enough without it.
        if (idle < least || slots.iter().any(|s| s.2)) && idle + self.cached().bytes() >= least {
            self.call_back();
        }
        let mut idle = self.slabs.idle();
        for &(slot, len, _) in slots.iter().rev() {
            let since = &mut clock.free_since[slot - g.first];
            *since = match self.slabs.look_at(slot) {
                Some(found) if found.free => since.filter(|_| !found.touched).or(Some(now)),
                _ => None,
            };
            let rested = since.is_some_and(|s| now.saturating_sub(s) >= g.shrink_after);
            if rested && idle >= keep.saturating_add(len) && self.take_out(slot, len, later) {
                idle = idle.saturating_sub(len);
                *since = None;
            }
        }
        self.park(idle.saturating_sub(keep));
    }

    /// Parks as many of the highest arenas as could be spared.
    fn park(&self, mut spare: usize) {
        let mut from = None;
        for (slot, len, _) in self.slabs.arenas_from(self.grower.first).into_iter().rev() {
            let Some(left) = spare.checked_sub(len) else { break };
            (spare, from) = (left, Some(slot));
        }
        self.slabs.park_from(from);
    }

    /// Takes one arena out and down; false if it is in use after all.
    fn take_out(&self, slot: usize, len: usize, later: &mut Vec<Later>) -> bool {
        let mut guard = self.arenas.lock();
        let Some(arenas) = guard.as_mut() else { return false };
        // From here on no block of it can be had.
        let Some(offset) = self.slabs.remove_arena(slot) else { return false };
        self.forget_guarded(offset, len);
        self.depot.limits.follow(self.slabs.capacity());
        self.slabs.map().unpublish(offset);
        let mut told = Vec::new();
        arenas.shrink(slot, &mut told);
        self.show(arenas);
        drop(guard);
        later.extend(told.into_iter().map(Later::Told));
        later.push(Later::Shrank { len, capacity: self.slabs.capacity() });
        self.grower.shrinks.fetch_add(1, Relaxed);
        true
    }

    /// Copies what is told of arenas and devices.
    pub(super) fn show(&self, arenas: &Arenas) {
        let now = Arc::new(super::rails::Shown::of(arenas));
        let before = std::mem::replace(&mut *self.shown.lock(), now);
        // Without the lock.
        drop(before);
    }
}

impl Grower {
    fn look_interval(&self) -> Duration {
        (self.shrink_after / LOOKS).max(SHORTEST_LOOK)
    }
}
