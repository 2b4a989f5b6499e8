//! What the tests on a verbs device share.
#![allow(dead_code)] // each test program uses a part

#[path = "alone.rs"]
mod alone;
#[path = "pages.rs"]
mod pages;

use std::{
    alloc::{self, Layout},
    ptr::NonNull,
    sync::OnceLock,
};

#[allow(unused_imports)] // as above
pub(crate) use self::{
    alone::alone,
    pages::{free_hugepages, free_on, two_nodes},
};
use pinpool::{
    Access, Device, Keys, LKey, Sge,
    device::{MrRequest, Registrar, Registration, VerbsDevice},
};

/// The verbs device to test on. Without one the test fails, for it can show nothing.
pub(crate) fn device() -> Device {
    Device::first().unwrap_or_else(|e| {
        panic!(
            "this test needs a verbs device, and there is none: {e}; try `./rxe-setup.sh -- ...`"
        )
    })
}

/// A field of `/proc/self/status` in bytes.
pub(crate) fn status_bytes(field: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("procfs");
    let line = status.lines().find_map(|l| l.strip_prefix(field)?.strip_prefix(':'));
    let kb: Option<u64> = line.and_then(|l| l.split_whitespace().next()?.parse().ok());
    kb.unwrap_or_else(|| panic!("/proc/self/status has no {field}")) << 10
}

/// What RDMA has pinned for this process.
pub(crate) fn vm_pin() -> u64 {
    status_bytes("VmPin")
}

/// Bytes to fill memory with and to know it again by: each seed gives others, and none repeats from page
/// to page.
pub(crate) fn pattern(seed: u64, len: usize) -> Vec<u8> {
    static RANDOM: OnceLock<Vec<u8>> = OnceLock::new();
    const PERIOD: usize = (1 << 20) + 7;
    let random = RANDOM.get_or_init(|| {
        // xorshift64*.
        let mut x = 0x9e37_79b9_7f4a_7c15u64;
        let word = |_| {
            x ^= x >> 12;
            x ^= x << 25;
            x ^= x >> 27;
            x.wrapping_mul(0x2545_f491_4f6c_dd1d)
        };
        (0..PERIOD.div_ceil(8)).map(word).flat_map(u64::to_ne_bytes).take(PERIOD).collect()
    });
    // Copied in long pieces, since tests run unoptimised on emulated processors.
    let mut bytes = Vec::with_capacity(len);
    let mut at = (seed.wrapping_mul(7919) % PERIOD as u64) as usize;
    while bytes.len() < len {
        let n = (len - bytes.len()).min(PERIOD - at);
        bytes.extend_from_slice(&random[at..at + n]);
        at = 0;
    }
    // Seeds a period apart start at the same place.
    let n = len.min(8);
    bytes[..n].copy_from_slice(&seed.to_le_bytes()[..n]);
    bytes
}

/// Fills with [`pattern`].
pub(crate) fn fill(bytes: &mut [u8], seed: u64) {
    bytes.copy_from_slice(&pattern(seed, bytes.len()));
}

/// Panics at the first byte that [`fill`] with this seed would not have left.
#[track_caller]
pub(crate) fn check(bytes: &[u8], seed: u64) {
    same(bytes, &pattern(seed, bytes.len()));
}

/// Panics at the first byte that differs, without printing the rest.
#[track_caller]
pub(crate) fn same(is: &[u8], should: &[u8]) {
    assert_eq!(is.len(), should.len());
    if is != should {
        let at = is.iter().zip(should).position(|(a, b)| a != b).expect("they differ");
        panic!("byte {at} of {} is {:#04x}, not {:#04x}", is.len(), is[at], should[at]);
    }
}

/// Memory from the heap, registered without a pool: for testing a device by itself.
pub(crate) struct Registered<'a> {
    ptr: NonNull<u8>,
    layout: Layout,
    device: &'a VerbsDevice,
    pub(crate) registration: Registration,
}

impl<'a> Registered<'a> {
    pub(crate) fn new(device: &'a Device, len: usize, access: Access) -> Self {
        Self::try_new(device, len, access).expect("register")
    }

    pub(crate) fn try_new(
        device: &'a Device,
        len: usize,
        access: Access,
    ) -> Result<Self, pinpool::RegisterError> {
        let device = device.as_verbs().expect("a verbs device");
        let layout = Layout::from_size_align(len, 4096).expect("layout");
        // SAFETY: the callers ask for more than nothing.
        let ptr = NonNull::new(unsafe { alloc::alloc_zeroed(layout) }).expect("memory");
        let request = MrRequest { addr: ptr, len, page_size: 4096, access };
        // SAFETY: heap memory, which is freed by `drop` only, after it is deregistered.
        match unsafe { device.register(&request) } {
            Ok(registration) => Ok(Self { ptr, layout, device, registration }),
            Err(e) => {
                // SAFETY: allocated above with this layout, and not registered.
                unsafe { alloc::dealloc(ptr.as_ptr(), layout) };
                Err(e)
            }
        }
    }

    pub(crate) fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: `len` initialised bytes that this value owns. No transfer is under way: the tests
        // use the blocking calls.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.as_ptr(), self.layout.size()) }
    }

    pub(crate) fn addr(&self) -> u64 {
        self.ptr.as_ptr() as u64
    }

    pub(crate) fn lkey(&self) -> LKey {
        self.registration.lkey
    }

    pub(crate) fn sge(&self, addr: u64, length: u32) -> Sge {
        Sge { addr, length, lkey: self.registration.lkey }
    }
}

impl Drop for Registered<'_> {
    fn drop(&mut self) {
        // SAFETY: registered by `try_new` and deregistered here only.
        if unsafe { self.device.deregister(self.registration.handle) }.is_ok() {
            // SAFETY: allocated with this layout; the device has let go of it.
            unsafe { alloc::dealloc(self.ptr.as_ptr(), self.layout) };
        }
    }
}

/// An rkey made of an lkey's number: what a peer could guess.
pub(crate) fn guessed_rkey(keys: Keys) -> pinpool::RKey {
    pinpool::RKey::new(keys.lkey.get())
}
