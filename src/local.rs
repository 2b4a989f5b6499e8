//! A handle for one thread.

use std::fmt;

use crate::{
    buf::Buf,
    error::AllocError,
    magazine::ThreadGate,
    pool::Pool,
    size_class::{self, MAX_BLOCK},
    thread,
};

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
pub struct LocalPool {
    pool: Pool,
    /// This thread's; a raw pointer also keeps the handle from being `Send`.
    gate: *const ThreadGate,
}

impl LocalPool {
    pub(crate) fn new(pool: Pool) -> Self {
        let gate = pool.gate();
        Self { pool, gate }
    }

    /// Allocates a buffer of `len` bytes; see [`Pool::alloc`].
    ///
    /// # Errors
    /// As [`Pool::alloc`].
    #[inline]
    pub fn alloc(&self, len: usize) -> Result<Buf, AllocError> {
        if len.wrapping_sub(1) < MAX_BLOCK {
            let class = size_class::class_of(len);
            // SAFETY: made on this thread and not `Send`, so the gate is this thread's own and alive.
            if let Some(entry) = unsafe { &*self.gate }.pop(class) {
                return Ok(Buf::new(self.pool.core_ptr(), entry, len, class));
            }
        }
        self.pool.alloc_slow(len, 1)
    }

    /// Frees a buffer without looking for the thread's magazines; the same as dropping it, a little
    /// faster. A buffer of another pool is simply dropped.
    #[inline]
    pub fn free(&self, buf: Buf) {
        if !buf.belongs_to(self.pool.core_ptr()) {
            return;
        }
        let (entry, class) = buf.into_parts();
        // SAFETY: as in `alloc`.
        if !unsafe { &*self.gate }.push(class, entry) {
            // SAFETY: a block of this very pool, given up by its handle and not pushed.
            unsafe { crate::pool::Core::free_slow(self.pool.core_ptr(), entry, class) };
        }
    }

    /// The pool.
    pub fn pool(&self) -> &Pool {
        &self.pool
    }
}

impl fmt::Debug for LocalPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("LocalPool").field(&self.pool).finish()
    }
}

impl Pool {
    pub(crate) fn gate(&self) -> *const ThreadGate {
        // SAFETY: the core lives while this handle does.
        thread::gate_at(unsafe { self.core_ptr().as_ref() }.slot_offset)
    }
}
