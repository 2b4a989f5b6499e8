//! The C interface's door to a heap: takes and gives by this thread's loaded magazine, without a call. What is
//! out, and whatever does not go this way, is `bare.rs`'s.

use std::{cell::Cell, ptr::NonNull};

use super::{Core, Pool, PoolRef};
use crate::{
    buf::Buf,
    magazine::{Place, ThreadSlot},
    reach::Any,
    slab::Entry,
    sync::unlikely,
    thread::{self, Slot},
};

/// What the C interface does first, and by itself most of the time: this thread's loaded magazine, and no call.
/// A handle's own copy of where its heap is, so that shutting the door is all that closing takes: a shut one
/// gives no block and knows no address.
pub(crate) struct Door {
    core: NonNull<Core>,
    /// Where the heap's marks begin, and how far they go; 0 once it is shut.
    base: usize,
    len: Cell<usize>,
    /// The place without magazines once it is shut.
    slot_offset: Cell<u32>,
}

// SAFETY: a pointer to what may be shared, followed while there is a handle of the pool (`Door::core`).
unsafe impl Send for Door {}
// SAFETY: as above, and the cells are written in `shut` alone, beside which no other call runs (its contract).
unsafe impl Sync for Door {}

impl Door {
    /// Of a pool that keeps a handle until the door is shut.
    pub(crate) fn new<R>(pool: &Pool<R>) -> Self {
        let PoolRef { core, slot_offset } = pool.inner;
        let (base, len) = pool.core().outs.range();
        Self { core, base, len: Cell::new(len), slot_offset: Cell::new(slot_offset) }
    }

    /// Shuts it for good.
    ///
    /// # Safety
    /// No other call on this door runs beside this one.
    pub(crate) unsafe fn shut(&self) {
        self.slot_offset.set(Slot::none().offset());
        self.len.set(0);
    }

    /// # Safety
    /// The door is open: a block came through it, or an address was known.
    #[inline(always)]
    unsafe fn core(&self) -> &Core {
        // SAFETY: open, so there is a handle (contract of `new`).
        unsafe { self.core.as_ref() }
    }

    #[inline(always)]
    fn slot(&self) -> &ThreadSlot {
        // SAFETY: this thread's own slot, which lives as long as the thread.
        unsafe { &*thread::slot_once(self.slot_offset.get()) }
    }

    /// Takes a block for `len` bytes that is still to be marked as out.
    #[inline(always)]
    pub(crate) fn take(&self, len: usize) -> Option<Taken<'_>> {
        let (slot, place) = (self.slot(), Place::of_len(len));
        let entry = PoolRef::cached(slot, place, len)?;
        // SAFETY: a block came through it.
        Some(Taken { core: unsafe { self.core() }, slot, entry, place })
    }

    /// Takes a block back that is out of this heap.
    #[inline(always)]
    pub(crate) fn claim(&self, addr: usize) -> Option<Taken<'_>> {
        let offset = addr.wrapping_sub(self.base);
        if offset >= self.len.get() {
            unlikely();
            return None;
        }
        // SAFETY: there are addresses that it knows.
        let core = unsafe { self.core() };
        // SAFETY: below the length of the marks.
        let (entry, place) = unsafe { core.claim_at(addr, offset) }?;
        Some(Taken { core, slot: self.slot(), entry, place })
    }

    /// Marks a block of the class that `len` says as out, whatever it takes.
    ///
    /// # Safety
    /// The block came through this door, and is the caller's.
    pub(crate) unsafe fn mark(&self, block: NonNull<u8>, len: usize) {
        // SAFETY: the block holds the door open.
        unsafe { self.core() }.outs.set(block, Place::of_len(len));
    }

    /// Frees a block, whatever it takes.
    ///
    /// # Safety
    /// The block is of this heap and of this place, the caller's, and given up.
    pub(crate) unsafe fn give(&self, block: NonNull<u8>, place: Place) {
        let inner = PoolRef { core: self.core, slot_offset: self.slot_offset.get() };
        // SAFETY: the block holds the door open.
        let keys = unsafe { self.core() }.slabs.map().keys_at(block);
        drop(Buf::<Any>::new(inner, Entry { ptr: block, keys }, 0, place));
    }
}

/// A block that came through a door, and holds it open.
pub(crate) struct Taken<'a> {
    core: &'a Core,
    slot: &'a ThreadSlot,
    entry: Entry,
    place: Place,
}

impl Taken<'_> {
    #[inline(always)]
    pub(crate) fn ptr(&self) -> NonNull<u8> {
        self.entry.ptr
    }

    #[inline(always)]
    pub(crate) fn place(&self) -> Place {
        self.place
    }

    /// The lkey, and the rkey or 0.
    #[inline(always)]
    pub(crate) fn keys(&self) -> (u32, u32) {
        // As one word, which can be stored as one.
        let keys = self.entry.keys.word() & self.core.keys_mask;
        (keys as u32, (keys >> 32) as u32)
    }

    #[inline(always)]
    pub(crate) fn is_remote(&self) -> bool {
        self.core.remote
    }

    /// Marks it as out; false if that takes a table which is not there yet.
    #[inline(always)]
    pub(crate) fn mark_at_hand(&self) -> bool {
        self.core.outs.set_at_hand(self.entry.ptr, self.place)
    }

    /// Frees it into this thread's loaded magazine, if that has room.
    #[inline(always)]
    pub(crate) fn give_at_hand(&self) -> bool {
        self.slot.push(self.place, self.entry)
    }
}
