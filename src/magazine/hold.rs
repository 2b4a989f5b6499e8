//! The slow side of magazines: who may touch all of a thread's, by its lock; their exchange with the depot; how much
//! a thread may keep.

use std::{mem::ManuallyDrop, ptr, sync::Arc};

use super::{Closed, Mag, Magazines, Place, ThreadSlot};
use crate::{
    depot::{Depot, Magazine},
    gate::{Gate, close_all},
    lock::{Mutex, MutexGuard},
    size_class::{self, CLASSES},
    slab::Entry,
};

/// What a thread has of one pool; shared with thieves.
pub(crate) struct Local {
    magazines: Box<Magazines>,
    /// Where pops and pushes go instead if all of them are to take the lock.
    instead: Option<Box<Closed>>,
    state: Mutex<LocalState>,
    /// The owner thread's slot. Valid while `attached`: the thread detaches before its memory goes.
    slot: *const ThreadSlot,
}

struct LocalState {
    attached: bool,
    /// The classes with a loaded magazine.
    loaded: ClassSet,
    /// The classes whose gates thieves have closed since the owner was here.
    closed: ClassSet,
    /// Those that the last thief had to close.
    closing: ClassSet,
    /// How many blocks a magazine of each class may hold in this thread; grows with use.
    caps: [u16; PLACES],
    /// Bytes that the magazines in use here can hold so, over all classes.
    reserved: usize,
    /// How many blocks of each class were brought in at the last miss, if none was taken out since but by
    /// allocs: at the next miss all of them have been.
    brought: [u16; PLACES],
}

/// Some of the classes.
#[derive(Clone, Copy, PartialEq, Eq)]
struct ClassSet([u64; CLASSES.div_ceil(64)]);

impl ClassSet {
    const NONE: Self = Self([0; CLASSES.div_ceil(64)]);

    fn set(&mut self, class: usize, is_in: bool) {
        let bit = 1 << (class % 64);
        let word = &mut self.0[class / 64];
        *word = if is_in { *word | bit } else { *word & !bit };
    }

    fn with(self, other: Self) -> Self {
        Self(std::array::from_fn(|i| self.0[i] | other.0[i]))
    }

    fn without(self, other: Self) -> Self {
        Self(std::array::from_fn(|i| self.0[i] & !other.0[i]))
    }

    fn iter(self) -> impl Iterator<Item = usize> + Clone {
        let bits = |(i, mut word): (usize, u64)| {
            std::iter::from_fn(move || {
                let bit = (word != 0).then(|| word.trailing_zeros() as usize)?;
                word &= word - 1;
                Some(64 * i + bit)
            })
        };
        self.0.into_iter().enumerate().flat_map(bits)
    }
}

/// How many blocks a magazine may hold at first.
const FIRST_CAP: usize = 8;
const PLACES: usize = CLASSES + 1;

// SAFETY: the magazines are touched inside a gate by the owner thread, or under `state`'s lock by the owner outside or
// by a thief with the gates closed and idle (see `Hold`); the slot's pointer is followed only while attached.
unsafe impl Send for Local {}
// SAFETY: as above.
unsafe impl Sync for Local {}

impl Local {
    /// Makes empty magazines for the owner of `slot`; `gated`: for use without the lock.
    ///
    /// # Safety
    /// `slot` stays valid until [`Hold::detach`] was called.
    pub(crate) unsafe fn new(slot: *const ThreadSlot, gated: bool) -> Arc<Self> {
        Arc::new(Self {
            magazines: Box::new(Magazines::new(ptr::null_mut())),
            instead: (!gated).then(|| Box::new(Closed::new())),
            state: Mutex::new(LocalState {
                attached: true,
                loaded: ClassSet::NONE,
                closed: ClassSet::NONE,
                closing: ClassSet::NONE,
                caps: [0; PLACES],
                reserved: 0,
                brought: [0; PLACES],
            }),
            slot,
        })
    }

    /// What the owner's slot leads to.
    fn shown(&self) -> *mut Magazines {
        self.instead.as_ref().map_or_else(|| (&raw const *self.magazines).cast_mut(), |c| c.get())
    }

    /// Lets the slot lead here, unless the pool was closed meanwhile.
    ///
    /// # Safety
    /// Only on the thread that owns the slot, which calls [`let_go`](Local::let_go) before it drops its own reference.
    pub(crate) unsafe fn lead(&self) {
        // Locked until it leads, for whoever detaches it has the lock, too.
        let state = self.state.lock();
        if state.attached {
            // SAFETY: attached, so the slot is valid.
            unsafe { &*self.slot }.lead_to(self.shown());
        }
        drop(state);
    }

    /// Before the owner drops its reference: lets the slot lead elsewhere, if it still leads here. Whoever detached the
    /// thread has done so; but this thread need not have seen that yet.
    ///
    /// # Safety
    /// Only on the thread that owns the slot.
    pub(crate) unsafe fn let_go(&self) {
        // SAFETY: it lives as long as the thread, which is this one.
        let slot = unsafe { &*self.slot };
        if slot.leads_to(self.shown()) {
            slot.cut_off();
        }
    }

    /// The owner's own slow path: the gates may stay open, for the owner is here and not inside.
    ///
    /// # Safety
    /// Only on the thread that owns the slot, outside of all gates.
    pub(crate) unsafe fn hold_as_owner(&self, depot: &Depot) -> Hold<'_> {
        let mut hold = Hold { local: self, state: self.state.lock() };
        if hold.state.closed != ClassSet::NONE {
            hold.open_again(depot);
        }
        hold
    }

    /// Takes over the magazines of several threads at the price of one barrier.
    pub(crate) fn hold_all(locals: &[Arc<Self>]) -> Holds<'_> {
        locals.iter().for_each(|local| local.state.lock().keep());
        let holds = Holds { locals };
        holds.each().for_each(|mut hold| {
            let LocalState { loaded, closed, closing, .. } = &mut *hold.state;
            *closing = loaded.without(*closed);
            *closed = closed.with(*closing);
        });
        close_all(holds.each().flat_map(|hold| hold.closing()));
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
    /// This thread has locked the state and kept the guard back. One such hold at a time is there, and one of them all
    /// is dropped ([`Mutex::kept`]).
    unsafe fn kept(local: &'a Local) -> Self {
        // SAFETY: passed on.
        Self { local, state: unsafe { local.state.kept() } }
    }

    fn mag(&self, class: usize) -> Mag<'a> {
        self.local.magazines.mag(Place::of(class))
    }

    fn closing(&self) -> impl Iterator<Item = Gate<'a, Entry>> + Clone + use<'a> {
        let local = self.local;
        self.state.closing.iter().map(|class| local.magazines.mag(Place::of(class)).gate())
    }

    /// Whether the thread still uses these magazines. False once the pool was closed or the thread is
    /// gone.
    pub(crate) fn attached(&self) -> bool {
        self.state.attached
    }

    /// Sets the gates right after a thief was here, and opens those that lead to something. By the owner.
    #[cold]
    fn open_again(&mut self, depot: &Depot) {
        let closed = std::mem::replace(&mut self.state.closed, ClassSet::NONE);
        for class in closed.iter() {
            let (mag, count) = (self.mag(class), self.mag(class).len(depot));
            match mag.loaded().take() {
                Some(m) => {
                    depot.set_count(&m, count);
                    // A class whose cap was taken back has room for one at least: it must not be loaded and have none.
                    mag.point_at(depot, &m, usize::from(self.state.caps[class]).max(1));
                    mag.loaded().set(Some(m));
                }
                None => mag.gate().shut(),
            }
        }
    }

    /// Ends the thread's use. The caller has emptied the magazines, and is the owner or has closed the gates.
    pub(crate) fn detach(&mut self) {
        if self.state.attached {
            // SAFETY: still attached, so the slot is valid.
            unsafe { &*self.local.slot }.cut_off();
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
            self.exchange(depot, class, cap);
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
        if let Some(empty) = mag.previous().take() {
            depot.put_empty(class, empty);
        }
        mag.previous().set(self.unload(depot, class));
        self.load(depot, class, full, cap);
        self.state.brought[class] = brought as u16;
        true
    }

    /// Whether the class has no loaded magazine yet.
    pub(crate) fn lacks(&self, class: usize) -> bool {
        self.mag(class).gate().bounds().is_none()
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
            self.widen(depot, class, cap);
            if mag.room() > 0 {
                depot.put_empty(class, empty);
                return None;
            }
        }
        let mut surplus = None;
        match mag.previous_len(depot) {
            Some(n) if n < cap => {
                self.exchange(depot, class, cap);
                depot.put_empty(class, empty);
                return None;
            }
            Some(_) => surplus = mag.previous().take().and_then(|m| depot.put_full(class, m).err()),
            None => {}
        }
        mag.previous().set(self.unload(depot, class));
        self.load(depot, class, empty, cap);
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
        let lacked = self.lacks(class);
        if lacked {
            let Some(m) = empty.take().or_else(|| depot.get_empty(class)) else { return };
            self.load(depot, class, m, cap);
        }
        let mag = self.mag(class);
        let before = mag.len(depot);
        fill(mag.room(), &mut |entry| {
            let fitted = mag.push(entry);
            debug_assert!(fitted, "more blocks than asked for");
        });
        let brought = mag.len(depot) - before;
        self.state.brought[class] = brought as u16;
        if lacked && brought == 0 {
            // A gate that a search has closed stays so while there is nothing behind it: the next free then stirs
            // (`Drought`).
            *empty = self.unload(depot, class);
        }
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
            for other in self.state.loaded.iter() {
                // What the depot does not want stays in the thread: nothing is lost, and the next
                // recall finds it.
                for m in self.take(depot, other) {
                    let Err(m) = self.put_by(depot, other, m) else { continue };
                    if self.lacks(other) {
                        self.load(depot, other, m, 0);
                    } else {
                        self.mag(other).previous().set(Some(m));
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

    /// Loads a magazine, to be used up to `cap` blocks, or up to what it holds if that is more. By the owner.
    fn load(&mut self, depot: &Depot, class: usize, m: Magazine, cap: usize) {
        self.state.loaded.set(class, true);
        let mag = self.mag(class);
        mag.gate().leave(mag.point_at(depot, &m, cap));
        mag.loaded().set(Some(m));
    }

    /// Makes the previous magazine the loaded one, and the other way round. By the owner.
    fn exchange(&self, depot: &Depot, class: usize, cap: usize) {
        let mag = self.mag(class);
        mag.gate().leave(mag.exchange(depot, mag.gate().top(), mag.len(depot), cap));
    }

    /// Lets the loaded magazine be used up to `cap` blocks. By the owner.
    fn widen(&mut self, depot: &Depot, class: usize, cap: usize) {
        if let Some(m) = self.unload(depot, class) {
            self.load(depot, class, m, cap);
        }
    }

    /// Takes the loaded magazine out. By the owner, or by a thief: what it leaves in a closed gate the owner sets right.
    fn unload(&mut self, depot: &Depot, class: usize) -> Option<Magazine> {
        let mag = self.mag(class);
        let count = mag.len(depot);
        let m = mag.loaded().take()?;
        depot.set_count(&m, count);
        if !mag.gate().is_closed() {
            mag.gate().shut();
        }
        self.state.loaded.set(class, false);
        Some(m)
    }

    /// Takes both magazines out.
    fn take(&mut self, depot: &Depot, class: usize) -> impl Iterator<Item = Magazine> + use<> {
        [self.mag(class).previous().take(), self.unload(depot, class)].into_iter().flatten()
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
        for class in self.state.loaded.iter() {
            let mag = self.mag(class);
            sum[class] += mag.len(depot) + mag.previous_len(depot).unwrap_or(0);
        }
    }

    /// Takes all magazines out; those with blocks, and their class, go to `sink`.
    pub(crate) fn drain(&mut self, depot: &Depot, mut sink: impl FnMut(usize, Magazine)) {
        for class in self.state.loaded.iter() {
            for m in self.take(depot, class) {
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
