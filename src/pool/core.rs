//! What all handles, buffers and threads of one heap share, and how it comes to be: an access class's heap
//! with its arenas, or a share's over a part of them. The parts of its work stand beside it: `alloc`,
//! `free`, `threads`, `teardown`, `books`; what the heaps of one pool have together is in `family`.
//!
//! **Who keeps what alive.** No count is kept per buffer. The [`Core`] has one strong reference that
//! stands for all handles and all its buffers together. When the last handle goes, [`Core::close`] takes
//! all caches away, for good, so that every free meets the slabs' lock, where what is still out is counted.
//! Whoever brings that to zero drops the reference; but a class's core stays, and its arenas, until its
//! shares' have gone too.

use std::{
    io,
    ptr::NonNull,
    sync::{
        Arc, Weak,
        atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering::Relaxed},
    },
};

use parking_lot::Mutex;

use super::{Family, PoolRef, share::Beyond};
use crate::{
    access::{Access, Keys},
    arena::{ArenaInfo, Arenas},
    config::{Plan, Range, SharePlan},
    depot::{Depot, Limits},
    error::BuildError,
    magazine::Local,
    page_map::PageMap,
    size_class::PAGE,
    slab::Slabs,
    sync::asymmetric_barrier_available,
    sys::{fork, limits, mapping_faults::MapStep},
    thread::Slot,
};

/// What the handles, the buffers and the threads of one heap share.
///
/// Lives while a handle or a buffer does. The first fields are all that the hot path reads; nothing
/// writes to them after the pool was built.
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
    pub(super) family: Arc<Family>,
    pub(super) name: String,
    /// A share's: where it turns when its reserve is dry.
    pub(super) beyond: Option<Beyond>,
    /// A class's: how many heaps stand on its arenas, itself among them, that have not drained.
    pub(super) undrained: AtomicUsize,
    /// A class's: bytes that its shares have.
    pub(super) reserved: usize,
    /// A class's.
    pub(super) arenas: Mutex<Option<Arenas>>,
    pub(super) infos: Vec<ArenaInfo>,
    pub(super) register_calls: u64,
    pub(super) slot: Slot,
}

pub(super) struct Registry {
    pub(super) closed: bool,
    pub(super) locals: Vec<Arc<Local>>,
}

/// What a class's and a share's core are made of apart.
struct Parts {
    name: String,
    access: Access,
    wire_mask: u64,
    slabs: Slabs,
    beyond: Option<Beyond>,
    undrained: usize,
    reserved: usize,
    arenas: Option<Arenas>,
}

impl Core {
    /// Brings up a class's arenas, and makes the heap over what no share has reserved of them, and the
    /// shares' after it. Dropping them undoes it all.
    pub(super) fn build(
        mut plan: Plan,
        family: &Arc<Family>,
    ) -> Result<Vec<Arc<Self>>, BuildError> {
        let arenas = Arenas::build(&mut plan)?;
        let zero_based = plan.access.contains(Access::ZERO_BASED);
        let wire_mask = if zero_based { plan.stride as u64 - 1 } else { u64::MAX };
        let shares = std::mem::take(&mut plan.shares);
        let slabs = |plan: &Plan, arenas: &Arenas, window, ranges: &[Range]| {
            Self::slabs(arenas, window, ranges, plan)
                .map_err(|source| BuildError::Reserve { len: plan.capacity / PAGE * 4, source })
        };
        // Tables first: once the arenas are in a core, an error is a matter of dropping that.
        let own = slabs(&plan, &arenas, (0, arenas.reserved()), &plan.ranges)?;
        let mut parts = Vec::with_capacity(shares.len());
        for SharePlan { name, ranges } in shares {
            let window = Self::window(&ranges, plan.stride);
            let slabs = slabs(&plan, &arenas, window, &ranges)?;
            parts.push((name, ranges, slabs));
        }
        let class = Parts {
            name: plan.name,
            access: plan.access,
            wire_mask,
            slabs: own,
            beyond: None,
            undrained: 1 + parts.len(),
            reserved: parts.iter().map(|(.., slabs)| slabs.capacity()).sum(),
            arenas: Some(arenas),
        };
        let mut cores = vec![Self::new(class, family)];
        for (name, ranges, slabs) in parts {
            let share = Parts {
                name,
                access: plan.access,
                wire_mask,
                slabs,
                beyond: Some(Beyond::new(&cores[0], &ranges)),
                undrained: 0,
                reserved: 0,
                arenas: None,
            };
            cores.push(Self::new(share, family));
        }
        Ok(cores)
    }

    /// The whole arenas that ranges lie in: from the first one's start, how far.
    fn window(ranges: &[Range], stride: usize) -> Range {
        let start = ranges.first().map_or(0, |&(offset, _)| offset & !(stride - 1));
        let end = ranges.last().map_or(0, |&(offset, len)| (offset + len).next_multiple_of(stride));
        (start, end - start)
    }

    /// Slabs over parts of the arenas, with tables for the window that they lie in.
    fn slabs(
        arenas: &Arenas,
        (start, len): Range,
        ranges: &[Range],
        plan: &Plan,
    ) -> io::Result<Slabs> {
        let base = arenas.base().as_ptr() as usize + start;
        let table = || plan.mapping.before(MapStep::Table, 0, len, 0);
        table()?;
        let map = PageMap::new(base, len, plan.stride.trailing_zeros())?;
        for (offset, arena, keys) in arenas.ranges() {
            if (start..start + len).contains(&offset) {
                map.publish(offset - start, arena, keys);
            }
        }
        let ranges = ranges.iter().map(|&(offset, len)| (offset - start, len));
        table()?;
        Slabs::new(map, ranges, plan.pad)
    }

    fn new(parts: Parts, family: &Arc<Family>) -> Arc<Self> {
        let Parts { name, access, wire_mask, slabs, beyond, undrained, reserved, arenas } = parts;
        let slot = Slot::take();
        static IDS: AtomicU64 = AtomicU64::new(1);
        Arc::new_cyclic(|own| Self {
            own: own.clone(),
            slot_offset: slot.offset(),
            wire_mask,
            remote: access.is_remote(),
            gated: asymmetric_barrier_available(),
            access,
            id: IDS.fetch_add(1, Relaxed),
            generation: fork::generation(),
            process: limits::process_id(),
            depot: Depot::new(Limits { capacity: slabs.capacity() }),
            slabs,
            registry: Mutex::new(Registry { closed: false, locals: Vec::new() }),
            scarce: AtomicU32::new(0),
            recalls: AtomicU64::new(0),
            family: family.clone(),
            name,
            beyond,
            undrained: AtomicUsize::new(undrained),
            reserved,
            infos: arenas.as_ref().map(|a| a.infos(access)).unwrap_or_default(),
            register_calls: arenas.as_ref().map_or(0, Arenas::register_calls),
            arenas: Mutex::new(arenas),
            slot,
        })
    }

    /// Turns the reference that `build` gave into the one that stands for handles and buffers. Given back
    /// when the heap has drained, and a class's when its arenas go.
    pub(super) fn settle(core: Arc<Self>) -> NonNull<Self> {
        // SAFETY: `Arc::into_raw` never gives null.
        unsafe { NonNull::new_unchecked(Arc::into_raw(core).cast_mut()) }
    }

    /// A reference that keeps the core's memory while this thread is in a slow path, in which another
    /// thread may bring the pool to its end.
    ///
    /// # Safety
    /// `core` is alive: the caller has a handle or a live buffer.
    pub(super) unsafe fn keep(core: NonNull<Self>) -> Arc<Self> {
        // SAFETY: the pointer came from `Arc::into_raw` in `settle`, and is alive (contract).
        unsafe {
            Arc::increment_strong_count(core.as_ptr());
            Arc::from_raw(core.as_ptr())
        }
    }

    /// Where this heap is, for a handle or a buffer of it.
    pub(super) fn reference(&self) -> PoolRef {
        // As the reference count's own pointer: `keep` counts through it.
        let core = self.own.as_ptr().cast_mut();
        // SAFETY: a `Weak` of a value that lives, as `self` does, points to it.
        PoolRef { core: unsafe { NonNull::new_unchecked(core) }, slot_offset: self.slot_offset }
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

    /// The keys of the region that holds an address, if one of this class's does.
    #[inline]
    pub(super) fn keys_at(&self, addr: usize) -> Option<Keys> {
        let keys = self.slabs.map().keys_of(addr)?;
        Some(Keys { lkey: keys.lkey(), rkey: self.remote.then_some(keys.rkey()) })
    }

    /// The address that the device knows a byte by.
    #[inline(always)]
    pub(crate) fn wire_addr(&self, ptr: NonNull<u8>) -> u64 {
        ptr.as_ptr() as u64 & self.wire_mask
    }
}
