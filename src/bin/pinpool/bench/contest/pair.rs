//! One buffer out, touched, and back.

use super::{
    contender::{Handle, out},
    measure::Timed,
    opaque::unknown,
};

pub(crate) struct Pair<H> {
    handle: H,
    bytes: usize,
}

impl<H: Handle> Pair<H> {
    pub(crate) fn new(handle: H, bytes: usize) -> Self {
        Self { handle, bytes }
    }
}

impl<H: Handle> Timed for Pair<H> {
    const OPS: usize = 1;

    #[inline(never)]
    fn run(&mut self, n: usize) {
        self.handle.begin();
        // Not known when compiling, and the same in all pairs, as it is where receive buffers are refilled;
        // in churn each length is news.
        let bytes = unknown(self.bytes);
        for _ in 0..n {
            // What one pair left in memory, the next must load again.
            unknown(0);
            let held = out(&mut self.handle, bytes);
            self.handle.put(held, bytes);
        }
    }
}
