//! Devices: what registers memory. Manages the choice of a device and the seam ([`Registrar`]) that
//! anything which registers memory can stand behind; leaves mapping and order to the arenas.

#[cfg(feature = "fault")]
mod fault;
mod soft;
#[cfg(any(feature = "rdma-sys", feature = "rdma-mummy-sys"))]
mod verbs;
mod window;

use std::{fmt, ptr::NonNull, sync::Arc};

#[cfg(feature = "fault")]
pub use self::fault::{Fault, FaultyRegistrar, MrRecord};
pub use self::soft::{SoftDevice, SoftError};
pub(crate) use self::soft::{SoftPart, WindowId};
#[cfg(any(feature = "rdma-sys", feature = "rdma-mummy-sys"))]
pub use self::verbs::{ForkSupport, VerbsDevice};
pub use self::window::{Guarantees, LeaseSupport};
#[cfg(feature = "fault")]
pub use crate::sys::mapping_faults::{FaultyMapping, MapFault, MapRecord, MapStep};
use crate::{
    access::{Access, LKey, RKey},
    error::{DeviceError, RegisterError},
};

/// A range to register: whole pages, mapped, faulted in, and owned by the caller.
#[derive(Clone, Copy, Debug)]
pub struct MrRequest {
    /// First byte, aligned to `page_size`.
    pub addr: NonNull<u8>,
    /// Bytes, a multiple of `page_size`.
    pub len: usize,
    /// Bytes of each page that really backs the range.
    pub page_size: usize,
    /// Exactly these rights, no more. With [`Access::ZERO_BASED`], iova 0.
    pub access: Access,
}

/// What a device calls one memory region; means something only to the [`Registrar`] that issued it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct MrHandle(pub u64);

/// One registered range.
#[derive(Clone, Copy, Debug)]
pub struct Registration {
    /// To deregister it with.
    pub handle: MrHandle,
    /// For this host's work requests.
    pub lkey: LKey,
    /// For peers. Never shown to anybody unless the access class has a remote right.
    pub rkey: RKey,
    /// The rights really granted.
    pub access: Access,
}

/// How the pages of a registered range are held, and so what is charged for them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Pinning {
    /// Pinned by the RDMA core: charged to `RLIMIT_MEMLOCK`, shown as `VmPin`.
    Pinned,
    /// Locked with `mlock`: charged to `RLIMIT_MEMLOCK`, shown as `VmLck`.
    Locked,
    /// Not held at all, or not charged.
    Free,
}

/// What a device is and how much it can register.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct DeviceInfo {
    /// Its name, as `ibv_devices` prints it.
    pub name: String,
    /// `"rxe"`, `"mlx5"`, … (the kernel driver where known), or `"soft"`.
    pub transport: String,
    /// The largest range one memory region may cover, in bytes.
    pub max_mr_size: u64,
    /// How many memory regions the device can hold.
    pub max_mr: u64,
    /// How it holds pages.
    pub pinning: Pinning,
    /// The NUMA node it hangs on, if the system knows.
    pub numa_node: Option<u32>,
}

impl DeviceInfo {
    /// A device called `name`, without limits, that holds no pages. Set the public fields for more.
    pub fn new(name: impl Into<String>, transport: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            transport: transport.into(),
            max_mr_size: u64::MAX,
            max_mr: u64::MAX,
            pinning: Pinning::Free,
            numa_node: None,
        }
    }
}

/// One port of a device, as found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct PortInfo {
    /// Ports count from 1.
    pub number: u8,
    /// Whether bytes can be moved through it.
    pub active: bool,
    /// `"Ethernet"` or `"InfiniBand"`.
    pub link: &'static str,
    /// The active MTU in bytes; 0 where the device does not say.
    pub mtu: u32,
}

/// A device's name, and what it is with its ports, or why it does not open.
pub(crate) type Surveyed = (String, Result<(DeviceInfo, Vec<PortInfo>), String>);

/// Whether verbs devices are known at all.
pub(crate) const HAS_VERBS: bool = cfg!(any(feature = "rdma-sys", feature = "rdma-mummy-sys"));

/// Looks at all verbs devices, each opened and closed again.
pub(crate) fn survey() -> Result<Vec<Surveyed>, DeviceError> {
    #[cfg(any(feature = "rdma-sys", feature = "rdma-mummy-sys"))]
    return verbs::survey();
    #[cfg(not(any(feature = "rdma-sys", feature = "rdma-mummy-sys")))]
    Ok(Vec::new())
}

/// Registers memory with a device: the seam behind which a framework may put its own PD wrapper,
/// libfabric or io_uring, and a test may inject faults.
///
/// A pool calls [`register`](Registrar::register) once an arena when it is built (or grows), from
/// any thread and never from `alloc` or free, and [`deregister`](Registrar::deregister) once for
/// each success, before it unmaps the range. Both may block. The value is dropped after the last
/// deregistration, so a PD that it owns can be freed in its `Drop`.
///
/// # Safety
/// The pool hands memory out, and unmaps it, on the word of its registrar:
/// 1. After `deregister` returns `Ok`, the device must not touch the range, for the pool unmaps it.
///    Return `Err` when that is not certain: the pool then leaks the mapping.
/// 2. After `register` returns `Err`, nothing of the range may stay registered.
/// 3. Neither call may unmap, move or change the protection of the range, nor write to it.
/// 4. `lkey` and `rkey` must name the range with the rights in `access` and no others; the pool
///    publishes them as such.
///
/// A `deregister` that panics has refused: the range stays mapped for ever. A `register` that panics ends a `build` with
/// that panic, and is a failed growth.
///
/// A registrar that breaks 1 or 2 lets the device write to memory that by then belongs to others.
pub unsafe trait Registrar: Send + Sync + 'static {
    /// Describes the device. Called a few times at start-up; the limits must not change afterwards.
    fn info(&self) -> DeviceInfo;

    /// Registers a range with exactly the rights asked.
    ///
    /// # Errors
    /// The device's own refusal, errno kept.
    ///
    /// # Safety
    /// `request.addr..+request.len` is mapped, readable, writable, and stays mapped until
    /// [`deregister`](Registrar::deregister) has returned `Ok`.
    unsafe fn register(&self, request: &MrRequest) -> Result<Registration, RegisterError>;

    /// Deregisters what [`register`](Registrar::register) returned.
    ///
    /// # Errors
    /// The device's own refusal, errno kept. The range is then taken to be still registered.
    ///
    /// # Safety
    /// `handle` came from this registrar's `register` and has not been deregistered.
    unsafe fn deregister(&self, handle: MrHandle) -> Result<(), RegisterError>;
}

/// A device with its protection domain; clones share both.
///
/// All pools built on clones of one `Device` share one PD, which is freed after the last of them.
#[derive(Clone)]
pub struct Device {
    registrar: Arc<dyn Registrar>,
    kind: Kind,
    /// Where the registrar is. Kept, for finding that out of a pointer to something unsized takes a look at its table.
    id: usize,
}

#[derive(Clone)]
enum Kind {
    Soft(Arc<SoftDevice>),
    #[cfg(any(feature = "rdma-sys", feature = "rdma-mummy-sys"))]
    Verbs(Arc<VerbsDevice>),
    Custom,
}

impl Device {
    fn new(registrar: Arc<dyn Registrar>, kind: Kind) -> Self {
        let id = Arc::as_ptr(&registrar).addr();
        Self { registrar, kind, id }
    }

    /// Makes a software device: it registers memory of this process, pins it with `mlock` and serves
    /// reads and writes through its keys, checking range and rights. For tests and for machines
    /// without RDMA; never chosen unless asked for.
    pub fn soft() -> Self {
        let soft = Arc::new(SoftDevice::new());
        Self::new(soft.clone(), Kind::Soft(soft))
    }

    /// Puts any [`Registrar`] behind a device.
    pub fn custom(registrar: impl Registrar) -> Self {
        Self::new(Arc::new(registrar), Kind::Custom)
    }

    /// Describes the device.
    pub fn info(&self) -> DeviceInfo {
        self.registrar.info()
    }

    /// The software device behind this, if it is one: the peer's side of it.
    pub fn as_soft(&self) -> Option<&SoftDevice> {
        match &self.kind {
            Kind::Soft(soft) => Some(soft),
            _ => None,
        }
    }

    /// Whether both are clones of one device. Another one opened by the same name is another device: it has
    /// another PD.
    pub fn is(&self, other: &Device) -> bool {
        self.id() == other.id()
    }

    /// A number that no other device has while this one lives; never 0.
    #[inline]
    pub(crate) fn id(&self) -> usize {
        self.id
    }

    pub(crate) fn registrar(&self) -> &Arc<dyn Registrar> {
        &self.registrar
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Device").field(&self.info()).finish()
    }
}
