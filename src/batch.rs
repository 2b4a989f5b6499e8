//! Many buffers of one length at once, for filling a receive queue.

use std::{fmt, marker::PhantomData, ptr::NonNull};

use crate::{
    access::Sge,
    buf::Buf,
    device::Device,
    error::{AllocError, UnknownDevice},
    magazine::{Place, ThreadSlot},
    pool::PoolRef,
    reach::{Any, OneDevice, Rails},
    size_class::{self, MAX_BLOCK, SPAN_CLASS},
    slab::Entry,
    thread,
};

/// A reusable store of buffers of one pool and length. Filling and freeing it moves block entries by the
/// run, and allocates nothing: the room is set when the batch is made.
///
/// ```
/// # let pool = pinpool::Pool::builder().device(pinpool::Device::soft()).capacity(1 << 20).build()?;
/// let mut batch = pinpool::Batch::with_capacity(32);
/// assert_eq!(pool.alloc_many(&mut batch, 4096, 32)?, 32);
/// for sge in batch.sges() {
///     // post a receive for it
///     assert_eq!(sge.length, 4096);
/// }
/// let one = batch.pop().expect("there are 32");
/// assert_eq!(one.len(), 4096);
/// pool.free_many(&mut batch);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Batch<R = Any> {
    entries: Vec<Entry>,
    /// Whose the entries are; meaningful while there are any.
    pool: PoolRef,
    len: usize,
    place: Place,
    _reach: PhantomData<R>,
}

// SAFETY: it owns its blocks as a `Buf` owns one, and what else it holds are numbers.
unsafe impl<R> Send for Batch<R> {}
// SAFETY: `&Batch` only reads.
unsafe impl<R> Sync for Batch<R> {}

impl<R> Batch<R> {
    /// Makes an empty batch with room for `n` buffers; at least one, at most 2^20.
    pub fn with_capacity(n: usize) -> Self {
        let pool = PoolRef { core: NonNull::dangling(), slot_offset: 0 };
        let entries = Vec::with_capacity(n.clamp(1, 1 << 20));
        Self { entries, pool, len: 0, place: Place::of(0), _reach: PhantomData }
    }

    /// How many buffers it holds.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether it holds none.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// The buffers' length, meaningful while there are any.
    pub(crate) fn buf_len(&self) -> usize {
        if self.entries.is_empty() { 0 } else { self.len }
    }

    /// How many it has room for.
    pub fn capacity(&self) -> usize {
        self.entries.capacity()
    }

    #[inline]
    fn slot(&self) -> *const ThreadSlot {
        thread::slot_at(self.pool.slot_offset)
    }

    #[inline]
    #[track_caller]
    pub(crate) fn refill(
        &mut self,
        pool: PoolRef,
        len: usize,
        n: usize,
    ) -> Result<usize, AllocError> {
        if self.pool != pool || self.len != len {
            if !self.entries.is_empty() {
                return Err(AllocError::BatchInUse { held: self.entries.len(), len: self.len });
            }
            (self.pool, self.len) = (pool, len);
            self.place = Place::of(Self::class(len));
        }
        let n = n.min(self.entries.capacity() - self.entries.len());
        // SAFETY: this thread's own slot, which lives as long as the thread.
        let got = unsafe { &*self.slot() }.pop_many(self.place, n, &mut self.entries);
        if got == n {
            return Ok(n);
        }
        self.refill_slow(pool, len, n, got)
    }

    /// Whether its buffers are of this heap.
    pub(crate) fn is_of(&self, pool: PoolRef) -> bool {
        self.pool == pool
    }

    /// Puts the first buffer into an empty batch.
    pub(crate) fn begin(&mut self, buf: Buf<R>) {
        debug_assert!(self.entries.is_empty() && self.entries.capacity() > 0);
        (self.pool, self.len) = (buf.home(), buf.len());
        let (entry, place) = buf.into_parts();
        self.place = place;
        self.entries.push(entry);
    }

    fn class(len: usize) -> usize {
        if len.wrapping_sub(1) < MAX_BLOCK { size_class::class_of(len) } else { SPAN_CLASS }
    }

    #[cold]
    #[inline(never)]
    #[track_caller]
    fn refill_slow(
        &mut self,
        pool: PoolRef,
        len: usize,
        n: usize,
        mut got: usize,
    ) -> Result<usize, AllocError> {
        while got < n {
            match pool.alloc_uncached::<R>(len, 1) {
                Ok(buf) => {
                    let (entry, place) = buf.into_parts();
                    if self.entries.is_empty() {
                        self.place = place;
                    } else if place != self.place {
                        // The last of a full pool may be of another class (a larger block, single pages),
                        // and a batch has one: it takes no more here.
                        drop(Buf::<R>::new(self.pool, entry, len, place));
                        if got == 0 {
                            return Err(AllocError::BatchMixed { held: self.entries.len(), len });
                        }
                        break;
                    }
                    self.entries.push(entry);
                    got += 1;
                }
                Err(e) if got == 0 => return Err(e),
                Err(_) => break,
            }
            let slot = self.slot();
            // SAFETY: as in `refill`.
            got += unsafe { &*slot }.pop_many(self.place, n - got, &mut self.entries);
        }
        Ok(got)
    }

    /// Takes one buffer out.
    pub fn pop(&mut self) -> Option<Buf<R>> {
        let entry = self.entries.pop()?;
        Some(Buf::new(self.pool, entry, self.len, self.place))
    }

    /// Gives all buffers back.
    #[inline]
    pub fn free(&mut self) {
        if self.entries.is_empty() {
            return;
        }
        // What the magazine has no room for goes one by one, through the slow path, which makes room.
        let slot = self.slot();
        // SAFETY: this thread's own slot, which lives as long as the thread.
        unsafe { &*slot }.push_many(self.place, &mut self.entries);
        if !self.entries.is_empty() {
            self.free_slow();
        }
    }

    #[cold]
    #[inline(never)]
    fn free_slow(&mut self) {
        while let Some(buf) = self.pop() {
            drop(buf);
            if !self.entries.is_empty() {
                let slot = self.slot();
                // SAFETY: as in `free`.
                unsafe { &*slot }.push_many(self.place, &mut self.entries);
            }
        }
    }
}

impl<R: OneDevice> Batch<R> {
    /// The scatter-gather elements of all buffers, in the order that [`pop`](Batch::pop) takes them last
    /// to first.
    pub fn sges(&self) -> impl ExactSizeIterator<Item = Sge> + '_ {
        let length = u32::try_from(self.len).unwrap_or(u32::MAX);
        self.entries.iter().map(move |e| {
            // SAFETY: an entry is here, so its core is alive.
            let addr = unsafe { self.pool.core.as_ref() }.wire_addr(e.ptr);
            Sge { addr, length, lkey: e.keys.lkey() }
        })
    }
}

impl Batch<Rails> {
    /// Writes the scatter-gather elements of all buffers on one device to `out`, in place of what it held, in
    /// the order that [`pop`](Batch::pop) takes them last to first.
    ///
    /// # Errors
    /// [`UnknownDevice`] if the pool is not, or no longer, on that device; `out` is then empty.
    pub fn sges_on(&self, device: &Device, out: &mut Vec<Sge>) -> Result<(), UnknownDevice> {
        out.clear();
        let length = u32::try_from(self.len).unwrap_or(u32::MAX);
        for entry in &self.entries {
            // SAFETY: an entry is here, so its core is alive.
            let core = unsafe { self.pool.core.as_ref() };
            match core.live_keys_on(entry.ptr.as_ptr() as usize, device) {
                Ok(keys) => {
                    out.push(Sge { addr: core.wire_addr(entry.ptr), length, lkey: keys.lkey });
                }
                Err(e) => {
                    out.clear();
                    return Err(e);
                }
            }
        }
        Ok(())
    }
}

impl<R> Drop for Batch<R> {
    fn drop(&mut self) {
        self.free();
    }
}

impl<R> fmt::Debug for Batch<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Batch")
            .field("buffers", &self.entries.len())
            .field("len", &self.len)
            .finish_non_exhaustive()
    }
}
