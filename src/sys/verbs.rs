//! libibverbs: devices, contexts, protection domains and memory regions, each wrapped as an owner;
//! and the choice between the two bindings. Leaves queue pairs to `queue_pair.rs` and all policy (which
//! device, which port, whether to prepare for fork) to the layer above.
//!
//! Owners give their resource back only in the process that made it. A forked child inherits the
//! device's file descriptor, so a destroy call made there would take the resource from the parent.
#![allow(clippy::disallowed_methods)]

use std::{
    ffi::{CStr, c_int, c_void},
    fmt, io, mem, process,
    ptr::NonNull,
    sync::Arc,
};

// Both bindings declare the same names. Where they differ, the difference is met in this file:
// `ibv_query_port` is the inline wrapper in one and the raw, older symbol in the other.
#[cfg(feature = "rdma-mummy-sys")]
pub(super) use rdma_mummy_sys as ffi;
#[cfg(not(feature = "rdma-mummy-sys"))]
pub(super) use rdma_sys as ffi;

use crate::access::{Access, LKey, RKey, Sge};

// `Access` is passed to the device bit for bit, and `Sge` by pointer.
const _: () = {
    use ffi::ibv_access_flags as f;
    assert!(Access::LOCAL_WRITE.bits() == f::IBV_ACCESS_LOCAL_WRITE.0);
    assert!(Access::REMOTE_WRITE.bits() == f::IBV_ACCESS_REMOTE_WRITE.0);
    assert!(Access::REMOTE_READ.bits() == f::IBV_ACCESS_REMOTE_READ.0);
    assert!(Access::REMOTE_ATOMIC.bits() == f::IBV_ACCESS_REMOTE_ATOMIC.0);
    assert!(Access::MW_BIND.bits() == f::IBV_ACCESS_MW_BIND.0);
    assert!(Access::ZERO_BASED.bits() == f::IBV_ACCESS_ZERO_BASED.0);
    assert!(Access::HUGETLB.bits() == f::IBV_ACCESS_HUGETLB.0);
    assert!(Access::RELAXED_ORDERING.bits() == f::IBV_ACCESS_RELAXED_ORDERING.0);
    assert!(size_of::<Sge>() == size_of::<ffi::ibv_sge>());
    assert!(align_of::<Sge>() == align_of::<ffi::ibv_sge>());
    assert!(mem::offset_of!(Sge, addr) == mem::offset_of!(ffi::ibv_sge, addr));
    assert!(mem::offset_of!(Sge, length) == mem::offset_of!(ffi::ibv_sge, length));
    assert!(mem::offset_of!(Sge, lkey) == mem::offset_of!(ffi::ibv_sge, lkey));
};

/// The bits that a kernel or device may ignore (`IBV_ACCESS_OPTIONAL_RANGE` in the header). Only
/// `ibv_reg_mr_iova2` takes them, and drops them where the kernel does not know them.
const OPTIONAL_RANGE: u32 = ((1 << 30) - 1) & !((1 << 20) - 1);

/// A call into libibverbs that failed.
#[derive(Debug)]
pub(crate) struct CallError {
    /// The call, as the manual names it.
    pub(crate) call: &'static str,
    /// Its errno.
    pub(crate) source: io::Error,
}

impl fmt::Display for CallError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} failed: {}", self.call, self.source)
    }
}

/// Turns what a verb returned into its error. The manual says "the value of errno"; some providers
/// return -1 and set errno, or the value negated.
pub(super) fn check(call: &'static str, returned: c_int) -> Result<(), CallError> {
    let source = match returned {
        0 => return Ok(()),
        -1 => last_error(),
        e => io::Error::from_raw_os_error(e.saturating_abs()),
    };
    Err(CallError { call, source })
}

/// Turns a pointer that a verb returned into an owned one, or into its error.
pub(super) fn check_ptr<T>(call: &'static str, returned: *mut T) -> Result<NonNull<T>, CallError> {
    // The error is built here, before anything else can change errno.
    NonNull::new(returned).ok_or_else(|| CallError { call, source: last_error() })
}

fn last_error() -> io::Error {
    match io::Error::last_os_error() {
        e if e.raw_os_error() == Some(0) => io::Error::other("the device gave no errno"),
        e => e,
    }
}

/// Whether, and how, registered memory survives a fork.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum ForkStatus {
    /// After a fork, a page that the parent writes may part from the page that the device uses.
    Disabled,
    /// libibverbs hides registered ranges from children (`ibv_fork_init` was called).
    Enabled,
    /// The kernel copies pinned pages on fork (5.12 and later): nothing need be done.
    Unneeded,
}

/// Asks libibverbs how registered memory fares at a fork. Before rdma-core 35 there was no such call;
/// the run-time binding then answers `Disabled`.
pub(crate) fn fork_status() -> ForkStatus {
    // SAFETY: takes no arguments, may be called at any time, from any thread.
    match unsafe { ffi::ibv_is_fork_initialized() } {
        ffi::IBV_FORK_ENABLED => ForkStatus::Enabled,
        ffi::IBV_FORK_UNNEEDED => ForkStatus::Unneeded,
        _ => ForkStatus::Disabled,
    }
}

/// Has libibverbs hide registered ranges from children from now on. EINVAL when this process has
/// registered memory before.
pub(crate) fn fork_init() -> Result<(), CallError> {
    // SAFETY: takes no arguments; the library guards its own state and refuses a call that comes late.
    check("ibv_fork_init", unsafe { ffi::ibv_fork_init() })
}

/// The verbs devices present when it was made.
pub(crate) struct DeviceList {
    raw: NonNull<*mut ffi::ibv_device>,
    len: usize,
}

impl DeviceList {
    /// Asks for the devices. A kernel without RDMA (ENOSYS) counts as "none".
    pub(crate) fn new() -> Result<Option<Self>, CallError> {
        let mut len: c_int = 0;
        // SAFETY: `len` is writable for the duration of the call.
        let raw = unsafe { ffi::ibv_get_device_list(&mut len) };
        match check_ptr("ibv_get_device_list", raw) {
            Ok(raw) => Ok(Some(Self { raw, len: usize::try_from(len).unwrap_or(0) })),
            Err(e) if e.source.raw_os_error() == Some(libc::ENOSYS) => Ok(None),
            Err(e) => Err(e),
        }
    }

    fn devices(&self) -> &[*mut ffi::ibv_device] {
        // SAFETY: libibverbs returned an array of `len` device pointers that stays as it is until
        // ibv_free_device_list, which only `drop` calls.
        unsafe { std::slice::from_raw_parts(self.raw.as_ptr(), self.len) }
    }

    /// The devices' names, in the library's order.
    pub(crate) fn names(&self) -> Vec<String> {
        // SAFETY: the list is alive, and so is each device in it.
        self.devices().iter().map(|&d| unsafe { device_name(d) }).collect()
    }

    /// Opens the device at a place in the list; `None` past its end.
    pub(crate) fn open(&self, index: usize) -> Option<Result<Context, CallError>> {
        let device = *self.devices().get(index)?;
        // SAFETY: the device is in a list that has not been freed. The context keeps a reference of its
        // own, so that the list may be freed afterwards.
        let raw = unsafe { ffi::ibv_open_device(device) };
        Some(check_ptr("ibv_open_device", raw).map(|raw| Context {
            raw,
            // SAFETY: as for `names`.
            name: unsafe { device_name(device) },
            owner: Some(process::id()),
        }))
    }
}

impl Drop for DeviceList {
    fn drop(&mut self) {
        // SAFETY: `raw` came from ibv_get_device_list and is freed here only; no borrow of the array
        // outlives `self`.
        unsafe { ffi::ibv_free_device_list(self.raw.as_ptr()) }
    }
}

/// # Safety
/// `device` is alive.
unsafe fn device_name(device: *mut ffi::ibv_device) -> String {
    // SAFETY: the device is alive (contract).
    let name = unsafe { ffi::ibv_get_device_name(device) };
    if name.is_null() {
        return String::new();
    }
    // SAFETY: the library returned the device's own name array, which is NUL-terminated and lives as
    // long as the device.
    unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
}

/// An open device. Closed when dropped, unless lent.
pub(crate) struct Context {
    raw: NonNull<ffi::ibv_context>,
    name: String,
    /// The process that opened it; `None` when it is lent.
    owner: Option<u32>,
}

// SAFETY: the verbs are thread-safe unless the caller promises otherwise through a thread domain
// (ibv_alloc_td(3)), which nothing here does, and a context is not tied to the thread that opened it.
unsafe impl Send for Context {}
// SAFETY: as above; `&Context` gives access to thread-safe calls only.
unsafe impl Sync for Context {}

/// What a device can hold.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    pub(crate) max_mr_size: u64,
    pub(crate) max_mr: u64,
    pub(crate) ports: u8,
    /// Reads and atomics that one queue pair can have under way.
    pub(crate) max_rd_atomic: u8,
    /// Whether it runs atomics.
    pub(crate) atomics: bool,
    /// Work requests that one queue can hold.
    pub(crate) max_wr: u32,
    /// Whether it claims memory windows of type 2.
    pub(crate) windows: bool,
}

/// One port, as far as connecting through it goes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Port {
    pub(crate) number: u8,
    pub(crate) active: bool,
    pub(crate) lid: u16,
    /// RoCE (or iWARP): addressed by GID, where InfiniBand is addressed by LID.
    pub(crate) ethernet: bool,
    /// The active MTU, as `enum ibv_mtu` counts it.
    pub(crate) mtu: u32,
    pub(crate) gids: u32,
    pub(crate) max_message: u32,
}

impl Context {
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn as_ptr(&self) -> *mut ffi::ibv_context {
        self.raw.as_ptr()
    }

    /// Whether this process may give resources of this context back.
    pub(super) fn is_in_owner(&self) -> bool {
        self.owner.is_none_or(|pid| pid == process::id())
    }

    pub(crate) fn limits(&self) -> Result<Limits, CallError> {
        // SAFETY: `ibv_device_attr` is integers and one array of them; zero is a valid value of each.
        let mut a: ffi::ibv_device_attr = unsafe { mem::zeroed() };
        // SAFETY: the context is open as long as `self` lives, and `a` is writable.
        check("ibv_query_device", unsafe { ffi::ibv_query_device(self.as_ptr(), &mut a) })?;
        Ok(Limits {
            max_mr_size: a.max_mr_size,
            max_mr: u64::try_from(a.max_mr).unwrap_or(0),
            ports: a.phys_port_cnt,
            max_rd_atomic: a.max_qp_rd_atom.min(a.max_qp_init_rd_atom).clamp(0, 255) as u8,
            atomics: a.atomic_cap != ffi::ibv_atomic_cap::IBV_ATOMIC_NONE,
            max_wr: u32::try_from(a.max_qp_wr).unwrap_or(0),
            windows: a.device_cap_flags & WINDOWS_2 != 0,
        })
    }

    /// Describes a port; they count from 1.
    pub(crate) fn port(&self, number: u8) -> Result<Port, CallError> {
        // SAFETY: `ibv_port_attr` is integers only; zero is a valid value of each.
        let mut a: ffi::ibv_port_attr = unsafe { mem::zeroed() };
        #[cfg(not(feature = "rdma-mummy-sys"))]
        use ffi::___ibv_query_port as query_port;
        #[cfg(feature = "rdma-mummy-sys")]
        use ffi::ibv_query_port as query_port;
        // SAFETY: the context is open as long as `self` lives, and `a` is writable and zeroed, so that
        // fields which an older library does not fill read as zero.
        check("ibv_query_port", unsafe { query_port(self.as_ptr(), number, &mut a) })?;
        Ok(Port {
            number,
            active: a.state == ffi::ibv_port_state::IBV_PORT_ACTIVE,
            lid: a.lid,
            ethernet: u32::from(a.link_layer) == LINK_LAYER_ETHERNET,
            mtu: a.active_mtu,
            gids: u32::try_from(a.gid_tbl_len).unwrap_or(0),
            max_message: a.max_msg_sz,
        })
    }

    /// Reads an entry of a port's GID table, in network order. Unused entries are zero, or an error.
    pub(crate) fn gid(&self, port: u8, index: u32) -> Result<[u8; 16], CallError> {
        let mut gid = ffi::ibv_gid { raw: [0; 16] };
        let index = c_int::try_from(index).unwrap_or(c_int::MAX);
        // SAFETY: the context is open as long as `self` lives, and `gid` is writable.
        check("ibv_query_gid", unsafe {
            ffi::ibv_query_gid(self.as_ptr(), port, index, &mut gid)
        })?;
        // SAFETY: both members of the union are 16 bytes of integers, all initialised above.
        Ok(unsafe { gid.raw })
    }
}

// Either of the two kinds of type-2 windows.
const WINDOWS_2: u32 = ffi::ibv_device_cap_flags::IBV_DEVICE_MEM_WINDOW_TYPE_2A.0
    | ffi::ibv_device_cap_flags::IBV_DEVICE_MEM_WINDOW_TYPE_2B.0;

// `IBV_LINK_LAYER_ETHERNET`: an anonymous enum in the header, which the bindings leave out.
const LINK_LAYER_ETHERNET: u32 = 2;

impl Drop for Context {
    fn drop(&mut self) {
        if self.owner == Some(process::id()) {
            // SAFETY: opened by ibv_open_device in this process and closed here only. Everything made
            // on it holds an Arc of it, so nothing of it is used after this.
            unsafe { ffi::ibv_close_device(self.as_ptr()) };
        }
    }
}

/// A protection domain. Freed when dropped, unless lent.
pub(crate) struct Pd {
    raw: NonNull<ffi::ibv_pd>,
    lent: bool,
    context: Arc<Context>,
}

// SAFETY: as for `Context`: a handle for thread-safe calls.
unsafe impl Send for Pd {}
// SAFETY: as above.
unsafe impl Sync for Pd {}

impl Pd {
    /// Allocates one.
    pub(crate) fn new(context: Arc<Context>) -> Result<Self, CallError> {
        // SAFETY: the context is open, and `Pd` keeps it open.
        let raw = check_ptr("ibv_alloc_pd", unsafe { ffi::ibv_alloc_pd(context.as_ptr()) })?;
        Ok(Self { raw, lent: false, context })
    }

    /// Takes a protection domain that somebody else made, on loan: neither it nor its context is ever
    /// given back here. `None` when it, or its context, is null.
    ///
    /// # Safety
    /// `raw` is null, or an `ibv_pd *` of the libibverbs that this process uses, which stays
    /// allocated, with its context open, as long as the result and all that is made on it.
    pub(crate) unsafe fn lend(raw: *mut c_void) -> Option<Self> {
        let raw = NonNull::new(raw.cast::<ffi::ibv_pd>())?;
        // SAFETY: not null, so an allocated ibv_pd (contract); its first field is its context.
        let context = NonNull::new(unsafe { (*raw.as_ptr()).context })?;
        // SAFETY: the context is open (contract), so its device is there.
        let name = unsafe { device_name((*context.as_ptr()).device) };
        let context = Arc::new(Context { raw: context, name, owner: None });
        Some(Self { raw, lent: true, context })
    }

    pub(crate) fn as_ptr(&self) -> *mut ffi::ibv_pd {
        self.raw.as_ptr()
    }

    pub(crate) fn context(&self) -> &Arc<Context> {
        &self.context
    }

    pub(crate) fn is_lent(&self) -> bool {
        self.lent
    }
}

impl Drop for Pd {
    fn drop(&mut self) {
        if !self.lent && self.context.is_in_owner() {
            // SAFETY: allocated by `new` in this process and freed here only. Memory regions and queue
            // pairs hold an Arc of it, so none is left; were one left all the same, the call fails
            // with EBUSY and changes nothing.
            unsafe { ffi::ibv_dealloc_pd(self.as_ptr()) };
        }
    }
}

/// A memory region. Keeps its protection domain. Deregistered when dropped, if that was not done
/// before.
pub(crate) struct Mr {
    /// `None` once deregistered.
    raw: Option<NonNull<ffi::ibv_mr>>,
    lkey: LKey,
    rkey: RKey,
    pd: Arc<Pd>,
    process: u32,
}

/// Where a registered region is, for work requests that name it. Owns nothing.
#[derive(Clone, Copy)]
pub(crate) struct MrPtr(NonNull<ffi::ibv_mr>);

// SAFETY: an address; only unsafe calls use it.
unsafe impl Send for MrPtr {}
// SAFETY: as above.
unsafe impl Sync for MrPtr {}

impl MrPtr {
    pub(super) fn as_ptr(self) -> *mut ffi::ibv_mr {
        self.0.as_ptr()
    }
}

// SAFETY: as for `Context`: a handle for thread-safe calls, and two numbers.
unsafe impl Send for Mr {}
// SAFETY: as above; changing it takes `&mut`.
unsafe impl Sync for Mr {}

impl Mr {
    /// Registers a range with exactly the rights in `access`.
    ///
    /// With [`Access::ZERO_BASED`] it is registered with iova 0, and the flag itself is left out: an
    /// iova of 0 is what makes every device count addresses from the start of the range, whereas
    /// the flag alone is ignored by some (rxe) and unknown to others.
    ///
    /// # Safety
    /// `addr..addr + len` is mapped and stays so until the region is deregistered.
    pub(crate) unsafe fn register(
        pd: &Arc<Pd>,
        addr: NonNull<u8>,
        len: usize,
        access: Access,
    ) -> Result<Self, CallError> {
        let start: *mut c_void = addr.as_ptr().cast();
        let zero_based = access.contains(Access::ZERO_BASED);
        let iova = if zero_based { 0 } else { start as u64 };
        let bits = access.difference(Access::ZERO_BASED).bits();
        let pd_raw = pd.as_ptr();
        let (call, raw) = if bits & OPTIONAL_RANGE != 0 {
            // SAFETY: the PD is allocated while `pd` lives, and the range is mapped (contract). The
            // call reads no memory of ours: the kernel finds the pages by address.
            let mr = unsafe { ffi::ibv_reg_mr_iova2(pd_raw, start, len, iova, bits) };
            ("ibv_reg_mr_iova2", mr)
        } else if zero_based {
            // SAFETY: as above.
            let mr = unsafe { ffi::ibv_reg_mr_iova(pd_raw, start, len, iova, bits as c_int) };
            ("ibv_reg_mr_iova", mr)
        } else {
            // SAFETY: as above.
            ("ibv_reg_mr", unsafe { ffi::ibv_reg_mr(pd_raw, start, len, bits as c_int) })
        };
        let raw = check_ptr(call, raw)?;
        // SAFETY: a region just made; the library fills in both keys before it returns.
        let (lkey, rkey) = unsafe { ((*raw.as_ptr()).lkey, (*raw.as_ptr()).rkey) };
        Ok(Self {
            raw: Some(raw),
            lkey: LKey::new(lkey),
            rkey: RKey::new(rkey),
            pd: pd.clone(),
            process: process::id(),
        })
    }

    pub(crate) fn lkey(&self) -> LKey {
        self.lkey
    }

    pub(crate) fn rkey(&self) -> RKey {
        self.rkey
    }

    /// Where it is; `None` once deregistered.
    pub(crate) fn ptr(&self) -> Option<MrPtr> {
        self.raw.map(MrPtr)
    }

    /// Deregisters it. After an error it is still registered; the call may be repeated. In a forked
    /// child it is always an error (EPERM): the region is the parent's.
    pub(crate) fn deregister(&mut self) -> Result<(), CallError> {
        const CALL: &str = "ibv_dereg_mr";
        let Some(raw) = self.raw else { return Ok(()) };
        if self.process != process::id() {
            return Err(CallError {
                call: CALL,
                source: io::Error::from_raw_os_error(libc::EPERM),
            });
        }
        // SAFETY: `raw` is a region that is still registered (it is taken out below once it is not),
        // made in this process, and its PD is alive through `self.pd`.
        check(CALL, unsafe { ffi::ibv_dereg_mr(raw.as_ptr()) })?;
        self.raw = None;
        Ok(())
    }
}

impl Drop for Mr {
    fn drop(&mut self) {
        // Nobody is left to hear of a failure. The kernel takes the region back when the context is
        // closed, at the latest when the process ends.
        let _ = self.deregister();
        let _ = &self.pd;
    }
}

/// What libibverbs calls a completion status.
pub(super) fn status_name(status: u32) -> Option<&'static str> {
    // SAFETY: takes any number; for those it does not know it returns "unknown".
    let s = unsafe { ffi::ibv_wc_status_str(status) };
    if s.is_null() {
        return None;
    }
    // SAFETY: not null, so one of the library's string constants, which live as long as the process
    // (it is never unloaded).
    unsafe { CStr::from_ptr(s) }.to_str().ok()
}
