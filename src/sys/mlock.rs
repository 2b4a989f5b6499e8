//! Locking a range in memory, as a device that pins what it registers does.
#![allow(clippy::disallowed_methods)]

use std::{io, ptr::NonNull};

use super::checked;

/// Locks a range in memory.
///
/// # Safety
/// The range is mapped and stays so until [`unlock`].
pub(crate) unsafe fn lock(addr: NonNull<u8>, len: usize) -> io::Result<()> {
    // SAFETY: the range is mapped (contract); locking changes no contents.
    checked(unsafe { libc::mlock(addr.as_ptr().cast(), len) })
}

/// Undoes [`lock`].
///
/// # Safety
/// The range is mapped.
pub(crate) unsafe fn unlock(addr: NonNull<u8>, len: usize) -> io::Result<()> {
    // SAFETY: the range is mapped (contract); unlocking changes no contents.
    checked(unsafe { libc::munlock(addr.as_ptr().cast(), len) })
}
