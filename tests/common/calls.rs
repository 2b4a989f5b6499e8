//! Counts this program's calls into libibverbs by standing between it and the library.
//!
//! With the binding that links libibverbs, a function of the same name in the program itself goes before
//! the library's. With the one that loads the library at run time the program never names the
//! function: it asks `dlsym` for it, so there `dlsym` is what is stood in for. A program that includes
//! this file counts every call it makes, so it can be included by tests only that run one at a time.

#[cfg(feature = "rdma-mummy-sys")]
use std::ffi::c_char;
use std::{
    cell::Cell,
    ffi::{CStr, c_int, c_uint, c_void},
    mem,
    sync::atomic::{AtomicPtr, AtomicU64, Ordering::Relaxed},
};

/// Calls of one kind.
pub(crate) struct Calls {
    made: AtomicU64,
    failed: AtomicU64,
}

impl Calls {
    const fn new() -> Self {
        Self { made: AtomicU64::new(0), failed: AtomicU64::new(0) }
    }

    pub(crate) fn made(&self) -> u64 {
        self.made.load(Relaxed)
    }

    pub(crate) fn failed(&self) -> u64 {
        self.failed.load(Relaxed)
    }

    fn count(&self, ok: bool) {
        self.made.fetch_add(1, Relaxed);
        if !ok {
            self.failed.fetch_add(1, Relaxed);
        }
    }
}

/// `ibv_reg_mr`, `ibv_reg_mr_iova` and `ibv_reg_mr_iova2`.
pub(crate) static REGISTER: Calls = Calls::new();
/// `ibv_dereg_mr`.
pub(crate) static DEREGISTER: Calls = Calls::new();
/// `ibv_alloc_pd`.
pub(crate) static ALLOC_PD: Calls = Calls::new();
/// `ibv_dealloc_pd`.
pub(crate) static DEALLOC_PD: Calls = Calls::new();

/// The library's function behind one of ours.
struct Real {
    name: &'static CStr,
    at: AtomicPtr<c_void>,
}

impl Real {
    const fn new(name: &'static CStr) -> Self {
        Self { name, at: AtomicPtr::new(std::ptr::null_mut()) }
    }

    fn get(&self) -> *mut c_void {
        let mut at = self.at.load(Relaxed);
        if at.is_null() {
            // SAFETY: the name is NUL-terminated.
            at = unsafe { libc::dlsym(libc::RTLD_NEXT, self.name.as_ptr()) };
            assert!(!at.is_null(), "libibverbs has no {:?}", self.name);
            self.at.store(at, Relaxed);
        }
        at
    }
}

thread_local! {
    /// Whether this thread is inside one of the counted functions.
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

trait Succeeded {
    fn succeeded(self) -> bool;
}

impl Succeeded for *mut c_void {
    fn succeeded(self) -> bool {
        !self.is_null()
    }
}

impl Succeeded for c_int {
    fn succeeded(self) -> bool {
        self == 0
    }
}

macro_rules! count {
    ($($counter:ident: $name:ident($($arg:ident: $type:ty),*) -> $returned:ty;)*) => {
        /// The functions that are counted, by their names.
        #[allow(non_camel_case_types, clippy::upper_case_acronyms)]
        mod real {
            $(pub(super) mod $name {
                pub(crate) static REAL: crate::calls::Real = {
                    const NAME: &str = concat!(stringify!($name), "\0");
                    crate::calls::Real::new(crate::calls::c_str(NAME))
                };
            })*
        }

        $(
            #[cfg_attr(not(feature = "rdma-mummy-sys"), unsafe(no_mangle))]
            extern "C" fn $name($($arg: $type),*) -> $returned {
                let real = real::$name::REAL.get();
                // SAFETY: the library's function of this name, whose prototype is written below.
                let real = unsafe {
                    mem::transmute::<*mut c_void, extern "C" fn($($type),*) -> $returned>(real)
                };
                // The library's functions call one another, and find ours then, too.
                let outermost = !INSIDE.replace(true);
                let returned = real($($arg),*);
                if outermost {
                    INSIDE.set(false);
                    $counter.count(returned.succeeded());
                }
                returned
            }
        )*

        /// What `dlsym` is to answer instead of the library's function, which is kept.
        #[cfg(feature = "rdma-mummy-sys")]
        fn instead_of(name: &CStr, real: *mut c_void) -> Option<*mut c_void> {
            $(if name == real::$name::REAL.name {
                real::$name::REAL.at.store(real, Relaxed);
                return Some($name as *mut c_void);
            })*
            None
        }
    };
}

const fn c_str(name: &'static str) -> &'static CStr {
    match CStr::from_bytes_with_nul(name.as_bytes()) {
        Ok(s) => s,
        Err(_) => panic!("no NUL at the end"),
    }
}

count! {
    REGISTER: ibv_reg_mr(pd: *mut c_void, addr: *mut c_void, len: usize, access: c_int) -> *mut c_void;
    REGISTER: ibv_reg_mr_iova(
        pd: *mut c_void, addr: *mut c_void, len: usize, iova: u64, access: c_int
    ) -> *mut c_void;
    REGISTER: ibv_reg_mr_iova2(
        pd: *mut c_void, addr: *mut c_void, len: usize, iova: u64, access: c_uint
    ) -> *mut c_void;
    DEREGISTER: ibv_dereg_mr(mr: *mut c_void) -> c_int;
    ALLOC_PD: ibv_alloc_pd(context: *mut c_void) -> *mut c_void;
    DEALLOC_PD: ibv_dealloc_pd(pd: *mut c_void) -> c_int;
}

/// Stands in for libc's `dlsym`. Called before `main`, by the binding's constructor.
#[cfg(feature = "rdma-mummy-sys")]
#[unsafe(no_mangle)]
unsafe extern "C" fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void {
    type Dlsym = unsafe extern "C" fn(*mut c_void, *const c_char) -> *mut c_void;
    static REAL: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());

    let mut real = REAL.load(Relaxed);
    if real.is_null() {
        // Its version on this architecture: that of the first glibc there, or of 2.34, where it moved.
        for version in [c"GLIBC_2.34", c"GLIBC_2.17", c"GLIBC_2.2.5"] {
            // SAFETY: both strings are NUL-terminated.
            real = unsafe { libc::dlvsym(libc::RTLD_NEXT, c"dlsym".as_ptr(), version.as_ptr()) };
            if !real.is_null() {
                break;
            }
        }
        REAL.store(real, Relaxed);
    }
    if real.is_null() {
        return std::ptr::null_mut();
    }
    // SAFETY: libc's dlsym, which has this prototype.
    let real = unsafe { mem::transmute::<*mut c_void, Dlsym>(real) };
    // SAFETY: passed on as they are.
    let found = unsafe { real(handle, name) };
    if found.is_null() {
        return found;
    }
    // SAFETY: whoever calls dlsym passes a NUL-terminated name.
    instead_of(unsafe { CStr::from_ptr(name) }, found).unwrap_or(found)
}
