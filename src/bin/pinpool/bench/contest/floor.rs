//! The floors: what no allocator can beat. A `Vec` of addresses, owned or in a thread-local.

use std::{
    cell::UnsafeCell,
    mem::{ManuallyDrop, take},
};

use pinpool::Pool;

use super::{
    bed::{Bed, Borrowed},
    contender::{Contender, Handle, Raw},
    opaque::{keep, keep_addr},
    spec::{Case, Spec},
};

/// More buffers than are ever out, so that none is the last.
const SPARE: usize = 8;

fn runs(spec: &Spec) -> bool {
    matches!(spec.case, Case::Pair | Case::BatchLifo | Case::BatchRandom | Case::Burst)
}

/// What a floor's handles are made from.
pub(crate) struct Shared {
    pool: Pool,
    buffers: usize,
    bytes: usize,
}

impl Shared {
    fn new(bed: &Bed, spec: &Spec) -> Result<Self, String> {
        Ok(Self { pool: bed.pool(false)?, buffers: spec.live + SPARE, bytes: spec.bytes })
    }

    fn borrow(&self) -> Result<(Borrowed, Vec<*mut u8>), String> {
        let mut borrowed = Borrowed::new(&self.pool, self.buffers, self.bytes)?;
        let free = borrowed.addrs().collect();
        Ok((borrowed, free))
    }
}

/// A `Vec` that its user owns.
pub(crate) struct OwnedVec;

impl Contender for OwnedVec {
    const NAME: &'static str = "floor-vec";
    type Shared = Shared;
    type Handle = OwnedVecHandle;

    fn runs(spec: &Spec) -> bool {
        runs(spec)
    }

    fn shared(bed: &Bed, spec: &Spec) -> Result<Shared, String> {
        Shared::new(bed, spec)
    }
}

pub(crate) struct OwnedVecHandle {
    free: Vec<*mut u8>,
    _borrowed: Borrowed,
}

impl Handle for OwnedVecHandle {
    type Shared = Shared;
    type Held = Raw;

    fn new(shared: &Shared) -> Result<Self, String> {
        let (borrowed, free) = shared.borrow()?;
        Ok(Self { free, _borrowed: borrowed })
    }

    /// Lets the `Vec`'s address escape: its length then lives in memory, as in any program where the
    /// list outlasts one loop.
    #[inline(always)]
    fn begin(&mut self) {
        keep_addr(&self.free);
    }

    #[inline(always)]
    fn take(&mut self, _: usize) -> Option<Raw> {
        self.free.pop().map(Raw)
    }

    #[inline(always)]
    fn put(&mut self, held: Raw, _: usize) {
        self.free.push(held.0);
    }

    #[inline(always)]
    fn addr(held: &Raw) -> *mut u8 {
        held.0
    }

    #[inline(always)]
    fn show(held: &Raw) {
        keep(held.0, 0, 0);
    }
}

/// A `Vec` in a thread-local.
pub(crate) struct TlsVec;

impl Contender for TlsVec {
    const NAME: &'static str = "floor-tls";
    type Shared = Shared;
    type Handle = TlsVecHandle;

    fn runs(spec: &Spec) -> bool {
        runs(spec)
    }

    fn shared(bed: &Bed, spec: &Spec) -> Result<Shared, String> {
        Shared::new(bed, spec)
    }
}

thread_local! {
    // Without a destructor, so that an access costs no test.
    static FREE: UnsafeCell<ManuallyDrop<Vec<*mut u8>>> =
        const { UnsafeCell::new(ManuallyDrop::new(Vec::new())) };
}

/// Runs `f` on this thread's list.
#[inline(always)]
fn with_free<T>(f: impl FnOnce(&mut Vec<*mut u8>) -> T) -> T {
    // SAFETY: the thread's own, and the closures here do not come back to it.
    FREE.with(|free| f(unsafe { &mut *free.get() }))
}

pub(crate) struct TlsVecHandle {
    _borrowed: Borrowed,
}

impl Handle for TlsVecHandle {
    type Shared = Shared;
    type Held = Raw;

    fn new(shared: &Shared) -> Result<Self, String> {
        let (borrowed, free) = shared.borrow()?;
        with_free(|list| *list = free);
        Ok(Self { _borrowed: borrowed })
    }

    #[inline(always)]
    fn begin(&mut self) {
        with_free(|list| keep_addr(list));
    }

    #[inline(always)]
    fn take(&mut self, _: usize) -> Option<Raw> {
        with_free(Vec::pop).map(Raw)
    }

    #[inline(always)]
    fn put(&mut self, held: Raw, _: usize) {
        with_free(|list| list.push(held.0));
    }

    #[inline(always)]
    fn addr(held: &Raw) -> *mut u8 {
        held.0
    }

    #[inline(always)]
    fn show(held: &Raw) {
        keep(held.0, 0, 0);
    }
}

impl Drop for TlsVecHandle {
    fn drop(&mut self) {
        drop(with_free(take));
    }
}
