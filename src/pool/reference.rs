//! The fast path of alloc: a reference to a pool and a gate, one magazine, one handle; and the door to the
//! slow path, which answers in registers.

use std::ptr::NonNull;

use super::Core;
use crate::{
    access::PackedKeys,
    buf::Buf,
    error::AllocError,
    magazine::{Place, ThreadGate},
    size_class::{self, MAX_BLOCK},
    slab::Entry,
    thread,
};

/// Where a pool is and where its gates are: what a handle and a buffer need on the hot path. Owns nothing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct PoolRef {
    pub(crate) core: NonNull<Core>,
    pub(crate) slot_offset: u32,
}

impl PoolRef {
    /// Allocates through `gate`, which is this thread's for this pool. Whoever holds the reference holds
    /// a handle too. Everything is passed by value, so that a caller's handle can stay in registers.
    #[inline(always)]
    pub(crate) fn alloc<R>(
        self,
        gate: *const ThreadGate,
        len: usize,
    ) -> Result<Buf<R>, AllocError> {
        let mut place = Place::of(size_class::class_of(len));
        let mut entry = None;
        if len.wrapping_sub(1) < MAX_BLOCK {
            // SAFETY: the caller's gate is this thread's own, and lives as long as the thread.
            entry = unsafe { &*gate }.pop(place);
        }
        if entry.is_none()
            && let Some((slow, slow_place)) = Self::alloc_slow(self.core, len).get()
        {
            (entry, place) = (Some(slow), slow_place);
        }
        match entry {
            Some(entry) => Ok(Buf::new(self, entry, len, place)),
            None => Err(Self::refusal(self.core, len)),
        }
    }

    #[cold]
    #[inline(never)]
    fn alloc_slow(core: NonNull<Core>, len: usize) -> Answer {
        // SAFETY: the caller of `alloc` has a handle, so the core is alive.
        let core = unsafe { core.as_ref() };
        if len.wrapping_sub(1) < MAX_BLOCK {
            let class = size_class::class_of(len);
            // SAFETY: this thread's own gate, which lives as long as the thread.
            let gate = unsafe { &*thread::gate_at(core.slot_offset) };
            if let Some(entry) = gate.pop_previous(&core.depot, Place::of(class)) {
                return Answer::new(entry, class);
            }
        }
        let got = core.alloc_slow(len, 1);
        got.map_or(Answer::NONE, |(entry, class)| Answer::new(entry, class))
    }

    #[cold]
    #[inline(never)]
    fn refusal(core: NonNull<Core>, len: usize) -> AllocError {
        // SAFETY: as in `alloc_slow`.
        unsafe { core.as_ref() }.refusal(len, 1)
    }
}

/// A block and its class in two words, so that the slow path answers in registers and the fast path need
/// not go through memory to meet it. 0 in the first word is none.
#[derive(Clone, Copy)]
struct Answer(u64, u64);

impl Answer {
    const NONE: Self = Self(0, 0);
    /// User addresses have 47 bits unless more are asked for, which no mapping here does.
    const CLASS_SHIFT: u32 = 56;

    fn new(entry: Entry, class: usize) -> Self {
        let addr = entry.ptr.as_ptr() as u64;
        debug_assert_eq!(addr >> Self::CLASS_SHIFT, 0);
        Self(addr | (class as u64) << Self::CLASS_SHIFT, entry.keys.word())
    }

    #[inline(always)]
    pub(super) fn get(self) -> Option<(Entry, Place)> {
        let addr = self.0 & ((1 << Self::CLASS_SHIFT) - 1);
        let ptr = NonNull::new(addr as *mut u8)?;
        let keys = PackedKeys::from_word(self.1);
        Some((Entry { ptr, keys }, Place::of((self.0 >> Self::CLASS_SHIFT) as usize)))
    }
}
