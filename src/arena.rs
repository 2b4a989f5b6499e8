//! Arenas: mapping and registration, in the one order that is safe, and back in the reverse order.
//!
//! All arenas of a pool lie in one address range, reserved or lent, in slots a power of two apart, each registered as
//! one memory region on each device. Bringing them up (`start`): map → bind → fault in → register. Taking
//! one down: deregister → unmap; the PD goes with the last reference to the registrar (P4). Devices that come
//! and go: `rails`. What lies inside an arena is the slabs' business; when one comes or goes, the pool's.

mod rails;
mod start;

use std::{
    io, mem,
    os::fd::OwnedFd,
    path::PathBuf,
    ptr::NonNull,
    sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    time::Duration,
};

pub(crate) use self::rails::AddError;
use crate::{
    access::{Access, Keys, PackedKeys},
    config::{self, Backing, Event, EventHook, Memory, Plan},
    contained::contained,
    device::{Device, DeviceInfo, Registration},
    error::{self, AdoptError, BuildError, RegisterError},
    sys::mmap::{Origin, Reservation},
};

/// One arena as it stands: where it is and what it is made of.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct ArenaInfo {
    /// First byte.
    pub addr: NonNull<u8>,
    /// Bytes, all of them inside the memory region.
    pub len: usize,
    /// Bytes of each page that backs it, as obtained.
    pub page_size: usize,
    /// The region's keys.
    pub keys: Keys,
    /// The rights that the device granted.
    pub access: Access,
    /// How long mapping took.
    pub map_time: Duration,
    /// The NUMA node that it lies on; `None` when on several, or where the kernel does not say. Judged by
    /// up to 256 of its pages.
    pub node: Option<u32>,
    /// How long faulting in every page took, added up over the threads that did it.
    pub fault_in_time: Duration,
    /// How long the register call took; with several devices, on the one asked about.
    pub register_time: Duration,
}

// SAFETY: `addr` is a number to look at; using it takes an unsafe dereference of the reader's own.
unsafe impl Send for ArenaInfo {}
// SAFETY: as above.
unsafe impl Sync for ArenaInfo {}

/// An arena that stands.
struct Arena {
    slot: usize,
    len: usize,
    page_size: usize,
    node: Option<u32>,
    map_time: Duration,
    fault_in_time: Duration,
    regions: Vec<Region>,
    /// A device that it was removed from would not let go of it.
    stuck: bool,
}

/// An arena's memory region on one device.
struct Region {
    rail: usize,
    registration: Registration,
    time: Duration,
}

/// A device, at its place in the list.
struct Rail {
    device: Device,
    info: DeviceInfo,
}

/// The registered arenas of one pool. Dropping it deregisters, unmaps and lets go of the PDs, in this
/// order.
pub(crate) struct Arenas {
    /// In order of slots.
    list: Vec<Arena>,
    // Dropped before the devices: mappings go before the PDs, after the regions (see `take_down`).
    reservation: Reservation,
    /// By rail.
    rails: Vec<Option<Rail>>,
    plan: Plan,
    calls: Calls,
}

/// The register calls that were made.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct Calls {
    pub(crate) count: u64,
    /// How long they took together, refused ones included, and the longest.
    pub(crate) time: Duration,
    pub(crate) longest: Duration,
}

impl Calls {
    fn took(&mut self, time: Duration) {
        self.time += time;
        self.longest = self.longest.max(time);
    }
}

/// What taking arenas down left behind.
#[derive(Debug, Default)]
pub(crate) struct Leftover {
    pub(crate) arenas: usize,
    pub(crate) bytes: usize,
    pub(crate) first: Option<RegisterError>,
}

impl Leftover {
    pub(crate) fn add(&mut self, other: Self) {
        self.arenas += other.arenas;
        self.bytes += other.bytes;
        self.first = self.first.take().or(other.first);
    }
}

/// An event that is told later, when no lock is held.
#[derive(Debug)]
pub(crate) enum Told {
    DeregisterFailed { addr: usize, len: usize, error: RegisterError },
    HugepagesMissing { arena: usize, len: usize, page_size: usize, free_pages: Option<u64> },
}

impl Told {
    pub(crate) fn tell(&self, hook: Option<&EventHook>) {
        let event = match self {
            Self::DeregisterFailed { addr, len, error } => {
                Event::DeregisterFailed { addr: *addr, len: *len, error }
            }
            &Self::HugepagesMissing { arena, len, page_size, free_pages } => {
                Event::HugepagesMissing { arena, len, page_size, free_pages }
            }
        };
        config::tell(hook, &event);
    }

    /// The refusal to deregister, if that is what it is, for somebody else to have too.
    pub(crate) fn refusal_again(&self) -> Option<RegisterError> {
        match self {
            Self::DeregisterFailed {
                error: RegisterError::Deregister { call, device, source },
                ..
            } => {
                let source = error::again(source);
                Some(RegisterError::Deregister { call, device: device.clone(), source })
            }
            _ => None,
        }
    }

    /// The refusal to deregister, if that is what it is.
    pub(crate) fn refusal(self) -> Option<RegisterError> {
        match self {
            Self::DeregisterFailed { error, .. } => Some(error),
            Self::HugepagesMissing { .. } => None,
        }
    }
}

/// The file that an arena is made of.
pub(crate) struct ArenaFile {
    pub(crate) offset: usize,
    pub(crate) len: usize,
    pub(crate) page_size: usize,
    pub(crate) file: OwnedFd,
    pub(crate) path: Option<PathBuf>,
}

/// Where an arena stands, and its keys on each device as (rail, keys).
pub(crate) struct Standing {
    pub(crate) slot: usize,
    pub(crate) offset: usize,
    pub(crate) len: usize,
    pub(crate) keys: Vec<(usize, PackedKeys)>,
}

/// Bytes that stay mapped because a device would not deregister them, or the system not unmap them, over
/// the whole process.
static LEAKED: AtomicU64 = AtomicU64::new(0);

/// Bytes of this process that stay mapped for ever, because a device refused to deregister them, or the
/// system to unmap them. Anything but 0 is worth reporting: it is a driver's fault, or the process has as
/// many mappings as it may (`vm.max_map_count`). [`Event`] tells which, and where.
pub fn leaked_bytes() -> u64 {
    LEAKED.load(Relaxed)
}

/// The address range of a plan.
fn reserve(plan: &mut Plan) -> Result<Reservation, BuildError> {
    let len = plan.stride * plan.slots();
    let origin = match mem::take(&mut plan.memory) {
        Memory::Lent(lent) => {
            // SAFETY: who lent it vouched for it (`Builder::adopt`), for as long as the pool and its buffers.
            let lent = unsafe { Reservation::lend(lent.addr, plan.capacity, plan.mapping.clone()) };
            let in_use = |(start, end)| BuildError::Adopt(AdoptError::InUse { start, end });
            return lent.map_err(in_use);
        }
        Memory::Mapped(Backing::Private) => Origin::Private,
        Memory::Mapped(Backing::Memfd) => Origin::Memfd,
        Memory::Mapped(Backing::Hugetlbfs(dir)) => Origin::Hugetlbfs(dir),
        Memory::Joined(files) => Origin::Given(files),
    };
    Reservation::of(len, plan.stride, origin, plan.mapping.clone())
        .map_err(|source| BuildError::Reserve { len, source })
}

impl Arenas {
    /// Brings up the arenas that a plan begins with, or none. Address space is reserved for all that can
    /// come.
    pub(crate) fn build(mut plan: Plan) -> Result<Self, BuildError> {
        let reservation = reserve(&mut plan)?;
        let rail = |(device, info)| Some(Rail { device, info });
        let rails = plan.devices.drain(..).zip(plan.infos.drain(..)).map(rail).collect();
        let first = plan.arenas.len();
        let mut arenas = Self {
            list: Vec::with_capacity(first),
            reservation,
            rails,
            plan,
            calls: Calls::default(),
        };
        // On an error, dropping `arenas` undoes exactly what stands.
        let slots: Vec<usize> = (0..first).map(|i| arenas.plan.slot_of(i)).collect();
        start::run(&mut arenas, &slots, None)?;
        arenas.plan.start.progress = None;
        Ok(arenas)
    }

    pub(crate) fn base(&self) -> NonNull<u8> {
        self.reservation.base()
    }

    pub(crate) fn reserved(&self) -> usize {
        self.reservation.len()
    }

    /// The files that the arenas are made of, if any.
    pub(crate) fn files(&self) -> io::Result<Vec<ArenaFile>> {
        let files = self.reservation.files()?;
        let arena = |(offset, file, path)| {
            let arena = self.list.iter().find(|a| self.offset(a.slot) == offset)?;
            Some(ArenaFile { offset, len: arena.len, page_size: arena.page_size, file, path })
        };
        Ok(files.into_iter().filter_map(arena).collect())
    }

    pub(crate) fn calls(&self) -> Calls {
        self.calls
    }

    fn offset(&self, slot: usize) -> usize {
        slot * self.plan.stride
    }

    fn standing_at(&self, arena: &Arena) -> Standing {
        let keys = |r: &Region| (r.rail, PackedKeys::new(r.registration.lkey, r.registration.rkey));
        Standing {
            slot: arena.slot,
            offset: self.offset(arena.slot),
            len: arena.len,
            keys: arena.regions.iter().map(keys).collect(),
        }
    }

    /// The arenas that stand.
    pub(crate) fn standing(&self) -> impl Iterator<Item = Standing> + '_ {
        self.list.iter().map(|a| self.standing_at(a))
    }

    /// The arenas as the device at a rail has them.
    pub(crate) fn infos(&self, rail: usize) -> Vec<ArenaInfo> {
        let remote = self.plan.access.is_remote();
        let info = |a: &Arena| {
            let region = a.regions.iter().find(|r| r.rail == rail)?;
            let Registration { lkey, rkey, access, .. } = region.registration;
            Some(ArenaInfo {
                // SAFETY: the offset is inside the reservation.
                addr: unsafe { self.reservation.base().add(self.offset(a.slot)) },
                len: a.len,
                page_size: a.page_size,
                keys: Keys { lkey, rkey: remote.then_some(rkey) },
                access,
                map_time: a.map_time,
                node: a.node,
                fault_in_time: a.fault_in_time,
                register_time: region.time,
            })
        };
        self.list.iter().filter_map(info).collect()
    }

    /// The lowest slot that has no arena and can have one, and the length it would have.
    pub(crate) fn vacancy(&self) -> Option<(usize, usize)> {
        // The list is in order of slots, and so is this.
        let mut there = self.list.iter().map(|a| a.slot).peekable();
        (self.plan.arenas.len()..self.plan.slots()).find_map(|slot| {
            while there.next_if(|&s| s < slot).is_some() {}
            let len = self.plan.len_of(slot);
            let vacant = there.peek() != Some(&slot);
            (vacant && !self.reservation.is_spared(self.offset(slot), len)).then_some((slot, len))
        })
    }

    /// Brings one arena more up, on the caller's thread alone, on every device. `None` if it was told to stop:
    /// nothing is left of it then, as after an error.
    ///
    /// The caller tells what is in `told` once it holds no lock.
    pub(crate) fn grow(
        &mut self,
        slot: usize,
        stop: &AtomicBool,
        told: &mut Vec<Told>,
    ) -> Result<Option<Standing>, BuildError> {
        let len = self.plan.len_of(slot);
        let run = || start::run(self, &[slot], Some(start::Quietly { stop, told }));
        // A registrar of the user's that panics must not take the pool's thread along.
        let done = contained(run).unwrap_or_else(|| {
            // Whether the device has the range is not known, so it stays as it is.
            let offset = self.offset(slot);
            self.list.retain(|a| a.slot != slot);
            self.reservation.leak(offset, len);
            LEAKED.fetch_add(len as u64, Relaxed);
            Err(panicked(slot, self.plan.slots(), len))
        });
        let rails = self.rails.iter().flatten().count();
        let at = self.list.iter().position(|a| a.slot == slot);
        if let Some(at) = at {
            let arena = &self.list[at];
            if done.is_ok() && arena.regions.len() == rails {
                return Ok(Some(self.standing_at(arena)));
            }
            let arena = self.list.remove(at);
            self.let_go(arena, told);
        }
        done.map(|()| None)
    }

    /// Takes one arena down, of which no block is out nor ever will be.
    pub(crate) fn shrink(&mut self, slot: usize, told: &mut Vec<Told>) {
        if let Some(at) = self.list.iter().position(|a| a.slot == slot) {
            let arena = self.list.remove(at);
            self.let_go(arena, told);
        }
    }

    /// Deregisters an arena, which nobody uses, on every device, last first, and unmaps it. One that a device
    /// will not let go of stays mapped and is counted; says so.
    fn let_go(&mut self, mut arena: Arena, told: &mut Vec<Told>) -> bool {
        let (offset, len) = (self.offset(arena.slot), arena.len);
        while let Some(region) = arena.regions.pop() {
            arena.stuck |= !self.deregister(region, offset, len, told);
        }
        if arena.stuck {
            self.reservation.leak(offset, len);
            LEAKED.fetch_add(len as u64, Relaxed);
        } else {
            // SAFETY: deregistered everywhere, so no device touches it any more (the registrar's contract,
            // 1); it has no live buffer (the callers' promise), or was never published, so nobody else does.
            unsafe { self.reservation.unback(offset, len) };
        }
        arena.stuck
    }

    /// Deregisters one region; false, and an event to tell, if the device would not.
    fn deregister(&self, region: Region, offset: usize, len: usize, told: &mut Vec<Told>) -> bool {
        let Some(rail) = &self.rails[region.rail] else { return false };
        let (device, handle) = (&rail.device, region.registration.handle);
        // SAFETY: the handle came from this registrar, and taking the region makes this its only use.
        let call = || unsafe { device.registrar().deregister(handle) };
        // After a panic it is not known whether the device has let go: it counts as a refusal, and the memory stays.
        let done = contained(call).unwrap_or_else(|| {
            Err(RegisterError::Deregister {
                call: "Registrar::deregister",
                device: rail.info.name.clone(),
                source: io::Error::other("the registrar panicked"),
            })
        });
        let addr = self.reservation.base().as_ptr() as usize + offset;
        done.map_err(|error| told.push(Told::DeregisterFailed { addr, len, error })).is_ok()
    }

    /// Takes every arena down, last first.
    pub(crate) fn take_down(&mut self) -> Leftover {
        let (mut left, mut told) = (Leftover::default(), Vec::new());
        while let Some(arena) = self.list.pop() {
            let len = arena.len;
            if self.let_go(arena, &mut told) {
                left.arenas += 1;
                left.bytes += len;
            }
        }
        told.iter().for_each(|t| t.tell(self.plan.hook.as_ref()));
        left.first = told.into_iter().find_map(Told::refusal);
        left
    }
}

/// The error for a registrar that panicked, which it must not.
fn panicked(arena: usize, arenas: usize, len: usize) -> BuildError {
    BuildError::Back {
        arena,
        arenas,
        len,
        page_size: 0,
        free_pages: None,
        step: "registering",
        source: io::Error::other("the registrar panicked"),
    }
}

impl Drop for Arenas {
    fn drop(&mut self) {
        self.take_down();
        let hook = self.plan.hook.as_ref();
        self.reservation.release(|addr, len, error| {
            LEAKED.fetch_add(len as u64, Relaxed);
            config::tell(hook, &Event::UnmapFailed { addr, len, error: &error });
        });
    }
}
