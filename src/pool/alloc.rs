//! The slow path of alloc: depot, slabs, and calling back what lies in caches, in this order.

use std::{
    panic::Location,
    sync::{
        Arc,
        atomic::{
            AtomicU64,
            Ordering::{Acquire, Relaxed, Release},
        },
    },
    time::{Duration, Instant},
};

use super::{Core, line::Need};
use crate::{
    config::{self, Event},
    depot::{Depot, Magazine},
    error::{AllocError, Exhausted},
    guard::Caller,
    lock::Mutex,
    magazine::Local,
    size_class::{self, CLASSES, MAX_SLAB_BLOCK, PAGE, SPAN_CLASS},
    slab::{Entry, Given},
    sys::limits,
    thread,
    waiters::Passed,
};

/// How many blocks one refill takes from the slabs at most.
const REFILL: usize = 64;
/// How many refills stay small after memory ran short.
const SCARCE_REFILLS: u32 = 64;

/// How often allocs were refused, and when that was told.
pub(super) struct Refused {
    times: AtomicU64,
    told: Mutex<Option<(Instant, u64)>>,
}

impl Refused {
    /// At most so often it is told.
    const PAUSE: Duration = Duration::from_secs(1);

    pub(super) fn new() -> Self {
        Self { times: AtomicU64::new(0), told: Mutex::new(None) }
    }

    pub(super) fn times(&self) -> u64 {
        self.times.load(Relaxed)
    }

    /// Counts one; how many there were since it was last told, if it is to be told now.
    fn count(&self, now: Instant) -> Option<u64> {
        let times = self.times.fetch_add(1, Relaxed) + 1;
        // Whoever finds it locked leaves telling to the other.
        let mut told = self.told.try_lock()?;
        let before = match *told {
            Some((at, _)) if now.saturating_duration_since(at) < Self::PAUSE => return None,
            Some((_, times)) => times,
            None => 0,
        };
        *told = Some((now, times));
        Some(times.saturating_sub(before))
    }
}

/// An empty magazine at hand, put by in the end if it was not used.
struct PutBy<'a> {
    depot: &'a Depot,
    class: usize,
    empty: Option<Magazine>,
}

impl Drop for PutBy<'_> {
    fn drop(&mut self) {
        if let Some(m) = self.empty.take() {
            self.depot.put_empty(self.class, m);
        }
    }
}

impl Core {
    /// Everything that the magazine at hand could not serve: any length, any alignment. For why it failed,
    /// see [`refusal`](Core::refusal). A share's reserve is left alone while it is known to be dry.
    #[track_caller]
    pub(crate) fn alloc_slow(&self, len: usize, align: usize) -> Option<(Entry, usize)> {
        self.alloc_slow_by(len, align, Location::caller())
    }

    /// The same for `caller`.
    pub(super) fn alloc_slow_by(
        &self,
        len: usize,
        align: usize,
        caller: Caller,
    ) -> Option<(Entry, usize)> {
        match &self.beyond {
            None => self.search(len, align, caller),
            Some(beyond) => beyond.unless_dry(len, align, || self.search(len, align, caller)),
        }
    }

    /// All of this heap, caches included.
    pub(super) fn search(
        &self,
        len: usize,
        align: usize,
        caller: Caller,
    ) -> Option<(Entry, usize)> {
        self.search_by(len, align, true, caller)
    }

    /// The same, but nothing while others wait: no waker is called.
    #[track_caller]
    pub(super) fn alloc_quietly(&self, len: usize, align: usize) -> Option<(Entry, usize)> {
        self.search_by(len, align, false, Location::caller())
    }

    fn search_by(
        &self,
        len: usize,
        align: usize,
        passing: bool,
        caller: Caller,
    ) -> Option<(Entry, usize)> {
        if self.foreign() || self.out_of_range(len, align).is_some() {
            return None;
        }
        let need = self.need(len, align);
        if self.waiters.any() {
            self.depot.count_miss(need.class);
            return self.alloc_rest(&need, passing, caller);
        }
        let class = need.class;
        let cached = if class < CLASSES {
            self.alloc_cached(class).inspect(|&entry| self.show_block(entry, class))
        } else {
            self.depot.count_miss(class);
            self.consolidate(len);
            None
        };
        cached.map(|e| (e, class)).or_else(|| self.alloc_rest(&need, passing, caller))
    }

    /// What no pool like this one can ever serve.
    pub(super) fn out_of_range(&self, len: usize, align: usize) -> Option<AllocError> {
        // Where shares have all of a class, nothing is too large for it: it is just always exhausted.
        let max = self.max_len();
        if len > max && max > 0 {
            return Some(AllocError::TooLarge { asked: len, max });
        }
        let largest = 1 << max.max(PAGE).ilog2();
        let bad = !align.is_power_of_two() || align > largest;
        bad.then_some(AllocError::Alignment { asked: align, max: largest })
    }

    /// The class whose blocks hold `len` bytes so aligned, or a span's.
    pub(super) fn class_for(&self, len: usize, align: usize) -> usize {
        if align > PAGE {
            return SPAN_CLASS;
        }
        let class = size_class::class_of_aligned(len.max(1), align);
        // Blocks of coloured slabs keep no more than a line's alignment.
        let fits = self.slabs.serves(class)
            && align <= size_class::align_of(self.slabs.stride(class)).max(1);
        if fits { class } else { SPAN_CLASS }
    }

    /// Why [`alloc_slow`](Core::alloc_slow) gave nothing.
    #[cold]
    pub(crate) fn refusal(&self, len: usize, align: usize) -> AllocError {
        if self.foreign() {
            let this = limits::process_id();
            return AllocError::ForeignProcess { owner: self.process, this };
        }
        if let Some(never) = self.out_of_range(len, align) {
            return never;
        }
        self.class().unwrap_or(self).grower.refused(len);
        AllocError::Exhausted(self.refuse(len, self.class_for(len, align)))
    }

    /// The longest buffer: a share's may come from beyond its reserve.
    pub(super) fn max_len(&self) -> usize {
        let beyond = self.class().map_or(0, |class| class.slabs.max_len());
        self.slabs.max_len().max(beyond)
    }

    /// Through this thread's magazines: previous magazine, then depot, then slabs.
    pub(super) fn alloc_cached(&self, class: usize) -> Option<Entry> {
        let cached = thread::with_local(self, |local| {
            // SAFETY: `with_local` gives this thread's own, and this thread is not inside a gate.
            let mut hold = unsafe { local.hold_as_owner(&self.depot) };
            let mut empty = None;
            if hold.lacks(class) {
                empty = self.depot.get_empty(class);
                if empty.is_none() {
                    // Made without the lock.
                    drop(hold);
                    empty = Some(self.depot.make_empty(class));
                    // SAFETY: as above.
                    hold = unsafe { local.hold_as_owner(&self.depot) };
                }
            }
            // Whatever becomes of it, it is put by if it was not used.
            let empty = &mut PutBy { depot: &self.depot, class, empty };
            // While somebody waits nothing goes into caches. Asked under the lock that whoever emptied them
            // had before: see `waiters.rs`.
            if !hold.attached() || self.waiters.any() {
                self.depot.count_miss(class);
                return None;
            }
            let mut entry = hold.pop(class);
            if entry.is_some() {
                // Where gates are used the next miss counts it.
                self.depot.count_hits(class, u64::from(!self.gated));
            } else {
                if !hold.reload(&self.depot, class, self.gated) {
                    if size_class::size_of(class) > MAX_SLAB_BLOCK {
                        // Calling back takes this thread's lock too.
                        drop(hold);
                        self.consolidate(size_class::size_of(class));
                        // SAFETY: as above.
                        hold = unsafe { local.hold_as_owner(&self.depot) };
                        // A thief may have closed the pool's caches meanwhile, or somebody begun to wait.
                        if !hold.attached() || self.waiters.any() {
                            return None;
                        }
                    }
                    hold.fill(&self.depot, class, &mut empty.empty, |room, sink| {
                        self.slabs.take(class, self.refill(room), sink);
                    });
                }
                entry = hold.pop(class);
            }
            entry
        });
        if cached.is_none() {
            self.depot.count_miss(class);
        }
        cached.flatten()
    }

    pub(super) fn refill(&self, room: usize) -> usize {
        let scarce = |n: u32| n.checked_sub(1);
        if self.scarce.load(Relaxed) > 0
            && self.scarce.fetch_update(Relaxed, Relaxed, scarce).is_ok()
        {
            return room.min(1);
        }
        room.min(REFILL)
    }

    /// Straight from the slabs, and if they are dry after calling back what lies in caches.
    ///
    /// While others wait: in fair dealing with them, or not at all.
    pub(super) fn alloc_shared(&self, need: &Need, passing: bool) -> Option<(Entry, usize)> {
        // Threads that allocate meanwhile may take what was called back; try again while anything is
        // found, but not for ever.
        for _ in 0..64 {
            if self.waiters.any() {
                if !passing {
                    return None;
                }
                match self.alloc_passing(need) {
                    Passed::Got(block) => return Some(block),
                    Passed::Refused => return None,
                    // Whoever waits is about to empty the caches, or waits no longer: what lies there counts.
                    Passed::Unsettled => self.call_back(),
                };
                continue;
            }
            // Pairs with the count in `drain_caches`: what is counted here is seen below.
            let recalls = self.recalls.load(Acquire);
            let got = self.take_now(need);
            if got.is_some() {
                return got;
            }
            // Nothing in the caches means nothing at all only if no other thread emptied them between
            // the look at the slabs and the look at the caches.
            if !self.reclaim(need.len) && self.recalls.load(Acquire) == recalls {
                return None;
            }
            self.scarce.store(SCARCE_REFILLS, Relaxed);
        }
        None
    }

    /// Before a run of `bytes` is cut: calls caches back if it is time to.
    pub(super) fn consolidate(&self, bytes: usize) {
        if self.slabs.consolidation_due(bytes) {
            self.empty_caches();
        }
    }

    /// Empties the caches into the slabs, and the quarantine. False if there was nothing.
    pub(super) fn call_back(&self) -> bool {
        let cached = self.empty_caches();
        self.empty_quarantine() || cached
    }

    /// The same for an alloc of `bytes`: of the quarantine, the oldest part alone.
    fn reclaim(&self, bytes: usize) -> bool {
        let cached = self.empty_caches();
        self.give_way(bytes) || cached
    }

    /// Empties the depot and every thread's magazines into the slabs. False if there was nothing.
    pub(super) fn empty_caches(&self) -> bool {
        self.slabs.consolidated();
        let registry = self.registry.lock();
        self.drain_caches(&registry.locals, false)
    }

    /// The caller holds the registry's lock, under which `locals` cannot change. Says whether there was
    /// anything.
    ///
    /// Magazines go from thread to thread through the depot alone, and from or to it only under the
    /// thread's lock; all those are held until the depot is empty too, so none slips by.
    pub(super) fn drain_caches(&self, locals: &[Arc<Local>], detach: bool) -> bool {
        let mut found = false;
        let mut holds = Local::hold_all(locals);
        holds.for_each(|hold| {
            hold.drain(&self.depot, |class, m| {
                found = true;
                self.empty_out(class, m);
            });
            if detach {
                hold.detach();
            }
        });
        for class in 0..CLASSES {
            while let Some(m) = self.depot.get_full(class) {
                found = true;
                self.empty_out(class, m);
            }
        }
        if found {
            self.recalls.fetch_add(1, Release);
        }
        found
    }

    /// Gives a magazine's blocks to the slabs and puts it by.
    pub(super) fn empty_out(&self, class: usize, m: Magazine) {
        let given = self.slabs.give(self.depot.entries(&m).iter().map(|e| e.ptr));
        // Magazines are emptied while the pool is open, or by `close` before it starts draining.
        debug_assert_eq!(given, Given::More);
        self.depot.put_empty(class, m);
    }

    /// The books for the error of an alloc that found no memory, or waited for it in vain: counts it, and tells.
    pub(super) fn refuse(&self, asked: usize, class: usize) -> Box<Exhausted> {
        let books = self.books_of(asked, class);
        if let Some(refused) = self.refused.count(Instant::now()) {
            let hook = self.class().unwrap_or(self).grower.hook.as_ref();
            config::tell(hook, &Event::Exhausted { books: &books, refused });
        }
        books
    }

    fn books_of(&self, asked: usize, class: usize) -> Box<Exhausted> {
        let mut stats = self.stats();
        let mut reserved = self.reserved;
        if let Some(class) = self.class() {
            reserved = class.reserved - stats.capacity;
            let beyond = class.stats();
            // Who waits through the share stands in both lines.
            stats.waiting = stats.waiting.max(beyond.waiting);
            stats.absorb(&beyond);
        }
        let block = if class < CLASSES {
            size_class::size_of(class)
        } else {
            asked.max(1).next_multiple_of(PAGE)
        };
        Box::new(Exhausted {
            asked,
            block,
            capacity: stats.capacity,
            reserved,
            max_capacity: stats.max_capacity - reserved,
            live: stats.live,
            live_buffers: stats.live_buffers,
            not_live: stats.capacity - stats.live,
            largest_free: stats.largest_free,
            waiting: stats.waiting,
        })
    }
}
