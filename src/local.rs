//! A handle for one thread.

use std::{fmt, time::Duration};

use crate::{buf::Buf, error::AllocError, magazine::ThreadSlot, pool::Pool, reach::Any, thread};

/// A handle of a [`Pool`] that stays on its thread and so need not look for the thread's magazines.
///
/// It allocates from the same magazines as the pool itself does on this thread. Its buffers are ordinary
/// ones.
///
/// ```compile_fail
/// # let pool = pinpool::Pool::builder().device(pinpool::Device::soft()).capacity(1 << 20).build().unwrap();
/// let local = pool.local();
/// std::thread::spawn(move || local.alloc(64)); // not Send
/// ```
pub struct LocalPool<R = Any> {
    pool: Pool<R>,
    /// This thread's; a raw pointer also keeps the handle from being `Send`.
    slot: *const ThreadSlot,
}

impl<R> LocalPool<R> {
    pub(crate) fn new(pool: Pool<R>) -> Self {
        let slot = thread::slot_at(pool.inner().slot_offset);
        Self { pool, slot }
    }

    /// Allocates a buffer of `len` bytes; see [`Pool::alloc`].
    ///
    /// # Errors
    /// As [`Pool::alloc`].
    #[inline]
    #[track_caller]
    pub fn alloc(&self, len: usize) -> Result<Buf<R>, AllocError> {
        // Made on this thread and not `Send`, so the slot is this thread's own.
        self.pool.inner().alloc(self.slot, len)
    }

    /// Allocates a buffer of `len` bytes, waiting up to `timeout`; see [`Pool::alloc_wait`].
    ///
    /// # Errors
    /// As [`Pool::alloc_wait`].
    #[inline]
    #[track_caller]
    pub fn alloc_wait(&self, len: usize, timeout: Duration) -> Result<Buf<R>, AllocError> {
        self.pool.alloc_wait(len, timeout)
    }

    /// The pool.
    pub fn pool(&self) -> &Pool<R> {
        &self.pool
    }
}

impl<R> fmt::Debug for LocalPool<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("LocalPool").field(&self.pool).finish()
    }
}
