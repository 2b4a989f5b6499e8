//! Mappings: reserving an address range, backing parts of it with pages, zeroed side tables, and
//! locking. Every failure is returned; no page is left to be faulted in by a signal.
#![allow(clippy::disallowed_methods)]

use std::{
    io,
    os::fd::AsRawFd,
    ptr::{self, NonNull},
};

use parking_lot::Mutex;

use super::{
    mapping_faults::{MapStep, StepHook},
    numa::{self, Mode, NodeSet},
};

/// Bytes of a base page.
pub(crate) fn base_page() -> usize {
    // SAFETY: sysconf reads a constant of the system.
    let n = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    usize::try_from(n).unwrap_or(4096)
}

/// An address range that nothing else will be mapped into. Pages are placed in it with [`map_pages`]
/// and taken out with [`unback`]; both keep the rest reserved. Dropping it unmaps all but the parts
/// that were given up with [`leak`].
///
/// [`map_pages`]: Reservation::map_pages
/// [`unback`]: Reservation::unback
/// [`leak`]: Reservation::leak
#[derive(Debug)]
pub(crate) struct Reservation {
    base: NonNull<u8>,
    len: usize,
    /// Parts that dropping this value must not unmap, as (offset, length), sorted by offset: still
    /// written by a device, or no longer ours.
    spared: Mutex<Vec<(usize, usize)>>,
    hook: StepHook,
    released: bool,
}

// SAFETY: the value is an address range that it alone owns; nothing in it is tied to a thread.
unsafe impl Send for Reservation {}
// SAFETY: the methods that change the mapping take `&self` but act on ranges that the caller owns
// (their safety contract); the rest only read fields.
unsafe impl Sync for Reservation {}

impl Reservation {
    /// Reserves `len` bytes aligned to `align` (a power of two, at least a page), with one
    /// inaccessible page before and behind. `hook` is asked before this and every later step.
    pub(crate) fn new(len: usize, align: usize, hook: StepHook) -> io::Result<Self> {
        debug_assert!(align.is_power_of_two() && align >= base_page());
        let page = base_page();
        let total = len
            .checked_add(align)
            .and_then(|n| n.checked_add(2 * page))
            .ok_or_else(|| io::Error::from_raw_os_error(libc::ENOMEM))?;
        hook.before(MapStep::Reserve, 0, len, 0)?;
        let start = map(None, total, libc::PROT_NONE, RESERVED)?.as_ptr() as usize;
        let base = (start + page).next_multiple_of(align);
        // One page on each side stays as a guard; the rest of the slack goes back.
        let (low, high) = (base - page, base + len + page);
        // Should either fail, the range is a little longer than it need be.
        let _ = unmap(start, low - start).and(unmap(high, start + total - high));
        let base = NonNull::new(base as *mut u8).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { base, len, spared: Mutex::new(Vec::new()), hook, released: false })
    }

    pub(crate) fn base(&self) -> NonNull<u8> {
        self.base
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    fn at(&self, offset: usize, len: usize) -> NonNull<u8> {
        assert!(offset.checked_add(len).is_some_and(|end| end <= self.len), "outside reservation");
        // SAFETY: the assertion keeps the result inside the reserved range, which is one mapping.
        unsafe { self.base.add(offset) }
    }

    /// Maps zeroed private pages of `page` bytes at `offset`; none of them is in memory yet, and hugepages
    /// are promised.
    ///
    /// All or nothing: on an error the range is reserved again.
    ///
    /// # Safety
    /// Nobody uses `offset..offset + len`; both are multiples of `page`.
    pub(crate) unsafe fn map_pages(
        &self,
        offset: usize,
        len: usize,
        page: usize,
    ) -> io::Result<()> {
        let addr = self.at(offset, len);
        self.hook.before(MapStep::Map, addr.as_ptr() as usize, len, page)?;
        if self.is_spared(offset, len) {
            // A device or somebody else has it.
            return Err(io::Error::from_raw_os_error(libc::EEXIST));
        }
        if page <= base_page() {
            // The reservation itself becomes writable, so that whatever fails leaves the range ours.
            // SAFETY: the range is part of the reservation, and nobody uses it (contract).
            if unsafe { libc::mprotect(addr.as_ptr().cast(), len, READ_WRITE) } != 0 {
                return Err(io::Error::last_os_error());
            }
            // SAFETY: as above; the advice changes no contents.
            unsafe { libc::madvise(addr.as_ptr().cast(), len, libc::MADV_HUGEPAGE) };
            return Ok(());
        }
        // Hugepages are promised when they are mapped. A MAP_FIXED that breaks on that promise has by then
        // unmapped the reservation on older kernels, so ask beside it first.
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_HUGETLB;
        let flags = flags | (page.trailing_zeros() as i32) << libc::MAP_HUGE_SHIFT;
        let probe = map(None, len, READ_WRITE, flags)?;
        unmap(probe.as_ptr() as usize, len)?;
        if let Err(e) = map(Some(addr), len, READ_WRITE, flags | libc::MAP_FIXED) {
            // Somebody took the pages in between. Whether the range is still reserved is not known;
            // take it back only if it is free.
            let again = map(Some(addr), len, libc::PROT_NONE, RESERVED | libc::MAP_FIXED_NOREPLACE);
            if again.is_err() {
                self.spare(offset, len);
            }
            return Err(e);
        }
        Ok(())
    }

    /// Brings every page of a part into memory that [`map_pages`](Self::map_pages) mapped and nobody has
    /// written to, in pages of `page` bytes, or says why it cannot. Several threads may each do a part.
    pub(crate) fn fault_in(&self, offset: usize, len: usize, page: usize) -> io::Result<()> {
        let addr = self.at(offset, len);
        if let Err(e) = self.hook.before(MapStep::FaultIn, addr.as_ptr() as usize, len, page) {
            // Half of it, as documented, so that there is something to give back.
            let _ = fault_in(addr, (len / 2).next_multiple_of(base_page()));
            return Err(e);
        }
        fault_in(addr, len)
    }

    /// Says where the pages of a part that is mapped shall come from.
    pub(crate) fn bind(
        &self,
        offset: usize,
        len: usize,
        page: usize,
        to: &NodeSet,
        mode: Mode,
    ) -> io::Result<()> {
        let addr = self.at(offset, len).as_ptr() as usize;
        self.hook.before(MapStep::Bind, addr, len, page)?;
        // SAFETY: `at` checks that the range lies in this reservation, whose mappings are ours.
        unsafe { numa::bind(self.at(offset, len), len, mode, to) }
    }

    /// The node on which a part that is in memory lies, if it is one.
    pub(crate) fn node_of(&self, offset: usize, len: usize, page: usize) -> Option<u32> {
        numa::node_of(self.at(offset, len), len, page)
    }

    /// Gives the pages at `offset` back to the system and reserves the range again. Where the system will
    /// not, the range stays mapped, without pages if it lets go of those, until all of it is unmapped.
    ///
    /// # Safety
    /// Nobody uses `offset..offset + len` any more: neither this process nor a device.
    pub(crate) unsafe fn unback(&self, offset: usize, len: usize) {
        let addr = self.at(offset, len);
        let start = addr.as_ptr() as usize;
        let asked = self.hook.before(MapStep::Unmap, start, len, 0);
        let reserve = || map(Some(addr), len, libc::PROT_NONE, RESERVED | libc::MAP_FIXED);
        if asked.is_err() {
            empty(addr, len);
        } else if reserve().is_err() {
            // Only a full mapping table can bring this about. The pages must go all the same, and the
            // hole may be filled by others, so it is no longer ours.
            match unmap(start, len) {
                Ok(()) => self.spare(offset, len),
                Err(_) => empty(addr, len),
            }
        }
    }

    /// Keeps `offset..offset + len` mapped for ever: a device may still write to it.
    pub(crate) fn leak(&self, offset: usize, len: usize) {
        self.spare(offset, len);
    }

    /// Whether any of a part was given up.
    pub(crate) fn is_spared(&self, offset: usize, len: usize) -> bool {
        self.spared.lock().iter().any(|&(o, l)| o < offset + len && offset < o + l)
    }

    fn spare(&self, offset: usize, len: usize) {
        let _ = self.at(offset, len);
        let mut spared = self.spared.lock();
        let i = spared.partition_point(|&(o, _)| o < offset);
        spared.insert(i, (offset, len));
    }
}

impl Reservation {
    /// Unmaps all but what was given up, as dropping it does. `failed` hears of each part that the system
    /// would not unmap, by address and length: that stays mapped for ever, without pages if possible.
    pub(crate) fn release(&mut self, mut failed: impl FnMut(usize, usize, io::Error)) {
        if std::mem::replace(&mut self.released, true) {
            return;
        }
        let page = base_page();
        let base = self.base.as_ptr() as usize;
        let mut free = |from: usize, to: usize| {
            let asked = match from < to {
                true => self.hook.before(MapStep::Unmap, from, to - from, 0),
                false => return,
            };
            if let Err(e) = asked.and_then(|()| unmap(from, to - from)) {
                if let Some(addr) = NonNull::new(from as *mut u8) {
                    empty(addr, to - from);
                }
                failed(from, to - from, e);
            }
        };
        let mut from = base - page;
        for &(offset, len) in self.spared.get_mut().iter() {
            free(from, base + offset);
            from = base + offset + len;
        }
        free(from, base + self.len + page);
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.release(|_, _, _| {});
    }
}

const READ_WRITE: libc::c_int = libc::PROT_READ | libc::PROT_WRITE;
const RESERVED: libc::c_int = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;

fn map(at: Option<NonNull<u8>>, len: usize, prot: i32, flags: i32) -> io::Result<NonNull<u8>> {
    let hint = at.map_or(ptr::null_mut(), |p| p.as_ptr().cast());
    // SAFETY: without an address mmap picks unused space. With one (MAP_FIXED) the range lies inside
    // a Reservation whose caller owns it, so no mapping of anybody else is replaced.
    let p = unsafe { libc::mmap(hint, len, prot, flags, -1, 0) };
    if p == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    NonNull::new(p.cast()).ok_or_else(|| io::Error::from_raw_os_error(libc::ENOMEM))
}

/// Fails only where the process has as many mappings as it may, and this would cut one in two.
fn unmap(addr: usize, len: usize) -> io::Result<()> {
    // SAFETY: all callers pass page-aligned parts of ranges that they own and no longer use.
    if len == 0 || unsafe { libc::munmap(addr as *mut libc::c_void, len) } == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Gives up the pages of a range that cannot be unmapped. Kernels before 5.18 keep hugepages.
fn empty(addr: NonNull<u8>, len: usize) {
    // SAFETY: the callers own the range and no longer use it, so losing its contents harms nobody.
    unsafe { libc::madvise(addr.as_ptr().cast(), len, libc::MADV_DONTNEED) };
}

/// Brings every page of a fresh writable mapping into memory, or says why it cannot.
fn fault_in(addr: NonNull<u8>, len: usize) -> io::Result<()> {
    loop {
        // SAFETY: the caller mapped the range just now and owns it; populating changes no contents.
        let r = unsafe { libc::madvise(addr.as_ptr().cast(), len, libc::MADV_POPULATE_WRITE) };
        if r == 0 {
            return Ok(());
        }
        let e = io::Error::last_os_error();
        match e.raw_os_error() {
            Some(libc::EINTR | libc::EAGAIN) => {}
            // Kernels before 5.14.
            Some(libc::EINVAL) => return fault_in_by_read(addr, len),
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

/// Locks a range in memory.
///
/// # Safety
/// The range is mapped and stays so until [`unlock`].
pub(crate) unsafe fn lock(addr: NonNull<u8>, len: usize) -> io::Result<()> {
    // SAFETY: the range is mapped (contract); locking changes no contents.
    if unsafe { libc::mlock(addr.as_ptr().cast(), len) } == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Undoes [`lock`].
///
/// # Safety
/// The range is mapped.
pub(crate) unsafe fn unlock(addr: NonNull<u8>, len: usize) -> io::Result<()> {
    // SAFETY: the range is mapped (contract); unlocking changes no contents.
    if unsafe { libc::munlock(addr.as_ptr().cast(), len) } == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reservation_is_aligned_backs_and_unbacks() {
        let r = Reservation::new(8 << 20, 4 << 20, StepHook::default()).expect("reserve");
        assert_eq!(r.base().as_ptr() as usize % (4 << 20), 0);
        // SAFETY: the range is ours and unused.
        unsafe { r.map_pages(4 << 20, 1 << 20, base_page()) }.expect("map");
        r.fault_in(4 << 20, 1 << 20, base_page()).expect("fault in");
        let p = r.at(4 << 20, 1);
        // SAFETY: backed just now, and nobody else knows of it.
        unsafe { p.as_ptr().write(7) };
        // SAFETY: nobody uses it.
        unsafe { r.unback(4 << 20, 1 << 20) };
        // SAFETY: as above.
        unsafe { r.map_pages(4 << 20, 1 << 20, base_page()) }.expect("map again");
        r.fault_in(4 << 20, 1 << 20, base_page()).expect("fault in again");
        // SAFETY: backed just now.
        assert_eq!(unsafe { p.as_ptr().read() }, 0, "fresh pages");
    }

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
        assert!(fault_in(r.base(), 1 << 20).is_err());
        assert!(fault_in_by_read(r.base(), 1 << 20).is_err());
    }

    #[test]
    fn impossible_sizes_are_errors() {
        assert!(Reservation::new(usize::MAX, 4096, StepHook::default()).is_err());
        assert!(Reservation::new(usize::MAX - 8191, 4096, StepHook::default()).is_err());
        assert!(ZeroedTable::<std::sync::atomic::AtomicU32>::new(usize::MAX / 2).is_err());
    }
}
