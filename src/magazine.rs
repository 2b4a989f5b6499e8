//! Magazines: each thread's private stacks of free blocks, one a class, and their exchange with the
//! depot. Manages who may touch them; where blocks come from in the end is the pool's business.
//!
//! A thread has two magazines a class, as in Bonwick's scheme: one loaded, that alloc pops and free
//! pushes, and the previous one, full or empty. Only when both are empty or both full does a whole
//! magazine change hands with the depot, so a thread that goes to and fro over a boundary does not.
//!
//! ```text
//! Mag    bottom ──► ┌───────┐
//!                   │ entry │  blocks to hand out
//!        top ─────► ├───────┤  next push goes here
//!                   │       │
//!        end ─────► └───────┘
//! ```

use std::{
    cell::{Cell, UnsafeCell},
    mem::ManuallyDrop,
    ptr,
    sync::Arc,
};

use crate::{
    depot::{Depot, Magazine},
    gate::{Gate, revoke_all},
    lock::{Mutex, MutexGuard},
    size_class::{self, CLASSES, SPAN_CLASS},
    slab::Entry,
    sync::{in_register, unlikely},
    sys::shadow,
};

/// One class's magazines in one thread.
struct Mag {
    top: Cell<*mut Entry>,
    bottom: Cell<*mut Entry>,
    end: Cell<*mut Entry>,
    loaded: Cell<Option<Magazine>>,
    previous: Cell<Option<Magazine>>,
}

const _: () = assert!(size_of::<Mag>() == 32, "class to magazine is a shift");

impl Mag {
    const fn new() -> Self {
        Self {
            top: Cell::new(ptr::null_mut()),
            bottom: Cell::new(ptr::null_mut()),
            end: Cell::new(ptr::null_mut()),
            loaded: Cell::new(None),
            previous: Cell::new(None),
        }
    }

    #[inline(always)]
    fn pop(&self) -> Option<Entry> {
        let top = self.top.get();
        if top == self.bottom.get() {
            unlikely();
            return None;
        }
        // SAFETY: `bottom < top <= end` delimit the loaded magazine's memory, so `top - 1` is in it,
        // and was written by the push (or load) that moved `top` above it.
        let top = unsafe { top.sub(1) };
        self.top.set(top);
        // SAFETY: as above.
        Some(unsafe { top.read() })
    }

    #[inline(always)]
    fn push(&self, entry: Entry) -> bool {
        let top = self.top.get();
        if top == self.end.get() {
            unlikely();
            return false;
        }
        // SAFETY: `bottom <= top < end` delimit the loaded magazine's memory, so `top` is in it.
        unsafe { top.write(entry) };
        // SAFETY: as above; one past `top` is at most `end`.
        self.top.set(unsafe { top.add(1) });
        true
    }

    fn len(&self) -> usize {
        (self.top.get() as usize - self.bottom.get() as usize) / size_of::<Entry>()
    }

    /// How many blocks the loaded magazine may hold.
    fn cap(&self) -> usize {
        (self.end.get() as usize - self.bottom.get() as usize) / size_of::<Entry>()
    }

    fn room(&self) -> usize {
        (self.end.get() as usize - self.top.get() as usize) / size_of::<Entry>()
    }

    /// Loads a magazine, to be used up to `cap` blocks, or up to what it holds if that is more.
    fn load(&self, depot: &Depot, m: Magazine, cap: usize) {
        let (first, room) = depot.memory(&m);
        let count = depot.count(&m);
        self.bottom.set(first);
        // SAFETY: `first` and `room` delimit one allocation, and `count <= room`.
        let (top, end) = unsafe { (first.add(count), first.add(cap.max(count).min(room))) };
        self.end.set(end);
        self.top.set(top);
        self.loaded.set(Some(m));
    }

    fn unload(&self, depot: &Depot) -> Option<Magazine> {
        let m = self.loaded.take()?;
        depot.set_count(&m, self.len());
        self.top.set(ptr::null_mut());
        self.bottom.set(ptr::null_mut());
        self.end.set(ptr::null_mut());
        Some(m)
    }

    /// Makes the previous magazine the loaded one and the other way round.
    fn swap(&self, depot: &Depot, cap: usize) {
        let now = self.previous.take();
        self.previous.set(self.unload(depot));
        if let Some(m) = now {
            self.load(depot, m, cap);
        }
    }

    /// Lets the loaded magazine be used up to `cap` blocks.
    fn widen(&self, depot: &Depot, cap: usize) {
        if let Some(m) = self.loaded.take() {
            let (first, room) = depot.memory(&m);
            // SAFETY: `first` and `room` delimit one allocation.
            let end = unsafe { first.add(cap.min(room)) };
            self.end.set(end.max(self.top.get()));
            self.loaded.set(Some(m));
        }
    }

    /// How many blocks the previous magazine holds, if there is one. Only reads, for it is also asked of
    /// the empty magazines, which all threads share.
    fn previous_len(&self, depot: &Depot) -> Option<usize> {
        // SAFETY: whoever may touch the magazines is alone with them (the gate's table), and no reference
        // to the inside of the cell outlives this call.
        unsafe { &*self.previous.as_ptr() }.as_ref().map(|m| depot.count(m))
    }
}

/// A class as the hot path carries it: where its magazine lies among the others, in bytes. Of 32 bits, but held in
/// a whole register, lest it be widened again.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Place(usize);

impl Place {
    /// `class` is below [`CLASSES`], or [`SPAN_CLASS`].
    #[inline(always)]
    pub(crate) const fn of(class: usize) -> Self {
        Self(class * size_of::<Mag>())
    }

    #[inline(always)]
    pub(crate) const fn offset(self) -> u32 {
        self.0 as u32
    }

    /// # Safety
    /// `offset` came from [`offset`](Place::offset).
    #[inline(always)]
    pub(crate) const unsafe fn from_offset(offset: u32) -> Self {
        Self(offset as usize)
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
        self.0 / size_of::<Mag>()
    }
}

/// All magazines of one thread for one pool.
#[repr(C)]
pub(crate) struct Magazines {
    // One more than there are classes: spans above them find a magazine that is always empty and always
    // full, and so take the slow path without a test of their own.
    mags: [Mag; CLASSES + 1],
}

/// What a closed gate leads to: magazines without any room, so that both pop and push fail.
struct Empty(Magazines);

// SAFETY: nothing ever writes to it: a pop finds `top == bottom`, a push `top == end`.
unsafe impl Sync for Empty {}

static EMPTY: Empty = Empty(Magazines { mags: [const { Mag::new() }; CLASSES + 1] });

/// See [`Empty`].
pub(crate) const fn empty() -> *mut Magazines {
    &raw const EMPTY.0 as *mut Magazines
}

impl Magazines {
    #[inline(always)]
    fn mag(&self, place: Place) -> &Mag {
        debug_assert!(place.class() <= SPAN_CLASS);
        // SAFETY: every class in the crate comes from `class_of` of a length up to MAX_BLOCK or is
        // SPAN_CLASS, so its place is that of an element of `mags`, which is the only field.
        unsafe { &*in_register((&raw const self.mags).byte_add(place.0).cast::<Mag>()) }
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
        let entry = unsafe { &*self.enter() }.mag(place).pop();
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
        let done = unsafe { &*self.enter() }.mag(place).push(entry);
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
                let top = mag.top.get().sub(n);
                top.copy_to_nonoverlapping(out.as_mut_ptr().add(out.len()), n);
                out.set_len(out.len() + n);
                mag.top.set(top);
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
                let top = mag.top.get();
                entries.set_len(entries.len() - n);
                top.copy_from_nonoverlapping(entries.as_ptr().add(entries.len()), n);
                mag.top.set(top.add(n));
            }
        }
        self.leave();
        n
    }
}

/// What a thread has of one pool; shared with thieves.
pub(crate) struct Local {
    magazines: Box<UnsafeCell<Magazines>>,
    state: Mutex<LocalState>,
    /// The owner thread's gate. Valid while `attached`: the thread detaches before its memory goes.
    gate: *const ThreadGate,
}

struct LocalState {
    attached: bool,
    /// How many blocks a magazine of each class may hold in this thread; grows with use.
    caps: [u16; PLACES],
    /// Bytes that the magazines in use here can hold so, over all classes.
    reserved: usize,
    /// How many blocks of each class were brought in at the last miss, if none was taken out since but by
    /// allocs: at the next miss all of them have been.
    brought: [u16; PLACES],
}

/// How many blocks a magazine may hold at first.
const FIRST_CAP: usize = 8;
const PLACES: usize = CLASSES + 1;

// SAFETY: the magazines are touched inside the gate by the owner thread, or under `state`'s lock with
// the gate idle (see `Hold`); the gate pointer is followed only while attached.
unsafe impl Send for Local {}
// SAFETY: as above.
unsafe impl Sync for Local {}

impl Local {
    /// Makes empty magazines for the owner of `gate`.
    ///
    /// # Safety
    /// `gate` stays valid until [`Hold::detach`] was called.
    pub(crate) unsafe fn new(gate: *const ThreadGate) -> Arc<Self> {
        let mags = std::array::from_fn(|_| Mag::new());
        Arc::new(Self {
            magazines: Box::new(UnsafeCell::new(Magazines { mags })),
            state: Mutex::new(LocalState {
                attached: true,
                caps: [0; PLACES],
                reserved: 0,
                brought: [0; PLACES],
            }),
            gate,
        })
    }

    /// The owner's own slow path: the gate may stay open, for the owner is here and not inside.
    ///
    /// # Safety
    /// Only on the thread that owns the gate, outside of it.
    pub(crate) unsafe fn hold_as_owner(&self) -> Hold<'_> {
        Hold { local: self, state: self.state.lock() }
    }

    /// Takes over the magazines of several threads at the price of one barrier.
    pub(crate) fn hold_all(locals: &[Arc<Self>]) -> Holds<'_> {
        locals.iter().for_each(|local| local.state.lock().keep());
        let holds = Holds { locals };
        let attached = |hold: ManuallyDrop<Hold<'_>>| {
            // SAFETY: a gate outlives its local's attachment, and `attached` is read under the lock that
            // detaching takes.
            hold.state.attached.then(|| unsafe { &*hold.local.gate })
        };
        revoke_all(holds.each().filter_map(attached), empty());
        holds
    }
}

/// The right to the magazines of several threads. Takes no memory for it.
pub(crate) struct Holds<'a> {
    locals: &'a [Arc<Local>],
}

impl Holds<'_> {
    /// Each thread's. Not more than one of a thread may be there at a time, lest there be two references to its
    /// state; each is let go of without releasing anything.
    fn each(&self) -> impl Iterator<Item = ManuallyDrop<Hold<'_>>> + Clone {
        // SAFETY: all are locked, by this thread: a hold stays on its thread (its guards do). They are released once,
        // in `drop`.
        let hold = |local| unsafe { ManuallyDrop::new(Hold::kept(local)) };
        self.locals.iter().map(move |local| hold(local))
    }

    pub(crate) fn for_each(&mut self, mut f: impl FnMut(&mut Hold<'_>)) {
        self.each().for_each(|mut hold| f(&mut hold));
    }
}

impl Drop for Holds<'_> {
    fn drop(&mut self) {
        // SAFETY: locked by this thread, and released here alone.
        self.locals.iter().for_each(|local| drop(unsafe { Hold::kept(local) }));
    }
}

/// The right to a thread's magazines, held by the owner in its slow path or by a thief.
pub(crate) struct Hold<'a> {
    local: &'a Local,
    state: MutexGuard<'a, LocalState>,
}

impl<'a> Hold<'a> {
    /// # Safety
    /// This thread has locked the state and kept the guard back; once for each time.
    unsafe fn kept(local: &'a Local) -> Self {
        // SAFETY: passed on.
        Self { local, state: unsafe { local.state.kept() } }
    }
}

impl Hold<'_> {
    fn mag(&self, class: usize) -> &Mag {
        // SAFETY: a `Hold` exists only under the state's lock, made by the owner outside of its gate or
        // by a thief after the gate was revoked and idle: nobody else is at the magazines.
        unsafe { (*self.local.magazines.get()).mag(Place::of(class)) }
    }

    /// Whether the thread still uses these magazines. False once the pool was closed or the thread is
    /// gone.
    pub(crate) fn attached(&self) -> bool {
        self.state.attached
    }

    /// Opens the gate again. Only by the owner.
    pub(crate) fn publish(&self) {
        // SAFETY: attached, so the gate is valid; the owner calls this on its own thread.
        unsafe { (*self.local.gate).publish(self.local.magazines.get()) };
    }

    /// Ends the thread's use. The caller has emptied the magazines, and the gate is revoked or the
    /// caller is the owner.
    pub(crate) fn detach(&mut self) {
        if self.state.attached {
            // SAFETY: still attached, so the gate is valid.
            unsafe { (*self.local.gate).revoke(empty()) };
            self.state.attached = false;
        }
    }

    pub(crate) fn pop(&self, class: usize) -> Option<Entry> {
        self.mag(class).pop()
    }

    pub(crate) fn push(&self, class: usize, entry: Entry) -> bool {
        self.mag(class).push(entry)
    }

    /// Brings blocks of a class into the loaded magazine from the previous one or the depot; false if
    /// neither has any. Counts what that was, for the alloc that asks; `gated`: whether allocs pass the gate
    /// unseen.
    pub(crate) fn reload(&mut self, depot: &Depot, class: usize, gated: bool) -> bool {
        let cap = self.cap(depot, class);
        let mag = self.mag(class);
        if mag.previous_len(depot).is_some_and(|n| n > 0) {
            mag.swap(depot, cap);
            depot.count_hits(class, u64::from(!gated));
            return true;
        }
        // Both are empty, so allocs have had what the last miss brought, the first of it that one itself.
        let brought = std::mem::take(&mut self.state.brought[class]);
        if gated {
            depot.count_hits(class, u64::from(brought.saturating_sub(1)));
        }
        depot.count_miss(class);
        let mag = self.mag(class);
        let Some(full) = depot.get_full(class) else { return false };
        depot.count_from_depot(class);
        let brought = depot.count(&full);
        if let Some(empty) = mag.previous.take() {
            depot.put_empty(class, empty);
        }
        mag.previous.set(mag.unload(depot));
        mag.load(depot, full, cap);
        self.state.brought[class] = brought as u16;
        true
    }

    /// Whether the class has no loaded magazine yet.
    pub(crate) fn lacks(&self, class: usize) -> bool {
        self.mag(class).end.get().is_null()
    }

    /// Makes room in the loaded magazine, with `empty` in its place if need be. `Some` is a full magazine that the
    /// depot did not want: the caller empties it into the slabs and puts it by as empty.
    pub(crate) fn make_room(
        &mut self,
        depot: &Depot,
        class: usize,
        empty: Magazine,
    ) -> Option<Magazine> {
        // What goes out with a magazine may be what was brought.
        self.state.brought[class] = 0;
        let before = self.cap(depot, class);
        let cap = self.grow(depot, class);
        let mag = self.mag(class);
        if cap > before {
            mag.widen(depot, cap);
            if mag.room() > 0 {
                depot.put_empty(class, empty);
                return None;
            }
        }
        let mut surplus = None;
        match mag.previous_len(depot) {
            Some(n) if n < cap => {
                mag.swap(depot, cap);
                depot.put_empty(class, empty);
                return None;
            }
            Some(_) => surplus = mag.previous.take().and_then(|m| depot.put_full(class, m).err()),
            None => {}
        }
        mag.previous.set(mag.unload(depot));
        mag.load(depot, empty, cap);
        surplus
    }

    /// Fills the loaded magazine, which is `empty` if there is none, through `fill`, which is told how many blocks
    /// there is room for. Without any, nothing is brought.
    pub(crate) fn fill(
        &mut self,
        depot: &Depot,
        class: usize,
        empty: &mut Option<Magazine>,
        fill: impl FnOnce(usize, &mut dyn FnMut(Entry)),
    ) {
        let cap = self.cap(depot, class);
        let mag = self.mag(class);
        if mag.end.get().is_null() {
            let Some(m) = empty.take().or_else(|| depot.get_empty(class)) else { return };
            mag.load(depot, m, cap);
        }
        let before = mag.len();
        fill(mag.room(), &mut |entry| {
            let fitted = mag.push(entry);
            debug_assert!(fitted, "more blocks than asked for");
        });
        self.state.brought[class] = (mag.len() - before) as u16;
    }

    /// How many blocks a magazine of the class may hold in this thread. A class that is used for the first
    /// time gets a few; if even those exceed the thread's share, all other classes' magazines go to the
    /// depot first, and start anew.
    fn cap(&mut self, depot: &Depot, class: usize) -> usize {
        let cap = usize::from(self.state.caps[class]);
        if cap > 0 {
            return cap;
        }
        let first = depot.limits.magazine(class).min(FIRST_CAP);
        let bytes = Self::bytes(class, first);
        if self.state.reserved + bytes > depot.limits.thread() && self.state.reserved > 0 {
            for other in 0..CLASSES {
                // What the depot does not want stays in the thread: nothing is lost, and the next
                // recall finds it.
                for m in self.unload(depot, other) {
                    let Err(m) = self.put_by(depot, other, m) else { continue };
                    let mag = self.mag(other);
                    if mag.end.get().is_null() {
                        mag.load(depot, m, 0);
                    } else {
                        mag.previous.set(Some(m));
                    }
                }
            }
            self.state.caps = [0; PLACES];
            self.state.reserved = 0;
            self.state.brought = [0; PLACES];
        }
        self.state.caps[class] = first as u16;
        self.state.reserved += bytes;
        first
    }

    /// Doubles what a magazine of the class may hold, as far as that is within the thread's share.
    fn grow(&mut self, depot: &Depot, class: usize) -> usize {
        let cap = self.cap(depot, class);
        let more = cap.min(depot.limits.magazine(class).saturating_sub(cap));
        let bytes = Self::bytes(class, more);
        if more == 0 || self.state.reserved + bytes > depot.limits.thread() {
            return cap;
        }
        self.state.caps[class] += more as u16;
        self.state.reserved += bytes;
        cap + more
    }

    /// Bytes of blocks in the two magazines of a class that holds `cap` in each.
    fn bytes(class: usize, cap: usize) -> usize {
        2 * cap * size_class::size_of(class)
    }

    fn unload(&self, depot: &Depot, class: usize) -> impl Iterator<Item = Magazine> + use<> {
        let mag = self.mag(class);
        [mag.previous.take(), mag.unload(depot)].into_iter().flatten()
    }

    fn put_by(&self, depot: &Depot, class: usize, m: Magazine) -> Result<(), Magazine> {
        if depot.count(&m) == 0 {
            depot.put_empty(class, m);
            return Ok(());
        }
        depot.put_full(class, m)
    }

    /// How many blocks of each class lie here, added to `sum`.
    pub(crate) fn count_into(&self, depot: &Depot, sum: &mut [usize]) {
        for (class, sum) in sum.iter_mut().enumerate().take(CLASSES) {
            let mag = self.mag(class);
            *sum += mag.len() + mag.previous_len(depot).unwrap_or(0);
        }
    }

    /// Takes all magazines out; those with blocks, and their class, go to `sink`.
    pub(crate) fn drain(&mut self, depot: &Depot, mut sink: impl FnMut(usize, Magazine)) {
        for class in 0..CLASSES {
            for m in self.unload(depot, class) {
                if depot.count(&m) == 0 {
                    depot.put_empty(class, m);
                } else {
                    sink(class, m);
                }
            }
        }
        self.state.caps = [0; PLACES];
        self.state.reserved = 0;
        self.state.brought = [0; PLACES];
    }
}
