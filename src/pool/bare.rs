//! Buffers that are out as bare addresses: given out, taken back, freed. What is at hand goes by a path of its
//! own, short, without a call and without a panic, so that the C interface can use it as it is.
//!
//! An address is looked for in the handle's own heap first: a mark there says that it is out of that one. All
//! others (another class's, a share's, and those that are out of none) are looked for by the pool's ranges.

use std::ptr::NonNull;

#[cfg(feature = "capi")]
use super::PoolRef;
use super::{Core, Pool};
use crate::{buf::Buf, error::FreeError, magazine::Place, reach::Reach, slab::Entry};
#[cfg(feature = "capi")]
use crate::{reach::Any, size_class, thread};

impl Core {
    /// Ends being out of this heap: exactly one of several callers gets the block, and owns it. Any number may
    /// be passed.
    #[inline(always)]
    fn claim(&self, addr: usize) -> Option<(Entry, Place)> {
        let map = self.slabs.map();
        let offset = addr.wrapping_sub(map.base());
        let place = self.outs.clear_at(offset)?;
        // SAFETY: what has a mark lies in the pool's range, which does not begin at null.
        let ptr = unsafe { NonNull::new_unchecked(addr as *mut u8) };
        // SAFETY: it had a mark, so it is a block's, which is the caller's now.
        let keys = unsafe { map.keys_at_offset(offset) };
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

/// What the C interface does first, and by itself most of the time: this thread's loaded magazine, and no call.
/// All of it asks that the pool has a handle or a block out.
#[cfg(feature = "capi")]
impl PoolRef {
    #[inline(always)]
    fn core<'a>(self) -> &'a Core {
        // SAFETY: alive, as said above.
        unsafe { self.core.as_ref() }
    }

    /// Takes a block for `len` bytes that is still to be marked as out.
    #[inline(always)]
    pub(crate) fn take_at_hand(self, len: usize) -> Option<(Entry, Place)> {
        let place = Place::of(size_class::class_of(len));
        let entry = self.cached(thread::gate_at(self.slot_offset), place, len)?;
        Some((entry, place))
    }

    /// The lkey, and the rkey or 0.
    #[inline(always)]
    pub(crate) fn keys_in(self, entry: Entry) -> (u32, u32) {
        // As one word, which can be stored as one.
        let keys = entry.keys.word() & self.core().keys_mask;
        (keys as u32, (keys >> 32) as u32)
    }

    #[inline(always)]
    pub(crate) fn is_remote(self) -> bool {
        self.core().remote
    }

    /// Marks it as out; false if that takes a table which is not there yet.
    #[inline(always)]
    pub(crate) fn mark_at_hand(self, entry: Entry, place: Place) -> bool {
        self.core().outs.set_at_hand(entry.ptr, place)
    }

    /// The same for a block of the class that `len` says, whatever it takes.
    pub(crate) fn mark(self, block: NonNull<u8>, len: usize) {
        self.core().outs.set(block, Place::of(size_class::class_of(len)));
    }

    /// Takes a block back that is out of this heap.
    #[inline(always)]
    pub(crate) fn claim_at_hand(self, addr: usize) -> Option<(Entry, Place)> {
        self.core().claim(addr)
    }

    /// Frees it into this thread's loaded magazine, if that has room.
    #[inline(always)]
    pub(crate) fn give_at_hand(self, entry: Entry, place: Place) -> bool {
        // SAFETY: this thread's own gate, which lives as long as the thread.
        unsafe { &*thread::gate_at(self.slot_offset) }.push(place, entry)
    }

    /// Frees a block, whatever it takes.
    ///
    /// # Safety
    /// The block is of this heap and of this place, the caller's, and given up.
    pub(crate) unsafe fn give_bare(self, block: NonNull<u8>, place: Place) {
        let keys = self.core().slabs.map().keys_at(block);
        drop(Buf::<Any>::new(self, Entry { ptr: block, keys }, 0, place));
    }
}
