//! The mark of one block that is out as a bare address. Manages that of several frees of one address exactly
//! one succeeds; where marks lie is `outs.rs`'s.

use crate::sync::atomic::{
    AtomicU16,
    Ordering::{AcqRel, Release},
};

/// Two bytes: zero, or what is needed to give the block back. Set only while the block is out.
#[repr(transparent)]
pub(crate) struct Mark(AtomicU16);

impl Mark {
    #[cfg(loom)]
    fn new() -> Self {
        Self(AtomicU16::new(0))
    }

    /// Marks the block as out, with a number that is not 0. Only by the block's owner, who gives it up.
    #[inline(always)]
    pub(crate) fn set(&self, what: u16) {
        debug_assert_ne!(what, 0);
        // Pairs with the swap in `clear`.
        self.0.store(what, Release);
    }

    /// Ends being out: of any number of callers exactly one gets the number, and owns the block.
    #[inline(always)]
    pub(crate) fn clear(&self) -> Option<u16> {
        // Acquire pairs with `set`: what the owner did with the block happened before. Release: what this caller
        // did before happens before the next owner's use; that comes through the pool in any case.
        let mark = self.0.swap(0, AcqRel);
        (mark != 0).then_some(mark)
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    //! Of several frees of one address exactly one gets the block, and sees what its owner did.
    use loom::{cell::UnsafeCell, sync::Arc, thread};

    use super::*;

    fn free(block: &(Mark, UnsafeCell<i32>)) -> bool {
        let got = block.0.clear();
        if let Some(what) = got {
            assert_eq!(what, 32);
            // SAFETY: this thread owns the block: what is being proved.
            block.1.with_mut(|p| unsafe { *p += 1 });
        }
        got.is_some()
    }

    #[test]
    fn loom_an_address_freed_thrice_is_freed_once() {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(3);
        model.check(|| {
            let block = Arc::new((Mark::new(), UnsafeCell::new(0)));
            // SAFETY: not shared yet.
            block.1.with_mut(|p| unsafe { *p = 1 });
            block.0.set(32);
            let others: Vec<_> = (0..2)
                .map(|_| {
                    let b = block.clone();
                    thread::spawn(move || free(&b))
                })
                .collect();
            let mine = free(&block);
            let all = others.into_iter().map(|t| t.join().unwrap()).chain([mine]);
            assert_eq!(all.filter(|&got| got).count(), 1);
        });
    }
}
