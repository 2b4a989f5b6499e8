//! Buffers as plain old data: views of their bytes as `T`, checked, without a copy.
//!
//! Manages lengths and alignment. Which types are plain old data is `bytemuck`'s to say.

use std::{
    fmt,
    marker::PhantomData,
    ops::{Deref, DerefMut},
};

use bytemuck::{AnyBitPattern, NoUninit, PodCastError};

use crate::{
    buf::Buf,
    error::AllocError,
    pool::Pool,
    reach::{Any, Reach},
};

/// Why bytes are no view of a type.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PodError {
    /// The bytes do not begin at a multiple of the type's alignment.
    #[error("the bytes begin at {addr:#x}, and {ty} is aligned to {align}")]
    Alignment {
        /// Where they begin.
        addr: usize,
        /// What the type asks for.
        align: usize,
        /// The type's name.
        ty: &'static str,
    },
    /// There are too few of them, or they are not a whole number of values.
    #[error("{len} bytes are not a whole number of {ty}, of {size} bytes each")]
    Length {
        /// Bytes there are.
        len: usize,
        /// Bytes of one value.
        size: usize,
        /// The type's name.
        ty: &'static str,
    },
    /// The length asked for does not fit the address space.
    #[error("{count} values of {size} bytes do not fit the address space")]
    TooMany {
        /// Values asked.
        count: usize,
        /// Bytes of one value.
        size: usize,
    },
    /// The pool has no such buffer.
    #[error(transparent)]
    Alloc(#[from] AllocError),
}

crate::error::message_in_debug!(PodError);

fn explain<T>(bytes: &[u8], error: PodCastError) -> PodError {
    let ty = std::any::type_name::<T>();
    match error {
        PodCastError::TargetAlignmentGreaterAndInputNotAligned => {
            PodError::Alignment { addr: bytes.as_ptr() as usize, align: align_of::<T>(), ty }
        }
        _ => PodError::Length { len: bytes.len(), size: size_of::<T>(), ty },
    }
}

impl<R> Buf<R> {
    /// All bytes as values of a plain type.
    ///
    /// # Errors
    /// [`PodError::Length`] if they are not a whole number of them; [`PodError::Alignment`] if the type is
    /// aligned more strictly than the buffer, which is aligned to 64 at least.
    pub fn view<T: AnyBitPattern>(&self) -> Result<&[T], PodError> {
        bytemuck::try_cast_slice(self).map_err(|e| explain::<T>(self, e))
    }

    /// All bytes as values of a plain type, for writing.
    ///
    /// # Errors
    /// As [`view`](Buf::view).
    pub fn view_mut<T: AnyBitPattern + NoUninit>(&mut self) -> Result<&mut [T], PodError> {
        // Looked at first, since an error cannot give a mutable borrow back.
        self.view::<T>()?;
        let addr = self.as_ptr() as usize;
        bytemuck::try_cast_slice_mut(&mut self[..]).map_err(|_| PodError::Alignment {
            addr,
            align: align_of::<T>(),
            ty: std::any::type_name::<T>(),
        })
    }

    /// Becomes the owner of values of a plain type.
    ///
    /// # Errors
    /// As [`view`](Buf::view); the buffer goes back to its pool then.
    pub fn typed<T: AnyBitPattern + NoUninit>(self) -> Result<Typed<T, R>, PodError> {
        self.view::<T>()?;
        Ok(Typed { buf: self, _holds: PhantomData })
    }
}

impl<R> Pool<R> {
    /// Allocates a buffer for `count` values of a plain type, all bytes zero.
    ///
    /// # Errors
    /// [`PodError::Alloc`] as [`alloc`](Pool::alloc); [`PodError::TooMany`] for a length that overflows.
    pub fn alloc_typed<T: AnyBitPattern + NoUninit>(
        &self,
        count: usize,
    ) -> Result<Typed<T, R>, PodError> {
        let layout = std::alloc::Layout::array::<T>(count)
            .map_err(|_| PodError::TooMany { count, size: size_of::<T>() })?;
        let mut buf = self.alloc_layout(layout)?;
        buf.fill(0);
        buf.typed()
    }
}

/// A buffer of values of a plain type. It dereferences to them.
///
/// ```
/// # let pool = pinpool::Pool::builder().device(pinpool::Device::soft()).capacity(1 << 20).build()?;
/// let mut counters = pool.alloc_typed::<u64>(8)?;
/// counters[3] += 1;
/// assert_eq!(counters.buf().sge().length, 64);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Typed<T, R = Any> {
    /// Its length and address are fit for `T`, and stay so: it is lent out immutably alone.
    buf: Buf<R>,
    _holds: PhantomData<T>,
}

impl<T, R> Typed<T, R> {
    /// The buffer: for its keys and its scatter-gather element.
    pub fn buf(&self) -> &Buf<R> {
        &self.buf
    }

    /// The bytes again.
    pub fn into_buf(self) -> Buf<R> {
        self.buf
    }
}

impl<T: AnyBitPattern + NoUninit, R> Deref for Typed<T, R> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // Never fails: what `typed` has seen still holds.
        self.buf.view().unwrap_or_default()
    }
}

impl<T: AnyBitPattern + NoUninit, R> DerefMut for Typed<T, R> {
    fn deref_mut(&mut self) -> &mut [T] {
        self.buf.view_mut().unwrap_or_default()
    }
}

impl<T, R: Reach> fmt::Debug for Typed<T, R> {
    /// Shows where the values are, never what they are.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Typed")
            .field("type", &std::any::type_name::<T>())
            .field("buf", &self.buf)
            .finish()
    }
}
