//! The end of a pool: caches away for good, then heap by heap what has drained, arenas and PD by whoever
//! returns the last block that stands on them.

use std::sync::{Arc, atomic::Ordering::AcqRel};

use super::Core;
use crate::{
    arena::Leftover,
    config::{self, Event},
    slab::Given,
};

impl Core {
    /// Called when the last handle goes: takes all caches of this heap away for good.
    pub(super) fn close_caches(&self) {
        self.grower.stop();
        self.grower.changes.close();
        let mut registry = self.registry.lock();
        registry.closed = true;
        self.drain_caches(&registry.locals, true);
        let locals = std::mem::take(&mut registry.locals);
        drop(registry);
        drop(locals);
        self.close_guards();
    }

    /// Called after [`close_caches`](Core::close_caches): if no buffer is out, the heap goes, and what
    /// stands on it alone. `None` when buffers are out; the last of them then does it.
    pub(super) fn close(self: &Arc<Self>) -> Option<Leftover> {
        (self.slabs.start_draining() == Given::Last).then(|| self.drained())
    }

    /// Lets go of a heap that has drained, and of the arenas if it was the last on them. Once: by whoever
    /// was told that the last block came back.
    pub(super) fn drained(self: &Arc<Self>) -> Leftover {
        if self.foreign_process() {
            return Leftover::default();
        }
        let Some(beyond) = &self.beyond else { return self.leave_arenas() };
        // SAFETY: this share is among the heaps that its class's core waits for.
        let class = unsafe { Self::keep(beyond.class().core) };
        // SAFETY: the reference of `settle`, which goes with the last block; that comes back once.
        unsafe { Self::let_go(self) };
        class.leave_arenas()
    }

    /// A class's: one of the heaps on its arenas has drained. The last of them deregisters, unmaps, lets go
    /// of the PD, and of the class's core.
    fn leave_arenas(self: &Arc<Self>) -> Leftover {
        // Release what was done to the arenas here, acquire what was in the other heaps.
        if self.undrained.fetch_sub(1, AcqRel) > 1 {
            return Leftover::default();
        }
        // Waits for the grower to end what it has in hand: one register call at most.
        let arenas = self.arenas.lock().take();
        let Some(mut arenas) = arenas else { return Leftover::default() };
        let (count, bytes) = (arenas.standing().count(), arenas.standing().map(|a| a.len).sum());
        let left = arenas.take_down();
        drop(arenas);
        let hook = self.grower.hook.as_ref();
        config::tell(hook, &Event::TakenDown { arenas: count, bytes });
        // SAFETY: the reference of `settle`; `arenas` was there, so it is given back once.
        unsafe { Self::let_go(self) };
        left
    }

    /// Gives the reference of [`settle`](Core::settle) back.
    ///
    /// # Safety
    /// Once.
    unsafe fn let_go(this: &Arc<Self>) {
        // SAFETY: the caller's promise; `this` is another reference, so the memory stays for now.
        unsafe { Arc::decrement_strong_count(Arc::as_ptr(this)) };
    }
}
