//! Which allocations are the pool's own: those that its slow paths make for their tables. A pool whose
//! memory is the process's heap must not serve them from itself, in the middle of changing itself.
//!
//! Whatever changes tables marks its thread meanwhile: every lock of theirs does (`lock.rs`), and what makes
//! them in the first place. [`inside`] tells; the global allocator asks,
//! and turns to the allocator that it wraps. So the tables of a pool never lie in a pool.

use std::{cell::Cell, marker::PhantomData, ptr};

thread_local! {
    // Without a destructor, so that they work at any time in a thread's life.
    static DEPTH: Cell<u32> = const { Cell::new(0) };
    static LATER: Cell<*mut Later> = const { Cell::new(ptr::null_mut()) };
}

/// Whether this thread is inside a slow path of some pool.
#[inline(always)]
#[cfg_attr(not(feature = "global"), allow(dead_code))]
pub(crate) fn inside() -> bool {
    DEPTH.with(Cell::get) != 0
}

/// Marks the thread as being inside until the mark is dropped.
pub(crate) struct Mark {
    // Marks are the thread's, and must be dropped on it.
    _thread: PhantomData<*mut ()>,
}

/// Marks the thread. Marks may be nested.
#[inline]
pub(crate) fn enter() -> Mark {
    DEPTH.with(|depth| depth.set(depth.get() + 1));
    Mark { _thread: PhantomData }
}

impl Mark {
    /// A mark that was forgotten.
    pub(crate) fn kept() -> Self {
        Self { _thread: PhantomData }
    }
}

impl Drop for Mark {
    #[inline]
    fn drop(&mut self) {
        let depth = DEPTH.get() - 1;
        DEPTH.set(depth);
        if depth == 0 && !LATER.get().is_null() {
            run_later();
        }
    }
}

/// Work that a thread puts off until it is outside again. First field of something larger, whose memory is
/// whoever put it off's to free.
#[repr(C)]
pub(crate) struct Later {
    next: *mut Later,
    run: unsafe fn(*mut Later),
}

impl Later {
    #[cfg_attr(not(feature = "global"), allow(dead_code))]
    pub(crate) const fn new(run: unsafe fn(*mut Self)) -> Self {
        Self { next: ptr::null_mut(), run }
    }
}

/// Has `later` run by this thread when its last mark is dropped.
///
/// # Safety
/// This thread is [`inside`]. `later` is valid until it runs, once, with this pointer; running it is sound
/// then.
#[cfg_attr(not(feature = "global"), allow(dead_code))]
pub(crate) unsafe fn put_off(later: *mut Later) {
    // SAFETY: valid, and nobody else has it (contract).
    unsafe { (*later).next = LATER.replace(later) };
}

#[cold]
#[inline(never)]
fn run_later() {
    let mut later = LATER.replace(ptr::null_mut());
    while !later.is_null() {
        // SAFETY: it was put off, so it is valid until it has run, which is here, once: it was taken off.
        unsafe {
            let next = (*later).next;
            ((*later).run)(later);
            later = next;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[repr(C)]
    struct Note(Later, bool, *const Cell<u32>);

    unsafe fn count(later: *mut Later) {
        // SAFETY: put off by the test below, as the first field of a note.
        let note = unsafe { &mut *later.cast::<Note>() };
        assert!(!inside() && !std::mem::replace(&mut note.1, true), "once, and outside");
        // SAFETY: the test outlives its notes.
        unsafe { (*note.2).set((*note.2).get() + 1) };
    }

    #[test]
    fn what_is_put_off_runs_when_the_last_mark_goes() {
        let ran = Cell::new(0);
        let mut notes = [const { Note(Later::new(count), false, ptr::null()) }; 3];
        let outer = enter();
        {
            let _inner = enter();
            for note in &mut notes {
                note.2 = &raw const ran;
                // SAFETY: inside; the notes outlive the marks.
                unsafe { put_off((&raw mut *note).cast()) };
            }
        }
        assert_eq!(ran.get(), 0);
        drop(outer);
        assert_eq!(ran.get(), 3);
        drop(enter());
        assert_eq!(ran.get(), 3);
    }
}
