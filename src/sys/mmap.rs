//! Mappings: reserving an address range, or borrowing one that is mapped, and backing parts of it with pages,
//! private or of a file. Every failure is returned; no page is left to be faulted in by a signal.
#![allow(clippy::disallowed_methods)]

mod fault_in;

use std::{
    collections::BTreeMap,
    io,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
    path::PathBuf,
    ptr::{self, NonNull},
};

use parking_lot::Mutex;

use self::fault_in::fault_in;
use super::{
    checked,
    mapping_faults::{MapStep, StepHook},
    numa::{self, Mode, NodeSet},
    shadow,
    shared::MemoryFile,
};

/// Bytes of a base page.
pub(crate) fn base_page() -> usize {
    // SAFETY: sysconf reads a constant of the system.
    let n = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    usize::try_from(n).unwrap_or(4096)
}

/// Where the pages of a reservation come from.
#[derive(Debug)]
pub(crate) enum Origin {
    /// Fresh, and this process's alone.
    Private,
    /// An anonymous file for each part that is mapped.
    Memfd,
    /// A file for each part, in this directory of a mounted hugetlbfs.
    Hugetlbfs(PathBuf),
    /// Files that somebody else made, by the offset that each belongs at, with what they hold.
    Given(Vec<(usize, OwnedFd)>),
    /// Mapped by somebody else, who keeps it mapped while the reservation lives.
    Lent,
}

/// An address range that nothing else will be mapped into. Pages are placed in it with [`map_pages`]
/// and taken out with [`unback`]; both keep the rest reserved. Dropping it unmaps all but the parts
/// that were given up with [`leak`].
///
/// One that is [lent](Reservation::lend) is mapped by somebody else: nothing is ever placed in it, taken
/// out, bound or unmapped.
///
/// [`map_pages`]: Reservation::map_pages
/// [`unback`]: Reservation::unback
/// [`leak`]: Reservation::leak
#[derive(Debug)]
pub(crate) struct Reservation {
    base: NonNull<u8>,
    len: usize,
    origin: Origin,
    /// The files of the parts that are mapped, by offset.
    files: Mutex<BTreeMap<usize, MemoryFile>>,
    /// Parts that dropping this value must not unmap, sorted by offset.
    spared: Mutex<Vec<Spared>>,
    hook: StepHook,
    released: bool,
}

#[derive(Clone, Copy, Debug)]
struct Spared {
    offset: usize,
    len: usize,
    /// A device may still write to it; else it is no longer ours.
    held: bool,
}

/// All reservations of this process, and what their devices kept, by first byte: one past the last.
static RANGES: Mutex<BTreeMap<usize, usize>> = Mutex::new(BTreeMap::new());

// SAFETY: the value is an address range that it alone owns; nothing in it is tied to a thread.
unsafe impl Send for Reservation {}
// SAFETY: the methods that change the mapping take `&self` but act on ranges that the caller owns
// (their safety contract); the rest only read fields.
unsafe impl Sync for Reservation {}

impl Reservation {
    /// Reserves `len` bytes aligned to `align` (a power of two, at least a page), with one
    /// inaccessible page before and behind, for private pages.
    #[cfg(test)]
    pub(crate) fn new(len: usize, align: usize, hook: StepHook) -> io::Result<Self> {
        Self::of(len, align, Origin::Private, hook)
    }

    /// Reserves `len` bytes aligned to `align` (a power of two, at least a page), with one
    /// inaccessible page before and behind. `hook` is asked before this and every later step.
    pub(crate) fn of(
        len: usize,
        align: usize,
        mut origin: Origin,
        hook: StepHook,
    ) -> io::Result<Self> {
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
        RANGES.lock().insert(low, high);
        let mut files = BTreeMap::new();
        if let Origin::Given(given) = &mut origin {
            files.extend(given.drain(..).map(|(offset, fd)| (offset, MemoryFile::given(fd))));
        }
        let (files, spared) = (files.into(), Mutex::default());
        Ok(Self { base, len, origin, files, spared, hook, released: false })
    }

    /// Borrows a range that is mapped. If a reservation of this process has part of it, that one's range is
    /// the error. `hook` is asked before each step that is taken, which neither mapping nor unmapping is.
    ///
    /// # Safety
    /// The range is mapped, readable and writable, and stays so while the value and all that was told of the
    /// range use it.
    pub(crate) unsafe fn lend(
        base: NonNull<u8>,
        len: usize,
        hook: StepHook,
    ) -> Result<Self, (usize, usize)> {
        let (start, end) = (base.as_ptr() as usize, base.as_ptr() as usize + len);
        let mut ranges = RANGES.lock();
        if let Some(taken) = overlap(&ranges, start, end) {
            return Err(taken);
        }
        ranges.insert(start, end);
        let (origin, files, spared) = (Origin::Lent, Mutex::default(), Mutex::default());
        Ok(Self { base, len, origin, files, spared, hook, released: false })
    }

    /// First byte and length of the range that it keeps from others: guards belong to it.
    fn kept(&self) -> (usize, usize) {
        let guard = if self.is_lent() { 0 } else { base_page() };
        (self.base.as_ptr() as usize - guard, self.len + 2 * guard)
    }

    fn is_lent(&self) -> bool {
        matches!(self.origin, Origin::Lent)
    }

    /// The files of what is mapped: at which offset, a descriptor, and a path where there is one.
    pub(crate) fn files(&self) -> io::Result<Vec<(usize, OwnedFd, Option<PathBuf>)>> {
        let files = self.files.lock();
        let file = |(&offset, file): (&usize, &MemoryFile)| {
            let path = file.path().map(PathBuf::from);
            Ok((offset, file.as_fd().try_clone_to_owned()?, path))
        };
        files.iter().map(file).collect()
    }

    pub(crate) fn base(&self) -> NonNull<u8> {
        self.base
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    fn at(&self, offset: usize, len: usize) -> NonNull<u8> {
        assert!(offset.checked_add(len).is_some_and(|end| end <= self.len), "outside reservation");
        // SAFETY: the assertion keeps the result inside the range, which no gap divides.
        unsafe { self.base.add(offset) }
    }

    /// Maps pages of `page` bytes at `offset`, zeroed unless they are of a given file; none of them need be
    /// in memory yet, and hugepages are promised. Does nothing if the range is lent.
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
        if self.is_lent() {
            return Ok(());
        }
        self.hook.before(MapStep::Map, addr.as_ptr() as usize, len, page)?;
        if self.is_spared(offset, len) {
            // A device or somebody else has it.
            return Err(io::Error::from_raw_os_error(libc::EEXIST));
        }
        if matches!(self.origin, Origin::Private) && page <= base_page() {
            // The reservation itself becomes writable, so that whatever fails leaves the range ours.
            // SAFETY: the range is part of the reservation, and nobody uses it (contract).
            checked(unsafe { libc::mprotect(addr.as_ptr().cast(), len, READ_WRITE) })?;
            transparent_hugepages(addr, len);
            return Ok(());
        }
        let mut made = None;
        match &self.origin {
            Origin::Lent | Origin::Private | Origin::Given(_) => {}
            Origin::Memfd => made = Some(MemoryFile::anonymous(len, page)?),
            Origin::Hugetlbfs(dir) => made = Some(MemoryFile::in_hugetlbfs(dir, len)?),
        }
        let mut files = self.files.lock();
        let file = made.as_ref().or_else(|| files.get(&offset)).map(AsFd::as_fd);
        let huge = page > base_page();
        let flags = match file {
            Some(_) => libc::MAP_SHARED,
            None if matches!(self.origin, Origin::Given(_)) => {
                return Err(io::ErrorKind::NotFound.into());
            }
            None => {
                let size = (page.trailing_zeros() as i32) << libc::MAP_HUGE_SHIFT;
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_HUGETLB | size
            }
        };
        if huge {
            // Hugepages are promised when they are mapped. A MAP_FIXED that breaks on that promise has
            // by then unmapped the reservation on older kernels, so ask beside it first. (A file keeps
            // what it was promised.)
            let probe = map_file(None, len, READ_WRITE, flags, file)?;
            unmap(probe.as_ptr() as usize, len)?;
        }
        if let Err(e) = map_file(Some(addr), len, READ_WRITE, flags | libc::MAP_FIXED, file) {
            // Somebody took the pages in between. Whether the range is still reserved is not known;
            // take it back only if it is free.
            let again = map(Some(addr), len, libc::PROT_NONE, RESERVED | libc::MAP_FIXED_NOREPLACE);
            if again.is_err() {
                self.spare(offset, len, false);
            }
            return Err(e);
        }
        files.extend(made.map(|file| (offset, file)));
        if !huge {
            transparent_hugepages(addr, len);
        }
        Ok(())
    }

    /// Brings every page of a part into memory that [`map_pages`](Self::map_pages) mapped and, unless it was
    /// mapped or made by somebody else, nobody has written to, in pages of `page` bytes; or says why it cannot.
    /// Contents stay. Several threads may each do a part.
    pub(crate) fn fault_in(&self, offset: usize, len: usize, page: usize) -> io::Result<()> {
        let fresh = !matches!(self.origin, Origin::Lent | Origin::Given(_));
        let addr = self.at(offset, len);
        if let Err(e) = self.hook.before(MapStep::FaultIn, addr.as_ptr() as usize, len, page) {
            // Half of it, as documented, so that there is something to give back.
            let _ = fault_in(addr, (len / 2).next_multiple_of(base_page()), fresh);
            return Err(e);
        }
        fault_in(addr, len, fresh)
    }

    /// Says where the pages of a part that is mapped shall come from. Does nothing if the range is lent.
    pub(crate) fn bind(
        &self,
        offset: usize,
        len: usize,
        page: usize,
        to: &NodeSet,
        mode: Mode,
    ) -> io::Result<()> {
        if self.is_lent() {
            return Ok(());
        }
        let addr = self.at(offset, len).as_ptr() as usize;
        self.hook.before(MapStep::Bind, addr, len, page)?;
        // SAFETY: `at` checks that the range lies in this reservation, whose mappings are ours.
        unsafe { numa::bind(self.at(offset, len), len, mode, to) }
    }

    /// The node on which a part that is in memory lies, if it is one.
    pub(crate) fn node_of(&self, offset: usize, len: usize, page: usize) -> Option<u32> {
        numa::node_of(self.at(offset, len), len, page)
    }

    /// Gives the pages at `offset` back to the system, as far as no other process shares them, and reserves
    /// the range again. Where the system will not, the range stays mapped, without pages if it lets go of
    /// those, until all of it is unmapped. Does nothing if the range is lent.
    ///
    /// # Safety
    /// Nobody uses `offset..offset + len` any more: neither this process nor a device.
    pub(crate) unsafe fn unback(&self, offset: usize, len: usize) {
        let addr = self.at(offset, len);
        // Whoever has these addresses next may touch them.
        shadow::show(addr, len);
        if self.is_lent() {
            return;
        }
        let start = addr.as_ptr() as usize;
        let asked = self.hook.before(MapStep::Unmap, start, len, 0);
        let reserve = || map(Some(addr), len, libc::PROT_NONE, RESERVED | libc::MAP_FIXED);
        if asked.is_err() {
            empty(addr, len);
        } else if reserve().is_err() {
            // Only a full mapping table can bring this about. The pages must go all the same, and the
            // hole may be filled by others, so it is no longer ours.
            match unmap(start, len) {
                Ok(()) => self.spare(offset, len, false),
                Err(_) => empty(addr, len),
            }
        }
        self.files.lock().remove(&offset);
    }

    /// Keeps `offset..offset + len` mapped for ever: a device may still write to it.
    pub(crate) fn leak(&self, offset: usize, len: usize) {
        self.spare(offset, len, true);
    }

    /// Whether any of a part was given up.
    pub(crate) fn is_spared(&self, offset: usize, len: usize) -> bool {
        let spared = self.spared.lock();
        spared.iter().any(|s| s.offset < offset + len && offset < s.offset + s.len)
    }

    fn spare(&self, offset: usize, len: usize, held: bool) {
        let _ = self.at(offset, len);
        let mut spared = self.spared.lock();
        let i = spared.partition_point(|s| s.offset < offset);
        spared.insert(i, Spared { offset, len, held });
    }
}

/// The range that part of `start..end` is in, if a reservation of this process, or a device, has it.
pub(crate) fn in_use(start: usize, end: usize) -> Option<(usize, usize)> {
    overlap(&RANGES.lock(), start, end)
}

fn overlap(ranges: &BTreeMap<usize, usize>, start: usize, end: usize) -> Option<(usize, usize)> {
    // Ranges do not overlap, so the last that starts before the end is the one to look at.
    ranges.range(..end).next_back().filter(|&(_, &b)| b > start).map(|(&a, &b)| (a, b))
}

impl Reservation {
    /// Unmaps all but what was given up, as dropping it does; nothing if the range is lent. `failed` hears of
    /// each part that the system would not unmap, by address and length: that stays mapped for ever, without
    /// pages if possible.
    pub(crate) fn release(&mut self, mut failed: impl FnMut(usize, usize, io::Error)) {
        if std::mem::replace(&mut self.released, true) {
            return;
        }
        let ((start, len), lent) = (self.kept(), self.is_lent());
        let base = self.base.as_ptr() as usize;
        let spared = std::mem::take(self.spared.get_mut());
        {
            let mut ranges = RANGES.lock();
            ranges.remove(&start);
            for &Spared { offset, len, .. } in spared.iter().filter(|s| s.held) {
                ranges.insert(base + offset, base + offset + len);
            }
        }
        if lent {
            return;
        }
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
        let mut from = start;
        for &Spared { offset, len, .. } in &spared {
            free(from, base + offset);
            from = base + offset + len;
        }
        free(from, start + len);
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.release(|_, _, _| {});
    }
}

pub(super) const READ_WRITE: libc::c_int = libc::PROT_READ | libc::PROT_WRITE;
pub(super) const RESERVED: libc::c_int =
    libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;

pub(super) fn map(
    at: Option<NonNull<u8>>,
    len: usize,
    prot: i32,
    flags: i32,
) -> io::Result<NonNull<u8>> {
    map_file(at, len, prot, flags, None)
}

/// Maps a file from its start, or, without one, what `flags` say.
fn map_file(
    at: Option<NonNull<u8>>,
    len: usize,
    prot: i32,
    flags: i32,
    file: Option<BorrowedFd<'_>>,
) -> io::Result<NonNull<u8>> {
    let fd = file.map_or(-1, |f| f.as_raw_fd());
    let hint = at.map_or(ptr::null_mut(), |p| p.as_ptr().cast());
    // SAFETY: without an address mmap picks unused space. With one (MAP_FIXED) the range lies inside
    // a Reservation whose caller owns it, so no mapping of anybody else is replaced.
    let p = unsafe { libc::mmap(hint, len, prot, flags, fd, 0) };
    if p == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    NonNull::new(p.cast()).ok_or_else(|| io::Error::from_raw_os_error(libc::ENOMEM))
}

/// Asks for transparent hugepages, where the system gives them to who asks.
fn transparent_hugepages(addr: NonNull<u8>, len: usize) {
    // SAFETY: the callers just mapped the range, which is theirs; the advice changes no contents.
    unsafe { libc::madvise(addr.as_ptr().cast(), len, libc::MADV_HUGEPAGE) };
}

/// Fails only where the process has as many mappings as it may, and this would cut one in two.
pub(super) fn unmap(addr: usize, len: usize) -> io::Result<()> {
    if len == 0 {
        return Ok(());
    }
    // SAFETY: all callers pass page-aligned parts of ranges that they own and no longer use.
    checked(unsafe { libc::munmap(addr as *mut libc::c_void, len) })
}

/// Gives up the pages of a range that cannot be unmapped. Kernels before 5.18 keep hugepages.
pub(super) fn empty(addr: NonNull<u8>, len: usize) {
    // SAFETY: the callers own the range and no longer use it, so losing its contents harms nobody.
    unsafe { libc::madvise(addr.as_ptr().cast(), len, libc::MADV_DONTNEED) };
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
    fn what_is_reserved_is_not_lent_and_what_is_lent_is_not_lent_again() {
        let r = Reservation::new(1 << 20, 4096, StepHook::default()).expect("reserve");
        let (start, end) = (r.base().as_ptr() as usize, r.base().as_ptr() as usize + (1 << 20));
        let kept = Some((start - base_page(), end + base_page()));
        // SAFETY: what is refused is not used.
        let lend = |addr: usize, len| unsafe {
            Reservation::lend(
                NonNull::new(addr as *mut u8).expect("not null"),
                len,
                StepHook::default(),
            )
        };
        for (addr, len) in [(start, 4096), (end - 1, 1), (start - 8192, 8192), (end, 4096)] {
            assert_eq!(lend(addr, len).err(), kept, "{addr:#x} {len}");
        }
        drop(lend(end + base_page(), 4096).expect("beside it"));
        let lent = lend(end + base_page(), 8192).expect("again, once it was given back");
        let (a, b) = (end + base_page(), end + base_page() + 8192);
        assert_eq!(lend(b - 1, 1).err(), Some((a, b)));
        lent.leak(4096, 4096);
        drop(lent);
        assert_eq!(lend(a, 8192).err(), Some((a + 4096, b)), "what a device kept stays taken");
        drop(lend(a, 4096).expect("the rest does not"));
        drop(r);
        drop(lend(start, 4096).expect("unmapped, but nobody's"));
    }

    #[test]
    fn impossible_sizes_are_errors() {
        assert!(Reservation::new(usize::MAX, 4096, StepHook::default()).is_err());
        assert!(Reservation::new(usize::MAX - 8191, 4096, StepHook::default()).is_err());
    }
}
