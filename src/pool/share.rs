//! Shares: named reservations inside an access class. Manages what a share's alloc does beyond its reserve;
//! the reserve itself is a heap like any other.

use std::{
    fmt,
    ops::Range,
    panic::Location,
    ptr::NonNull,
    sync::atomic::{AtomicU64, Ordering::Relaxed},
};

use super::{Core, Pool, PoolRef, reference::Answer};
use crate::{
    batch::Batch,
    buf::Buf,
    drought::Drought,
    error::AllocError,
    guard::Caller,
    magazine::Place,
    reach::Any,
    size_class::{self, MIN_BLOCK},
    slab::Entry,
    thread,
};

/// How often a share looks at reserve and unreserved memory by turns, while things come back to the reserve.
const TURNS: usize = 64;

/// Where a share turns when its reserve is dry.
pub(crate) struct Beyond {
    class: PoolRef,
    /// The addresses of the reserve.
    ranges: Box<[Range<usize>]>,
    pub(super) drought: Drought,
    pub(super) ran_dry: AtomicU64,
    pub(super) refused: AtomicU64,
}

// SAFETY: the class's core, all of whose shared parts are atomic or locked, stands as long as its shares'
// heaps have not drained, and this is part of one.
unsafe impl Send for Beyond {}
// SAFETY: as above.
unsafe impl Sync for Beyond {}

impl Beyond {
    pub(super) fn new(class: &Core, ranges: &[(usize, usize)]) -> Self {
        let base = class.slabs.map().base();
        let ranges = ranges.iter().map(|&(offset, len)| base + offset..base + offset + len);
        Self {
            class: class.reference(),
            ranges: ranges.collect(),
            drought: Drought::new(),
            ran_dry: AtomicU64::new(0),
            refused: AtomicU64::new(0),
        }
    }

    pub(super) fn class(&self) -> PoolRef {
        self.class
    }

    /// Whether an address lies in the reserve.
    pub(super) fn holds(&self, addr: usize) -> bool {
        self.ranges.iter().any(|r| r.contains(&addr))
    }

    /// Searches the reserve, unless that was in vain and nothing has come back since.
    pub(super) fn unless_dry<T>(
        &self,
        len: usize,
        align: usize,
        search: impl FnOnce() -> Option<T>,
    ) -> Option<T> {
        if align <= MIN_BLOCK && self.drought.lasts(len) {
            return None;
        }
        let before = self.drought.seen();
        let got = search();
        if got.is_none() {
            self.ran_dry.fetch_add(1, Relaxed);
            if align <= MIN_BLOCK {
                self.drought.note(before, len);
            }
        }
        got
    }
}

impl Core {
    /// A share's class.
    pub(super) fn class(&self) -> Option<&Self> {
        // SAFETY: a class's core stays until its shares' heaps have drained, and this one has not, for the
        // caller has a handle or a buffer of it.
        self.beyond.as_ref().map(|b| unsafe { b.class.core.as_ref() })
    }
}

impl Core {
    /// What a share does when its reserve gave nothing: takes from the unreserved memory of its class, and
    /// before it gives up, makes sure that both were empty at one moment. Says whether the block is of the
    /// unreserved memory, too.
    #[track_caller]
    fn alloc_beyond(&self, len: usize, align: usize) -> Option<(Entry, usize, bool)> {
        let caller = Location::caller();
        let beyond = self.beyond.as_ref().filter(|_| !self.foreign())?;
        let mut before = None;
        for _ in 0..TURNS {
            if let Some((entry, class)) = beyond.class.find_by(len, align, caller) {
                return Some((entry, class, true));
            }
            // The reserve was searched after `before` was seen, the rest has been since: if nothing
            // stirred, both were empty when the rest was.
            let now = beyond.drought.seen();
            if before == Some(now) {
                break;
            }
            before = Some(now);
            if let Some((entry, class)) = self.search(len, align, caller) {
                return Some((entry, class, false));
            }
        }
        beyond.refused.fetch_add(1, Relaxed);
        None
    }
}

impl PoolRef {
    /// A share's slow path: the rest of its reserve, then beyond.
    #[cold]
    #[inline(never)]
    #[track_caller]
    fn share_slow(core: NonNull<Core>, len: usize) -> Answer {
        let answer = Self::alloc_slow(core, len);
        if answer.get().is_some() {
            return answer;
        }
        // SAFETY: the caller has a handle, so the core is alive.
        let got = unsafe { core.as_ref() }.alloc_beyond(len, 1);
        got.map_or(Answer::NONE, |(entry, class, beyond)| Answer::new(entry, class, beyond))
    }

    /// A block of this heap for `caller`, by all ways there are.
    pub(super) fn find_by(
        self,
        len: usize,
        align: usize,
        caller: Caller,
    ) -> Option<(Entry, usize)> {
        if align <= MIN_BLOCK {
            let class = size_class::class_of(len);
            let cached = Self::cached(thread::slot_at(self.slot_offset), Place::of(class), len);
            if let Some(entry) = cached {
                return Some((entry, class));
            }
            let slow = Self::alloc_slow_by(self.core, len, caller).get()?;
            return Some((slow.entry, slow.place.class()));
        }
        // SAFETY: a class's core outlives its shares', one of which the caller has.
        unsafe { self.core.as_ref() }.alloc_slow_by(len, align, caller)
    }
}

/// A named reservation inside a pool, to allocate from. Clones are handles of the same share.
///
/// An allocation is served from the share's reserve, which nobody else can take from, and when that has
/// nothing left, from what no share of the access class has reserved. Dropping the buffer gives it back to
/// where it came from.
///
/// Counts as a handle of its pool: the pool lives until this is dropped, too. See
/// [`Builder::share`](crate::Builder::share).
pub struct Share<R = Any> {
    /// A handle whose heap is the reserve.
    reserve: Pool<R>,
}

impl<R> Share<R> {
    pub(super) fn new(reserve: Pool<R>) -> Self {
        Self { reserve }
    }

    pub(super) fn core(&self) -> &Core {
        self.reserve.core()
    }

    /// The heap of its class's unreserved memory.
    fn beyond(&self) -> PoolRef {
        self.core().beyond.as_ref().map_or(self.reserve.inner(), |b| b.class)
    }

    /// Allocates a buffer of `len` bytes; see [`Pool::alloc`].
    ///
    /// # Errors
    /// As [`Pool::alloc`]: [`AllocError::Exhausted`] when neither the reserve nor the unreserved memory has
    /// anything left, with the books of both.
    #[inline]
    #[track_caller]
    pub fn alloc(&self, len: usize) -> Result<Buf<R>, AllocError> {
        let inner = self.reserve.inner();
        let (mut home, mut place) = (inner, Place::of_len(len));
        let mut entry = PoolRef::cached(thread::slot_at(inner.slot_offset), place, len);
        if entry.is_none()
            && let Some(slow) = PoolRef::share_slow(inner.core, len).get()
        {
            (entry, place) = (Some(slow.entry), slow.place);
            if slow.beyond {
                home = self.beyond();
            }
        }
        match entry {
            Some(entry) => Ok(Buf::new(home, entry, len, place)),
            None => Err(PoolRef::refusal(inner.core, len)),
        }
    }

    /// Allocates a buffer of `len` zero bytes.
    ///
    /// # Errors
    /// As [`alloc`](Share::alloc).
    #[track_caller]
    pub fn alloc_zeroed(&self, len: usize) -> Result<Buf<R>, AllocError> {
        let mut buf = self.alloc(len)?;
        buf.fill(0);
        Ok(buf)
    }

    /// Allocates a buffer for a layout: of its size, at a multiple of its alignment.
    ///
    /// # Errors
    /// As [`alloc`](Share::alloc), and [`AllocError::Alignment`].
    #[track_caller]
    pub fn alloc_layout(&self, layout: std::alloc::Layout) -> Result<Buf<R>, AllocError> {
        let (len, align) = (layout.size(), layout.align());
        if align <= MIN_BLOCK {
            return self.alloc(len);
        }
        let inner = self.reserve.inner();
        let core = self.core();
        if let Some((entry, class)) = core.alloc_slow(len, align) {
            return Ok(Buf::new(inner, entry, len, Place::of(class)));
        }
        let (entry, class, beyond) =
            core.alloc_beyond(len, align).ok_or_else(|| core.refusal(len, align))?;
        let home = if beyond { self.beyond() } else { inner };
        Ok(Buf::new(home, entry, len, Place::of(class)))
    }

    /// Adds up to `n` buffers of `len` bytes to a batch; see [`Pool::alloc_many`].
    ///
    /// A batch has buffers of one place: of the reserve while that has any, else of the unreserved memory.
    /// It may so get fewer than there are; what it lacks goes into a second batch.
    ///
    /// # Errors
    /// As [`Pool::alloc_many`].
    #[track_caller]
    pub fn alloc_many(
        &self,
        batch: &mut Batch<R>,
        len: usize,
        n: usize,
    ) -> Result<usize, AllocError> {
        let inner = self.reserve.inner();
        let beyond = self.beyond();
        if !batch.is_empty() && batch.is_of(beyond) {
            return batch.refill(beyond, len, n);
        }
        match batch.refill(inner, len, n) {
            Err(_) if batch.is_empty() => {}
            done => return done,
        }
        if let Ok(got) = batch.refill(beyond, len, n) {
            return Ok(got);
        }
        // One by one, which says truly why there is none.
        batch.begin(self.alloc(len)?);
        Ok(1)
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.core().name
    }

    /// Bytes of its reserve.
    pub fn reserved(&self) -> usize {
        self.core().slabs.capacity()
    }

    /// The longest buffer that it can ever give, from the reserve or beyond it.
    pub fn max_len(&self) -> usize {
        self.core().max_len()
    }
}

impl<R> Clone for Share<R> {
    fn clone(&self) -> Self {
        Self { reserve: self.reserve.clone() }
    }
}

impl<R> fmt::Debug for Share<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Share")
            .field("name", &self.name())
            .field("class", &self.core().class().map(|class| &class.name))
            .field("reserved", &self.reserved())
            .finish_non_exhaustive()
    }
}
