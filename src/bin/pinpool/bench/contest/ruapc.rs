//! `ruapc-bufpool`, the nearest Rust crate. Without devices and without asking for keys, which is to its
//! advantage.

use std::sync::Arc;

use ruapc_bufpool::{Buffer, BufferPool, BufferPoolBuilder, EmptyDevices};

use super::{
    bed::Bed,
    contender::{Contender, Handle},
    opaque::keep,
    spec::{Case, Spec},
};

pub(crate) struct Ruapc;

impl Contender for Ruapc {
    const NAME: &'static str = "ruapc-bufpool";
    type Shared = Arc<BufferPool>;
    type Handle = RuapcHandle;

    fn runs(spec: &Spec) -> bool {
        spec.case != Case::KeysOf
    }

    fn shared(bed: &Bed, _: &Spec) -> Result<Self::Shared, String> {
        // A thread keeps megabytes of each class to itself: plenty, so that it is never short.
        Ok(BufferPoolBuilder::new(Arc::new(EmptyDevices)).max_memory(bed.capacity()).build())
    }
}

pub(crate) struct RuapcHandle {
    pool: Arc<BufferPool>,
}

impl Handle for RuapcHandle {
    type Shared = Arc<BufferPool>;
    type Held = Buffer;

    fn new(shared: &Self::Shared) -> Result<Self, String> {
        Ok(Self { pool: shared.clone() })
    }

    #[inline(always)]
    fn take(&mut self, bytes: usize) -> Option<Buffer> {
        self.pool.allocate(bytes).ok()
    }

    #[inline(always)]
    fn put(&mut self, held: Buffer, _: usize) {
        drop(held);
    }

    #[inline(always)]
    fn addr(held: &Buffer) -> *mut u8 {
        held.as_ptr().cast_mut()
    }

    #[inline(always)]
    fn show(held: &Buffer) {
        keep(held.as_ptr(), 0, 0);
    }

    fn block_bytes(held: &Buffer) -> Option<usize> {
        Some(held.capacity())
    }
}
