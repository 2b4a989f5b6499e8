//! Codes, and the message that goes with the last one of each thread.

use std::{
    cell::RefCell,
    ffi::{CStr, CString, c_char, c_int},
    fmt::Display,
    panic::{AssertUnwindSafe, catch_unwind},
    ptr::{self, NonNull},
};

use crate::error::{AllocError, BuildError, CloseError, DeviceError, FreeError, TokenError};

/// What every call answers: 0, or why not.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum pinpool_status {
    /// Done.
    PINPOOL_OK = 0,
    /// A pointer that must not be null is null.
    PINPOOL_NULL = 1,
    /// An argument makes no sense: a text that is not UTF-8, a struct of unknown size, an unknown number.
    PINPOOL_INVALID = 2,
    /// The pool was closed through this handle.
    PINPOOL_CLOSED = 3,
    /// There is no such device, or none at all.
    PINPOOL_NO_DEVICE = 4,
    /// The device or the system refused a call.
    PINPOOL_DEVICE = 5,
    /// What was asked for cannot be on this machine as it is set up; the message lists what to change.
    PINPOOL_SETUP = 6,
    /// Nothing is left, in caches neither.
    PINPOOL_EXHAUSTED = 7,
    /// Longer than an arena, or aligned to more than that.
    PINPOOL_TOO_LARGE = 8,
    /// The pointer is not of this pool.
    PINPOOL_FOREIGN = 9,
    /// The pointer points into a block, not to its start.
    PINPOOL_INTERIOR = 10,
    /// The buffer is not out: freed before, or never given out.
    PINPOOL_NOT_OUT = 11,
    /// This process is a forked child of the one that opened the pool.
    PINPOOL_FORKED = 12,
    /// Buffers are still out; the pool goes with the last of them.
    PINPOOL_LIVE = 13,
    /// A device would not let go of an arena, which stays mapped.
    PINPOOL_LEAKED = 14,
    /// The text does not fit the room given for it.
    PINPOOL_TRUNCATED = 15,
    /// A fault of pinpool's own; please report it.
    PINPOOL_INTERNAL = 16,
    /// Nothing large enough came free in time.
    PINPOOL_TIMEOUT = 17,
    /// The token's flight is over: taken back already, or never begun.
    PINPOOL_TOKEN_STALE = 18,
    /// The token is another pool's, or made up.
    PINPOOL_TOKEN_FOREIGN = 19,
    /// The token names no buffer that this pool can have: made up, or damaged on its way.
    PINPOOL_TOKEN_INVALID = 20,
}

pub(super) use pinpool_status::*;

thread_local! {
    static LAST: RefCell<CString> = RefCell::default();
}

/// Notes a message for this thread and answers with the code that it belongs to.
#[cold]
#[inline(never)]
pub(super) fn fail(code: pinpool_status, message: impl Display) -> c_int {
    let text = message.to_string().replace('\0', "\u{fffd}");
    // No message can be kept on a thread whose locals are gone already.
    let _ = LAST.try_with(|last| {
        if let (Ok(text), Ok(mut last)) = (CString::new(text), last.try_borrow_mut()) {
            *last = text;
        }
    });
    code as c_int
}

#[cold]
#[inline(never)]
pub(super) fn null(what: &'static str) -> c_int {
    fail(PINPOOL_NULL, format_args!("{what} is null"))
}

/// Runs `f`, and turns a panic into a code.
#[inline(always)]
pub(super) fn guarded(f: impl FnOnce() -> c_int) -> c_int {
    // What a panic may have left half done is behind the pool's own locks, and panics leave a pool usable.
    match catch_unwind(AssertUnwindSafe(f)) {
        Ok(code) => code,
        Err(payload) => {
            // Dropping a payload may panic itself.
            std::mem::forget(payload);
            fail(PINPOOL_INTERNAL, "pinpool panicked; stderr has the message")
        }
    }
}

/// As [`guarded`], for what stops at the first code that is not [`PINPOOL_OK`].
#[inline(always)]
pub(super) fn answered(f: impl FnOnce() -> Result<(), c_int>) -> c_int {
    guarded(|| match f() {
        Ok(()) => PINPOOL_OK as c_int,
        Err(code) => code,
    })
}

/// A place that the caller has for an answer.
pub(super) fn place<T>(at: *mut T, what: &'static str) -> Result<NonNull<T>, c_int> {
    NonNull::new(at).ok_or_else(|| null(what))
}

#[cold]
pub(super) fn forked() -> c_int {
    fail(PINPOOL_FORKED, "this process is a forked child: the pool is its parent's")
}

pub(super) fn code_of_build(e: &BuildError) -> pinpool_status {
    match e {
        BuildError::NoDevice => PINPOOL_NO_DEVICE,
        BuildError::ZeroCapacity
        | BuildError::ArenaSize { .. }
        | BuildError::Access { .. }
        | BuildError::MaxCapacity { .. }
        | BuildError::Watermark { .. } => PINPOOL_INVALID,
        BuildError::CapacityTooLarge { .. } => PINPOOL_TOO_LARGE,
        BuildError::Register { .. } => PINPOOL_DEVICE,
        _ => PINPOOL_SETUP,
    }
}

pub(super) fn code_of_device(e: &DeviceError) -> pinpool_status {
    match e {
        DeviceError::NoDevice | DeviceError::NotFound { .. } => PINPOOL_NO_DEVICE,
        DeviceError::Null(_) => PINPOOL_NULL,
        _ => PINPOOL_DEVICE,
    }
}

pub(super) fn code_of_alloc(e: &AllocError) -> pinpool_status {
    match e {
        AllocError::TooLarge { .. } | AllocError::Alignment { .. } => PINPOOL_TOO_LARGE,
        AllocError::ForeignProcess { .. } => PINPOOL_FORKED,
        AllocError::Exhausted(_) => PINPOOL_EXHAUSTED,
        AllocError::TimedOut { .. } => PINPOOL_TIMEOUT,
        _ => PINPOOL_INVALID,
    }
}

pub(super) fn code_of_free(e: &FreeError) -> pinpool_status {
    match e {
        FreeError::Null => PINPOOL_NULL,
        FreeError::Foreign { .. } | FreeError::OtherReach { .. } => PINPOOL_FOREIGN,
        FreeError::Interior { .. } => PINPOOL_INTERIOR,
        FreeError::NotOut { .. } => PINPOOL_NOT_OUT,
    }
}

pub(super) fn code_of_token(e: &TokenError) -> pinpool_status {
    match e {
        // A posted request's token cannot come from C, which has no such requests.
        TokenError::NotInFlight { .. } | TokenError::Posted { .. } => PINPOOL_TOKEN_STALE,
        TokenError::OtherPool { .. }
        | TokenError::OtherHeap { .. }
        | TokenError::OtherReach { .. } => PINPOOL_TOKEN_FOREIGN,
        TokenError::Invalid { .. } => PINPOOL_TOKEN_INVALID,
        TokenError::ForeignProcess { .. } => PINPOOL_FORKED,
    }
}

pub(super) fn code_of_close(e: &CloseError) -> pinpool_status {
    match e {
        CloseError::ForeignProcess { .. } => PINPOOL_FORKED,
        CloseError::Deregister { .. } => PINPOOL_LEAKED,
        _ => PINPOOL_LIVE,
    }
}

/// Reads a C string.
///
/// # Safety
/// `text` is null or points to a string that ends in a zero byte.
pub(super) unsafe fn text<'a>(
    text: *const c_char,
    what: &'static str,
) -> Result<Option<&'a str>, c_int> {
    if text.is_null() {
        return Ok(None);
    }
    // SAFETY: not null, and so a string that ends in a zero byte (contract).
    let text = unsafe { CStr::from_ptr(text) };
    text.to_str().map(Some).map_err(|_| {
        fail(PINPOOL_INVALID, format_args!("{what} is not UTF-8: {}", text.to_string_lossy()))
    })
}

/// Says why the last call on this thread that failed did so: a text with the numbers needed to act.
///
/// Never null; empty when none has failed yet. It is valid until the next call of this library on this
/// thread that fails, or the thread's end.
#[unsafe(no_mangle)]
pub extern "C" fn pinpool_last_error() -> *const c_char {
    static NONE: &CStr = c"";
    LAST.try_with(|last| last.try_borrow().map_or(ptr::null(), |text| text.as_ptr()))
        .ok()
        .filter(|p| !p.is_null())
        .unwrap_or(NONE.as_ptr())
}

/// Names a code that a call answered with, as this header does; "unknown" for any other number.
///
/// The text is valid for ever.
#[unsafe(no_mangle)]
pub extern "C" fn pinpool_status_name(status: c_int) -> *const c_char {
    let name: &CStr = match status {
        0 => c"PINPOOL_OK",
        1 => c"PINPOOL_NULL",
        2 => c"PINPOOL_INVALID",
        3 => c"PINPOOL_CLOSED",
        4 => c"PINPOOL_NO_DEVICE",
        5 => c"PINPOOL_DEVICE",
        6 => c"PINPOOL_SETUP",
        7 => c"PINPOOL_EXHAUSTED",
        8 => c"PINPOOL_TOO_LARGE",
        9 => c"PINPOOL_FOREIGN",
        10 => c"PINPOOL_INTERIOR",
        11 => c"PINPOOL_NOT_OUT",
        12 => c"PINPOOL_FORKED",
        13 => c"PINPOOL_LIVE",
        14 => c"PINPOOL_LEAKED",
        15 => c"PINPOOL_TRUNCATED",
        16 => c"PINPOOL_INTERNAL",
        17 => c"PINPOOL_TIMEOUT",
        18 => c"PINPOOL_TOKEN_STALE",
        19 => c"PINPOOL_TOKEN_FOREIGN",
        20 => c"PINPOOL_TOKEN_INVALID",
        _ => c"unknown",
    };
    name.as_ptr()
}
