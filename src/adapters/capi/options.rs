//! What a pool opened from C shall be, and the device that it stands on.

use std::{
    ffi::{CStr, c_char, c_int, c_void},
    io,
    ptr::NonNull,
};

use super::{
    fail::{PINPOOL_INVALID, code_of_device, fail, null, text},
    share::{self, pinpool_reserve_t},
    watch::{Watching, pinpool_on_event_t},
};
use crate::{
    access::{Access, LKey, RKey},
    config::{Builder, Numa, PageSize, Pages},
    device::{Device, DeviceInfo, MrHandle, MrRequest, Registrar, Registration},
    error::RegisterError,
    pool::Pool,
};

/// Pages of 2 MiB, arena by arena; base pages for those that cannot have them.
pub const PINPOOL_PAGES_PREFER_2M: c_int = 0;
/// Pages of 2 MiB, or an error.
pub const PINPOOL_PAGES_REQUIRE_2M: c_int = 1;
/// Pages of 1 GiB, arena by arena; base pages for those that cannot have them.
pub const PINPOOL_PAGES_PREFER_1G: c_int = 2;
/// Pages of 1 GiB, or an error.
pub const PINPOOL_PAGES_REQUIRE_1G: c_int = 3;
/// The system's base pages.
pub const PINPOOL_PAGES_BASE: c_int = 4;

/// The device's NUMA node, where the system knows one.
pub const PINPOOL_NUMA_OF_DEVICE: c_int = -1;
/// All nodes in turns, page by page.
pub const PINPOOL_NUMA_INTERLEAVE: c_int = -2;
/// Wherever the process's own policy has them.
pub const PINPOOL_NUMA_ANY: c_int = -3;

/// Registers memory in verbs' place: libfabric, UCX, a PD wrapper of the caller's.
///
/// The functions are called from any thread, several at a time, and never from an alloc or a free. They
/// must not call into the pool.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pinpool_registrar_t {
    /// Handed to each function.
    pub context: *mut c_void,
    /// A name for messages; copied. May be null.
    pub name: *const c_char,
    /// The largest range that one call may cover; 0 for any.
    pub max_mr_size: u64,
    /// Registers `addr .. addr + len`, whole pages of `page_size` that stay mapped until they were
    /// deregistered, with exactly the rights in `access` (bits of `ibv_access_flags`). Answers 0 and fills
    /// in the three numbers, or answers an errno and leaves nothing registered.
    pub register_memory: Option<
        unsafe extern "C" fn(
            context: *mut c_void,
            addr: *mut c_void,
            len: usize,
            page_size: usize,
            access: u32,
            handle: *mut u64,
            lkey: *mut u32,
            rkey: *mut u32,
        ) -> c_int,
    >,
    /// Deregisters. Answers 0 once nothing touches the memory any more, for it is unmapped then; an errno
    /// when that is not certain, and the memory is leaked.
    pub deregister_memory: Option<unsafe extern "C" fn(context: *mut c_void, handle: u64) -> c_int>,
    /// Called once, after the last deregistration. May be null.
    pub release: Option<unsafe extern "C" fn(context: *mut c_void)>,
}

/// What a pool shall be. Fill it with `pinpool_options_init`, then set what shall differ.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pinpool_options_t {
    /// Bytes of this struct, so that it can grow; `pinpool_options_init` sets it.
    pub size: usize,
    /// A verbs device's name, or "soft" for the software device; null for the first verbs device.
    pub device: *const c_char,
    /// A protection domain of the caller's (`struct ibv_pd *`), to use instead of `device`. It must stay
    /// until the pool is gone, and is never freed here.
    pub pd: *mut c_void,
    /// What registers memory instead of verbs; overrides both. Copied.
    pub registrar: *const pinpool_registrar_t,
    /// Rights of all arenas, as bits of `ibv_access_flags`; `IBV_ACCESS_LOCAL_WRITE` unless changed.
    pub access: u32,
    /// Rights to have if the device grants them.
    pub optional_access: u32,
    /// Bytes to register. Must be set.
    pub capacity: usize,
    /// Bytes of one arena, a power of two; 0 to have it chosen.
    pub arena_size: usize,
    /// One of `PINPOOL_PAGES_…`.
    pub pages: c_int,
    /// A NUMA node's number, or one of `PINPOOL_NUMA_…`.
    pub numa: c_int,
    /// Whether to spread block starts over cache sets (0 or 1).
    pub colouring: c_int,
    /// Bytes that the pool may grow to, an arena at a time, on a thread of its own; 0 for `capacity`: it never
    /// grows.
    pub max_capacity: usize,
    /// Bytes left, not counting those in buffers, below which it grows; 0 for an eighth of `capacity`.
    pub low_watermark: usize,
    /// `share_count` reservations inside the pool, each with a name of its own; null for none. Copied.
    pub shares: *const pinpool_reserve_t,
    /// How many there are.
    pub share_count: usize,
    /// What memory is guarded with, `PINPOOL_GUARD_…` together; 0 for nothing. A pool with any guard, quarantine or
    /// tracking does without the threads' caches: for finding mistakes. What is found is told to `on_event` and counted
    /// in `pinpool_stats_t`.
    pub guards: u32,
    /// Remembers who asked for one of so many allocs, for `pinpool_outstanding` and for what is told of damage; 1 for
    /// all, 0 for none.
    pub track_every: u32,
    /// Keeps what is freed from being handed out again until so many bytes more were freed; 0 for none.
    pub quarantine: usize,
    /// Told of what is rare; null for nobody.
    pub on_event: pinpool_on_event_t,
    /// Handed to `on_event`. It must stay until `pinpool_close` closed the handle; where `pinpool_open` fails, until it
    /// returned.
    pub event_context: *mut c_void,
}

/// Fills a struct with the defaults. Null is ignored.
///
/// # Safety
/// `options` is null or points to a struct that nobody else uses.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pinpool_options_init(options: *mut pinpool_options_t) {
    let defaults = pinpool_options_t {
        size: size_of::<pinpool_options_t>(),
        device: std::ptr::null(),
        pd: std::ptr::null_mut(),
        registrar: std::ptr::null(),
        access: Access::LOCAL_WRITE.bits(),
        optional_access: 0,
        capacity: 0,
        arena_size: 0,
        pages: PINPOOL_PAGES_PREFER_2M,
        numa: PINPOOL_NUMA_OF_DEVICE,
        colouring: 0,
        max_capacity: 0,
        low_watermark: 0,
        shares: std::ptr::null(),
        share_count: 0,
        guards: 0,
        track_every: 0,
        quarantine: 0,
        on_event: None,
        event_context: std::ptr::null_mut(),
    };
    if !options.is_null() {
        // SAFETY: not null, and so a struct of the caller's (contract).
        unsafe { options.write(defaults) };
    }
}

/// The checked options of C as a builder takes them.
pub(super) struct Wanted {
    pub(super) device: Device,
    pub(super) access: Access,
    optional: Access,
    pub(super) capacity: usize,
    pub(super) arena_size: Option<usize>,
    pub(super) pages: Pages,
    pub(super) numa: Numa,
    colouring: bool,
    max_capacity: Option<usize>,
    low_watermark: Option<usize>,
    pub(super) shares: Vec<(String, usize)>,
    watching: Watching,
}

impl Wanted {
    /// # Safety
    /// `options` is null or points to a struct whose pointers are null or as its fields say.
    pub(super) unsafe fn read(options: *const pinpool_options_t) -> Result<Self, c_int> {
        if options.is_null() {
            return Err(null("options"));
        }
        // SAFETY: not null (contract); every version of the struct begins with its size.
        let size = unsafe { (*options).size };
        if size != size_of::<pinpool_options_t>() {
            let known = size_of::<pinpool_options_t>();
            return Err(fail(
                PINPOOL_INVALID,
                format_args!(
                    "options.size is {size}, this library knows {known}: call pinpool_options_init"
                ),
            ));
        }
        // SAFETY: not null, and of this version, by its size.
        let o = unsafe { *options };
        let bits = |bits, field| {
            Access::from_bits(bits).ok_or_else(|| {
                let unknown = bits & !Access::all().bits();
                fail(PINPOOL_INVALID, format_args!("options.{field} has unknown bits {unknown:#x}"))
            })
        };
        let pages = match o.pages {
            PINPOOL_PAGES_PREFER_2M => Pages::Prefer(PageSize::Huge2M),
            PINPOOL_PAGES_REQUIRE_2M => Pages::Require(PageSize::Huge2M),
            PINPOOL_PAGES_PREFER_1G => Pages::Prefer(PageSize::Huge1G),
            PINPOOL_PAGES_REQUIRE_1G => Pages::Require(PageSize::Huge1G),
            PINPOOL_PAGES_BASE => Pages::Base,
            n => {
                return Err(fail(
                    PINPOOL_INVALID,
                    format_args!("options.pages is {n}, not one of PINPOOL_PAGES_…"),
                ));
            }
        };
        let numa = match o.numa {
            PINPOOL_NUMA_OF_DEVICE => Numa::OfDevice,
            PINPOOL_NUMA_INTERLEAVE => Numa::Interleave,
            PINPOOL_NUMA_ANY => Numa::Any,
            n => match u32::try_from(n) {
                Ok(node) => Numa::Node(node),
                Err(_) => {
                    return Err(fail(
                        PINPOOL_INVALID,
                        format_args!(
                            "options.numa is {n}, neither a node nor one of PINPOOL_NUMA_…"
                        ),
                    ));
                }
            },
        };
        Ok(Self {
            access: bits(o.access, "access")?,
            optional: bits(o.optional_access, "optional_access")?,
            capacity: o.capacity,
            arena_size: (o.arena_size != 0).then_some(o.arena_size),
            pages,
            numa,
            colouring: o.colouring != 0,
            max_capacity: (o.max_capacity != 0).then_some(o.max_capacity),
            low_watermark: (o.low_watermark != 0).then_some(o.low_watermark),
            watching: Watching::read(&o)?,
            // SAFETY: null with a count of 0, or so many structs (contract).
            shares: unsafe { share::read(o.shares, o.share_count) }?,
            // SAFETY: passed on.
            device: unsafe { device(&o) }?,
        })
    }

    pub(super) fn builder(self) -> Builder {
        let mut builder = Pool::builder()
            .device(self.device)
            .access(self.access)
            .optional_access(self.optional)
            .capacity(self.capacity)
            .pages(self.pages)
            .numa(self.numa)
            .colouring(self.colouring);
        if let Some(bytes) = self.arena_size {
            builder = builder.arena_size(bytes);
        }
        if let Some(bytes) = self.max_capacity {
            builder = builder.max_capacity(bytes);
        }
        if let Some(bytes) = self.low_watermark {
            builder = builder.low_watermark(bytes);
        }
        for (name, bytes) in self.shares {
            builder = builder.share(name, bytes);
        }
        self.watching.set(builder)
    }
}

/// # Safety
/// The pointers are null or as the fields say.
unsafe fn device(o: &pinpool_options_t) -> Result<Device, c_int> {
    if !o.registrar.is_null() {
        // SAFETY: not null, and so a struct of the caller's (contract).
        return Ok(Device::custom(unsafe { Callbacks::new(&*o.registrar) }?));
    }
    if !o.pd.is_null() {
        // SAFETY: a PD that stays until the pool is gone (contract of the field).
        return unsafe { lent(o.pd) };
    }
    // SAFETY: null or a string (contract).
    match unsafe { text(o.device, "options.device") }? {
        Some("soft") => Ok(Device::soft()),
        name => open(name),
    }
}

#[cfg(any(feature = "rdma-sys", feature = "rdma-mummy-sys"))]
unsafe fn lent(pd: *mut c_void) -> Result<Device, c_int> {
    // SAFETY: passed on from the caller.
    unsafe { Device::from_raw_pd(pd) }.map_err(|e| fail(code_of_device(&e), e))
}

#[cfg(any(feature = "rdma-sys", feature = "rdma-mummy-sys"))]
fn open(name: Option<&str>) -> Result<Device, c_int> {
    name.map_or_else(Device::first, Device::open).map_err(|e| fail(code_of_device(&e), e))
}

#[cfg(not(any(feature = "rdma-sys", feature = "rdma-mummy-sys")))]
unsafe fn lent(_: *mut c_void) -> Result<Device, c_int> {
    open(None)
}

#[cfg(not(any(feature = "rdma-sys", feature = "rdma-mummy-sys")))]
fn open(_: Option<&str>) -> Result<Device, c_int> {
    let e = crate::error::DeviceError::NoDevice;
    let code = code_of_device(&e);
    Err(fail(
        code,
        "this library was built without verbs; only the device \"soft\" and registrars are known",
    ))
}

/// The caller's functions, as a registrar.
struct Callbacks {
    functions: pinpool_registrar_t,
    register: unsafe extern "C" fn(
        *mut c_void,
        *mut c_void,
        usize,
        usize,
        u32,
        *mut u64,
        *mut u32,
        *mut u32,
    ) -> c_int,
    deregister: unsafe extern "C" fn(*mut c_void, u64) -> c_int,
    info: DeviceInfo,
}

// SAFETY: the functions may be called from any thread, several at a time (contract of the struct).
unsafe impl Send for Callbacks {}
// SAFETY: as above.
unsafe impl Sync for Callbacks {}

impl Callbacks {
    /// # Safety
    /// The struct's pointers are as its fields say.
    unsafe fn new(functions: &pinpool_registrar_t) -> Result<Self, c_int> {
        let Some(register) = functions.register_memory else {
            return Err(null("registrar.register_memory"));
        };
        let Some(deregister) = functions.deregister_memory else {
            return Err(null("registrar.deregister_memory"));
        };
        // SAFETY: null or a string (contract).
        let name = unsafe { text(functions.name, "registrar.name") }?;
        let mut info = DeviceInfo::new(name.unwrap_or("callbacks"), "custom");
        if functions.max_mr_size > 0 {
            info.max_mr_size = functions.max_mr_size;
        }
        Ok(Self { functions: *functions, register, deregister, info })
    }
}

impl Drop for Callbacks {
    fn drop(&mut self) {
        if let Some(release) = self.functions.release {
            // SAFETY: called once, with the context that belongs to it.
            unsafe { release(self.functions.context) };
        }
    }
}

// SAFETY: the four promises are those that the struct's fields ask of the caller, in the same words.
unsafe impl Registrar for Callbacks {
    fn info(&self) -> DeviceInfo {
        self.info.clone()
    }

    unsafe fn register(&self, request: &MrRequest) -> Result<Registration, RegisterError> {
        let &MrRequest { addr, len, page_size, access } = request;
        let (mut handle, mut lkey, mut rkey) = (0, 0, 0);
        // SAFETY: the caller's function, with its own context, on a range that is mapped and stays so
        // (contract of `register`), and three places to write to.
        let errno = unsafe {
            (self.register)(
                self.functions.context,
                NonNull::as_ptr(addr).cast(),
                len,
                page_size,
                access.bits(),
                &mut handle,
                &mut lkey,
                &mut rkey,
            )
        };
        if errno != 0 {
            return Err(RegisterError::Register {
                call: "register_memory",
                device: self.info.name.clone(),
                len,
                access,
                source: io::Error::from_raw_os_error(errno.unsigned_abs().cast_signed()),
            });
        }
        Ok(Registration {
            handle: MrHandle(handle),
            lkey: LKey::new(lkey),
            rkey: RKey::new(rkey),
            access,
        })
    }

    unsafe fn deregister(&self, handle: MrHandle) -> Result<(), RegisterError> {
        // SAFETY: the caller's function, with its own context and a handle that it gave (contract).
        match unsafe { (self.deregister)(self.functions.context, handle.0) } {
            0 => Ok(()),
            errno => Err(RegisterError::Deregister {
                call: "deregister_memory",
                device: self.info.name.clone(),
                source: io::Error::from_raw_os_error(errno.unsigned_abs().cast_signed()),
            }),
        }
    }
}

/// The version of this library, as in "0.1.0". Valid for ever.
#[unsafe(no_mangle)]
pub extern "C" fn pinpool_version() -> *const c_char {
    const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), "\0");
    match CStr::from_bytes_with_nul(VERSION.as_bytes()) {
        Ok(text) => text.as_ptr(),
        Err(_) => c"".as_ptr(),
    }
}
