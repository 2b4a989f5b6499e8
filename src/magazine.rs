//! Magazines: each thread's private stacks of free blocks, one a class, and their exchange with the
//! depot. Manages who may touch them; where blocks come from in the end is the pool's business.
//!
//! A thread has two magazines a class, as in Bonwick's scheme: one loaded, that alloc pops and free
//! pushes, and the previous one, full or empty. Only when both are empty or both full does a whole
//! magazine change hands with the depot, so a thread that goes to and fro over a boundary does not.
//!
//! Here is what the owner does inside its gate, without a lock; all else is `hold.rs`'s.
//!
//! ```text
//! Mag    bottom ──► ┌───────┐
//!                   │ entry │  blocks to hand out
//!        top ─────► ├───────┤  next push goes here
//!                   │       │
//!        end ─────► └───────┘
//! ```

mod hold;

use std::{
    cell::Cell,
    marker::PhantomData,
    mem::offset_of,
    ptr,
    sync::atomic::{AtomicPtr, Ordering::Relaxed},
};

pub(crate) use self::hold::Local;
use crate::{
    depot::{Depot, Magazine},
    gate::{CLOSED_BOTTOM, Gate},
    size_class::{self, CLASSES, FIRST_CODE, SPAN_CLASS},
    slab::Entry,
    sync::{in_register, unlikely},
    sys::shadow,
};

/// One class's magazines in one thread, among the others' in [`Magazines`].
#[derive(Clone, Copy)]
struct Mag<'a> {
    /// Where the class's element of the first row is, or would be if rows began at code 0.
    at: *const u8,
    _all: PhantomData<&'a Magazines>,
}

/// An element of each row has this many bytes, so that a class's code gets there by a scaled address.
const STEP: usize = size_of::<usize>();

impl<'a> Mag<'a> {
    /// The class's element of the row that begins at `row` in [`Magazines`].
    ///
    /// # Safety
    /// The elements of that row are of type `T`, or begin with one.
    #[inline(always)]
    unsafe fn in_row<T>(self, row: usize) -> &'a T {
        const { assert!(size_of::<T>() <= STEP) };
        let offset = row as isize - (FIRST_CODE * STEP) as isize;
        // SAFETY: `at` was made for a class that there is (`Magazines::at`), so this is its element (contract), and
        // lives as long as they do.
        unsafe { &*self.at.wrapping_byte_offset(offset).cast() }
    }

    /// The words that pops and pushes go by.
    #[inline(always)]
    fn gate(self) -> Gate<'a, Entry> {
        // SAFETY: rows of pointers.
        unsafe {
            Gate {
                top: self.in_row(offset_of!(Magazines, top)),
                bottom: self.in_row(offset_of!(Magazines, bottom)),
                end: self.in_row(offset_of!(Magazines, end)),
            }
        }
    }

    fn loaded(self) -> &'a Cell<Option<Magazine>> {
        // SAFETY: this field's type.
        unsafe { self.in_row(offset_of!(Magazines, whole) + offset_of!(Whole, loaded)) }
    }

    fn previous(self) -> &'a Cell<Option<Magazine>> {
        // SAFETY: as above.
        unsafe { self.in_row(offset_of!(Magazines, whole) + offset_of!(Whole, previous)) }
    }

    /// Takes the uppermost block, as the owner, without the lock.
    #[inline(always)]
    fn pop(self) -> Option<Entry> {
        let gate = self.gate();
        let top = gate.enter();
        if !gate.may_pop(top) {
            unlikely();
            gate.leave(top);
            return None;
        }
        // SAFETY: inside, and `bottom < top <= end` delimit the loaded magazine's memory, so `top - 1` is in it, and was
        // written by the push (or load) that moved `top` above it.
        let below = unsafe { top.sub(1) };
        // SAFETY: as above.
        let entry = unsafe { below.read() };
        gate.leave(below);
        Some(entry)
    }

    /// Puts a block on top, as the owner, without the lock; false if there is no room.
    #[inline(always)]
    fn push(self, entry: Entry) -> bool {
        let gate = self.gate();
        let top = gate.enter();
        if !gate.may_push(top) {
            unlikely();
            gate.leave(top);
            return false;
        }
        // SAFETY: inside, and `bottom <= top < end` delimit the loaded magazine's memory, so `top` is in it.
        unsafe { top.write(entry) };
        // SAFETY: as above; one past `top` is at most `end`.
        gate.leave(unsafe { top.add(1) });
        true
    }

    /// Blocks in the loaded magazine. By whoever is alone with it: the owner under the lock, or a thief.
    fn len(self, depot: &Depot) -> usize {
        let gate = self.gate();
        if let Some((bottom, _)) = gate.bounds() {
            return entries_between(bottom, gate.top());
        }
        // SAFETY: the cell is theirs, and no reference to its inside outlives this call.
        let loaded = unsafe { &*self.loaded().as_ptr() };
        loaded.as_ref().map_or(0, |m| entries_between(depot.memory(m).0, gate.top()))
    }

    /// How many blocks the loaded magazine has room for besides. By the owner, under the lock.
    fn room(self) -> usize {
        let gate = self.gate();
        gate.bounds().map_or(0, |(_, end)| entries_between(gate.top(), end))
    }

    /// How many blocks the previous magazine holds, if there is one. By whoever is alone with it; never of nobody's
    /// magazines.
    fn previous_len(self, depot: &Depot) -> Option<usize> {
        // SAFETY: the cell is theirs, and no reference to its inside outlives this call.
        unsafe { &*self.previous().as_ptr() }.as_ref().map(|m| depot.count(m))
    }

    /// Makes the previous magazine the loaded one, to be used up to `cap` blocks or up to what it holds if that is
    /// more, and the other way round, where `len` were in the loaded one. Gives the new top, to leave with. Without both
    /// it does nothing. By the owner, inside or under the lock.
    fn exchange(self, depot: &Depot, top: *mut Entry, len: usize, cap: usize) -> *mut Entry {
        match (self.loaded().take(), self.previous().take()) {
            (Some(old), Some(new)) => {
                depot.set_count(&old, len);
                let top = self.point_at(depot, &new, cap);
                self.loaded().set(Some(new));
                self.previous().set(Some(old));
                top
            }
            (loaded, previous) => {
                self.loaded().set(loaded);
                self.previous().set(previous);
                top
            }
        }
    }

    /// Opens the gate for a magazine; the answer is its top.
    fn point_at(self, depot: &Depot, m: &Magazine, cap: usize) -> *mut Entry {
        let (first, count, room) = depot.extent(m);
        // SAFETY: `first` and `room` delimit one allocation, and `count <= room`.
        let (top, end) = unsafe { (first.add(count), first.add(cap.max(count).min(room))) };
        self.gate().open(first, end);
        top
    }
}

/// How many entries lie from one to the other, which is not below it.
fn entries_between(low: *mut Entry, high: *mut Entry) -> usize {
    (high.addr() - low.addr()) / size_of::<Entry>()
}

/// A class as the hot path carries it: its [code](size_class::code_of). Of 32 bits, and less, but held in a whole
/// register, lest it be widened again.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Place(usize);

impl Place {
    /// `class` is below [`CLASSES`], or [`SPAN_CLASS`].
    #[inline(always)]
    pub(crate) const fn of(class: usize) -> Self {
        Self(class + FIRST_CODE)
    }

    /// The class of buffers of `len` bytes, which are in `1..=MAX_BLOCK`; see [`size_class::code_of`].
    #[inline(always)]
    pub(crate) const fn of_len(len: usize) -> Self {
        Self(size_class::code_of(len))
    }

    /// Never 0.
    #[inline(always)]
    pub(crate) const fn code(self) -> u32 {
        self.0 as u32
    }

    /// # Safety
    /// `code` came from [`code`](Place::code).
    #[inline(always)]
    pub(crate) const unsafe fn from_code(code: u32) -> Self {
        Self(code as usize)
    }

    /// Tells the compiler what it cannot know of a computed class: that 32 bits hold it, so need not be cut out.
    ///
    /// # Safety
    /// The class is one that there is, or [`SPAN_CLASS`].
    #[inline(always)]
    pub(crate) const unsafe fn assume_in_range(self) {
        // SAFETY: passed on.
        unsafe { std::hint::assert_unchecked(self.0 <= Self::of(SPAN_CLASS).0) };
    }

    #[inline(always)]
    pub(crate) const fn class(self) -> usize {
        self.0 - FIRST_CODE
    }
}

// One more than there are classes: spans above them find a magazine that is always empty and always
// full, and so take the slow path without a test of their own.
const MAGS: usize = CLASSES + 1;

/// All magazines of one thread for one pool, in rows: of what is used together there is one for each class, and a
/// class's code is the index, scaled by eight, into each row.
///
/// Nothing that is used for buffers below many megabytes lies in the first line of a page. There first bytes of pages
/// want to be, in the same set of the cache, and a load that comes after a store to the same place in another page is
/// held up (seen: 11 ns a pair instead of 1.5).
#[repr(C, align(4096))]
pub(crate) struct Magazines {
    _first_line: [u8; 64],
    top: [AtomicPtr<Entry>; MAGS],
    bottom: [AtomicPtr<Entry>; MAGS],
    end: [AtomicPtr<Entry>; MAGS],
    whole: [Whole; MAGS],
}

/// The magazines as the depot knows them.
#[repr(C)]
struct Whole {
    loaded: Cell<Option<Magazine>>,
    previous: Cell<Option<Magazine>>,
}

const _: () = assert!(size_of::<Whole>() == STEP);

/// Magazines whose gates are closed for ever, so that both pop and push fail.
pub(crate) struct Closed(Magazines);

// SAFETY: of closed gates nothing is touched but the atomics.
unsafe impl Sync for Closed {}
// SAFETY: as above.
unsafe impl Send for Closed {}

impl Closed {
    pub(crate) const fn new() -> Self {
        Self(Magazines::new(ptr::without_provenance_mut(CLOSED_BOTTOM)))
    }

    pub(crate) const fn get(&self) -> *mut Magazines {
        (&raw const self.0).cast_mut()
    }
}

/// Where a thread goes that has none of its own. Threads mark these gates as any others, and all share them.
static NOBODYS: Closed = Closed::new();

/// See [`NOBODYS`].
pub(crate) const fn nobodys() -> *mut Magazines {
    NOBODYS.get()
}

impl Magazines {
    /// With gates of this bottom each: null, or what closes them.
    const fn new(bottom: *mut Entry) -> Self {
        let mut bottoms = [const { AtomicPtr::new(ptr::null_mut()) }; MAGS];
        let mut i = 0;
        while i < MAGS {
            bottoms[i] = AtomicPtr::new(bottom);
            i += 1;
        }
        Self {
            _first_line: [0; 64],
            top: [const { AtomicPtr::new(ptr::null_mut()) }; MAGS],
            bottom: bottoms,
            end: [const { AtomicPtr::new(ptr::null_mut()) }; MAGS],
            whole: [const { Whole { loaded: Cell::new(None), previous: Cell::new(None) } }; MAGS],
        }
    }

    #[inline(always)]
    fn mag(&self, place: Place) -> Mag<'_> {
        Mag { at: in_register(self.at(place)), _all: PhantomData }
    }

    /// Every class in the crate comes from `code_of` of a length up to MAX_BLOCK or is SPAN_CLASS, so has its element
    /// in each row.
    #[inline(always)]
    fn at(&self, place: Place) -> *const u8 {
        debug_assert!(place.class() <= SPAN_CLASS);
        ptr::from_ref(self).cast::<u8>().wrapping_byte_add(place.0 * STEP)
    }
}

/// Tells tools that a block is free (see `shadow`); nothing without them. A span passes no magazine.
#[inline(always)]
fn hide(place: Place, entry: Entry) {
    if cfg!(any(pinpool_asan, feature = "valgrind")) && place.class() < CLASSES {
        shadow::hide(entry.ptr, size_class::size_of(place.class()));
    }
}

/// Tells them that it is not.
#[inline(always)]
fn show(place: Place, entry: Entry) {
    if cfg!(any(pinpool_asan, feature = "valgrind")) && place.class() < CLASSES {
        shadow::show(entry.ptr, size_class::size_of(place.class()));
    }
}

/// A thread's way to its magazines of one pool.
#[derive(Debug)]
pub(crate) struct ThreadSlot {
    magazines: AtomicPtr<Magazines>,
}

impl ThreadSlot {
    /// Leads to nobody's.
    pub(crate) const fn new() -> Self {
        Self { magazines: AtomicPtr::new(nobodys()) }
    }

    /// Lets it lead to the owner's magazines, or to others that are to be in their place. By the owner.
    pub(crate) fn lead_to(&self, magazines: *mut Magazines) {
        self.magazines.store(magazines, Relaxed);
    }

    /// Lets it lead to nobody's. By the owner, or by whoever detaches it.
    pub(crate) fn cut_off(&self) {
        self.magazines.store(nobodys(), Relaxed);
    }

    pub(crate) fn leads_to(&self, magazines: *mut Magazines) -> bool {
        self.magazines.load(Relaxed) == magazines
    }

    /// Owner thread only.
    #[inline(always)]
    fn magazines(&self) -> &Magazines {
        // Relaxed: it leads to what this thread has made and published, or to nobody's, which is constant.
        // SAFETY: this thread's go on this thread alone, after it has cut them off (`Local::lead`'s contract; what
        // `thread.rs` keeps apart goes as the thread ends).
        unsafe { &*self.magazines.load(Relaxed) }
    }

    /// Pops a block of the class at `place`; the whole of a cached alloc. Owner thread only.
    #[inline(always)]
    pub(crate) fn pop(&self, place: Place) -> Option<Entry> {
        let entry = self.magazines().mag(place).pop();
        if let Some(entry) = entry {
            show(place, entry);
        }
        entry
    }

    /// Pushes a block of the class at `place`, the whole of a cached free; false if there was no room.
    /// Owner thread only.
    #[inline(always)]
    pub(crate) fn push(&self, place: Place, entry: Entry) -> bool {
        // Before another thread can have it.
        hide(place, entry);
        let done = self.magazines().mag(place).push(entry);
        if !done {
            show(place, entry);
        }
        done
    }

    /// Pops a block after making the previous magazine the loaded one, if that has blocks: the first half
    /// of a slow path, still without a lock. Owner thread only.
    pub(crate) fn pop_previous(&self, depot: &Depot, place: Place) -> Option<Entry> {
        let mag = self.magazines().mag(place);
        let gate = mag.gate();
        let top = gate.enter();
        // Nobody's have no bounds either, and nothing behind them is looked at.
        let swapped = gate.bounds().and_then(|(bottom, end)| {
            let ready = top == bottom && mag.previous_len(depot)? > 0;
            ready.then(|| mag.exchange(depot, top, 0, entries_between(bottom, end)))
        });
        let Some(top) = swapped else {
            gate.leave(top);
            return None;
        };
        // SAFETY: the magazine has a block, below its top.
        let below = unsafe { top.sub(1) };
        // SAFETY: as above.
        let entry = unsafe { below.read() };
        gate.leave(below);
        show(place, entry);
        Some(entry)
    }

    /// Pushes a block after making the previous magazine the loaded one, if that has room: the first half
    /// of a slow path, still without a lock. Owner thread only.
    pub(crate) fn push_previous(&self, depot: &Depot, place: Place, entry: Entry) -> bool {
        let mag = self.magazines().mag(place);
        let gate = mag.gate();
        let top = gate.enter();
        // As above.
        let swapped = gate.bounds().and_then(|(bottom, end)| {
            let cap = entries_between(bottom, end);
            let ready = top == end && mag.previous_len(depot)? < cap;
            ready.then(|| mag.exchange(depot, top, cap, cap))
        });
        let Some(top) = swapped else {
            gate.leave(top);
            return false;
        };
        hide(place, entry);
        // SAFETY: the magazine may be used for `cap` blocks, if it has that many places, and holds fewer; all of a class
        // have equally many.
        unsafe { top.write(entry) };
        // SAFETY: as above.
        gate.leave(unsafe { top.add(1) });
        true
    }

    /// Pops up to `out.capacity() - out.len()` blocks onto `out`, from the loaded magazine alone.
    #[inline]
    pub(crate) fn pop_many(&self, place: Place, want: usize, out: &mut Vec<Entry>) -> usize {
        let gate = self.magazines().mag(place).gate();
        let top = gate.enter();
        let Some((bottom, _)) = gate.bounds() else {
            gate.leave(top);
            return 0;
        };
        let n = want.min(entries_between(bottom, top)).min(out.capacity() - out.len());
        // SAFETY: inside, so the top `n` entries of the loaded magazine are this thread's, and written; `out` has room.
        let top = unsafe {
            let top = top.sub(n);
            top.copy_to_nonoverlapping(out.as_mut_ptr().add(out.len()), n);
            out.set_len(out.len() + n);
            top
        };
        gate.leave(top);
        out[out.len() - n..].iter().for_each(|&entry| show(place, entry));
        n
    }

    /// Pushes as many of the last of `entries` as the loaded magazine has room for, and cuts them off.
    #[inline]
    pub(crate) fn push_many(&self, place: Place, entries: &mut Vec<Entry>) -> usize {
        let gate = self.magazines().mag(place).gate();
        let top = gate.enter();
        let Some((_, end)) = gate.bounds() else {
            gate.leave(top);
            return 0;
        };
        let n = entries.len().min(entries_between(top, end));
        entries[entries.len() - n..].iter().for_each(|&entry| hide(place, entry));
        // SAFETY: inside, and the magazine has room for `n` entries at its top; `entries` has at least `n`.
        let top = unsafe {
            entries.set_len(entries.len() - n);
            top.copy_from_nonoverlapping(entries.as_ptr().add(entries.len()), n);
            top.add(n)
        };
        gate.leave(top);
        n
    }
}
