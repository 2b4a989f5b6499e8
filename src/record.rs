//! The record of one block's flights: whether a token of it is out, which, and what the token stands for.
//! Manages who may redeem; where records lie and how tokens are written down is `tokens.rs`'s.
//!
//! | generation | meaning | who may write the record |
//! |---|---|---|
//! | even | not in flight; 0 before the first time | the block's owner |
//! | odd | in flight | whoever moves it on to the next even number |
//!
//! The generation only ever goes up, by one at each step, and wraps after 2^15 flights of one block. The
//! other fields are written by the owner before the flight, and read by the redeemer after it: neither is
//! there while the other is, since the block has one owner at a time.

use crate::sync::atomic::{
    AtomicU16, AtomicU32,
    Ordering::{AcqRel, Acquire, Relaxed, Release},
};

/// What a token stands for, beside its block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Cargo {
    /// The block's place among the magazines and a flag in the low half, the length in the high half. One
    /// word, for two halves would each be widened by an instruction of its own.
    pub(crate) load: u32,
    /// When it took off.
    pub(crate) stamp: u16,
}

impl Cargo {
    #[inline(always)]
    pub(crate) fn new(place: u16, len: u16, stamp: u16) -> Self {
        Self { load: u32::from(len) << 16 | u32::from(place), stamp }
    }

    #[inline(always)]
    pub(crate) fn place(self) -> u32 {
        self.load & 0xffff
    }

    #[inline(always)]
    pub(crate) fn len(self) -> usize {
        (self.load >> 16) as usize
    }
}

/// Eight bytes, all zero before the first flight.
#[repr(C, align(8))]
pub(crate) struct Record {
    load: AtomicU32,
    generation: AtomicU16,
    stamp: AtomicU16,
}

impl Record {
    #[cfg(loom)]
    fn new() -> Self {
        let (load, generation, stamp) = (AtomicU32::new(0), AtomicU16::new(0), AtomicU16::new(0));
        Self { load, generation, stamp }
    }

    /// Takes off: returns the generation, odd. Only by the block's owner.
    #[inline(always)]
    pub(crate) fn take_off(&self, cargo: Cargo) -> u32 {
        // Even, so the sum has no more bits. Counted in a whole register, lest it be widened again.
        let generation = u32::from(self.generation.load(Relaxed)) + 1;
        self.set_cargo(cargo);
        // Pairs with the exchange in `land`: who lands sees the cargo, and what the owner did with the block.
        self.generation.store(generation as u16, Release);
        generation
    }

    /// Lands: of any number of callers with the generation of the present flight exactly one succeeds, and
    /// owns the block from then on. Any number may be passed, on any thread; its low half counts.
    #[inline(always)]
    pub(crate) fn land(&self, generation: u32) -> bool {
        if generation & 1 == 0 {
            // That is no flight's, and may be what a record has between two.
            return false;
        }
        let next = generation.wrapping_add(1) as u16;
        let generation = generation as u16;
        // Acquire pairs with the store in `take_off`. Release: what the redeemer did before, such as seeing
        // the completion, happens before the next owner's use; that comes through the pool in any case.
        self.generation.compare_exchange(generation, next, AcqRel, Acquire).is_ok()
    }

    /// What was written at the last take-off.
    pub(crate) fn cargo(&self) -> Cargo {
        // Acquire pairs with the stores in `set_cargo`: who sees a later flight's cargo sees that the earlier
        // one has landed.
        Cargo { load: self.load.load(Acquire), stamp: self.stamp.load(Acquire) }
    }

    /// The load alone, for whoever has landed it.
    #[inline(always)]
    pub(crate) fn load(&self) -> Cargo {
        Cargo { load: self.load.load(Relaxed), stamp: 0 }
    }

    /// Only by the block's owner.
    #[inline(always)]
    pub(crate) fn set_cargo(&self, cargo: Cargo) {
        // Release pairs with the loads in `cargo`.
        self.load.store(cargo.load, Release);
        self.stamp.store(cargo.stamp, Release);
    }

    /// The generation and cargo of the flight that is under way, if one is. For look-ups by anybody.
    pub(crate) fn in_flight(&self) -> Option<(u32, Cargo)> {
        // Acquire pairs with `take_off`: the cargo is that of this flight, or of a later one.
        let generation = self.generation.load(Acquire);
        if generation & 1 == 0 {
            return None;
        }
        let cargo = self.cargo();
        // If the cargo is in part the next flight's, this one is seen to have landed: the loads above are
        // acquires.
        (self.generation.load(Relaxed) == generation).then_some((generation.into(), cargo))
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    //! Every interleaving of redeemers: exactly one gets the block, with its cargo; stale ones never do.
    use loom::{cell::UnsafeCell, sync::Arc, thread};

    use super::*;

    struct Block {
        record: Record,
        bytes: UnsafeCell<u32>,
    }

    fn cargo(len: u16) -> Cargo {
        Cargo::new(len ^ 1, len, len ^ 2)
    }

    fn fixture() -> Arc<Block> {
        Arc::new(Block { record: Record::new(), bytes: UnsafeCell::new(0) })
    }

    /// Redeems, and if it may, uses the block: loom panics when two do at a time.
    fn redeem(block: &Block, generation: u32, want: Cargo) -> bool {
        if !block.record.land(generation) {
            return false;
        }
        // SAFETY: landed, so this thread owns the block: what is being proved.
        block.bytes.with_mut(|p| unsafe { *p += 1 });
        assert_eq!(block.record.cargo(), want);
        true
    }

    #[test]
    fn loom_a_token_redeemed_twice_succeeds_once() {
        // Three threads: all interleavings with up to three preemptions.
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(3);
        model.check(|| {
            let block = fixture();
            // SAFETY: not shared yet.
            block.bytes.with_mut(|p| unsafe { *p += 1 });
            let generation = block.record.take_off(cargo(100));
            let others: Vec<_> = (0..2)
                .map(|_| {
                    let b = block.clone();
                    thread::spawn(move || redeem(&b, generation, cargo(100)))
                })
                .collect();
            let mine = redeem(&block, generation, cargo(100));
            let all = others.into_iter().map(|t| t.join().unwrap()).chain([mine]);
            assert_eq!(all.filter(|&got| got).count(), 1);
            assert!(!block.record.land(generation) && !block.record.land(generation - 1));
        });
    }

    #[test]
    fn loom_a_stale_token_never_takes_the_next_flight() {
        loom::model(|| {
            let block = fixture();
            let first = block.record.take_off(cargo(1));
            let b = block.clone();
            // Lands the first flight and starts a second, while the other tries the first token.
            let owner = thread::spawn(move || {
                if !redeem(&b, first, cargo(1)) {
                    return None;
                }
                Some(b.record.take_off(cargo(2)))
            });
            let b = block.clone();
            let looker = thread::spawn(move || {
                if let Some((generation, seen)) = b.record.in_flight() {
                    assert_eq!(seen, cargo(if generation == first { 1 } else { 2 }));
                }
            });
            let mine = redeem(&block, first, cargo(1));
            let second = owner.join().unwrap();
            looker.join().unwrap();
            assert_eq!(mine, second.is_none(), "one of the two had it");
            if let Some(second) = second {
                assert!(!block.record.land(first));
                assert!(redeem(&block, second, cargo(2)));
            }
        });
    }
}
