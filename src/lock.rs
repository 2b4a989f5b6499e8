//! The lock of the pool's tables: one word, no memory beside it.
//!
//! A library's lock would do but for one thing: the pool can be the process's heap. Locks that keep waiting
//! threads in a table of their own (`parking_lot`'s) allocate while that table is locked, and whoever is inside
//! such an allocation would wait for itself at a lock of the pool. The standard library's is not seen by the
//! thread sanitizer.
//!
//! | state | meaning | lock | unlock |
//! |---|---|---|---|
//! | free | nobody holds it | → held | – |
//! | held | one holds it, nobody waits | → contended, waits | → free |
//! | contended | one holds it, others may wait | waits | → free, wakes one |
//! | hungry | one holds it, and somebody has slept for it in vain several times | waits | → handed, wakes one |
//! | handed | nobody holds it; it is for those who have slept | who has slept → contended; others wait | – |
//!
//! So whoever takes it again and again, an exhausted pool's recalls say, keeps nobody out for ever: a thread that is
//! woken would else find it taken each time.
//!
//! Holding a lock, or waiting for one, marks the thread (see `reentry`).
//!
//! **Nothing is allocated or freed under a lock that alloc and free take** (guards and waiting apart). The allocator may be one that a user has
//! put under the pool, and may take locks of the user's, which a thread can hold that waits for the pool's. What is
//! needed is made before the lock is taken; what is left over goes after it was released.

#[cfg(not(loom))]
use std::{
    cell::UnsafeCell,
    ops::{Deref, DerefMut},
};

#[cfg(not(loom))]
use crate::reentry::{Mark, enter};
use crate::sync::{
    Sleepers,
    atomic::{
        AtomicU32,
        Ordering::{Acquire, Relaxed, Release},
    },
};

const FREE: u32 = 0;
const HELD: u32 = 1;
const CONTENDED: u32 = 2;
const HUNGRY: u32 = 3;
const HANDED: u32 = 4;

/// How often a thread looks again before it sleeps.
const SPINS: u32 = if cfg!(loom) { 1 } else { 100 };

/// How often a thread sleeps in vain until it has the lock handed over.
const PATIENCE: u32 = if cfg!(loom) { 1 } else { 4 };

/// The state, without what it protects.
#[derive(Debug)]
struct RawLock {
    state: AtomicU32,
    sleepers: Sleepers,
}

impl RawLock {
    #[cfg(not(loom))]
    const fn new() -> Self {
        Self { state: AtomicU32::new(FREE), sleepers: Sleepers }
    }

    #[cfg(loom)]
    fn new() -> Self {
        Self { state: AtomicU32::new(FREE), sleepers: Sleepers::new() }
    }

    #[inline]
    fn try_lock(&self) -> bool {
        // Acquire pairs with the Release in `unlock`.
        self.state.compare_exchange(FREE, HELD, Acquire, Relaxed).is_ok()
    }

    #[inline]
    fn lock(&self) {
        if !self.try_lock() {
            self.lock_slow();
        }
    }

    #[cold]
    fn lock_slow(&self) {
        for _ in 0..SPINS {
            match self.state.load(Relaxed) {
                FREE if self.try_lock() => return,
                FREE | HELD => std::hint::spin_loop(),
                _ => break,
            }
        }
        let mut slept = 0;
        loop {
            let state = self.state.load(Relaxed);
            let mine = state == FREE || (state == HANDED && slept > 0);
            let next = match state {
                // Whoever gets it this way cannot know whether others wait, and leaves it contended.
                _ if mine => CONTENDED,
                HELD | CONTENDED if slept >= PATIENCE => HUNGRY,
                HELD => CONTENDED,
                _ => state,
            };
            // Acquire as in `try_lock`.
            if next != state && self.state.compare_exchange(state, next, Acquire, Relaxed).is_err()
            {
                continue;
            }
            if mine {
                return;
            }
            self.sleepers.wait(&self.state, next);
            slept += 1;
        }
    }

    /// Only by whoever holds it.
    #[inline]
    fn unlock(&self) {
        // Pairs with the Acquires above: what was done under the lock is seen under the next.
        if self.state.compare_exchange(HELD, FREE, Release, Relaxed).is_err() {
            self.unlock_slow();
        }
    }

    #[cold]
    fn unlock_slow(&self) {
        // Others may make it hungry meanwhile, and nothing else. Whoever did so either sleeps and can be woken, or
        // is about to, sees that the state has changed, and looks again: handed, it is taken. Release as in `unlock`.
        let next = |state| Some(if state == HUNGRY { HANDED } else { FREE });
        let _ = self.state.fetch_update(Release, Relaxed, next);
        self.sleepers.wake_one(&self.state);
    }
}

/// How many of the pool's locks this thread holds; for tests of the rule above.
#[cfg(all(feature = "fault", not(loom)))]
pub fn locks_held() -> u32 {
    OWN.get()
}

#[cfg(all(feature = "fault", not(loom)))]
thread_local! {
    static OWN: std::cell::Cell<u32> = const { std::cell::Cell::new(0) };
}

#[cfg(not(loom))]
#[inline]
fn count_held(_by: i32) {
    #[cfg(feature = "fault")]
    OWN.set(OWN.get().wrapping_add_signed(_by));
}

/// A lock around a `T`.
#[cfg(not(loom))]
pub(crate) struct Mutex<T> {
    lock: RawLock,
    value: UnsafeCell<T>,
}

// SAFETY: the value is reached through the lock alone, by one thread at a time.
#[cfg(not(loom))]
unsafe impl<T: Send> Sync for Mutex<T> {}

/// The right to what a [`Mutex`] protects.
#[cfg(not(loom))]
pub(crate) struct MutexGuard<'a, T> {
    mutex: &'a Mutex<T>,
    /// Keeps the guard on its thread. Dropped after the lock was released: releasing is still inside.
    _mark: Mark,
}

// SAFETY: a shared guard gives shared references only; what a mark is, is not reached through it.
#[cfg(not(loom))]
unsafe impl<T: Sync> Sync for MutexGuard<'_, T> {}

#[cfg(not(loom))]
impl<T> Mutex<T> {
    pub(crate) const fn new(value: T) -> Self {
        Self { lock: RawLock::new(), value: UnsafeCell::new(value) }
    }

    #[inline]
    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        let mark = enter();
        self.lock.lock();
        count_held(1);
        MutexGuard { mutex: self, _mark: mark }
    }

    pub(crate) fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        let mark = enter();
        if !self.lock.try_lock() {
            return None;
        }
        count_held(1);
        Some(MutexGuard { mutex: self, _mark: mark })
    }

    /// The guard that was kept back by [`MutexGuard::keep`].
    ///
    /// # Safety
    /// It was, on this thread. If this is called several times for it, one guard at a time is there, and one of them
    /// all is dropped; the others are forgotten.
    pub(crate) unsafe fn kept(&self) -> MutexGuard<'_, T> {
        MutexGuard { mutex: self, _mark: Mark::kept() }
    }
}

#[cfg(not(loom))]
impl<T> MutexGuard<'_, T> {
    /// Leaves the lock locked, without memory for a guard. [`Mutex::kept`] has the guard again.
    pub(crate) fn keep(self) {
        std::mem::forget(self);
    }
}

#[cfg(not(loom))]
impl<T> Drop for MutexGuard<'_, T> {
    #[inline]
    fn drop(&mut self) {
        count_held(-1);
        self.mutex.lock.unlock();
    }
}

#[cfg(not(loom))]
impl<T> Deref for MutexGuard<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: this guard's thread holds the lock, so nobody else has a reference.
        unsafe { &*self.mutex.value.get() }
    }
}

#[cfg(not(loom))]
impl<T> DerefMut for MutexGuard<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: as in `deref`; `&mut self` makes it the only one.
        unsafe { &mut *self.mutex.value.get() }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::thread;

    use super::*;
    use crate::reentry::inside;

    #[test]
    fn a_thread_is_marked_exactly_while_it_holds_a_lock() {
        let (a, b) = (Mutex::new(1), Mutex::new(2));
        assert!(!inside());
        let first = a.lock();
        let second = b.lock();
        assert!(inside());
        assert!(a.try_lock().is_none() && inside());
        drop(first);
        assert!(inside());
        drop(second);
        assert!(!inside(), "a lock that was not had has left no mark");
        let held = a.lock();
        thread::scope(|s| s.spawn(|| assert!(!inside(), "marks are a thread's own")).join())
            .expect("join");
        drop(held);
    }

    #[test]
    fn a_lock_that_was_not_had_stays_with_whoever_has_it() {
        let a = Mutex::new(1);
        let held = a.lock();
        assert!(a.try_lock().is_none());
        assert!(a.try_lock().is_none(), "the first try released nothing");
        drop(held);
        assert!(a.try_lock().is_some());
    }

    #[test]
    fn many_threads_lose_no_count() {
        const EACH: usize = 20_000;
        let count = Mutex::new(0);
        thread::scope(|s| {
            let add = || (0..EACH).for_each(|_| *count.lock() += 1);
            let threads: Vec<_> = (0..8).map(|_| s.spawn(add)).collect();
            threads.into_iter().for_each(|t| t.join().expect("join"));
        });
        assert_eq!(*count.lock(), 8 * EACH);
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    //! Every interleaving: never two inside, and nobody sleeps for ever (loom reports a deadlock).
    use loom::{cell::UnsafeCell, sync::Arc, thread};

    use super::*;

    fn add_one(shared: &(RawLock, UnsafeCell<u32>)) {
        shared.0.lock();
        // SAFETY: under the lock, which is what is being proved: loom panics on a concurrent access.
        shared.1.with_mut(|v| unsafe { *v += 1 });
        shared.0.unlock();
    }

    fn model(threads: u32) {
        let mut builder = loom::model::Builder::new();
        // Three threads that sleep and wake interleave in too many ways to try them all.
        builder.preemption_bound = Some(2);
        builder.check(move || {
            let shared = Arc::new((RawLock::new(), UnsafeCell::new(0)));
            let others: Vec<_> = (1..threads)
                .map(|_| {
                    let shared = shared.clone();
                    thread::spawn(move || add_one(&shared))
                })
                .collect();
            add_one(&shared);
            others.into_iter().for_each(|t| t.join().unwrap());
            // SAFETY: the others are gone.
            assert_eq!(shared.1.with(|v| unsafe { *v }), threads);
        });
    }

    #[test]
    fn loom_two_threads_are_never_both_inside() {
        model(2);
    }

    #[test]
    fn loom_three_threads_are_never_two_inside() {
        model(3);
    }

    /// One that takes it again and again, and one that waits for it: handed over, and taken as usual afterwards.
    #[test]
    fn loom_a_lock_that_is_handed_over_is_had() {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(3);
        builder.check(|| {
            let shared = Arc::new((RawLock::new(), UnsafeCell::new(0)));
            let other = {
                let shared = shared.clone();
                thread::spawn(move || add_one(&shared))
            };
            (0..3).for_each(|_| add_one(&shared));
            other.join().unwrap();
            // SAFETY: the other is gone.
            assert_eq!(shared.1.with(|v| unsafe { *v }), 4);
        });
    }
}
