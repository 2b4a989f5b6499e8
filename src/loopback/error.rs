//! Why a pair could not be connected, or a transfer did not happen.

use std::{io, time::Duration};

use super::Status;

/// Why a pair could not be connected, or a transfer did not happen.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum LoopbackError {
    /// The device is not a verbs device.
    #[error("{device} is not a verbs device; queue pairs need one")]
    NotVerbs {
        /// Its name.
        device: String,
    },
    /// None of the device's ports is active.
    #[error("no port of {device} is active; bring its link up (`rdma link` shows it)")]
    NoActivePort {
        /// Its name.
        device: String,
    },
    /// The port has no GID to be reached at.
    #[error(
        "port {port} of {device} has no GID; give its network interface an address (`ip addr add`)"
    )]
    NoGid {
        /// The device's name.
        device: String,
        /// The port.
        port: u8,
    },
    /// A call into libibverbs failed.
    #[error("{call} failed on {device}: {source}")]
    Verbs {
        /// The call, as the manual names it.
        call: &'static str,
        /// The device's name.
        device: String,
        /// Its errno.
        source: io::Error,
    },
    /// A work request ended in error. The pair is then stopped: no end of it touches memory any more.
    #[error("{operation} ended with completion status {status}, vendor code {vendor_err:#x}")]
    Completion {
        /// The operation, as the manual names it.
        operation: &'static str,
        /// How it ended; [`Status::REM_ACCESS_ERR`] (10) when the peer's memory region refused.
        status: Status,
        /// The device's own code.
        vendor_err: u32,
    },
    /// Nothing completed in time. The pair is then stopped.
    #[error("{operation} did not complete within {after:?}")]
    TimedOut {
        /// The operation.
        operation: &'static str,
        /// The time-out.
        after: Duration,
    },
    /// The pair was stopped by an earlier error.
    #[error("the queue pairs were stopped by an earlier error; call Pair::reset()")]
    Stopped,
}

crate::error::message_in_debug!(LoopbackError);

impl LoopbackError {
    /// The completion status, if that is what the error is.
    pub fn status(&self) -> Option<Status> {
        match self {
            Self::Completion { status, .. } => Some(*status),
            _ => None,
        }
    }
}
