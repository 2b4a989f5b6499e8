//! The gate: lets a thread use its own magazines with plain loads and stores, and lets another thread
//! take that right away.
//!
//! The owner announces itself (`busy`), then looks for the pointer to what it owns; a thief takes the
//! pointer away (puts one to something empty in its place), then waits until the owner is not busy. Between store and load on each side stands a
//! barrier, so at least one of the two sees the other. The owner's barrier costs nothing: the thief
//! pays for both with `membarrier`, which makes every running thread execute one.
//!
//! | pointer | busy | who may touch the contents |
//! |---|---|---|
//! | set | 0 | nobody (the owner by entering) |
//! | set | 1 | the owner |
//! | empty | 1 | the owner, if it entered before the pointer went; the thief waits |
//! | empty | 0 | whoever holds the lock that `revoke` and `publish` are called under |

use crate::sync::{
    atomic::{
        AtomicPtr, AtomicU32,
        Ordering::{Acquire, Relaxed, Release},
    },
    heavy_barrier, light_barrier,
};

#[derive(Debug)]
pub(crate) struct Gate<T> {
    inside: AtomicPtr<T>,
    busy: AtomicU32,
}

impl<T> Gate<T> {
    /// Makes a closed gate: whoever enters finds `empty`.
    #[cfg(not(loom))]
    pub(crate) const fn new(empty: *mut T) -> Self {
        Self { inside: AtomicPtr::new(empty), busy: AtomicU32::new(0) }
    }

    #[cfg(loom)]
    pub(crate) fn new(empty: *mut T) -> Self {
        Self { inside: AtomicPtr::new(empty), busy: AtomicU32::new(0) }
    }

    /// Enters. Only the owner thread may call this, and must call [`leave`](Gate::leave) afterwards in
    /// either case. A closed gate gives what it was closed with: by choosing that so that nothing can
    /// be taken from it nor put into it, the caller saves a test.
    #[inline(always)]
    pub(crate) fn enter(&self) -> *mut T {
        self.busy.store(1, Relaxed);
        light_barrier();
        // Relaxed: only the owner itself ever stores anything but the empty one, which is constant.
        self.inside.load(Relaxed)
    }

    /// Leaves. Pairs with the load in [`revoke`](Gate::revoke)'s wait: the thief sees all that was done
    /// inside.
    #[inline(always)]
    pub(crate) fn leave(&self) {
        self.busy.store(0, Release);
    }

    /// Opens the gate for `contents`. Only by the owner thread, and under the contents' lock.
    pub(crate) fn publish(&self, contents: *mut T) {
        self.inside.store(contents, Relaxed);
    }

    /// Closes the gate: the first half of taking over. Under the contents' lock. Not before a
    /// [`heavy_barrier`] and [`wait_idle`](Gate::wait_idle) is the caller alone.
    pub(crate) fn revoke(&self, empty: *mut T) {
        self.inside.store(empty, Relaxed);
    }

    /// Waits until the owner is outside. It is inside for a few instructions, unless it was descheduled
    /// there.
    pub(crate) fn wait_idle(&self) {
        let mut spins = 0u32;
        // Acquire pairs with the Release in `leave`.
        while self.busy.load(Acquire) != 0 {
            spins += 1;
            #[cfg(not(loom))]
            if spins < 64 {
                std::hint::spin_loop();
            } else {
                std::thread::yield_now();
            }
            #[cfg(loom)]
            loom::thread::yield_now();
        }
        let _ = spins;
    }
}

/// Closes several gates at the price of one barrier and waits until all owners are outside.
///
/// The caller holds the lock of each gate's contents, and is then alone with all of them until it
/// releases the locks.
pub(crate) fn revoke_all<'a, T: 'a>(
    gates: impl Iterator<Item = &'a Gate<T>> + Clone,
    empty: *mut T,
) {
    gates.clone().for_each(|gate| gate.revoke(empty));
    heavy_barrier();
    gates.for_each(Gate::wait_idle);
}

#[cfg(all(test, loom))]
mod loom_tests {
    //! Every interleaving of an owner and a thief: never both inside, and nothing the owner did is lost.
    use loom::{
        cell::UnsafeCell,
        sync::{Arc, Mutex},
        thread,
    };

    use super::*;

    struct Shared {
        gate: Gate<UnsafeCell<u32>>,
        contents: Box<UnsafeCell<u32>>,
        lock: Mutex<()>,
    }

    fn add_one(s: &Shared) {
        let p = s.gate.enter();
        if !p.is_null() {
            // SAFETY: `contents` outlives the model; inside the gate it is the owner's, which is what
            // is being proved: loom panics on a concurrent access.
            unsafe { (*p).with_mut(|v| *v += 1) };
            s.gate.leave();
        } else {
            s.gate.leave();
            // The slow path: under the lock.
            let _lock = s.lock.lock().unwrap();
            // SAFETY: as above, the lock now being what gives the right.
            unsafe { s.contents.with_mut(|v| *v += 1) };
            s.gate.publish(&*s.contents as *const _ as *mut _);
        }
    }

    #[test]
    fn loom_owner_and_thief_are_never_both_inside() {
        loom::model(|| {
            let s = Arc::new(Shared {
                gate: Gate::new(std::ptr::null_mut()),
                contents: Box::new(UnsafeCell::new(0)),
                lock: Mutex::new(()),
            });
            s.gate.publish(&*s.contents as *const _ as *mut _);
            let t = s.clone();
            let thief = thread::spawn(move || {
                let _lock = t.lock.lock().unwrap();
                revoke_all(std::iter::once(&t.gate), std::ptr::null_mut());
                // SAFETY: revoked and idle under the lock: the thief is alone.
                unsafe { t.contents.with_mut(|v| std::mem::replace(&mut *v, 0)) }
            });
            add_one(&s);
            add_one(&s);
            let stolen = thief.join().unwrap();
            // SAFETY: the thief is gone.
            let left = unsafe { s.contents.with(|v| *v) };
            assert_eq!(stolen + left, 2);
        });
    }
}
