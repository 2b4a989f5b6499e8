//! Shares as C sees them: named reservations, each with a handle to allocate from.

use std::{
    ffi::{CStr, c_char, c_int},
    ptr, slice,
};

use super::{
    buffer::{hand_over, pinpool_buf_t, timeout_of},
    fail::{PINPOOL_INVALID, answered, fail, null, place, text as text_of},
    pool::{Opened, pinpool_t},
    report::{nanos, place_for_books},
};
use crate::pool::Share;

/// A reservation that a pool shall have.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct pinpool_reserve_t {
    /// Its name; copied.
    pub name: *const c_char,
    /// Bytes that nobody else can take. All reservations together must leave something of the capacity.
    pub bytes: usize,
}

/// A share of an open pool. Any thread may use it, several at a time. It belongs to the pool's handle: after
/// `pinpool_close` each call with it answers `PINPOOL_CLOSED`.
pub struct pinpool_share_t {
    /// Kept for the rest of the process, as this is.
    pub(super) pool: &'static pinpool_t,
    pub(super) index: usize,
}

impl pinpool_share_t {
    /// # Safety
    /// `share` is null or came from `pinpool_share`.
    unsafe fn get<'a>(share: *const Self) -> Result<(&'a Opened, &'a Share), c_int> {
        // SAFETY: shares are never freed (contract).
        let Some(share) = (unsafe { share.as_ref() }) else { return Err(null("share")) };
        // SAFETY: a handle, kept for the rest of the process.
        let opened = unsafe { pinpool_t::opened(share.pool) }?;
        Ok((opened, &opened.shares[share.index]))
    }
}

/// What `pinpool_options_t` says of shares.
///
/// # Safety
/// `shares` points to `count` structs whose names are null or strings.
pub(super) unsafe fn read(
    shares: *const pinpool_reserve_t,
    count: usize,
) -> Result<Vec<(String, usize)>, c_int> {
    if count == 0 {
        return Ok(Vec::new());
    }
    if shares.is_null() {
        return Err(null("options.shares"));
    }
    // SAFETY: not null, and so `count` structs (contract).
    let shares = unsafe { slice::from_raw_parts(shares, count) };
    let one = |reserve: &pinpool_reserve_t| {
        // SAFETY: null or a string (contract).
        match unsafe { text_of(reserve.name, "options.shares[].name") }? {
            Some(name) => Ok((name.to_owned(), reserve.bytes)),
            None => Err(null("options.shares[].name")),
        }
    };
    shares.iter().map(one).collect()
}

/// Finds a share by its name and writes it to `*share`, null on an error. It need not be given back.
///
/// # Safety
/// `pool` is null or came from `pinpool_open`, `name` is null or a string, `share` is null or points to a place
/// for the share.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinpool_share(
    pool: *const pinpool_t,
    name: *const c_char,
    share: *mut *const pinpool_share_t,
) -> c_int {
    answered(|| {
        let share = place(share, "the place for the share")?;
        // SAFETY: not null, and so a place of the caller's (contract).
        unsafe { share.write(ptr::null()) };
        // SAFETY: passed on.
        let opened = unsafe { pinpool_t::opened(pool) }?;
        if name.is_null() {
            return Err(null("the share's name"));
        }
        // SAFETY: not null, and so a string (contract).
        let name = unsafe { CStr::from_ptr(name) };
        let of_that_name = |s: &Share| s.name().as_bytes() == name.to_bytes();
        let index = opened.shares.iter().position(of_that_name).ok_or_else(|| {
            let present: Vec<_> = opened.shares.iter().map(Share::name).collect();
            let present = present.join(", ");
            fail(PINPOOL_INVALID, format_args!("there is no share {name:?}; there are: {present}"))
        })?;
        // SAFETY: `opened` says that it is a handle, and handles are never freed.
        let found = unsafe { &*pool }.share(index);
        // SAFETY: as above.
        unsafe { share.write(found) };
        Ok(())
    })
}

/// As `pinpool_alloc`, from the share's reserve, and when that has nothing left, from what no share has
/// reserved. The buffer is freed by `pinpool_free`, and so goes back to where it came from.
///
/// # Safety
/// `share` is null or came from `pinpool_share`, `buf` is null or points to a place for a buffer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinpool_share_alloc(
    share: *const pinpool_share_t,
    len: usize,
    buf: *mut pinpool_buf_t,
) -> c_int {
    // SAFETY: passed on, both.
    unsafe { hand_over(|| pinpool_share_t::get(share), buf, |(_, share)| share.alloc(len)) }
}

/// As `pinpool_alloc_wait`, from the share: a buffer freed to the reserve wakes those who wait for that share,
/// one freed to the unreserved memory anybody. `pinpool_close` must not be called while a call waits.
///
/// # Safety
/// As `pinpool_share_alloc`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinpool_share_alloc_wait(
    share: *const pinpool_share_t,
    len: usize,
    timeout_ns: u64,
    buf: *mut pinpool_buf_t,
) -> c_int {
    // SAFETY: passed on.
    unsafe {
        hand_over(
            || pinpool_share_t::get(share),
            buf,
            |(_, share)| share.alloc_wait(len, timeout_of(timeout_ns)),
        )
    }
}

/// The books of one share's reserve. Buffers that it was given beyond that are in the pool's.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct pinpool_share_stats_t {
    /// Bytes of this struct, set by the caller before the call, so that it can grow.
    pub size: usize,
    /// Bytes of the reserve.
    pub reserved: usize,
    /// Bytes of blocks of it that are out.
    pub live: usize,
    /// How many buffers of it are out.
    pub live_buffers: usize,
    /// How often the whole reserve was searched in vain.
    pub ran_dry: u64,
    /// How often an allocation was refused, since the unreserved memory had nothing either.
    pub refused: u64,
    /// How many calls wait for memory now.
    pub waiting: usize,
    /// How many have waited or do, over the pool's life.
    pub waits: u64,
    /// How long those that wait no longer did, together, in nanoseconds.
    pub wait_time_ns: u64,
}

/// Sums up a share's books. Takes locks, and sends every thread through its slow path once.
///
/// # Safety
/// `share` is null or came from `pinpool_share`, `stats` is null or points to a struct whose `size` is set.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinpool_share_stats(
    share: *const pinpool_share_t,
    stats: *mut pinpool_share_stats_t,
) -> c_int {
    answered(|| {
        // SAFETY: passed on.
        let (opened, share) = unsafe { pinpool_share_t::get(share) }?;
        // SAFETY: passed on.
        let stats = unsafe { place_for_books(stats) }?;
        let all = opened.pool.stats();
        let s = all.shares.iter().find(|s| s.name == share.name()).ok_or_else(|| {
            fail(PINPOOL_INVALID, format_args!("share {:?} has no books", share.name()))
        })?;
        let found = pinpool_share_stats_t {
            size: size_of::<pinpool_share_stats_t>(),
            reserved: s.reserve.capacity,
            live: s.reserve.live,
            live_buffers: s.reserve.live_buffers,
            ran_dry: s.ran_dry,
            refused: s.refused,
            waiting: s.waiting,
            waits: s.waits,
            wait_time_ns: nanos(s.wait_time),
        };
        // SAFETY: not null, and of this version, by its size.
        unsafe { stats.write(found) };
        Ok(())
    })
}
