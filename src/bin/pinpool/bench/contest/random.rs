//! Random numbers: cheap enough to stand inside a timed loop, the same in every run.

/// A linear congruential generator; its high bits are good.
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        let mut r = Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
        r.next();
        r
    }

    #[inline(always)]
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        self.0
    }

    /// One of `0..n`, for `n` up to 2^32.
    #[inline(always)]
    pub(crate) fn below(&mut self, n: usize) -> usize {
        (((self.next() >> 32) * n as u64) >> 32) as usize
    }

    /// A size between two bounds, each power of two as likely as any other.
    pub(crate) fn log_uniform(&mut self, least: usize, most: usize) -> usize {
        let unit = (self.next() >> 11) as f64 / (1u64 << 53) as f64;
        let ratio = most as f64 / least as f64;
        ((least as f64 * ratio.powf(unit)) as usize).clamp(least, most)
    }

    pub(crate) fn shuffle<T>(&mut self, items: &mut [T]) {
        for i in (1..items.len()).rev() {
            items.swap(i, self.below(i + 1));
        }
    }
}
