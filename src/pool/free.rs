//! The slow path of free: a magazine's surplus to the depot or the slabs, and the last block of a closed
//! pool to whoever takes it down.

use std::{ptr::NonNull, sync::Arc};

use super::Core;
use crate::{
    magazine::Place,
    size_class::CLASSES,
    slab::{Entry, Given},
    thread,
};

impl Core {
    /// Everything that the magazine at hand had no room for.
    ///
    /// # Safety
    /// `entry` is a block of `core`, of the class at `place`, that the caller owns, and gives up.
    #[cold]
    #[inline(never)]
    pub(crate) unsafe fn free_slow(core: NonNull<Self>, entry: Entry, place: Place) {
        // SAFETY: the caller's promise, passed on.
        if let Some(core) = unsafe { Self::free_quietly(core, entry, place) } {
            core.wake_waiters();
        }
    }

    /// The same, but nobody is woken: the answer is the core, if somebody may have to be.
    ///
    /// # Safety
    /// As [`free_slow`](Core::free_slow).
    pub(super) unsafe fn free_quietly(
        core: NonNull<Self>,
        entry: Entry,
        place: Place,
    ) -> Option<Arc<Self>> {
        let class = place.class();
        // SAFETY: the caller's block is live, so the core is, until the block has been given back.
        let this = unsafe { core.as_ref() };
        // SAFETY: this thread's own slot, which lives as long as the thread.
        let slot = unsafe { &*thread::slot_at(this.slot_offset) };
        if slot.push_previous(&this.depot, place, entry) {
            return None;
        }
        // A child owns none of this; its copy of the books just keeps the block.
        if this.foreign() {
            return None;
        }
        this.hide_block(entry, class);
        if class < CLASSES && this.free_cached(entry, class) {
            return None;
        }
        // SAFETY: as above. From the next line on another thread may be the one that ends the pool.
        let core = unsafe { Self::keep(core) };
        if let Some(guard) = &core.guard
            && core.take_in(guard, entry, class)
        {
            return Some(core);
        }
        core.stir();
        if core.slabs.give(std::iter::once(entry.ptr)) == Given::Last {
            core.drained();
            return None;
        }
        Some(core)
    }

    /// Before a block is put where the next search can find it.
    pub(super) fn stir(&self) {
        if let Some(beyond) = &self.beyond {
            beyond.drought.stir();
        }
    }

    /// Puts a block into this thread's magazines; false if it has none, or if somebody waits for blocks. Once
    /// the block is in and the thread's lock released, the core may be gone.
    pub(super) fn free_cached(&self, entry: Entry, class: usize) -> bool {
        thread::with_local(self, |local| {
            // SAFETY: `with_local` gives this thread's own, and this thread is not inside a gate.
            let mut hold = unsafe { local.hold_as_owner(&self.depot) };
            let mut made = None;
            let done = loop {
                // Asked under the lock that whoever emptied the caches had before: see `waiters.rs`.
                if !hold.attached() || self.waiters.any() {
                    break false;
                }
                self.stir();
                if hold.push(class, entry) {
                    break true;
                }
                let Some(empty) = made.take().or_else(|| self.depot.get_empty(class)) else {
                    // Made without the lock; what was found before may be different then.
                    drop(hold);
                    made = Some(self.depot.make_empty(class));
                    // SAFETY: as above.
                    hold = unsafe { local.hold_as_owner(&self.depot) };
                    continue;
                };
                if let Some(surplus) = hold.make_room(&self.depot, class, empty) {
                    self.empty_out(class, surplus);
                }
                let pushed = hold.push(class, entry);
                debug_assert!(pushed, "room was just made");
                break true;
            };
            // Under the lock still: see above.
            made.into_iter().for_each(|m| self.depot.put_empty(class, m));
            done
        })
        .unwrap_or(false)
    }
}
