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
        for _ in 0..n {
            // Each size is news to the allocator, as it is to a server.
            let bytes = unknown(self.bytes);
            let held = out(&mut self.handle, bytes);
            self.handle.put(held, bytes);
        }
    }
}
