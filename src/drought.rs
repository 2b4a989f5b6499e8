//! Drought: what is known of a heap that was searched in vain. Manages the proof that nothing has come back
//! to it since; the search, and what is done instead, are the pool's business.
//!
//! The search closes the gates of all threads, so whatever is freed to the heap afterwards takes a slow path
//! first, and that [stirs](Drought::stir) before it puts the block anywhere. As long as the count of stirs
//! is what it was before the search, the heap is as empty as the search found it.
//!
//! | who | does | pairs with |
//! |---|---|---|
//! | a free's slow path, under its thread's lock | `stir`, then puts the block where it can be found | the search's taking of that lock |
//! | a search | `seen`, then locks, closes and looks through every thread's magazines | the slow paths before it |
//! | whoever wants proof | `seen` again | `stir` |

use crate::sync::atomic::{
    AtomicU64, AtomicUsize,
    Ordering::{Acquire, Relaxed, Release},
};

#[derive(Debug)]
pub(crate) struct Drought {
    stirs: AtomicU64,
    /// Stirs at the last vain search, and the length that it was for. Hints: read apart, they may be of
    /// two searches, and cost at worst a look elsewhere first.
    noted: AtomicU64,
    len: AtomicUsize,
}

/// How far the count was.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Stirs(u64);

impl Drought {
    pub(crate) fn new() -> Self {
        Self { stirs: AtomicU64::new(0), noted: AtomicU64::new(u64::MAX), len: AtomicUsize::new(0) }
    }

    /// Says that a block is about to come back.
    pub(crate) fn stir(&self) {
        // Release pairs with the Acquire in `seen`: whoever sees that nothing stirred sees nothing of what
        // came back either, and whoever sees what came back (through the lock that both take) sees this.
        self.stirs.fetch_add(1, Release);
    }

    /// How often something stirred so far.
    pub(crate) fn seen(&self) -> Stirs {
        Stirs(self.stirs.load(Acquire))
    }

    /// Notes that a search for `len` bytes, begun when `before` was seen, found nothing.
    pub(crate) fn note(&self, before: Stirs, len: usize) {
        self.len.store(len, Relaxed);
        self.noted.store(before.0, Relaxed);
    }

    /// Whether a search for `len` bytes would be in vain again. A hint, not a proof.
    pub(crate) fn lasts(&self, len: usize) -> bool {
        self.noted.load(Relaxed) == self.stirs.load(Relaxed) && len >= self.len.load(Relaxed)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_drought_lasts_until_something_stirs_and_for_no_shorter_length() {
        let d = Drought::new();
        assert!(!d.lasts(0), "never searched");
        d.note(d.seen(), 100);
        assert!(d.lasts(100) && d.lasts(101) && !d.lasts(99));
        d.stir();
        assert!(!d.lasts(100));
        let before = d.seen();
        d.stir();
        d.note(before, 100);
        assert!(!d.lasts(100), "something came back while it was searched");
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    //! Two heaps, two blocks, a thread that never has more than one of them and moves it to and fro, and one
    //! that searches: every interleaving, and the search is never refused.
    use loom::{
        cell::UnsafeCell,
        sync::{Arc, Mutex},
        thread,
    };

    use super::*;
    use crate::gate::{Gate, revoke_all};

    /// A heap with one thread's magazine: blocks behind a gate, and the lock of its slow path.
    struct Own {
        gate: Gate<UnsafeCell<u32>>,
        cached: UnsafeCell<u32>,
        empty: UnsafeCell<u32>,
        lock: Mutex<()>,
        drought: Drought,
    }

    // SAFETY: `cached` is touched inside the open gate by its owner, or under the lock with the gate closed
    // and idle; `empty` by nobody.
    unsafe impl Sync for Own {}
    // SAFETY: as above.
    unsafe impl Send for Own {}

    impl Own {
        fn cached(&self) -> *mut UnsafeCell<u32> {
            (&raw const self.cached).cast_mut()
        }

        fn empty(&self) -> *mut UnsafeCell<u32> {
            (&raw const self.empty).cast_mut()
        }

        /// The owner's free: through the gate, or if that is closed under the lock.
        fn free(&self) {
            let inside = self.gate.enter();
            if inside == self.cached() {
                self.cached.with_mut(|n| unsafe { *n += 1 });
                self.gate.leave();
                return;
            }
            self.gate.leave();
            let _lock = self.lock.lock().unwrap();
            self.drought.stir();
            self.cached.with_mut(|n| unsafe { *n += 1 });
            self.gate.publish(self.cached());
        }

        /// The owner's alloc.
        fn alloc(&self) -> bool {
            let inside = self.gate.enter();
            if inside == self.cached() {
                let got = self.cached.with_mut(|n| unsafe { take(n) });
                self.gate.leave();
                return got;
            }
            self.gate.leave();
            let _lock = self.lock.lock().unwrap();
            let got = self.cached.with_mut(|n| unsafe { take(n) });
            // Only with something found does the gate open again.
            if got {
                self.gate.publish(self.cached());
            }
            got
        }

        /// The other thread's search.
        fn search(&self) -> bool {
            let _lock = self.lock.lock().unwrap();
            revoke_all(std::iter::once(&self.gate), self.empty());
            self.cached.with_mut(|n| unsafe { take(n) })
        }
    }

    /// # Safety
    /// The caller is alone with the count.
    unsafe fn take(n: *mut u32) -> bool {
        // SAFETY: the caller's promise.
        unsafe {
            let got = *n > 0;
            *n -= u32::from(got);
            got
        }
    }

    fn take_beyond(beyond: &Mutex<u32>) -> bool {
        let mut n = beyond.lock().unwrap();
        let got = *n > 0;
        *n -= u32::from(got);
        got
    }

    #[test]
    fn loom_a_refusal_is_true() {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(4);
        model.check(|| {
            let own = Arc::new(Own {
                gate: Gate::new(std::ptr::null_mut()),
                cached: UnsafeCell::new(1),
                empty: UnsafeCell::new(0),
                lock: Mutex::new(()),
                drought: Drought::new(),
            });
            own.gate.publish(own.cached());
            // The mover has the other block, and it is of these.
            let beyond = Arc::new(Mutex::new(0u32));
            let mover = {
                let (own, beyond) = (own.clone(), beyond.clone());
                thread::spawn(move || {
                    // One block at a time: give back here, take there.
                    *beyond.lock().unwrap() += 1;
                    if own.alloc() {
                        // There is no second one; looking for it must not open the gate.
                        assert!(!own.alloc());
                        own.free();
                        let _ = take_beyond(&beyond);
                    }
                })
            };
            // As `Core::beyond` has it.
            let mut before = None;
            let mut got = false;
            for _ in 0..8 {
                if take_beyond(&beyond) {
                    got = true;
                    break;
                }
                let now = own.drought.seen();
                if before == Some(now) {
                    break;
                }
                before = Some(now);
                if own.search() {
                    got = true;
                    break;
                }
            }
            assert!(got, "refused although a block was free at every moment");
            mover.join().unwrap();
        });
    }
}
