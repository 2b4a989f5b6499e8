//! 1,024 live buffers of mixed sizes; each step a random one goes back and one of another size comes.

use super::{
    contender::{Handle, out},
    measure::Timed,
    opaque::unknown,
    random::Random,
    spec::{CHURN, Spec},
};

const SIZES: usize = 4096;

pub(crate) struct Churn<H: Handle> {
    handle: H,
    sizes: Vec<u32>,
    random: Random,
    // Always full but inside a step.
    live: Vec<Option<(H::Held, u32)>>,
}

impl<H: Handle> Churn<H> {
    pub(crate) fn new(mut handle: H, spec: &Spec) -> Self {
        let mut random = Random::new(3);
        let size = |_| random.log_uniform(spec.bytes, spec.bytes_max) as u32;
        let sizes: Vec<u32> = (0..SIZES).map(size).collect();
        let live = sizes[..CHURN].iter();
        let live = live.map(|&size| Some((out(&mut handle, size as usize), size))).collect();
        Self { handle, sizes, random, live }
    }
}

impl<H: Handle> Timed for Churn<H> {
    const OPS: usize = 1;

    #[inline(never)]
    fn run(&mut self, n: usize) {
        self.handle.begin();
        for _ in 0..n {
            let bits = self.random.next();
            let slot = &mut self.live[(bits >> 54) as usize % CHURN];
            let size = self.sizes[(bits >> 42) as usize % SIZES];
            if let Some((held, size)) = slot.take() {
                self.handle.put(held, unknown(size as usize));
            }
            *slot = Some((out(&mut self.handle, unknown(size as usize)), size));
        }
    }
}

impl<H: Handle> Drop for Churn<H> {
    fn drop(&mut self) {
        for (held, size) in self.live.drain(..).flatten() {
            self.handle.put(held, size as usize);
        }
    }
}
