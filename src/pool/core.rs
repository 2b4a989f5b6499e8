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

use super::{
    grow::Grower,
    posted::Posts,
    rails::Shown,
    wait::{Block, Need, Waited},
};
use crate::{
    access::Access,
    arena::Arenas,
    bell::Bell,
    config::Plan,
    depot::{Depot, Limits},
    error::BuildError,
    lock::{Mutex, MutexGuard},
    magazine::Local,
    page_map::PageMap,
    published::RailTable,
    reentry,
    size_class::PAGE,
    slab::Slabs,
    sync::asymmetric_barrier_available,
    sys::{fork, limits, mapping_faults::MapStep},
    thread::Slot,
    tokens::Tokens,
    waiters::Waiters,
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
    /// Subtracted from an address, before the mask, to get the one on the wire: 0, or where the arenas start.
    pub(super) wire_base: u64,
    /// Applied to what that leaves: all ones, or an arena's offset mask.
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
    pub(crate) tokens: Tokens,
    pub(crate) slabs: Slabs,
    pub(super) depot: Depot,
    pub(super) posts: Posts,
    pub(super) waiters: Waiters<Need, Block>,
    pub(super) waited: Mutex<Waited>,
    pub(super) registry: Mutex<Registry>,
    /// When positive, refills take single blocks: memory ran short a moment ago.
    pub(super) scarce: AtomicU32,
    /// How often caches were emptied into the slabs. Counted after the blocks are there.
    pub(super) recalls: AtomicU64,
    pub(super) handles: AtomicUsize,
    /// Held while arenas come up and go, for as long as that takes: never by alloc, free or the books.
    pub(super) arenas: Mutex<Option<Arenas>>,
    /// What is told of them; a leaf, held for moments.
    pub(super) shown: Mutex<Shown>,
    /// Keys by device, if there is more than one to be asked for.
    pub(super) rails: Option<RailTable>,
    pub(super) grower: Grower,
    pub(super) slot: Slot,
}

pub(super) struct Registry {
    pub(super) closed: bool,
    pub(super) locals: Vec<Arc<Local>>,
}

impl Core {
    /// `rails`: whether keys are asked for by device.
    pub(super) fn build(plan: Plan, rails: bool) -> Result<NonNull<Self>, BuildError> {
        let (access, stride, capacity, pad) = (plan.access, plan.stride, plan.capacity, plan.pad);
        let max_capacity = plan.max_capacity();
        let max_len = (0..plan.slots()).map(|slot| plan.len_of(slot)).max().unwrap_or(0);
        let bell = Arc::new(Bell::new());
        let grower = Grower::new(&plan, bell.clone());
        let rails = rails.then(|| RailTable::new(plan.slots()));
        let mapping = plan.mapping.clone();
        let arenas = Arenas::build(plan)?;
        let tables = |source| BuildError::Reserve { len: arenas.reserved() / PAGE * 4, source };
        // Changed under locks later on, so made as they are then.
        let _own = reentry::enter();
        let base = arenas.base().as_ptr() as usize;
        let table = || mapping.before(MapStep::Table, 0, arenas.reserved(), 0);
        let map = || PageMap::new(base, arenas.reserved(), stride.trailing_zeros());
        let map = table().and_then(|()| map()).map_err(tables)?;
        let ranges = arenas.standing().map(|a| (a.offset, a.len));
        let tokens = table().and_then(|()| Tokens::new(&map)).map_err(tables)?;
        let slabs = table().and_then(|()| Slabs::new(map, ranges, max_len, pad, bell));
        let slabs = slabs.map_err(tables)?;
        let slot = Slot::take();
        static IDS: AtomicU64 = AtomicU64::new(1);
        let zero_based = access.contains(Access::ZERO_BASED);
        let core = Arc::new_cyclic(|own| Self {
            own: own.clone(),
            slot_offset: slot.offset(),
            wire_base: if zero_based { base as u64 } else { 0 },
            wire_mask: if zero_based { stride as u64 - 1 } else { u64::MAX },
            remote: access.is_remote(),
            gated: asymmetric_barrier_available(),
            access,
            odd: AtomicUsize::new(0),
            id: IDS.fetch_add(1, Relaxed),
            generation: fork::generation(),
            process: limits::process_id(),
            tokens,
            slabs,
            posts: Posts::default(),
            waiters: Waiters::new(),
            waited: Mutex::new(Waited::default()),
            depot: Depot::new(Limits::new(capacity, max_capacity)),
            registry: Mutex::new(Registry { closed: false, locals: Vec::new() }),
            scarce: AtomicU32::new(0),
            recalls: AtomicU64::new(0),
            handles: AtomicUsize::new(1),
            shown: Mutex::new(Shown::default()),
            rails,
            grower,
            arenas: Mutex::new(None),
            slot,
        });
        for standing in arenas.standing() {
            core.publish(&standing);
        }
        if let Some(table) = &core.rails {
            arenas.devices().for_each(|(rail, id, _)| table.open(rail, id));
        }
        core.show(&arenas);
        *core.arenas.lock() = Some(arenas);
        // This reference is given back by `tear_down`.
        let core = Arc::into_raw(core).cast_mut();
        // SAFETY: `Arc::into_raw` never gives null.
        let core = unsafe { NonNull::new_unchecked(core) };
        // SAFETY: made just now.
        let this = unsafe { core.as_ref() };
        this.arm_first();
        if this.grower.can_grow()
            && let Err(source) = this.grower.start(&this.own)
        {
            // SAFETY: the one handle that is counted is given out to nobody.
            unsafe { Self::close(core) };
            return Err(BuildError::Thread { source });
        }
        Ok(core)
    }

    /// What is told of arenas and devices; `None` in a forked child whose copy was being written.
    pub(super) fn shown(&self) -> Option<MutexGuard<'_, Shown>> {
        if self.foreign() { self.shown.try_lock() } else { Some(self.shown.lock()) }
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
        (ptr.as_ptr() as u64).wrapping_sub(self.wire_base) & self.wire_mask
    }
}
