//! `Allocator` for pools: collections whose memory is registered.
//!
//! Implemented for [`Pool`], and so for `&Pool` too, by the trait's own rule that a reference to an allocator
//! is one: `Vec<u8, &Pool>` borrows the pool, `Vec<u8, Pool>` holds a handle and keeps it.
//!
//! The same code serves the trait of `allocator-api2` and, on nightly, the standard library's.

use std::{
    alloc::Layout,
    ptr::{self, NonNull},
};

use crate::pool::{Pool, PoolRef};

/// What stands for memory of size 0: nothing is taken for it and nothing given back.
fn nothing(layout: Layout) -> NonNull<[u8]> {
    // An address that is a multiple of the alignment, which is never 0.
    let ptr =
        NonNull::new(ptr::without_provenance_mut(layout.align())).unwrap_or(NonNull::dangling());
    NonNull::slice_from_raw_parts(ptr, 0)
}

#[inline(always)]
fn allocate<R>(pool: &Pool<R>, layout: Layout) -> Option<NonNull<[u8]>> {
    match pool.inner().take_cached(layout) {
        Some((ptr, len)) => Some(NonNull::slice_from_raw_parts(ptr, len)),
        None => allocate_slow(pool.inner(), layout),
    }
}

#[cold]
#[inline(never)]
fn allocate_slow(pool: PoolRef, layout: Layout) -> Option<NonNull<[u8]>> {
    if layout.size() == 0 {
        return Some(nothing(layout));
    }
    let (ptr, len) = pool.take(layout)?;
    Some(NonNull::slice_from_raw_parts(ptr, len))
}

fn allocate_zeroed<R>(pool: &Pool<R>, layout: Layout) -> Option<NonNull<[u8]>> {
    let block = allocate(pool, layout)?;
    // SAFETY: the block was just taken, so it is this call's alone, and is `len` bytes long.
    unsafe { block.cast::<u8>().write_bytes(0, block.len()) };
    Some(block)
}

/// # Safety
/// The contract of `Allocator::deallocate`.
#[inline(always)]
unsafe fn deallocate<R>(pool: &Pool<R>, ptr: NonNull<u8>, layout: Layout) {
    // SAFETY: `ptr` is a block currently allocated by this pool and `layout` fits it (contract), so its size
    // is at least the one asked for and at most the one answered; or the size is 0.
    unsafe { pool.inner().give(ptr, layout) };
}

/// Grows or shrinks.
///
/// # Safety
/// The contract of `Allocator::grow` or `Allocator::shrink`.
#[inline]
unsafe fn resize<R>(
    pool: &Pool<R>,
    ptr: NonNull<u8>,
    old: Layout,
    new: Layout,
) -> Option<NonNull<[u8]>> {
    if new.size() == 0 {
        // SAFETY: the caller's contract; nothing stands for it from here on.
        unsafe { deallocate(pool, ptr, old) };
        return Some(nothing(new));
    }
    if old.size() == 0 {
        return allocate(pool, new);
    }
    let inner = pool.inner();
    // SAFETY: `ptr` is currently allocated here and fits `old` (contract).
    if let Some(len) = unsafe { inner.resize(ptr, old, new, false) } {
        return Some(NonNull::slice_from_raw_parts(ptr, len));
    }
    let Some((to, len)) = inner.take(new) else {
        // Nothing else to be had. A longer block than need be is better than none.
        // SAFETY: as above.
        let len = unsafe { inner.resize(ptr, old, new, true) }?;
        return Some(NonNull::slice_from_raw_parts(ptr, len));
    };
    // SAFETY: both blocks are the caller's, distinct, and at least as long as the shorter of the sizes; the
    // old one is given up by this call succeeding.
    unsafe {
        ptr.copy_to_nonoverlapping(to, old.size().min(new.size()));
        inner.give(ptr, old);
    }
    Some(NonNull::slice_from_raw_parts(to, len))
}

/// # Safety
/// The contract of `Allocator::grow_zeroed`.
unsafe fn grow_zeroed<R>(
    pool: &Pool<R>,
    ptr: NonNull<u8>,
    old: Layout,
    new: Layout,
) -> Option<NonNull<[u8]>> {
    // SAFETY: the caller's contract is that of `grow`.
    let block = unsafe { resize(pool, ptr, old, new) }?;
    // SAFETY: the block is `block.len()` bytes long, which is at least the new size and so the old.
    unsafe { block.cast::<u8>().add(old.size()).write_bytes(0, block.len() - old.size()) };
    Some(block)
}

macro_rules! allocator {
    ($($path:ident)::+) => {
        // SAFETY: blocks stay where they are and mapped until they are given back (P4, P9), whether or not
        // handles are moved, cloned or dropped; clones are handles of one pool, so one frees what another
        // gave. What is answered fits the layout: `take` and `resize` answer at least the size, aligned.
        unsafe impl<R> $($path)::+::Allocator for Pool<R> {
            #[inline]
            fn allocate(&self, layout: Layout) -> Result<NonNull<[u8]>, $($path)::+::AllocError> {
                allocate(self, layout).ok_or($($path)::+::AllocError)
            }

            #[inline]
            fn allocate_zeroed(
                &self,
                layout: Layout,
            ) -> Result<NonNull<[u8]>, $($path)::+::AllocError> {
                allocate_zeroed(self, layout).ok_or($($path)::+::AllocError)
            }

            #[inline]
            unsafe fn deallocate(&self, ptr: NonNull<u8>, layout: Layout) {
                // SAFETY: the caller's contract, passed on.
                unsafe { deallocate(self, ptr, layout) };
            }

            #[inline]
            unsafe fn grow(
                &self,
                ptr: NonNull<u8>,
                old: Layout,
                new: Layout,
            ) -> Result<NonNull<[u8]>, $($path)::+::AllocError> {
                // SAFETY: the caller's contract, passed on.
                unsafe { resize(self, ptr, old, new) }.ok_or($($path)::+::AllocError)
            }

            #[inline]
            unsafe fn grow_zeroed(
                &self,
                ptr: NonNull<u8>,
                old: Layout,
                new: Layout,
            ) -> Result<NonNull<[u8]>, $($path)::+::AllocError> {
                // SAFETY: the caller's contract, passed on.
                unsafe { grow_zeroed(self, ptr, old, new) }.ok_or($($path)::+::AllocError)
            }

            #[inline]
            unsafe fn shrink(
                &self,
                ptr: NonNull<u8>,
                old: Layout,
                new: Layout,
            ) -> Result<NonNull<[u8]>, $($path)::+::AllocError> {
                // SAFETY: the caller's contract, passed on.
                unsafe { resize(self, ptr, old, new) }.ok_or($($path)::+::AllocError)
            }
        }
    };
}

#[cfg(feature = "allocator-api2")]
allocator!(allocator_api2::alloc);

// Two traits, unless `allocator-api2/nightly` is on, which makes them one: then `nightly` alone must be.
#[cfg(feature = "nightly")]
allocator!(std::alloc);
