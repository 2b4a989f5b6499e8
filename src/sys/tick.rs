//! A coarse time stamp without a system call: the upper half of the processor's own counter where there is
//! one. Knows nothing of what is stamped.
//!
//! A stamp has 16 bits and wraps: after 26 hours on a processor whose counter runs at 3 GHz. What a unit is
//! in seconds is measured, not assumed, from two looks at counter and clock.

use std::time::{Duration, Instant};

/// The counter, and how far it is shifted to give a stamp's unit.
#[cfg(all(target_arch = "x86_64", not(miri)))]
mod counter {
    /// A unit is 2^32 ticks, one to two seconds: the half of the counter that has a register of its own.
    pub(super) const SHIFT: u32 = 32;

    #[inline(always)]
    pub(super) fn read() -> u64 {
        // SAFETY: reads the time-stamp counter, which every x86-64 processor has; Linux lets user code read it
        // unless a process asks for the contrary (`PR_SET_TSC`).
        unsafe { std::arch::x86_64::_rdtsc() }
    }
}

#[cfg(all(target_arch = "aarch64", not(miri)))]
mod counter {
    /// The counter runs at 24 MHz to 1 GHz: a unit is a quarter of a second to eleven seconds.
    pub(super) const SHIFT: u32 = 28;

    #[inline(always)]
    pub(super) fn read() -> u64 {
        let ticks: u64;
        // SAFETY: reads the virtual counter, which Linux makes readable to user code; touches nothing else.
        unsafe {
            std::arch::asm!("mrs {}, cntvct_el0", out(reg) ticks, options(nomem, nostack, preserves_flags));
        }
        ticks
    }
}

#[cfg(not(all(any(target_arch = "x86_64", target_arch = "aarch64"), not(miri))))]
mod counter {
    use std::{sync::OnceLock, time::Instant};

    /// Nanoseconds: a unit is 1.07 s.
    pub(super) const SHIFT: u32 = 30;

    pub(super) fn read() -> u64 {
        static START: OnceLock<Instant> = OnceLock::new();
        START.get_or_init(Instant::now).elapsed().as_nanos() as u64
    }
}

/// The stamp of this moment.
#[inline(always)]
pub(crate) fn stamp() -> u16 {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    {
        let upper: u32;
        // SAFETY: as in `counter::read`, of which this is the upper half alone: the compiler would put both
        // together and take them apart again.
        unsafe {
            std::arch::asm!("rdtsc", out("edx") upper, out("eax") _, options(nomem, nostack, preserves_flags));
        }
        upper as u16
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    {
        (counter::read() >> counter::SHIFT) as u16
    }
}

/// A moment by clock and counter: what stamps are measured from.
#[derive(Debug)]
pub(crate) struct Epoch {
    clock: Instant,
    ticks: u64,
}

impl Epoch {
    pub(crate) fn now() -> Self {
        Self { clock: Instant::now(), ticks: counter::read() }
    }

    /// Makes what turns stamps into ages, as of now.
    pub(crate) fn ages(&self) -> Ages {
        let now = Self::now();
        let passed = now.clock.saturating_duration_since(self.clock).as_secs_f64();
        Ages { passed, first: self.ticks, now: now.ticks }
    }
}

/// Turns stamps into ages.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ages {
    /// Seconds from `first` to `now`.
    passed: f64,
    first: u64,
    now: u64,
}

impl Ages {
    /// How long ago a stamp was taken, at least: up to a unit more. A stamp that is older than 2^16 units is
    /// taken for a younger one, and none is older than the epoch.
    pub(crate) fn of(&self, stamp: u16) -> Duration {
        const UNIT: u64 = 1 << counter::SHIFT;
        let now = self.now / UNIT;
        let units = u64::from((now as u16).wrapping_sub(stamp));
        // Its unit ended here, or has not ended yet.
        let end = (now - units.min(now)).saturating_add(1).saturating_mul(UNIT);
        let ticks = self.now.saturating_sub(end.max(self.first)) as f64;
        let all = self.now.wrapping_sub(self.first).max(1) as f64;
        Duration::try_from_secs_f64(self.passed * ticks / all).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const UNIT: u64 = 1 << counter::SHIFT;

    #[test]
    fn ages_are_lower_bounds_within_a_unit() {
        // 70 units a second, 1,000 s after the epoch; the stamp's bits have wrapped meanwhile.
        let ages = Ages { passed: 1_000.0, first: 5 * UNIT, now: 70_005 * UNIT + UNIT / 2 };
        for back in [0u64, 1, 2, 69, 7_000, 60_000] {
            let taken = ages.now - back * UNIT;
            let age = ages.of((taken / UNIT) as u16).as_secs_f64();
            let real = back as f64 / 70.0;
            assert!(age <= real + 1e-3 && age >= real - 1.0 / 69.0, "{back}: {age}, really {real}");
        }
    }

    #[test]
    fn a_stamp_of_this_moment_has_no_age() {
        let epoch = Epoch::now();
        assert!(epoch.ages().of(stamp()) <= epoch.clock.elapsed());
    }
}
