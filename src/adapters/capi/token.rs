//! Buffers as 64 bits, for a work request's `wr_id`.

use std::{
    ffi::{c_int, c_void},
    ptr::NonNull,
};

use super::{
    buffer::{give, pinpool_buf_t, take},
    fail::{answered, code_of_token, fail, forked, place},
    pool::pinpool_t,
};
use crate::pool::Pool;

/// The pool, and the place for what its call answers, once both are there and usable.
///
/// # Safety
/// `pool` is null or came from `pinpool_open`.
unsafe fn checked<'a, T>(
    pool: *const pinpool_t,
    at: *mut T,
    what: &'static str,
) -> Result<(&'a Pool, NonNull<T>), c_int> {
    // SAFETY: passed on.
    let pool = unsafe { pinpool_t::get(pool) }?;
    let at = place(at, what)?;
    if pool.core().foreign() { Err(forked()) } else { Ok((pool, at)) }
}

/// Gives a buffer up for a token, to ride in a work request's `wr_id`, and writes it to `*token`. Until
/// `pinpool_from_token` takes it back, the buffer is out and nobody gets it; `pinpool_free` refuses its
/// address. The token's top bit is 0 and stays so: it is the caller's to use.
///
/// A token that is lost leaks its buffer; `in_flight` of the books counts it.
///
/// # Safety
/// `pool` is null or came from `pinpool_open`, `token` is null or points to a place for a number. Nobody but
/// this call gives up `addr`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinpool_into_token(
    pool: *const pinpool_t,
    addr: *mut c_void,
    token: *mut u64,
) -> c_int {
    answered(|| {
        // SAFETY: passed on.
        let (pool, token) = unsafe { checked(pool, token, "the place for the token") }?;
        let buf = take(pool, addr)?;
        // SAFETY: not null, and so a place of the caller's (contract).
        unsafe { token.write(buf.into_token()) };
        Ok(())
    })
}

/// Takes back the buffer that `pinpool_into_token` gave up, once, on any thread: at the completion that carries
/// the token. `buf->len` is the length of the whole block, which is at least what was asked for.
///
/// Any number may be passed, and is checked: `PINPOOL_TOKEN_STALE` for one that was used before,
/// `PINPOOL_TOKEN_FOREIGN` for another pool's, `PINPOOL_TOKEN_INVALID` for one that no buffer of this pool can
/// have; nothing is then changed. Of several calls with one token exactly one succeeds.
///
/// # Safety
/// `pool` is null or came from `pinpool_open`, `buf` is null or points to a place for a buffer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinpool_from_token(
    pool: *const pinpool_t,
    token: u64,
    buf: *mut pinpool_buf_t,
) -> c_int {
    answered(|| {
        // SAFETY: passed on.
        let (pool, buf) = unsafe { checked(pool, buf, "the place for the buffer") }?;
        let got = pool.from_any_token(token).map_err(|e| fail(code_of_token(&e), e))?;
        // SAFETY: not null, and so a place of the caller's (contract).
        unsafe { buf.write(give(got)) };
        Ok(())
    })
}
