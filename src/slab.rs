//! Slabs and spans: the arenas' pages cut into blocks, with every table beside the arenas (P2).
//!
//! Manages which pages belong to what and which blocks are free. Its one lock is taken only to move
//! blocks by the batch: by magazines that the depot cannot serve, and by buffers above the classes.
//! Threads, magazines and teardown are the upper layers' business.
//!
//! A *slab* is a run of pages cut into blocks of one class; how many pages is fixed for the class. A
//! *span* is a run with a single block. Free runs merge with their neighbours inside one arena at once,
//! and the best-fitting lowest one is taken, so that a change of sizes strands nothing.
//!
//! Arenas come and go under the same lock (`arenas`), which also says when what is left runs low.

mod arenas;

use std::{io, ptr::NonNull, sync::Arc};

use self::arenas::ArenaUse;
use crate::{
    access::PackedKeys,
    bell::Bell,
    error::FreeError,
    lock::{Mutex, MutexGuard},
    ordered::{Nodes, Ordered},
    page_map::{PageEntry, PageMap},
    size_class::{self, CLASSES, MAX_SLAB_BLOCK, PAGE, PAGE_SHIFT, SPAN_CLASS, SlabShape},
    sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering::Relaxed},
    sys::table::{Zeroable, ZeroedTable},
};

/// A block as caches hold it and as handles carry it on: where it is and its region's keys, each one
/// word.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(C)]
pub(crate) struct Entry {
    pub(crate) ptr: NonNull<u8>,
    pub(crate) keys: PackedKeys,
}

// SAFETY: an address and two keys; whoever has it owns the block, on whichever thread.
unsafe impl Send for Entry {}

const WORDS: usize = size_class::MAX_SLAB_BLOCKS / 64;

/// The side table of one slab. Written under the lock; everything is atomic because wrong raw
/// frees read it without the lock, to say what is wrong.
#[repr(C, align(64))]
struct Slab {
    first: AtomicU32,
    pages: AtomicU32,
    class: AtomicU32,
    blocks: AtomicU32,
    free: AtomicU32,
    /// One bit a block: in the slab.
    free_map: [AtomicU64; WORDS],
}

// SAFETY: a struct of atomics only, and zero is a valid value of each.
unsafe impl Zeroable for Slab {}

/// The counts of one class, in blocks and bytes.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub(crate) struct ClassCounts {
    /// Blocks out of their slabs: in caches or in buffers.
    pub(crate) taken: usize,
    /// Blocks in slabs.
    pub(crate) free: usize,
    /// Bytes of the class's slabs.
    pub(crate) bytes: usize,
}

/// The counts of the whole pool at one moment.
#[derive(Clone, Debug)]
pub(crate) struct Counts {
    /// Bytes of all arenas.
    pub(crate) capacity: usize,
    /// By class; the last is spans above the classes, where `taken` counts spans.
    pub(crate) classes: [ClassCounts; CLASSES + 1],
    /// Bytes of free runs.
    pub(crate) free_runs: usize,
    pub(crate) largest_run: usize,
    /// How many free runs there are, and their bytes beside the longest one of each arena.
    pub(crate) runs: usize,
    pub(crate) scattered: usize,
    /// The most bytes that were out of the slabs at one time, in all and by class.
    pub(crate) peak: usize,
    pub(crate) peaks: [usize; CLASSES + 1],
    /// Bytes of side tables in use.
    pub(crate) table_bytes: usize,
}

struct State {
    /// Free runs as (pages, first page): the first at or after (n, 0) is the best fit, lowest address. Those
    /// of parked arenas apart, to be looked at last.
    runs: Ordered,
    parked_runs: Ordered,
    /// Of all sets here.
    nodes: Nodes,
    /// The first page of parked arenas: all from here on. `u32::MAX` if none is.
    parked_from: u32,
    /// By slot.
    arenas: Vec<ArenaUse>,
    /// Bytes of all arenas, and of blocks and spans out of their slabs.
    capacity: usize,
    taken_bytes: usize,
    /// The most that `taken_bytes` ever was, and its part of each class.
    peak: usize,
    peaks: [usize; CLASSES + 1],
    /// By class: (first page, 0) of slabs with some blocks in and some out, lowest address first.
    partial: [Ordered; CLASSES],
    classes: [ClassCounts; CLASSES + 1],
    /// The last of the slab numbers to use again, or 0; each names the one before in the place of its first page.
    spare: u32,
    /// The lowest slab number never used. 0 is no slab.
    next: u32,
    /// Blocks and spans out of their slabs, over all classes.
    taken: usize,
    /// The pool is closed and its caches are empty: `taken` now counts buffers alone.
    draining: bool,
}

/// All slabs of one pool.
pub(crate) struct Slabs {
    map: PageMap,
    table: ZeroedTable<Slab>,
    shapes: [SlabShape; CLASSES],
    state: Mutex<State>,
    /// A copy of the state's, for reading without the lock.
    capacity: AtomicUsize,
    max_len: usize,
    /// How many arenas there can be.
    slots: usize,
    /// Bytes of runs cut since the caches were last called back.
    cut: AtomicUsize,
    /// Rung when fewer bytes than this are left; 0 is never. Written under the lock.
    ring_below: AtomicUsize,
    bell: Arc<Bell>,
}

/// One slab or span, for a map.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SlabUse {
    /// Bytes of its pages.
    pub(crate) len: usize,
    pub(crate) class: usize,
    pub(crate) blocks: usize,
    /// Blocks in it.
    pub(crate) free: usize,
}

/// Whether a block that came back was the last of a draining pool.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub(crate) enum Given {
    More,
    Last,
}

impl Slabs {
    /// Takes over the published arenas in `map`; `ranges` gives their offsets and lengths, `max_len` the
    /// longest arena that there will ever be, `pad` the bytes between blocks of page-multiple slab classes.
    pub(crate) fn new(
        map: PageMap,
        ranges: impl Iterator<Item = (usize, usize)>,
        max_len: usize,
        pad: usize,
        bell: Arc<Bell>,
    ) -> io::Result<Self> {
        let pages = map.len() >> PAGE_SHIFT;
        // One number for each slab there can be; no slab or span is shorter than a page.
        let table = ZeroedTable::new(pages + 1)?;
        let slots = pages.div_ceil(map.stride_pages() as usize);
        let mut state = State {
            runs: Ordered::default(),
            parked_runs: Ordered::default(),
            // One for each page: a page is the first of one run or slab at most.
            nodes: Nodes::new(pages)?,
            parked_from: u32::MAX,
            arenas: vec![ArenaUse::default(); slots],
            capacity: 0,
            taken_bytes: 0,
            peak: 0,
            peaks: [0; CLASSES + 1],
            partial: [Ordered::default(); CLASSES],
            classes: [ClassCounts::default(); CLASSES + 1],
            spare: 0,
            next: 1,
            taken: 0,
            draining: false,
        };
        for (offset, len) in ranges {
            state.insert_arena(&map, offset, len);
        }
        let capacity = state.capacity;
        let shapes = std::array::from_fn(|class| {
            let size = size_class::size_of(class);
            let padded = size.is_multiple_of(PAGE) && size <= MAX_SLAB_BLOCK;
            size_class::slab_shape(size + if padded { pad } else { 0 }, capacity)
        });
        Ok(Self {
            map,
            table,
            shapes,
            state: Mutex::new(state),
            capacity: AtomicUsize::new(capacity),
            max_len,
            slots,
            cut: AtomicUsize::new(0),
            ring_below: AtomicUsize::new(0),
            bell,
        })
    }

    pub(crate) fn map(&self) -> &PageMap {
        &self.map
    }

    pub(crate) fn capacity(&self) -> usize {
        self.capacity.load(Relaxed)
    }

    /// Bytes of the longest buffer: the longest arena there can be.
    pub(crate) fn max_len(&self) -> usize {
        self.max_len
    }

    pub(crate) fn stride(&self, class: usize) -> usize {
        self.shapes[class].stride as usize
    }

    /// Whether blocks of the class can exist here at all.
    pub(crate) fn serves(&self, class: usize) -> bool {
        class < CLASSES && (self.shapes[class].pages as usize) << PAGE_SHIFT <= self.max_len
    }

    /// Whether caches should be called back before a run of `bytes` is cut. Cached blocks lie scattered;
    /// long runs placed between them would keep the gaps apart after they have gone. So before runs that
    /// are long for this pool, and else once for every sixteenth of the pool that was cut.
    pub(crate) fn consolidation_due(&self, bytes: usize) -> bool {
        let capacity = self.capacity();
        bytes.saturating_mul(64) >= capacity || self.cut.load(Relaxed) * 16 >= capacity
    }

    /// Says that the caches were called back.
    pub(crate) fn consolidated(&self) {
        self.cut.store(0, Relaxed);
    }

    /// Takes up to `want` blocks of a class, lowest addresses first, and hands each to `sink`. Returns
    /// how many there were.
    pub(crate) fn take(&self, class: usize, want: usize, mut sink: impl FnMut(Entry)) -> usize {
        let mut state = self.state.lock();
        let mut got = 0;
        while got < want {
            let listed = state.partial[class].first(&state.nodes).map(|(first, _)| first);
            let first = match listed {
                Some(first) if first < state.parked_from => first,
                // Nothing but a parked arena's: rather a new slab in another.
                _ => match self.new_slab(&mut state, class, listed.is_none()).or(listed) {
                    Some(first) => first,
                    None => break,
                },
            };
            got += self.take_from(&mut state, first, class, want - got, &mut sink);
        }
        state.took(class, got, got * size_class::size_of(class));
        self.unlock_taken(state);
        got
    }

    /// Lets go of the lock after something was taken, and rings if little is left.
    fn unlock_taken(&self, state: MutexGuard<'_, State>) {
        let low = state.idle() < self.ring_below.load(Relaxed);
        drop(state);
        if low {
            self.bell.ring();
        }
    }

    /// Takes a free block, aligned to `align`, of `class` or a larger one, when no slab can be cut any more.
    /// Returns its class too.
    pub(crate) fn take_larger(&self, class: usize, align: usize) -> Option<(Entry, usize)> {
        let aligned = |c: &usize| size_class::align_of(self.shapes[*c].stride as usize) >= align;
        let mut state = self.state.lock();
        let larger = (class..CLASSES).filter(aligned).find(|&c| !state.partial[c].is_empty())?;
        let (first, _) = state.partial[larger].first(&state.nodes)?;
        let mut got = None;
        self.take_from(&mut state, first, larger, 1, &mut |e| got = Some((e, larger)));
        state.took(larger, 1, size_class::size_of(larger));
        self.unlock_taken(state);
        got
    }

    /// Takes one run of `len` bytes, rounded up to pages, starting at a multiple of `align`.
    pub(crate) fn take_span(&self, len: usize, align: usize) -> Option<Entry> {
        let pages = u32::try_from(len.checked_add(PAGE - 1)? >> PAGE_SHIFT).ok()?.max(1);
        let align_pages = u32::try_from(align.div_ceil(PAGE)).ok()?.max(1);
        let mut state = self.state.lock();
        let first = self.take_run(&mut state, pages, align_pages, true)?;
        self.new_table(
            &mut state,
            first,
            pages,
            SPAN_CLASS,
            SlabShape { pages, blocks: 1, stride: 0 },
        );
        self.slab_at(first)?.1.free_map[0].store(0, Relaxed);
        let bytes = (pages as usize) << PAGE_SHIFT;
        state.classes[SPAN_CLASS].bytes += bytes;
        state.took(SPAN_CLASS, 1, bytes);
        self.unlock_taken(state);
        Some(self.entry(self.map.addr_of(first)))
    }

    /// Puts blocks back. Each must have been taken and not put back since.
    pub(crate) fn give(&self, blocks: impl Iterator<Item = NonNull<u8>>) -> Given {
        let mut state = self.state.lock();
        for ptr in blocks {
            self.give_one(&mut state, ptr);
        }
        if state.draining && state.taken == 0 { Given::Last } else { Given::More }
    }

    /// Says that all caches are empty and stay so: from now on the return of the last block is told to
    /// whoever returns it. If none is out, that is now.
    pub(crate) fn start_draining(&self) -> Given {
        let mut state = self.state.lock();
        state.draining = true;
        if state.taken == 0 { Given::Last } else { Given::More }
    }

    /// Bytes of the block that holds `ptr`, which must be out.
    pub(crate) fn block_len(&self, ptr: NonNull<u8>, class: usize) -> usize {
        if class < CLASSES {
            return size_class::size_of(class);
        }
        let slab = self.map.page_of(ptr.as_ptr() as usize).and_then(|p| self.slab_at(p));
        slab.map_or(0, |(_, slab)| (slab.pages.load(Relaxed) as usize) << PAGE_SHIFT)
    }

    /// The class of the block at `ptr`, which must be out.
    pub(crate) fn class_at(&self, ptr: NonNull<u8>) -> Option<usize> {
        let page = self.map.page_of(ptr.as_ptr() as usize)?;
        self.slab_at(page).map(|(_, slab)| slab.class.load(Relaxed) as usize)
    }

    pub(crate) fn counts(&self) -> Counts {
        // Nothing is allocated under the lock.
        let mut seen = vec![false; self.slots];
        self.counts_of(&self.state.lock(), &mut seen)
    }

    /// The counts in a forked child: nobody will ever release a lock that was held at the fork.
    pub(crate) fn counts_at_fork(&self) -> Counts {
        match self.state.try_lock() {
            Some(state) => self.counts_of(&state, &mut vec![false; self.slots]),
            None => Counts {
                capacity: self.capacity(),
                classes: [ClassCounts::default(); CLASSES + 1],
                free_runs: 0,
                largest_run: 0,
                runs: 0,
                scattered: 0,
                peak: 0,
                peaks: [0; CLASSES + 1],
                table_bytes: 0,
            },
        }
    }

    /// `seen` has room for a look at each slot.
    fn counts_of(&self, state: &State, seen: &mut [bool]) -> Counts {
        let bytes = |(pages, _): (u32, u32)| (pages as usize) << PAGE_SHIFT;
        let free_runs = state.free_pages() << PAGE_SHIFT;
        Counts {
            capacity: state.capacity,
            classes: state.classes,
            free_runs,
            runs: state.runs.len() + state.parked_runs.len(),
            scattered: free_runs
                - (state.longest_runs(self.map.stride_pages(), seen) << PAGE_SHIFT),
            peak: state.peak,
            peaks: state.peaks,
            largest_run: [&state.runs, &state.parked_runs]
                .into_iter()
                .filter_map(|r| r.last(&state.nodes).map(bytes))
                .max()
                .unwrap_or(0),
            table_bytes: state.next as usize * size_of::<Slab>()
                + state.nodes.table_bytes()
                + (state.capacity >> PAGE_SHIFT) * size_of::<u32>(),
        }
    }

    /// First page and length in pages of every slab and span that there is, in no order. One that comes or goes
    /// meanwhile may be there or not.
    pub(crate) fn runs_in_use(&self) -> Vec<(u32, u32)> {
        // The lock is let go of now and then: a large pool has a large table.
        const AT_ONCE: usize = 4096;
        let run = |s: &Slab| (s.first.load(Relaxed), s.pages.load(Relaxed));
        let mut runs = Vec::new();
        let mut at = 0;
        loop {
            // Nothing is allocated under the lock.
            runs.reserve(AT_ONCE);
            let state = self.state.lock();
            let next = state.next as usize;
            let end = next.min(at + AT_ONCE);
            runs.extend(self.table[at..end].iter().map(run).filter(|&(_, pages)| pages > 0));
            drop(state);
            at = end;
            if at >= next {
                return runs;
            }
        }
    }

    /// Where every slab and span is, and what of it is out, in no order. As [`runs_in_use`](Slabs::runs_in_use).
    pub(crate) fn uses(&self) -> Vec<(usize, SlabUse)> {
        let of = |(first, _)| {
            // Looked up again, under the lock, since it may have gone meanwhile.
            let _state = self.state.lock();
            let (_, slab) = self.slab_at(first)?;
            let class = slab.class.load(Relaxed) as usize;
            let free = if class < CLASSES { slab.free.load(Relaxed) as usize } else { 0 };
            let use_ = SlabUse {
                len: (slab.pages.load(Relaxed) as usize) << PAGE_SHIFT,
                class,
                blocks: slab.blocks.load(Relaxed) as usize,
                free,
            };
            Some((self.map.addr_of(slab.first.load(Relaxed)), use_))
        };
        self.runs_in_use().into_iter().filter_map(of).collect()
    }

    /// Why an address that is not out as a raw pointer was not taken back. Any number may be passed.
    #[cold]
    #[inline(never)]
    pub(crate) fn refusal(&self, addr: usize) -> FreeError {
        self.judge(addr).unwrap_or_else(|e| e)
    }

    /// Either way an error; in two kinds so that `?` ends the look-up.
    fn judge(&self, addr: usize) -> Result<FreeError, FreeError> {
        if addr == 0 {
            return Err(FreeError::Null);
        }
        let page = self.map.page_of(addr).ok_or(FreeError::Foreign {
            addr,
            start: self.map.base(),
            end: self.map.base() + self.map.len(),
        })?;
        let (_, slab) = self.slab_at(page).ok_or(FreeError::NotOut { addr })?;
        let offset = addr.wrapping_sub(self.map.addr_of(slab.first.load(Relaxed)));
        let class = slab.class.load(Relaxed) as usize;
        let bytes = (slab.pages.load(Relaxed) as usize) << PAGE_SHIFT;
        let stride = if class < CLASSES { self.shapes[class].stride as usize } else { bytes };
        if stride == 0 || offset >= bytes {
            return Err(FreeError::NotOut { addr });
        }
        let block = offset / stride;
        match offset % stride {
            _ if block >= slab.blocks.load(Relaxed) as usize => Err(FreeError::NotOut { addr }),
            0 => Ok(FreeError::NotOut { addr }),
            offset => Err(FreeError::Interior { addr, offset, block: stride }),
        }
    }

    /// The block at `addr`, which lies in a mapping.
    #[inline]
    fn entry(&self, addr: usize) -> Entry {
        let keys = self.map.keys_of(addr).unwrap_or(PackedKeys::from_word(0));
        Self::entry_with(addr, keys)
    }

    #[inline]
    fn entry_with(addr: usize, keys: PackedKeys) -> Entry {
        // SAFETY: the address of a block, which lies in a mapping and so is not null.
        let ptr = unsafe { NonNull::new_unchecked(addr as *mut u8) };
        Entry { ptr, keys }
    }

    /// The slab that a page belongs to, checked against the slab's own bounds (a stale entry may name a
    /// number that has since been used again).
    fn slab_at(&self, page: u32) -> Option<(u32, &Slab)> {
        let id = self.map.get(page).as_slab()?;
        let slab = self.table.get(id as usize)?;
        let inside = page.wrapping_sub(slab.first.load(Relaxed)) < slab.pages.load(Relaxed);
        inside.then_some((id, slab))
    }

    fn take_from(
        &self,
        state: &mut State,
        first: u32,
        class: usize,
        want: usize,
        sink: &mut impl FnMut(Entry),
    ) -> usize {
        let Some((_, slab)) = self.slab_at(first) else { return 0 };
        let start = self.map.addr_of(first);
        let stride = self.shapes[class].stride as usize;
        // One look-up for the whole slab: it lies in one arena.
        let keys = self.entry(start).keys;
        let mut got = 0;
        for (i, word) in slab.free_map.iter().enumerate() {
            let mut bits = word.load(Relaxed);
            while bits != 0 && got < want {
                let block = i * 64 + bits.trailing_zeros() as usize;
                bits &= bits - 1;
                sink(Self::entry_with(start + block * stride, keys));
                got += 1;
            }
            word.store(bits, Relaxed);
        }
        let free = slab.free.load(Relaxed) - got as u32;
        slab.free.store(free, Relaxed);
        state.classes[class].free -= got;
        if free == 0 {
            state.unlist(class, first);
        }
        got
    }

    fn give_one(&self, state: &mut State, ptr: NonNull<u8>) {
        let addr = ptr.as_ptr() as usize;
        let found = self.map.page_of(addr).and_then(|page| self.slab_at(page));
        let Some((id, slab)) = found else {
            debug_assert!(false, "{addr:#x} was never taken");
            return;
        };
        let (first, class) = (slab.first.load(Relaxed), slab.class.load(Relaxed) as usize);
        state.taken -= 1;
        state.classes[class].taken -= 1;
        if class == SPAN_CLASS {
            let bytes = (slab.pages.load(Relaxed) as usize) << PAGE_SHIFT;
            state.taken_bytes -= bytes;
            state.classes[class].bytes -= bytes;
            self.drop_slab(state, id, slab);
            return;
        }
        state.taken_bytes -= size_class::size_of(class);
        let block = (addr - self.map.addr_of(first)) / self.shapes[class].stride as usize;
        let word = &slab.free_map[block / 64];
        debug_assert_eq!(word.load(Relaxed) >> (block % 64) & 1, 0, "{addr:#x} was free already");
        word.store(word.load(Relaxed) | 1 << (block % 64), Relaxed);
        let free = slab.free.load(Relaxed) + 1;
        slab.free.store(free, Relaxed);
        state.classes[class].free += 1;
        let blocks = slab.blocks.load(Relaxed);
        if free == blocks {
            state.unlist(class, first);
            state.classes[class].free -= blocks as usize;
            state.classes[class].bytes -= (slab.pages.load(Relaxed) as usize) << PAGE_SHIFT;
            self.drop_slab(state, id, slab);
        } else if free == 1 {
            state.list(class, first);
        }
    }

    /// Cuts a fresh slab, of a parked arena only if `parked` permits it; returns its first page.
    fn new_slab(&self, state: &mut State, class: usize, parked: bool) -> Option<u32> {
        let shape = self.shapes[class];
        let first = self.take_run(state, shape.pages, 1, parked)?;
        self.new_table(state, first, shape.pages, class, shape);
        state.classes[class].free += shape.blocks as usize;
        state.classes[class].bytes += (shape.pages as usize) << PAGE_SHIFT;
        state.list(class, first);
        Some(first)
    }

    fn new_table(&self, state: &mut State, first: u32, pages: u32, class: usize, shape: SlabShape) {
        let id = match state.spare {
            0 => {
                state.next += 1;
                state.next - 1
            }
            id => id,
        };
        let slab = &self.table[id as usize];
        if id == state.spare {
            state.spare = slab.first.load(Relaxed);
        }
        slab.first.store(first, Relaxed);
        slab.pages.store(pages, Relaxed);
        slab.class.store(class as u32, Relaxed);
        slab.blocks.store(shape.blocks, Relaxed);
        slab.free.store(shape.blocks, Relaxed);
        for (i, word) in slab.free_map.iter().enumerate() {
            let left = (shape.blocks as usize).saturating_sub(i * 64);
            word.store(if left >= 64 { u64::MAX } else { (1 << left) - 1 }, Relaxed);
        }
        for page in first..first + pages {
            self.map.set(page, PageEntry::slab(id));
        }
    }

    /// Gives an empty slab's pages back to the free runs and its number to the spare ones.
    fn drop_slab(&self, state: &mut State, id: u32, slab: &Slab) {
        let (first, pages) = (slab.first.load(Relaxed), slab.pages.load(Relaxed));
        // No page lies in an empty slab: stale entries that name it are refused from here on.
        slab.pages.store(0, Relaxed);
        slab.first.store(state.spare, Relaxed);
        state.spare = id;
        self.give_run(state, first, pages);
    }

    fn mark_free(map: &PageMap, (pages, first): (u32, u32)) {
        map.set(first, PageEntry::free_run(pages));
        map.set(first + pages - 1, PageEntry::free_run(pages));
    }

    /// Takes the best-fitting run whose start can be aligned, and gives back what is cut off. From parked
    /// arenas only what no other has, and only if `parked` permits it.
    fn take_run(
        &self,
        state: &mut State,
        pages: u32,
        align_pages: u32,
        parked: bool,
    ) -> Option<u32> {
        // Alignment is one of addresses, and lent memory may start at any page.
        let base = self.map.base() >> PAGE_SHIFT;
        let aligned = |first: u32| {
            let page = (base + first as usize).checked_next_multiple_of(align_pages as usize)?;
            u32::try_from(page - base).ok()
        };
        let fits = |&(len, first): &(u32, u32)| {
            aligned(first).is_some_and(|a| (a - first).checked_add(pages).is_some_and(|n| n <= len))
        };
        let best = |runs: &Ordered| runs.range(&state.nodes, (pages, 0)).find(fits);
        let last = || best(&state.parked_runs).filter(|_| parked);
        let (len, first) = best(&state.runs).or_else(last)?;
        let start = aligned(first)?;
        self.cut.fetch_add((pages as usize) << PAGE_SHIFT, Relaxed);
        let arena = &mut state.arenas[(first / self.map.stride_pages()) as usize];
        arena.used += pages;
        arena.touched = true;
        state.remove_run((len, first));
        let (before, after) = (start - first, first + len - start - pages);
        for run in [(before, first), (after, start + pages)] {
            if run.0 > 0 {
                Self::mark_free(&self.map, run);
                state.insert_run(run);
            }
        }
        Some(start)
    }

    /// Puts a run back, merged with free neighbours in the same arena.
    fn give_run(&self, state: &mut State, mut first: u32, mut pages: u32) {
        let stride = self.map.stride_pages();
        let end = first + pages;
        state.arenas[(first / stride) as usize].used -= pages;
        if !first.is_multiple_of(stride)
            && let Some(n) = self.map.get(first - 1).as_free_run()
        {
            state.remove_run((n, first - n));
            first -= n;
            pages += n;
        }
        let last = (self.map.len() >> PAGE_SHIFT) as u32;
        if !end.is_multiple_of(stride)
            && end < last
            && let Some(n) = self.map.get(end).as_free_run()
        {
            state.remove_run((n, end));
            pages += n;
        }
        Self::mark_free(&self.map, (pages, first));
        state.insert_run((pages, first));
    }

    /// Walks every table and panics on the first contradiction. For tests.
    #[cfg(any(test, feature = "fault"))]
    pub(crate) fn check(&self) {
        let state = self.state.lock();
        let mut free_pages = 0;
        let sets = [&state.runs, &state.parked_runs];
        let runs = || sets.into_iter().flat_map(|set| set.range(&state.nodes, (0, 0)));
        for (pages, first) in runs() {
            assert_eq!(self.map.get(first), PageEntry::free_run(pages));
            assert_eq!(self.map.get(first + pages - 1), PageEntry::free_run(pages));
            free_pages += pages as usize;
        }
        let mut starts: Vec<_> = runs().map(|(pages, first)| (first, pages, true)).collect();
        let mut counts = [ClassCounts::default(); CLASSES + 1];
        let mut used_pages = 0;
        for slab in self.table[..state.next as usize].iter() {
            let (first, pages) = (slab.first.load(Relaxed), slab.pages.load(Relaxed));
            if pages == 0 {
                continue;
            }
            starts.push((first, pages, false));
            used_pages += pages as usize;
            let class = slab.class.load(Relaxed) as usize;
            let bits: u32 = slab.free_map.iter().map(|w| w.load(Relaxed).count_ones()).sum();
            let (free, blocks) = (slab.free.load(Relaxed), slab.blocks.load(Relaxed));
            if class < CLASSES {
                assert_eq!(bits, free);
                let partial = state.partial[class].contains(&state.nodes, (first, 0));
                assert_eq!(partial, free > 0, "listed exactly when it has a free block");
                counts[class].free += free as usize;
                counts[class].taken += (blocks - free) as usize;
            } else {
                counts[class].taken += 1;
            }
            counts[class].bytes += (pages as usize) << PAGE_SHIFT;
        }
        assert_eq!(counts, state.classes);
        assert_eq!((free_pages + used_pages) << PAGE_SHIFT, state.capacity);
        assert_eq!(self.capacity(), state.capacity);
        assert_eq!(free_pages, state.free_pages());
        assert!(state.peak >= state.taken_bytes && state.peak <= state.peaks.iter().sum());
        self.check_arenas(&state, &starts);
        assert_eq!(counts.iter().map(|c| c.taken).sum::<usize>(), state.taken);
        starts.sort_unstable();
        let stride = self.map.stride_pages();
        for pair in starts.windows(2) {
            let ((first, pages, free), (next, _, next_free)) = (pair[0], pair[1]);
            assert!(first + pages <= next, "runs do not overlap");
            let touch = first + pages == next && next % stride != 0;
            assert!(!(touch && free && next_free), "free neighbours are merged");
        }
    }
}

#[cfg(test)]
mod tests;
