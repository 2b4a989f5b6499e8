//! Notices that this process is a forked child.
#![allow(clippy::disallowed_methods)]

use std::sync::{
    Once,
    atomic::{
        AtomicPtr, AtomicU32,
        Ordering::{Acquire, Relaxed, Release},
    },
};

static GENERATION: AtomicU32 = AtomicU32::new(0);
static HOOK: AtomicPtr<()> = AtomicPtr::new(std::ptr::null_mut());

/// How many forks lie between the first process that asked and this one. Differs between a process and
/// its child, once either has called this before the fork.
pub(crate) fn generation() -> u32 {
    install();
    GENERATION.load(Relaxed)
}

/// Has `hook` called in each forked child, on the thread that forked, before `fork` returns there. Only
/// one hook can be set; it may do no more than a signal handler may.
pub(crate) fn on_child(hook: fn()) {
    HOOK.store(hook as *mut (), Release);
    install();
}

fn install() {
    static INSTALLED: Once = Once::new();
    INSTALLED.call_once(|| {
        // SAFETY: `child` is a function without captures that does only what a signal handler may. If
        // there is no memory for the entry, children go unnoticed; nothing else depends on it.
        unsafe { libc::pthread_atfork(None, None, Some(child)) };
    });
}

unsafe extern "C" fn child() {
    GENERATION.fetch_add(1, Relaxed);
    let hook = HOOK.load(Acquire);
    if !hook.is_null() {
        // SAFETY: the only value ever stored, besides null, is a `fn()` (in `on_child`).
        let hook = unsafe { std::mem::transmute::<*mut (), fn()>(hook) };
        hook();
    }
}
