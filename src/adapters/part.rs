//! Parts of one buffer, each owned by itself. The buffer goes back when the last of them does.
//!
//! Manages who owns which bytes. What is shared is one count on the heap; buffers that are not split have
//! none.

use std::{
    fmt,
    ops::{Deref, DerefMut},
    ptr::NonNull,
    slice,
    sync::Arc,
};

use crate::{
    access::{Keys, LKey, RemoteBuf, Sge},
    buf::{Buf, CapacityError},
    reach::{Any, OneDevice, Reach, Remote},
};

/// A part of a buffer: some of its bytes, owned alone, and freed independently of the others.
///
/// Made of a whole [`Buf`] by `From`, at the price of one allocation on the heap, and divided from there
/// on. The block goes back to its pool when its last part is dropped, on any thread.
///
/// Reading from a part by [`std::io::Read`] takes bytes off its front, writing to it by [`std::io::Write`]
/// adds at its end, within its capacity; neither moves a byte (P9).
///
/// ```
/// # let pool = pinpool::Pool::builder().device(pinpool::Device::soft()).capacity(1 << 20).build()?;
/// let mut head = pinpool::Part::from(pool.alloc(1000)?);
/// let tail = head.split_off(64)?;
/// assert_eq!((head.len(), tail.len()), (64, 936));
/// assert_eq!(tail.sge().addr, head.sge().addr + 64); // both can be posted
/// drop(head);
/// assert_eq!(pool.stats().live_buffers, 1);
/// drop(tail);
/// assert_eq!(pool.stats().live_buffers, 0);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Part<R = Any> {
    /// Its length is all of the block.
    block: Arc<Buf<R>>,
    start: NonNull<u8>,
    len: usize,
    capacity: usize,
}

// SAFETY: the bytes are this value's alone, as a buffer's are, and the count is atomic.
unsafe impl<R> Send for Part<R> {}
// SAFETY: `&Part` only reads its fields and its bytes.
unsafe impl<R> Sync for Part<R> {}

// As for `Buf`.
impl<R> std::panic::UnwindSafe for Part<R> {}
impl<R> std::panic::RefUnwindSafe for Part<R> {}

impl<R> Part<R> {
    /// How many bytes it shows.
    #[inline]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether [`len`](Part::len) is 0.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// How many bytes are this part's.
    #[inline]
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Sets the length, up to the capacity.
    ///
    /// # Errors
    /// [`CapacityError`] if the part is shorter; the length is then unchanged.
    pub fn set_len(&mut self, len: usize) -> Result<(), CapacityError> {
        self.within(len)?;
        self.len = len;
        Ok(())
    }

    /// Shortens to `len` bytes; does nothing if it is not longer than that.
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
    }

    /// Sets the length to 0.
    pub fn clear(&mut self) {
        self.len = 0;
    }

    /// Keeps the first `at` bytes of the capacity; the part returned has the rest of it. Each shows of its
    /// bytes what was shown before.
    ///
    /// # Errors
    /// [`CapacityError`] if there are fewer; nothing is then changed.
    pub fn split_off(&mut self, at: usize) -> Result<Self, CapacityError> {
        self.within(at)?;
        let rest = Self {
            block: self.block.clone(),
            // SAFETY: `at` is at most the capacity, so this is inside the block or one past its end.
            start: unsafe { self.start.add(at) },
            len: self.len.saturating_sub(at),
            capacity: self.capacity - at,
        };
        (self.len, self.capacity) = (self.len.min(at), at);
        Ok(rest)
    }

    /// Gives up the first `at` bytes of the capacity, which the part returned has; this one keeps the rest.
    ///
    /// # Errors
    /// As [`split_off`](Part::split_off).
    pub fn split_to(&mut self, at: usize) -> Result<Self, CapacityError> {
        let rest = self.split_off(at)?;
        Ok(std::mem::replace(self, rest))
    }

    /// Joins this part and the one that begins where its capacity ends, if this one is full.
    ///
    /// # Errors
    /// Both parts, as they were, if they are not such neighbours.
    pub fn unsplit(mut self, next: Self) -> Result<Self, (Self, Self)> {
        // SAFETY: the capacity is this part's, so its end is inside the block or one past its end.
        let end = unsafe { self.start.add(self.capacity) };
        let full = self.len == self.capacity || next.len == 0;
        if !Arc::ptr_eq(&self.block, &next.block) || end != next.start || !full {
            return Err((self, next));
        }
        self.len += next.len;
        self.capacity += next.capacity;
        Ok(self)
    }

    /// The whole buffer again, once this is its only part and begins where the buffer does.
    ///
    /// # Errors
    /// The part, as it was, otherwise.
    pub fn into_buf(self) -> Result<Buf<R>, Self> {
        if self.start.as_ptr().cast_const() != self.block.as_ptr() {
            return Err(self);
        }
        let Self { block, start, len, capacity } = self;
        match Arc::try_unwrap(block) {
            Ok(mut buf) => {
                buf.truncate(len);
                Ok(buf)
            }
            Err(block) => Err(Self { block, start, len, capacity }),
        }
    }

    /// Takes `n` bytes off the front, or all if there are fewer, for good.
    pub(crate) fn take_off(&mut self, n: usize) {
        let n = n.min(self.len);
        // SAFETY: at most the length, so this is inside the block or one past its end.
        self.start = unsafe { self.start.add(n) };
        (self.len, self.capacity) = (self.len - n, self.capacity - n);
    }

    /// The bytes beyond the length: where they begin, and how many there are.
    #[cfg(feature = "bytes")]
    #[inline]
    pub(crate) fn spare(&mut self) -> (NonNull<u8>, usize) {
        // SAFETY: the length is at most the capacity, so this is inside the block or one past its end.
        (unsafe { self.start.add(self.len) }, self.capacity - self.len)
    }

    /// The first byte's address.
    #[inline]
    pub fn as_ptr(&self) -> *const u8 {
        self.start.as_ptr()
    }

    /// The first byte's address, for writing.
    #[inline]
    pub fn as_mut_ptr(&mut self) -> *mut u8 {
        self.start.as_ptr()
    }

    fn offset(&self) -> usize {
        self.start.as_ptr() as usize - self.block.as_ptr() as usize
    }

    /// Of the whole block's address for a peer, this part's.
    fn remote_in(&self, whole: RemoteBuf) -> RemoteBuf {
        let addr = whole.addr + self.offset() as u64;
        RemoteBuf { addr, len: self.len as u64, rkey: whole.rkey }
    }

    fn within(&self, len: usize) -> Result<(), CapacityError> {
        if len <= self.capacity {
            return Ok(());
        }
        Err(CapacityError { asked: len, capacity: self.capacity })
    }
}

impl<R: OneDevice> Part<R> {
    /// The lkey: for this host's own work requests.
    #[inline]
    pub fn lkey(&self) -> LKey {
        self.block.lkey()
    }

    /// Both keys.
    pub fn keys(&self) -> Keys {
        self.block.keys()
    }

    /// The scatter-gather element for the whole length; as with [`Buf::sge`], cut to `u32::MAX` bytes.
    pub fn sge(&self) -> Sge {
        let whole = self.block.sge();
        let length = u32::try_from(self.len).unwrap_or(u32::MAX);
        Sge { addr: whole.addr + self.offset() as u64, length, lkey: whole.lkey }
    }

    /// The scatter-gather element for `len` bytes from `offset`; `None` if they are not all inside.
    pub fn sge_range(&self, offset: usize, len: u32) -> Option<Sge> {
        let end = offset.checked_add(len as usize)?;
        let whole = self.sge();
        (end <= self.len).then_some(Sge { addr: whole.addr + offset as u64, length: len, ..whole })
    }
}

impl Part {
    /// What a peer needs to reach these bytes; `None` if the pool's access class lets it do nothing.
    ///
    /// The right that the rkey conveys is over the whole arena, not over this part alone.
    pub fn remote(&self) -> Option<RemoteBuf> {
        self.block.remote().map(|whole| self.remote_in(whole))
    }
}

impl Part<Remote> {
    /// What a peer needs to reach these bytes.
    ///
    /// The right that the rkey conveys is over the whole arena, not over this part alone.
    pub fn remote(&self) -> RemoteBuf {
        self.remote_in(self.block.remote())
    }
}

impl<R> From<Buf<R>> for Part<R> {
    /// Makes a part of all of a buffer. Allocates its count on the heap.
    fn from(mut buf: Buf<R>) -> Self {
        let (len, capacity) = (buf.len(), buf.capacity());
        // What the parts show is theirs to say.
        let whole = buf.set_len(capacity);
        debug_assert!(whole.is_ok());
        let start = NonNull::new(buf.as_mut_ptr()).unwrap_or(NonNull::dangling());
        Self { block: Arc::new(buf), start, len, capacity }
    }
}

impl<R> Deref for Part<R> {
    type Target = [u8];

    #[inline]
    fn deref(&self) -> &[u8] {
        // SAFETY: `len` bytes from `start` are inside the block, which is mapped and initialised while the
        // count keeps it, and are this part's alone: parts are made by dividing one that owned all.
        unsafe { slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl<R> DerefMut for Part<R> {
    #[inline]
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`; `&mut self` makes it exclusive. The buffer behind the count is never
        // dereferenced while it has parts.
        unsafe { slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

impl<R> AsRef<[u8]> for Part<R> {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl<R> AsMut<[u8]> for Part<R> {
    fn as_mut(&mut self) -> &mut [u8] {
        self
    }
}

impl<R: Reach> fmt::Debug for Part<R> {
    /// Shows where the part is, and its buffer, never what is in it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Part")
            .field("addr", &self.start)
            .field("len", &self.len)
            .field("capacity", &self.capacity)
            .field("of", &self.block)
            .finish()
    }
}
