//! `futex(2)`: waiting for a word to change. No memory is allocated, and nothing else is needed.
#![allow(clippy::disallowed_methods)]

use std::{ptr, sync::atomic::AtomicU32};

fn futex(word: &AtomicU32, operation: libc::c_int, value: u32) {
    // SAFETY: the word is valid for the call; no time-out is given (null), and the other arguments are not
    // looked at by the two operations used here. An error says that there is nothing to wait for, which
    // callers find out by themselves.
    unsafe {
        libc::syscall(
            libc::SYS_futex,
            word.as_ptr(),
            operation | libc::FUTEX_PRIVATE_FLAG,
            value,
            ptr::null::<libc::timespec>(),
        )
    };
}

/// Sleeps while the word has this value, until woken. May return without either.
pub(crate) fn wait(word: &AtomicU32, value: u32) {
    futex(word, libc::FUTEX_WAIT, value);
}

/// Wakes one of those that wait for the word.
pub(crate) fn wake_one(word: &AtomicU32) {
    futex(word, libc::FUTEX_WAKE, 1);
}
