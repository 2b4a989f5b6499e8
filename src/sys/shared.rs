//! Files of memory: anonymous ones (`memfd`) and ones in a mounted hugetlbfs, sealed or exclusive, of one
//! page size; and what a file that somebody else made is. Leaves mapping them to `mmap.rs`.
#![allow(clippy::disallowed_methods)]

use std::{
    fs::{self, OpenOptions},
    io,
    mem::MaybeUninit,
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
        unix::fs::OpenOptionsExt,
    },
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering::Relaxed},
};

use super::{checked, limits, mmap::base_page};

/// What a file system of hugepages calls itself (`HUGETLBFS_MAGIC` in linux/magic.h).
const HUGETLBFS: i64 = 0x9584_58f6;

/// A file whose pages are memory. Closing it leaves what is mapped of it mapped.
#[derive(Debug)]
pub(crate) struct MemoryFile {
    fd: OwnedFd,
    /// Where it can be opened, and the process that is to remove it from there.
    path: Option<(PathBuf, u32)>,
}

impl MemoryFile {
    /// Makes an anonymous file of `len` zero bytes in pages of `page` bytes; neither can it be made shorter
    /// or longer, nor can that be undone. No page is in memory yet, and none is promised before it is mapped.
    pub(crate) fn anonymous(len: usize, page: usize) -> io::Result<Self> {
        let mut flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
        if page > base_page() {
            flags |= libc::MFD_HUGETLB | (page.trailing_zeros() << libc::MFD_HUGE_SHIFT);
        }
        // Kernels before 6.3 do not know the flag; later ones may insist on it (`vm.memfd_noexec`).
        let fd = match memfd(flags | libc::MFD_NOEXEC_SEAL) {
            Err(e) if e.raw_os_error() == Some(libc::EINVAL) => memfd(flags)?,
            done => done?,
        };
        set_len(&fd, len)?;
        let seals = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
        // SAFETY: an open file, and a command that takes a number.
        checked(unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_ADD_SEALS, seals) })?;
        Ok(Self { fd, path: None })
    }

    /// Makes a file of `len` zero bytes in a directory of a mounted hugetlbfs, under a name that nobody has.
    /// The file is removed when the value is dropped.
    pub(crate) fn in_hugetlbfs(dir: &Path, len: usize) -> io::Result<Self> {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let process = limits::process_id();
        loop {
            let path = dir.join(format!("pinpool-{process}-{}", NUMBER.fetch_add(1, Relaxed)));
            let mut options = OpenOptions::new();
            options.read(true).write(true).create_new(true).mode(0o600);
            match options.open(&path) {
                Ok(file) => {
                    let file = Self { fd: file.into(), path: Some((path, process)) };
                    set_len(&file.fd, len)?;
                    return Ok(file);
                }
                // Left there by a process that had this number before.
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
                Err(e) => return Err(e),
            }
        }
    }

    /// Takes over a file that somebody else made.
    pub(crate) fn given(fd: OwnedFd) -> Self {
        Self { fd, path: None }
    }

    pub(crate) fn path(&self) -> Option<&Path> {
        self.path.as_ref().map(|(path, _)| &**path)
    }
}

impl AsFd for MemoryFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Drop for MemoryFile {
    fn drop(&mut self) {
        if let Some((path, process)) = &self.path
            && *process == limits::process_id()
        {
            // If somebody removed it before, that is as well.
            let _ = fs::remove_file(path);
        }
    }
}

fn memfd(flags: u32) -> io::Result<OwnedFd> {
    // SAFETY: the name is NUL-terminated.
    let fd = unsafe { libc::memfd_create(c"pinpool".as_ptr(), flags) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a descriptor that the call just opened and nobody else knows.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn set_len(fd: &OwnedFd, len: usize) -> io::Result<()> {
    let len = libc::off_t::try_from(len).map_err(|_| io::ErrorKind::FileTooLarge)?;
    // SAFETY: an open file of this process's own.
    checked(unsafe { libc::ftruncate(fd.as_raw_fd(), len) })
}

/// What an open file is, as far as mapping it as memory goes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct FileFacts {
    pub(crate) len: u64,
    /// Bytes of the pages that a mapping of it is made of.
    pub(crate) page_size: usize,
    /// Whether nobody can make it shorter.
    pub(crate) fixed: bool,
}

/// Looks at an open file.
pub(crate) fn inspect(fd: BorrowedFd<'_>) -> io::Result<FileFacts> {
    let len = fs::File::from(fd.try_clone_to_owned()?).metadata()?.len();
    // SAFETY: an open file, and a command without an argument.
    let seals = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GET_SEALS) };
    let (magic, block) = file_system(|stat| {
        // SAFETY: an open file, and a struct to write to.
        unsafe { libc::fstatfs(fd.as_raw_fd(), stat) }
    })?;
    let page_size = if magic == HUGETLBFS { block } else { base_page() };
    // Files that cannot be sealed answer EINVAL (-1, all bits set).
    Ok(FileFacts { len, page_size, fixed: seals >= 0 && seals & libc::F_SEAL_SHRINK != 0 })
}

/// Bytes of the pages of the hugetlbfs that a directory is in; `None` if it is in none.
pub(crate) fn hugetlbfs_page(dir: &Path) -> io::Result<Option<usize>> {
    let path = std::ffi::CString::new(dir.as_os_str().as_encoded_bytes())?;
    let (magic, block) = file_system(|stat| {
        // SAFETY: a NUL-terminated path, and a struct to write to.
        unsafe { libc::statfs(path.as_ptr(), stat) }
    })?;
    Ok((magic == HUGETLBFS).then_some(block))
}

/// A file system's type and block size.
#[allow(clippy::unnecessary_cast)] // the fields' types differ from system to system
fn file_system(call: impl FnOnce(*mut libc::statfs) -> i32) -> io::Result<(i64, usize)> {
    let mut stat = MaybeUninit::<libc::statfs>::zeroed();
    checked(call(stat.as_mut_ptr()))?;
    // SAFETY: a struct of integers, all of them zero before the call, which filled it in.
    let stat = unsafe { stat.assume_init() };
    Ok((stat.f_type as i64, stat.f_bsize as usize))
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn an_anonymous_file_keeps_its_length() {
        let file = MemoryFile::anonymous(1 << 20, base_page()).expect("memfd");
        let facts = inspect(file.as_fd()).expect("inspect");
        assert_eq!(facts, FileFacts { len: 1 << 20, page_size: base_page(), fixed: true });
        let mut other = fs::File::from(file.as_fd().try_clone_to_owned().expect("dup"));
        assert!(other.set_len(0).is_err() && other.set_len(2 << 20).is_err());
        other.write_all(b"data can be written").expect("write");
        assert!(file.path().is_none());
    }

    #[test]
    fn other_files_are_told_from_sealed_ones() {
        let file = fs::File::open("/proc/self/exe").expect("open");
        let facts = inspect(file.as_fd()).expect("inspect");
        assert!(!facts.fixed && facts.len > 0 && facts.page_size == base_page(), "{facts:?}");
        assert_eq!(hugetlbfs_page(Path::new("/proc")).expect("statfs"), None);
        assert!(hugetlbfs_page(Path::new("/no/such/dir")).is_err());
    }
}
