//! The depot: magazines that no thread holds, full ones and empty ones, class by class. Whole magazines
//! change hands by one exchange of a word; blocks are never touched one by one.

use std::{
    cell::UnsafeCell,
    mem::MaybeUninit,
    num::NonZeroU32,
    sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering::Relaxed},
};

use crossbeam_utils::CachePadded;

use crate::{
    size_class::{self, CLASSES},
    slab::Entry,
    stack::{Links, Stack},
    stats::CacheStats,
};

/// The right to one magazine: whoever has it may touch the magazine, nobody else may. Not `Copy`.
#[derive(PartialEq, Eq, Debug)]
pub(crate) struct Magazine(NonZeroU32);

/// The memory of one magazine. Never freed before the depot is.
struct Slot {
    link: AtomicU32,
    /// Blocks in it while no thread has it loaded.
    count: AtomicUsize,
    entries: Box<[UnsafeCell<MaybeUninit<Entry>>]>,
}

// SAFETY: `entries` is touched only by whoever owns the `Magazine` of this slot, and ownership passes
// through the stacks, whose push and pop are a release and an acquire.
unsafe impl Sync for Slot {}
// SAFETY: nothing in it is tied to a thread; entries are addresses.
unsafe impl Send for Slot {}

struct ClassDepot {
    full: Stack,
    empty: Stack,
    /// Blocks in `full`. For the books and the limit; exact at quiet points.
    blocks: AtomicUsize,
    hits: AtomicU64,
    misses: AtomicU64,
    from_depot: AtomicU64,
}

struct Slots(boxcar::Vec<Slot>);

impl Links for Slots {
    fn link(&self, id: u32) -> &AtomicU32 {
        &self.0[id as usize - 1].link
    }
}

/// How large magazines are and how many full ones are kept.
#[derive(Debug)]
pub(crate) struct Limits {
    /// Bytes of the pool.
    capacity: AtomicUsize,
    /// Bytes that it may come to have.
    most: usize,
}

impl Limits {
    pub(crate) fn new(capacity: usize, most: usize) -> Self {
        Self { capacity: AtomicUsize::new(capacity), most: most.max(capacity) }
    }

    /// Follows a pool that has grown or shrunk. What is in use beyond new limits stays until it is emptied.
    pub(crate) fn follow(&self, capacity: usize) {
        // Relaxed: a measure, which hands nothing over.
        self.capacity.store(capacity.min(self.most), Relaxed);
    }

    fn capacity(&self) -> usize {
        self.capacity.load(Relaxed)
    }

    /// Blocks of one magazine: 512 at most, no more than 2 MiB or 1/64 of the pool, and at least one.
    pub(crate) fn magazine(&self, class: usize) -> usize {
        Self::of(self.capacity(), class)
    }

    fn of(capacity: usize, class: usize) -> usize {
        let bytes = (capacity / 64).min(2 << 20);
        (bytes / size_class::size_of(class)).clamp(1, 512)
    }

    /// Entries that a magazine has room for, whatever it may be used up to now.
    fn room(&self, class: usize) -> usize {
        Self::of(self.most, class)
    }

    /// Blocks of one class that the depot keeps before it hands magazines back to the slabs: 1/8 of the
    /// pool, and at least two magazines.
    fn depot(&self, class: usize) -> usize {
        (self.capacity() / 8 / size_class::size_of(class)).max(2 * self.magazine(class))
    }

    /// Bytes that one thread's magazines may be able to hold, over all classes.
    pub(crate) fn thread(&self) -> usize {
        self.capacity() / 8
    }
}

pub(crate) struct Depot {
    slots: Slots,
    classes: Box<[CachePadded<ClassDepot>]>,
    pub(crate) limits: Limits,
}

impl Depot {
    pub(crate) fn new(limits: Limits) -> Self {
        let class = || ClassDepot {
            full: Stack::new(),
            empty: Stack::new(),
            blocks: AtomicUsize::new(0),
            hits: AtomicU64::new(0),
            misses: AtomicU64::new(0),
            from_depot: AtomicU64::new(0),
        };
        Self {
            slots: Slots(boxcar::Vec::new()),
            // The last is that of spans, which have counts alone.
            classes: (0..=CLASSES).map(|_| CachePadded::new(class())).collect(),
            limits,
        }
    }

    fn slot(&self, m: &Magazine) -> &Slot {
        &self.slots.0[m.0.get() as usize - 1]
    }

    /// First entry and length of a magazine's memory. Touching it is the right of `m`'s owner.
    pub(crate) fn memory(&self, m: &Magazine) -> (*mut Entry, usize) {
        let (first, _, room) = self.extent(m);
        (first, room)
    }

    /// The same, and in between how many blocks it holds if it is not loaded.
    pub(crate) fn extent(&self, m: &Magazine) -> (*mut Entry, usize, usize) {
        let Slot { entries, count, .. } = self.slot(m);
        (entries.as_ptr() as *mut Entry, count.load(Relaxed), entries.len())
    }

    /// How many blocks a magazine holds that is not loaded.
    pub(crate) fn count(&self, m: &Magazine) -> usize {
        self.slot(m).count.load(Relaxed)
    }

    /// Notes how many blocks a magazine holds as it is unloaded.
    pub(crate) fn set_count(&self, m: &Magazine, count: usize) {
        self.slot(m).count.store(count, Relaxed);
    }

    /// An empty magazine of a class that lies about, if one does.
    pub(crate) fn get_empty(&self, class: usize) -> Option<Magazine> {
        self.classes[class].empty.pop(&self.slots).and_then(NonZeroU32::new).map(Magazine)
    }

    /// Makes an empty magazine of a class. Allocates, so not under a lock (`lock.rs`).
    #[cold]
    pub(crate) fn make_empty(&self, class: usize) -> Magazine {
        let cap = self.limits.room(class);
        let entries = (0..cap).map(|_| UnsafeCell::new(MaybeUninit::uninit())).collect();
        let slot = Slot { link: AtomicU32::new(0), count: AtomicUsize::new(0), entries };
        let index = self.slots.0.push(slot);
        // 2^32 magazines would be 2^36 bytes of headers alone.
        Magazine(NonZeroU32::MIN.saturating_add(u32::try_from(index).unwrap_or(u32::MAX)))
    }

    /// A magazine with blocks in it, if there is one.
    pub(crate) fn get_full(&self, class: usize) -> Option<Magazine> {
        let c = &self.classes[class];
        let m = Magazine(NonZeroU32::new(c.full.pop(&self.slots)?)?);
        c.blocks.fetch_sub(self.count(&m), Relaxed);
        Some(m)
    }

    /// Puts an empty magazine by.
    pub(crate) fn put_empty(&self, class: usize, m: Magazine) {
        self.set_count(&m, 0);
        self.classes[class].empty.push(m.0.get(), &self.slots);
    }

    /// Puts a magazine with blocks by, or hands it back if the depot holds its limit already; the
    /// caller then empties it into the slabs.
    pub(crate) fn put_full(&self, class: usize, m: Magazine) -> Result<(), Magazine> {
        let c = &self.classes[class];
        let count = self.count(&m);
        // Counted before it is there, so that the count never falls below zero. The limit is soft:
        // threads that arrive together may pass it by a magazine each.
        if c.blocks.fetch_add(count, Relaxed) + count > self.limits.depot(class) {
            c.blocks.fetch_sub(count, Relaxed);
            return Err(m);
        }
        c.full.push(m.0.get(), &self.slots);
        Ok(())
    }

    /// The entries of a magazine that is not loaded.
    pub(crate) fn entries<'a>(&'a self, m: &'a Magazine) -> &'a [Entry] {
        let (first, _) = self.memory(m);
        // SAFETY: `m` gives its owner alone the right to the memory, for as long as it is borrowed; the
        // first `count` entries were written before the count was set (`set_count` as it was unloaded).
        unsafe { std::slice::from_raw_parts(first, self.count(m)) }
    }

    /// Blocks of a class that lie in full magazines here.
    pub(crate) fn blocks(&self, class: usize) -> usize {
        self.classes[class].blocks.load(Relaxed)
    }

    /// Counts allocs that a thread's own magazines served; on slow paths alone, see [`CacheStats::hits`].
    pub(crate) fn count_hits(&self, class: usize, hits: u64) {
        if hits > 0 {
            self.classes[class].hits.fetch_add(hits, Relaxed);
        }
    }

    /// Counts an alloc that they did not serve.
    pub(crate) fn count_miss(&self, class: usize) {
        self.classes[class].misses.fetch_add(1, Relaxed);
    }

    /// Counts a miss that a magazine of the depot's made good.
    pub(crate) fn count_from_depot(&self, class: usize) {
        self.classes[class].from_depot.fetch_add(1, Relaxed);
    }

    /// What was counted of a class, or of spans.
    pub(crate) fn counted(&self, class: usize) -> CacheStats {
        let c = &self.classes[class];
        let (from_depot, misses) = (c.from_depot.load(Relaxed), c.misses.load(Relaxed));
        // One that is counted meanwhile may be seen on one side alone.
        CacheStats { hits: c.hits.load(Relaxed), misses: misses.max(from_depot), from_depot }
    }

    /// Bytes of the magazines' own memory.
    pub(crate) fn table_bytes(&self) -> usize {
        let entries: usize = self.slots.0.iter().map(|(_, s)| s.entries.len()).sum();
        entries * size_of::<Entry>() + self.slots.0.count() * size_of::<Slot>()
    }
}
