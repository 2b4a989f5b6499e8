//! What all handles, buffers and threads of one pool share, and how it comes to be. The parts of its work
//! stand beside it: `alloc`, `free`, `threads`, `teardown`, `books`.
//!
//! **Who keeps what alive.** No count is kept per buffer. The [`Core`] has one strong reference that
//! stands for all handles and all buffers together. When the last handle goes, [`Core::close`] takes all
//! caches away, for good, so that every free meets the slabs' lock, where what is still out is counted;
//! whoever brings that to zero takes the arenas down and drops the reference.

use std::{
    ptr::NonNull,
    sync::{
        Arc, Weak,
        atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering::Relaxed},
    },
};

use crate::{
    access::Access,
    arena::{ArenaInfo, Arenas},
    config::Plan,
    depot::{Depot, Limits},
    error::BuildError,
    lock::Mutex,
    magazine::Local,
    page_map::PageMap,
    reentry,
    size_class::PAGE,
    slab::Slabs,
    sync::asymmetric_barrier_available,
    sys::{fork, limits, mapping_faults::MapStep},
    thread::Slot,
};

/// What the handles, the buffers and the threads of one pool share.
///
/// Lives while a handle or a buffer does. The first fields are all that the hot path reads; nothing
/// writes to them after the pool was built, but to `odd` when memory is short.
///
/// Aligned so that they share no line with the reference count that slow paths write.
#[repr(C, align(128))]
pub(crate) struct Core {
    pub(crate) slot_offset: u32,
    /// Applied to an address to get the one on the wire: all ones, or an arena's offset mask.
    pub(super) wire_mask: u64,
    pub(crate) remote: bool,
    /// Whether threads may use their magazines without a lock (the kernel has `membarrier`).
    pub(super) gated: bool,
    pub(super) access: Access,
    /// Blocks out that are not of the class that their layout says; see `raw`.
    pub(super) odd: AtomicUsize,
    /// To the core itself, for threads to keep.
    pub(super) own: Weak<Self>,
    pub(crate) id: u64,
    /// The fork generation and process that built the pool.
    pub(super) generation: u32,
    pub(super) process: u32,
    pub(crate) slabs: Slabs,
    pub(super) depot: Depot,
    pub(super) registry: Mutex<Registry>,
    /// When positive, refills take single blocks: memory ran short a moment ago.
    pub(super) scarce: AtomicU32,
    /// How often caches were emptied into the slabs. Counted after the blocks are there.
    pub(super) recalls: AtomicU64,
    pub(super) handles: AtomicUsize,
    pub(super) arenas: Mutex<Option<Arenas>>,
    pub(super) infos: Vec<ArenaInfo>,
    pub(super) register_calls: u64,
    pub(super) slot: Slot,
}

pub(super) struct Registry {
    pub(super) closed: bool,
    pub(super) locals: Vec<Arc<Local>>,
}

impl Core {
    pub(super) fn build(mut plan: Plan) -> Result<NonNull<Self>, BuildError> {
        let arenas = Arenas::build(&mut plan)?;
        // Changed under locks later on, so made as they are then.
        let _own = reentry::enter();
        let tables = |source| BuildError::Reserve { len: plan.capacity / PAGE * 4, source };
        let base = arenas.base().as_ptr() as usize;
        let table = || plan.mapping.before(MapStep::Table, 0, arenas.reserved(), 0);
        let map = || PageMap::new(base, arenas.reserved(), plan.stride.trailing_zeros());
        let map = table().and_then(|()| map()).map_err(tables)?;
        for (offset, len, keys) in arenas.ranges() {
            map.publish(offset, len, keys);
        }
        let ranges = arenas.ranges().map(|(offset, len, _)| (offset, len));
        let slabs = table().and_then(|()| Slabs::new(map, ranges, plan.pad));
        let slabs = slabs.map_err(tables)?;
        let slot = Slot::take();
        static IDS: AtomicU64 = AtomicU64::new(1);
        let zero_based = plan.access.contains(Access::ZERO_BASED);
        let core = Arc::new_cyclic(|own| Self {
            own: own.clone(),
            slot_offset: slot.offset(),
            wire_mask: if zero_based { plan.stride as u64 - 1 } else { u64::MAX },
            remote: plan.access.is_remote(),
            gated: asymmetric_barrier_available(),
            access: plan.access,
            odd: AtomicUsize::new(0),
            id: IDS.fetch_add(1, Relaxed),
            generation: fork::generation(),
            process: limits::process_id(),
            slabs,
            depot: Depot::new(Limits { capacity: plan.capacity }),
            registry: Mutex::new(Registry { closed: false, locals: Vec::new() }),
            scarce: AtomicU32::new(0),
            recalls: AtomicU64::new(0),
            handles: AtomicUsize::new(1),
            infos: arenas.infos(plan.access),
            register_calls: arenas.register_calls(),
            arenas: Mutex::new(Some(arenas)),
            slot,
        });
        // This reference is given back by `tear_down`.
        let core = Arc::into_raw(core).cast_mut();
        // SAFETY: `Arc::into_raw` never gives null.
        Ok(unsafe { NonNull::new_unchecked(core) })
    }

    /// A reference that keeps the core's memory while this thread is in a slow path, in which another
    /// thread may bring the pool to its end.
    ///
    /// # Safety
    /// `core` is alive: the caller has a handle or a live buffer.
    pub(super) unsafe fn keep(core: NonNull<Self>) -> Arc<Self> {
        // SAFETY: the pointer came from `Arc::into_raw` in `build`, and is alive (contract).
        unsafe {
            Arc::increment_strong_count(core.as_ptr());
            Arc::from_raw(core.as_ptr())
        }
    }

    pub(crate) fn has_gates(&self) -> bool {
        self.slot.has_gates()
    }

    /// Whether this is a forked child of the process that built the pool, as far as a fork handler can
    /// tell: a child made by the bare system call goes unnoticed until it closes the pool.
    pub(super) fn foreign(&self) -> bool {
        fork::generation() != self.generation
    }

    /// Whether this is another process than the one that built the pool; asks the system.
    pub(super) fn foreign_process(&self) -> bool {
        limits::process_id() != self.process
    }

    /// The address that the device knows a byte by.
    #[inline(always)]
    pub(crate) fn wire_addr(&self, ptr: NonNull<u8>) -> u64 {
        ptr.as_ptr() as u64 & self.wire_mask
    }
}
