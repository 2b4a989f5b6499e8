//! A Unix socket that its owner alone can connect to, from its first moment on. Leaves serving it to others.
#![allow(clippy::disallowed_methods)]

use std::{
    io,
    mem::MaybeUninit,
    os::{
        fd::{AsRawFd, FromRawFd, OwnedFd},
        unix::{ffi::OsStrExt, net::UnixListener},
    },
    path::Path,
};

use super::checked;

/// Binds a listening socket to a path, with the rights 0600 (less what the umask takes).
///
/// The rights are set before the file is there: on Linux it gets those of the socket (`unix_bind`), so there is no
/// moment at which others could connect.
pub(crate) fn listen(path: &Path) -> io::Result<UnixListener> {
    let bytes = path.as_os_str().as_bytes();
    // SAFETY: plain numbers, of which zero is a value.
    let mut address: libc::sockaddr_un = unsafe { MaybeUninit::zeroed().assume_init() };
    if bytes.is_empty() || bytes.len() >= address.sun_path.len() || bytes.contains(&0) {
        let most = address.sun_path.len() - 1;
        let text = format!(
            "the path of a socket has 1 to {most} bytes, none of them zero, this one {}",
            bytes.len()
        );
        return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
    }
    address.sun_family = libc::AF_UNIX as libc::sa_family_t;
    for (to, from) in address.sun_path.iter_mut().zip(bytes) {
        *to = *from as libc::c_char;
    }
    // SAFETY: takes numbers alone.
    let fd = unsafe { libc::socket(libc::AF_UNIX, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: opened just now, and nobody else's.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    // SAFETY: an open descriptor, and a number.
    checked(unsafe { libc::fchmod(fd.as_raw_fd(), 0o600) })?;
    let len = size_of::<libc::sockaddr_un>() as libc::socklen_t;
    // SAFETY: an open socket, and an address of `len` bytes whose path ends in a zero.
    checked(unsafe { libc::bind(fd.as_raw_fd(), (&raw const address).cast(), len) })?;
    // SAFETY: an open socket, and a number.
    checked(unsafe { libc::listen(fd.as_raw_fd(), 16) })?;
    Ok(UnixListener::from(fd))
}

/// Ends the listening: who waits in `accept`, and who will, gets an error at once.
pub(crate) fn stop(listener: &UnixListener) {
    // SAFETY: an open descriptor, and a number. What it answers changes nothing: it is closed soon.
    unsafe { libc::shutdown(listener.as_raw_fd(), libc::SHUT_RDWR) };
}
