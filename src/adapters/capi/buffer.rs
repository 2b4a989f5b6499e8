//! Buffers as C sees them: an address, which is all that is needed to give one back.

use std::{
    alloc::Layout,
    ffi::{c_int, c_void},
    ptr::NonNull,
    slice,
    time::Duration,
};

use super::{
    fail::{
        PINPOOL_FOREIGN, PINPOOL_OK, answered, code_of_alloc, code_of_free, fail, guarded, place,
    },
    pool::pinpool_t,
};
use crate::{access::Keys, buf::Buf, error::AllocError, magazine::Place, pool::Pool};

/// A buffer: whole, inside one memory region.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct pinpool_buf_t {
    /// First byte; what `pinpool_free` takes.
    pub addr: *mut c_void,
    /// Bytes asked for.
    pub len: usize,
    /// For this host's work requests.
    pub lkey: u32,
    /// For peers, if `has_rkey`; else 0.
    pub rkey: u32,
    /// 1 if the pool's rights let peers do anything, else 0.
    pub has_rkey: c_int,
}

/// The keys of a memory region.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct pinpool_keys_t {
    /// For this host's work requests.
    pub lkey: u32,
    /// For peers, if `has_rkey`; else 0.
    pub rkey: u32,
    /// 1 if the pool's rights let peers do anything, else 0.
    pub has_rkey: c_int,
}

impl From<Keys> for pinpool_keys_t {
    #[inline(always)]
    fn from(keys: Keys) -> Self {
        let rkey = keys.rkey.map_or(0, |k| k.get());
        Self { lkey: keys.lkey.get(), rkey, has_rkey: c_int::from(keys.rkey.is_some()) }
    }
}

/// Turns a buffer over to C.
#[inline(always)]
pub(super) fn give(buf: Buf) -> pinpool_buf_t {
    let (len, keys) = (buf.len(), pinpool_keys_t::from(buf.keys()));
    let addr = buf.into_raw().as_ptr().cast();
    pinpool_buf_t { addr, len, lkey: keys.lkey, rkey: keys.rkey, has_rkey: keys.has_rkey }
}

/// Has `from` allocate from a pool, or from a share of one, and turns the buffer over to C.
///
/// # Safety
/// `buf` is null or points to a place for a buffer.
pub(super) unsafe fn hand_over<S>(
    source: impl FnOnce() -> Result<S, c_int>,
    buf: *mut pinpool_buf_t,
    from: impl FnOnce(S) -> Result<Buf, AllocError>,
) -> c_int {
    answered(|| {
        let source = source()?;
        let buf = place(buf, "the place for the buffer")?;
        let got = from(source).map_err(|e| fail(code_of_alloc(&e), e))?;
        // SAFETY: not null, and so a place of the caller's (contract).
        unsafe { buf.write(give(got)) };
        Ok(())
    })
}

/// A timeout as C says it: what the clock cannot count to is for ever.
pub(super) fn timeout_of(ns: u64) -> Duration {
    match ns {
        u64::MAX => Duration::MAX,
        ns => Duration::from_nanos(ns),
    }
}

/// Takes a buffer back from C.
#[inline(always)]
pub(super) fn take(pool: &Pool, addr: *mut c_void) -> Result<Buf, c_int> {
    // SAFETY: the caller says that it has stopped using the bytes (contract of each entry).
    unsafe { pool.from_raw(addr.cast()) }.map_err(|e| fail(code_of_free(&e), e))
}

/// Frees a buffer for C.
#[inline(always)]
fn release(pool: &Pool, addr: *mut c_void) -> Result<(), c_int> {
    // SAFETY: the caller says that it has stopped using the bytes (contract of each entry).
    unsafe { pool.free_raw(addr.cast()) }.map_err(|e| fail(code_of_free(&e), e))
}

/// Allocates a buffer of `len` bytes, aligned to 64, to whole pages if its block is a multiple of 4 KiB.
/// Takes no lock and makes no system call as long as the thread's magazine has one.
///
/// The bytes are zero or what an earlier owner left. A length of 0 gives a buffer that must be freed.
/// Whoever has the address owns the buffer, until `pinpool_free`, on any thread.
///
/// # Safety
/// `pool` is null or came from `pinpool_open`, `buf` is null or points to a place for a buffer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinpool_alloc(
    pool: *const pinpool_t,
    len: usize,
    buf: *mut pinpool_buf_t,
) -> c_int {
    // SAFETY: passed on.
    let Some(door) = (unsafe { pinpool_t::door(pool) }) else {
        // SAFETY: passed on.
        return unsafe { alloc_slowly(pool, len, buf) };
    };
    if buf.is_null() {
        // SAFETY: passed on.
        return unsafe { alloc_slowly(pool, len, buf) };
    }
    let Some(block) = door.take(len) else {
        // SAFETY: passed on.
        return unsafe { alloc_slowly(pool, len, buf) };
    };
    let ((lkey, rkey), has_rkey) = (block.keys(), block.is_remote().into());
    let addr = block.ptr().as_ptr().cast();
    // SAFETY: not null, and so a place of the caller's (contract).
    unsafe { buf.write(pinpool_buf_t { addr, len, lkey, rkey, has_rkey }) };
    if !block.mark_at_hand() {
        // SAFETY: passed on; `buf` names the block now.
        return unsafe { mark_slowly(pool, len, buf) };
    }
    PINPOOL_OK as c_int
}

/// Marks the block that `buf` names, of the class that `len` says, as out. It has the same arguments as its
/// caller, which so need not be moved or kept.
///
/// # Safety
/// As `pinpool_alloc`; the pool is open, and the caller owns the block and gives it up.
// Called from Rust alone: such a function cannot unwind, so the call needs no frame.
#[cold]
#[inline(never)]
unsafe extern "C" fn mark_slowly(
    pool: *const pinpool_t,
    len: usize,
    buf: *mut pinpool_buf_t,
) -> c_int {
    guarded(|| {
        // SAFETY: written just now.
        let block = NonNull::new(unsafe { (*buf).addr }.cast());
        // SAFETY: passed on.
        if let (Some(door), Some(block)) = (unsafe { pinpool_t::door(pool) }, block) {
            // SAFETY: passed on.
            unsafe { door.mark(block, len) };
        }
        PINPOOL_OK as c_int
    })
}

/// # Safety
/// As `pinpool_alloc`.
#[cold]
#[inline(never)]
unsafe extern "C" fn alloc_slowly(
    pool: *const pinpool_t,
    len: usize,
    buf: *mut pinpool_buf_t,
) -> c_int {
    // SAFETY: passed on, both.
    unsafe { hand_over(|| pinpool_t::get(pool), buf, |pool: &Pool| pool.alloc(len)) }
}

/// Allocates a buffer of `len` bytes that starts at a multiple of `alignment`, a power of two.
///
/// # Safety
/// As `pinpool_alloc`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinpool_alloc_aligned(
    pool: *const pinpool_t,
    len: usize,
    alignment: usize,
    buf: *mut pinpool_buf_t,
) -> c_int {
    // SAFETY: passed on, both.
    unsafe {
        hand_over(
            || pinpool_t::get(pool),
            buf,
            |pool: &Pool| match Layout::from_size_align(len, alignment) {
                Ok(layout) => pool.alloc_layout(layout),
                Err(_) if alignment.is_power_of_two() => {
                    Err(AllocError::TooLarge { asked: len, max: pool.max_len() })
                }
                Err(_) => Err(AllocError::Alignment {
                    asked: alignment,
                    max: 1 << pool.max_len().ilog2(),
                }),
            },
        )
    }
}

/// Allocates a buffer of `len` bytes, and waits up to `timeout_ns` nanoseconds until there is one; 0 does not
/// wait, and `UINT64_MAX` waits for ever.
///
/// First come, first served: whoever frees, on whichever thread, wakes the first in line; nobody is passed
/// by more than 64 that came later. `PINPOOL_TIMEOUT` says that nothing large enough came free, with the
/// books in the message. `pinpool_close` must not be called while a call waits.
///
/// # Safety
/// As `pinpool_alloc`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinpool_alloc_wait(
    pool: *const pinpool_t,
    len: usize,
    timeout_ns: u64,
    buf: *mut pinpool_buf_t,
) -> c_int {
    // SAFETY: passed on, both.
    unsafe {
        hand_over(
            || pinpool_t::get(pool),
            buf,
            |pool: &Pool| pool.alloc_wait(len, timeout_of(timeout_ns)),
        )
    }
}

/// Allocates up to `n` buffers of `len` bytes into `bufs`, and writes to `*got` how many there were. It is
/// an error only if not even one could be had.
///
/// # Safety
/// As `pinpool_alloc`; `bufs` has room for `n`, `got` points to a number or is null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinpool_alloc_many(
    pool: *const pinpool_t,
    len: usize,
    bufs: *mut pinpool_buf_t,
    n: usize,
    got: *mut usize,
) -> c_int {
    answered(|| {
        // SAFETY: passed on.
        let pool = unsafe { pinpool_t::get(pool) }?;
        if n > 0 {
            place(bufs, "the place for the buffers")?;
        }
        let (mut done, mut answer) = (0, Ok(()));
        while done < n {
            match pool.alloc(len) {
                // SAFETY: `bufs` has room for `n` (contract), and `done` is less.
                Ok(buf) => unsafe { bufs.add(done).write(give(buf)) },
                Err(_) if done > 0 => break,
                Err(e) => {
                    answer = Err(fail(code_of_alloc(&e), e));
                    break;
                }
            }
            done += 1;
        }
        if !got.is_null() {
            // SAFETY: not null, and so a number of the caller's (contract).
            unsafe { got.write(done) };
        }
        answer
    })
}

/// Frees a buffer, on any thread.
///
/// Every pointer that is not the start of a buffer that is out of this pool is refused, with a code that
/// says what is wrong with it, and nothing is changed: null, freed before, foreign, inside a buffer.
///
/// # Safety
/// `pool` is null or came from `pinpool_open`. If `addr` is out, nobody uses its bytes any more, no work
/// request either.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinpool_free(pool: *const pinpool_t, addr: *mut c_void) -> c_int {
    // SAFETY: passed on.
    let Some(door) = (unsafe { pinpool_t::door(pool) }) else {
        // SAFETY: passed on.
        return unsafe { free_slowly(pool, addr) };
    };
    let Some(block) = door.claim(addr as usize) else {
        // SAFETY: passed on.
        return unsafe { free_slowly(pool, addr) };
    };
    if block.give_at_hand() {
        return PINPOOL_OK as c_int;
    }
    // SAFETY: claimed just now, and not given back.
    unsafe { give_slowly(pool, addr, block.place()) }
}

/// Frees a block that is not out any more.
///
/// # Safety
/// As `pinpool_free`; the pool is open, and the caller owns the block, of this place, and gives it up.
// As `mark_slowly`.
#[allow(improper_ctypes_definitions)]
#[cold]
#[inline(never)]
unsafe extern "C" fn give_slowly(pool: *const pinpool_t, addr: *mut c_void, place: Place) -> c_int {
    guarded(|| {
        // SAFETY: passed on.
        let door = unsafe { pinpool_t::door(pool) };
        if let (Some(door), Some(block)) = (door, NonNull::new(addr.cast())) {
            // SAFETY: passed on.
            unsafe { door.give(block, place) };
        }
        PINPOOL_OK as c_int
    })
}

/// # Safety
/// As `pinpool_free`.
#[cold]
#[inline(never)]
unsafe extern "C" fn free_slowly(pool: *const pinpool_t, addr: *mut c_void) -> c_int {
    answered(|| {
        // SAFETY: passed on.
        release(unsafe { pinpool_t::get(pool) }?, addr)
    })
}

/// Frees `n` buffers. All that can be freed are; the answer is that of the first that could not.
///
/// # Safety
/// As `pinpool_free`, for each; `bufs` points to `n` buffers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinpool_free_many(
    pool: *const pinpool_t,
    bufs: *const pinpool_buf_t,
    n: usize,
) -> c_int {
    answered(|| {
        // SAFETY: passed on.
        let pool = unsafe { pinpool_t::get(pool) }?;
        if n == 0 {
            return Ok(());
        }
        let bufs = place(bufs.cast_mut(), "the buffers")?;
        // SAFETY: `n` buffers, not null (contract).
        let bufs = unsafe { slice::from_raw_parts(bufs.as_ptr(), n) };
        // All of them, whatever becomes of one; code and message are the first's.
        // SAFETY: the caller says that it has stopped using the bytes (contract).
        let freed = bufs.iter().map(|buf| unsafe { pool.free_raw(buf.addr.cast()) });
        freed.fold(Ok(()), Result::and).map_err(|e| fail(code_of_free(&e), e))
    })
}

/// Writes to `*keys` the keys of the memory region that holds `addr`: any pointer may be asked for, and
/// none is followed. `PINPOOL_FOREIGN` if it does not point into this pool. Takes no lock.
///
/// # Safety
/// `pool` is null or came from `pinpool_open`, `keys` is null or points to a place for keys.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinpool_keys(
    pool: *const pinpool_t,
    addr: *const c_void,
    keys: *mut pinpool_keys_t,
) -> c_int {
    answered(|| {
        // SAFETY: passed on.
        let pool = unsafe { pinpool_t::get(pool) }?;
        let keys = place(keys, "the place for the keys")?;
        let found = pool.keys_of(addr).ok_or_else(|| {
            fail(PINPOOL_FOREIGN, format_args!("{addr:p} does not point into this pool"))
        })?;
        // SAFETY: not null, and so a place of the caller's (contract).
        unsafe { keys.write(found.into()) };
        Ok(())
    })
}
