//! Buffers as 64 bits, for a work request's `wr_id`.

use std::ffi::{c_int, c_void};

use super::{
    buffer::{give, pinpool_buf_t, take},
    fail::{PINPOOL_FORKED, PINPOOL_OK, code_of_token, fail, guarded, null},
    pool::pinpool_t,
};

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
    guarded(|| {
        // SAFETY: passed on.
        let pool = match unsafe { pinpool_t::get(pool) } {
            Ok(pool) => pool,
            Err(code) => return code,
        };
        if token.is_null() {
            return null("the place for the token");
        }
        if pool.core().foreign() {
            return forked();
        }
        match take(pool, addr) {
            Ok(buf) => {
                // SAFETY: not null, and so a place of the caller's (contract).
                unsafe { token.write(buf.into_token()) };
                PINPOOL_OK as c_int
            }
            Err(code) => code,
        }
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
    guarded(|| {
        // SAFETY: passed on.
        let pool = match unsafe { pinpool_t::get(pool) } {
            Ok(pool) => pool,
            Err(code) => return code,
        };
        if buf.is_null() {
            return null("the place for the buffer");
        }
        if pool.core().foreign() {
            return forked();
        }
        match pool.from_any_token(token) {
            Ok(got) => {
                // SAFETY: not null, and so a place of the caller's (contract).
                unsafe { buf.write(give(got)) };
                PINPOOL_OK as c_int
            }
            Err(e) => fail(code_of_token(&e), e),
        }
    })
}

#[cold]
fn forked() -> c_int {
    fail(PINPOOL_FORKED, "this process is a forked child: the pool is its parent's")
}
