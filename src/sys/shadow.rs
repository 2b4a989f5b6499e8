//! What tools that watch every access are told of a pool's memory: that nobody may touch what is free. The
//! address sanitizer (built with `--cfg pinpool_asan`, where its run-time library is) and valgrind (feature
//! `valgrind`); without either the calls are nothing.
//!
//! A tool sees what this process's code does, and nothing of what a device does.

use std::ptr::NonNull;

#[cfg(pinpool_asan)]
unsafe extern "C" {
    fn __asan_poison_memory_region(addr: *const std::ffi::c_void, len: usize);
    fn __asan_unpoison_memory_region(addr: *const std::ffi::c_void, len: usize);
}

/// Says that nobody may touch a part of an arena. In units of 8 bytes for the address sanitizer, whose first unit
/// stays as it is if it is touched in part.
#[inline(always)]
pub(crate) fn hide(ptr: NonNull<u8>, len: usize) {
    let _ = (ptr, len);
    #[cfg(pinpool_asan)]
    // SAFETY: marks bytes in the sanitizer's own tables; the callers' range is memory of the process.
    unsafe {
        __asan_poison_memory_region(ptr.as_ptr().cast(), len);
    }
    #[cfg(feature = "valgrind")]
    valgrind::request(valgrind::MAKE_MEM_NOACCESS, ptr.as_ptr() as usize, len);
}

/// Says that a part of an arena may be touched, and has been written.
#[inline(always)]
pub(crate) fn show(ptr: NonNull<u8>, len: usize) {
    let _ = (ptr, len);
    #[cfg(pinpool_asan)]
    // SAFETY: as in `hide`.
    unsafe {
        __asan_unpoison_memory_region(ptr.as_ptr().cast(), len);
    }
    #[cfg(feature = "valgrind")]
    valgrind::request(valgrind::MAKE_MEM_DEFINED, ptr.as_ptr() as usize, len);
}

/// Client requests: instructions that do nothing on a processor, and that valgrind takes as a call. The
/// sequences and numbers are the interface that valgrind.h and memcheck.h promise to keep.
#[cfg(feature = "valgrind")]
mod valgrind {
    const MEMCHECK: usize = (b'M' as usize) << 24 | (b'C' as usize) << 16;
    pub(super) const MAKE_MEM_NOACCESS: usize = MEMCHECK;
    pub(super) const MAKE_MEM_DEFINED: usize = MEMCHECK + 2;

    #[inline(always)]
    pub(super) fn request(number: usize, addr: usize, len: usize) {
        let args: [usize; 6] = [number, addr, len, 0, 0, 0];
        #[cfg(target_arch = "x86_64")]
        // SAFETY: four rotations that add up to none, and an exchange of a register with itself: on a processor
        // nothing changes but flags. Under valgrind `args` is read, which lives, and the answer put into rdx.
        unsafe {
            std::arch::asm!(
                "rol rdi, 3", "rol rdi, 13", "rol rdi, 61", "rol rdi, 51", "xchg rbx, rbx",
                in("rax") args.as_ptr(),
                inout("rdx") 0usize => _,
            );
        }
        #[cfg(target_arch = "aarch64")]
        // SAFETY: as above, with x3 and x4.
        unsafe {
            std::arch::asm!(
                "ror x12, x12, #3", "ror x12, x12, #13", "ror x12, x12, #51", "ror x12, x12, #61",
                "orr x10, x10, x10",
                in("x4") args.as_ptr(),
                inout("x3") 0usize => _,
            );
        }
        #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
        let _ = args;
    }
}
