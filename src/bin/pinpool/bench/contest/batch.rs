//! 64 buffers out, touched, and back: the last first, or in random order.

use std::mem::MaybeUninit;

use super::{
    contender::{Handle, out},
    measure::Timed,
    opaque::unknown,
    random::Random,
    spec::BATCH,
};

/// Orders to go through in turn, so that none can be learnt.
const ORDERS: usize = 64;

pub(crate) struct Batch<H: Handle> {
    handle: H,
    bytes: usize,
    held: [MaybeUninit<H::Held>; BATCH],
    orders: Vec<[u8; BATCH]>,
    round: usize,
}

impl<H: Handle> Batch<H> {
    pub(crate) fn new(handle: H, bytes: usize) -> Self {
        let mut random = Random::new(2);
        let order = |_| {
            let mut order: [u8; BATCH] = std::array::from_fn(|i| i as u8);
            random.shuffle(&mut order);
            order
        };
        let orders = (0..ORDERS).map(order).collect();
        Self { handle, bytes, held: [const { MaybeUninit::uninit() }; BATCH], orders, round: 0 }
    }

    #[inline(always)]
    fn take_all(&mut self) {
        for slot in &mut self.held {
            slot.write(out(&mut self.handle, unknown(self.bytes)));
        }
    }

    #[inline(always)]
    fn put(&mut self, i: usize) {
        // SAFETY: `take_all` has written every place, and each is read once before it does so again.
        let held = unsafe { self.held.get_unchecked(i).assume_init_read() };
        self.handle.put(held, unknown(self.bytes));
    }
}

/// The last first.
pub(crate) struct Lifo<H: Handle>(pub(crate) Batch<H>);

impl<H: Handle> Timed for Lifo<H> {
    const OPS: usize = BATCH;

    #[inline(never)]
    fn run(&mut self, n: usize) {
        self.0.handle.begin();
        for _ in 0..n {
            self.0.take_all();
            for i in (0..BATCH).rev() {
                self.0.put(i);
            }
        }
    }
}

/// In random order.
pub(crate) struct Shuffled<H: Handle>(pub(crate) Batch<H>);

impl<H: Handle> Timed for Shuffled<H> {
    const OPS: usize = BATCH;

    #[inline(never)]
    fn run(&mut self, n: usize) {
        self.0.handle.begin();
        for _ in 0..n {
            self.0.take_all();
            self.0.round = (self.0.round + 1) % ORDERS;
            for i in 0..BATCH {
                let next = self.0.orders[self.0.round][i] as usize;
                // An order is a permutation of the places.
                self.0.put(next % BATCH);
            }
        }
    }
}
