//! The verbs device: a PD on a real or soft NIC. Manages which device, whether to prepare for fork, and
//! what sysfs knows of it; leaves the calls themselves to `sys::verbs`.

use std::{
    collections::HashMap,
    ffi::c_void,
    fs,
    path::{Path, PathBuf},
    sync::{Arc, OnceLock},
};

use parking_lot::RwLock;

use super::{
    Device, DeviceInfo, Kind, MrHandle, MrRequest, Pinning, PortInfo, Registrar, Registration,
    Surveyed, window::WindowPool,
};
use crate::{
    access::{Access, LKey},
    error::{DeviceError, RegisterError},
    sys::{
        verbs::{self, CallError, Context, DeviceList, ForkStatus, Mr, MrPtr, Pd, Port},
        window::Window,
    },
};

/// How registered memory fares when the process forks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum ForkSupport {
    /// The kernel gives a child copies of pinned pages at the fork (5.12 and later). Nothing need be
    /// done. Where `RDMAV_FORK_SAFE` is set, libibverbs hides them all the same.
    CopyOnFork,
    /// libibverbs keeps registered pages out of children (`ibv_fork_init`): one that looks into a buffer is
    /// killed by the fault.
    HiddenFromChildren,
    /// Neither. After a fork the first to write a page, parent or child, gets a copy of it; if it is
    /// the parent, the device goes on with the old one. Do not fork, or fork only to `exec`.
    Unsafe,
}

/// A verbs device with a PD of its own, or one that is lent.
///
/// Registers memory with `ibv_reg_mr`. Get one through [`Device::open`], [`Device::first`] or
/// [`Device::from_raw_pd`], and back from a [`Device`] with [`Device::as_verbs`].
pub struct VerbsDevice {
    // Given back before the PD.
    windows: WindowPool,
    /// What is registered here, by lkey: what windows can be bound to.
    regions: RwLock<HashMap<LKey, Region>>,
    pd: Arc<Pd>,
    info: DeviceInfo,
    fork: ForkSupport,
}

/// A region, for windows to be bound to.
#[derive(Clone, Copy)]
pub(crate) struct Region {
    pub(crate) ptr: MrPtr,
    pub(crate) access: Access,
    addr: usize,
    len: usize,
}

impl VerbsDevice {
    fn new(pd: Pd, fork: ForkSupport) -> Result<Self, DeviceError> {
        let context = pd.context();
        let (info, _) = describe(context).map_err(|e| device_error(context.name(), e))?;
        Ok(Self {
            windows: WindowPool::default(),
            regions: RwLock::default(),
            pd: Arc::new(pd),
            info,
            fork,
        })
    }

    /// Opens the PD on an open device.
    fn on(context: Context) -> Result<Self, DeviceError> {
        let fork = prepare_for_fork();
        let name = context.name().to_owned();
        let pd = Pd::new(Arc::new(context)).map_err(|e| device_error(&name, e))?;
        Self::new(pd, fork)
    }

    /// The PD, an `ibv_pd *`. It is valid as long as this device, a clone of its [`Device`], a pool on
    /// it, or a live buffer is. Whoever makes queue pairs or regions on it destroys them before that.
    pub fn pd(&self) -> *mut c_void {
        self.pd.as_ptr().cast()
    }

    /// The device context, an `ibv_context *`; valid as long as the PD.
    pub fn context(&self) -> *mut c_void {
        self.pd.context().as_ptr().cast()
    }

    /// Whether the PD was lent with [`Device::from_raw_pd`], and so is never freed here.
    pub fn is_lent(&self) -> bool {
        self.pd.is_lent()
    }

    /// How its registered memory fares when the process forks, as found when it was opened.
    pub fn fork_support(&self) -> ForkSupport {
        self.fork
    }

    /// The region that was registered here under this key, if all of `addr..addr + len` lies in it.
    pub(crate) fn region_of(&self, lkey: LKey, addr: usize, len: usize) -> Option<Region> {
        let region = *self.regions.read().get(&lkey)?;
        let offset = addr.checked_sub(region.addr)?;
        (offset <= region.len && len <= region.len - offset).then_some(region)
    }

    pub(crate) fn windows(&self) -> &WindowPool {
        &self.windows
    }

    /// A window that is bound to nothing.
    pub(crate) fn take_window(&self) -> Result<Window, CallError> {
        self.windows.take(&self.pd)
    }

    pub(crate) fn shared_pd(&self) -> &Arc<Pd> {
        &self.pd
    }

    /// The type of an entry of a port's GID table (`"RoCE v2"`, `"IB/RoCE v1"`), where sysfs knows it.
    pub(crate) fn gid_type(&self, port: u8, index: u32) -> Option<String> {
        Sysfs::of(&self.info.name).gid_type(port, index)
    }
}

/// Has libibverbs prepare for fork if the kernel does not see to it, and says what holds now. Once a
/// process, before the first registration, for later it would be refused.
fn prepare_for_fork() -> ForkSupport {
    static DONE: OnceLock<()> = OnceLock::new();
    DONE.get_or_init(|| {
        if verbs::fork_status() == ForkStatus::Disabled {
            // A failure (somebody else has registered memory before) shows in the status.
            let _ = verbs::fork_init();
        }
    });
    fork_support()
}

fn fork_support() -> ForkSupport {
    match verbs::fork_status() {
        ForkStatus::Unneeded => ForkSupport::CopyOnFork,
        ForkStatus::Enabled => ForkSupport::HiddenFromChildren,
        ForkStatus::Disabled => ForkSupport::Unsafe,
    }
}

fn device_error(device: &str, e: CallError) -> DeviceError {
    DeviceError::Verbs { call: e.call, device: device.to_owned(), source: e.source }
}

// SAFETY: the contract's numbers.
// 1. `deregister` says Ok only after ibv_dereg_mr succeeded, which it does once the device has let go.
// 2. ibv_reg_mr undoes what it did before it fails; nothing else is registered.
// 3. Neither call maps, protects or writes: pinning leaves contents and addresses alone. (Where
//    libibverbs prepares for fork, it advises that children do not inherit the range, no more.)
// 4. The keys are those that the device returned for exactly this range and these rights.
unsafe impl Registrar for VerbsDevice {
    fn info(&self) -> DeviceInfo {
        self.info.clone()
    }

    unsafe fn register(&self, request: &MrRequest) -> Result<Registration, RegisterError> {
        let &MrRequest { addr, len, access, .. } = request;
        // SAFETY: the range is mapped and stays so until it is deregistered (contract of `register`).
        let mr = unsafe { Mr::register(&self.pd, addr, len, access) }.map_err(|e| {
            RegisterError::Register {
                call: e.call,
                device: self.info.name.clone(),
                len,
                access,
                source: e.source,
            }
        })?;
        let (lkey, rkey) = (mr.lkey(), mr.rkey());
        if let Some(ptr) = mr.ptr() {
            let region = Region { ptr, access, addr: addr.as_ptr() as usize, len };
            self.regions.write().insert(lkey, region);
        }
        let handle = MrHandle(Box::into_raw(Box::new(mr)) as u64);
        Ok(Registration { handle, lkey, rkey, access })
    }

    unsafe fn deregister(&self, handle: MrHandle) -> Result<(), RegisterError> {
        let mr = handle.0 as *mut Mr;
        // SAFETY: the handle is a box that `register` above leaked, and that has not been freed: that
        // happens below, once, and the caller passes no handle again after success (contract). Nobody
        // else holds a reference to it.
        let region = unsafe { &mut *mr };
        // Before the device may give the key to another region.
        let known = self.regions.write().remove(&region.lkey());
        if let Err(e) = region.deregister() {
            self.regions.write().extend(known.map(|r| (region.lkey(), r)));
            return Err(RegisterError::Deregister {
                call: e.call,
                device: self.info.name.clone(),
                source: e.source,
            });
        }
        // After a failure the box stays, and with it the PD: the region is still registered on it.
        // SAFETY: as above; this is the one place that frees it.
        drop(unsafe { Box::from_raw(mr) });
        Ok(())
    }
}

impl Device {
    /// Lists the names of the verbs devices present.
    ///
    /// # Errors
    /// [`DeviceError::Verbs`] when libibverbs cannot be asked; with the feature `rdma-mummy-sys` that
    /// includes that the library is not there (EOPNOTSUPP).
    pub fn list() -> Result<Vec<String>, DeviceError> {
        Ok(devices()?.map_or_else(Vec::new, |d| d.names()))
    }

    /// Opens a verbs device by name (`"mlx5_0"`, `"rxe0"`), with a PD of its own.
    ///
    /// Both are given back after the last clone, pool and buffer. Where the kernel does not copy pinned
    /// pages on fork, this calls `ibv_fork_init` first, once a process; [`VerbsDevice::fork_support`]
    /// tells what came of it.
    ///
    /// # Errors
    /// [`DeviceError::NoDevice`] and [`DeviceError::NotFound`], which lists what is there;
    /// [`DeviceError::Verbs`] with the errno when it cannot be opened (EACCES: no right to its
    /// `/dev/infiniband/uverbs*`).
    pub fn open(name: &str) -> Result<Device, DeviceError> {
        let list = devices()?;
        let names = list.as_ref().map_or_else(Vec::new, DeviceList::names);
        let (Some(list), false) = (list, names.is_empty()) else {
            return Err(DeviceError::NoDevice);
        };
        match names.iter().position(|n| n == name).and_then(|i| list.open(i)) {
            Some(context) => {
                Ok(VerbsDevice::on(context.map_err(|e| device_error(name, e))?)?.into())
            }
            None => Err(DeviceError::NotFound { asked: name.to_owned(), present: names }),
        }
    }

    /// Opens the first verbs device that has an active port or, when none has, the first that opens
    /// (memory can be registered all the same). Never the software device.
    ///
    /// # Errors
    /// [`DeviceError::NoDevice`]; [`DeviceError::Verbs`] with the first errno when there are devices
    /// and none opens.
    pub fn first() -> Result<Device, DeviceError> {
        let list = devices()?.ok_or(DeviceError::NoDevice)?;
        let mut idle = None;
        let mut refused = None;
        for (i, name) in list.names().into_iter().enumerate() {
            match list.open(i) {
                Some(Ok(context)) if has_active_port(&context) => {
                    return Ok(VerbsDevice::on(context)?.into());
                }
                Some(Ok(context)) => idle = idle.or(Some(context)),
                Some(Err(e)) => refused = refused.or(Some(device_error(&name, e))),
                None => break,
            }
        }
        match idle {
            Some(context) => Ok(VerbsDevice::on(context)?.into()),
            None => Err(refused.unwrap_or(DeviceError::NoDevice)),
        }
    }

    /// Uses a PD that the caller made: pools on it share it with whatever else the caller registers
    /// there. Neither it nor its context is ever freed or closed here, and `ibv_fork_init` is left to
    /// the caller.
    ///
    /// # Errors
    /// [`DeviceError::Null`]; [`DeviceError::Verbs`] when the device cannot be asked for its limits.
    ///
    /// # Safety
    /// 1. `pd` is null, or an `ibv_pd *` of the same libibverbs that this process has loaded.
    /// 2. It stays allocated, and its context open, until every clone of the result, every pool built
    ///    on it and every buffer of those is dropped.
    pub unsafe fn from_raw_pd(pd: *mut c_void) -> Result<Device, DeviceError> {
        // SAFETY: passed on from the caller; the PD is kept by the device alone, and so no longer than
        // the second point allows.
        let pd = unsafe { Pd::lend(pd) }.ok_or(DeviceError::Null("the PD, or its context,"))?;
        Ok(VerbsDevice::new(pd, fork_support())?.into())
    }

    /// The verbs device behind this, if it is one.
    pub fn as_verbs(&self) -> Option<&VerbsDevice> {
        match &self.kind {
            Kind::Verbs(verbs) => Some(verbs),
            _ => None,
        }
    }
}

impl From<VerbsDevice> for Device {
    fn from(device: VerbsDevice) -> Self {
        let device = Arc::new(device);
        Self::new(device.clone(), Kind::Verbs(device))
    }
}

fn devices() -> Result<Option<DeviceList>, DeviceError> {
    DeviceList::new().map_err(|e| device_error("this machine", e))
}

/// What a device is, and how many ports it has.
fn describe(context: &Context) -> Result<(DeviceInfo, u8), CallError> {
    let limits = context.limits()?;
    let sysfs = Sysfs::of(context.name());
    let mut info = DeviceInfo::new(context.name(), sysfs.transport(context.name()));
    info.max_mr_size = limits.max_mr_size;
    info.max_mr = limits.max_mr;
    info.pinning = Pinning::Pinned;
    info.numa_node = sysfs.numa_node();
    Ok((info, limits.ports))
}

/// Looks at all devices present.
pub(super) fn survey() -> Result<Vec<Surveyed>, DeviceError> {
    let Some(list) = devices()? else { return Ok(Vec::new()) };
    let look = |context: Result<Context, CallError>| {
        let context = context?;
        let (info, ports) = describe(&context)?;
        // A port that cannot be asked is left out.
        Ok((info, (1..=ports).filter_map(|n| Some(port_info(&context.port(n).ok()?))).collect()))
    };
    let opened = list.names().into_iter().enumerate();
    Ok(opened
        .filter_map(|(i, name)| {
            Some((name, look(list.open(i)?).map_err(|e: CallError| e.to_string())))
        })
        .collect())
}

fn port_info(port: &Port) -> PortInfo {
    PortInfo {
        number: port.number,
        active: port.active,
        link: if port.ethernet { "Ethernet" } else { "InfiniBand" },
        // From 1 for 256 to 5 for 4096.
        mtu: if (1..=5).contains(&port.mtu) { 128 << port.mtu } else { 0 },
    }
}

fn has_active_port(context: &Context) -> bool {
    let ports = context.limits().map_or(0, |l| l.ports);
    (1..=ports).any(|n| context.port(n).is_ok_and(|p| p.active))
}

/// A device's folder in sysfs.
struct Sysfs(PathBuf);

impl Sysfs {
    fn of(device: &str) -> Self {
        Self(Path::new("/sys/class/infiniband").join(device))
    }

    /// What moves the bytes: the kernel driver, shortened as people say it (`mlx5` for `mlx5_core`).
    ///
    /// A soft device may hang on the NIC whose netdev it uses, whose driver is then not its own, so
    /// soft ones are told by what only they have: rxe a file `parent` that names the netdev.
    fn transport(&self, name: &str) -> String {
        if self.0.join("parent").exists() {
            return "rxe".into();
        }
        let driver = fs::read_link(self.0.join("device/driver")).ok();
        let driver = driver.as_deref().and_then(Path::file_name).and_then(|d| d.to_str());
        match driver {
            _ if name.starts_with("siw") => "siw".into(),
            Some(driver) => driver.strip_suffix("_core").unwrap_or(driver).into(),
            None => name.trim_end_matches(|c: char| c.is_ascii_digit() || c == '_').into(),
        }
    }

    /// The NUMA node; `None` where there is no such file (soft devices), or it says -1.
    fn numa_node(&self) -> Option<u32> {
        fs::read_to_string(self.0.join("device/numa_node")).ok()?.trim().parse().ok()
    }

    fn gid_type(&self, port: u8, index: u32) -> Option<String> {
        let path = self.0.join(format!("ports/{port}/gid_attrs/types/{index}"));
        Some(fs::read_to_string(path).ok()?.trim().to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn null_is_no_pd() {
        // SAFETY: null is allowed.
        let e = unsafe { Device::from_raw_pd(std::ptr::null_mut()) };
        assert!(matches!(e, Err(DeviceError::Null(_))));
    }

    #[test]
    fn a_device_that_is_not_there_is_named_with_those_that_are() {
        match Device::open("no-such-device") {
            Err(DeviceError::NoDevice) => assert!(Device::list().expect("list").is_empty()),
            Err(DeviceError::NotFound { asked, present }) => {
                assert_eq!(asked, "no-such-device");
                assert_eq!(present, Device::list().expect("list"));
            }
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn sysfs_without_the_device_gives_defaults() {
        let sysfs = Sysfs::of("mlx9_7");
        assert_eq!(sysfs.transport("mlx9_7"), "mlx");
        assert_eq!(sysfs.numa_node(), None);
    }
}
