//! Why memory that is lent to a pool, or shared with another process, is refused.

use std::{io, path::PathBuf};

use super::Bytes;

/// Why a mapping that was lent with [`Builder::adopt`](crate::Builder::adopt) is refused. Nothing of it was
/// changed.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum AdoptError {
    /// No bytes.
    #[error("the range to adopt is empty")]
    Empty,
    /// It goes beyond the address space.
    #[error("{} at {addr:#x} go beyond the address space", Bytes(*len as u64))]
    Wraps {
        /// Its first byte.
        addr: usize,
        /// Bytes.
        len: usize,
    },
    /// It does not start and end with a page.
    #[error(
        "{addr:#x}..{:#x} does not start and end with a page of {}; whole pages are registered{}",
        addr + len, Bytes(*page_size as u64), whole_pages(*addr, *len, *page_size)
    )]
    NotWholePages {
        /// Its first byte.
        addr: usize,
        /// Bytes.
        len: usize,
        /// Bytes of a page that it is made of.
        page_size: usize,
    },
    /// Nothing is mapped there.
    #[error("{} of the range are not mapped, from {at:#x} on", Bytes(*len as u64))]
    NotMapped {
        /// First byte of the first hole.
        at: usize,
        /// Bytes of that hole.
        len: usize,
    },
    /// It may not be both read and written.
    #[error("{} from {at:#x} on are mapped {rights}; a pool's memory must be readable and writable", Bytes(*len as u64))]
    Protection {
        /// First byte of the first such part.
        at: usize,
        /// Bytes of that part.
        len: usize,
        /// Its rights, as `/proc/self/maps` shows them.
        rights: String,
    },
    /// It is made of pages of several sizes.
    #[error(
        "the range begins with pages of {}, from {at:#x} on there are pages of {}; adopt them as two pools",
        Bytes(*first as u64), Bytes(*other as u64)
    )]
    MixedPages {
        /// Bytes of the first page.
        first: usize,
        /// First byte of the first part that differs.
        at: usize,
        /// Bytes of a page there.
        other: usize,
    },
    /// It is made of other pages than the builder asks for.
    #[error(
        "the builder asks for pages of {}, the range is made of pages of {}",
        Bytes(*asked as u64), Bytes(*found as u64)
    )]
    OtherPages {
        /// Bytes of the page asked for.
        asked: usize,
        /// Bytes of the pages found.
        found: usize,
    },
    /// Part of it is in a pool already.
    #[error("{start:#x}..{end:#x} is part of a pool already; memory has one allocator")]
    InUse {
        /// First byte of that pool's range.
        start: usize,
        /// One past its last.
        end: usize,
    },
    /// It is locked, and so is what the device registers; to deregister would unlock it.
    #[error(
        "{} from {at:#x} on are locked with mlock, which {device} would undo when it lets go of them; unlock \
         them first: registered memory stays in memory anyway",
        Bytes(*len as u64)
    )]
    Locked {
        /// First byte of the first locked part.
        at: usize,
        /// Bytes of that part.
        len: usize,
        /// The device.
        device: String,
    },
    /// What the builder is asked for as well is the mapping's owner's to decide.
    #[error("{0} cannot be set for memory that is there already: whoever mapped it decided that")]
    Conflict(&'static str),
    /// The system does not say what is mapped.
    #[error(
        "/proc/self/smaps, which tells rights and page size of what is mapped, cannot be read: {0}"
    )]
    Unknown(io::Error),
}

message_in_debug!(AdoptError);

/// Names the whole pages inside a range, if there are any.
fn whole_pages(addr: usize, len: usize, page: usize) -> String {
    let end = addr.saturating_add(len) / page * page;
    match addr.checked_next_multiple_of(page) {
        Some(start) if start < end => format!(": {start:#x}..{end:#x} would do"),
        _ => ", and there is none in it".to_owned(),
    }
}

/// Why a pool's memory cannot be shared, or not be joined.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum ExportError {
    /// The pool's memory is this process's alone.
    #[error(
        "this pool's memory is private to its process; build it with Builder::backing(Backing::Memfd)"
    )]
    Private,
    /// The pool was built by another process, of which this is a forked child.
    #[error("this pool was built by process {owner}, this is process {this}")]
    ForeignProcess {
        /// The process that built the pool.
        owner: u32,
        /// The caller's.
        this: u32,
    },
    /// A description that no pool gave.
    #[error("not a pool's layout: {0}")]
    Layout(String),
    /// As many files as arenas are needed.
    #[error("the layout has {arenas} arenas, {files} files were given")]
    Files {
        /// Arenas of the layout.
        arenas: usize,
        /// Files given.
        files: usize,
    },
    /// A file is not what the layout says.
    #[error(
        "the file of arena {arena} has {} in pages of {}, the layout has {} in pages of {}",
        Bytes(*found), Bytes(*found_page as u64), Bytes(*len), Bytes(*page_size as u64)
    )]
    OtherFile {
        /// Which arena, from 0.
        arena: usize,
        /// Bytes that it should have.
        len: u64,
        /// Bytes of a page that it should have.
        page_size: usize,
        /// Bytes of the file.
        found: u64,
        /// Bytes of its pages.
        found_page: usize,
    },
    /// Somebody could shorten the file under the mapping, and the next access would be a SIGBUS.
    #[error(
        "the file of arena {arena} is not sealed against shrinking (F_SEAL_SHRINK), so whoever holds it could \
         end this process with a SIGBUS. Where that is to be trusted, say PoolExport::trust_unsealed"
    )]
    Unsealed {
        /// Which arena, from 0.
        arena: usize,
    },
    /// The directory is in no file system of hugepages.
    #[error("{} is not in a mounted hugetlbfs (`mount -t hugetlbfs none DIR`)", dir.display())]
    NotHugetlbfs {
        /// The directory.
        dir: PathBuf,
    },
    /// The hugepages of the directory are not those asked for.
    #[error(
        "{} has pages of {}; the builder asks for pages of {}",
        dir.display(), Bytes(*found as u64), Bytes(*asked as u64)
    )]
    HugetlbfsPages {
        /// The directory.
        dir: PathBuf,
        /// Bytes of its pages.
        found: usize,
        /// Bytes of the pages asked for.
        asked: usize,
    },
    /// A system call failed.
    #[error("{call} failed: {source}")]
    System {
        /// The call, as the manual names it.
        call: &'static str,
        /// Its errno.
        source: io::Error,
    },
}

message_in_debug!(ExportError);
