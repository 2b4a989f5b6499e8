//! Cases from the field that need no device: through the registrar that fails on demand, or none at all.
#![cfg(feature = "fault")]
#![allow(clippy::unwrap_used)]

mod common;

use common::soft;
use pinpool::{
    Access, AllocError, BuildError, Device, LKey, PageSize, Pages, Pool, RKey, RegisterError,
    device::{DeviceInfo, Fault, FaultyRegistrar, MrHandle, MrRequest, Registrar, Registration},
};

const ENOMEM: i32 = 12;
const EBUSY: i32 = 16;

/// A registrar over the software device, and a device over that.
fn faulty(f: impl FnOnce(FaultyRegistrar) -> FaultyRegistrar) -> (FaultyRegistrar, Device) {
    let registrar = f(FaultyRegistrar::new(&Device::soft()));
    (registrar.clone(), Device::custom(registrar))
}

#[test]
fn b05_an_odd_length_is_registered_once_on_whole_hugepages() {
    let (registrar, device) = faulty(|r| r);
    let pool = soft((5 << 20) + 123)
        .device(device)
        .pages(Pages::Prefer(PageSize::Huge2M))
        .build()
        .unwrap();
    let calls = registrar.requests();
    assert_eq!(calls.len(), 1);
    assert_eq!(calls[0].len, 6 << 20);
    assert_eq!(calls[0].addr % (2 << 20), 0);
    assert_eq!(pool.capacity(), 6 << 20);
}

#[test]
fn b09_rights_reach_the_device_as_asked_or_are_refused() {
    let l = Access::LOCAL_WRITE;
    let (w, r, a) = (Access::REMOTE_WRITE, Access::REMOTE_READ, Access::REMOTE_ATOMIC);
    for asked in [Access::empty(), l, l | w, l | r, l | a, l | w | r | a, r] {
        let (registrar, device) = faulty(|r| r);
        let pool = soft(1 << 20).device(device).access(asked).build().unwrap();
        assert_eq!(registrar.requests()[0].access, asked, "no right is added");
        assert_eq!(pool.arenas()[0].access, asked, "effective flags are readable");
    }
    for asked in [w, a, w | r, r | a] {
        let (registrar, device) = faulty(|r| r);
        let error = soft(1 << 20).device(device).access(asked).build().unwrap_err();
        assert!(matches!(error, BuildError::Access { .. }));
        assert!(error.to_string().contains("needs LOCAL_WRITE"), "{error}");
        assert_eq!(registrar.register_calls(), 0);
    }
}

#[test]
fn b13_a_local_only_buffer_has_no_rkey() {
    // That the two key types do not mix is held by compile_fail examples on `LKey` and `RKey`.
    let pool = soft(1 << 20).access(Access::LOCAL_WRITE).build().unwrap();
    let buf = pool.alloc(100).unwrap();
    assert_eq!(buf.keys().rkey, None);
    assert_eq!(buf.remote(), None);
    assert_eq!(pool.keys_of(buf.as_ptr()).unwrap().rkey, None);
    assert_eq!(pool.arenas()[0].keys.rkey, None);
}

#[test]
fn b16_no_buffer_straddles_two_regions() {
    let (registrar, device) = faulty(|r| r.max_mr_size(4 << 20));
    let pool = soft(32 << 20).device(device).build().unwrap();
    assert_eq!(registrar.register_calls(), 8, "split, not cut: {:?}", registrar.requests());
    assert!(registrar.requests().iter().all(|r| r.len == 4 << 20));
    for len in [(3 << 20) + 4096, 1, 12_345, 1_000_001, (2 << 20) + 1, 4 << 20] {
        let mut held = Vec::new();
        let error = loop {
            match pool.alloc(len) {
                Ok(buf) => {
                    let region = |p: usize| {
                        pool.arenas().iter().position(|a| {
                            let first = a.addr.as_ptr() as usize;
                            (first..first + a.len).contains(&p)
                        })
                    };
                    let first = buf.as_ptr() as usize;
                    let at = region(first).expect("inside a region");
                    assert_eq!(region(first + buf.capacity() - 1), Some(at), "inside one (P3)");
                    assert_eq!(buf.keys(), pool.arenas()[at].keys);
                    held.push(buf);
                }
                Err(e) => break e,
            }
            if held.len() == 20_000 {
                break AllocError::Exhausted(Default::default());
            }
        };
        assert!(matches!(error, AllocError::Exhausted(_)), "{error}");
        assert!(held.len() >= 8);
    }
    let error = pool.alloc(5 << 20).unwrap_err();
    assert_eq!(error, AllocError::TooLarge { asked: 5 << 20, max: 4 << 20 });
    assert!(error.to_string().contains("5 MiB") && error.to_string().contains("4 MiB"));
    assert_eq!(registrar.register_calls(), 8);
}

#[test]
fn b16_an_arena_size_above_the_limit_is_refused() {
    let (registrar, device) = faulty(|r| r.max_mr_size(4 << 20));
    let error = soft(32 << 20).device(device).arena_size(8 << 20).build().unwrap_err();
    assert!(matches!(error, BuildError::ArenaSize { .. }));
    assert!(error.to_string().contains("4 MiB"), "{error}");
    assert_eq!(registrar.register_calls(), 0);
}

#[test]
fn b18_many_buffers_are_one_region_and_too_many_arenas_none() {
    let (registrar, device) = faulty(|r| r);
    let pool = soft(8 << 20).device(device).build().unwrap();
    let held: Vec<_> = (0..100_000).map(|_| pool.alloc(64).unwrap()).collect();
    assert_eq!(registrar.register_calls(), 1);
    drop((held, pool));
    assert_eq!((registrar.deregister_calls(), registrar.live()), (1, 0));

    let (registrar, device) = faulty(|r| r.max_mr(3));
    let error = soft(10 << 20).device(device).arena_size(1 << 20).build().unwrap_err();
    assert!(matches!(error, BuildError::TooManyArenas { arenas: 10, max_mr: 3, .. }));
    let text = error.to_string();
    assert!(text.contains("10 arenas") && text.contains("holds 3"), "{text}");
    assert_eq!(registrar.register_calls(), 0);
}

#[test]
fn b19_zero_and_impossible_lengths() {
    assert!(matches!(soft(0).build(), Err(BuildError::ZeroCapacity)));
    for capacity in [usize::MAX, usize::MAX - 4095, isize::MAX as usize + 1] {
        let error = soft(capacity).build().unwrap_err();
        assert!(matches!(error, BuildError::CapacityTooLarge { asked, .. } if asked == capacity));
        let error = soft(1 << 20).arena_size(capacity).build().unwrap_err();
        assert!(matches!(error, BuildError::ArenaSize { .. }), "{error}");
    }
    let error = soft(1 << 46).arena_size(4096).build().unwrap_err();
    assert!(matches!(error, BuildError::ArenaSize { asked: 4096, .. }), "{error}");
    assert!(matches!(soft(1 << 20).arena_size(0).build(), Err(BuildError::ArenaSize { .. })));
    let pool = soft(1 << 20).build().unwrap();
    let empty = pool.alloc(0).unwrap();
    assert_eq!((empty.len(), &empty[..]), (0, &[][..]));
    assert_eq!(empty.sge().length, 0);
    for len in [usize::MAX, usize::MAX - 4095, isize::MAX as usize + 1, (1 << 20) + 1] {
        assert_eq!(pool.alloc(len).unwrap_err(), AllocError::TooLarge { asked: len, max: 1 << 20 });
        assert!(pool.alloc_zeroed(len).is_err());
    }
    let mut batch = pinpool::Batch::with_capacity(4);
    assert!(pool.alloc_many(&mut batch, usize::MAX, 4).is_err());
    assert_eq!(pool.alloc_many(&mut batch, 0, 4).unwrap(), 4);
    drop((batch, empty));
    pool.check();
}

#[test]
fn b20_enomem_is_not_blamed_on_a_limit_that_the_numbers_clear() {
    // Root with CAP_IPC_LOCK, or a limit above the pool: then memlock cannot be the cause.
    let (_, device) = faulty(|r| r.fault(Fault::Register(1, ENOMEM)));
    let error = soft(64 << 10).device(device).build().unwrap_err();
    assert!(matches!(error, BuildError::Register { .. }), "{error}");
    assert_eq!(error.raw_os_error(), Some(ENOMEM));
}

#[test]
fn b23_two_pools_on_one_pd_in_all_drop_orders() {
    for round in 0..1_000 {
        let (registrar, device) = faulty(|r| r);
        let a = soft(64 << 10).device(device.clone()).build().unwrap();
        let b = soft(64 << 10).device(device.clone()).build().unwrap();
        let (x, y) = (a.alloc(64).unwrap(), b.alloc(64).unwrap());
        let mut things: Vec<Box<dyn std::any::Any>> =
            vec![Box::new(device), Box::new(a), Box::new(b), Box::new(x), Box::new(y)];
        // Each of the 120 orders in turn.
        let mut n = round;
        while !things.is_empty() {
            let i = n % things.len();
            n /= things.len();
            drop(things.swap_remove(i));
        }
        assert_eq!((registrar.deregister_calls(), registrar.live()), (2, 0));
    }
}

#[test]
fn b24_a_buffer_cannot_grow_in_place() {
    let pool = soft(1 << 20).build().unwrap();
    let mut buf = pool.alloc(100).unwrap();
    let (addr, keys, cap) = (buf.as_ptr(), buf.keys(), buf.capacity());
    let error = buf.set_len(cap + 1).unwrap_err();
    assert_eq!((error.asked, error.capacity), (cap + 1, cap));
    assert_eq!((buf.len(), buf.as_ptr(), buf.keys()), (100, addr, keys), "nothing changed");
    buf.set_len(cap).unwrap();
    assert_eq!((buf.as_ptr(), buf.keys()), (addr, keys), "growth inside the block moves nothing");
}

/// Registers nothing, and looks at what it is asked to register.
struct Resident;

// SAFETY: no device touches the range, so nothing stays registered (1, 2); it is only asked about (3); the
// keys name nothing for anybody (4).
unsafe impl Registrar for Resident {
    fn info(&self) -> DeviceInfo {
        DeviceInfo::new("resident", "test")
    }

    unsafe fn register(&self, request: &MrRequest) -> Result<Registration, RegisterError> {
        let mut pages = vec![0u8; request.len.div_ceil(4096)];
        let addr = request.addr.as_ptr().cast();
        // SAFETY: the range is mapped (contract), and `pages` has a byte for each of its pages.
        let r = unsafe { libc::mincore(addr, request.len, pages.as_mut_ptr()) };
        assert_eq!(r, 0);
        assert!(pages.iter().all(|p| p & 1 == 1), "a page would be faulted in by registering");
        let (lkey, rkey) = (LKey::new(1), RKey::new(2));
        Ok(Registration { handle: MrHandle(0), lkey, rkey, access: request.access })
    }

    unsafe fn deregister(&self, _: MrHandle) -> Result<(), RegisterError> {
        Ok(())
    }
}

#[test]
fn b36_mapping_faulting_in_and_registering_are_timed_apart() {
    let pool = soft(64 << 20).device(Device::custom(Resident)).build().unwrap();
    let arena = &pool.arenas()[0];
    // Every page is there when it is registered, so page faults are in the second figure alone.
    assert!(!arena.map_time.is_zero() && !arena.fault_in_time.is_zero());
}

#[test]
fn dropping_a_pool_that_cannot_be_deregistered_does_not_panic() {
    let (_, device) = faulty(|r| r.fault(Fault::Deregister(1, EBUSY)));
    drop(soft(64 << 10).device(device).build().unwrap());
}

#[test]
fn a_builder_without_a_device_says_so() {
    let error = Pool::builder().capacity(1 << 20).build().unwrap_err();
    assert!(matches!(error, BuildError::NoDevice));
}
