//! The books: what of a pool is where, and what it has done. Counted on the slow path and by reading other
//! threads' cursors; the fast path counts nothing. This file says what the numbers mean, `sums` how they sum;
//! gathering them is `pool/books.rs`'s.

mod sums;

use std::time::Duration;

pub(crate) use self::sums::Sum;
use crate::{
    access::Access,
    size_class::{self, CLASSES},
};

/// Where a pool's bytes are at one moment, over all its access classes and shares.
///
/// At a quiet point (no alloc or free under way) `live + cached + free + unused == capacity`, in total,
/// for every class, access class and share; and what the access classes have sums to the total (P5). While other threads work, a block in passing may be counted on the wrong
/// side.
#[derive(Clone, Default, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Stats {
    /// Bytes of all arenas.
    pub capacity: usize,
    /// Bytes that the pool may grow to.
    pub max_capacity: usize,
    /// Bytes of blocks that are out in buffers.
    pub live: usize,
    /// Bytes of free blocks in threads' magazines and in the depot, and in
    /// [quarantine](crate::Guards::quarantine).
    pub cached: usize,
    /// Bytes of free blocks in slabs.
    pub free: usize,
    /// Bytes of free runs, and what slabs leave over at their ends.
    pub unused: usize,
    /// How many buffers are out.
    pub live_buffers: usize,
    /// The most bytes that were out of the slabs at one time, in buffers or in caches: the peak of `live`, or
    /// more by what was cached then (which would have been called back for want of other memory). Counted where
    /// blocks leave the slabs, since counting buffers would cost every alloc. With several classes or shares, the
    /// sum of theirs, which may have come at different times.
    pub high_water: usize,
    /// What the threads' caches served.
    pub caches: CacheStats,
    /// Whether [`CacheStats::hits`] is exact: with [`Builder::count_hits`](crate::Builder::count_hits), or where
    /// caches work under a lock since the kernel has no `membarrier`.
    pub hits_exact: bool,
    /// How many of them are out as tokens, in flight or lost. [`Pool::in_flight`](crate::Pool::in_flight) lists
    /// them.
    pub in_flight: usize,
    /// How many requests wait for memory now.
    pub waiting: usize,
    /// How many have waited or do, over the pool's life, by
    /// [`alloc_wait`](crate::Pool::alloc_wait) or [`alloc_async`](crate::Pool::alloc_async). One that could be
    /// served at once has not waited.
    pub waits: u64,
    /// How long those that wait no longer did, together, whether they were served or gave up.
    pub wait_time: Duration,
    /// The longest of these times.
    pub longest_wait: Duration,
    /// How many allocs were refused for want of memory, or waited in vain; through a share, in its own books.
    pub refused: u64,
    /// The longest free run, in bytes: the longest span that can be had at once.
    pub largest_free: usize,
    /// How many free runs there are.
    pub free_runs: usize,
    /// Bytes of the free runs that are not the longest of their arena; see
    /// [`fragmentation`](Stats::fragmentation).
    pub scattered: usize,
    /// How many arenas there are.
    pub arenas: usize,
    /// How many memory regions: arenas, once for each device.
    pub regions: usize,
    /// What pages the arenas are made of, smallest first.
    pub pages: Vec<PageStats>,
    /// How many register calls the pool has made.
    pub register_calls: u64,
    /// How long register calls took together, and the longest of them; refused ones included.
    pub register_time: Duration,
    /// See [`register_time`](Stats::register_time).
    pub longest_register: Duration,
    /// How often the pool has grown by an arena, and given one back.
    pub growths: u64,
    /// See [`growths`](Stats::growths).
    pub shrinks: u64,
    /// How often an arena that was to come did not.
    pub growth_failures: u64,
    /// What bringing arenas up took in all since the pool was built, failed ones included.
    pub growth_time: Duration,
    /// Bytes that RDMA has pinned for the whole process (`VmPin`), as of this call; `capacity` is this
    /// pool's part of it on a verbs device.
    ///
    /// `VmLck` of the process and `Mlocked` of `/proc/meminfo` stay at zero meanwhile: they count pages that
    /// `mlock` keeps from being swapped, whereas RDMA holds its pages by reference, and the kernel counts those
    /// apart. Monitoring that watches `Mlocked` alone sees nothing of a pool.
    pub pinned: u64,
    /// Bytes that `mlock` keeps for the whole process (`VmLck`): the software device's.
    pub locked: u64,
    /// `RLIMIT_MEMLOCK`, soft; `None` is unlimited. Holds against `pinned` and `locked` apart, unless
    /// `memlock_exempt`.
    pub memlock_limit: Option<u64>,
    /// Whether the limit does not bind this process (`CAP_IPC_LOCK`, effective, in the initial user namespace).
    pub memlock_exempt: bool,
    /// What guards have found, and what they keep back.
    pub guards: GuardStats,
    /// Bytes of the allocator's own tables, all of them outside registered memory.
    pub table_bytes: usize,
    /// The size classes that have slabs or ever had, smallest first, and last, with block size 0, spans above
    /// them.
    pub classes: Vec<ClassStats>,
    /// The access classes, the default one first.
    pub access_classes: Vec<AccessStats>,
    /// The shares, those of one access class together.
    pub shares: Vec<ShareStats>,
}

/// What the guards of a pool have found, and what they keep back. All zero in one without.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct GuardStats {
    /// How many buffers' memory somebody wrote to after they were given back, as far as it was found
    /// ([`Guards::poison`](crate::Guards::poison)).
    pub written_after_free: u64,
    /// Beyond how many buffers' ends somebody wrote, as far as it was found
    /// ([`Guards::canary`](crate::Guards::canary)).
    pub written_beyond_end: u64,
    /// Bytes in quarantine, which are part of those cached.
    pub quarantined: usize,
}

/// Free blocks outside of the slabs.
#[derive(Clone, Debug)]
pub(crate) struct Cached {
    /// By class; the last is spans.
    pub(crate) blocks: [usize; CLASSES + 1],
    /// Bytes of the spans.
    pub(crate) span_bytes: usize,
}

impl Default for Cached {
    fn default() -> Self {
        Self { blocks: [0; CLASSES + 1], span_bytes: 0 }
    }
}

impl Cached {
    /// Bytes of all.
    pub(crate) fn bytes(&self) -> usize {
        let of_class = |class| self.blocks[class] * size_class::size_of(class);
        (0..CLASSES).map(of_class).sum::<usize>() + self.span_bytes
    }
}

/// Where the bytes of a part of a pool are.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Books {
    /// Bytes of it.
    pub capacity: usize,
    /// Bytes of blocks that are out in buffers.
    pub live: usize,
    /// Bytes of free blocks in threads' magazines and in the depot.
    pub cached: usize,
    /// Bytes of free blocks in slabs.
    pub free: usize,
    /// Bytes of free runs, and what slabs leave over at their ends.
    pub unused: usize,
    /// How many buffers are out.
    pub live_buffers: usize,
    /// See [`Stats::high_water`].
    pub high_water: usize,
    /// What the threads' caches served.
    pub caches: CacheStats,
    /// The longest free run, in bytes.
    pub largest_free: usize,
    /// How many free runs there are.
    pub free_runs: usize,
    /// Bytes of the free runs that are not the longest of their arena.
    pub scattered: usize,
    /// How many requests have waited or do, over the pool's life. Who waits through a share is counted there, once.
    pub waits: u64,
    /// How long those that wait no longer did.
    pub wait_time: Duration,
    /// The longest of these times.
    pub longest_wait: Duration,
    /// How many allocs were refused for want of memory, or waited in vain; through a share, in its own books.
    pub refused: u64,
}

/// What threads' caches (magazines) served, since the pool was built.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct CacheStats {
    /// Allocs that a thread's own magazines served. **At least** so many: a cached alloc leaves no count behind,
    /// so this is what must have been, told from the blocks that went into empty magazines and were gone at the
    /// next miss. A thread that frees as it allocates can go on for ever without a trace.
    /// [`Builder::count_hits`](crate::Builder::count_hits) makes it exact, at a price.
    pub hits: u64,
    /// Allocs that they could not serve, and that asked the depot or the slabs under a lock: exact. Those of
    /// lengths above the classes are always among them.
    pub misses: u64,
    /// How many of the misses a whole magazine from the depot made good.
    pub from_depot: u64,
}

/// The arenas on pages of one size.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct PageStats {
    /// Bytes of one page, as obtained.
    pub page_size: usize,
    /// How many arenas are on such pages.
    pub arenas: usize,
    /// Bytes of them.
    pub bytes: usize,
}

/// What bringing arenas up and down has come to in one access class.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct ArenaStats {
    /// How many arenas there are.
    pub arenas: usize,
    /// How many memory regions: arenas, once for each device.
    pub regions: usize,
    /// How many register calls were made.
    pub register_calls: u64,
    /// How long they took together, refused ones included.
    pub register_time: Duration,
    /// The longest of them.
    pub longest_register: Duration,
    /// How often the class has grown by an arena.
    pub growths: u64,
    /// How often it has given one back.
    pub shrinks: u64,
    /// How often an arena that was to come did not.
    pub growth_failures: u64,
    /// What bringing arenas up took in all since the pool was built, failed ones included.
    pub growth_time: Duration,
}

/// One access class of a pool.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct AccessStats {
    /// Its name.
    pub name: String,
    /// Its rights.
    pub access: Access,
    /// How many arenas it has.
    pub arenas: usize,
    /// What bringing them up took.
    pub bringing_up: ArenaStats,
    /// How many requests wait for its memory now, through its shares too.
    pub waiting: usize,
    /// All of it, its shares included.
    pub all: Books,
    /// What no share has reserved.
    pub unreserved: Books,
}

/// One share of a pool.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct ShareStats {
    /// Its name.
    pub name: String,
    /// The access class that it is a share of.
    pub class: String,
    /// What it has reserved. Buffers that it was given beyond that are in the class's unreserved books.
    pub reserve: Books,
    /// How often the whole reserve was searched in vain.
    pub ran_dry: u64,
    /// How often an allocation was refused, since the unreserved memory had nothing either.
    pub refused: u64,
    /// How many requests wait for memory now.
    pub waiting: usize,
    /// How many have waited or do, over the pool's life.
    pub waits: u64,
    /// How long those that wait no longer did.
    pub wait_time: Duration,
}

/// Where one class's bytes are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct ClassStats {
    /// Bytes of one block; 0 stands for spans, whose lengths differ.
    pub block: usize,
    /// Bytes of the class's slabs.
    pub capacity: usize,
    /// Bytes of blocks out in buffers.
    pub live: usize,
    /// Bytes of blocks in magazines and depot.
    pub cached: usize,
    /// Bytes of blocks in slabs.
    pub free: usize,
    /// Bytes that slabs leave over at their ends.
    pub unused: usize,
    /// How many buffers are out.
    pub live_buffers: usize,
    /// The most bytes of the class that were out of the slabs at one time; see [`Stats::high_water`]. Classes
    /// have their peaks at different times, so these do not sum to the pool's.
    pub high_water: usize,
    /// What the threads' caches served of it.
    pub caches: CacheStats,
    /// How many requests for it have waited or do.
    pub waits: u64,
    /// How long those that wait no longer did.
    pub wait_time: Duration,
}

/// What waiting has come to, in all or of one class.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub(crate) struct WaitCounts {
    pub(crate) times: u64,
    pub(crate) time: Duration,
    pub(crate) longest: Duration,
}

/// What was counted beside the slabs' own counts.
pub(crate) struct Counted<'a> {
    /// What lies in magazines, depot and quarantine.
    pub(crate) cached: &'a Cached,
    pub(crate) caches: &'a dyn Fn(usize) -> CacheStats,
    pub(crate) waits: &'a dyn Fn(usize) -> WaitCounts,
}

impl Stats {
    /// What part of the free runs' bytes lies apart from the longest run of its arena, 0 to 1: 0 when each arena's
    /// free memory is in one piece, close to 1 when it is in many small ones. 0 when there is none.
    ///
    /// What slabs hold (`free`) is not in it: a slab's free blocks serve their class, whatever lies around them.
    pub fn fragmentation(&self) -> f64 {
        let left_over: usize = self.classes.iter().map(|c| c.unused).sum();
        match self.unused.saturating_sub(left_over) {
            0 => 0.0,
            free_runs => self.scattered as f64 / free_runs as f64,
        }
    }
}

impl CacheStats {
    /// What part of allocs threads' caches served, 0 to 1, as far as `hits` tells: at least so much. `None` before
    /// the first.
    pub fn hit_rate(&self) -> Option<f64> {
        let all = self.hits + self.misses;
        (all > 0).then(|| self.hits as f64 / all as f64)
    }
}
