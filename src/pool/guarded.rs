//! Guarded pools: where an alloc and a free meet the guards, and how the quarantine gives way.
//!
//! A pool with guards, or that tracks, has no magazines: its heaps take the place that stands for "no slot", so that
//! every alloc and free misses the caches and goes by the slabs' lock. What is done for guards is so done on
//! ways that are slow in any case, and the fast ones know nothing of it.

use std::{ptr::NonNull, sync::Arc, sync::atomic::Ordering::Release};

use super::{
    Core, Pool,
    line::{Block, Need},
};
use crate::{
    guard::{Caller, Extent, Guard, LEAST_CANARY, Waiting},
    size_class::{self, CLASSES, PAGE},
    slab::{Entry, Given},
    stats::GuardStats,
    sys::shadow,
};

impl Core {
    /// What the caches did not have; `caller` asked for it.
    pub(super) fn alloc_rest(&self, need: &Need, passing: bool, caller: Caller) -> Option<Block> {
        let Some(guard) = &self.guard else {
            let got = self.alloc_shared(need, passing);
            return got.inspect(|&(entry, class)| self.show_block(entry, class));
        };
        let wide = if guard.guards().canary { self.with_canary(need) } else { None };
        // While others wait nobody takes more than was asked for.
        let wide = wide.filter(|_| !self.waiters.any()).and_then(|wide| self.take_now(&wide));
        let (entry, class) = wide.or_else(|| self.alloc_shared(need, passing))?;
        guard.goes_out(self.extent(entry, class), need.len, caller, passing);
        Some((entry, class))
    }

    /// A need that leaves room for a canary, if the one at hand leaves none: as well aligned.
    fn with_canary(&self, need: &Need) -> Option<Need> {
        let len = need.len.max(1).checked_add(LEAST_CANARY)?;
        if need.class < CLASSES && len <= size_class::size_of(need.class)
            || len > self.slabs.max_len()
        {
            return None;
        }
        // A block of whole pages starts at a page's start, unless blocks are coloured.
        let paged = need.class < CLASSES && self.slabs.stride(need.class).is_multiple_of(PAGE);
        Some(self.need(len, if paged { need.align.max(PAGE) } else { need.align }))
    }

    /// Hands a block to who waited for it.
    pub(super) fn hand_out(&self, (entry, class): Block, len: usize, caller: Caller) {
        match &self.guard {
            Some(guard) => guard.goes_out(self.extent(entry, class), len, caller, true),
            None => self.show_block(entry, class),
        }
    }

    /// Tells tools that a block is somebody's: see `shadow`.
    #[inline(always)]
    pub(super) fn show_block(&self, entry: Entry, class: usize) {
        if cfg!(any(pinpool_asan, feature = "valgrind")) {
            shadow::show(entry.ptr, self.slabs.block_len(entry.ptr, class));
        }
    }

    /// Tells them that it is nobody's.
    #[inline(always)]
    pub(super) fn hide_block(&self, entry: Entry, class: usize) {
        if cfg!(any(pinpool_asan, feature = "valgrind")) {
            shadow::hide(entry.ptr, self.slabs.block_len(entry.ptr, class));
        }
    }

    fn extent(&self, entry: Entry, class: usize) -> Extent {
        Extent { ptr: entry.ptr, len: self.slabs.block_len(entry.ptr, class) }
    }

    /// Takes a buffer back; false if the slabs have to take its block now.
    pub(super) fn take_in(&self, guard: &Guard, entry: Entry, class: usize) -> bool {
        let block = self.extent(entry, class);
        guard.comes_back(block);
        let mut quarantine = guard.quarantine.lock();
        // Asked under the lock that whoever empties the quarantine for those who wait has after getting in line:
        // see `waiters.rs`.
        if !quarantine.open() || self.waiters.any() {
            return false;
        }
        // Before the next search can find it: whoever searches takes the lock, too.
        self.stir();
        quarantine.push(Waiting { ptr: entry.ptr, class, bytes: block.len });
        while let Some(due) = quarantine.pop_due() {
            self.release(due);
        }
        true
    }

    /// Gives a block that was in quarantine to the slabs. The caller has the quarantine's lock, so that nobody
    /// finds it in neither.
    fn release(&self, block: Waiting) {
        let given = self.slabs.give(std::iter::once(block.ptr));
        // The quarantine is closed and emptied before the heap starts draining.
        debug_assert_eq!(given, Given::More);
        self.recalls.fetch_add(1, Release);
    }

    /// Has the quarantine give way to an alloc of `bytes`: the oldest half of it, and at least as much as that.
    /// False if there was nothing.
    pub(super) fn give_way(&self, bytes: usize) -> bool {
        let Some(guard) = &self.guard else { return false };
        let mut quarantine = guard.quarantine.lock();
        let (before, mut found) = (quarantine.bytes(), false);
        while before - quarantine.bytes() < bytes.max(before / 2).max(1) {
            let Some(block) = quarantine.pop() else { break };
            self.release(block);
            found = true;
        }
        found
    }

    /// Empties the quarantine. False if there was nothing.
    pub(super) fn empty_quarantine(&self) -> bool {
        self.give_way(usize::MAX)
    }

    /// The last handle goes: the quarantine takes nothing in any more, and what was freed is looked at once more.
    pub(super) fn close_guards(&self) {
        if let Some(guard) = &self.guard {
            guard.quarantine.lock().close();
            self.empty_quarantine();
            guard.check_free();
        }
    }

    /// Makes an arena ready that is to come.
    pub(super) fn prepare_guarded(&self, offset: usize, len: usize, fresh: bool) {
        let ptr = NonNull::new((self.slabs.map().base() + offset) as *mut u8);
        let Some(ptr) = ptr else { return };
        if let Some(guard) = &self.guard {
            guard.prepare(Extent { ptr, len }, fresh);
        }
        shadow::hide(ptr, len);
    }

    /// Forgets what was given back in an arena that goes: nobody may look there any more.
    pub(super) fn forget_guarded(&self, offset: usize, len: usize) {
        if let Some(guard) = &self.guard {
            guard.forget(self.slabs.map().base() + offset, len);
        }
    }

    /// Bytes that whoever has a block may use.
    pub(crate) fn usable_len(&self, ptr: NonNull<u8>, class: usize) -> usize {
        let block = self.slabs.block_len(ptr, class);
        match &self.guard {
            // In a forked child nobody may ever release the ledger's lock.
            Some(guard) if !self.foreign() => guard.usable(ptr).unwrap_or(block),
            _ => block,
        }
    }

    /// Lets a block without a handle be used for `len` bytes; says how many they are.
    pub(super) fn resize_out(&self, ptr: NonNull<u8>, class: usize, len: usize) -> usize {
        let block = self.slabs.block_len(ptr, class);
        match &self.guard {
            Some(guard) if !self.foreign() => guard.resize(Extent { ptr, len: block }, len),
            _ => block,
        }
    }

    pub(super) fn guard_stats(&self) -> GuardStats {
        let Some(guard) = self.guard.as_ref().filter(|_| !self.foreign()) else {
            return GuardStats::default();
        };
        let (written_after_free, written_beyond_end) = guard.found();
        let quarantined = guard.quarantine.lock().bytes();
        GuardStats { written_after_free, written_beyond_end, quarantined }
    }
}

impl<R> Pool<R> {
    /// Looks at all that was given back and is free now, and says in how many buffers' memory somebody has written
    /// since; each is told and counted as when it is handed out ([`Guards::poison`](crate::Guards::poison)), and
    /// filled again. 0 in a pool without poison, and in a forked child.
    ///
    /// Reads all that memory; an alloc or free that meets it waits for one buffer's worth of it.
    pub fn check_free(&self) -> usize {
        let heaps = self.heaps().iter().filter(|core| !core.foreign());
        heaps.filter_map(|core| core.guard.as_ref()).map(|guard| guard.check_free()).sum()
    }
}

/// A heap's guard, if it has any.
pub(super) type Guarded = Option<Arc<Guard>>;
