//! Bringing the pages of a mapping into memory, so that what cannot be had is an error: by asking for it, and on
//! kernels that cannot be asked by having the kernel touch each page.
#![allow(clippy::disallowed_methods)]

use std::{
    io,
    os::fd::{AsFd, AsRawFd},
    ptr::NonNull,
};

use super::{MemoryFile, base_page};

/// Brings every page of a writable mapping into memory, or says why it cannot. `fresh` says that nobody has
/// written to it.
pub(super) fn fault_in(addr: NonNull<u8>, len: usize, fresh: bool) -> io::Result<()> {
    loop {
        // SAFETY: the range is mapped and the caller's to use; populating changes no contents.
        let r = unsafe { libc::madvise(addr.as_ptr().cast(), len, libc::MADV_POPULATE_WRITE) };
        if r == 0 {
            return Ok(());
        }
        let e = io::Error::last_os_error();
        match e.raw_os_error() {
            Some(libc::EINTR | libc::EAGAIN) => {}
            // Kernels before 5.14, and mappings that cannot be populated.
            Some(libc::EINVAL) if fresh => return fault_in_by_read(addr, len),
            Some(libc::EINVAL) => return fault_in_by_look(addr, len),
            _ => return Err(e),
        }
    }
}

/// The older way: have the kernel copy zeros in. Where a page cannot be had, `read` answers EFAULT; a
/// store from here would be a SIGBUS.
fn fault_in_by_read(addr: NonNull<u8>, len: usize) -> io::Result<()> {
    let zero = std::fs::File::open("/dev/zero")?;
    let mut done = 0;
    while done < len {
        // SAFETY: `addr + done .. addr + len` lies inside the mapping that the caller owns, fresh and
        // so holding only zeros, which the read does not change.
        let n = unsafe {
            libc::read(zero.as_raw_fd(), addr.as_ptr().add(done).cast(), (len - done).min(1 << 30))
        };
        match n {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            n if n > 0 => done += n as usize,
            _ => {
                let e = io::Error::last_os_error();
                if e.kind() != io::ErrorKind::Interrupted {
                    return Err(e);
                }
            }
        }
    }
    Ok(())
}

/// The older way where contents must stay: have the kernel read a byte of each page. What only a store could
/// bring into memory (a private page that was never written) the device's own registration does, which answers
/// with an error as well.
fn fault_in_by_look(addr: NonNull<u8>, len: usize) -> io::Result<()> {
    let sink = MemoryFile::anonymous(base_page(), base_page())?;
    for offset in (0..len).step_by(base_page()) {
        // SAFETY: the kernel reads one byte of a range that is mapped, and answers EFAULT where it cannot.
        let n = unsafe {
            libc::pwrite(sink.as_fd().as_raw_fd(), addr.as_ptr().add(offset).cast(), 1, 0)
        };
        if n != 1 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::{super::*, fault_in, fault_in_by_look, fault_in_by_read};

    #[test]
    fn the_older_way_of_faulting_in_leaves_zeros() {
        let r = Reservation::new(1 << 20, 4096, StepHook::default()).expect("reserve");
        map(Some(r.base()), 1 << 20, READ_WRITE, RESERVED | libc::MAP_FIXED).expect("map");
        fault_in_by_read(r.base(), 1 << 20).expect("fault in");
        let mut vec = vec![0u8; (1 << 20) / base_page()];
        // SAFETY: the range is mapped and `vec` has a byte for each of its pages.
        let r = unsafe { libc::mincore(r.base().as_ptr().cast(), 1 << 20, vec.as_mut_ptr()) };
        assert_eq!(r, 0);
        assert!(vec.iter().all(|&b| b & 1 == 1), "every page is resident");
    }

    #[test]
    fn faulting_in_what_cannot_be_written_is_an_error_not_a_signal() {
        let r = Reservation::new(1 << 20, 4096, StepHook::default()).expect("reserve");
        assert!(fault_in(r.base(), 1 << 20, true).is_err());
        assert!(fault_in_by_read(r.base(), 1 << 20).is_err());
        assert!(fault_in_by_look(r.base(), 1 << 20).is_err());
    }

    #[test]
    fn the_older_way_keeps_contents_where_there_are_some() {
        let r =
            Reservation::of(1 << 20, 4096, Origin::Memfd, StepHook::default()).expect("reserve");
        // SAFETY: the range is ours and unused.
        unsafe { r.map_pages(0, 1 << 20, base_page()) }.expect("map");
        // SAFETY: mapped just now, and nobody else knows of it.
        unsafe { r.at(5000, 1).as_ptr().write(7) };
        fault_in_by_look(r.base(), 1 << 20).expect("fault in");
        // SAFETY: as above.
        assert_eq!(unsafe { r.at(5000, 1).as_ptr().read() }, 7);
        let mut vec = vec![0u8; (1 << 20) / base_page()];
        // SAFETY: the range is mapped and `vec` has a byte for each of its pages.
        let r = unsafe { libc::mincore(r.base().as_ptr().cast(), 1 << 20, vec.as_mut_ptr()) };
        assert_eq!(r, 0);
        assert!(vec.iter().all(|&b| b & 1 == 1), "every page is resident");
    }
}
