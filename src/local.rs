//! A handle for one thread.

use std::fmt;

use crate::{
    buf::Buf,
    error::AllocError,
    magazine::ThreadGate,
    pool::{Core, Pool, PoolRef},
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
        let gate = thread::gate_at(pool.inner().slot_offset);
        Self { pool, gate }
    }

    /// Allocates a buffer of `len` bytes; see [`Pool::alloc`].
    ///
    /// # Errors
    /// As [`Pool::alloc`].
    #[inline]
    pub fn alloc(&self, len: usize) -> Result<Buf, AllocError> {
        // Made on this thread and not `Send`, so the gate is this thread's own.
        self.pool.alloc_through(self.gate, len)
    }

    /// Frees a buffer without looking for the thread's magazines; the same as dropping it, a little
    /// faster. A buffer of another pool is simply dropped.
    #[inline]
    pub fn free(&self, buf: Buf) {
        let PoolRef { core, .. } = self.pool.inner();
        if !buf.belongs_to(core) {
            return;
        }
        let (entry, class) = buf.into_parts();
        // SAFETY: made on this thread and not `Send`, so the gate is this thread's own and alive.
        if !unsafe { &*self.gate }.push(class, entry) {
            // SAFETY: a block of this very pool, given up by its handle and not pushed.
            unsafe { Core::free_slow(core, entry, class) };
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
