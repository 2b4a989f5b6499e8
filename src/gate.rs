//! The gate: lets a thread use its own magazine with plain loads and stores, and lets another thread take that
//! right away.
//!
//! Three words: `top` points above the last block, `bottom` and `end` delimit where blocks may be. The owner takes `top`
//! and leaves a *mark* there while it is inside, and only then looks at one of the bounds. A thief *closes* the gate: it
//! puts bounds there between which nothing can be popped or pushed, so that the owner's look for blocks is its look for
//! thieves, too. Then the thief waits until there is no mark. Between store and load on each side stands a barrier, so
//! at least one of the two sees the other. The owner's barrier costs nothing: the thief pays for both with
//! `membarrier`, which makes every running thread execute one.
//!
//! | bounds | mark | who may touch the blocks |
//! |---|---|---|
//! | open | no | nobody (the owner by entering) |
//! | open | yes | the owner |
//! | closed | yes | the owner, if it looked before they were closed; the thief waits. Else nobody: it leaves at once |
//! | closed | no | whoever holds the lock that `close` and `open` are called under |
//!
//! Nobody but the owner writes `top`: an owner that comes too late still leaves its mark, and puts back what it took.
//! What a thief leaves there is no longer true, and the owner sets it right before it opens the gate again.
//!
//! The mark is in a word that each pop and push writes in any case because the cache takes one store a cycle, or two
//! to one line: a flag elsewhere, set and cleared twice a pair, costs two cycles of seven.

use std::ptr;

use crate::sync::{
    atomic::{
        AtomicPtr,
        Ordering::{Acquire, Relaxed, Release},
    },
    heavy_barrier, light_barrier,
};

/// The words of one gate, wherever they lie.
#[derive(Debug)]
pub(crate) struct Gate<'a, T> {
    pub(crate) top: &'a AtomicPtr<T>,
    pub(crate) bottom: &'a AtomicPtr<T>,
    pub(crate) end: &'a AtomicPtr<T>,
}

impl<T> Clone for Gate<'_, T> {
    #[inline(always)]
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Gate<'_, T> {}

/// What `top` is while the owner is inside: no pointer to a `T`.
const MARK: usize = 1;

/// The bounds of a closed gate: nothing lies above the first, nothing below the second.
pub(crate) const CLOSED_BOTTOM: usize = usize::MAX;

impl<T> Gate<'_, T> {
    /// Enters, and says where the top is. Only the owner may call this, must look at a bound next, and call
    /// [`leave`](Gate::leave) in any case: with the same top if that look forbids to go on.
    #[inline(always)]
    pub(crate) fn enter(self) -> *mut T {
        const { assert!(align_of::<T>() > MARK) };
        // Relaxed, as all that the owner does to its own words: it sees its own stores.
        let top = self.top.load(Relaxed);
        self.top.store(ptr::without_provenance_mut(MARK), Relaxed);
        light_barrier();
        top
    }

    /// Whether there is a block below `top`, and nobody has closed the gate. From inside.
    #[inline(always)]
    pub(crate) fn may_pop(self, top: *mut T) -> bool {
        // Relaxed: only the owner itself ever stores anything but what closes.
        top > self.bottom.load(Relaxed)
    }

    /// Whether there is room at `top`, and nobody has closed the gate. From inside.
    #[inline(always)]
    pub(crate) fn may_push(self, top: *mut T) -> bool {
        // Relaxed: only the owner itself ever stores anything but what closes.
        top < self.end.load(Relaxed)
    }

    /// Leaves, with a new top. Pairs with the load in [`top`](Gate::top): the thief sees all that was done
    /// inside.
    #[inline(always)]
    pub(crate) fn leave(self, top: *mut T) {
        self.top.store(top, Release);
    }

    /// The top. By the owner, outside, or by a thief who closed the gate.
    ///
    /// A thief waits until the owner is outside. That is for a few instructions, unless it was descheduled there. One
    /// that comes too late leaves its mark for a moment, too; then it wants the lock.
    pub(crate) fn top(self) -> *mut T {
        let mut spins = 0u32;
        loop {
            // Acquire pairs with the Release in `leave`.
            let top = self.top.load(Acquire);
            if top.addr() != MARK {
                return top;
            }
            spins = spins.wrapping_add(1);
            #[cfg(not(loom))]
            if spins % 1024 < 64 {
                std::hint::spin_loop();
            } else {
                std::thread::yield_now();
            }
            #[cfg(loom)]
            loom::thread::yield_now();
        }
    }

    /// The bounds, if the gate is open and has memory. By the owner.
    pub(crate) fn bounds(self) -> Option<(*mut T, *mut T)> {
        let (bottom, end) = (self.bottom.load(Relaxed), self.end.load(Relaxed));
        (bottom.addr() != CLOSED_BOTTOM && !end.is_null()).then_some((bottom, end))
    }

    /// Whether a thief has closed it since the owner set its bounds. Under the lock.
    pub(crate) fn is_closed(self) -> bool {
        self.bottom.load(Relaxed).addr() == CLOSED_BOTTOM
    }

    /// Opens the gate, or moves its bounds. By the owner: under the lock and outside, or from inside after it
    /// found the gate open; a thief may then come in between, and closes once more.
    pub(crate) fn open(self, bottom: *mut T, end: *mut T) {
        self.bottom.store(bottom, Relaxed);
        self.end.store(end, Relaxed);
    }

    /// Makes it a gate without memory. By the owner, under the lock and outside.
    pub(crate) fn shut(self) {
        self.open(ptr::null_mut(), ptr::null_mut());
        self.top.store(ptr::null_mut(), Relaxed);
    }

    /// Closes the gate: the first half of taking over. Under the lock. False if it was closed, or has no memory, which
    /// is as good: in both cases the owner can neither pop nor push, and does not change that without the lock.
    fn close(self) -> bool {
        // An owner that moved the bounds while they were closed may have left either open.
        let bottom = self.bottom.load(Relaxed).addr();
        let open = !self.end.load(Relaxed).is_null() || (bottom != 0 && bottom != CLOSED_BOTTOM);
        if open {
            self.bottom.store(ptr::without_provenance_mut(CLOSED_BOTTOM), Relaxed);
            self.end.store(ptr::null_mut(), Relaxed);
        }
        open
    }
}

/// Closes many gates at the price of one barrier and waits until all owners are outside.
///
/// The caller holds the lock of each gate's blocks, and is then alone with all of them until it releases the locks.
/// Mostly one round, and a look: an owner who was moving the bounds from inside as the round began has opened its gate
/// again.
pub(crate) fn close_all<'a, T: 'a>(gates: impl Iterator<Item = Gate<'a, T>> + Clone) {
    // All are closed, not just up to the first that was open.
    while gates.clone().fold(false, |any, gate| gate.close() | any) {
        heavy_barrier();
        gates.clone().for_each(|gate| {
            gate.top();
        });
    }
}

#[cfg(all(test, loom))]
pub(crate) mod model {
    //! A magazine in small, for this module's and others' models: numbers behind a gate, in two memories of which one
    //! is loaded. loom panics when two threads are at a memory, or at the note of which is loaded, at a time.
    use std::ptr;

    use loom::cell::UnsafeCell;

    use super::*;

    const ROOM: usize = 2;

    pub(crate) struct Small {
        top: AtomicPtr<UnsafeCell<u32>>,
        bottom: AtomicPtr<UnsafeCell<u32>>,
        end: AtomicPtr<UnsafeCell<u32>>,
        memories: [Box<[UnsafeCell<u32>; ROOM]>; 2],
        /// Which memory is loaded, if one is, and how much the other holds.
        whole: UnsafeCell<(Option<usize>, usize)>,
    }

    // SAFETY: what it manages, and what is being proved.
    unsafe impl Sync for Small {}
    // SAFETY: as above.
    unsafe impl Send for Small {}

    impl Small {
        pub(crate) fn new() -> Self {
            let word = || AtomicPtr::new(ptr::null_mut());
            let memory = || Box::new([(); ROOM].map(|()| UnsafeCell::new(0)));
            Self {
                top: word(),
                bottom: word(),
                end: word(),
                memories: [memory(), memory()],
                whole: UnsafeCell::new((None, 0)),
            }
        }

        fn gate(&self) -> Gate<'_, UnsafeCell<u32>> {
            Gate { top: &self.top, bottom: &self.bottom, end: &self.end }
        }

        fn first(&self, memory: usize) -> *mut UnsafeCell<u32> {
            self.memories[memory].as_ptr().cast_mut()
        }

        /// The owner's, without the lock.
        pub(crate) fn pop(&self) -> Option<u32> {
            let top = self.gate().enter();
            if !self.gate().may_pop(top) {
                self.gate().leave(top);
                return None;
            }
            let below = top.wrapping_sub(1);
            // SAFETY: inside an open gate; loom checks.
            let got = unsafe { (*below).with_mut(|n| std::mem::take(&mut *n)) };
            self.gate().leave(below);
            Some(got)
        }

        /// The owner's, without the lock.
        pub(crate) fn push(&self, n: u32) -> bool {
            let top = self.gate().enter();
            if !self.gate().may_push(top) {
                self.gate().leave(top);
                return false;
            }
            // SAFETY: as above.
            unsafe { (*top).with_mut(|place| *place = n) };
            self.gate().leave(top.wrapping_add(1));
            true
        }

        /// The owner's, without the lock: loads the other memory if the loaded one is empty.
        pub(crate) fn exchange(&self) {
            let mut top = self.gate().enter();
            if let Some((bottom, _)) = self.gate().bounds()
                && bottom == top
            {
                top = self.whole.with_mut(|whole| {
                    // SAFETY: as above.
                    let (loaded, other) = unsafe { &mut *whole };
                    let Some(now) = loaded.as_mut() else { return top };
                    *now = 1 - *now;
                    let first = self.first(*now);
                    self.gate().open(first, first.wrapping_add(ROOM));
                    first.wrapping_add(std::mem::take(other))
                });
            }
            self.gate().leave(top);
        }

        /// Begins the owner's slow path, under the lock.
        pub(crate) fn set_right(&self) {
            if !self.gate().is_closed() {
                return;
            }
            // SAFETY: under the lock, outside; loom checks.
            match self.whole.with(|whole| unsafe { (*whole).0 }) {
                Some(now) => {
                    let first = self.first(now);
                    self.gate().open(first, first.wrapping_add(ROOM));
                }
                None => self.gate().shut(),
            }
        }

        /// By the owner, under the lock: loads an empty memory if there is none.
        pub(crate) fn load(&self) {
            self.whole.with_mut(|whole| {
                // SAFETY: as above.
                let (loaded, _) = unsafe { &mut *whole };
                if loaded.is_none() {
                    *loaded = Some(0);
                    let first = self.first(0);
                    self.gate().open(first, first.wrapping_add(ROOM));
                    self.gate().leave(first);
                }
            });
        }

        /// By the owner, under the lock: puts a number into the memory that is not loaded.
        pub(crate) fn put_by(&self, n: u32) {
            self.whole.with_mut(|whole| {
                // SAFETY: as above.
                let (loaded, other) = unsafe { &mut *whole };
                let memory = 1 - loaded.unwrap_or(0);
                // SAFETY: as above.
                self.memories[memory][*other].with_mut(|place| unsafe { *place = n });
                *other += 1;
            });
        }

        /// A thief's, under the lock: how many there are. Leaves all as it is.
        pub(crate) fn count(&self) -> usize {
            close_all(std::iter::once(self.gate()));
            self.whole.with(|whole| {
                // SAFETY: closed and idle, under the lock; loom checks.
                let (loaded, other) = unsafe { *whole };
                loaded.map_or(0, |now| self.above(now) + other)
            })
        }

        /// A thief's, under the lock: takes all, and says how many and their sum.
        pub(crate) fn steal(&self) -> (usize, u32) {
            close_all(std::iter::once(self.gate()));
            self.whole.with_mut(|whole| {
                // SAFETY: as above.
                let (loaded, other) = unsafe { &mut *whole };
                let Some(now) = loaded.take() else { return (0, 0) };
                let (here, there) = (self.above(now), std::mem::take(other));
                let places = [(now, here), (1 - now, there)];
                let all = places.iter().flat_map(|&(m, n)| &self.memories[m][..n]);
                // SAFETY: as above.
                let sum =
                    all.map(|place| place.with_mut(|n| unsafe { std::mem::take(&mut *n) })).sum();
                (here + there, sum)
            })
        }

        fn above(&self, memory: usize) -> usize {
            (self.gate().top().addr() - self.first(memory).addr()) / size_of::<UnsafeCell<u32>>()
        }
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    //! Every interleaving of an owner and thieves: never two at a memory, and no number is lost or had twice.
    use loom::{
        sync::{Arc, Mutex},
        thread,
    };

    use super::model::Small;

    /// A magazine and the lock of its slow path.
    struct Own(Small, Mutex<()>);

    impl Own {
        /// As the pool's thread does: without the lock, or with it.
        fn put(&self, n: u32) {
            if !self.0.push(n) {
                let _lock = self.1.lock().unwrap();
                self.0.set_right();
                self.0.load();
                assert!(self.0.push(n));
            }
        }

        fn get(&self) -> Option<u32> {
            self.0.pop().or_else(|| {
                let _lock = self.1.lock().unwrap();
                self.0.set_right();
                self.0.pop()
            })
        }

        fn steal(&self) -> u32 {
            self.locked(|own| own.steal().1)
        }

        fn locked<T>(&self, f: impl FnOnce(&Small) -> T) -> T {
            let _lock = self.1.lock().unwrap();
            f(&self.0)
        }
    }

    /// Runs an owner beside a thief, with a 1 in the memory that is loaded, or else in the other.
    fn beside<T: 'static>(
        preemptions: usize,
        loaded: bool,
        thief: fn(&Own) -> T,
        owner: fn(&Own, &mut dyn FnMut() -> T),
    ) {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(preemptions);
        model.check(move || {
            let own = Arc::new(Own(Small::new(), Mutex::new(())));
            own.0.load();
            if loaded {
                assert!(own.0.push(1));
            } else {
                own.0.put_by(1);
            }
            let shared = own.clone();
            let mut thief = Some(thread::spawn(move || thief(&shared)));
            owner(&own, &mut || thief.take().unwrap().join().unwrap());
        });
    }

    #[test]
    fn loom_owner_and_thief_are_never_both_inside() {
        beside(5, true, Own::steal, |own, stolen| {
            let got = own.get().unwrap_or(0);
            own.put(2);
            assert_eq!(got + stolen() + own.steal(), 3);
        });
    }

    #[test]
    fn loom_a_thief_who_only_counts_takes_nothing() {
        let count = |own: &Own| own.locked(Small::count);
        beside(5, true, count, |own, counted| {
            assert_eq!(own.get(), Some(1));
            own.put(2);
            assert!(counted() <= 1);
            assert_eq!(own.get(), Some(2));
        });
    }

    #[test]
    fn loom_moving_the_bounds_from_inside_does_not_let_the_owner_out() {
        let steal_twice = |own: &Own| {
            own.locked(|small| {
                let stolen = small.steal().1;
                // Closed it stays, until the owner has the lock.
                assert_eq!(small.steal(), (0, 0));
                stolen
            })
        };
        beside(5, false, steal_twice, |own, stolen| {
            own.0.exchange();
            let got = own.0.pop().unwrap_or(0);
            let stolen = stolen();
            assert_eq!(got + stolen, 1);
            assert!(stolen == 0 || own.0.pop().is_none());
        });
    }

    #[test]
    fn loom_counted_and_then_robbed_while_the_bounds_move() {
        let count_and_steal = |own: &Own| {
            own.locked(Small::count);
            own.steal()
        };
        beside(3, false, count_and_steal, |own, stolen| {
            own.0.exchange();
            let got = own.0.pop().unwrap_or(0);
            own.put(4);
            own.0.exchange();
            assert_eq!(got + stolen() + own.steal(), 5);
        });
    }
}
