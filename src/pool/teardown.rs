//! The end of a pool: caches away for good, then arenas, PD and core, by whoever returns the last block.

use std::{ptr::NonNull, sync::Arc};

use super::Core;
use crate::{arena::Leftover, slab::Given};

impl Core {
    /// Called when the last handle goes: takes all caches away for good, and if no buffer is out, the
    /// arenas as well.
    ///
    /// # Safety
    /// Once, by the owner of the last handle.
    pub(super) unsafe fn close(core: NonNull<Self>) -> Option<Leftover> {
        // SAFETY: the caller's handle is still counted, so the core is alive.
        let core = unsafe { Self::keep(core) };
        if core.foreign_process() {
            // The registrations are the parent's; whatever this process has is its copy.
            return None;
        }
        core.grower.stop();
        core.grower.changes.close();
        {
            let mut registry = core.registry.lock();
            registry.closed = true;
            core.drain_caches(&registry.locals, true);
            registry.locals.clear();
        }
        (core.slabs.start_draining() == Given::Last).then(|| core.tear_down())
    }

    /// Deregisters, unmaps, lets go of the PD, and of the core. Once: by whoever was told that the last
    /// block came back.
    pub(super) fn tear_down(self: &Arc<Self>) -> Leftover {
        if self.foreign_process() {
            return Leftover::default();
        }
        // Waits for the grower to end what it has in hand: one register call at most.
        let arenas = self.arenas.lock().take();
        let Some(mut arenas) = arenas else { return Leftover::default() };
        let left = arenas.take_down();
        drop(arenas);
        // SAFETY: this is the reference made in `build`; `arenas` was there, so it is given back once.
        unsafe { Arc::decrement_strong_count(Arc::as_ptr(self)) };
        left
    }
}
