//! Buffers that are out as bare addresses: given out, taken back, freed. What is at hand goes by a path of its
//! own, short, without a call and without a panic, so that the C interface can use it as it is.
//!
//! An address is looked for in the handle's own heap first: a mark there says that it is out of that one. All
//! others (another class's, a share's, and those that are out of none) are looked for by the pool's ranges.

use std::ptr::NonNull;

use super::{Core, Pool};
use crate::{
    buf::Buf, error::FreeError, magazine::Place, reach::Reach, slab::Entry, sync::unlikely,
};

impl Core {
    /// Ends being out of this heap: exactly one of several callers gets the block, and owns it. Any number may
    /// be passed.
    #[inline(always)]
    fn claim(&self, addr: usize) -> Option<(Entry, Place)> {
        let (base, len) = self.outs.range();
        let offset = addr.wrapping_sub(base);
        if offset >= len {
            unlikely();
            return None;
        }
        // SAFETY: it was looked whether it is.
        unsafe { self.claim_at(addr, offset) }
    }

    /// The same for an address this far into the marks' range.
    ///
    /// # Safety
    /// It lies in there.
    #[inline(always)]
    pub(super) unsafe fn claim_at(&self, addr: usize, offset: usize) -> Option<(Entry, Place)> {
        // SAFETY: passed on.
        let place = unsafe { self.outs.clear_at(offset) }?;
        // SAFETY: what has a mark lies in the pool's range, which does not begin at null.
        let ptr = unsafe { NonNull::new_unchecked(addr as *mut u8) };
        // SAFETY: it had a mark, so it is a block's, which is the caller's now.
        let keys = unsafe { self.slabs.map().keys_at_offset(offset) };
        Some((Entry { ptr, keys }, place))
    }
}

impl<R> Pool<R> {
    /// Frees what [`Buf::into_raw`] gave up, whichever class or share of this pool it came from.
    ///
    /// # Errors
    /// [`FreeError`] for every pointer that is not out as a raw buffer of this pool: null, foreign,
    /// interior, or taken back already. Nothing is then changed.
    ///
    /// # Safety
    /// Whoever was given the pointer has stopped using the bytes, or gives that right up to the caller.
    #[inline]
    pub unsafe fn free_raw(&self, ptr: *mut u8) -> Result<(), FreeError> {
        match self.core().claim(ptr as usize) {
            Some((entry, place)) => {
                self.give_bare(entry, place);
                Ok(())
            }
            None => self.free_elsewhere(ptr),
        }
    }

    /// Frees a claimed block of this handle's own heap.
    #[inline(always)]
    fn give_bare(&self, entry: Entry, place: Place) {
        // Its length is not asked for: that would be a look-up.
        drop(Buf::<R>::new(self.inner, entry, 0, place));
    }

    #[cold]
    #[inline(never)]
    fn free_elsewhere(&self, ptr: *mut u8) -> Result<(), FreeError> {
        let core = self.home_of(ptr as usize);
        let (entry, place) = core.take_raw(ptr)?;
        drop(Buf::<R>::new(core.reference(), entry, 0, place));
        Ok(())
    }

    fn take_back<S: Reach>(&self, ptr: *mut u8) -> Result<Buf<S>, FreeError> {
        let addr = ptr as usize;
        let core = self.home_of(addr);
        if addr != 0 && S::REMOTE.is_some_and(|remote| remote != core.remote) {
            return Err(FreeError::OtherReach { addr, remote: core.remote });
        }
        let (entry, place) = core.take_raw(ptr)?;
        let len = core.usable_len(entry.ptr, place.class());
        Ok(Buf::new(core.reference(), entry, len, place))
    }

    /// The heap that a block at this address is of. An address of none is judged by this handle's class, which
    /// says why.
    #[inline]
    fn home_of(&self, addr: usize) -> &Core {
        let own = self.core();
        let alone = own.reserved == 0 && own.beyond.is_none();
        if alone && own.slabs.map().page_of(addr).is_some() {
            return own;
        }
        self.heaps().heap_at(addr).unwrap_or(own)
    }
}

impl<R: Reach> Pool<R> {
    /// Takes back what [`Buf::into_raw`] gave up, whichever class or share of this pool it came from. Its
    /// length is the block's.
    ///
    /// # Errors
    /// [`FreeError`] for every pointer that is not out as a raw buffer of this pool: null, foreign,
    /// interior, or taken back already; and for one whose class this handle's `R` rules out. Nothing is
    /// then changed.
    ///
    /// # Safety
    /// Whoever was given the pointer has stopped using the bytes, or gives that right up to the caller.
    #[allow(clippy::wrong_self_convention)] // The pool is not the pointer's target but its source.
    pub unsafe fn from_raw(&self, ptr: *mut u8) -> Result<Buf<R>, FreeError> {
        self.take_back(ptr)
    }
}
