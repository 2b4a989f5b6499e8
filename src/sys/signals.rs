//! Keeps signals away from threads that are the library's own.
#![allow(clippy::disallowed_methods)]

use std::mem::MaybeUninit;

/// Blocks all signals on this thread, so that the process's other threads get those sent to the process.
pub(crate) fn block_all() {
    let mut all = MaybeUninit::uninit();
    // SAFETY: `sigfillset` writes a whole set, which the mask is then read from; the old mask is not asked for.
    unsafe {
        libc::sigfillset(all.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_BLOCK, all.as_ptr(), std::ptr::null_mut());
    }
}
