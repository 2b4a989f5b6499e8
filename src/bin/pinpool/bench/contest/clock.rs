//! The clock: the processor's time-stamp counter where there is one that never stops, else the system's.

use std::{
    sync::OnceLock,
    time::{Duration, Instant},
};

/// Now, in ticks. Everything before it in the program is done when it is read.
#[inline(always)]
pub(crate) fn ticks() -> u64 {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: both instructions are in every x86-64 processor.
    unsafe {
        std::arch::x86_64::_mm_lfence();
        std::arch::x86_64::_rdtsc()
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        static START: OnceLock<Instant> = OnceLock::new();
        START.get_or_init(Instant::now).elapsed().as_nanos() as u64
    }
}

/// Nanoseconds of one tick, measured once.
pub(crate) fn ns_per_tick() -> f64 {
    static SCALE: OnceLock<f64> = OnceLock::new();
    *SCALE.get_or_init(|| {
        if !cfg!(target_arch = "x86_64") {
            return 1.0;
        }
        let (start, first) = (Instant::now(), ticks());
        while start.elapsed() < Duration::from_millis(30) {
            std::hint::spin_loop();
        }
        let passed = ticks() - first;
        start.elapsed().as_nanos() as f64 / passed as f64
    })
}
