//! The pool itself, in three ways: through the shared handle, through the thread's own, and coloured.
//! All hand out the address and both keys.

use pinpool::{Buf, LocalPool, Pool};

use super::{
    bed::Bed,
    contender::{Contender, Handle},
    opaque::keep,
    spec::{Case, Spec},
};

#[inline(always)]
fn show(held: &Buf) {
    let keys = held.keys();
    keep(held.as_ptr(), keys.lkey.get(), keys.rkey.map_or(0, |rkey| rkey.get()));
}

/// The keys are those that a look-up finds, on the first byte and on the last; nobody else's region
/// begins in between.
fn check(pool: &Pool, held: &Buf, bytes: usize) -> Result<(), String> {
    if held.len() != bytes {
        return Err(format!("asked for {bytes} bytes, got {}", held.len()));
    }
    let keys = held.keys();
    if keys.rkey.is_none() {
        return Err("a pool for remote access gave no rkey".to_owned());
    }
    let (first, last) = (held.as_ptr(), held.as_ptr().wrapping_add(bytes - 1));
    if pool.keys_of(first) != Some(keys) || pool.keys_of(last) != Some(keys) {
        return Err(format!("the keys of {first:?} are not those of its arena"));
    }
    Ok(())
}

/// `Pool::alloc`, and dropping the buffer.
pub(crate) struct Plain;

impl Contender for Plain {
    const NAME: &'static str = "pool";
    type Shared = Pool;
    type Handle = PoolHandle;

    fn runs(spec: &Spec) -> bool {
        spec.case != Case::KeysOf
    }

    fn shared(bed: &Bed, _: &Spec) -> Result<Pool, String> {
        bed.pool(false)
    }
}

/// The same on a coloured pool.
pub(crate) struct Coloured;

impl Contender for Coloured {
    const NAME: &'static str = "pool-coloured";
    type Shared = Pool;
    type Handle = PoolHandle;

    fn runs(spec: &Spec) -> bool {
        // At one thread; what more of them do is the plain pool's to show.
        spec.case != Case::KeysOf && (spec.threads == 1 || spec.case == Case::Handoff)
    }

    fn shared(bed: &Bed, _: &Spec) -> Result<Pool, String> {
        bed.pool(true)
    }
}

pub(crate) struct PoolHandle {
    pool: Pool,
}

impl Handle for PoolHandle {
    type Shared = Pool;
    type Held = Buf;

    fn new(pool: &Pool) -> Result<Self, String> {
        Ok(Self { pool: pool.clone() })
    }

    #[inline(always)]
    fn take(&mut self, bytes: usize) -> Option<Buf> {
        self.pool.alloc(bytes).ok()
    }

    #[inline(always)]
    fn put(&mut self, held: Buf, _: usize) {
        drop(held);
    }

    #[inline(always)]
    fn addr(held: &Buf) -> *mut u8 {
        held.as_ptr().cast_mut()
    }

    #[inline(always)]
    fn show(held: &Buf) {
        show(held);
    }

    fn check(pool: &Pool, held: &Buf, bytes: usize) -> Result<(), String> {
        check(pool, held, bytes)
    }

    fn block_bytes(held: &Buf) -> Option<usize> {
        Some(held.capacity())
    }
}

/// `LocalPool::alloc`, and dropping the buffer.
pub(crate) struct Local;

impl Contender for Local {
    const NAME: &'static str = "pool-local";
    type Shared = Pool;
    type Handle = LocalHandle;

    fn runs(spec: &Spec) -> bool {
        !matches!(spec.case, Case::KeysOf | Case::Fill)
    }

    fn shared(bed: &Bed, _: &Spec) -> Result<Pool, String> {
        bed.pool(false)
    }
}

pub(crate) struct LocalHandle {
    local: LocalPool,
}

impl Handle for LocalHandle {
    type Shared = Pool;
    type Held = Buf;

    fn new(pool: &Pool) -> Result<Self, String> {
        Ok(Self { local: pool.local() })
    }

    #[inline(always)]
    fn take(&mut self, bytes: usize) -> Option<Buf> {
        self.local.alloc(bytes).ok()
    }

    #[inline(always)]
    fn put(&mut self, held: Buf, _: usize) {
        drop(held);
    }

    #[inline(always)]
    fn addr(held: &Buf) -> *mut u8 {
        held.as_ptr().cast_mut()
    }

    #[inline(always)]
    fn show(held: &Buf) {
        show(held);
    }

    fn check(pool: &Pool, held: &Buf, bytes: usize) -> Result<(), String> {
        check(pool, held, bytes)
    }

    fn block_bytes(held: &Buf) -> Option<usize> {
        Some(held.capacity())
    }
}
