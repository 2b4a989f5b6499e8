//! The books: what of a pool is where, and what it has done. Counted on the slow path and by reading other
//! threads' cursors; the fast path counts nothing. Manages what the numbers mean and how they sum; gathering
//! them is `pool/books.rs`'s.

use std::time::Duration;

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
    /// Sums up.
    pub(crate) fn new(counts: &crate::slab::Counts, counted: &Counted<'_>) -> Self {
        let cached = counted.cached;
        let mut s = Self {
            capacity: counts.capacity,
            max_capacity: counts.capacity,
            unused: counts.free_runs,
            largest_free: counts.largest_run,
            free_runs: counts.runs,
            scattered: counts.scattered,
            high_water: counts.peak,
            table_bytes: counts.table_bytes,
            ..Self::default()
        };
        for (class, c) in counts.classes.iter().enumerate() {
            let (caches, waits) = ((counted.caches)(class), (counted.waits)(class));
            let high_water = counts.peaks[class];
            if (c.bytes, caches, waits.times, high_water) == (0, CacheStats::default(), 0, 0) {
                continue;
            }
            let mut entry = if class < CLASSES {
                let block = size_class::size_of(class);
                let in_cache = cached.blocks[class].min(c.taken);
                let out = c.taken - in_cache;
                let (live, cached, free) = (out * block, in_cache * block, c.free * block);
                let unused = c.bytes - live - cached - free;
                ClassStats {
                    capacity: c.bytes,
                    live,
                    cached,
                    free,
                    unused,
                    live_buffers: out,
                    ..ClassStats::of(block)
                }
            } else {
                let cached_bytes = cached.span_bytes.min(c.bytes);
                ClassStats {
                    capacity: c.bytes,
                    live: c.bytes - cached_bytes,
                    cached: cached_bytes,
                    live_buffers: c.taken - cached.blocks[class].min(c.taken),
                    ..ClassStats::of(0)
                }
            };
            (entry.caches, entry.high_water) = (caches, high_water);
            (entry.waits, entry.wait_time) = (waits.times, waits.time);
            s.live += entry.live;
            s.cached += entry.cached;
            s.free += entry.free;
            s.unused += entry.unused;
            s.live_buffers += entry.live_buffers;
            s.caches.absorb(&entry.caches);
            s.waits += waits.times;
            s.wait_time += waits.time;
            s.longest_wait = s.longest_wait.max(waits.longest);
            s.classes.push(entry);
        }
        s
    }

    /// Adds what another heap has; but for who waits, since some stand in two lines.
    pub(crate) fn absorb(&mut self, other: &Self) {
        self.capacity += other.capacity;
        self.live += other.live;
        self.cached += other.cached;
        self.free += other.free;
        self.unused += other.unused;
        self.live_buffers += other.live_buffers;
        self.high_water += other.high_water;
        self.caches.absorb(&other.caches);
        self.largest_free = self.largest_free.max(other.largest_free);
        self.free_runs += other.free_runs;
        self.scattered += other.scattered;
        self.arenas += other.arenas;
        self.regions += other.regions;
        for p in &other.pages {
            self.add_pages(*p);
        }
        self.register_time += other.register_time;
        self.longest_register = self.longest_register.max(other.longest_register);
        self.register_calls += other.register_calls;
        self.table_bytes += other.table_bytes;
        self.max_capacity += other.max_capacity;
        self.waits += other.waits;
        self.wait_time += other.wait_time;
        self.longest_wait = self.longest_wait.max(other.longest_wait);
        self.refused += other.refused;
        self.growths += other.growths;
        self.shrinks += other.shrinks;
        self.growth_failures += other.growth_failures;
        self.growth_time += other.growth_time;
        self.guards.written_after_free += other.guards.written_after_free;
        self.guards.written_beyond_end += other.guards.written_beyond_end;
        self.guards.quarantined += other.guards.quarantined;
        for c in &other.classes {
            match self.classes.iter_mut().find(|own| own.block == c.block) {
                Some(own) => {
                    own.capacity += c.capacity;
                    own.live += c.live;
                    own.cached += c.cached;
                    own.free += c.free;
                    own.unused += c.unused;
                    own.live_buffers += c.live_buffers;
                    own.high_water += c.high_water;
                    own.caches.absorb(&c.caches);
                    own.waits += c.waits;
                    own.wait_time += c.wait_time;
                }
                None => self.classes.push(*c),
            }
        }
        // Spans, whose block is 0, last.
        self.classes.sort_by_key(|c| c.block.wrapping_sub(1));
    }

    /// Adds the arenas of one page size.
    pub(crate) fn add_pages(&mut self, of: PageStats) {
        match self.pages.iter_mut().find(|own| own.page_size == of.page_size) {
            Some(own) => (own.arenas, own.bytes) = (own.arenas + of.arenas, own.bytes + of.bytes),
            None => self.pages.push(of),
        }
        self.pages.sort_by_key(|p| p.page_size);
    }

    /// What part of the free runs' bytes lies apart from the longest run of its arena, 0 to 1: 0 when each arena's
    /// free memory is in one piece, close to 1 when it is in many small ones. 0 when there is none.
    ///
    /// What slabs hold (`free`) is not in it: a slab's free blocks serve their class, whatever lies around them.
    pub fn fragmentation(&self) -> f64 {
        let left_over: usize = self.classes.iter().map(|c| c.unused).sum();
        fragmentation(self.scattered, self.unused.saturating_sub(left_over))
    }

    /// Whether the books balance: in total, for every class, access class and share, and their sums; and whether
    /// what was counted by class, by access class and share, and in total, is the same.
    pub fn balanced(&self) -> bool {
        let class = |c: &ClassStats| c.live + c.cached + c.free + c.unused == c.capacity;
        let mut all = Books::default();
        self.access_classes.iter().for_each(|a| all.absorb(&a.all));
        let summed = |a: &AccessStats| {
            let mut sum = a.unreserved;
            self.shares.iter().filter(|s| s.class == a.name).for_each(|s| sum.absorb(&s.reserve));
            sum == a.all && a.all.balanced() && a.unreserved.balanced()
        };
        self.live + self.cached + self.free + self.unused == self.capacity
            && self.classes.iter().all(class)
            && self.classes_sum()
            && self.pages_sum()
            && self.shares.iter().all(|s| s.reserve.balanced())
            && self.access_classes.iter().all(summed)
            && (self.access_classes.is_empty() || (all == self.books() && self.arenas_sum()))
    }

    /// Whether what is told by size class sums to the total.
    fn classes_sum(&self) -> bool {
        let mut sum = Books::default();
        let mut peaks = 0;
        for c in &self.classes {
            sum.live += c.live;
            sum.cached += c.cached;
            sum.free += c.free;
            sum.live_buffers += c.live_buffers;
            sum.caches.absorb(&c.caches);
            sum.waits += c.waits;
            sum.wait_time += c.wait_time;
            peaks += c.high_water;
        }
        let of =
            |b: &Books| (b.live, b.cached, b.free, b.live_buffers, b.caches, b.waits, b.wait_time);
        let caches = self.caches;
        of(&sum) == of(&self.books())
            && caches.from_depot <= caches.misses
            && (self.live..=peaks).contains(&self.high_water)
    }

    /// Whether the arenas by page size are all of them.
    fn pages_sum(&self) -> bool {
        self.pages.iter().map(|p| p.arenas).sum::<usize>() == self.arenas
    }

    fn arenas_sum(&self) -> bool {
        let of = |f: fn(&ArenaStats) -> u64| -> u64 {
            self.access_classes.iter().map(|a| f(&a.bringing_up)).sum()
        };
        of(|a| a.arenas as u64) == self.arenas as u64
            && of(|a| a.regions as u64) == self.regions as u64
            && of(|a| a.register_calls) == self.register_calls
            && of(|a| a.growths) == self.growths
            && of(|a| a.shrinks) == self.shrinks
            && of(|a| a.growth_failures) == self.growth_failures
    }
}

/// Of free runs of `all` bytes, `scattered` are not the longest in their arena.
fn fragmentation(scattered: usize, all: usize) -> f64 {
    if all == 0 { 0.0 } else { scattered as f64 / all as f64 }
}

impl CacheStats {
    /// What part of allocs threads' caches served, 0 to 1, as far as `hits` tells: at least so much. `None` before
    /// the first.
    pub fn hit_rate(&self) -> Option<f64> {
        let all = self.hits + self.misses;
        (all > 0).then(|| self.hits as f64 / all as f64)
    }

    pub(crate) fn absorb(&mut self, other: &Self) {
        self.hits += other.hits;
        self.misses += other.misses;
        self.from_depot += other.from_depot;
    }
}

impl ClassStats {
    fn of(block: usize) -> Self {
        Self {
            block,
            capacity: 0,
            live: 0,
            cached: 0,
            free: 0,
            unused: 0,
            live_buffers: 0,
            high_water: 0,
            caches: CacheStats::default(),
            waits: 0,
            wait_time: Duration::ZERO,
        }
    }
}

impl Books {
    /// Whether they balance.
    pub fn balanced(&self) -> bool {
        self.live + self.cached + self.free + self.unused == self.capacity
    }

    pub(crate) fn absorb(&mut self, other: &Self) {
        self.capacity += other.capacity;
        self.live += other.live;
        self.cached += other.cached;
        self.free += other.free;
        self.unused += other.unused;
        self.live_buffers += other.live_buffers;
        self.high_water += other.high_water;
        self.caches.absorb(&other.caches);
        self.largest_free = self.largest_free.max(other.largest_free);
        self.free_runs += other.free_runs;
        self.scattered += other.scattered;
        self.waits += other.waits;
        self.wait_time += other.wait_time;
        self.longest_wait = self.longest_wait.max(other.longest_wait);
        self.refused += other.refused;
    }
}
