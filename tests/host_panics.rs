//! Code of the user's that panics where nothing may: a registrar that is asked to deregister, an event hook. Proves: the
//! panic goes no further (P4: `Drop` never panics, and the grower lives on), and an arena of which it is not known
//! whether the device has let go stays mapped, is counted and told.
#![cfg(feature = "fault")]
#![allow(clippy::unwrap_used)]

use std::{
    panic::panic_any,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst},
    },
    time::Duration,
};

use pinpool::{
    CloseError, Device, Event, Pages, Pool, RegisterError,
    device::{DeviceInfo, FaultyRegistrar, MrHandle, MrRequest, Registrar, Registration},
};

const MIB: usize = 1 << 20;

/// Panics when it is asked to deregister, while told to.
#[derive(Clone)]
struct Panics {
    inner: FaultyRegistrar,
    on: Arc<AtomicBool>,
}

impl Panics {
    fn new() -> Self {
        Self { inner: FaultyRegistrar::new(&Device::soft()), on: Arc::new(AtomicBool::new(true)) }
    }
}

// SAFETY: every call reaches the registrar behind it unchanged, or panics before that.
unsafe impl Registrar for Panics {
    fn info(&self) -> DeviceInfo {
        self.inner.info()
    }

    unsafe fn register(&self, request: &MrRequest) -> Result<Registration, RegisterError> {
        // SAFETY: passed on.
        unsafe { self.inner.register(request) }
    }

    unsafe fn deregister(&self, handle: MrHandle) -> Result<(), RegisterError> {
        assert!(!self.on.load(SeqCst), "a registrar that panics");
        // SAFETY: passed on.
        unsafe { self.inner.deregister(handle) }
    }
}

/// Panics when it is dropped, unless that would end the process.
struct Twice;

impl Drop for Twice {
    fn drop(&mut self) {
        assert!(std::thread::panicking(), "dropping what it panicked with");
    }
}

fn pool(device: Device, told: &Arc<AtomicUsize>) -> Pool {
    let told = told.clone();
    Pool::builder()
        .device(device)
        .pages(Pages::Base)
        .arena_size(MIB)
        .capacity(MIB)
        .max_capacity(2 * MIB)
        .low_watermark(MIB / 8)
        .shrink_after(Duration::from_secs(1))
        .growth_by_hand()
        .on_event(move |event| {
            if matches!(event, Event::DeregisterFailed { .. }) {
                told.fetch_add(1, SeqCst);
            }
        })
        .build()
        .unwrap()
}

#[test]
fn a_registrar_that_panics_at_the_end_has_refused() {
    let (panics, told) = (Panics::new(), Arc::new(AtomicUsize::new(0)));
    let leaked = pinpool::leaked_bytes();

    let pool = pool(Device::custom(panics.clone()), &told);
    let refused = pool.close().unwrap_err();
    assert!(matches!(refused, CloseError::Deregister { arenas: 1, bytes: MIB, .. }), "{refused}");
    assert_eq!((told.load(SeqCst), pinpool::leaked_bytes() - leaked), (1, MIB as u64));

    // The last buffer, after the last handle; and on a thread that unwinds already.
    let last = self::pool(Device::custom(panics.clone()), &told).alloc(64).unwrap();
    std::thread::spawn(move || {
        let _last = last;
        panic!("the thread's own");
    })
    .join()
    .unwrap_err();
    assert_eq!((told.load(SeqCst), pinpool::leaked_bytes() - leaked), (2, 2 * MIB as u64));

    // An arena that shrinks.
    let pool = self::pool(Device::custom(panics.clone()), &told);
    let held: Vec<_> = (0..15).map(|_| pool.alloc(64 << 10).unwrap()).collect();
    pool.tick(Duration::ZERO);
    assert_eq!(pool.stats().growths, 1);
    drop(held);
    for n in 1..40 {
        pool.tick(Duration::from_millis(250 * n));
    }
    let s = pool.stats();
    assert_eq!((s.shrinks, s.capacity, told.load(SeqCst)), (1, MIB, 3));
    panics.on.store(false, SeqCst);
    pool.check();
    pool.close().unwrap();
    assert_eq!(pinpool::leaked_bytes() - leaked, 3 * MIB as u64);
}

#[test]
fn a_hook_may_panic_with_what_panics_in_turn() {
    let calls = Arc::new(AtomicUsize::new(0));
    let own = calls.clone();
    let pool = Pool::builder()
        .device(Device::soft())
        .pages(Pages::Base)
        .capacity(MIB)
        .on_event(move |_| {
            own.fetch_add(1, SeqCst);
            panic_any(Twice);
        })
        .build()
        .unwrap();
    assert_eq!(calls.load(SeqCst), 1, "built");
    let all: Vec<_> = std::iter::from_fn(|| pool.alloc(64 << 10).ok()).collect();
    assert_eq!(calls.load(SeqCst), 2, "exhausted");
    drop(pool);
    drop(all);
    assert_eq!(calls.load(SeqCst), 4, "still out, and taken down");
}
