//! The books: what of a pool is where. Counted on the slow path and by reading other threads' cursors;
//! the fast path counts nothing.

use std::time::Duration;

use crate::size_class::{self, CLASSES};

/// Where a pool's bytes are at one moment.
///
/// At a quiet point (no alloc or free under way) `live + cached + free + unused == capacity`, in total
/// and for every class (P5). While other threads work, a block in passing may be counted on the wrong
/// side.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Stats {
    /// Bytes of all arenas.
    pub capacity: usize,
    /// Bytes that the pool may grow to.
    pub max_capacity: usize,
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
    /// Bytes of the allocator's own tables, all of them outside registered memory.
    pub table_bytes: usize,
    /// The classes that have slabs, smallest first, and last, with block size 0, spans above them.
    pub classes: Vec<ClassStats>,
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
    /// Sums up. `cached` gives, by class, the blocks in magazines and depot.
    pub(crate) fn new(counts: &crate::slab::Counts, cached: &[usize]) -> Self {
        let mut s = Self {
            capacity: counts.capacity,
            max_capacity: counts.capacity,
            live: 0,
            cached: 0,
            free: 0,
            unused: counts.free_runs,
            live_buffers: 0,
            in_flight: 0,
            waiting: 0,
            waits: 0,
            wait_time: Duration::ZERO,
            largest_free: counts.largest_run,
            arenas: 0,
            register_calls: 0,
            growths: 0,
            shrinks: 0,
            growth_failures: 0,
            growth_time: Duration::ZERO,
            pinned: 0,
            locked: 0,
            memlock_limit: None,
            memlock_exempt: false,
            table_bytes: counts.table_bytes,
            classes: Vec::new(),
        };
        for (class, c) in counts.classes.iter().enumerate() {
            if c.bytes == 0 {
                continue;
            }
            let entry = if class < CLASSES {
                let block = size_class::size_of(class);
                let in_cache = cached[class].min(c.taken);
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
                ClassStats {
                    block: 0,
                    capacity: c.bytes,
                    live: c.bytes,
                    cached: 0,
                    free: 0,
                    unused: 0,
                    live_buffers: c.taken,
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

    /// Whether the books balance, in total and for every class.
    pub fn balanced(&self) -> bool {
        let class = |c: &ClassStats| c.live + c.cached + c.free + c.unused == c.capacity;
        self.live + self.cached + self.free + self.unused == self.capacity
            && self.classes.iter().all(class)
    }
}
