//! Drought: what is known of a heap that was searched in vain. Manages the proof that nothing has come back
//! to it since; the search, and what is done instead, are the pool's business.
//!
//! The search closes all threads' gates of loaded magazines (the others are shut as it is), so whatever is freed to
//! the heap afterwards takes a slow path first, and that [stirs](Drought::stir) before it puts the block anywhere. As
//! long as the count of stirs is what it was before the search, the heap is as empty as the search found it.
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
        sync::{Arc, Mutex},
        thread,
    };

    use super::*;
    use crate::gate::model::Small;

    /// A heap with one thread's magazine: blocks behind a gate, and the lock of its slow path.
    struct Own {
        cached: Small,
        lock: Mutex<()>,
        drought: Drought,
    }

    impl Own {
        /// The owner's free: through the gate, or if that is closed under the lock.
        fn free(&self) {
            if self.cached.push(1) {
                return;
            }
            let _lock = self.lock.lock().unwrap();
            self.cached.set_right();
            self.drought.stir();
            self.cached.load();
            assert!(self.cached.push(1));
        }

        /// The owner's alloc. Without anything found no memory is loaded, so the gate does not open.
        fn alloc(&self) -> bool {
            if self.cached.pop().is_some() {
                return true;
            }
            let _lock = self.lock.lock().unwrap();
            self.cached.set_right();
            self.cached.pop().is_some()
        }

        /// The other thread's search.
        fn search(&self) -> bool {
            let _lock = self.lock.lock().unwrap();
            self.cached.steal().0 > 0
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
                cached: Small::new(),
                lock: Mutex::new(()),
                drought: Drought::new(),
            });
            own.cached.load();
            assert!(own.cached.push(1));
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
