//! Which allocations are the pool's own: those that its slow paths make for their tables. A pool whose
//! memory is the process's heap must not serve them from itself, in the middle of changing itself.
//!
//! Every lock of the pool's tables is of the kind defined here, and holding one (or waiting for one, for
//! the lock's own slow path allocates too) marks the thread. [`inside`] tells; the global allocator asks,
//! and turns to the allocator that it wraps. So the tables of a pool never lie in a pool.

use std::{
    cell::Cell,
    ops::{Deref, DerefMut},
};

thread_local! {
    // Without a destructor, so that it works at any time in a thread's life.
    static DEPTH: Cell<u32> = const { Cell::new(0) };
}

/// Whether this thread is inside a slow path of some pool.
#[inline(always)]
#[cfg_attr(not(feature = "global"), allow(dead_code))]
pub(crate) fn inside() -> bool {
    DEPTH.with(Cell::get) != 0
}

/// Marks the thread as being inside until the mark is dropped.
pub(crate) struct Mark {
    // Marks are the thread's, and must be dropped on it.
    _thread: std::marker::PhantomData<*mut ()>,
}

/// Marks the thread. Marks may be nested.
#[inline]
pub(crate) fn enter() -> Mark {
    DEPTH.with(|depth| depth.set(depth.get() + 1));
    Mark { _thread: std::marker::PhantomData }
}

impl Drop for Mark {
    #[inline]
    fn drop(&mut self) {
        DEPTH.with(|depth| depth.set(depth.get() - 1));
    }
}

/// A lock that marks the thread that waits for it or holds it.
pub(crate) struct Mutex<T>(parking_lot::Mutex<T>);

/// The right to what a [`Mutex`] protects.
pub(crate) struct MutexGuard<'a, T> {
    // Dropped first: releasing is still inside.
    guard: parking_lot::MutexGuard<'a, T>,
    _mark: Mark,
}

impl<T> Mutex<T> {
    pub(crate) const fn new(value: T) -> Self {
        Self(parking_lot::Mutex::new(value))
    }

    #[inline]
    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        let mark = enter();
        MutexGuard { guard: self.0.lock(), _mark: mark }
    }

    pub(crate) fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        let mark = enter();
        Some(MutexGuard { guard: self.0.try_lock()?, _mark: mark })
    }
}

impl<T> Deref for MutexGuard<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        &self.guard
    }
}

impl<T> DerefMut for MutexGuard<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        &mut self.guard
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_is_marked_exactly_while_it_holds_a_lock() {
        let (a, b) = (Mutex::new(1), Mutex::new(2));
        assert!(!inside());
        let first = a.lock();
        let second = b.lock();
        assert!(inside());
        assert!(a.try_lock().is_none() && inside(), "a lock that was not had leaves no mark");
        drop(first);
        assert!(inside());
        drop(second);
        assert!(!inside());
        std::thread::scope(|s| {
            let _held = a.lock();
            s.spawn(|| assert!(!inside(), "marks are a thread's own"));
        });
    }
}
