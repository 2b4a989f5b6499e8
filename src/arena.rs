//! Arenas: mapping and registration, in the one order that is safe, and back in the reverse order.
//!
//! All arenas of a pool lie in one address range, reserved or lent, a power of two apart, each registered as
//! one memory region. Bringing them up (`start`): map → bind to NUMA nodes → fault in → register. Taking one
//! down: deregister → unmap; the PD goes with the last reference to the registrar (P4). What lies inside an arena is the slabs'
//! business.

mod start;

use std::{
    io, mem,
    os::fd::OwnedFd,
    path::PathBuf,
    ptr::NonNull,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use crate::{
    access::{Access, Keys, PackedKeys},
    config::{self, Backing, Event, EventHook, Memory, Plan},
    device::{Registrar, Registration},
    error::{AdoptError, BuildError, RegisterError},
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
    /// How long the register call took.
    pub register_time: Duration,
}

// SAFETY: `addr` is a number to look at; using it takes an unsafe dereference of the reader's own.
unsafe impl Send for ArenaInfo {}
// SAFETY: as above.
unsafe impl Sync for ArenaInfo {}

struct Arena {
    offset: usize,
    len: usize,
    page_size: usize,
    node: Option<u32>,
    registration: Registration,
    map_time: Duration,
    fault_in_time: Duration,
    register_time: Duration,
}

/// The registered arenas of one pool. Dropping it deregisters, unmaps and lets go of the PD, in this
/// order.
pub(crate) struct Arenas {
    list: Vec<Arena>,
    // Dropped before the registrar: mappings go before the PD, after the regions (see `take_down`).
    reservation: Reservation,
    registrar: Arc<dyn Registrar>,
    hook: Option<EventHook>,
    register_calls: u64,
}

/// What taking arenas down left behind.
#[derive(Debug, Default)]
pub(crate) struct Leftover {
    pub(crate) arenas: usize,
    pub(crate) bytes: usize,
    pub(crate) first: Option<RegisterError>,
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
    let slots = plan.fixed.iter().map(|f| f.slot + 1).max().unwrap_or(plan.arenas.len());
    let len = plan.stride * slots;
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
    /// Brings up all arenas of a plan, or none.
    pub(crate) fn build(plan: &mut Plan) -> Result<Self, BuildError> {
        let reservation = reserve(plan)?;
        let mut arenas = Self {
            list: Vec::with_capacity(plan.arenas.len()),
            reservation,
            registrar: plan.device.registrar().clone(),
            hook: plan.hook.take(),
            register_calls: 0,
        };
        // On an error, dropping `arenas` undoes exactly what stands.
        start::run(&mut arenas, plan)?;
        Ok(arenas)
    }

    pub(crate) fn base(&self) -> NonNull<u8> {
        self.reservation.base()
    }

    pub(crate) fn reserved(&self) -> usize {
        self.reservation.len()
    }

    /// The files that the arenas are made of, if any: each arena's offset, a descriptor, and a path where
    /// there is one.
    pub(crate) fn files(&self) -> io::Result<Vec<(usize, OwnedFd, Option<PathBuf>)>> {
        self.reservation.files()
    }

    pub(crate) fn register_calls(&self) -> u64 {
        self.register_calls
    }

    /// Offset, length and keys of each arena.
    pub(crate) fn ranges(&self) -> impl Iterator<Item = (usize, usize, PackedKeys)> + '_ {
        self.list
            .iter()
            .map(|a| (a.offset, a.len, PackedKeys::new(a.registration.lkey, a.registration.rkey)))
    }

    pub(crate) fn infos(&self, access: Access) -> Vec<ArenaInfo> {
        let info = |a: &Arena| ArenaInfo {
            // SAFETY: the offset is inside the reservation.
            addr: unsafe { self.reservation.base().add(a.offset) },
            len: a.len,
            page_size: a.page_size,
            keys: Keys {
                lkey: a.registration.lkey,
                rkey: access.is_remote().then_some(a.registration.rkey),
            },
            access: a.registration.access,
            map_time: a.map_time,
            node: a.node,
            fault_in_time: a.fault_in_time,
            register_time: a.register_time,
        };
        self.list.iter().map(info).collect()
    }

    /// Deregisters and unmaps every arena, last first. An arena that the device will not let go of
    /// stays mapped, is counted and reported.
    pub(crate) fn take_down(&mut self) -> Leftover {
        let mut left = Leftover::default();
        while let Some(arena) = self.list.pop() {
            // SAFETY: the handle came from this registrar, and popping makes this its only use.
            let done = unsafe { self.registrar.deregister(arena.registration.handle) };
            let Err(error) = done else {
                // SAFETY: deregistered, so the device no longer touches it (the registrar's contract,
                // 1); the pool has no live buffer, or is not built yet, so nobody else does.
                unsafe { self.reservation.unback(arena.offset, arena.len) };
                continue;
            };
            self.reservation.leak(arena.offset, arena.len);
            LEAKED.fetch_add(arena.len as u64, Relaxed);
            let addr = self.reservation.base().as_ptr() as usize + arena.offset;
            let event = Event::DeregisterFailed { addr, len: arena.len, error: &error };
            config::tell(self.hook.as_ref(), &event);
            left.arenas += 1;
            left.bytes += arena.len;
            left.first.get_or_insert(error);
        }
        left
    }
}

impl Drop for Arenas {
    fn drop(&mut self) {
        self.take_down();
        let hook = self.hook.as_ref();
        self.reservation.release(|addr, len, error| {
            LEAKED.fetch_add(len as u64, Relaxed);
            config::tell(hook, &Event::UnmapFailed { addr, len, error: &error });
        });
    }
}
