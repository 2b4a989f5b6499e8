//! The `bytes` crate on buffers and parts.
//!
//! **What stays registered.** A [`Bytes`] made of a [`Buf`] or [`Part`] is that buffer: its clones and slices
//! share the bytes, and the block goes back when the last of them is dropped. **What leaves registered
//! memory:** `Vec::from(bytes)` and `BytesMut::from(bytes)` copy into the heap, always, and then give the
//! block back. The types show it: `Buf` and `Part` have `sge()`; a `Bytes` answers to
//! [`Pool::keys_of`](crate::Pool::keys_of) of its address; a `BytesMut` and a `Vec<u8>` are never registered.
//!
//! A `Bytes` costs one allocation on the heap, for its count: the crate has no public way to bring one's own.
//! Many messages in one buffer can share that of one `Bytes` by slicing it.

use bytes::{BufMut, Bytes, buf::UninitSlice};

use super::part::Part;
use crate::{buf::Buf, reach::Reach};

/// Makes it immutable and shareable, without copying; the length is the buffer's. One allocation on the heap.
///
/// The bytes stay registered where they are, but a `Bytes` knows no keys: ask
/// [`Pool::keys_of`](crate::Pool::keys_of). Turning it into a `Vec` or `BytesMut` copies it into the heap.
impl<R: Reach> From<Buf<R>> for Bytes {
    fn from(buf: Buf<R>) -> Self {
        Self::from_owner(buf)
    }
}

/// As for [`Buf`].
impl<R: Reach> From<Part<R>> for Bytes {
    fn from(part: Part<R>) -> Self {
        Self::from_owner(part)
    }
}

// SAFETY: the memory beyond the length is the buffer's own up to its capacity, and stays where it is;
// `chunk_mut` gives exactly that, and `advance_mut` moves the length over it.
unsafe impl<R> BufMut for Buf<R> {
    /// What is left of the capacity. Buffers never grow beyond it: `put_slice` and the like panic when
    /// they meet the end, as their contract has it. Ask first, or use [`std::io::Write`].
    #[inline]
    fn remaining_mut(&self) -> usize {
        self.capacity() - self.len()
    }

    #[inline]
    unsafe fn advance_mut(&mut self, n: usize) {
        let len = self.len().saturating_add(n).min(self.capacity());
        // At most the capacity, so this cannot fail.
        _ = self.set_len(len);
    }

    #[inline]
    fn chunk_mut(&mut self) -> &mut UninitSlice {
        let (len, room) = (self.len(), self.remaining_mut());
        // SAFETY: `room` bytes beyond the length are inside the block, and exclusively borrowed with it.
        unsafe { UninitSlice::from_raw_parts_mut(self.as_mut_ptr().add(len), room) }
    }
}

// SAFETY: as for `Buf`; the capacity is the part's own.
unsafe impl<R> BufMut for Part<R> {
    #[inline]
    fn remaining_mut(&self) -> usize {
        self.capacity() - self.len()
    }

    #[inline]
    unsafe fn advance_mut(&mut self, n: usize) {
        let len = self.len().saturating_add(n).min(self.capacity());
        // At most the capacity, so this cannot fail.
        _ = self.set_len(len);
    }

    #[inline]
    fn chunk_mut(&mut self) -> &mut UninitSlice {
        let (first, room) = self.spare();
        // SAFETY: `room` bytes beyond the length are the part's own, and exclusively borrowed with it.
        unsafe { UninitSlice::from_raw_parts_mut(first.as_ptr(), room) }
    }
}

/// Takes bytes off the front as they are read: they are no longer the part's. For a whole [`Buf`] use
/// [`std::io::Cursor`].
impl<R> bytes::Buf for Part<R> {
    #[inline]
    fn remaining(&self) -> usize {
        self.len()
    }

    #[inline]
    fn chunk(&self) -> &[u8] {
        self
    }

    #[inline]
    fn advance(&mut self, n: usize) {
        self.take_off(n);
    }
}
