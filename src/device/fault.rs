//! A registrar that fails on demand, around any other: for tests of recovery, a user's own included.

use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::SeqCst},
    },
    thread,
    time::Duration,
};

use parking_lot::Mutex;

use super::{DeviceInfo, MrHandle, MrRequest, Registrar, Registration};
use crate::{access::Access, error::RegisterError};

/// What to break, and when. Calls are counted from 1 over the registrar's life.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Fault {
    /// The n-th register call fails with this errno, without reaching the device.
    Register(u64, i32),
    /// The n-th deregister call fails with this errno, without reaching the device.
    Deregister(u64, i32),
    /// Every register call that asks for any of these rights fails with this errno.
    Refuse(Access, i32),
    /// The n-th register call takes this much longer, and then does what it would have done.
    Delay(u64, Duration),
}

/// Wraps a registrar: a stand-in device with limits of one's own, that refuses rights, fails, and records
/// what it is asked; see [`Fault`], and [`FaultyMapping`](super::FaultyMapping) for what is not the device's.
/// Clones share faults and counts, so keep one to watch with.
///
/// ```
/// use pinpool::{Access, BuildError, Device, Pages, Pool, device::{Fault, FaultyRegistrar}};
///
/// const EINVAL: i32 = 22;
/// let registrar = FaultyRegistrar::new(&Device::soft())
///     .max_mr(2)
///     .max_mr_size(1 << 20)
///     .fault(Fault::Refuse(Access::RELAXED_ORDERING, EINVAL));
/// let pool = |capacity| {
///     let device = Device::custom(registrar.clone());
///     let builder = Pool::builder().device(device).capacity(capacity).pages(Pages::Base);
///     builder.optional_access(Access::RELAXED_ORDERING).build()
/// };
/// // Two regions of 1 MiB, each asked for with the right and then without.
/// let built = pool(2 << 20)?;
/// assert_eq!((built.arenas().len(), registrar.register_calls()), (2, 4));
/// assert!(matches!(pool(3 << 20), Err(BuildError::TooManyArenas { max_mr: 2, .. })));
/// drop(built);
/// assert_eq!(registrar.live(), 0);
/// # Ok::<(), BuildError>(())
/// ```
#[derive(Clone)]
pub struct FaultyRegistrar {
    shared: Arc<Shared>,
}

struct Shared {
    inner: Arc<dyn Registrar>,
    pretended: Mutex<Pretended>,
    faults: Mutex<Vec<Fault>>,
    requests: Mutex<Vec<MrRecord>>,
    registers: AtomicU64,
    deregisters: AtomicU64,
    live: AtomicU64,
}

/// What the wrapped device is said to be, where it differs.
#[derive(Default)]
struct Pretended {
    max_mr_size: Option<u64>,
    max_mr: Option<u64>,
    numa_node: Option<u32>,
}

/// What a register call asked for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct MrRecord {
    /// First byte.
    pub addr: usize,
    /// Bytes.
    pub len: usize,
    /// Page size.
    pub page_size: usize,
    /// Rights.
    pub access: Access,
}

impl FaultyRegistrar {
    /// Wraps the registrar behind `device`.
    pub fn new(device: &super::Device) -> Self {
        let shared = Shared {
            inner: device.registrar().clone(),
            pretended: Mutex::default(),
            faults: Mutex::default(),
            requests: Mutex::default(),
            registers: AtomicU64::new(0),
            deregisters: AtomicU64::new(0),
            live: AtomicU64::new(0),
        };
        Self { shared: Arc::new(shared) }
    }

    /// Pretends that the device's `max_mr_size` is this.
    pub fn max_mr_size(self, bytes: u64) -> Self {
        self.shared.pretended.lock().max_mr_size = Some(bytes);
        self
    }

    /// Pretends that the device's `max_mr` is this.
    pub fn max_mr(self, regions: u64) -> Self {
        self.shared.pretended.lock().max_mr = Some(regions);
        self
    }

    /// Pretends that the device hangs on this NUMA node.
    pub fn numa_node(self, node: u32) -> Self {
        self.shared.pretended.lock().numa_node = Some(node);
        self
    }

    /// Adds a fault.
    pub fn fault(self, fault: Fault) -> Self {
        self.shared.faults.lock().push(fault);
        self
    }

    /// How many register calls there were, failed ones included.
    pub fn register_calls(&self) -> u64 {
        self.shared.registers.load(SeqCst)
    }

    /// How many deregister calls there were, failed ones included.
    pub fn deregister_calls(&self) -> u64 {
        self.shared.deregisters.load(SeqCst)
    }

    /// How many regions are registered now.
    pub fn live(&self) -> u64 {
        self.shared.live.load(SeqCst)
    }

    /// What the register calls asked for, in order.
    pub fn requests(&self) -> Vec<MrRecord> {
        self.shared.requests.lock().clone()
    }
}

// SAFETY: every call either reaches the wrapped registrar unchanged, and its guarantees hold, or fails
// without touching the device: a refused registration leaves nothing registered (2), a refused
// deregistration says so (1).
unsafe impl Registrar for FaultyRegistrar {
    fn info(&self) -> DeviceInfo {
        let mut info = self.shared.inner.info();
        let pretended = self.shared.pretended.lock();
        info.max_mr_size = pretended.max_mr_size.unwrap_or(info.max_mr_size);
        info.max_mr = pretended.max_mr.unwrap_or(info.max_mr);
        info.numa_node = pretended.numa_node.or(info.numa_node);
        info
    }

    unsafe fn register(&self, request: &MrRequest) -> Result<Registration, RegisterError> {
        let s = &*self.shared;
        let mut requests = s.requests.lock();
        // Counted under the lock, so that the n-th call is the n-th of the records.
        let n = s.registers.fetch_add(1, SeqCst) + 1;
        requests.push(MrRecord {
            addr: request.addr.as_ptr() as usize,
            len: request.len,
            page_size: request.page_size,
            access: request.access,
        });
        drop(requests);
        let hit = s.faults.lock().iter().find_map(|f| match *f {
            Fault::Register(k, errno) if k == n => Some(errno),
            Fault::Refuse(rights, errno) if request.access.intersects(rights) => Some(errno),
            _ => None,
        });
        let delay = s.faults.lock().iter().find_map(|f| match *f {
            Fault::Delay(k, time) if k == n => Some(time),
            _ => None,
        });
        if let Some(time) = delay {
            thread::sleep(time);
        }
        if let Some(errno) = hit {
            return Err(RegisterError::Register {
                call: "register (injected fault)",
                device: self.info().name,
                len: request.len,
                access: request.access,
                source: io::Error::from_raw_os_error(errno),
            });
        }
        // SAFETY: the caller's guarantees, passed on.
        let done = unsafe { s.inner.register(request) };
        if done.is_ok() {
            s.live.fetch_add(1, SeqCst);
        }
        done
    }

    unsafe fn deregister(&self, handle: MrHandle) -> Result<(), RegisterError> {
        let s = &*self.shared;
        let n = s.deregisters.fetch_add(1, SeqCst) + 1;
        let hit = s.faults.lock().iter().find_map(|f| match *f {
            Fault::Deregister(k, errno) if k == n => Some(errno),
            _ => None,
        });
        if let Some(errno) = hit {
            return Err(RegisterError::Deregister {
                call: "deregister (injected fault)",
                device: self.info().name,
                source: io::Error::from_raw_os_error(errno),
            });
        }
        // SAFETY: the caller's guarantees, passed on.
        let done = unsafe { s.inner.deregister(handle) };
        if done.is_ok() {
            s.live.fetch_sub(1, SeqCst);
        }
        done
    }
}
