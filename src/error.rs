//! Errors: one enum an operation, each with the numbers needed to act.

/// Has `Debug` say what `Display` says: the message with its numbers is what `unwrap`, `expect` and a `main` that
/// returns the error print.
macro_rules! message_in_debug {
    ($error:ty) => {
        impl ::std::fmt::Debug for $error {
            fn fmt(&self, f: &mut ::std::fmt::Formatter<'_>) -> ::std::fmt::Result {
                ::std::fmt::Display::fmt(self, f)
            }
        }
    };
}
pub(crate) use message_in_debug;

mod alloc;
mod build;
mod device;
mod handle;
mod memory;
mod take_back;

use std::{fmt, io};

pub use self::{
    alloc::{AllocError, Exhausted},
    build::BuildError,
    device::{DeviceChangeError, DeviceError, RegisterError, UnknownDevice},
    handle::{CloseError, LookupError},
    memory::{AdoptError, ExportError},
    take_back::{FreeError, TokenError},
};

/// A byte count that prints exactly and, where it helps, also in binary units.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Bytes(pub u64);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [(u32, &str); 4] = [(40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")];
        for (shift, name) in UNITS {
            let unit = 1u64 << shift;
            if self.0 >= unit {
                return if self.0.is_multiple_of(unit) {
                    write!(f, "{} {name}", self.0 >> shift)
                } else {
                    write!(f, "{} bytes ({:.1} {name})", self.0, self.0 as f64 / unit as f64)
                };
            }
        }
        write!(f, "{} bytes", self.0)
    }
}

impl fmt::Debug for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// A limit of the system's, which may be none.
pub(crate) struct Limit(pub(crate) u64);

impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0 == u64::MAX {
            f.write_str("unlimited")
        } else {
            fmt::Display::fmt(&Bytes(self.0), f)
        }
    }
}

/// A system's error once more, for somebody else to have too.
pub(crate) fn again(error: &io::Error) -> io::Error {
    match error.raw_os_error() {
        Some(errno) => io::Error::from_raw_os_error(errno),
        None => io::Error::new(error.kind(), error.to_string()),
    }
}

fn list(names: &[String]) -> String {
    if names.is_empty() { "none".into() } else { names.join(", ") }
}
