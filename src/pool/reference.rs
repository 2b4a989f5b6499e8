//! The fast path of alloc: a reference to a pool and a slot, one magazine, one handle; and the door to the
//! slow path, which answers in registers.

use std::{panic::Location, ptr::NonNull};

use super::Core;
use crate::{
    access::PackedKeys,
    buf::Buf,
    error::AllocError,
    guard::Caller,
    magazine::{Place, ThreadSlot},
    size_class::{self, CLASSES, MAX_BLOCK, MIN_BLOCK},
    slab::Entry,
    thread,
};

/// Where a pool is and where threads' rows lead to its magazines: what a handle and a buffer need on the hot path.
/// Owns nothing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct PoolRef {
    pub(crate) core: NonNull<Core>,
    pub(crate) slot_offset: u32,
}

impl PoolRef {
    /// Allocates through `slot`, which is this thread's for this pool. Whoever holds the reference holds
    /// a handle too. Everything is passed by value, so that a caller's handle can stay in registers.
    #[inline(always)]
    #[track_caller]
    pub(crate) fn alloc<R>(
        self,
        slot: *const ThreadSlot,
        len: usize,
    ) -> Result<Buf<R>, AllocError> {
        let mut place = Place::of_len(len);
        let mut entry = Self::cached(slot, place, len);
        if entry.is_none()
            && let Some(slow) = Self::alloc_slow(self.core, len).get()
        {
            (entry, place) = (Some(slow.entry), slow.place);
        }
        match entry {
            Some(entry) => Ok(Buf::new(self, entry, len, place)),
            None => Err(Self::refusal(self.core, len)),
        }
    }

    /// What the magazine at hand has.
    #[inline(always)]
    pub(super) fn cached(slot: *const ThreadSlot, place: Place, len: usize) -> Option<Entry> {
        if len.wrapping_sub(1) < MAX_BLOCK {
            // SAFETY: such lengths have a class.
            unsafe { place.assume_in_range() };
            // SAFETY: the caller's slot is this thread's own, and lives as long as the thread.
            return unsafe { &*slot }.pop(place);
        }
        None
    }

    /// The slow path alone, for callers that have been at the magazine already.
    #[track_caller]
    pub(crate) fn alloc_uncached<R>(self, len: usize, align: usize) -> Result<Buf<R>, AllocError> {
        // SAFETY: as in `alloc_slow`.
        let core = unsafe { self.core.as_ref() };
        match core.alloc_slow(len, align) {
            Some((entry, class)) => Ok(Buf::new(self, entry, len, Place::of(class))),
            None => Err(core.refusal(len, align)),
        }
    }

    /// The magazine had none.
    #[cold]
    #[inline(never)]
    #[track_caller]
    pub(super) fn alloc_slow(core: NonNull<Core>, len: usize) -> Answer {
        Self::alloc_slow_by(core, len, Location::caller())
    }

    #[inline(always)]
    pub(super) fn alloc_slow_by(core: NonNull<Core>, len: usize, caller: Caller) -> Answer {
        // SAFETY: the caller of `alloc` has a handle, so the core is alive.
        let core = unsafe { core.as_ref() };
        if len.wrapping_sub(1) < MAX_BLOCK {
            let class = size_class::class_of(len);
            // SAFETY: this thread's own slot, which lives as long as the thread.
            let slot = unsafe { &*thread::slot_at(core.slot_offset) };
            if let Some(entry) = slot.pop_previous(&core.depot, Place::of(class)) {
                return Answer::new(entry, class, false);
            }
        }
        let got = core.alloc_slow_by(len, 1, caller);
        got.map_or(Answer::NONE, |(entry, class)| Answer::new(entry, class, false))
    }

    #[cold]
    #[inline(never)]
    pub(super) fn refusal(core: NonNull<Core>, len: usize) -> AllocError {
        // SAFETY: as in `alloc_slow`.
        unsafe { core.as_ref() }.refusal(len, 1)
    }
}

/// A block as alloc finds it.
#[derive(Clone, Copy)]
pub(super) struct Block {
    pub(super) entry: Entry,
    pub(super) place: Place,
    /// Whether it is of the heap beyond the one asked (a share's class).
    pub(super) beyond: bool,
}

/// A block in two words, so that the slow path answers in registers and the fast path need not go through
/// memory to meet it. An address of 0 is none.
#[derive(Clone, Copy)]
pub(super) struct Answer(u64, u64);

const _: () =
    assert!(Place::of(CLASSES).code() < 1 << (u64::BITS - Answer::PLACE_SHIFT), "a place fits");

impl Answer {
    pub(super) const NONE: Self = Self(0, 0);
    /// The block's place as it is, above the address: user addresses have 47 bits unless more are asked for, which no
    /// mapping here does. So it takes a shift to have it, and nothing that could end up on the fast path, too.
    const PLACE_SHIFT: u32 = 51;
    /// Below the address, which is that of a block.
    const BEYOND: u64 = 1;
    const ADDR: u64 = ((1 << Self::PLACE_SHIFT) - 1) & !(MIN_BLOCK as u64 - 1);

    pub(super) fn new(entry: Entry, class: usize, beyond: bool) -> Self {
        let addr = entry.ptr.as_ptr() as u64;
        debug_assert_eq!(addr & !Self::ADDR, 0);
        let place = u64::from(Place::of(class).code()) << Self::PLACE_SHIFT;
        Self(addr | place | if beyond { Self::BEYOND } else { 0 }, entry.keys.word())
    }

    #[inline(always)]
    pub(super) fn get(self) -> Option<Block> {
        let ptr = NonNull::new((self.0 & Self::ADDR) as *mut u8)?;
        let entry = Entry { ptr, keys: PackedKeys::from_word(self.1) };
        // SAFETY: that is what was put there.
        let place = unsafe { Place::from_code((self.0 >> Self::PLACE_SHIFT) as u32) };
        Some(Block { entry, place, beyond: self.0 & Self::BEYOND != 0 })
    }
}
