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

use super::{
    Family, PoolRef,
    alloc::Refused,
    grow::Grower,
    guarded::Guarded,
    line::{Block, Need, Waited},
    posted::Posts,
    rails::Shown,
    share::Beyond,
};
use crate::{
    access::{Access, Keys, PackedKeys},
    arena::{ArenaInfo, Arenas},
    bell::Bell,
    config::{EventHook, Memory, Plan, Range, Watch},
    depot::{Depot, Limits},
    error::{BuildError, FreeError},
    guard::Guard,
    lock::Mutex,
    magazine::{Local, Place},
    outs::Outs,
    page_map::PageMap,
    published::RailTable,
    reentry,
    size_class::PAGE,
    slab::{Entry, Slabs},
    sync::asymmetric_barrier_available,
    sys::{fork, limits, mapping_faults::MapStep},
    thread::Slot,
    tokens::Tokens,
    waiters::Waiters,
};

/// What the handles, the buffers and the threads of one heap share.
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
    /// What of a block's packed keys its users may see: without the rkey, if peers may do nothing.
    #[cfg(feature = "capi")]
    pub(super) keys_mask: u64,
    /// Whether threads may use their magazines without a lock (the kernel has `membarrier`, and nobody wants
    /// hits counted).
    pub(crate) gated: bool,
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
    pub(crate) outs: Outs,
    pub(crate) slabs: Slabs,
    pub(super) depot: Depot,
    pub(super) posts: Posts,
    pub(super) waiters: Waiters<Need, Block>,
    pub(super) waited: Mutex<Waited>,
    pub(super) refused: Refused,
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
    /// A class's, as all that follows. Held while arenas come up and go, for as long as that takes: never by alloc, free or the books.
    pub(super) arenas: Mutex<Option<Arenas>>,
    /// What is told of them; a leaf, held for moments.
    pub(super) shown: Mutex<Arc<Shown>>,
    /// Keys by device, if there is more than one to be asked for.
    pub(super) rails: Option<RailTable>,
    pub(super) grower: Grower,
    /// If buffers are watched; the pool then has no place in threads' rows.
    pub(super) guard: Guarded,
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
    gated: bool,
    wire_base: u64,
    wire_mask: u64,
    tokens: Tokens,
    outs: Outs,
    slabs: Slabs,
    beyond: Option<Beyond>,
    undrained: usize,
    reserved: usize,
    rails: Option<RailTable>,
    grower: Grower,
    watch: Watch,
    hook: Option<EventHook>,
}

impl Core {
    /// Brings up a class's arenas, and makes the heap over what no share has reserved of them, and the
    /// shares' after it. Dropping them undoes it all. `rails`: whether keys are asked for by device.
    pub(super) fn build(
        mut plan: Plan,
        rails: bool,
        family: &Arc<Family>,
    ) -> Result<Vec<Arc<Self>>, BuildError> {
        let (access, stride, pad) = (plan.access, plan.stride, plan.pad);
        let gated = asymmetric_barrier_available() && !plan.count_hits;
        let (shares, ranges) = (std::mem::take(&mut plan.shares), std::mem::take(&mut plan.ranges));
        let name = std::mem::take(&mut plan.name);
        let unreserved = ranges.iter().map(|&(_, len)| len);
        let max_len = unreserved.chain(plan.growth.more.iter().copied()).max().unwrap_or(0);
        let bell = Arc::new(Bell::new());
        let grower = Grower::new(&plan, bell.clone());
        let table = rails.then(|| RailTable::new(plan.slots()));
        let mapping = plan.mapping.clone();
        let (watch, hook) = (plan.watch, plan.hook.clone());
        let fresh = matches!(plan.memory, Memory::Mapped(_));
        let arenas = Arenas::build(plan)?;
        // Changed under locks later on, so made as they are then.
        let _own = reentry::enter();
        let base = arenas.base().as_ptr() as usize;
        let zero_based = access.contains(Access::ZERO_BASED);
        let wire_base = if zero_based { base as u64 } else { 0 };
        let wire_mask = if zero_based { stride as u64 - 1 } else { u64::MAX };
        let slabs = |(start, len): Range, ranges: &[Range], max_len, bell| {
            let table = || mapping.before(MapStep::Table, 0, len, 0);
            let map = || PageMap::new(base + start, len, stride.trailing_zeros());
            let map = table().and_then(|()| map())?;
            let ranges = ranges.iter().map(|&(offset, len)| (offset - start, len));
            let tokens = table().and_then(|()| Tokens::new(&map))?;
            let outs = Outs::new(&map)?;
            let slabs = table().and_then(|()| Slabs::new(map, ranges, max_len, pad, bell))?;
            Ok::<_, io::Error>((tokens, outs, slabs))
        };
        let tables_of = |len: usize| {
            move |source: io::Error| BuildError::Reserve { len: len / PAGE * 4, source }
        };
        // Tables first: once the arenas are in a core, an error is a matter of dropping that.
        let whole = arenas.reserved();
        let (tokens, outs, own) =
            slabs((0, whole), &ranges, max_len, bell).map_err(tables_of(whole))?;
        let mut parts = Vec::with_capacity(shares.len());
        for share in shares {
            let window = Self::window(&share.ranges, stride, whole);
            let longest = share.ranges.iter().map(|&(_, len)| len).max().unwrap_or(0);
            let tables = slabs(window, &share.ranges, longest, Arc::new(Bell::new()))
                .map_err(tables_of(window.1))?;
            parts.push((share, window, tables));
        }
        let class = Self::new(
            Parts {
                name,
                access,
                gated,
                wire_base,
                wire_mask,
                tokens,
                outs,
                slabs: own,
                beyond: None,
                undrained: 1 + parts.len(),
                reserved: parts.iter().map(|(.., (.., slabs))| slabs.capacity()).sum(),
                rails: table,
                grower,
                watch,
                hook: hook.clone(),
            },
            family,
        );
        for standing in arenas.standing() {
            class.prepare_guarded(standing.offset, standing.len, fresh);
            class.publish(&standing);
        }
        if let Some(table) = &class.rails {
            arenas.devices().for_each(|(rail, id, _)| table.open(rail, id));
        }
        let mut cores = vec![class];
        for (share, (start, len), (tokens, outs, slabs)) in parts {
            // What a share has lies in arenas that stand as long as the pool.
            for arena in arenas.standing() {
                if (start..start + len).contains(&arena.offset) {
                    let keys = cores[0].slabs.map().keys_of(base + arena.offset);
                    let keys = keys.unwrap_or(PackedKeys::from_word(0));
                    slabs.map().publish(arena.offset - start, arena.len, keys);
                }
            }
            let share = Parts {
                name: share.name,
                access,
                gated,
                wire_base,
                wire_mask,
                tokens,
                outs,
                slabs,
                beyond: Some(Beyond::new(&cores[0], &share.ranges)),
                undrained: 0,
                reserved: 0,
                rails: None,
                grower: Grower::none(),
                watch,
                hook: hook.clone(),
            };
            cores.push(Self::new(share, family));
        }
        cores[0].show(&arenas);
        *cores[0].arenas.lock() = Some(arenas);
        Ok(cores)
    }

    /// The whole arenas that ranges lie in: from the first one's start, how far.
    fn window(ranges: &[Range], stride: usize, whole: usize) -> Range {
        let start = ranges.first().map_or(0, |&(offset, _)| offset & !(stride - 1));
        let end = ranges.last().map_or(0, |&(offset, len)| (offset + len).next_multiple_of(stride));
        (start, end.min(whole) - start)
    }

    fn new(parts: Parts, family: &Arc<Family>) -> Arc<Self> {
        let Parts { name, access, wire_base, wire_mask, tokens, outs, slabs, beyond, .. } = parts;
        let watched = parts.watch.any();
        let slot = if watched { Slot::none() } else { Slot::take() };
        static IDS: AtomicU64 = AtomicU64::new(1);
        Arc::new_cyclic(|own| Self {
            own: own.clone(),
            slot_offset: slot.offset(),
            wire_base,
            wire_mask,
            remote: access.is_remote(),
            #[cfg(feature = "capi")]
            keys_mask: if access.is_remote() { u64::MAX } else { u32::MAX.into() },
            gated: parts.gated,
            access,
            // What a guarded buffer's layout says is never all there is to know.
            odd: AtomicUsize::new(usize::from(watched)),
            id: IDS.fetch_add(1, Relaxed),
            generation: fork::generation(),
            process: limits::process_id(),
            tokens,
            depot: Depot::new(Limits::new(
                slabs.capacity(),
                parts.grower.max_capacity.max(slabs.capacity()),
            )),
            outs,
            slabs,
            posts: Posts::default(),
            waiters: Waiters::new(),
            waited: Mutex::new(Waited::new()),
            refused: Refused::new(),
            registry: Mutex::new(Registry { closed: false, locals: Vec::new() }),
            scarce: AtomicU32::new(0),
            recalls: AtomicU64::new(0),
            family: family.clone(),
            name,
            beyond,
            undrained: AtomicUsize::new(parts.undrained),
            reserved: parts.reserved,
            shown: Mutex::new(Arc::default()),
            rails: parts.rails,
            grower: parts.grower,
            guard: watched.then(|| Arc::new(Guard::new(parts.watch, parts.hook))),
            arenas: Mutex::new(None),
            slot,
        })
    }

    /// Turns the reference that `build` gave into the one that stands for handles and buffers. Given back
    /// when the heap has drained, and a class's when its arenas go.
    pub(super) fn settle(core: Arc<Self>) -> NonNull<Self> {
        // SAFETY: `Arc::into_raw` never gives null.
        unsafe { NonNull::new_unchecked(Arc::into_raw(core).cast_mut()) }
    }

    /// A class's arenas on its only device.
    pub(super) fn infos(&self) -> Vec<ArenaInfo> {
        self.shown().map_or_else(Vec::new, |shown| shown.infos())
    }

    /// What is told of arenas and devices; `None` in a forked child whose copy was being written.
    pub(super) fn shown(&self) -> Option<Arc<Shown>> {
        let shown = if self.foreign() { self.shown.try_lock()? } else { self.shown.lock() };
        Some(shown.clone())
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

    pub(crate) fn has_place(&self) -> bool {
        self.slot.has_place()
    }

    /// Whether this is a forked child of the process that built the pool, as far as a fork handler can
    /// tell: a child made by the bare system call goes unnoticed until it closes the pool.
    pub(crate) fn foreign(&self) -> bool {
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
        (ptr.as_ptr() as u64).wrapping_sub(self.wire_base) & self.wire_mask
    }

    /// Takes back a block that is out as a bare address.
    #[inline(always)]
    pub(super) fn take_raw(&self, ptr: *mut u8) -> Result<(Entry, Place), FreeError> {
        // An address that has a mark is not null.
        match (self.outs.clear(ptr as usize), NonNull::new(ptr)) {
            (Some(place), Some(ptr)) => {
                Ok((Entry { ptr, keys: self.slabs.map().keys_at(ptr) }, place))
            }
            _ => Err(self.slabs.refusal(ptr as usize)),
        }
    }
}
