//! Slabs and spans: the arenas' pages cut into blocks, with every table beside the arenas (P2).
//!
//! Manages which pages belong to what and which blocks are free. Its one lock is taken only to move
//! blocks by the batch: by magazines that the depot cannot serve, and by buffers above the classes.
//! Threads, magazines and teardown are the upper layers' business.
//!
//! A *slab* is a run of pages cut into blocks of one class; how many pages is fixed for the class. A
//! *span* is a run with a single block. Free runs (`runs`) merge with their neighbours inside one arena at
//! once, and the best-fitting lowest one is taken, so that a change of sizes strands nothing.
//!
//! Arenas come and go under the same lock (`arenas`), which also says when what is left runs low. What all of it
//! comes to is told by `counts`, and `check` holds every table against every other.

mod arenas;
#[cfg(any(test, feature = "fault"))]
mod check;
mod counts;
mod runs;

use std::{io, ptr::NonNull, sync::Arc};

use self::arenas::ArenaUse;
pub(crate) use self::counts::{ClassCounts, Counts, SlabUse};
use crate::{
    access::PackedKeys,
    bell::Bell,
    error::FreeError,
    lock::{Mutex, MutexGuard},
    ordered::{Nodes, Ordered},
    page_map::{PageEntry, PageMap},
    size_class::{self, CLASSES, PAGE, PAGE_SHIFT, SPAN_CLASS, SlabShape},
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

impl State {
    /// Lists a slab that has blocks in and blocks out.
    fn list(&mut self, class: usize, first: u32) {
        self.partial[class].insert(&mut self.nodes, (first, 0));
    }

    fn unlist(&mut self, class: usize, first: u32) {
        self.partial[class].remove(&mut self.nodes, (first, 0));
    }
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
            size_class::slab_shape(size_class::stride_of(class, pad), capacity)
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
}

#[cfg(test)]
mod tests;
