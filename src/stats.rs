//! The books: what of a pool is where. Counted on the slow path and by reading other threads' cursors;
//! the fast path counts nothing.

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
    /// The longest free run, in bytes: the longest span that can be had at once.
    pub largest_free: usize,
    /// How many arenas there are: memory regions on the device.
    pub arenas: usize,
    /// How many register calls the pool has made.
    pub register_calls: u64,
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
    /// The classes that have slabs, smallest first, and last, with block size 0, spans above them.
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
    /// The longest free run, in bytes.
    pub largest_free: usize,
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
}

impl Stats {
    /// Sums up.
    pub(crate) fn new(counts: &crate::slab::Counts, cached: &Cached) -> Self {
        let mut s = Self {
            capacity: counts.capacity,
            max_capacity: counts.capacity,
            unused: counts.free_runs,
            largest_free: counts.largest_run,
            table_bytes: counts.table_bytes,
            ..Self::default()
        };
        for (class, c) in counts.classes.iter().enumerate() {
            if c.bytes == 0 {
                continue;
            }
            let entry = if class < CLASSES {
                let block = size_class::size_of(class);
                let in_cache = cached.blocks[class].min(c.taken);
                let out = c.taken - in_cache;
                let (live, cached, free) = (out * block, in_cache * block, c.free * block);
                let unused = c.bytes - live - cached - free;
                ClassStats {
                    block,
                    capacity: c.bytes,
                    live,
                    cached,
                    free,
                    unused,
                    live_buffers: out,
                }
            } else {
                let cached_bytes = cached.span_bytes.min(c.bytes);
                ClassStats {
                    block: 0,
                    capacity: c.bytes,
                    live: c.bytes - cached_bytes,
                    cached: cached_bytes,
                    free: 0,
                    unused: 0,
                    live_buffers: c.taken - cached.blocks[class].min(c.taken),
                }
            };
            s.live += entry.live;
            s.cached += entry.cached;
            s.free += entry.free;
            s.unused += entry.unused;
            s.live_buffers += entry.live_buffers;
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
        self.largest_free = self.largest_free.max(other.largest_free);
        self.arenas += other.arenas;
        self.register_calls += other.register_calls;
        self.table_bytes += other.table_bytes;
        self.max_capacity += other.max_capacity;
        self.waits += other.waits;
        self.wait_time += other.wait_time;
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
                }
                None => self.classes.push(*c),
            }
        }
        // Spans, whose block is 0, last.
        self.classes.sort_by_key(|c| c.block.wrapping_sub(1));
    }

    /// Whether the books balance: in total, for every class, access class and share, and their sums.
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
            && self.shares.iter().all(|s| s.reserve.balanced())
            && self.access_classes.iter().all(summed)
            && (self.access_classes.is_empty()
                || (all.capacity, all.live, all.cached, all.live_buffers)
                    == (self.capacity, self.live, self.cached, self.live_buffers))
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
        self.largest_free = self.largest_free.max(other.largest_free);
    }
}
