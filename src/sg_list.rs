//! Several buffers as one scatter-gather list, laid out as verbs want it, without allocating.

use std::{fmt, marker::PhantomData, ops::Deref};

use crate::{
    access::{LKey, Sge},
    batch::Batch,
    buf::Buf,
    reach::OneDevice,
};

/// Up to `N` scatter-gather elements, in order, each laid out as `struct ibv_sge` is: a work request's
/// `sg_list` is [`as_ptr`](slice::as_ptr), its `num_sge` [`len`](slice::len). Lies where it is put, on the
/// stack say; nothing is allocated.
///
/// It borrows the buffers, so none of them can be dropped while it is there. Once the work request has been
/// posted, keep the buffers themselves until its completion: as handles, or as tokens.
///
/// ```
/// # let pool = pinpool::Pool::builder().device(pinpool::Device::soft()).capacity(1 << 20).build()?;
/// let (header, body) = (pool.alloc(64)?, pool.alloc(4096)?);
/// let mut list = pinpool::SgList::<4>::new();
/// list.push(&header)?;
/// list.push_range(&body, 0, 1000)?;
/// assert_eq!((list.len(), list.bytes()), (2, 1064));
/// assert_eq!(list[1].length, 1000);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// ```compile_fail
/// # let pool = pinpool::Pool::builder().device(pinpool::Device::soft()).capacity(1 << 20).build().unwrap();
/// let mut list = pinpool::SgList::<4>::new();
/// let buf = pool.alloc(64).unwrap();
/// list.push(&buf).unwrap();
/// drop(buf); // borrowed
/// list.len();
/// ```
#[derive(Clone)]
pub struct SgList<'a, const N: usize> {
    elements: [Sge; N],
    len: usize,
    _borrows: PhantomData<&'a [u8]>,
}

/// Why a buffer was not added. The list is unchanged.
#[derive(Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SgListError {
    /// The list has no room.
    #[error("a list of {capacity} elements cannot take {asked} more to its {len}")]
    Full {
        /// Elements that it holds at most.
        capacity: usize,
        /// Elements that it has.
        len: usize,
        /// Elements that were to be added.
        asked: usize,
    },
    /// More bytes than one element can name.
    #[error("{len} bytes do not fit one element, whose length has 32 bits; add them by push_range")]
    TooLong {
        /// Bytes of the buffer.
        len: usize,
    },
    /// Bytes that the buffer does not have.
    #[error("{len} bytes from {offset} are not all inside a buffer of {have}")]
    OutOfRange {
        /// Bytes from the buffer's start.
        offset: usize,
        /// Bytes asked.
        len: u32,
        /// Bytes of the buffer.
        have: usize,
    },
}

crate::error::message_in_debug!(SgListError);

impl<'a, const N: usize> SgList<'a, N> {
    /// Makes an empty list.
    pub const fn new() -> Self {
        let none = Sge { addr: 0, length: 0, lkey: LKey::new(0) };
        Self { elements: [none; N], len: 0, _borrows: PhantomData }
    }

    fn add(&mut self, sge: Sge) -> Result<(), SgListError> {
        let full = SgListError::Full { capacity: N, len: self.len, asked: 1 };
        *self.elements.get_mut(self.len).ok_or(full)? = sge;
        self.len += 1;
        Ok(())
    }

    /// Adds a buffer, its whole length.
    ///
    /// # Errors
    /// [`SgListError::Full`], [`SgListError::TooLong`].
    #[inline]
    pub fn push<R: OneDevice>(&mut self, buf: &'a Buf<R>) -> Result<(), SgListError> {
        if u32::try_from(buf.len()).is_err() {
            return Err(SgListError::TooLong { len: buf.len() });
        }
        self.add(buf.sge())
    }

    /// Adds a buffer that the device is to write to: borrowed exclusively.
    ///
    /// # Errors
    /// As [`push`](SgList::push).
    #[inline]
    pub fn push_mut<R: OneDevice>(&mut self, buf: &'a mut Buf<R>) -> Result<(), SgListError> {
        self.push(buf)
    }

    /// Adds `len` bytes of a buffer, from `offset` on.
    ///
    /// # Errors
    /// [`SgListError::Full`], [`SgListError::OutOfRange`].
    #[inline]
    pub fn push_range<R: OneDevice>(
        &mut self,
        buf: &'a Buf<R>,
        offset: usize,
        len: u32,
    ) -> Result<(), SgListError> {
        let beyond = SgListError::OutOfRange { offset, len, have: buf.len() };
        self.add(buf.sge_range(offset, len).ok_or(beyond)?)
    }

    /// Adds all buffers of a batch, in the order of [`Batch::sges`].
    ///
    /// # Errors
    /// As [`push`](SgList::push); either all are added or none.
    pub fn push_batch<R: OneDevice>(&mut self, batch: &'a Batch<R>) -> Result<(), SgListError> {
        if batch.len() > N - self.len {
            let (capacity, len) = (N, self.len);
            return Err(SgListError::Full { capacity, len, asked: batch.len() });
        }
        if u32::try_from(batch.buf_len()).is_err() {
            return Err(SgListError::TooLong { len: batch.buf_len() });
        }
        batch.sges().try_for_each(|sge| self.add(sge))
    }

    /// Empties it; the buffers stay what they are.
    pub fn clear(&mut self) {
        self.len = 0;
    }

    /// How many elements it has room for in all.
    pub const fn capacity(&self) -> usize {
        N
    }

    /// Bytes of all elements together.
    pub fn bytes(&self) -> u64 {
        self.iter().map(|sge| u64::from(sge.length)).sum()
    }
}

impl<const N: usize> Default for SgList<'_, N> {
    fn default() -> Self {
        Self::new()
    }
}

impl<const N: usize> Deref for SgList<'_, N> {
    type Target = [Sge];

    #[inline]
    fn deref(&self) -> &[Sge] {
        &self.elements[..self.len]
    }
}

impl<const N: usize> fmt::Debug for SgList<'_, N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}
