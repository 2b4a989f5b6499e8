//! `membarrier(2)`: makes every running thread of this process execute a memory barrier.
#![allow(clippy::disallowed_methods)]

use std::sync::atomic::{AtomicU8, Ordering::Relaxed};

// From linux/membarrier.h.
const QUERY: libc::c_long = 0;
const PRIVATE_EXPEDITED: libc::c_long = 1 << 3;
const REGISTER_PRIVATE_EXPEDITED: libc::c_long = 1 << 4;

fn membarrier(command: libc::c_long) -> libc::c_long {
    // SAFETY: membarrier takes integers only and touches no memory of ours.
    unsafe { libc::syscall(libc::SYS_membarrier, command, 0 as libc::c_long, 0 as libc::c_long) }
}

/// Whether [`all_threads`] works here; registers the process for it on the first call. Kernels before
/// 4.14 and some sandboxes say no.
pub(crate) fn available() -> bool {
    // Several threads may find out at once; registering twice does no harm.
    static ANSWER: AtomicU8 = AtomicU8::new(UNKNOWN);
    const UNKNOWN: u8 = 0;
    const NO: u8 = 1;
    const YES: u8 = 2;
    match ANSWER.load(Relaxed) {
        UNKNOWN => {
            let offered = membarrier(QUERY);
            let works = offered > 0
                && offered & PRIVATE_EXPEDITED != 0
                && membarrier(REGISTER_PRIVATE_EXPEDITED) == 0
                && membarrier(PRIVATE_EXPEDITED) == 0;
            ANSWER.store(if works { YES } else { NO }, Relaxed);
            works
        }
        answer => answer == YES,
    }
}

/// Returns once every other thread of the process has passed a full barrier; at once where [`available`]
/// says no.
///
/// After `available` returned true this fails only if a filter that forbids the call was installed since.
/// Then it waits: a store that another thread has made is seen by all within microseconds, whatever that
/// thread does, for processors do not hold stores back longer.
pub(crate) fn all_threads() {
    if available() && membarrier(PRIVATE_EXPEDITED) != 0 {
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
}
