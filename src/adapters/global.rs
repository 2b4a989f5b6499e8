//! A global allocator that serves a range of sizes from a pool, and all else from the allocator it wraps.
//!
//! **Dispatch.** An alloc is the pool's if its size is in the range, a free if its address is in the pool's
//! reservation; both are a subtraction and a compare. Before [`attach`](PinnedAlloc::attach) range and
//! reservation are empty, so there is no other state to test for.
//!
//! **No recursion.** The pool's slow paths allocate. They mark their thread while they do ([`crate::reentry`]),
//! and a marked thread is served by the wrapped allocator; what it frees of the pool's is put off until the mark
//! is gone. So is a thread in a forked child, which the
//! pool refuses, and every thread when the pool is out.
//!
//! **No foreign code.** Blocks that come back may be what somebody waits for, and waking them runs their waker,
//! which may take any lock, one that the freeing code holds among them. So a thread of its own does that.
//!
//! **At the ends.** Rows are thread-local memory without a destructor, and the pool is never torn down once
//! it was attached, so both sides work before `main`, while thread-locals are destroyed, and in exit handlers.

use std::{
    alloc::{GlobalAlloc, Layout, System},
    cell::Cell,
    fmt,
    mem::ManuallyDrop,
    ops::RangeInclusive,
    ptr::{self, NonNull},
    sync::atomic::{
        AtomicPtr, AtomicU64, AtomicUsize,
        Ordering::{Acquire, Relaxed, Release},
    },
    thread,
};

use super::slices;
use crate::{
    access::{Keys, RemoteBuf, Sge},
    bell::Bell,
    pool::{Core, Pool, PoolRef},
    reach::OneDevice,
    reentry::{self, Later},
    sys::signals,
};

/// A global allocator whose larger allocations lie in registered memory.
///
/// Until [`attach`](PinnedAlloc::attach) it passes everything on to the allocator it wraps, [`System`] unless
/// another is given. From then on, allocations of the [chosen sizes](PinnedAlloc::sizes) come from the pool;
/// other sizes, and what the pool has no room for, still come from the wrapped one. Memory goes back where it
/// came from, whenever it is freed and by whichever thread.
///
/// An attached pool stays until the process ends, and takes part in it until then: its memory is never
/// unmapped nor deregistered. A forked child goes on with the wrapped allocator; what it frees of the pool's
/// memory stays where it is. A child may only use memory that it inherits if the kernel copies pinned pages
/// at a fork (Linux 5.12 and later), or if libibverbs was not told to keep them from it.
///
/// It never panics, and takes no lock where the pool's own alloc and free take none.
///
/// ```
/// use pinpool::{Device, PinnedAlloc, Pool};
///
/// #[global_allocator]
/// static ALLOC: PinnedAlloc = PinnedAlloc::new();
///
/// fn main() -> Result<(), Box<dyn std::error::Error>> {
///     let early = vec![1u8; 8192];
///     let pool = Pool::builder().device(Device::soft()).capacity(4 << 20).build()?;
///     ALLOC.attach(&pool)?;
///     let late = vec![2u8; 8192];
///     assert!(ALLOC.keys_of(early.as_ptr()).is_none());
///     assert_eq!(ALLOC.keys_of(late.as_ptr()), Some(pool.arenas()[0].keys));
///     Ok(())
/// }
/// ```
pub struct PinnedAlloc<G = System> {
    wrapped: G,
    /// The smallest size that the pool serves, and how many sizes from there on.
    first: usize,
    count: usize,
    /// As `count` while sizes are served, else 0. Stored after the other three, which never change again.
    serving: AtomicUsize,
    /// The attached pool, whose handle is kept for ever.
    core: AtomicPtr<Core>,
    /// Its reservation.
    base: AtomicUsize,
    len: AtomicUsize,
    overflows: AtomicU64,
    /// Wakes the thread that wakes those who wait for a block of the pool. Kept for ever.
    bell: AtomicPtr<Bell>,
}

/// Why a pool was not attached.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AttachError {
    /// Another pool was attached before. Memory of it may be anywhere, so it stays.
    #[error("another pool is attached already, and an allocator keeps its first pool for ever")]
    Attached,
    /// The pool can serve none of the chosen sizes.
    #[error(
        "the sizes to serve begin at {first} bytes, and the pool's longest buffer has {max_len}"
    )]
    Sizes {
        /// The smallest of the chosen sizes.
        first: usize,
        /// The pool's longest buffer.
        max_len: usize,
    },
    /// The thread that wakes those who wait for the pool's buffers could not be started.
    #[error("no thread could be started to wake those who wait for buffers (errno {errno})")]
    Thread {
        /// The system's errno, or 0.
        errno: i32,
    },
}

impl PinnedAlloc {
    /// Makes an allocator over [`System`], for sizes of 4 KiB and above.
    pub const fn new() -> Self {
        Self::over(System)
    }
}

impl Default for PinnedAlloc {
    fn default() -> Self {
        Self::new()
    }
}

impl<G> PinnedAlloc<G> {
    /// Makes an allocator over another one, for sizes of 4 KiB and above.
    ///
    /// The other one may call the global allocator, and so this, for instance to log, and may hold locks of its own
    /// meanwhile: it is not called under a lock that this waits for. With two exceptions, for which it must hold
    /// none: pools with [guards](crate::Builder::guards) or [tracking](crate::Builder::track), and while somebody
    /// waits for a buffer of the pool ([`Pool::alloc_wait`] and its kin).
    pub const fn over(wrapped: G) -> Self {
        Self {
            wrapped,
            first: 0,
            count: 0,
            serving: AtomicUsize::new(0),
            core: AtomicPtr::new(ptr::null_mut()),
            base: AtomicUsize::new(0),
            len: AtomicUsize::new(0),
            overflows: AtomicU64::new(0),
            bell: AtomicPtr::new(ptr::null_mut()),
        }
        .sizes(4096..=usize::MAX)
    }

    /// Chooses which sizes the pool serves, in bytes. Blocks have at least 64; a size is one of the request,
    /// not of the block.
    pub const fn sizes(mut self, sizes: RangeInclusive<usize>) -> Self {
        self.first = *sizes.start();
        self.count = match sizes.end().checked_sub(self.first) {
            Some(more) => more.saturating_add(1),
            None => 0,
        };
        self
    }

    /// The wrapped allocator.
    pub const fn wrapped(&self) -> &G {
        &self.wrapped
    }

    /// From now on serves the chosen sizes from `pool`, and keeps it for ever. Attaching the same pool again
    /// undoes [`detach`](PinnedAlloc::detach).
    ///
    /// # Errors
    /// [`AttachError::Attached`] if it ever had another pool, [`AttachError::Sizes`] if this one can serve
    /// nothing, [`AttachError::Thread`] if the system starts none. Nothing is served then.
    pub fn attach<R: OneDevice>(&self, pool: &Pool<R>) -> Result<(), AttachError> {
        let max_len = pool.max_len();
        if self.count == 0 || self.first > max_len {
            return Err(AttachError::Sizes { first: self.first, max_len });
        }
        let core = pool.inner().core;
        let handle = pool.clone();
        // Pairs with itself on another thread: whoever finds the pool there has its handle kept.
        match self.core.compare_exchange(ptr::null_mut(), core.as_ptr(), Release, Acquire) {
            Ok(_) => _ = ManuallyDrop::new(handle),
            Err(there) if there == core.as_ptr() => drop(handle),
            Err(_) => return Err(AttachError::Attached),
        }
        if self.bell.load(Acquire).is_null() {
            // Pairs with the load in `tell`.
            self.bell.store(Self::start_telling(pool.clone())?, Release);
        }
        let map = pool.core().slabs.map();
        self.base.store(map.base(), Relaxed);
        // Pairs with the load in `holds`.
        self.len.store(map.len(), Release);
        // Pairs with the load in `pool_for`: whoever sees a size served sees the pool and its reservation, and
        // so does whoever is given memory by them.
        self.serving.store(self.count, Release);
        Ok(())
    }

    /// Starts the thread that a bell wakes to serve those who wait.
    fn start_telling<R: OneDevice>(pool: Pool<R>) -> Result<*mut Bell, AttachError> {
        let bell: &'static Bell = Box::leak(Box::new(Bell::new()));
        let tell = move || {
            signals::block_all();
            loop {
                bell.wait(None);
                pool.core().wake_waiters();
            }
        };
        let started = thread::Builder::new().name("pinpool-heap".to_owned()).spawn(tell);
        let handle = started
            .map_err(|e| AttachError::Thread { errno: e.raw_os_error().unwrap_or_default() })?;
        bell.attach(handle.thread().clone());
        bell.ring();
        Ok(ptr::from_ref(bell).cast_mut())
    }

    /// Serves nothing from the pool any more. What is out stays valid, and goes back to the pool when it is
    /// freed or, as far as it is reallocated, leaves it then. The pool itself stays.
    pub fn detach(&self) {
        self.serving.store(0, Relaxed);
    }

    /// How often the pool had no room for a size that it should serve, and the wrapped allocator served it.
    pub fn overflows(&self) -> u64 {
        self.overflows.load(Relaxed)
    }

    /// The keys of the region that holds `ptr`; `None` if it is not the attached pool's memory. Takes no lock.
    pub fn keys_of<T: ?Sized>(&self, ptr: *const T) -> Option<Keys> {
        let core = self.attached()?;
        let keys = core.slabs.map().keys_of(ptr.cast::<u8>() as usize)?;
        Some(Keys { lkey: keys.lkey(), rkey: core.remote.then_some(keys.rkey()) })
    }

    /// As [`Pool::sge_of`], for the attached pool.
    pub fn sge_of(&self, bytes: &[u8]) -> Option<Sge> {
        slices::sge(self.attached()?, bytes)
    }

    /// As [`Pool::remote_of`], for the attached pool.
    pub fn remote_of(&self, bytes: &[u8]) -> Option<RemoteBuf> {
        slices::remote(self.attached()?, bytes)
    }

    fn attached(&self) -> Option<&Core> {
        // Acquire pairs with the exchange in `attach`.
        // SAFETY: the pointer is null or a core whose handle is kept for ever.
        unsafe { self.core.load(Acquire).as_ref() }
    }

    /// The pool, if it is to serve this size on this thread now.
    #[inline(always)]
    fn pool_for(&self, size: usize) -> Option<PoolRef> {
        // Acquire pairs with the store in `attach`.
        if size.wrapping_sub(self.first) < self.serving.load(Acquire) && !reentry::inside() {
            // SAFETY: a size is served, so a pool was attached.
            return Some(unsafe { self.pool() });
        }
        None
    }

    /// # Safety
    /// A pool was attached, and this thread knows: it saw a size served, or was handed memory of it.
    #[inline(always)]
    unsafe fn pool(&self) -> PoolRef {
        // SAFETY: not null once a pool was attached (contract).
        let core = unsafe { NonNull::new_unchecked(self.core.load(Relaxed)) };
        // SAFETY: its handle is kept for ever.
        let slot_offset = unsafe { core.as_ref() }.slot_offset;
        PoolRef { core, slot_offset }
    }

    /// Whether an address is the pool's.
    #[inline(always)]
    fn holds(&self, ptr: *mut u8) -> bool {
        // Acquire pairs with the store in `attach`: who sees the length sees the base. Whoever has memory of the
        // pool sees both, for it had it, in the end, from a thread that did.
        let len = self.len.load(Acquire);
        (ptr as usize).wrapping_sub(self.base.load(Relaxed)) < len
    }

    #[inline(always)]
    fn take(&self, layout: Layout) -> Option<NonNull<u8>> {
        let pool = self.pool_for(layout.size())?;
        match pool.take_cached(layout) {
            Some((ptr, _)) => Some(ptr),
            None => self.take_slow(pool, layout),
        }
    }

    #[cold]
    #[inline(never)]
    fn take_slow(&self, pool: PoolRef, layout: Layout) -> Option<NonNull<u8>> {
        if let Some((ptr, _)) = pool.take_previous(layout) {
            return Some(ptr);
        }
        if !dry::worth_asking(layout.size()) {
            self.overflows.fetch_add(1, Relaxed);
            return None;
        }
        match pool.take_shared(layout, true) {
            Some((ptr, _)) => Some(ptr),
            None => {
                self.overflows.fetch_add(1, Relaxed);
                dry::refused(layout.size());
                None
            }
        }
    }
}

/// A free of the pool's memory on a thread that is inside a slow path of the pool.
#[repr(C)]
struct Free<G> {
    later: Later,
    alloc: *const PinnedAlloc<G>,
    ptr: *mut u8,
    layout: Layout,
}

impl<G: GlobalAlloc> PinnedAlloc<G> {
    /// Gives memory of the pool back.
    ///
    /// # Safety
    /// The contract of `GlobalAlloc::dealloc`, for memory that the pool [`holds`](Self::holds).
    #[inline(always)]
    unsafe fn give(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: memory of the pool was handed out, so one was attached; it came from `take` with this
        // layout, or one that `resize` has allowed since (contract).
        let done = !reentry::inside()
            && unsafe { self.pool().give_cached(NonNull::new_unchecked(ptr), layout) };
        if !done {
            // One call for all that is rare, so that what is common stays short enough to be inlined.
            // SAFETY: this call's contract.
            unsafe { self.give_slow(ptr, layout) };
        }
    }

    /// # Safety
    /// As [`give`](Self::give).
    #[cold]
    #[inline(never)]
    unsafe fn give_slow(&self, ptr: *mut u8, layout: Layout) {
        if reentry::inside() {
            // SAFETY: this call's contract.
            return unsafe { self.give_later(ptr, layout) };
        }
        // SAFETY: as in `give`.
        if unsafe { self.pool().give_quietly(NonNull::new_unchecked(ptr), layout) } {
            self.tell();
        }
    }

    /// Has those who wait for a block of the pool woken, on a thread of its own: what a waker does, and which
    /// locks it takes, has no place in an allocator.
    fn tell(&self) {
        // SAFETY: the pointer is null or a bell that is kept for ever. Acquire pairs with the store in `attach`.
        if let Some(bell) = unsafe { self.bell.load(Acquire).as_ref() } {
            bell.ring();
        }
    }

    /// Puts it off until the thread is outside. Only code around the pool gets here: what the wrapped
    /// allocator runs of its user's, say. If there is no memory for the note, the block stays out.
    ///
    /// # Safety
    /// As [`give`](Self::give).
    unsafe fn give_later(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: not of size 0.
        let note = unsafe { self.wrapped.alloc(Layout::new::<Free<G>>()) }.cast::<Free<G>>();
        if note.is_null() {
            return;
        }
        let free = Free { later: Later::new(Self::run), alloc: self, ptr, layout };
        // SAFETY: allocated just now for it; freed by `run` alone. An allocator with memory out is not moved
        // nor dropped (`GlobalAlloc`'s contract), so it is still there.
        unsafe {
            note.write(free);
            reentry::put_off(note.cast());
        }
    }

    /// # Safety
    /// `later` was put off by `give_later`, and is run once.
    unsafe fn run(later: *mut Later) {
        // SAFETY: a note of `give_later`, whose first field this is; the rest is its contract.
        unsafe {
            let note = later.cast::<Free<G>>();
            let Free { alloc, ptr, layout, .. } = note.read();
            (*alloc).wrapped.dealloc(note.cast(), Layout::new::<Free<G>>());
            (*alloc).give(ptr, layout);
        }
    }
}

// SAFETY: memory is either the wrapped allocator's, to which it goes back, or a block of the pool, which is
// not used for anything else until it is given back, is as long and as aligned as was asked, and stays mapped
// for ever. Which of the two is told by the address: the reservation is the pool's for ever. No call unwinds:
// nothing here panics, and the wrapped allocator may not.
unsafe impl<G: GlobalAlloc> GlobalAlloc for PinnedAlloc<G> {
    #[inline]
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        match self.take(layout) {
            Some(ptr) => ptr.as_ptr(),
            // SAFETY: the caller's contract, passed on.
            None => unsafe { self.wrapped.alloc(layout) },
        }
    }

    #[inline]
    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        if self.holds(ptr) {
            // SAFETY: the caller's contract, passed on.
            unsafe { self.give(ptr, layout) };
        } else {
            // SAFETY: not the pool's, so it came from the wrapped allocator; the rest is the caller's
            // contract.
            unsafe { self.wrapped.dealloc(ptr, layout) };
        }
    }

    #[inline]
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        match self.take(layout) {
            Some(ptr) => {
                // SAFETY: the block was just taken and is at least that long.
                unsafe { ptr.write_bytes(0, layout.size()) };
                ptr.as_ptr()
            }
            // SAFETY: the caller's contract, passed on.
            None => unsafe { self.wrapped.alloc_zeroed(layout) },
        }
    }

    #[inline]
    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        // SAFETY: the size is not too long for the alignment (contract).
        let new = unsafe { Layout::from_size_align_unchecked(new_size, layout.align()) };
        let served = self.pool_for(new_size).is_some();
        if self.holds(ptr) {
            // SAFETY: the caller's contract, passed on, for memory that the pool holds.
            return unsafe { self.realloc_pinned(ptr, layout, new, served) };
        }
        // Comes into the range: into the pool, if that has room.
        if served && let Some(to) = self.take(new) {
            // SAFETY: both are the caller's, distinct, and as long as the shorter size; the old one came from
            // the wrapped allocator.
            unsafe {
                to.as_ptr().copy_from_nonoverlapping(ptr, layout.size().min(new_size));
                self.wrapped.dealloc(ptr, layout);
            }
            return to.as_ptr();
        }
        // SAFETY: it came from the wrapped allocator; the rest is the caller's contract.
        unsafe { self.wrapped.realloc(ptr, layout, new_size) }
    }
}

impl<G: GlobalAlloc> PinnedAlloc<G> {
    /// # Safety
    /// The contract of `GlobalAlloc::realloc`, for memory that the pool holds.
    unsafe fn realloc_pinned(
        &self,
        ptr: *mut u8,
        old: Layout,
        new: Layout,
        served: bool,
    ) -> *mut u8 {
        // SAFETY: memory of the pool was handed out, so one was attached.
        let pool = unsafe { self.pool() };
        // SAFETY: not null, since it is the pool's.
        let block = unsafe { NonNull::new_unchecked(ptr) };
        // SAFETY: it came from `take`, with `old` or as `resize` allowed; `new` is not of size 0 (contract).
        if served && unsafe { pool.resize(block, old, new, false) }.is_some() {
            return ptr;
        }
        // SAFETY: the contract, passed on.
        let to = unsafe { self.alloc(new) };
        if to.is_null() {
            // A block in the wrong place is better than none.
            // SAFETY: as above.
            let stays = unsafe { pool.resize(block, old, new, true) }.is_some();
            return if stays { ptr } else { to };
        }
        // SAFETY: both are the caller's, distinct, and as long as the shorter size; the old one is the pool's.
        unsafe {
            to.copy_from_nonoverlapping(ptr, old.size().min(new.size()));
            self.give(ptr, old);
        }
        to
    }
}

impl<G> fmt::Debug for PinnedAlloc<G> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PinnedAlloc")
            .field("first", &self.first)
            .field("serving", &(self.serving.load(Relaxed) != 0))
            .field("overflows", &self.overflows())
            .finish_non_exhaustive()
    }
}

/// Spares a pool that is out the question: to find out costs a recall of all threads' caches.
mod dry {
    use super::Cell;

    /// How many allocations of a refused size or longer a thread passes on without asking again.
    const PAUSE: u32 = 256;

    thread_local! {
        static SIZE: Cell<usize> = const { Cell::new(0) };
        static LEFT: Cell<u32> = const { Cell::new(0) };
    }

    pub(super) fn worth_asking(size: usize) -> bool {
        let left = LEFT.get();
        if left == 0 || size < SIZE.get() {
            return true;
        }
        LEFT.set(left - 1);
        false
    }

    pub(super) fn refused(size: usize) {
        SIZE.set(size);
        LEFT.set(PAUSE);
    }
}
