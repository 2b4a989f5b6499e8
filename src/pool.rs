//! The pool: the only orchestrator. Start-up, alloc, free and teardown each read top to bottom in a file of
//! their own here; the layers below know nothing of one another's order. This file is the handle.

mod alloc;
mod bare;
mod books;
mod class;
mod core;
#[cfg(feature = "capi")]
mod door;
mod export;
mod family;
mod flight;
mod free;
mod grow;
mod guarded;
mod leaks;
mod line;
mod map;
mod posted;
mod rails;
#[cfg_attr(
    not(any(feature = "allocator-api2", feature = "nightly", feature = "global")),
    allow(dead_code)
)]
mod raw;
mod reference;
mod share;
mod share_wait;
mod teardown;
mod threads;
mod wait;

use std::{
    fmt,
    marker::PhantomData,
    sync::atomic::Ordering::{AcqRel, Relaxed},
};

#[cfg(feature = "capi")]
pub(crate) use self::door::Door;
use self::family::{Closed, Heaps};
pub use self::{
    class::Class,
    flight::InFlight,
    map::{ArenaMap, PoolMap},
    posted::{Outcome, PostError, Posted},
    rails::DeviceChange,
    share::Share,
    share_wait::ShareFuture,
    wait::AllocFuture,
};
pub(crate) use self::{core::Core, family::Family, reference::PoolRef};
use crate::{
    access::{Access, Keys},
    arena::{ArenaInfo, Leftover},
    batch::Batch,
    buf::Buf,
    config::{Builder, Plan},
    error::{AllocError, BuildError, CloseError},
    local::LocalPool,
    reach::{Any, OneDevice, Reach},
    size_class::MIN_BLOCK,
    stats::Stats,
    sys::limits,
    thread,
};

/// A pool of registered buffers. Clones are handles of the same pool.
///
/// The arenas live until the last handle and the last buffer are gone, in any order and on any thread.
pub struct Pool<R = Any> {
    inner: PoolRef,
    _reach: PhantomData<R>,
}

// SAFETY: a handle leads to a `Core`, all of whose shared parts are atomic or locked, and whose
// thread-bound parts are found through the calling thread's own slot.
unsafe impl<R> Send for Pool<R> {}
// SAFETY: as above.
unsafe impl<R> Sync for Pool<R> {}

// A panic leaves a pool as usable as before: no call of it runs code of the user's while it holds a lock or
// is inside a gate.
impl<R> std::panic::UnwindSafe for Pool<R> {}
impl<R> std::panic::RefUnwindSafe for Pool<R> {}

impl<R> Clone for Pool<R> {
    fn clone(&self) -> Self {
        self.handle(self.inner)
    }
}

impl<R> Drop for Pool<R> {
    fn drop(&mut self) {
        // Release what this handle did, acquire what the others did.
        if self.core().family.handles.fetch_sub(1, AcqRel) == 1 {
            // SAFETY: the count says that this was the last handle.
            unsafe { Family::close(self.inner.core) };
        }
    }
}

impl<R> fmt::Debug for Pool<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pool")
            .field("capacity", &self.capacity())
            .field("access", &self.access())
            .field("max_capacity", &self.core().grower.max_capacity)
            .finish_non_exhaustive()
    }
}

impl Pool {
    /// Starts to describe a pool.
    pub fn builder() -> Builder {
        Builder::default()
    }
}

impl<R: Reach> Pool<R> {
    pub(crate) fn from_plans(plans: Vec<Plan>) -> Result<Self, BuildError> {
        let core = Family::build(plans, !R::ONE_DEVICE)?;
        // SAFETY: built just now, with this handle counted.
        let slot_offset = unsafe { core.as_ref() }.slot_offset;
        Ok(Self { inner: PoolRef { core, slot_offset }, _reach: PhantomData })
    }
}

impl<R> Pool<R> {
    #[inline(always)]
    pub(crate) fn core(&self) -> &Core {
        // SAFETY: the core lives while a handle does, and this is one.
        unsafe { self.inner.core.as_ref() }
    }

    fn heaps(&self) -> Heaps<'_> {
        // SAFETY: this is a handle, and what comes of it borrows it.
        unsafe { self.core().family.heaps() }
    }

    /// Another handle of the same pool, for a heap of it.
    fn handle<S>(&self, inner: PoolRef) -> Pool<S> {
        self.core().family.handles.fetch_add(1, Relaxed);
        Pool { inner, _reach: PhantomData }
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
    #[track_caller]
    pub fn alloc(&self, len: usize) -> Result<Buf<R>, AllocError> {
        self.inner.alloc(thread::slot_at(self.inner.slot_offset), len)
    }

    /// Allocates a buffer of `len` zero bytes.
    ///
    /// # Errors
    /// As [`alloc`](Pool::alloc).
    #[track_caller]
    pub fn alloc_zeroed(&self, len: usize) -> Result<Buf<R>, AllocError> {
        let mut buf = self.alloc(len)?;
        buf.fill(0);
        Ok(buf)
    }

    /// Allocates a buffer for a layout: of its size, at a multiple of its alignment.
    ///
    /// # Errors
    /// As [`alloc`](Pool::alloc), and [`AllocError::Alignment`] if it is larger than an arena.
    #[track_caller]
    pub fn alloc_layout(&self, layout: std::alloc::Layout) -> Result<Buf<R>, AllocError> {
        if layout.align() <= MIN_BLOCK {
            return self.alloc(layout.size());
        }
        self.inner.alloc_uncached(layout.size(), layout.align())
    }

    /// Adds up to `n` buffers of `len` bytes to a batch, as many as it has room for, without allocating;
    /// returns how many there were to be had: at least one, unless none was asked for or fits.
    ///
    /// An empty batch takes on pool and length; one that is not empty must hold buffers of both.
    ///
    /// # Errors
    /// As [`alloc`](Pool::alloc), when not even one could be had; [`AllocError::BatchInUse`] and
    /// [`AllocError::BatchMixed`]. The batch keeps what it holds.
    #[track_caller]
    pub fn alloc_many(
        &self,
        batch: &mut Batch<R>,
        len: usize,
        n: usize,
    ) -> Result<usize, AllocError> {
        batch.refill(self.inner, len, n)
    }

    /// Gives all buffers of a batch back and keeps the batch for the next time.
    #[inline]
    pub fn free_many(&self, batch: &mut Batch<R>) {
        batch.free();
    }

    /// Makes a handle for this thread that allocates without looking for the thread's magazines.
    pub fn local(&self) -> LocalPool<R> {
        LocalPool::new(self.clone())
    }

    /// Sums up where the pool's bytes are.
    ///
    /// Takes locks, and sends every thread through its slow path once; not for hot paths. Looking for tokens and
    /// tables in memory it reads a word or so for each page in use, so its time grows with what is in use; the
    /// slabs' lock is held for a part of it only. In a forked child
    /// the figures are those of the fork, with blocks in caches counted as live (and all zero if the fork
    /// fell into an update). What the process has pinned is read from `/proc` here, and nowhere else.
    pub fn stats(&self) -> Stats {
        let mut stats = self.heaps().stats();
        for core in self.heaps().iter().filter(|core| !core.foreign()) {
            core.each_flight(|_| stats.in_flight += 1);
            stats.table_bytes += core.tokens.table_bytes() + core.outs.table_bytes();
            stats.table_bytes += core.guard.as_ref().map_or(0, |guard| guard.table_bytes());
        }
        let m = limits::memlock();
        stats.hits_exact = !self.core().gated;
        (stats.pinned, stats.locked, stats.memlock_exempt) = (m.pinned, m.locked, m.exempt);
        stats.memlock_limit = (m.soft != u64::MAX).then_some(m.soft);
        stats
    }

    /// Gives what lies in caches, this thread's and all others', back to the slabs, so that other sizes
    /// can use it. Never needed for an alloc to succeed.
    pub fn trim(&self) {
        if !self.core().foreign() {
            for core in self.heaps().iter() {
                core.call_back();
            }
        }
    }

    /// Bytes of all arenas, of all classes, that there are now.
    pub fn capacity(&self) -> usize {
        self.heaps().iter().map(|core| core.slabs.capacity()).sum()
    }

    /// How many arenas there are, of all classes, and their bytes.
    pub(crate) fn size(&self) -> (usize, usize) {
        let arenas = self.heaps().iter().filter_map(|core| Some(core.shown()?.arenas));
        (arenas.sum(), self.capacity())
    }

    /// Bytes that the pool may grow to.
    pub fn max_capacity(&self) -> usize {
        self.heaps().iter().map(|core| core.grower.max_capacity).sum()
    }

    /// The longest buffer that [`alloc`](Pool::alloc) can ever give: one arena, or what shares leave of it.
    pub fn max_len(&self) -> usize {
        self.core().max_len()
    }

    /// The rights that the arenas of this handle's class, the default one for most, were registered with.
    pub fn access(&self) -> Access {
        self.core().access
    }

    /// Whether this process is a forked child of the one that built the pool, in which every use of it is
    /// an error.
    pub fn is_foreign(&self) -> bool {
        self.core().foreign_process()
    }

    /// Closes the pool and says how that went, which dropping the handle cannot.
    ///
    /// # Errors
    /// [`CloseError::Shared`] while other handles exist; the pool is then as before, less this handle.
    /// [`CloseError::Live`] while buffers are out: the last one to be freed tears it down.
    /// [`CloseError::Deregister`] if the device would not let go.
    pub fn close(self) -> Result<(), CloseError> {
        let this = std::mem::ManuallyDrop::new(self);
        let before = this.core().family.handles.fetch_sub(1, AcqRel);
        if before > 1 {
            return Err(CloseError::Shared(before - 1));
        }
        // SAFETY: the count said that this was the last handle, and its `Drop` does not run.
        let Closed { left, cores } = unsafe { Family::close(this.inner.core) };
        match left {
            Some(Leftover { arenas, bytes, first: Some(first) }) => {
                Err(CloseError::Deregister { arenas, bytes, first })
            }
            Some(_) => Ok(()),
            None => match cores.iter().find(|core| core.foreign_process()) {
                Some(core) => {
                    let this = limits::process_id();
                    Err(CloseError::ForeignProcess { owner: core.process, this })
                }
                None => {
                    let out =
                        |(n, bytes), stats: Stats| (n + stats.live_buffers, bytes + stats.live);
                    let all = cores.iter().map(|core| core.stats());
                    let (buffers, bytes) = all.fold((0, 0), out);
                    Err(CloseError::Live { buffers, bytes })
                }
            },
        }
    }

    /// Does what the pool's own thread does when it is woken at that time, counted from the pool's birth: growing
    /// and shrinking as needed, and device changes. Says after how long it would be woken next, if by nothing
    /// else. For tests, with [`Builder::growth_by_hand`].
    #[cfg(feature = "fault")]
    pub fn tick(&self, now: std::time::Duration) -> Option<std::time::Duration> {
        self.core().tick(now)
    }

    /// Walks all tables and panics on the first contradiction. For tests; takes every lock.
    #[cfg(any(test, feature = "fault"))]
    pub fn check(&self) {
        for core in self.heaps().iter() {
            core.slabs.check();
            let stats = core.stats();
            assert!(stats.balanced(), "{}: {stats:#?}", core.name);
        }
        let stats = self.heaps().stats();
        assert!(stats.balanced(), "{stats:#?}");
    }
}

impl<R: OneDevice> Pool<R> {
    /// The arenas of all classes that there are now, class by class and by address: where each is, what it is
    /// made of, its keys, and how long it took to bring up.
    pub fn arenas(&self) -> Vec<ArenaInfo> {
        self.heaps().classes().flat_map(|(class, _)| class.infos()).collect()
    }

    /// The keys of the region that holds `ptr`; `None` if it does not point into this pool's arenas, of
    /// whichever class. Any pointer may be asked for, and none is followed. Takes no lock.
    #[inline]
    pub fn keys_of<T: ?Sized>(&self, ptr: *const T) -> Option<Keys> {
        let (core, addr) = (self.core(), ptr.cast::<u8>() as usize);
        core.keys_at(addr).or_else(|| self.keys_elsewhere(addr))
    }

    #[cold]
    fn keys_elsewhere(&self, addr: usize) -> Option<Keys> {
        self.heaps().class_at(addr)?.keys_at(addr)
    }
}
