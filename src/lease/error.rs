//! Why a buffer was not leased, or not taken back.

use std::{fmt, io, time::Duration};

use crate::{
    access::Access,
    buf::Buf,
    device::{Guarantees, LeaseSupport},
    error::{self, Bytes},
    reach::{Any, OneDevice},
};

/// Why a lease could not be had, ended or exchanged.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum LeaseError {
    /// The device has no memory windows that could be used.
    #[error("{device} cannot lease buffers: {why}")]
    NoWindows {
        /// Its name.
        device: String,
        /// Why not.
        why: String,
    },
    /// The pool's arenas were not registered for windows.
    #[error(
        "the buffer's arena has {access}; leases need Access::MW_BIND: add it to Builder::access"
    )]
    NotBindable {
        /// The rights that it was registered with.
        access: Access,
    },
    /// These rights cannot be leased.
    #[error("a lease of {rights}: {problem}")]
    Rights {
        /// The rights asked.
        rights: Access,
        /// What is wrong.
        problem: &'static str,
    },
    /// The lease was to be relied on for what the device's windows are not known to hold.
    #[error(
        "the lease requires of {device}: {missing}; what its windows do: {support}. Require less, or set \
         tenants apart by pools on devices (PDs) of their own"
    )]
    Lacking {
        /// The device's name.
        device: String,
        /// What is required and does not hold, or could not be tried.
        missing: Guarantees,
        /// All that is known.
        support: Box<LeaseSupport>,
    },
    /// The buffer is not registered with the queue pair's device.
    #[error(
        "the buffer at {addr:#x} ({}) is of no pool on this queue pair's device, {device}; build the pool on \
         a clone of the same Device",
        Bytes(*len as u64)
    )]
    ForeignBuffer {
        /// Its first byte.
        addr: usize,
        /// Its bytes.
        len: usize,
        /// The queue pair's device.
        device: String,
    },
    /// A buffer of length 0 has nothing to lease.
    #[error("the buffer's length is 0: nothing to lease")]
    Empty,
    /// The queue pair cannot bind windows of this device.
    #[error("the queue pair {problem}")]
    QueuePair {
        /// What is wrong with it.
        problem: String,
    },
    /// The `LeaseQp` was closed, or its queue pair is gone.
    #[error("leases on this queue pair were closed, as before it is destroyed")]
    Closed,
    /// A call into libibverbs failed. ENOMEM from `ibv_post_send`: the send queue is full.
    #[error("{call} failed on {device}: {source}")]
    Call {
        /// The call, as the manual names it.
        call: &'static str,
        /// The device's name.
        device: String,
        /// Its errno.
        source: io::Error,
    },
    /// A work request ended in error. 5 (flushed) means that the queue pair was in error already.
    #[error(
        "{operation} ended with completion status {status} ({text}), vendor code {vendor_err:#x}"
    )]
    Completion {
        /// What was to be done.
        operation: &'static str,
        /// `enum ibv_wc_status`, by number.
        status: u32,
        /// ... and in words.
        text: &'static str,
        /// The device's own code.
        vendor_err: u32,
    },
    /// A work request did not complete in time.
    #[error(
        "{operation} did not complete within {after:?}: the queue pair does not send, or whoever polls its \
         completions does not pass them on (LeaseQp::complete)"
    )]
    TimedOut {
        /// What was to be done.
        operation: &'static str,
        /// The time-out.
        after: Duration,
    },
    /// The queue pair is another process's, of which this is a forked child.
    #[error("the queue pair belongs to the process that this one was forked from")]
    ForeignProcess,
}

crate::error::message_in_debug!(LeaseError);

impl LeaseError {
    /// The same once more, for the next of several that failed together.
    pub(super) fn retold(&self) -> Self {
        match self {
            &Self::Completion { operation, status, text, vendor_err } => {
                Self::Completion { operation, status, text, vendor_err }
            }
            &Self::TimedOut { operation, after } => Self::TimedOut { operation, after },
            Self::Call { call, device, source } => {
                Self::Call { call, device: device.clone(), source: error::again(source) }
            }
            _ => Self::Closed,
        }
    }
}

/// A buffer was not leased.
#[derive(thiserror::Error)]
#[error("{error}")]
pub struct Refused<R: OneDevice = Any> {
    /// The buffer, untouched. `None` if the device may still let a peer reach it: it had begun, failed, and
    /// would not be undone either. The buffer is then kept out of use for ever and counted, see
    /// [`leaked`](super::leaked).
    pub buf: Option<Buf<R>>,
    /// Why not.
    #[source]
    pub error: LeaseError,
}

impl<R: OneDevice> fmt::Debug for Refused<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// A lease could neither be invalidated nor its window be given back, so its peer may still reach the
/// buffer. That is kept out of use for ever, its arena stays registered, and it is counted, see
/// [`leaked`](super::leaked).
#[derive(thiserror::Error)]
#[error(
    "the lease of {} at {addr:#x} could not be ended and the buffer is kept out of use: {invalidate}; then {dealloc}",
    Bytes(*len as u64)
)]
#[non_exhaustive]
pub struct RevokeError {
    /// The buffer's first byte.
    pub addr: usize,
    /// Its bytes.
    pub len: usize,
    /// Why it could not be invalidated.
    pub invalidate: Box<LeaseError>,
    /// Why the window could not be given back.
    pub dealloc: Box<LeaseError>,
}

crate::error::message_in_debug!(RevokeError);

/// An exchange failed. The old lease has ended in any case.
pub struct ExchangeError<R: OneDevice = Any> {
    /// The buffer whose lease was to end; `None` if it had to be kept out of use.
    pub ended: Option<Buf<R>>,
    /// The buffer that was to be leased; `None` likewise.
    pub next: Option<Buf<R>>,
    /// What failed.
    pub error: Box<LeaseError>,
}

impl<R: OneDevice> fmt::Debug for ExchangeError<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl<R: OneDevice> fmt::Display for ExchangeError<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.error, f)
    }
}

impl<R: OneDevice> std::error::Error for ExchangeError<R> {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.error)
    }
}
