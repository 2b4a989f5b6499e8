//! Tables of zeroed memory beside the arenas, which cost what is touched of them.
#![allow(clippy::disallowed_methods)] // The calls that are only to be made here and in `mmap`.

use std::{io, ptr::NonNull};

use super::mmap::{READ_WRITE, RESERVED, base_page, empty, map, unmap};

/// A table of `T`, zeroed, whose untouched pages cost nothing; private to this process's books and
/// never registered.
#[derive(Debug)]
pub(crate) struct ZeroedTable<T> {
    ptr: NonNull<T>,
    len: usize,
}

/// Types whose all-zero bytes are a valid value.
///
/// # Safety
/// Implement only for such types, without drop glue.
pub(crate) unsafe trait Zeroable {}

// SAFETY: zero is a valid integer, and atomics have their integer's representation.
unsafe impl Zeroable for std::sync::atomic::AtomicU32 {}

// SAFETY: the table owns its memory; sharing it is sharing `&T`s and moving it moves the `T`s.
unsafe impl<T: Send> Send for ZeroedTable<T> {}
// SAFETY: as above.
unsafe impl<T: Sync> Sync for ZeroedTable<T> {}

impl<T: Zeroable> ZeroedTable<T> {
    /// Maps a table of `len` zeroed elements.
    pub(crate) fn new(len: usize) -> io::Result<Self> {
        const { assert!(!std::mem::needs_drop::<T>() && align_of::<T>() <= 4096) };
        let bytes = len
            .checked_mul(size_of::<T>())
            .filter(|&n| n > 0)
            .ok_or_else(|| io::Error::from_raw_os_error(libc::ENOMEM))?;
        let ptr = map(None, bytes, READ_WRITE, RESERVED)?;
        Ok(Self { ptr: ptr.cast(), len })
    }
}

impl<T: Zeroable> ZeroedTable<T> {
    /// Has it be all zero again in forked children. A wish: kernels before 4.14 do not.
    pub(crate) fn zero_in_children(self) -> Self {
        let len = (self.len * size_of::<T>()).next_multiple_of(base_page());
        // SAFETY: the table's own mapping, private and anonymous; nothing changes in this process, and in a child zero
        // is a valid value.
        unsafe { libc::madvise(self.ptr.as_ptr().cast(), len, libc::MADV_WIPEONFORK) };
        self
    }
}

impl<T> ZeroedTable<T> {
    /// Brings elements into memory, as they are, so that the first who uses them meets no page fault. Nothing
    /// depends on it: kernels before 5.14 do not, and what cannot be had is left for then.
    pub(crate) fn populate(&self, from: usize, count: usize) {
        let page = base_page();
        let to = from.saturating_add(count).min(self.len) * size_of::<T>();
        let from = from.min(self.len) * size_of::<T>() / page * page;
        if from < to {
            // SAFETY: whole pages of the table's own mapping; populating changes no contents.
            unsafe {
                let addr = self.ptr.cast::<u8>().add(from).as_ptr().cast();
                libc::madvise(addr, to - from, libc::MADV_POPULATE_WRITE);
            }
        }
    }

    /// Bytes of the table that are in memory.
    pub(crate) fn resident_bytes(&self) -> usize {
        resident_bytes(self)
    }
}

/// How much of a slice is in memory, in bytes of whole pages; all of it where the system does not say.
pub(crate) fn resident_bytes<T>(slice: &[T]) -> usize {
    let page = base_page();
    let (start, end) = (slice.as_ptr() as usize, slice.as_ptr_range().end as usize);
    let mut at = start & !(page - 1);
    let mut resident = 0;
    // By the piece, so that the answer needs no memory to speak of.
    let mut present = [0u8; 4096];
    while at < end {
        let len = (end - at).min(present.len() * page);
        // SAFETY: `at..at + len` covers pages that the slice lies on, so they are mapped, and `present` has a byte
        // for each; nothing is read or written in them.
        let r = unsafe { libc::mincore(at as *mut libc::c_void, len, present.as_mut_ptr()) };
        if r != 0 {
            return size_of_val(slice);
        }
        resident += present[..len.div_ceil(page)].iter().filter(|&&p| p & 1 == 1).count() * page;
        at += len;
    }
    resident
}

impl<T> std::ops::Deref for ZeroedTable<T> {
    type Target = [T];

    #[inline]
    fn deref(&self) -> &[T] {
        // SAFETY: `ptr` maps `len` elements, page-aligned, zero or since written through `&T`, and
        // `T: Zeroable` says that zero is valid.
        unsafe { std::slice::from_raw_parts(self.ptr.as_ptr(), self.len) }
    }
}

impl<T> Drop for ZeroedTable<T> {
    fn drop(&mut self) {
        let len = (self.len * size_of::<T>()).next_multiple_of(base_page());
        if unmap(self.ptr.as_ptr() as usize, len).is_err() {
            empty(self.ptr.cast(), len);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_comes_into_memory_as_it_is() {
        use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
        let table = ZeroedTable::<AtomicU32>::new(1 << 20).expect("table");
        table[5].store(7, Relaxed);
        let before = table.resident_bytes();
        table.populate(3, 100_000);
        assert!(table.resident_bytes() >= before + 300_000, "{}", table.resident_bytes());
        assert_eq!((table[5].load(Relaxed), table[6].load(Relaxed)), (7, 0));
        table.populate(usize::MAX, 1);
        table.populate(1 << 20, usize::MAX);
        table.populate((1 << 20) - 1, usize::MAX);
    }

    #[test]
    fn impossible_sizes_are_errors() {
        assert!(ZeroedTable::<std::sync::atomic::AtomicU32>::new(usize::MAX / 2).is_err());
    }
}
