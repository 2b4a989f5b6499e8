//! The slow side of magazines: who may touch all of a thread's, by its lock; their exchange with the depot; how much
//! a thread may keep.

use std::{cell::UnsafeCell, mem::ManuallyDrop, sync::Arc};

use super::{Mag, Magazines, Place, ThreadGate, empty};
use crate::{
    depot::{Depot, Magazine},
    gate::revoke_all,
    lock::{Mutex, MutexGuard},
    size_class::{self, CLASSES},
    slab::Entry,
};

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
        Arc::new(Self {
            magazines: Box::new(UnsafeCell::new(Magazines::new())),
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
    /// This thread has locked the state and kept the guard back. One such hold at a time is there, and one of them all
    /// is dropped ([`Mutex::kept`]).
    unsafe fn kept(local: &'a Local) -> Self {
        // SAFETY: passed on.
        Self { local, state: unsafe { local.state.kept() } }
    }
}

impl Hold<'_> {
    fn mag(&self, class: usize) -> Mag<'_> {
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
        if let Some(empty) = mag.previous().take() {
            depot.put_empty(class, empty);
        }
        mag.previous().set(mag.unload(depot));
        mag.load(depot, full, cap);
        self.state.brought[class] = brought as u16;
        true
    }

    /// Whether the class has no loaded magazine yet.
    pub(crate) fn lacks(&self, class: usize) -> bool {
        self.mag(class).end().get().is_null()
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
            Some(_) => surplus = mag.previous().take().and_then(|m| depot.put_full(class, m).err()),
            None => {}
        }
        mag.previous().set(mag.unload(depot));
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
        if mag.end().get().is_null() {
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
                    if mag.end().get().is_null() {
                        mag.load(depot, m, 0);
                    } else {
                        mag.previous().set(Some(m));
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
        [mag.previous().take(), mag.unload(depot)].into_iter().flatten()
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
