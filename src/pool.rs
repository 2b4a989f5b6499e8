//! The pool: the only orchestrator. Start-up, alloc, free and teardown each read top to bottom here; the
//! layers below know nothing of one another's order.
//!
//! **Who keeps what alive.** No count is kept per buffer. The [`Core`] has one strong reference that
//! stands for all handles and all buffers together. When the last handle goes, [`Core::close`] takes all
//! caches away, for good, so that every free meets the slabs' lock, where what is still out is counted;
//! whoever brings that to zero takes the arenas down and drops the reference.

use std::{
    fmt,
    ptr::NonNull,
    sync::{
        Arc, Weak,
        atomic::{
            AtomicU32, AtomicU64, AtomicUsize,
            Ordering::{AcqRel, Acquire, Relaxed, Release},
        },
    },
};

use crate::{
    access::{Access, Keys, PackedKeys},
    arena::{ArenaInfo, Arenas, Leftover},
    batch::Batch,
    buf::Buf,
    config::{Builder, Plan},
    depot::{Depot, Limits},
    error::{AllocError, BuildError, CloseError, Exhausted, FreeError},
    local::LocalPool,
    magazine::{Local, Place, ThreadGate},
    page_map::PageMap,
    reentry::{self, Mutex},
    size_class::{self, CLASSES, MAX_BLOCK, MAX_SLAB_BLOCK, MIN_BLOCK, PAGE, SPAN_CLASS},
    slab::{Entry, Given, Slabs},
    stats::Stats,
    sync::asymmetric_barrier_available,
    sys::{fork, limits},
    thread::{self, Slot},
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
    wire_mask: u64,
    pub(crate) remote: bool,
    /// Whether threads may use their magazines without a lock (the kernel has `membarrier`).
    gated: bool,
    access: Access,
    /// Raw blocks out that are not of the class that their layout says; see `raw`.
    pub(crate) odd: AtomicUsize,
    /// To the core itself, for threads to keep.
    own: Weak<Self>,
    pub(crate) id: u64,
    /// The fork generation and process that built the pool.
    generation: u32,
    process: u32,
    pub(crate) slabs: Slabs,
    depot: Depot,
    registry: Mutex<Registry>,
    /// When positive, refills take single blocks: memory ran short a moment ago.
    scarce: AtomicU32,
    /// How often caches were emptied into the slabs. Counted after the blocks are there.
    recalls: AtomicU64,
    handles: AtomicUsize,
    arenas: Mutex<Option<Arenas>>,
    infos: Vec<ArenaInfo>,
    register_calls: u64,
    slot: Slot,
}

struct Registry {
    closed: bool,
    locals: Vec<Arc<Local>>,
}

/// How many blocks one refill takes from the slabs at most.
const REFILL: usize = 64;
/// How many refills stay small after memory ran short.
const SCARCE_REFILLS: u32 = 64;

// --- start-up -----------------------------------------------------------------------------------

impl Core {
    fn build(mut plan: Plan) -> Result<NonNull<Self>, BuildError> {
        let arenas = Arenas::build(&mut plan)?;
        // Changed under locks later on, so made as they are then.
        let _own = reentry::enter();
        let tables = |source| BuildError::Reserve { len: plan.capacity / PAGE * 4, source };
        let base = arenas.base().as_ptr() as usize;
        let map = PageMap::new(base, arenas.reserved(), plan.stride.trailing_zeros());
        let map = map.map_err(tables)?;
        for (offset, len, keys) in arenas.ranges() {
            map.publish(offset, len, keys);
        }
        let ranges = arenas.ranges().map(|(offset, len, _)| (offset, len));
        let slabs = Slabs::new(map, ranges, plan.pad).map_err(tables)?;
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
    unsafe fn keep(core: NonNull<Self>) -> Arc<Self> {
        // SAFETY: the pointer came from `Arc::into_raw` in `build`, and is alive (contract).
        unsafe {
            Arc::increment_strong_count(core.as_ptr());
            Arc::from_raw(core.as_ptr())
        }
    }

    pub(crate) fn depot(&self) -> &Depot {
        &self.depot
    }

    pub(crate) fn has_gates(&self) -> bool {
        self.slot.has_gates()
    }

    /// Whether this is a forked child of the process that built the pool, as far as a fork handler can
    /// tell: a child made by the bare system call goes unnoticed until it closes the pool.
    fn foreign(&self) -> bool {
        fork::generation() != self.generation
    }

    /// Whether this is another process than the one that built the pool; asks the system.
    fn foreign_process(&self) -> bool {
        limits::process_id() != self.process
    }

    /// The address that the device knows a byte by.
    #[inline(always)]
    pub(crate) fn wire_addr(&self, ptr: NonNull<u8>) -> u64 {
        ptr.as_ptr() as u64 & self.wire_mask
    }
}

// --- alloc --------------------------------------------------------------------------------------

impl Core {
    /// Everything that the magazine at hand could not serve: any length, any alignment. For why it failed,
    /// see [`refusal`](Core::refusal).
    pub(crate) fn alloc_slow(&self, len: usize, align: usize) -> Option<(Entry, usize)> {
        if self.foreign() || self.out_of_range(len, align).is_some() {
            return None;
        }
        let class = self.class_for(len, align);
        let cached = if class < CLASSES {
            self.alloc_cached(class)
        } else {
            self.consolidate(len);
            None
        };
        let fit = size_class::class_of_aligned(len.max(1), align.min(PAGE));
        cached.map(|e| (e, class)).or_else(|| self.alloc_shared(class, fit, len, align))
    }

    /// What no pool like this one can ever serve.
    fn out_of_range(&self, len: usize, align: usize) -> Option<AllocError> {
        let max = self.slabs.max_len();
        if len > max {
            return Some(AllocError::TooLarge { asked: len, max });
        }
        let bad = !align.is_power_of_two() || align > max;
        bad.then(|| AllocError::Alignment { asked: align, max: 1 << max.ilog2() })
    }

    /// The class whose blocks hold `len` bytes so aligned, or a span's.
    fn class_for(&self, len: usize, align: usize) -> usize {
        if align > PAGE {
            return SPAN_CLASS;
        }
        let class = size_class::class_of_aligned(len.max(1), align);
        // Blocks of coloured slabs keep no more than a line's alignment.
        let fits = self.slabs.serves(class)
            && align <= size_class::align_of(self.slabs.stride(class)).max(1);
        if fits { class } else { SPAN_CLASS }
    }

    /// Why [`alloc_slow`](Core::alloc_slow) gave nothing.
    #[cold]
    pub(crate) fn refusal(&self, len: usize, align: usize) -> AllocError {
        if self.foreign() {
            let this = limits::process_id();
            return AllocError::ForeignProcess { owner: self.process, this };
        }
        self.out_of_range(len, align)
            .unwrap_or_else(|| self.exhausted(len, self.class_for(len, align)))
    }

    /// Through this thread's magazines: previous magazine, then depot, then slabs.
    fn alloc_cached(&self, class: usize) -> Option<Entry> {
        thread::with_local(self, |local| {
            // SAFETY: `with_local` gives this thread's own, and this thread is not inside its gate.
            let mut hold = unsafe { local.hold_as_owner() };
            if !hold.attached() {
                return None;
            }
            let mut entry = hold.pop(class);
            if entry.is_none() {
                if !hold.reload(&self.depot, class) {
                    if size_class::size_of(class) > MAX_SLAB_BLOCK {
                        // Calling back takes this thread's lock too.
                        drop(hold);
                        self.consolidate(size_class::size_of(class));
                        // SAFETY: as above.
                        hold = unsafe { local.hold_as_owner() };
                    }
                    hold.fill(&self.depot, class, |room, sink| {
                        self.slabs.take(class, self.refill(room), sink);
                    });
                }
                entry = hold.pop(class);
            }
            if self.gated {
                hold.publish();
            }
            entry
        })
        .flatten()
    }

    fn refill(&self, room: usize) -> usize {
        let scarce = |n: u32| n.checked_sub(1);
        if self.scarce.load(Relaxed) > 0
            && self.scarce.fetch_update(Relaxed, Relaxed, scarce).is_ok()
        {
            return 1;
        }
        room.min(REFILL)
    }

    /// Straight from the slabs, and if they are dry after calling back what lies in caches. `class` is the
    /// one to take from, or a span's; `fit` the smallest whose blocks hold it in any case.
    fn alloc_shared(
        &self,
        class: usize,
        fit: usize,
        len: usize,
        align: usize,
    ) -> Option<(Entry, usize)> {
        // Threads that allocate meanwhile may take what was called back; try again while anything is
        // found, but not for ever.
        for _ in 0..64 {
            // Pairs with the count in `drain_caches`: what is counted here is seen below.
            let recalls = self.recalls.load(Acquire);
            let mut got = None;
            if class < CLASSES {
                self.slabs.take(class, 1, |entry| got = Some((entry, class)));
            }
            // Where no slab can be cut any more, single pages may be left, or larger blocks.
            got = got
                .or_else(|| self.slabs.take_span(len, align).map(|e| (e, SPAN_CLASS)))
                .or_else(|| self.slabs.take_larger(fit, align));
            if got.is_some() {
                return got;
            }
            // Nothing in the caches means nothing at all only if no other thread emptied them between
            // the look at the slabs and the look at the caches.
            if !self.call_back() && self.recalls.load(Acquire) == recalls {
                return None;
            }
            self.scarce.store(SCARCE_REFILLS, Relaxed);
        }
        None
    }

    /// Before a run of `bytes` is cut: calls caches back if it is time to.
    fn consolidate(&self, bytes: usize) {
        if self.slabs.consolidation_due(bytes) {
            self.call_back();
        }
    }

    /// Empties the depot and every thread's magazines into the slabs. False if there was nothing.
    fn call_back(&self) -> bool {
        self.slabs.consolidated();
        let registry = self.registry.lock();
        self.drain_caches(&registry.locals, false)
    }

    /// The caller holds the registry's lock, under which `locals` cannot change. Says whether there was
    /// anything.
    ///
    /// Magazines go from thread to thread through the depot alone, and from or to it only under the
    /// thread's lock; all those are held until the depot is empty too, so none slips by.
    fn drain_caches(&self, locals: &[Arc<Local>], detach: bool) -> bool {
        let mut found = false;
        let mut holds = Local::hold_all(locals);
        for hold in &mut holds {
            hold.drain(&self.depot, |class, m| {
                found = true;
                self.empty_out(class, m);
            });
            if detach {
                hold.detach();
            }
        }
        for class in 0..CLASSES {
            while let Some(m) = self.depot.get_full(class) {
                found = true;
                self.empty_out(class, m);
            }
        }
        if found {
            self.recalls.fetch_add(1, Release);
        }
        found
    }

    /// Gives a magazine's blocks to the slabs and puts it by.
    fn empty_out(&self, class: usize, m: crate::depot::Magazine) {
        let given = self.slabs.give(self.depot.entries(&m).iter().map(|e| e.ptr));
        // Magazines are emptied while the pool is open, or by `close` before it starts draining.
        debug_assert_eq!(given, Given::More);
        self.depot.put_empty(class, m);
    }

    fn exhausted(&self, asked: usize, class: usize) -> AllocError {
        let stats = self.stats();
        let block = if class < CLASSES {
            size_class::size_of(class)
        } else {
            asked.max(1).next_multiple_of(PAGE)
        };
        AllocError::Exhausted(Box::new(Exhausted {
            asked,
            block,
            capacity: stats.capacity,
            live: stats.live,
            live_buffers: stats.live_buffers,
            not_live: stats.capacity - stats.live,
            largest_free: stats.largest_free,
        }))
    }
}

// --- free ---------------------------------------------------------------------------------------

impl Core {
    /// Everything that the magazine at hand had no room for.
    ///
    /// # Safety
    /// `entry` is a block of `core`, of the class at `place`, that the caller owns, and gives up.
    #[cold]
    #[inline(never)]
    pub(crate) unsafe fn free_slow(core: NonNull<Self>, entry: Entry, place: Place) {
        let class = place.class();
        // SAFETY: the caller's block is live, so the core is, until the block has been given back.
        let this = unsafe { core.as_ref() };
        // SAFETY: this thread's own gate, which lives as long as the thread.
        let gate = unsafe { &*thread::gate_at(this.slot_offset) };
        if gate.push_previous(&this.depot, place, entry) {
            return;
        }
        // A child owns none of this; its copy of the books just keeps the block.
        if this.foreign() || (class < CLASSES && this.free_cached(entry, class)) {
            return;
        }
        // SAFETY: as above. From the next line on another thread may be the one that ends the pool.
        let core = unsafe { Self::keep(core) };
        if core.slabs.give(std::iter::once(entry.ptr)) == Given::Last {
            core.tear_down();
        }
    }

    /// Puts a block into this thread's magazines; false if it has none. Once the block is in and the
    /// thread's lock released, the core may be gone.
    fn free_cached(&self, entry: Entry, class: usize) -> bool {
        thread::with_local(self, |local| {
            // SAFETY: `with_local` gives this thread's own, and this thread is not inside its gate.
            let mut hold = unsafe { local.hold_as_owner() };
            if !hold.attached() {
                return false;
            }
            if !hold.push(class, entry) {
                if let Some(surplus) = hold.make_room(&self.depot, class) {
                    self.empty_out(class, surplus);
                }
                let pushed = hold.push(class, entry);
                debug_assert!(pushed, "room was just made");
            }
            if self.gated {
                hold.publish();
            }
            true
        })
        .unwrap_or(false)
    }
}

// --- threads ------------------------------------------------------------------------------------

impl Core {
    /// Enters a thread's magazines into the registry; `None` once the pool is closed.
    pub(crate) fn attach(&self, local: &Arc<Local>) -> Option<Weak<Self>> {
        let mut registry = self.registry.lock();
        if registry.closed {
            return None;
        }
        registry.locals.push(local.clone());
        Some(self.own.clone())
    }

    /// Takes back what a thread that ends has in its magazines.
    pub(crate) fn detach(&self, local: &Arc<Local>) {
        if self.foreign() {
            return;
        }
        let mut registry = self.registry.lock();
        registry.locals.retain(|l| !Arc::ptr_eq(l, local));
        // SAFETY: called by the thread's own destructor, outside its gate.
        let mut hold = unsafe { local.hold_as_owner() };
        if hold.attached() {
            hold.drain(&self.depot, |class, m| {
                if let Err(m) = self.depot.put_full(class, m) {
                    self.empty_out(class, m);
                }
            });
            hold.detach();
        }
    }
}

// --- teardown -----------------------------------------------------------------------------------

impl Core {
    /// Called when the last handle goes: takes all caches away for good, and if no buffer is out, the
    /// arenas as well.
    ///
    /// # Safety
    /// Once, by the owner of the last handle.
    unsafe fn close(core: NonNull<Self>) -> Option<Leftover> {
        // SAFETY: the caller's handle is still counted, so the core is alive.
        let core = unsafe { Self::keep(core) };
        if core.foreign_process() {
            // The registrations are the parent's; whatever this process has is its copy.
            return None;
        }
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
    fn tear_down(self: &Arc<Self>) -> Leftover {
        if self.foreign_process() {
            return Leftover::default();
        }
        let arenas = self.arenas.lock().take();
        let Some(mut arenas) = arenas else { return Leftover::default() };
        let left = arenas.take_down();
        drop(arenas);
        // SAFETY: this is the reference made in `build`; `arenas` was there, so it is given back once.
        unsafe { Arc::decrement_strong_count(Arc::as_ptr(self)) };
        left
    }
}

// --- books --------------------------------------------------------------------------------------

impl Core {
    /// Blocks in magazines and depot, by class.
    fn cached(&self) -> [usize; CLASSES + 1] {
        let mut sum = [0; CLASSES + 1];
        let registry = self.registry.lock();
        // Held until the depot is counted too: no magazine moves meanwhile.
        let holds = Local::hold_all(&registry.locals);
        for hold in &holds {
            hold.count_into(&self.depot, &mut sum);
        }
        for (class, sum) in sum.iter_mut().enumerate().take(CLASSES) {
            *sum += self.depot.blocks(class);
        }
        sum
    }

    fn stats(&self) -> Stats {
        let mut stats = if self.foreign() {
            // Locks may have been held by threads that this process does not have.
            Stats::new(&self.slabs.counts_at_fork(), &[0; CLASSES + 1], self.slabs.capacity())
        } else {
            Stats::new(&self.slabs.counts(), &self.cached(), self.slabs.capacity())
        };
        stats.arenas = self.infos.len();
        stats.register_calls = self.register_calls;
        stats.table_bytes += self.depot.table_bytes();
        stats
    }
}

// --- the handle ---------------------------------------------------------------------------------

/// A pool of registered buffers. Clones are handles of the same pool.
///
/// The arenas live until the last handle and the last buffer are gone, in any order and on any thread.
pub struct Pool {
    inner: PoolRef,
}

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
    pub(crate) fn alloc(self, gate: *const ThreadGate, len: usize) -> Result<Buf, AllocError> {
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
    fn get(self) -> Option<(Entry, Place)> {
        let addr = self.0 & ((1 << Self::CLASS_SHIFT) - 1);
        let ptr = NonNull::new(addr as *mut u8)?;
        let keys = PackedKeys::from_word(self.1);
        Some((Entry { ptr, keys }, Place::of((self.0 >> Self::CLASS_SHIFT) as usize)))
    }
}

// SAFETY: a handle leads to a `Core`, all of whose shared parts are atomic or locked, and whose
// thread-bound parts are found through the calling thread's own gate.
unsafe impl Send for Pool {}
// SAFETY: as above.
unsafe impl Sync for Pool {}

// A panic leaves a pool as usable as before: no call of it runs code of the user's while it holds a lock or
// is inside a gate.
impl std::panic::UnwindSafe for Pool {}
impl std::panic::RefUnwindSafe for Pool {}

impl Clone for Pool {
    fn clone(&self) -> Self {
        self.core().handles.fetch_add(1, Relaxed);
        Self { inner: self.inner }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        // Release what this handle did, acquire what the others did.
        if self.core().handles.fetch_sub(1, AcqRel) == 1 {
            // SAFETY: the count says that this was the last handle.
            unsafe { Core::close(self.inner.core) };
        }
    }
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pool")
            .field("capacity", &self.capacity())
            .field("access", &self.access())
            .field("arenas", &self.core().infos.len())
            .finish_non_exhaustive()
    }
}

impl Pool {
    /// Starts to describe a pool.
    pub fn builder() -> Builder {
        Builder::default()
    }

    pub(crate) fn from_plan(plan: Plan) -> Result<Self, BuildError> {
        let core = Core::build(plan)?;
        // SAFETY: built just now, with this handle counted.
        let slot_offset = unsafe { core.as_ref() }.slot_offset;
        Ok(Self { inner: PoolRef { core, slot_offset } })
    }

    #[inline(always)]
    pub(crate) fn core(&self) -> &Core {
        // SAFETY: the core lives while a handle does, and this is one.
        unsafe { self.inner.core.as_ref() }
    }

    #[inline(always)]
    pub(crate) fn inner(&self) -> PoolRef {
        self.inner
    }

    /// Allocates a buffer of `len` bytes, 64-byte aligned, on whole pages' alignment if its block is a
    /// multiple of 4 KiB (and the pool is not [coloured](Builder::colouring)).
    ///
    /// A length of 0 gives a valid buffer of length 0. The bytes are zero or what an earlier owner left.
    ///
    /// # Errors
    /// [`AllocError::TooLarge`] above the size of an arena, [`AllocError::Exhausted`] with the books
    /// when nothing is left, in other threads' caches neither.
    #[inline]
    pub fn alloc(&self, len: usize) -> Result<Buf, AllocError> {
        self.inner.alloc(thread::gate_at(self.inner.slot_offset), len)
    }

    /// The slow path alone, for callers that have been at the magazine already.
    pub(crate) fn alloc_uncached(&self, len: usize, align: usize) -> Result<Buf, AllocError> {
        match self.core().alloc_slow(len, align) {
            Some((entry, class)) => Ok(Buf::new(self.inner, entry, len, Place::of(class))),
            None => Err(self.core().refusal(len, align)),
        }
    }

    /// Allocates a buffer of `len` zero bytes.
    ///
    /// # Errors
    /// As [`alloc`](Pool::alloc).
    pub fn alloc_zeroed(&self, len: usize) -> Result<Buf, AllocError> {
        let mut buf = self.alloc(len)?;
        buf.fill(0);
        Ok(buf)
    }

    /// Allocates a buffer for a layout: of its size, at a multiple of its alignment.
    ///
    /// # Errors
    /// As [`alloc`](Pool::alloc), and [`AllocError::Alignment`] if it is larger than an arena.
    pub fn alloc_layout(&self, layout: std::alloc::Layout) -> Result<Buf, AllocError> {
        if layout.align() <= MIN_BLOCK {
            return self.alloc(layout.size());
        }
        self.alloc_uncached(layout.size(), layout.align())
    }

    /// Adds up to `n` buffers of `len` bytes to a batch, as many as it has room for, without allocating;
    /// returns how many there were to be had: at least one, unless none was asked for or fits.
    ///
    /// An empty batch takes on pool and length; one that is not empty must hold buffers of both.
    ///
    /// # Errors
    /// As [`alloc`](Pool::alloc), when not even one could be had; [`AllocError::BatchInUse`] and
    /// [`AllocError::BatchMixed`]. The batch keeps what it holds.
    pub fn alloc_many(&self, batch: &mut Batch, len: usize, n: usize) -> Result<usize, AllocError> {
        batch.refill(self, len, n)
    }

    /// Gives all buffers of a batch back and keeps the batch for the next time.
    #[inline]
    pub fn free_many(&self, batch: &mut Batch) {
        batch.free();
    }

    /// Makes a handle for this thread that allocates without looking for the thread's magazines.
    pub fn local(&self) -> LocalPool {
        LocalPool::new(self.clone())
    }

    /// The keys of the region that holds `ptr`; `None` if it does not point into this pool's arenas.
    /// Any pointer may be asked for, and none is followed. Takes no lock.
    #[inline]
    pub fn keys_of<T: ?Sized>(&self, ptr: *const T) -> Option<Keys> {
        let core = self.core();
        let keys = core.slabs.map().keys_of(ptr.cast::<u8>() as usize)?;
        Some(Keys { lkey: keys.lkey(), rkey: core.remote.then_some(keys.rkey()) })
    }

    /// Takes back what [`Buf::into_raw`] gave up. Its length is the block's.
    ///
    /// # Errors
    /// [`FreeError`] for every pointer that is not out as a raw buffer of this pool: null, foreign,
    /// interior, or taken back already. Nothing is then changed.
    ///
    /// # Safety
    /// Whoever was given the pointer has stopped using the bytes, or gives that right up to the caller.
    #[allow(clippy::wrong_self_convention)] // The pool is not the pointer's target but its source.
    pub unsafe fn from_raw(&self, ptr: *mut u8) -> Result<Buf, FreeError> {
        let core = self.core();
        let (entry, class) = core.slabs.clear_out(ptr as usize)?;
        let len = core.slabs.block_len(entry.ptr, class);
        Ok(Buf::new(self.inner, entry, len, Place::of(class)))
    }

    /// Frees what [`Buf::into_raw`] gave up.
    ///
    /// # Errors
    /// As [`from_raw`](Pool::from_raw).
    ///
    /// # Safety
    /// As [`from_raw`](Pool::from_raw).
    pub unsafe fn free_raw(&self, ptr: *mut u8) -> Result<(), FreeError> {
        // SAFETY: the caller's promise, passed on.
        unsafe { self.from_raw(ptr) }.map(drop)
    }

    /// Sums up where the pool's bytes are.
    ///
    /// Takes locks, and sends every thread through its slow path once; not for hot paths. In a forked child
    /// the figures are those of the fork, with blocks in caches counted as live (and all zero if the fork
    /// fell into an update). What the process has pinned is read from `/proc` here, and nowhere else.
    pub fn stats(&self) -> Stats {
        let mut stats = self.core().stats();
        let m = limits::memlock();
        (stats.pinned, stats.locked, stats.memlock_exempt) = (m.pinned, m.locked, m.exempt);
        stats.memlock_limit = (m.soft != u64::MAX).then_some(m.soft);
        stats
    }

    /// Gives what lies in caches, this thread's and all others', back to the slabs, so that other sizes
    /// can use it. Never needed for an alloc to succeed.
    pub fn trim(&self) {
        if !self.core().foreign() {
            self.core().call_back();
        }
    }

    /// The arenas: where each is, what it is made of, its keys, and how long it took to bring up.
    pub fn arenas(&self) -> &[ArenaInfo] {
        &self.core().infos
    }

    /// Bytes of all arenas.
    pub fn capacity(&self) -> usize {
        self.core().slabs.capacity()
    }

    /// The longest buffer that this pool can ever give: one arena.
    pub fn max_len(&self) -> usize {
        self.core().slabs.max_len()
    }

    /// The rights that the arenas were registered with.
    pub fn access(&self) -> Access {
        self.core().access
    }

    /// Closes the pool and says how that went, which dropping the handle cannot.
    ///
    /// # Errors
    /// [`CloseError::Shared`] while other handles exist; the pool is then as before, less this handle.
    /// [`CloseError::Live`] while buffers are out: the last one to be freed tears it down.
    /// [`CloseError::Deregister`] if the device would not let go.
    pub fn close(self) -> Result<(), CloseError> {
        let this = std::mem::ManuallyDrop::new(self);
        let before = this.core().handles.fetch_sub(1, AcqRel);
        if before > 1 {
            return Err(CloseError::Shared(before - 1));
        }
        // SAFETY: the core is alive until `close` below; this keeps its memory for the books after it.
        let core = unsafe { Core::keep(this.inner.core) };
        // SAFETY: the count said that this was the last handle, and its `Drop` does not run.
        let left = unsafe { Core::close(this.inner.core) };
        match left {
            Some(Leftover { arenas, bytes, first: Some(first) }) => {
                Err(CloseError::Deregister { arenas, bytes, first })
            }
            Some(_) => Ok(()),
            None if core.foreign_process() => {
                Err(CloseError::ForeignProcess { owner: core.process, this: limits::process_id() })
            }
            None => {
                let stats = core.stats();
                Err(CloseError::Live { buffers: stats.live_buffers, bytes: stats.live })
            }
        }
    }

    /// Walks all tables and panics on the first contradiction. For tests; takes every lock.
    #[cfg(any(test, feature = "fault"))]
    pub fn check(&self) {
        self.core().slabs.check();
        let stats = self.core().stats();
        assert!(stats.balanced(), "{stats:#?}");
    }
}
