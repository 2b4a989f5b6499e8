//! Arenas: mapping and registration, in the one order that is safe, and back in the reverse order.
//!
//! All arenas of a pool lie in one reserved address range, a power of two apart, each registered as one
//! memory region. Bringing one up: map → fault in → register. Taking one down: deregister → unmap; the
//! PD goes with the last reference to the registrar (P4). What lies inside an arena is the slabs'
//! business.

use std::{
    io,
    ptr::NonNull,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use crate::{
    access::{Access, Keys, PackedKeys},
    config::{Event, EventHook, Plan, memlock_refusal},
    device::{MrRequest, Registrar, Registration},
    error::{BuildError, RegisterError},
    sys::{
        limits,
        mmap::{self, BackError, BackTimes, Reservation},
    },
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
    /// How long faulting in every page took.
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
    registration: Registration,
    times: BackTimes,
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

/// Bytes that stay mapped because a device would not deregister them, over the whole process.
static LEAKED: AtomicU64 = AtomicU64::new(0);

/// Bytes of this process that stay mapped and registered for ever, because a device refused to
/// deregister them. Anything but 0 is a driver's fault worth reporting.
pub fn leaked_bytes() -> u64 {
    LEAKED.load(Relaxed)
}

impl Arenas {
    /// Brings up all arenas of a plan, or none.
    pub(crate) fn build(plan: &mut Plan) -> Result<Self, BuildError> {
        let len = plan.stride * plan.arenas.len();
        let reservation = Reservation::new(len, plan.stride)
            .map_err(|source| BuildError::Reserve { len, source })?;
        let mut arenas = Self {
            list: Vec::with_capacity(plan.arenas.len()),
            reservation,
            registrar: plan.device.registrar().clone(),
            hook: plan.hook.take(),
            register_calls: 0,
        };
        for index in 0..plan.arenas.len() {
            // On an error, dropping `arenas` undoes exactly those that stand.
            arenas.bring_up(plan, index)?;
        }
        Ok(arenas)
    }

    fn bring_up(&mut self, plan: &Plan, index: usize) -> Result<(), BuildError> {
        let (offset, len) = (index * plan.stride, plan.arenas[index]);
        let (page_size, times) = self.back(plan, index)?;
        // SAFETY: `offset` is inside the reservation, by construction of its length.
        let addr = unsafe { self.reservation.base().add(offset) };
        let request = MrRequest { addr, len, page_size, access: plan.access };
        let start = Instant::now();
        self.register_calls += 1;
        // SAFETY: the range was mapped and faulted in just now and is unmapped only by `take_down`,
        // after deregistration.
        match unsafe { self.registrar.register(&request) } {
            Ok(registration) => {
                let register_time = start.elapsed();
                self.list.push(Arena {
                    offset,
                    len,
                    page_size,
                    registration,
                    times,
                    register_time,
                });
                Ok(())
            }
            Err(source) => {
                // SAFETY: a refused registration leaves nothing registered (the registrar's contract,
                // 2), and nobody else was ever told of the range.
                unsafe { self.reservation.unback(offset, len) };
                Err(self.explain(plan, index, source))
            }
        }
    }

    /// Maps one arena with the best page size to be had.
    fn back(&self, plan: &Plan, index: usize) -> Result<(usize, BackTimes), BuildError> {
        let (offset, len) = (index * plan.stride, plan.arenas[index]);
        let mut tried = None;
        for &page_size in &plan.page_sizes {
            // SAFETY: the arena's range belongs to it alone and nobody knows of it yet; offset and
            // length are multiples of the largest candidate page.
            match unsafe { self.reservation.back(offset, len, page_size) } {
                Ok(times) => {
                    if let (Some((page_size, free_pages, _)), Some(hook)) = (tried, &self.hook) {
                        hook(&Event::HugepagesMissing { arena: index, len, page_size, free_pages });
                    }
                    return Ok((page_size, times));
                }
                Err(e) => {
                    let huge = page_size > mmap::base_page();
                    let free = if huge { limits::free_hugepages(page_size) } else { None };
                    tried = Some((page_size, free, e));
                }
            }
        }
        let (page_size, free_pages, error) = match tried {
            Some(t) => t,
            None => (0, None, BackError::Map(io::ErrorKind::Unsupported.into())),
        };
        let (step, source) = match error {
            BackError::Map(e) => ("mapping", e),
            BackError::FaultIn(e) => ("faulting in", e),
        };
        let arenas = plan.arenas.len();
        Err(BuildError::Back { arena: index, arenas, len, page_size, free_pages, step, source })
    }

    /// Turns a refusal into the error that says most: ENOMEM is put down to the memlock limit only
    /// when the numbers agree.
    fn explain(&self, plan: &Plan, index: usize, source: RegisterError) -> BuildError {
        let errno = source.raw_os_error();
        if errno == Some(libc::ENOMEM)
            && let Some(e) = memlock_refusal(&plan.info, plan.arenas[index], errno)
        {
            return e;
        }
        BuildError::Register { arena: index, arenas: plan.arenas.len(), source }
    }

    pub(crate) fn base(&self) -> NonNull<u8> {
        self.reservation.base()
    }

    pub(crate) fn reserved(&self) -> usize {
        self.reservation.len()
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
            map_time: a.times.map,
            fault_in_time: a.times.fault_in,
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
            if let Some(hook) = &self.hook {
                let addr = self.reservation.base().as_ptr() as usize + arena.offset;
                hook(&Event::DeregisterFailed { addr, len: arena.len, error: &error });
            }
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
    }
}
