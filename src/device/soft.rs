//! The software device: registers memory of this process and plays its own peer. Manages keys, rights
//! and `mlock`; it moves bytes only through [`SoftDevice::write`] and its siblings, which check what a
//! NIC would check.

use std::{
    collections::{HashMap, VecDeque},
    io,
    ptr::NonNull,
    sync::atomic::{AtomicI32, Ordering::Relaxed},
};

use parking_lot::RwLock;

use super::{DeviceInfo, MrHandle, MrRequest, Pinning, Registrar, Registration};
use crate::{
    access::{Access, LKey, RKey, Sge},
    error::RegisterError,
    sys::mlock,
};

/// A device made of software, for tests and machines without RDMA; see [`Device::soft`].
///
/// Its lkeys and rkeys differ (an even and an odd number), so that swapped keys show. A peer's access
/// is checked for key, range and right, and refused with [`SoftError`], where a NIC would complete
/// with "remote access error".
///
/// [`Device::soft`]: super::Device::soft
#[derive(Debug)]
pub struct SoftDevice {
    regions: RwLock<Regions>,
    info: DeviceInfo,
    /// What a window call of each kind is to fail with, where that is to be tried; 0 is not to.
    window_faults: [AtomicI32; 3],
}

#[derive(Debug, Default)]
struct Regions {
    next: u32,
    by_handle: HashMap<u64, Region>,
    windows: HashMap<WindowId, SoftWindow>,
    /// Those that are bound to nothing, the one that has rested longest first.
    resting: VecDeque<WindowId>,
}

/// A window of the software device. Its key is the number and, in the lower eight bits, what each bind
/// changes; in that of a region the ninth bit is set.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct WindowId(u32);

#[derive(Clone, Copy, Default, Debug)]
struct SoftWindow {
    turn: u8,
    bound: Option<Bound>,
}

/// A part of a region, and what peers may do to it.
#[derive(Clone, Copy, Debug)]
struct Bound {
    region: u64,
    /// As on the wire.
    start: u64,
    len: u64,
    rights: Access,
}

/// The calls on a window.
#[derive(Clone, Copy)]
pub(crate) enum WindowCall {
    Bind,
    Invalidate,
    Dealloc,
}

#[derive(Clone, Copy, Debug)]
struct Region {
    addr: NonNull<u8>,
    len: usize,
    access: Access,
    lkey: LKey,
    rkey: RKey,
}

// SAFETY: a region is a record of an address range; the range is touched only under the contracts of
// `Registrar::register` and of the unsafe calls below, none of which bind it to a thread.
unsafe impl Send for Region {}
// SAFETY: as above; the record itself is never changed.
unsafe impl Sync for Region {}

/// Why the software device refused a peer's access.
#[derive(Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SoftError {
    /// The key names no region.
    #[error("key {0:#x} names no registered region and no bound window")]
    UnknownKey(u32),
    /// The region, or the window, lacks the right.
    #[error("the key grants {granted}, the access needs {needed}")]
    Right {
        /// What the access needs.
        needed: Access,
        /// What the key grants.
        granted: Access,
    },
    /// Outside the region, or the window.
    #[error("{len} bytes at {addr:#x} are not inside what the key names ({start:#x}..{end:#x})")]
    Range {
        /// First byte asked, as on the wire.
        addr: u64,
        /// Bytes asked.
        len: u64,
        /// First byte that the key names, as on the wire.
        start: u64,
        /// One past its last.
        end: u64,
    },
    /// An atomic on an address that is not a multiple of eight.
    #[error("atomic at {0:#x}, which is not a multiple of 8")]
    Misaligned(u64),
}

crate::error::message_in_debug!(SoftError);

impl SoftDevice {
    pub(super) fn new() -> Self {
        let mut info = DeviceInfo::new("soft", "soft");
        info.pinning = Pinning::Locked;
        Self { regions: RwLock::default(), info, window_faults: Default::default() }
    }

    /// How many regions are registered now.
    pub fn regions(&self) -> usize {
        self.regions.read().by_handle.len()
    }

    /// How many windows are allocated now, bound or not.
    pub fn windows(&self) -> usize {
        self.regions.read().windows.len()
    }

    /// Has each call to bind, invalidate or give back a window fail with this errno from now on; 0 has it
    /// do its work again. For tests of recovery.
    #[cfg(feature = "fault")]
    pub fn fail_windows(&self, bind: i32, invalidate: i32, dealloc: i32) {
        for (fault, errno) in self.window_faults.iter().zip([bind, invalidate, dealloc]) {
            fault.store(errno, Relaxed);
        }
    }

    fn window_call(&self, call: WindowCall) -> io::Result<()> {
        match self.window_faults[call as usize].load(Relaxed) {
            0 => Ok(()),
            errno => Err(io::Error::from_raw_os_error(errno)),
        }
    }

    /// The rights of the region under this lkey, if all of `addr..addr + len`, virtual, lies in it.
    pub(crate) fn region_access(&self, lkey: LKey, addr: usize, len: usize) -> Option<Access> {
        let regions = self.regions.read();
        let r = regions.by_handle.values().find(|r| r.lkey == lkey)?;
        let offset = addr.checked_sub(r.addr.as_ptr() as usize)?;
        (offset <= r.len && len <= r.len - offset).then_some(r.access)
    }

    /// Takes a window that is bound to nothing; allocates it if there is none.
    pub(crate) fn take_window(&self) -> WindowId {
        let mut regions = self.regions.write();
        if let Some(id) = regions.resting.pop_front() {
            return id;
        }
        let n = regions.next;
        regions.next = n.wrapping_add(1);
        let id = WindowId(n << 9);
        regions.windows.insert(id, SoftWindow::default());
        id
    }

    /// Puts a window back that is bound to nothing.
    pub(crate) fn rest_window(&self, id: WindowId) {
        self.regions.write().resting.push_back(id);
    }

    /// How many windows there are, and how many of them rest.
    pub(crate) fn window_counts(&self) -> (u64, usize) {
        let regions = self.regions.read();
        (regions.windows.len() as u64, regions.resting.len())
    }

    /// Binds a window, which must be bound to nothing, to a part of the region under `lkey`, under a new
    /// key.
    pub(crate) fn bind_window(
        &self,
        id: WindowId,
        part: SoftPart,
        rights: Access,
    ) -> io::Result<RKey> {
        self.window_call(WindowCall::Bind)?;
        let invalid = || io::Error::from_raw_os_error(libc::EINVAL);
        let mut regions = self.regions.write();
        let by_lkey = regions.by_handle.iter().find(|(_, r)| r.lkey == part.lkey);
        let (&region, record) = by_lkey.ok_or_else(invalid)?;
        record.check(part.addr, part.len, Access::MW_BIND).map_err(|_| invalid())?;
        let window = regions.windows.get_mut(&id).filter(|w| w.bound.is_none());
        let window = window.ok_or_else(invalid)?;
        window.turn = window.turn.wrapping_add(1);
        window.bound = Some(Bound { region, start: part.addr, len: part.len, rights });
        Ok(id.rkey(window.turn))
    }

    /// Unbinds the window. Accesses under way are waited for.
    pub(crate) fn invalidate_window(&self, id: WindowId) -> io::Result<()> {
        self.window_call(WindowCall::Invalidate)?;
        let mut regions = self.regions.write();
        let bound = regions.windows.get_mut(&id).and_then(|w| w.bound.take());
        bound.map(drop).ok_or_else(|| io::Error::from_raw_os_error(libc::EINVAL))
    }

    /// Gives a window back, bound or not.
    pub(crate) fn dealloc_window(&self, id: WindowId) -> io::Result<()> {
        self.window_call(WindowCall::Dealloc)?;
        let gone = self.regions.write().windows.remove(&id);
        gone.map(drop).ok_or_else(|| io::Error::from_raw_os_error(libc::EINVAL))
    }

    /// Writes as a peer: RDMA WRITE of `data` to `addr` under `rkey`.
    ///
    /// # Errors
    /// [`SoftError`], and no byte is changed.
    ///
    /// # Safety
    /// While the call runs, nobody uses a reference into the range that it touches, nor accesses it
    /// otherwise than by such calls: what a NIC does behind the compiler's back, this does too.
    pub unsafe fn write(&self, rkey: RKey, addr: u64, data: &[u8]) -> Result<(), SoftError> {
        self.with_remote(rkey, addr, data.len(), Access::REMOTE_WRITE, |p| {
            // SAFETY: `with_remote` checked that `data.len()` bytes at `p` lie in one registered
            // region, which stays mapped while it is registered; the caller's `data` is a live slice,
            // and `copy` allows overlap; nobody else is at the range (contract).
            unsafe { p.copy_from(NonNull::from(data).cast(), data.len()) }
        })
    }

    /// Reads as a peer: RDMA READ of `data.len()` bytes from `addr` under `rkey`.
    ///
    /// # Errors
    /// [`SoftError`], and `data` is unchanged.
    ///
    /// # Safety
    /// As for [`write`](SoftDevice::write).
    pub unsafe fn read(&self, rkey: RKey, addr: u64, data: &mut [u8]) -> Result<(), SoftError> {
        self.with_remote(rkey, addr, data.len(), Access::REMOTE_READ, |p| {
            // SAFETY: as in `write`, with the direction reversed; `data` is exclusively borrowed.
            unsafe { p.copy_to(NonNull::from(&mut *data).cast(), data.len()) }
        })
    }

    /// Adds as a peer: atomic fetch-and-add of `add` on the 8 bytes at `addr`; returns what was there.
    ///
    /// # Errors
    /// [`SoftError`], and nothing is changed.
    ///
    /// # Safety
    /// As for [`write`](SoftDevice::write).
    pub unsafe fn fetch_add(&self, rkey: RKey, addr: u64, add: u64) -> Result<u64, SoftError> {
        self.atomic(rkey, addr, |a| a.fetch_add(add, std::sync::atomic::Ordering::SeqCst))
    }

    /// Compares and swaps as a peer on the 8 bytes at `addr`; returns what was there.
    ///
    /// # Errors
    /// [`SoftError`], and nothing is changed.
    ///
    /// # Safety
    /// As for [`write`](SoftDevice::write).
    pub unsafe fn compare_swap(
        &self,
        rkey: RKey,
        addr: u64,
        old: u64,
        new: u64,
    ) -> Result<u64, SoftError> {
        use std::sync::atomic::Ordering::SeqCst;
        self.atomic(rkey, addr, |a| {
            a.compare_exchange(old, new, SeqCst, SeqCst).unwrap_or_else(|found| found)
        })
    }

    /// Checks a local element as a device checks it before it touches memory: the lkey names a region
    /// that holds all of it and, if the device is to write, permits that.
    ///
    /// # Errors
    /// [`SoftError`].
    pub fn check_local(&self, sge: &Sge, device_writes: bool) -> Result<(), SoftError> {
        let need = if device_writes { Access::LOCAL_WRITE } else { Access::empty() };
        let regions = self.regions.read();
        let region = regions.by_handle.values().find(|r| r.lkey == sge.lkey);
        region
            .ok_or(SoftError::UnknownKey(sge.lkey.get()))?
            .check(sge.addr, u64::from(sge.length), need)
            .map(drop)
    }

    fn atomic<R>(
        &self,
        rkey: RKey,
        addr: u64,
        op: impl FnOnce(&std::sync::atomic::AtomicU64) -> R,
    ) -> Result<R, SoftError> {
        if !addr.is_multiple_of(8) {
            return Err(SoftError::Misaligned(addr));
        }
        self.with_remote(rkey, addr, 8, Access::REMOTE_ATOMIC, |p| {
            // SAFETY: eight bytes at `p` lie in a registered region (checked), aligned to eight since
            // regions start on pages and `addr` was checked; the region outlives the read lock.
            op(unsafe { std::sync::atomic::AtomicU64::from_ptr(p.cast().as_ptr()) })
        })
    }

    /// Runs `op` on the address, with the regions locked against deregistration meanwhile.
    fn with_remote<R>(
        &self,
        rkey: RKey,
        addr: u64,
        len: usize,
        need: Access,
        op: impl FnOnce(NonNull<u8>) -> R,
    ) -> Result<R, SoftError> {
        let regions = self.regions.read();
        let p = match regions.bound(rkey) {
            Some(bound) => {
                bound.check(addr, len as u64, need)?;
                let region = regions.by_handle.get(&bound.region);
                region.ok_or(SoftError::UnknownKey(rkey.get()))?.translate(addr, len as u64)?
            }
            None => {
                let region = regions.by_handle.values().find(|r| r.rkey == rkey);
                let region = region.ok_or(SoftError::UnknownKey(rkey.get()))?;
                region.check(addr, len as u64, need)?
            }
        };
        Ok(op(p))
    }
}

/// A part of a region, of any length.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SoftPart {
    /// As on the wire.
    pub(crate) addr: u64,
    pub(crate) len: u64,
    pub(crate) lkey: LKey,
}

impl WindowId {
    fn rkey(self, turn: u8) -> RKey {
        RKey::new(self.0 | u32::from(turn))
    }
}

impl Regions {
    /// The window that is bound under this key.
    fn bound(&self, rkey: RKey) -> Option<&Bound> {
        let id = WindowId(rkey.get() & !0xff);
        let window = self.windows.get(&id)?;
        window.bound.as_ref().filter(|_| id.rkey(window.turn) == rkey)
    }
}

fn permits(granted: Access, needed: Access) -> Result<(), SoftError> {
    if granted.contains(needed) { Ok(()) } else { Err(SoftError::Right { needed, granted }) }
}

/// Whether `len` bytes at `addr` are all among the `whole` ones from `start` on.
fn lies_within(addr: u64, len: u64, start: u64, whole: u64) -> Result<(), SoftError> {
    let end = start + whole;
    if addr < start || addr.checked_add(len).is_none_or(|last| last > end) {
        return Err(SoftError::Range { addr, len, start, end });
    }
    Ok(())
}

impl Bound {
    fn check(&self, addr: u64, len: u64, needed: Access) -> Result<(), SoftError> {
        permits(self.rights, needed)?;
        lies_within(addr, len, self.start, self.len)
    }
}

impl Region {
    /// Translates an address on the wire, if range and rights permit.
    fn check(&self, addr: u64, len: u64, needed: Access) -> Result<NonNull<u8>, SoftError> {
        permits(self.access, needed)?;
        self.translate(addr, len)
    }

    /// Translates an address on the wire, if the range permits.
    fn translate(&self, addr: u64, len: u64) -> Result<NonNull<u8>, SoftError> {
        let zero_based = self.access.contains(Access::ZERO_BASED);
        let start = if zero_based { 0 } else { self.addr.as_ptr() as u64 };
        lies_within(addr, len, start, self.len as u64)?;
        // SAFETY: `addr - start <= self.len` was checked just above, so this stays inside the region
        // or one past its end.
        Ok(unsafe { self.addr.add((addr - start) as usize) })
    }
}

// SAFETY: deregistering removes the record under the write lock, which waits for every access in
// progress, so nothing touches the range afterwards (1); a failed registration leaves no record (2);
// only mlock and munlock are called on the range (3); `check` holds accesses to the record's rights (4).
unsafe impl Registrar for SoftDevice {
    fn info(&self) -> DeviceInfo {
        self.info.clone()
    }

    unsafe fn register(&self, request: &MrRequest) -> Result<Registration, RegisterError> {
        let fail = |call, source| RegisterError::Register {
            call,
            device: self.info.name.clone(),
            len: request.len,
            access: request.access,
            source,
        };
        if request.access.conflict().is_some() {
            return Err(fail("soft register", io::Error::from_raw_os_error(libc::EINVAL)));
        }
        // SAFETY: the range is mapped until it is deregistered (contract), which unlocks it.
        unsafe { mlock::lock(request.addr, request.len) }.map_err(|e| fail("mlock", e))?;
        let mut regions = self.regions.write();
        let n = regions.next;
        regions.next = n.wrapping_add(1);
        let (lkey, rkey) = (LKey::new(0x100 | n << 9), RKey::new(0x101 | n << 9));
        let handle = MrHandle(u64::from(n));
        let region =
            Region { addr: request.addr, len: request.len, access: request.access, lkey, rkey };
        regions.by_handle.insert(handle.0, region);
        Ok(Registration { handle, lkey, rkey, access: request.access })
    }

    unsafe fn deregister(&self, handle: MrHandle) -> Result<(), RegisterError> {
        let fail = |call, source| RegisterError::Deregister {
            call,
            device: self.info.name.clone(),
            source,
        };
        let refused = || fail("soft deregister", io::Error::from_raw_os_error(libc::EINVAL));
        let mut regions = self.regions.write();
        if regions.windows.values().any(|w| w.bound.is_some_and(|b| b.region == handle.0)) {
            return Err(refused());
        }
        let region = regions.by_handle.remove(&handle.0).ok_or_else(refused)?;
        drop(regions);
        // SAFETY: the range stays mapped until this returns (contract of `register`).
        unsafe { mlock::unlock(region.addr, region.len) }.map_err(|e| fail("munlock", e))
    }
}
