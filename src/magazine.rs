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

use std::{cell::Cell, marker::PhantomData, mem::offset_of, ptr};

pub(crate) use self::hold::Local;
use crate::{
    depot::{Depot, Magazine},
    gate::Gate,
    size_class::{self, CLASSES, FIRST_CODE, SPAN_CLASS},
    slab::Entry,
    sync::{in_register, in_register_of, unlikely},
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
    #[inline(always)]
    fn in_row<T>(self, row: usize) -> &'a Cell<T> {
        const { assert!(size_of::<T>() <= STEP) };
        let offset = row as isize - (FIRST_CODE * STEP) as isize;
        // SAFETY: `at` was made for a class that there is (`Magazines::mag`), so this is its element, and lives as
        // long as they do; what is of type `T` in this row, the methods below know.
        unsafe { &*self.at.wrapping_byte_offset(offset).cast() }
    }

    #[inline(always)]
    fn top(self) -> &'a Cell<*mut Entry> {
        self.in_row(offset_of!(Magazines, top))
    }

    #[inline(always)]
    fn bottom(self) -> &'a Cell<*mut Entry> {
        self.in_row(offset_of!(Magazines, bottom))
    }

    #[inline(always)]
    fn end(self) -> &'a Cell<*mut Entry> {
        self.in_row(offset_of!(Magazines, end))
    }

    fn loaded(self) -> &'a Cell<Option<Magazine>> {
        self.in_row(offset_of!(Magazines, whole) + offset_of!(Whole, loaded))
    }

    fn previous(self) -> &'a Cell<Option<Magazine>> {
        self.in_row(offset_of!(Magazines, whole) + offset_of!(Whole, previous))
    }

    #[inline(always)]
    fn pop(self) -> Option<Entry> {
        let top = self.top().get();
        if top == self.bottom().get() {
            unlikely();
            return None;
        }
        // SAFETY: `bottom < top <= end` delimit the loaded magazine's memory, so `top - 1` is in it,
        // and was written by the push (or load) that moved `top` above it.
        let top = unsafe { top.sub(1) };
        self.top().set(top);
        // SAFETY: as above.
        Some(unsafe { top.read() })
    }

    #[inline(always)]
    fn push(self, entry: Entry) -> bool {
        let top = self.top().get();
        if top == self.end().get() {
            unlikely();
            return false;
        }
        // SAFETY: `bottom <= top < end` delimit the loaded magazine's memory, so `top` is in it.
        unsafe { top.write(entry) };
        // SAFETY: as above; one past `top` is at most `end`.
        self.top().set(unsafe { top.add(1) });
        true
    }

    fn len(self) -> usize {
        (self.top().get() as usize - self.bottom().get() as usize) / size_of::<Entry>()
    }

    /// How many blocks the loaded magazine may hold.
    fn cap(self) -> usize {
        (self.end().get() as usize - self.bottom().get() as usize) / size_of::<Entry>()
    }

    fn room(self) -> usize {
        (self.end().get() as usize - self.top().get() as usize) / size_of::<Entry>()
    }

    /// Loads a magazine, to be used up to `cap` blocks, or up to what it holds if that is more.
    fn load(self, depot: &Depot, m: Magazine, cap: usize) {
        let (first, room) = depot.memory(&m);
        let count = depot.count(&m);
        self.bottom().set(first);
        // SAFETY: `first` and `room` delimit one allocation, and `count <= room`.
        let (top, end) = unsafe { (first.add(count), first.add(cap.max(count).min(room))) };
        self.end().set(end);
        self.top().set(top);
        self.loaded().set(Some(m));
    }

    fn unload(self, depot: &Depot) -> Option<Magazine> {
        let m = self.loaded().take()?;
        depot.set_count(&m, self.len());
        self.top().set(ptr::null_mut());
        self.bottom().set(ptr::null_mut());
        self.end().set(ptr::null_mut());
        Some(m)
    }

    /// Makes the previous magazine the loaded one and the other way round.
    fn swap(self, depot: &Depot, cap: usize) {
        let now = self.previous().take();
        self.previous().set(self.unload(depot));
        if let Some(m) = now {
            self.load(depot, m, cap);
        }
    }

    /// Lets the loaded magazine be used up to `cap` blocks.
    fn widen(self, depot: &Depot, cap: usize) {
        if let Some(m) = self.loaded().take() {
            let (first, room) = depot.memory(&m);
            // SAFETY: `first` and `room` delimit one allocation.
            let end = unsafe { first.add(cap.min(room)) };
            self.end().set(end.max(self.top().get()));
            self.loaded().set(Some(m));
        }
    }

    /// How many blocks the previous magazine holds, if there is one. Only reads, for it is also asked of
    /// the empty magazines, which all threads share.
    fn previous_len(self, depot: &Depot) -> Option<usize> {
        // SAFETY: whoever may touch the magazines is alone with them (the gate's table), and no reference
        // to the inside of the cell outlives this call.
        unsafe { &*self.previous().as_ptr() }.as_ref().map(|m| depot.count(m))
    }
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
#[repr(C, align(64))]
pub(crate) struct Magazines {
    top: [Cell<*mut Entry>; MAGS],
    bottom: [Cell<*mut Entry>; MAGS],
    end: [Cell<*mut Entry>; MAGS],
    whole: [Whole; MAGS],
}

/// The magazines as the depot knows them.
#[repr(C)]
struct Whole {
    loaded: Cell<Option<Magazine>>,
    previous: Cell<Option<Magazine>>,
}

const _: () = assert!(size_of::<Whole>() == STEP);

/// What a closed gate leads to: magazines without any room, so that both pop and push fail.
struct Empty(Magazines);

// SAFETY: nothing ever writes to it: a pop finds `top == bottom`, a push `top == end`.
unsafe impl Sync for Empty {}

static EMPTY: Empty = Empty(Magazines::new());

/// See [`Empty`].
pub(crate) const fn empty() -> *mut Magazines {
    &raw const EMPTY.0 as *mut Magazines
}

impl Magazines {
    const fn new() -> Self {
        const NONE: Cell<*mut Entry> = Cell::new(ptr::null_mut());
        let whole = [const { Whole { loaded: Cell::new(None), previous: Cell::new(None) } }; MAGS];
        Self { top: [NONE; MAGS], bottom: [NONE; MAGS], end: [NONE; MAGS], whole }
    }

    #[inline(always)]
    fn mag(&self, place: Place) -> Mag<'_> {
        Mag { at: in_register(self.at(place)), _all: PhantomData }
    }

    /// The same for pushing, and for popping, which follow each other.
    #[inline(always)]
    fn mag_for<const PUSH: bool>(&self, place: Place) -> Mag<'_> {
        Mag { at: in_register_of::<_, PUSH>(self.at(place)), _all: PhantomData }
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

/// The gate through which a thread reaches its magazines of one pool.
pub(crate) type ThreadGate = Gate<Magazines>;

impl ThreadGate {
    /// Pops a block of the class at `place`; the whole of a cached alloc. Owner thread only.
    #[inline(always)]
    pub(crate) fn pop(&self, place: Place) -> Option<Entry> {
        // SAFETY: the gate leads to EMPTY or to published magazines, which are freed only after the gate
        // was revoked and found idle; until `leave`, they are this thread's alone (the gate's table).
        let entry = unsafe { &*self.enter() }.mag_for::<false>(place).pop();
        self.leave();
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
        // SAFETY: as in `pop`.
        let done = unsafe { &*self.enter() }.mag_for::<true>(place).push(entry);
        self.leave();
        if !done {
            show(place, entry);
        }
        done
    }

    /// Pops a block after making the previous magazine the loaded one, if that has blocks: the first half
    /// of a slow path, still without a lock. Owner thread only.
    pub(crate) fn pop_previous(&self, depot: &Depot, place: Place) -> Option<Entry> {
        // SAFETY: as in `pop`.
        let mag = unsafe { &*self.enter() }.mag(place);
        let has_blocks = mag.previous_len(depot).is_some_and(|n| n > 0);
        let entry = if has_blocks && mag.len() == 0 {
            mag.swap(depot, mag.cap());
            mag.pop()
        } else {
            None
        };
        self.leave();
        if let Some(entry) = entry {
            show(place, entry);
        }
        entry
    }

    /// Pushes a block after making the previous magazine the loaded one, if that has room: the first half
    /// of a slow path, still without a lock. Owner thread only.
    pub(crate) fn push_previous(&self, depot: &Depot, place: Place, entry: Entry) -> bool {
        // SAFETY: as in `pop`.
        let mag = unsafe { &*self.enter() }.mag(place);
        let has_room = mag.previous_len(depot).is_some_and(|n| n < mag.cap());
        let done = has_room && mag.room() == 0 && {
            mag.swap(depot, mag.cap());
            hide(place, entry);
            mag.push(entry)
        };
        self.leave();
        done
    }

    /// Pops up to `out.capacity() - out.len()` blocks onto `out`, from the loaded magazine alone.
    #[inline]
    pub(crate) fn pop_many(&self, place: Place, want: usize, out: &mut Vec<Entry>) -> usize {
        // SAFETY: as in `pop`.
        let mag = unsafe { &*self.enter() }.mag(place);
        let n = want.min(mag.len()).min(out.capacity() - out.len());
        if n > 0 {
            // SAFETY: the top `n` entries of the loaded magazine are written, and `out` has room.
            unsafe {
                let top = mag.top().get().sub(n);
                top.copy_to_nonoverlapping(out.as_mut_ptr().add(out.len()), n);
                out.set_len(out.len() + n);
                mag.top().set(top);
            }
            out[out.len() - n..].iter().for_each(|&entry| show(place, entry));
        }
        self.leave();
        n
    }

    /// Pushes as many of the last of `entries` as the loaded magazine has room for, and cuts them off.
    #[inline]
    pub(crate) fn push_many(&self, place: Place, entries: &mut Vec<Entry>) -> usize {
        // SAFETY: as in `pop`.
        let mag = unsafe { &*self.enter() }.mag(place);
        let n = entries.len().min(mag.room());
        if n > 0 {
            entries[entries.len() - n..].iter().for_each(|&entry| hide(place, entry));
            // SAFETY: the magazine has room for `n` entries at its top; `entries` has at least `n`.
            unsafe {
                let top = mag.top().get();
                entries.set_len(entries.len() - n);
                top.copy_from_nonoverlapping(entries.as_ptr().add(entries.len()), n);
                mag.top().set(top.add(n));
            }
        }
        self.leave();
        n
    }
}
