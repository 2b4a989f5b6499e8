//! Blocks without a handle: what the allocator faces take and give back by address and layout alone.
//!
//! A handle carries its block's class and keys; an address does not. The class then follows from the
//! layout, without a look at any table, as long as every block out is of the class that its layout says.
//! When memory is short, a larger block or single pages may serve; such a block is *odd*. How many are out
//! is counted, in a word that is only written then; while it is not zero, frees ask the page map, which
//! knows every block.
//!
//! | layout | class at the free |
//! |---|---|
//! | *plain*: aligned to 64 or less, up to 1 GiB; nothing odd out | computed from the size |
//! | plain, something odd out | from the page map |
//! | any other | from the page map |

use std::{
    alloc::Layout,
    ptr::NonNull,
    sync::{Arc, atomic::Ordering::Relaxed},
};

use super::{Core, PoolRef};
use crate::{
    magazine::Place,
    size_class::{self, MAX_BLOCK, MIN_BLOCK},
    slab::Entry,
    thread,
};

/// Whether a layout is one whose class its size alone decides. One of size 0 has no block.
#[inline(always)]
fn is_plain(layout: Layout) -> bool {
    layout.align() <= MIN_BLOCK && layout.size().wrapping_sub(1) < MAX_BLOCK
}

/// Whether a block of `class` is odd for a layout.
fn is_odd(class: usize, layout: Layout) -> bool {
    is_plain(layout) && class != size_class::class_of(layout.size())
}

/// How many bytes of a block of `class`, `len` bytes long, may be used by whoever asked for `layout`: all,
/// unless it is odd; then those that leave the layout's class as it is.
fn usable(class: usize, len: usize, layout: Layout) -> usize {
    if is_odd(class, layout) {
        len.min(size_class::size_of(size_class::class_of(layout.size())))
    } else {
        len
    }
}

impl PoolRef {
    /// Takes a block for a layout, not of size 0: its address, and how many bytes may be used. `None` if
    /// the pool has none.
    #[cfg_attr(not(any(feature = "allocator-api2", feature = "nightly")), allow(dead_code))]
    #[inline(always)]
    #[track_caller]
    pub(crate) fn take(self, layout: Layout) -> Option<(NonNull<u8>, usize)> {
        match self.take_cached(layout) {
            None => Self::take_slow(self, layout),
            got => got,
        }
    }

    /// The same, from this thread's loaded magazine alone.
    #[inline(always)]
    pub(crate) fn take_cached(self, layout: Layout) -> Option<(NonNull<u8>, usize)> {
        if !is_plain(layout) {
            return None;
        }
        let class = size_class::class_of(layout.size());
        // SAFETY: this thread's own slot, which lives as long as the thread.
        let entry = unsafe { &*thread::slot_at(self.slot_offset) }.pop(Place::of(class))?;
        Some((entry.ptr, size_class::size_of(class)))
    }

    #[cold]
    #[inline(never)]
    #[cfg_attr(not(any(feature = "allocator-api2", feature = "nightly")), allow(dead_code))]
    #[track_caller]
    fn take_slow(self, layout: Layout) -> Option<(NonNull<u8>, usize)> {
        match self.take_previous(layout) {
            None => self.take_shared(layout, false),
            got => got,
        }
    }

    /// The same, from this thread's previous magazine alone.
    pub(crate) fn take_previous(self, layout: Layout) -> Option<(NonNull<u8>, usize)> {
        if !is_plain(layout) {
            return None;
        }
        let class = size_class::class_of(layout.size());
        // SAFETY: this thread's own slot, which lives as long as the thread.
        let slot = unsafe { &*thread::slot_at(self.slot_offset) };
        // SAFETY: whoever holds the reference holds a handle, so the core is alive.
        let depot = &unsafe { self.core.as_ref() }.depot;
        let entry = slot.pop_previous(depot, Place::of(class))?;
        Some((entry.ptr, size_class::size_of(class)))
    }

    /// The same, from wherever there is a block, once this thread's magazines have none. Quietly: if nobody
    /// waits for one, and without waking anybody, for that runs code of theirs.
    #[track_caller]
    pub(crate) fn take_shared(self, layout: Layout, quietly: bool) -> Option<(NonNull<u8>, usize)> {
        // SAFETY: whoever holds the reference holds a handle, so the core is alive.
        let core = unsafe { self.core.as_ref() };
        let align = size_class::align_asked(layout);
        let got = match quietly {
            true => core.alloc_quietly(layout.size(), align),
            false => core.alloc_slow(layout.size(), align),
        };
        let Some((entry, class)) = got else {
            // Nobody is told why, but the grower should know.
            core.grower.refused(layout.size());
            return None;
        };
        if is_odd(class, layout) {
            core.odd.fetch_add(1, Relaxed);
        }
        Some((entry.ptr, usable(class, core.usable_len(entry.ptr, class), layout)))
    }

    /// Gives a block back. A size of 0 stands for no block, and does nothing.
    ///
    /// # Safety
    /// `ptr` came from [`take`](PoolRef::take) of this pool, and `layout` is the one that was passed, or one
    /// that [`resize`](PoolRef::resize) has allowed since, but for a size up to what may be used. The caller
    /// gives the block up.
    #[cfg_attr(not(any(feature = "allocator-api2", feature = "nightly")), allow(dead_code))]
    #[inline(always)]
    pub(crate) unsafe fn give(self, ptr: NonNull<u8>, layout: Layout) {
        // SAFETY: this call's contract.
        if unsafe { self.give_cached(ptr, layout) } {
            return;
        }
        // One call for all that is rare, so that what is common stays short enough to be inlined.
        // SAFETY: not pushed, so the block is still the caller's, who gives it up.
        unsafe { Self::give_loudly(self.core, ptr, layout) };
    }

    /// What [`give_cached`](PoolRef::give_cached) did not take; but nobody who waits for a block is woken, for
    /// that runs code of theirs: true if somebody has to be.
    ///
    /// # Safety
    /// As [`give`](PoolRef::give).
    #[cfg_attr(not(feature = "global"), allow(dead_code))]
    pub(crate) unsafe fn give_quietly(self, ptr: NonNull<u8>, layout: Layout) -> bool {
        // SAFETY: this call's contract.
        let core = unsafe { Self::give_slow(self.core, ptr, layout) };
        core.is_some_and(|core| core.waiters.any())
    }

    /// Gives a block to this thread's magazine, if it is plain, nothing is odd, and there is room.
    ///
    /// # Safety
    /// As [`give`](PoolRef::give); the block is still the caller's if the answer is no.
    #[inline(always)]
    pub(crate) unsafe fn give_cached(self, ptr: NonNull<u8>, layout: Layout) -> bool {
        // SAFETY: a block of it is out, or the caller has a handle; either way the core is alive.
        let core = unsafe { self.core.as_ref() };
        // Relaxed: whoever frees an odd block has had its address from whoever counted it.
        if !is_plain(layout) || core.odd.load(Relaxed) != 0 {
            return false;
        }
        let place = Place::of_len(layout.size());
        let entry = Entry { ptr, keys: core.slabs.map().keys_at(ptr) };
        // SAFETY: this thread's own slot, which lives as long as the thread.
        unsafe { &*thread::slot_at(self.slot_offset) }.push(place, entry)
    }

    /// # Safety
    /// As [`give`](PoolRef::give).
    #[cold]
    #[inline(never)]
    unsafe fn give_loudly(core: NonNull<Core>, ptr: NonNull<u8>, layout: Layout) {
        // SAFETY: the caller's promise, passed on.
        if let Some(core) = unsafe { Self::give_slow(core, ptr, layout) } {
            core.wake_waiters();
        }
    }

    /// The answer is the core, if somebody may have to be woken.
    ///
    /// # Safety
    /// As [`give`](PoolRef::give).
    #[cold]
    #[inline(never)]
    unsafe fn give_slow(
        core: NonNull<Core>,
        ptr: NonNull<u8>,
        layout: Layout,
    ) -> Option<Arc<Core>> {
        if layout.size() == 0 {
            return None;
        }
        // SAFETY: a block of it is out, so the core is alive until that has been given back.
        let this = unsafe { core.as_ref() };
        let class = if is_plain(layout) && this.odd.load(Relaxed) == 0 {
            size_class::class_of(layout.size())
        } else {
            let Some(class) = this.slabs.class_at(ptr) else {
                debug_assert!(false, "{ptr:p} is no block of this pool");
                return None;
            };
            if is_odd(class, layout) {
                this.odd.fetch_sub(1, Relaxed);
            }
            class
        };
        let (place, entry) = (Place::of(class), Entry { ptr, keys: this.slabs.map().keys_at(ptr) });
        // SAFETY: this thread's own slot, which lives as long as the thread.
        if unsafe { &*thread::slot_at(this.slot_offset) }.push(place, entry) {
            return None;
        }
        // SAFETY: not pushed, so the block is still the caller's, and of this class.
        unsafe { Core::free_quietly(core, entry, place) }
    }

    /// Lets a block that was asked for with `old` be used for `new`, at the same address, if it can be; the
    /// answer is how many bytes may be used. Later calls pass `new` (or a size up to the answer).
    ///
    /// It can be if the block is long enough and so aligned, and no smaller one would do; with `must`, for
    /// callers that have no other block to go to, in the latter case too.
    ///
    /// # Safety
    /// As [`give`](PoolRef::give) for `ptr` and `old`, but nothing is given up. `new` is not of size 0.
    #[inline(always)]
    pub(crate) unsafe fn resize(
        self,
        ptr: NonNull<u8>,
        old: Layout,
        new: Layout,
        must: bool,
    ) -> Option<usize> {
        if is_plain(old) && is_plain(new) {
            let class = size_class::class_of(new.size());
            // SAFETY: a block of it is out, so the core is alive.
            let odd = unsafe { self.core.as_ref() }.odd.load(Relaxed);
            if class == size_class::class_of(old.size()) && odd == 0 {
                return Some(size_class::size_of(class));
            }
        }
        // SAFETY: the caller's promise, passed on.
        unsafe { self.resize_by_table(ptr, old, new, must) }
    }

    /// # Safety
    /// As [`resize`](PoolRef::resize).
    #[cold]
    #[inline(never)]
    unsafe fn resize_by_table(
        self,
        ptr: NonNull<u8>,
        old: Layout,
        new: Layout,
        must: bool,
    ) -> Option<usize> {
        // SAFETY: a block of it is out, so the core is alive.
        let core = unsafe { self.core.as_ref() };
        let class = core.slabs.class_at(ptr)?;
        let len = core.slabs.block_len(ptr, class);
        if new.size() > len || !(ptr.as_ptr() as usize).is_multiple_of(new.align()) {
            return None;
        }
        let (was_odd, odd) = (is_odd(class, old), is_odd(class, new));
        let grows = new.size() >= old.size();
        let apt = if is_plain(new) {
            !odd || was_odd && (grows || same_class(old, new))
        } else {
            grows || new.size() > len / 2
        };
        if !apt && !must {
            return None;
        }
        match (was_odd, odd) {
            (false, true) => _ = core.odd.fetch_add(1, Relaxed),
            (true, false) => _ = core.odd.fetch_sub(1, Relaxed),
            _ => {}
        }
        let len = core.resize_out(ptr, class, new.size());
        Some(usable(class, len, new))
    }
}

/// Whether two plain layouts are of one class.
fn same_class(old: Layout, new: Layout) -> bool {
    size_class::class_of(old.size()) == size_class::class_of(new.size())
}
