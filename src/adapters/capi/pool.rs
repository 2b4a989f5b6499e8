//! The handle of a pool: opening and closing.

use std::{
    ffi::{c_int, c_void},
    ptr,
    sync::{
        OnceLock,
        atomic::{
            AtomicPtr,
            Ordering::{AcqRel, Acquire},
        },
    },
};

use parking_lot::Mutex;

use super::{
    fail::{
        PINPOOL_CLOSED, PINPOOL_LIVE, PINPOOL_OK, code_of_build, code_of_close, fail, forked,
        guarded, null,
    },
    options::{Wanted, pinpool_options_t},
    share::pinpool_share_t,
};
use crate::{
    device::Device,
    error::Bytes,
    pool::{Door, Pool, Share},
};

/// A pool. Any thread may use it, several at a time; only `pinpool_close` must not run beside another
/// call with the same handle.
pub struct pinpool_t {
    /// For what is short; shut once it was closed.
    door: Door,
    /// Boxed and leaked; null once it was closed.
    opened: AtomicPtr<Opened>,
    /// In the order of the options; made with the handle, and as lasting.
    shares: OnceLock<Vec<pinpool_share_t>>,
}

/// What an open handle holds.
pub(super) struct Opened {
    pub(super) pool: Pool,
    /// In the order of the options.
    pub(super) shares: Vec<Share>,
    /// Kept for its PD, which the caller may have asked for.
    device: Device,
}

impl pinpool_t {
    /// # Safety
    /// `handle` is null or came from `pinpool_open`.
    #[inline(always)]
    pub(super) unsafe fn get<'a>(handle: *const Self) -> Result<&'a Pool, c_int> {
        // SAFETY: passed on.
        unsafe { Self::opened(handle) }.map(|opened| &opened.pool)
    }

    /// The way to what is at hand, if there is a handle; through a closed one nothing comes, and
    /// [`get`](pinpool_t::get) says why.
    ///
    /// # Safety
    /// `handle` is null or came from `pinpool_open`.
    #[inline(always)]
    pub(super) unsafe fn door<'a>(handle: *const Self) -> Option<&'a Door> {
        // SAFETY: handles are never freed.
        unsafe { handle.as_ref() }.map(|handle| &handle.door)
    }

    /// # Safety
    /// `handle` is null or came from `pinpool_open`.
    #[inline(always)]
    pub(super) unsafe fn opened<'a>(handle: *const Self) -> Result<&'a Opened, c_int> {
        if handle.is_null() {
            return Err(null("pool"));
        }
        // SAFETY: handles are never freed.
        // Acquire pairs with whatever published the handle, and with the swap in `pinpool_close`.
        let opened = unsafe { &*handle }.opened.load(Acquire);
        if opened.is_null() {
            return Err(closed());
        }
        // SAFETY: not closed, and not being closed beside this call (contract of `pinpool_close`).
        Ok(unsafe { &*opened })
    }
}

impl pinpool_t {
    /// The handle of the share at this place.
    pub(super) fn share(&self, index: usize) -> *const pinpool_share_t {
        self.shares.get().and_then(|shares| shares.get(index)).map_or(ptr::null(), ptr::from_ref)
    }
}

/// Keeps a handle for the rest of the process, and in reach, so that no leak checker takes it for lost.
fn keep(handle: pinpool_t) -> &'static pinpool_t {
    static HANDLES: Mutex<Vec<&'static pinpool_t>> = Mutex::new(Vec::new());
    let handle: &'static pinpool_t = Box::leak(Box::new(handle));
    HANDLES.lock().push(handle);
    handle
}

#[cold]
#[inline(never)]
fn closed() -> c_int {
    fail(PINPOOL_CLOSED, "the pool was closed through this handle")
}

/// Opens a pool: maps, faults in and registers all that `options` ask for. Writes the handle to `*pool`,
/// null on an error.
///
/// # Safety
/// `options` points to a struct as `pinpool_options_init` fills it, `pool` to a place for the handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinpool_open(
    options: *const pinpool_options_t,
    pool: *mut *mut pinpool_t,
) -> c_int {
    if pool.is_null() {
        return null("the place for the handle");
    }
    // SAFETY: not null, and so a place of the caller's (contract).
    unsafe { pool.write(ptr::null_mut()) };
    guarded(|| {
        // SAFETY: passed on.
        let wanted = match unsafe { Wanted::read(options) } {
            Ok(wanted) => wanted,
            Err(code) => return code,
        };
        let device = wanted.device.clone();
        let names: Vec<_> = wanted.shares.iter().map(|(name, _)| name.clone()).collect();
        match wanted.builder().build() {
            Ok(built) => {
                let door = Door::new(&built);
                // Names there are; a handle that cannot be had would be a fault here.
                let shares: Vec<_> = names.iter().filter_map(|n| built.share(n).ok()).collect();
                debug_assert_eq!(shares.len(), names.len());
                let opened = Box::into_raw(Box::new(Opened { pool: built, shares, device }));
                let (opened, shares) = (AtomicPtr::new(opened), OnceLock::new());
                let handle = keep(pinpool_t { door, opened, shares });
                let share = |index| pinpool_share_t { pool: handle, index };
                handle.shares.get_or_init(|| (0..names.len()).map(share).collect());
                // SAFETY: as above.
                unsafe { pool.write(ptr::from_ref(handle).cast_mut()) };
                PINPOOL_OK as c_int
            }
            Err(e) => fail(code_of_build(&e), e),
        }
    })
}

/// Gives the protection domain that the pool's memory is registered under (`struct ibv_pd *`), for queue
/// pairs; null if the pool is not on a verbs device, or closed. It is valid until `pinpool_close`; destroy
/// what was made on it before.
///
/// # Safety
/// `pool` is null or came from `pinpool_open`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinpool_pd(pool: *const pinpool_t) -> *mut c_void {
    // SAFETY: passed on.
    match unsafe { pinpool_t::opened(pool) } {
        #[cfg(any(feature = "rdma-sys", feature = "rdma-mummy-sys"))]
        Ok(opened) => opened.device.as_verbs().map_or(ptr::null_mut(), |v| v.pd()),
        _ => ptr::null_mut(),
    }
}

/// Closes a pool: deregisters, unmaps, and lets the protection domain go.
///
/// Answers `PINPOOL_LIVE` while buffers are out, with their number in the message, and the pool is then as
/// before: free them and close again. So it is with `PINPOOL_FORKED`. After any other answer the handle is closed, and every later call
/// with it answers `PINPOOL_CLOSED`.
///
/// # Safety
/// `pool` is null or came from `pinpool_open`. No other call with this handle runs at the same time.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinpool_close(pool: *mut pinpool_t) -> c_int {
    guarded(|| {
        // SAFETY: passed on.
        let inner = match unsafe { pinpool_t::get(pool) } {
            Ok(inner) => inner,
            Err(code) => return code,
        };
        if inner.is_foreign() {
            return forked();
        }
        let stats = inner.stats();
        if stats.live_buffers > 0 {
            let (buffers, bytes) = (stats.live_buffers, stats.live);
            return fail(
                PINPOOL_LIVE,
                format_args!("{buffers} buffers ({}) are still out", Bytes(bytes as u64)),
            );
        }
        // SAFETY: `get` says that it is a handle, and handles are never freed.
        let handle = unsafe { &*pool };
        // SAFETY: no other call with this handle runs (contract).
        unsafe { handle.door.shut() };
        // AcqRel: of two calls one gets the pool.
        let inner = handle.opened.swap(ptr::null_mut(), AcqRel);
        if inner.is_null() {
            return closed();
        }
        // SAFETY: leaked by `pinpool_open`, and the swap gave it to this call alone.
        let Opened { pool, shares, device } = *unsafe { Box::from_raw(inner) };
        drop(shares);
        let closed = pool.close();
        // After the pool, so that a PD of its own goes here at the latest.
        drop(device);
        match closed {
            Ok(()) => PINPOOL_OK as c_int,
            Err(e) => fail(code_of_close(&e), e),
        }
    })
}
