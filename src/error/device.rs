//! Why a device is not to be had, will not register, or is not one of a pool's.

use std::io;

use super::{BuildError, Bytes, list};
use crate::access::Access;

/// Why a device could not be opened.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// No verbs device at all.
    #[error(
        "this machine has no RDMA device; load a driver, add a soft one \
         (`rdma link add rxe0 type rxe netdev <netdev>`), or ask for the software device \
         by name (Device::soft(), in C \"soft\")"
    )]
    NoDevice,
    /// No verbs device of that name.
    #[error("there is no RDMA device {asked:?}; present: {}", list(present))]
    NotFound {
        /// The name asked for.
        asked: String,
        /// The names that exist.
        present: Vec<String>,
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
    /// A null pointer where a handle was expected.
    #[error("{0} is null")]
    Null(&'static str),
}

message_in_debug!(DeviceError);

/// Why a range could not be registered or deregistered.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum RegisterError {
    /// The device refused to register.
    #[error("{call} of {len} with {access} on {device} failed: {source}", len = Bytes(*len as u64))]
    Register {
        /// The call, as the manual names it.
        call: &'static str,
        /// The device's name.
        device: String,
        /// Bytes asked.
        len: usize,
        /// Rights asked.
        access: Access,
        /// The device's errno.
        source: io::Error,
    },
    /// The device refused to deregister; the range counts as still registered.
    #[error("{call} on {device} failed: {source}")]
    Deregister {
        /// The call, as the manual names it.
        call: &'static str,
        /// The device's name.
        device: String,
        /// The device's errno.
        source: io::Error,
    },
}

message_in_debug!(RegisterError);

impl RegisterError {
    /// The errno that the device gave, if it gave one.
    pub fn raw_os_error(&self) -> Option<i32> {
        match self {
            Self::Register { source, .. } | Self::Deregister { source, .. } => {
                source.raw_os_error()
            }
        }
    }
}

/// A device that a pool is not on.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "the pool is not on this device ({device}); it is on: {}. A device is known by its handle: one opened \
     again, by the same name, is another",
    list(known)
)]
#[non_exhaustive]
pub struct UnknownDevice {
    /// The name of the device asked about.
    pub device: String,
    /// The names of the devices that the pool is on.
    pub known: Vec<String>,
}

message_in_debug!(UnknownDevice);

/// Why a device was not added to a pool, or not wholly removed from it.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum DeviceChangeError {
    /// The pool is on that device already, or it is just being added.
    #[error("the pool is on {device} already")]
    Known {
        /// Its name.
        device: String,
    },
    /// The pool is not on that device.
    #[error("{0}")]
    Unknown(UnknownDevice),
    /// It is the only one.
    #[error("{device} is the only device that the pool is on; add another first, or drop the pool")]
    Last {
        /// Its name.
        device: String,
    },
    /// The pool is on as many as it can be.
    #[error("the pool is on {max} devices already, the most there can be")]
    TooMany {
        /// How many.
        max: usize,
    },
    /// Device or limits do not permit it, or the device refused an arena. What had been registered on it is
    /// deregistered.
    #[error("{0}")]
    Refused(Box<BuildError>),
    /// The device would not let go of arenas. It is unknown to the pool all the same; the arenas' memory
    /// stays mapped for ever.
    #[error("{device} would not deregister {arenas} arenas ({}), which stay mapped; first: {first}", Bytes(*bytes as u64))]
    Deregister {
        /// Its name.
        device: String,
        /// How many arenas.
        arenas: usize,
        /// Bytes of them.
        bytes: usize,
        /// The first refusal.
        first: RegisterError,
    },
    /// The pool came to its end before. Nothing stays registered.
    #[error("the pool was torn down before the change was made")]
    Closed,
    /// This is a forked child of the process that built the pool.
    #[error("this pool was built by process {owner}, this is process {this}")]
    ForeignProcess {
        /// The process that built the pool.
        owner: u32,
        /// The caller's.
        this: u32,
    },
}

message_in_debug!(DeviceChangeError);
