//! What keeps the compiler from knowing or dropping things, at no instruction's cost.

/// Claims to use an address and its keys, and to read and write all memory that ever escaped: what was
/// stored before must be in memory, and what is read after must be loaded again.
#[inline(always)]
pub(crate) fn keep(addr: *const u8, lkey: u32, rkey: u32) {
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    // SAFETY: no instruction at all.
    unsafe {
        std::arch::asm!(
            "/* {0} {1} {2} */",
            in(reg) addr, in(reg) lkey as u64, in(reg) rkey as u64,
            options(nostack, preserves_flags)
        );
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    std::hint::black_box((addr, lkey, rkey));
}

/// The same for an address without keys.
#[inline(always)]
pub(crate) fn keep_addr<T: ?Sized>(addr: *const T) {
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    // SAFETY: no instruction at all.
    unsafe {
        std::arch::asm!("/* {0} */", in(reg) addr.cast::<u8>(), options(nostack, preserves_flags));
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    std::hint::black_box(addr);
}

/// The same number, but the compiler no longer knows which, nor that it is the one of last time. Stands
/// for the code that lies between two calls of an allocator: what the one left in memory, the next must
/// load again, and a push and the pop after it are not melted into one.
#[inline(always)]
pub(crate) fn unknown(n: usize) -> usize {
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    {
        let mut n = n;
        // SAFETY: no instruction at all.
        unsafe {
            std::arch::asm!("/* {0} */", inout(reg) n, options(nostack, preserves_flags));
        }
        n
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    std::hint::black_box(n)
}
