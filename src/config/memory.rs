//! What of a builder bears on where its memory comes from: mapped by the pool, private or to be shared; lent
//! by the caller; or made by a pool of another process. What is there already is checked here, and laid out.

use std::{
    os::fd::{AsFd, OwnedFd},
    path::PathBuf,
    ptr::NonNull,
};

use super::{
    Asked, Builder, Candidates, Layout, Pages, PoolExport,
    plan::{MAX, Sizes, arena_stride, shortest},
};
use crate::{
    device::{DeviceInfo, Pinning},
    error::{AdoptError, BuildError, ExportError},
    preflight::{self, Demand, Findings},
    reach::Reach,
    size_class::PAGE,
    sys::{
        limits::Facts,
        mmap,
        shared::{self, FileFacts},
        smaps::{self, Mapping},
    },
};

/// What the memory that a pool maps is made of.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub enum Backing {
    /// Private pages: no other process sees them; a forked child has copies of its own.
    #[default]
    Private,
    /// Anonymous files (`memfd_create(2)`), one for each arena, that other processes can
    /// [join](Builder::join); on hugepages where [`Builder::pages`] says so. They are sealed: nobody can
    /// make them shorter or longer.
    Memfd,
    /// Files in this directory of a mounted hugetlbfs, one for each arena, that other processes can open by
    /// name and [join](Builder::join); the mount decides the page size. They are readable by their owner
    /// alone, and removed when the pool is torn down; those of a process that was killed stay, with their
    /// pages, until they are removed by hand. Such files cannot be sealed.
    Hugetlbfs(PathBuf),
}

/// As the user asked.
#[derive(Default)]
pub(super) struct Wishes {
    backing: Backing,
    adopted: Option<(*mut u8, usize)>,
}

// SAFETY: the pointer is an address that whoever called `Builder::adopt` vouched for, for use on any thread.
unsafe impl Send for Wishes {}
// SAFETY: as above; it is only copied.
unsafe impl Sync for Wishes {}

/// A range of somebody else's that the pool may use until its end.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Lent {
    pub(crate) addr: NonNull<u8>,
}

// SAFETY: an address; whoever lent the range vouched for its use on any thread (`Builder::adopt`).
unsafe impl Send for Lent {}
// SAFETY: as above.
unsafe impl Sync for Lent {}

/// Where the memory of a plan comes from.
#[derive(Debug)]
pub(crate) enum Memory {
    /// The pool maps it.
    Mapped(Backing),
    /// The caller has mapped it.
    Lent(Lent),
    /// Another process made these files; with the offset that each is to be mapped at.
    Joined(Vec<(usize, OwnedFd)>),
}

impl Default for Memory {
    fn default() -> Self {
        Self::Mapped(Backing::Private)
    }
}

/// Where an arena lies and what it is made of, as others decided it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Fixed {
    /// In strides from the start of the pool's range.
    pub(crate) slot: usize,
    /// Bytes of a page.
    pub(crate) page_size: usize,
}

impl<R: Reach> Builder<R> {
    /// Sets what the pool's memory is made of; [`Backing::Private`] unless set.
    ///
    /// What is shared is data alone: the allocator's tables stay private to this process, so another
    /// process can spoil contents and nothing else (P2). Other processes may write whenever they please,
    /// as a device may; see [`Buf`](crate::Buf).
    pub fn backing(mut self, backing: Backing) -> Self {
        self.memory.backing = backing;
        self
    }

    /// Makes the pool of memory that is mapped already, instead of mapping any: shared memory, a DAX
    /// mapping, a region of another allocator.
    ///
    /// [`build`](Builder::build) looks the range up in `/proc/self/smaps`: all of it must be mapped readable
    /// and writable, of one page size, start and end with a page (a hugepage, if it is made of those), and
    /// be in no other pool; [`BuildError::Adopt`] says what is wrong. [`Builder::pages`] may insist on a
    /// page size: [`Pages::Require`], or [`Pages::Base`]; the default takes what is there. Pages that are not
    /// in memory are faulted in. It becomes one arena; several, where [`Builder::arena_size`] or the device's
    /// `max_mr_size` ask for smaller ones. It is registered with exactly the rights asked for.
    ///
    /// The pool gives it back as it was: neither unmapped nor advised, bound or locked, with what the buffers'
    /// users left in it. Nothing in it is kept from before: buffers start with whatever it holds. Alignments
    /// above a page are had where the range has such addresses. A further call replaces the range.
    ///
    /// ```
    /// use pinpool::{Device, Pool};
    ///
    /// let mut memory = memmap2::MmapMut::map_anon(1 << 20)?;
    /// // SAFETY: the mapping is used by the pool alone until both it and its buffer are gone, below.
    /// let builder = unsafe { Pool::builder().adopt(memory.as_mut_ptr(), memory.len()) };
    /// let pool = builder.device(Device::soft()).build()?;
    /// let buf = pool.alloc(4096)?;
    /// assert!(memory.as_ptr_range().contains(&buf.as_ptr()));
    /// drop((buf, pool));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Safety
    /// From `build` on until the pool is torn down (its last handle and its last buffer are gone, and
    /// [`Pool::close`](crate::Pool::close), the event hook or
    /// [`leaked_bytes`](crate::leaked_bytes) tells of no failed deregistration; after such a one: for ever):
    /// 1. `addr..addr + len` stays mapped as it is: not unmapped, remapped, protected, truncated or punched.
    /// 2. Nobody else reads or writes it by references, or relies on what it holds; whoever writes it
    ///    otherwise (another process that shares it) is subject to what [`Buf`](crate::Buf) says of devices.
    pub unsafe fn adopt(mut self, addr: *mut u8, len: usize) -> Self {
        self.memory.adopted = Some((addr, len));
        self
    }

    /// The backing for memory to be mapped, and the page sizes to try.
    pub(super) fn planned_backing(&self) -> Result<(Backing, Candidates), BuildError> {
        let backing = self.memory.backing.clone();
        let Backing::Hugetlbfs(dir) = &backing else {
            return Ok((backing, self.pages.candidates()));
        };
        let statfs = |source| ExportError::System { call: "statfs", source };
        let refuse = |e| Err(BuildError::Export(e));
        match shared::hugetlbfs_page(dir).map_err(|e| BuildError::Export(statfs(e)))? {
            None => refuse(ExportError::NotHugetlbfs { dir: dir.clone() }),
            Some(found) => match insisted(self.pages) {
                Some(asked) if asked != found => {
                    refuse(ExportError::HugetlbfsPages { dir: dir.clone(), found, asked })
                }
                _ => Ok((backing, (vec![found], None))),
            },
        }
    }

    /// The memory that is there already, if the pool is to be made of that.
    pub(super) fn memory_given(
        &mut self,
        share: Option<PoolExport>,
        infos: &[DeviceInfo],
    ) -> Result<Option<Given>, BuildError> {
        let adopted = self.memory.adopted.take();
        if share.is_none() && adopted.is_none() {
            return Ok(None);
        }
        let conflicts = [
            (self.capacity != 0, "Builder::capacity"),
            (self.growth.max_capacity.is_some(), "Builder::max_capacity"),
            (self.start.place(), "Builder::numa"),
            (self.memory.backing != Backing::Private, "Builder::backing"),
            (share.is_some() && self.arena_size.is_some(), "Builder::arena_size"),
            (share.is_some() && adopted.is_some(), "Builder::adopt"),
            (share.is_some() && self.heaps.has_classes(), "Builder::class"),
            (share.is_some() && self.heaps.has_shares(), "Builder::share"),
        ];
        if let Some((_, what)) = conflicts.into_iter().find(|&(there, _)| there) {
            return Err(BuildError::Adopt(AdoptError::Conflict(what)));
        }
        let given = match (share, adopted) {
            (Some(share), _) => joined(share).map_err(BuildError::Export)?,
            (None, Some((addr, len))) => adopt(addr, len, infos).map_err(BuildError::Adopt)?,
            (None, None) => return Ok(None),
        };
        match insisted(self.pages) {
            Some(asked) if given.pages.iter().any(|&p| p != asked) => {
                let found = given.pages.iter().copied().find(|&p| p != asked).unwrap_or(0);
                Err(BuildError::Adopt(AdoptError::OtherPages { asked, found }))
            }
            _ => Ok(Some(given)),
        }
    }
}

/// The one page size that will do, if the user says so.
fn insisted(pages: Pages) -> Option<usize> {
    match pages {
        Pages::Base => Some(mmap::base_page()),
        Pages::Require(size) => Some(size.bytes()),
        Pages::Prefer(_) => None,
    }
}

/// Memory that is there already.
pub(super) struct Given {
    memory: Memory,
    /// Distinct page sizes.
    pages: Vec<usize>,
    shape: Shape,
}

enum Shape {
    /// One range, to be cut into arenas.
    Whole(usize),
    /// Cut by another process: stride, and each arena's slot, length and page size.
    Cut(usize, Vec<(Fixed, usize)>),
}

/// The most bytes that can be given: pages have numbers of 31 bits.
const MOST: usize = ((1 << 31) - 1) * PAGE;

/// How given memory is laid out, and what was found.
type Examined = (Layout, Findings, Memory, Vec<Fixed>);

impl Given {
    /// Lays it out and judges that.
    pub(super) fn examine(
        self,
        asked: &Asked,
        infos: &[DeviceInfo],
        facts: &Facts,
    ) -> Result<Examined, BuildError> {
        let info = shortest(infos)?;
        asked.check_access()?;
        let (stride, arenas, fixed) = match self.shape {
            Shape::Whole(len) => {
                let stride = cut(asked.arena_size, len, self.pages[0], info)?;
                let mut arenas = vec![stride; len / stride];
                if !len.is_multiple_of(stride) {
                    arenas.push(len % stride);
                }
                (stride, arenas, Vec::new())
            }
            Shape::Cut(stride, arenas) => {
                let too_long = arenas.iter().find(|&&(_, len)| len as u64 > info.max_mr_size);
                if let Some(&(_, asked)) = too_long {
                    let problem = format!(
                        "is more than one memory region of {} may cover (max_mr_size {} bytes)",
                        info.name, info.max_mr_size
                    );
                    return Err(BuildError::ArenaSize { asked, problem });
                }
                let (fixed, arenas) = arenas.into_iter().unzip();
                (stride, arenas, fixed)
            }
        };
        let demand = Demand {
            infos,
            arenas: &arenas,
            stride,
            page_sizes: &self.pages,
            base_page: mmap::base_page(),
            numa: asked.numa,
            there: true,
        };
        let found = preflight::judge(&demand, facts);
        let slots = fixed.iter().map(|f: &Fixed| f.slot + 1).max().unwrap_or(arenas.len());
        let range = stride.saturating_mul(slots);
        let capacity: usize = arenas.iter().sum();
        let asked = if fixed.is_empty() { capacity } else { range };
        if asked > MOST {
            return Err(BuildError::CapacityTooLarge { asked, max: MOST });
        }
        Ok((
            Layout {
                capacity,
                arena: stride,
                stride,
                arenas,
                more: Vec::new(),
                page_sizes: self.pages,
            },
            found,
            self.memory,
            fixed,
        ))
    }
}

/// Decides how far apart the arenas of a given range are: one arena, unless smaller ones are asked for or
/// the device's regions are smaller.
fn cut(
    asked: Option<usize>,
    len: usize,
    page: usize,
    info: &DeviceInfo,
) -> Result<usize, BuildError> {
    let whole = len.next_power_of_two();
    if asked.is_none() && len as u64 <= info.max_mr_size {
        return Ok(whole);
    }
    let max = usize::try_from(info.max_mr_size).unwrap_or(usize::MAX);
    let most = if max == 0 { 0 } else { 1 << max.ilog2() };
    Ok(arena_stride(
        asked.or(Some(most).filter(|&m| m >= page)),
        Sizes { capacity: len, more: 0, page },
        info,
    )?)
}

/// Checks a range that is lent.
fn adopt(addr: *mut u8, len: usize, infos: &[DeviceInfo]) -> Result<Given, AdoptError> {
    let start = addr as usize;
    let lent = NonNull::new(addr).filter(|_| len > 0).ok_or(AdoptError::Empty)?;
    let wraps = AdoptError::Wraps { addr: start, len };
    let end = start.checked_add(len).filter(|_| len <= MAX).ok_or(wraps)?;
    let base = mmap::base_page();
    if !start.is_multiple_of(base) || !end.is_multiple_of(base) {
        return Err(AdoptError::NotWholePages { addr: start, len, page_size: base });
    }
    // Looked at once more when it is taken; here so that nothing else is found fault with first.
    if let Some((start, end)) = mmap::in_use(start, end) {
        return Err(AdoptError::InUse { start, end });
    }
    let mappings = smaps::under(start, end).map_err(AdoptError::Unknown)?;
    let page = judge(start, end, &mappings, infos)?;
    let memory = Memory::Lent(Lent { addr: lent });
    Ok(Given { memory, pages: vec![page], shape: Shape::Whole(len) })
}

/// Judges what is mapped under a range; returns the size of its pages.
fn judge(
    start: usize,
    end: usize,
    mappings: &[Mapping],
    infos: &[DeviceInfo],
) -> Result<usize, AdoptError> {
    let mut at = start;
    for m in mappings {
        if m.start > at {
            return Err(AdoptError::NotMapped { at, len: m.start - at });
        }
        at = m.end;
    }
    if at < end {
        return Err(AdoptError::NotMapped { at, len: end - at });
    }
    let len = |m: &Mapping| m.end - m.start;
    if let Some(m) = mappings.iter().find(|m| !m.rights.starts_with("rw")) {
        let rights = m.rights.clone();
        return Err(AdoptError::Protection { at: m.start, len: len(m), rights });
    }
    let first = mappings.first().map_or(0, |m| m.page_size);
    if !first.is_power_of_two() || first < mmap::base_page() {
        return Err(AdoptError::Unknown(std::io::ErrorKind::InvalidData.into()));
    }
    if let Some(m) = mappings.iter().find(|m| m.page_size != first) {
        return Err(AdoptError::MixedPages { first, at: m.start, other: m.page_size });
    }
    if !start.is_multiple_of(first) || !end.is_multiple_of(first) {
        return Err(AdoptError::NotWholePages { addr: start, len: end - start, page_size: first });
    }
    // Locks do not nest: to deregister would take the caller's lock away.
    let locking = infos.iter().find(|i| i.pinning == Pinning::Locked);
    if let (Some(m), Some(info)) = (mappings.iter().find(|m| m.locked), locking) {
        return Err(AdoptError::Locked { at: m.start, len: len(m), device: info.name.clone() });
    }
    Ok(first)
}

/// Checks what another process shares.
fn joined(share: PoolExport) -> Result<Given, ExportError> {
    let (layout, fds, trusted) = share.into_parts();
    let arenas = layout.arenas();
    if fds.len() != arenas.len() {
        return Err(ExportError::Files { arenas: arenas.len(), files: fds.len() });
    }
    let (mut files, mut cut) = (Vec::new(), Vec::new());
    for (arena, (a, fd)) in arenas.iter().zip(fds).enumerate() {
        let failed = |source| ExportError::System { call: "fstatfs", source };
        let FileFacts { len, page_size, fixed } = shared::inspect(fd.as_fd()).map_err(failed)?;
        if len < a.len as u64 || page_size != a.page_size {
            return Err(ExportError::OtherFile {
                arena,
                len: a.len as u64,
                page_size: a.page_size,
                found: len,
                found_page: page_size,
            });
        }
        if !fixed && !trusted {
            return Err(ExportError::Unsealed { arena });
        }
        let slot = a.offset / layout.stride();
        files.push((a.offset, fd));
        cut.push((Fixed { slot, page_size }, a.len));
    }
    let mut pages: Vec<usize> = arenas.iter().map(|a| a.page_size).collect();
    pages.sort_unstable_by(|a, b| b.cmp(a));
    pages.dedup();
    let shape = Shape::Cut(layout.stride(), cut);
    Ok(Given { memory: Memory::Joined(files), pages, shape })
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: usize = 1 << 20;

    fn mapping(start: usize, end: usize) -> Mapping {
        Mapping { start, end, rights: "rw-p".into(), page_size: 4096, locked: false }
    }

    fn verdict(mappings: &[Mapping]) -> Result<usize, AdoptError> {
        judge(2 * MIB, 6 * MIB, mappings, &[DeviceInfo::new("d", "t")])
    }

    #[test]
    fn a_range_of_several_mappings_that_are_alike_will_do() {
        let all = [mapping(2 * MIB, 3 * MIB), mapping(3 * MIB, 6 * MIB)];
        assert_eq!(verdict(&all).expect("fit"), 4096);
        let huge = all.map(|m| Mapping { page_size: MIB, ..m });
        assert_eq!(verdict(&huge).expect("fit"), MIB);
    }

    #[test]
    fn each_fault_is_told_with_where_it_is() {
        let [a, b] = [mapping(2 * MIB, 3 * MIB), mapping(3 * MIB, 6 * MIB)];
        let e = verdict(&[]).expect_err("nothing");
        assert!(matches!(e, AdoptError::NotMapped { at, len } if (at, len) == (2 * MIB, 4 * MIB)));
        let e = verdict(std::slice::from_ref(&b)).expect_err("a hole before");
        assert!(matches!(e, AdoptError::NotMapped { at, len } if (at, len) == (2 * MIB, MIB)));
        let e = verdict(&[a.clone(), mapping(3 * MIB + 4096, 6 * MIB)]).expect_err("a hole");
        assert!(matches!(e, AdoptError::NotMapped { at, len } if (at, len) == (3 * MIB, 4096)));
        let e = verdict(std::slice::from_ref(&a)).expect_err("a hole behind");
        assert!(matches!(e, AdoptError::NotMapped { at, len } if (at, len) == (3 * MIB, 3 * MIB)));
        let read_only = Mapping { rights: "r--s".into(), ..b.clone() };
        let e = verdict(&[a.clone(), read_only]).expect_err("read-only");
        assert!(e.to_string().contains("3 MiB from 0x300000 on are mapped r--s"), "{e}");
        let huge = Mapping { page_size: 2 * MIB, ..b.clone() };
        let e = verdict(&[a.clone(), huge]).expect_err("mixed");
        assert!(matches!(e, AdoptError::MixedPages { at, .. } if at == 3 * MIB), "{e}");
        let huge = [a.clone(), b.clone()].map(|m| Mapping { page_size: 4 * MIB, ..m });
        let e = verdict(&huge).expect_err("not whole");
        assert!(e.to_string().contains("a page of 4 MiB"), "{e}");
        let none = [a, b].map(|m| Mapping { page_size: 0, ..m });
        assert!(matches!(verdict(&none), Err(AdoptError::Unknown(_))));
    }

    #[test]
    fn only_a_device_that_locks_minds_locks() {
        let locked = Mapping { locked: true, ..mapping(2 * MIB, 6 * MIB) };
        assert!(verdict(std::slice::from_ref(&locked)).is_ok());
        let mut info = DeviceInfo::new("soft", "soft");
        info.pinning = Pinning::Locked;
        let e = judge(2 * MIB, 6 * MIB, &[locked], &[DeviceInfo::new("d", "t"), info])
            .expect_err("locked");
        assert!(matches!(e, AdoptError::Locked { .. }), "{e}");
    }

    #[test]
    fn a_lent_range_is_one_arena_where_the_device_permits_it() {
        let of = |asked, len, max| {
            let mut info = DeviceInfo::new("d", "t");
            info.max_mr_size = max;
            cut(asked, len, 4096, &info)
        };
        assert_eq!(of(None, 5 * MIB, u64::MAX).expect("cut"), 8 * MIB);
        assert_eq!(of(None, 5 * MIB, 5 << 20).expect("cut"), 8 * MIB, "exactly one region");
        assert_eq!(of(None, 5 * MIB, (5 << 20) - 1).expect("cut"), 4 * MIB);
        assert_eq!(of(None, 64 << 30, u64::MAX).expect("cut"), 64 << 30);
        assert_eq!(of(Some(MIB), 5 * MIB, u64::MAX).expect("cut"), MIB);
        assert!(matches!(of(Some(3 * MIB), 5 * MIB, u64::MAX), Err(BuildError::ArenaSize { .. })));
        for max in [0, 4095] {
            assert!(matches!(of(None, 8192, max), Err(BuildError::MrTooSmall { .. })), "{max}");
        }
    }
}
