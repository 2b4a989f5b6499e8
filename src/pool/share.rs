//! Shares: named reservations inside an access class. Manages what a share's alloc does beyond its reserve;
//! the reserve itself is a heap like any other.

use std::{
    fmt,
    ops::Range,
    sync::atomic::{AtomicU64, Ordering::Relaxed},
};

use super::{Core, Pool, PoolRef};
use crate::{
    batch::Batch, buf::Buf, drought::Drought, error::AllocError, magazine::Place, reach::Any,
    size_class::MIN_BLOCK, slab::Entry, thread,
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

impl PoolRef {
    /// What a share does when its reserve gave nothing: takes from the unreserved memory of its class, and
    /// before it gives up, makes sure that both were empty at one moment.
    #[cold]
    #[inline(never)]
    fn alloc_beyond<R>(self, len: usize, align: usize) -> Result<Buf<R>, AllocError> {
        // SAFETY: the caller has a handle, so the core is alive.
        let core = unsafe { self.core.as_ref() };
        if let Some(beyond) = core.beyond.as_ref().filter(|_| !core.foreign()) {
            let mut before = None;
            for _ in 0..TURNS {
                if let Some((entry, place)) = beyond.class.take(len, align) {
                    return Ok(Buf::new(beyond.class, entry, len, place));
                }
                // The reserve was searched after `before` was seen, the rest has been since: if nothing
                // stirred, both were empty when the rest was.
                let now = beyond.drought.seen();
                if before == Some(now) {
                    break;
                }
                before = Some(now);
                if let Some((entry, class)) = core.search(len, align) {
                    return Ok(Buf::new(self, entry, len, Place::of(class)));
                }
            }
            beyond.refused.fetch_add(1, Relaxed);
        }
        Err(core.refusal(len, align))
    }

    /// A block of this heap, by all ways there are.
    fn take(self, len: usize, align: usize) -> Option<(Entry, Place)> {
        if align <= MIN_BLOCK {
            return self.entry(thread::gate_at(self.slot_offset), len);
        }
        // SAFETY: as in `alloc_beyond`; a class's core outlives its shares.
        let got = unsafe { self.core.as_ref() }.alloc_slow(len, align);
        got.map(|(entry, class)| (entry, Place::of(class)))
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

    fn core(&self) -> &Core {
        self.reserve.core()
    }

    /// Allocates a buffer of `len` bytes; see [`Pool::alloc`].
    ///
    /// # Errors
    /// As [`Pool::alloc`]: [`AllocError::Exhausted`] when neither the reserve nor the unreserved memory has
    /// anything left, with the books of both.
    #[inline]
    pub fn alloc(&self, len: usize) -> Result<Buf<R>, AllocError> {
        let inner = self.reserve.inner();
        match inner.entry(thread::gate_at(inner.slot_offset), len) {
            Some((entry, place)) => Ok(Buf::new(inner, entry, len, place)),
            None => inner.alloc_beyond(len, 1),
        }
    }

    /// Allocates a buffer of `len` zero bytes.
    ///
    /// # Errors
    /// As [`alloc`](Share::alloc).
    pub fn alloc_zeroed(&self, len: usize) -> Result<Buf<R>, AllocError> {
        let mut buf = self.alloc(len)?;
        buf.fill(0);
        Ok(buf)
    }

    /// Allocates a buffer for a layout: of its size, at a multiple of its alignment.
    ///
    /// # Errors
    /// As [`alloc`](Share::alloc), and [`AllocError::Alignment`].
    pub fn alloc_layout(&self, layout: std::alloc::Layout) -> Result<Buf<R>, AllocError> {
        let (len, align) = (layout.size(), layout.align());
        if align <= MIN_BLOCK {
            return self.alloc(len);
        }
        let inner = self.reserve.inner();
        match self.core().alloc_slow(len, align) {
            Some((entry, class)) => Ok(Buf::new(inner, entry, len, Place::of(class))),
            None => inner.alloc_beyond(len, align),
        }
    }

    /// Adds up to `n` buffers of `len` bytes to a batch; see [`Pool::alloc_many`].
    ///
    /// A batch has buffers of one place: of the reserve while that has any, else of the unreserved memory.
    /// It may so get fewer than there are; what it lacks goes into a second batch.
    ///
    /// # Errors
    /// As [`Pool::alloc_many`].
    pub fn alloc_many(
        &self,
        batch: &mut Batch<R>,
        len: usize,
        n: usize,
    ) -> Result<usize, AllocError> {
        let inner = self.reserve.inner();
        let Some(beyond) = &self.core().beyond else { return batch.refill(inner, len, n) };
        if !batch.is_empty() && batch.is_of(beyond.class) {
            return batch.refill(beyond.class, len, n);
        }
        match batch.refill(inner, len, n) {
            Err(_) if batch.is_empty() => {}
            done => return done,
        }
        if let Ok(got) = batch.refill(beyond.class, len, n) {
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
