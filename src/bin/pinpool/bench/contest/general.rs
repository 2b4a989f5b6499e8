//! The general allocators. Each is called directly, not through Rust's global allocator, and told the
//! size when it frees if it can use that. They know no keys, which is to their advantage.

use std::marker::PhantomData;

use super::{
    bed::Bed,
    contender::{Contender, Handle, Raw},
    opaque::keep,
    spec::{Case, Spec},
};

/// A `malloc` and its `free`.
pub(crate) trait Malloc: 'static {
    const NAME: &'static str;

    fn malloc(bytes: usize) -> *mut u8;

    /// # Safety
    /// `p` came from `malloc(bytes)` and was not freed since.
    unsafe fn free(p: *mut u8, bytes: usize);
}

/// Any of them as a contender.
pub(crate) struct General<M>(PhantomData<M>);

impl<M: Malloc> Contender for General<M> {
    const NAME: &'static str = M::NAME;
    type Shared = ();
    type Handle = GeneralHandle<M>;

    fn runs(spec: &Spec) -> bool {
        !matches!(spec.case, Case::KeysOf | Case::Fill)
    }

    fn shared(_: &Bed, _: &Spec) -> Result<(), String> {
        Ok(())
    }
}

pub(crate) struct GeneralHandle<M>(PhantomData<M>);

impl<M: Malloc> Handle for GeneralHandle<M> {
    type Shared = ();
    type Held = Raw;

    fn new((): &()) -> Result<Self, String> {
        Ok(Self(PhantomData))
    }

    #[inline(always)]
    fn take(&mut self, bytes: usize) -> Option<Raw> {
        let p = M::malloc(bytes);
        (!p.is_null()).then_some(Raw(p))
    }

    #[inline(always)]
    fn put(&mut self, held: Raw, bytes: usize) {
        // SAFETY: `held` is what `take` made of `malloc(bytes)`, and is gone now.
        unsafe { M::free(held.0, bytes) }
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

/// The C library's.
pub(crate) struct System;

impl Malloc for System {
    const NAME: &'static str = "system";

    #[inline(always)]
    fn malloc(bytes: usize) -> *mut u8 {
        // SAFETY: any size may be asked for.
        unsafe { libc::malloc(bytes) }.cast()
    }

    #[inline(always)]
    unsafe fn free(p: *mut u8, _: usize) {
        // SAFETY: the caller's promise.
        unsafe { libc::free(p.cast()) }
    }
}

#[cfg(feature = "rivals")]
pub(crate) struct MiMalloc;

#[cfg(feature = "rivals")]
impl Malloc for MiMalloc {
    const NAME: &'static str = "mimalloc";

    #[inline(always)]
    fn malloc(bytes: usize) -> *mut u8 {
        // SAFETY: any size may be asked for.
        unsafe { libmimalloc_sys::mi_malloc(bytes) }.cast()
    }

    #[inline(always)]
    unsafe fn free(p: *mut u8, _: usize) {
        // SAFETY: the caller's promise.
        unsafe { libmimalloc_sys::mi_free(p.cast()) }
    }
}

#[cfg(feature = "rivals")]
pub(crate) struct Jemalloc;

#[cfg(feature = "rivals")]
impl Malloc for Jemalloc {
    const NAME: &'static str = "jemalloc";

    #[inline(always)]
    fn malloc(bytes: usize) -> *mut u8 {
        // SAFETY: any size may be asked for.
        unsafe { tikv_jemalloc_sys::malloc(bytes) }.cast()
    }

    #[inline(always)]
    unsafe fn free(p: *mut u8, bytes: usize) {
        // SAFETY: the caller's promise.
        unsafe { tikv_jemalloc_sys::sdallocx(p.cast(), bytes, 0) }
    }
}

#[cfg(feature = "rivals")]
pub(crate) struct SnMalloc;

/// What C's `malloc` promises.
#[cfg(feature = "rivals")]
const SN_ALIGN: usize = 16;

#[cfg(feature = "rivals")]
impl Malloc for SnMalloc {
    const NAME: &'static str = "snmalloc";

    #[inline(always)]
    fn malloc(bytes: usize) -> *mut u8 {
        // SAFETY: the alignment is a power of two, and any size may be asked for.
        unsafe { snmalloc_sys::sn_rust_alloc(SN_ALIGN, bytes) }.cast()
    }

    #[inline(always)]
    unsafe fn free(p: *mut u8, bytes: usize) {
        // SAFETY: the caller's promise; alignment and size are those of `malloc`.
        unsafe { snmalloc_sys::sn_rust_dealloc(p.cast(), SN_ALIGN, bytes) };
    }
}
