//! The operating system and libibverbs: the only files that call either. Each resource is wrapped as
//! an owner that gives it back when dropped; no policy lives here.

pub(crate) mod fork;
pub(crate) mod futex;
pub(crate) mod limits;
pub(crate) mod mapping_faults;
pub(crate) mod membarrier;
pub(crate) mod mlock;
pub(crate) mod mmap;
pub(crate) mod numa;
#[cfg(feature = "top")]
pub(crate) mod private_socket;
#[cfg(any(feature = "rdma-sys", feature = "rdma-mummy-sys"))]
#[cfg_attr(not(feature = "loopback"), allow(dead_code, unreachable_pub))]
pub(crate) mod queue_pair;
pub(crate) mod shadow;
pub(crate) mod shared;
pub(crate) mod signals;
pub(crate) mod smaps;
pub(crate) mod table;
pub(crate) mod tick;
#[cfg(any(feature = "rdma-sys", feature = "rdma-mummy-sys"))]
pub(crate) mod verbs;
#[cfg(any(feature = "rdma-sys", feature = "rdma-mummy-sys"))]
pub(crate) mod window;

use std::{ffi::c_int, io};

/// What a call came to that answers 0 if all is well, and else leaves an errno.
fn checked(answer: c_int) -> io::Result<()> {
    if answer == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
