//! Pools on several devices. Proves: every arena is registered on every device, and each device knows it by the
//! keys that are asked for by that device; an unknown device is an error; devices come and go while the pool
//! serves, wholly or not at all; a device that keeps an arena keeps its memory; limits count each device.
#![cfg(feature = "fault")]
#![allow(clippy::unwrap_used)]

mod common;
#[path = "common/held.rs"]
mod held;

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    thread,
    time::Duration,
};

use common::{Rng, mapped, soft};
use held::Held;
use pinpool::{
    Batch, Buf, BuildError, Builder, Device, DeviceChangeError, Event, LKey, Pool, RKey,
    RegisterError,
    device::{DeviceInfo, Fault, FaultyRegistrar, MrHandle, MrRequest, Registrar, Registration},
    reach::Rails,
};

const MIB: usize = 1 << 20;
const EIO: i32 = 5;
const EBUSY: i32 = 16;

fn rails(capacity: usize, devices: &[&Device]) -> Builder<Rails> {
    soft(capacity).arena_size(MIB).devices(devices.iter().map(|&d| d.clone()))
}

fn regions(device: &Device) -> usize {
    device.as_soft().unwrap().regions()
}

/// Writes through one device and reads through another, at both ends of a buffer.
fn reaches(buf: &mut Buf<Rails>, devices: &[&Device]) {
    for (i, from) in devices.iter().enumerate() {
        let to = devices[(i + 1) % devices.len()];
        let (w, r) = (buf.remote_on(from).unwrap().unwrap(), buf.remote_on(to).unwrap().unwrap());
        for offset in [0, w.len - 8] {
            let data = [i as u8 + 1; 8];
            // SAFETY: no reference into the buffer is held while the devices are at it.
            unsafe { from.as_soft().unwrap().write(w.rkey, w.addr + offset, &data) }.unwrap();
            let mut back = [0; 8];
            // SAFETY: as above.
            unsafe { to.as_soft().unwrap().read(r.rkey, r.addr + offset, &mut back) }.unwrap();
            assert_eq!(back, data);
            assert_eq!(buf[offset as usize..][..8], data);
        }
    }
}

#[test]
fn every_arena_is_registered_on_every_device() {
    let (a, b, c) = (Device::soft(), Device::soft(), Device::soft());
    let pool = rails(3 * MIB, &[&a, &b, &c]).build().unwrap();
    assert_eq!((regions(&a), regions(&b), regions(&c)), (3, 3, 3));
    assert_eq!((pool.stats().arenas, pool.stats().register_calls), (3, 9));
    let mut all: Vec<_> = std::iter::from_fn(|| pool.alloc(512 << 10).ok()).collect();
    assert_eq!(all.len(), 6);
    for buf in &mut all {
        reaches(buf, &[&a, &b, &c]);
        for device in [&a, &b, &c] {
            let keys = buf.keys_on(device).unwrap();
            assert_eq!(pool.keys_of_on(buf.as_ptr(), device), Ok(Some(keys)));
            assert_eq!(buf.sge_on(device).unwrap().lkey, keys.lkey);
            let part = buf.sge_range_on(device, 8, 16).unwrap().unwrap();
            assert_eq!((part.addr, part.length), (buf.as_ptr() as u64 + 8, 16));
            assert_eq!(buf.sge_range_on(device, 8, u32::MAX), Ok(None));
            let arenas = pool.arenas_on(device).unwrap();
            assert!(arenas.iter().any(|arena| arena.keys == keys));
        }
    }
    assert_eq!(pool.keys_of_on(&0u8, &a), Ok(None));
    pool.check();
    drop((all, pool));
    assert_eq!((regions(&a), regions(&b), regions(&c)), (0, 0, 0));
}

#[test]
fn an_unknown_device_is_an_error_that_names_the_known() {
    let (a, b) = (Device::soft(), Device::soft());
    let pool = rails(MIB, &[&a]).build().unwrap();
    let buf = pool.alloc(100).unwrap();
    let e = buf.keys_on(&b).unwrap_err();
    assert_eq!((e.device.as_str(), &e.known[..]), ("soft", &["soft".to_owned()][..]));
    assert!(e.to_string().contains("it is on: soft"), "{e}");
    assert!(buf.sge_on(&b).is_err() && buf.remote_on(&b).is_err() && pool.arenas_on(&b).is_err());
    assert!(pool.keys_of_on(buf.as_ptr(), &b).is_err());
    let clone = a.clone();
    assert_eq!(buf.keys_on(&clone), buf.keys_on(&a), "a clone is the same device");
}

#[test]
fn batches_are_looked_up_by_device() {
    let (a, b) = (Device::soft(), Device::soft());
    let pool = rails(2 * MIB, &[&a, &b]).build().unwrap();
    let mut batch = Batch::with_capacity(32);
    assert_eq!(pool.alloc_many(&mut batch, 60_000, 32).unwrap(), 32);
    let (mut on_a, mut on_b) = (Vec::new(), Vec::new());
    batch.sges_on(&a, &mut on_a).unwrap();
    batch.sges_on(&b, &mut on_b).unwrap();
    assert!(batch.sges_on(&Device::soft(), &mut on_b.clone()).is_err());
    assert_eq!((on_a.len(), on_b.len()), (32, 32));
    for (a_sge, b_sge) in on_a.iter().zip(&on_b).rev() {
        let buf = batch.pop().unwrap();
        assert_eq!((buf.sge_on(&a).unwrap(), buf.sge_on(&b).unwrap()), (*a_sge, *b_sge));
    }
}

#[test]
fn what_makes_no_sense_is_refused() {
    let a = Device::soft();
    let e = rails(MIB, &[&a, &Device::soft(), &a]).build().unwrap_err();
    assert!(matches!(&e, BuildError::DuplicateDevice { device } if device == "soft"), "{e}");
    assert!(matches!(rails(MIB, &[]).build(), Err(BuildError::NoDevice)));
    let many: Vec<_> = (0..17).map(|_| Device::soft()).collect();
    let e = rails(MIB, &many.iter().collect::<Vec<_>>()).build().unwrap_err();
    assert!(matches!(e, BuildError::TooManyDevices { asked: 17, max: 16 }), "{e}");
    let pool = rails(MIB, &many[..16].iter().collect::<Vec<_>>()).build().unwrap();
    let e = pool.add_device(&many[16]).wait().unwrap_err();
    assert!(matches!(e, DeviceChangeError::TooMany { max: 16 }), "{e}");
    // Every device's limits count.
    let few = Device::custom(FaultyRegistrar::new(&Device::soft()).max_mr(2));
    let e = rails(3 * MIB, &[&a, &few]).build().unwrap_err();
    assert!(matches!(e, BuildError::TooManyArenas { arenas: 3, max_mr: 2, .. }), "{e}");
    let short = Device::custom(FaultyRegistrar::new(&Device::soft()).max_mr_size(512 << 10));
    let e = rails(3 * MIB, &[&a, &short]).build().unwrap_err();
    assert!(matches!(e, BuildError::ArenaSize { asked: MIB, .. }), "{e}");
    assert_eq!(regions(&a), 0);
}

#[test]
fn a_start_that_fails_on_one_device_is_undone_on_all() {
    for n in 1..=3 {
        let a = Device::soft();
        let calls = FaultyRegistrar::new(&Device::soft()).fault(Fault::Register(n, EIO));
        let e = rails(3 * MIB, &[&a, &Device::custom(calls.clone())]).build().unwrap_err();
        assert_eq!(e.raw_os_error(), Some(EIO));
        assert_eq!((regions(&a), calls.live()), (0, 0));
    }
}

#[test]
fn a_device_comes_and_goes_while_the_pool_serves() {
    let (a, b) = (Device::soft(), Device::soft());
    let pool = rails(3 * MIB, &[&a]).build().unwrap();
    let done = AtomicBool::new(false);
    let seen = AtomicU64::new(0);
    let on_a = pool.arenas_on(&a).unwrap();
    thread::scope(|s| {
        let workers: Vec<_> = (0..3u64)
            .map(|seed| {
                let (pool, done, seen, a, b, on_a) = (&pool, &done, &seen, &a, &b, &on_a);
                s.spawn(move || {
                    let mut rng = Rng(seed);
                    while !done.load(Relaxed) {
                        let buf = pool.alloc(rng.size(64, 100_000)).unwrap();
                        let keys = buf.keys_on(a).unwrap();
                        assert!(on_a.iter().any(|arena| arena.keys == keys));
                        if let Ok(keys) = buf.keys_on(b) {
                            // Keys are `b`'s own or none: `b` numbers them afresh each time.
                            assert!(keys.lkey.get() > 0);
                            seen.fetch_add(1, Relaxed);
                        }
                    }
                })
            })
            .collect();
        for _ in 0..200 {
            pool.add_device(&b).wait().unwrap();
            assert_eq!((regions(&a), regions(&b)), (3, 3));
            let mut buf = pool.alloc(4096).unwrap();
            reaches(&mut buf, &[&a, &b]);
            assert!(matches!(
                pool.add_device(&b).wait(),
                Err(DeviceChangeError::Known { device }) if device == "soft"
            ));
            pool.remove_device(&b).wait().unwrap();
            assert_eq!((regions(&a), regions(&b)), (3, 0));
            assert!(buf.keys_on(&b).is_err());
            let e = pool.remove_device(&b).wait().unwrap_err();
            assert!(matches!(e, DeviceChangeError::Unknown(_)), "{e}");
        }
        done.store(true, Relaxed);
        workers.into_iter().for_each(|w| w.join().unwrap());
    });
    let e = pool.remove_device(&a).wait().unwrap_err();
    assert!(matches!(e, DeviceChangeError::Last { .. }), "{e}");
    assert_eq!((regions(&a), pool.device_names()), (3, vec!["soft".to_owned()]));
    pool.check();
}

#[test]
fn a_rail_that_another_device_gets_is_never_taken_for_the_first() {
    // Two devices take turns at the one rail that is free; whoever asks gets the right one's keys or none.
    let (a, b, c) = (Device::soft(), Device::custom(Tagged(1)), Device::custom(Tagged(2)));
    let pool = rails(MIB, &[&a]).build().unwrap();
    let done = AtomicBool::new(false);
    let hits = AtomicU64::new(0);
    thread::scope(|s| {
        let asker = s.spawn(|| {
            let buf = pool.alloc(64).unwrap();
            while !done.load(Relaxed) {
                for (tag, device) in [(1, &b), (2, &c)] {
                    if let Ok(keys) = buf.keys_on(device) {
                        assert_eq!((keys.lkey.get(), keys.rkey.unwrap().get()), (tag, tag + 100));
                        hits.fetch_add(1, Relaxed);
                    }
                }
            }
        });
        let mut rounds = 0;
        while rounds < 1000 || hits.load(Relaxed) < 1000 {
            rounds += 1;
            for device in [&b, &c] {
                pool.add_device(device).wait().unwrap();
                let keys = pool.alloc(64).unwrap().keys_on(device).unwrap();
                assert_eq!(pool.arenas_on(device).unwrap()[0].keys, keys);
                pool.remove_device(device).wait().unwrap();
            }
        }
        done.store(true, Relaxed);
        asker.join().unwrap();
    });
}

/// Registers nothing; all of its keys are one number.
struct Tagged(u32);

// SAFETY: it never touches any memory.
unsafe impl Registrar for Tagged {
    fn info(&self) -> DeviceInfo {
        DeviceInfo::new(format!("tagged{}", self.0), "none")
    }

    unsafe fn register(&self, request: &MrRequest) -> Result<Registration, RegisterError> {
        Ok(Registration {
            handle: MrHandle(0),
            lkey: LKey::new(self.0),
            rkey: RKey::new(self.0 + 100),
            access: request.access,
        })
    }

    unsafe fn deregister(&self, _: MrHandle) -> Result<(), RegisterError> {
        Ok(())
    }
}

#[test]
fn a_device_that_refuses_an_arena_is_not_added() {
    let a = Device::soft();
    let pool = rails(3 * MIB, &[&a]).build().unwrap();
    for n in 1..=3 {
        let calls = FaultyRegistrar::new(&Device::soft()).fault(Fault::Register(n, EIO));
        let b = Device::custom(calls.clone());
        let e = pool.add_device(&b).wait().unwrap_err();
        let DeviceChangeError::Refused(e) = e else { panic!("{e}") };
        assert!(
            matches!(&*e, BuildError::Register { arena, arenas: 3, .. } if *arena as u64 == n - 1)
        );
        assert_eq!((e.raw_os_error(), calls.live()), (Some(EIO), 0), "all undone");
        assert!(pool.alloc(64).unwrap().keys_on(&b).is_err());
        // What failed once works the next time.
        pool.add_device(&b).wait().unwrap();
        assert_eq!(calls.live(), 3);
        pool.remove_device(&b).wait().unwrap();
    }
    let few = Device::custom(FaultyRegistrar::new(&Device::soft()).max_mr(2));
    let DeviceChangeError::Refused(e) = pool.add_device(&few).wait().unwrap_err() else { panic!() };
    assert!(matches!(&*e, BuildError::TooManyArenas { arenas: 3, max_mr: 2, .. }), "{e}");
    let short = Device::custom(FaultyRegistrar::new(&Device::soft()).max_mr_size(4096));
    let DeviceChangeError::Refused(e) = pool.add_device(&short).wait().unwrap_err() else {
        panic!()
    };
    assert!(matches!(&*e, BuildError::ArenaSize { asked: MIB, .. }), "{e}");
    assert_eq!(regions(&a), 3);
    pool.check();
}

#[test]
fn a_device_that_keeps_an_arena_keeps_its_memory() {
    let a = Device::soft();
    let calls = FaultyRegistrar::new(&Device::soft()).fault(Fault::Deregister(2, EBUSY));
    let b = Device::custom(calls.clone());
    let told = Arc::new(AtomicU64::new(0));
    let sink = told.clone();
    let builder = rails(3 * MIB, &[&a, &b]).on_event(move |e| {
        if let Event::DeregisterFailed { len, .. } = e {
            sink.fetch_add(*len as u64, Relaxed);
        }
    });
    let pool = builder.build().unwrap();
    let arenas: Vec<_> = pool.arenas_on(&a).unwrap();
    match pool.remove_device(&b).wait().unwrap_err() {
        DeviceChangeError::Deregister { arenas: 1, bytes: MIB, first, .. } => {
            assert_eq!(first.raw_os_error(), Some(EBUSY));
        }
        e => panic!("{e}"),
    }
    assert_eq!((calls.live(), regions(&a)), (1, 3));
    let buf = pool.alloc(64).unwrap();
    assert!(buf.keys_on(&b).is_err() && buf.keys_on(&a).is_ok(), "removed all the same");
    drop(buf);
    drop(pool);
    while told.load(Relaxed) == 0 {
        thread::yield_now();
    }
    assert_eq!(told.load(Relaxed), MIB as u64);
    // Last first, so the second call was for the middle one.
    assert!(mapped(arenas[1].addr.as_ptr() as usize, MIB), "the device may still write here");
    assert_eq!(regions(&a), 0);
}

#[test]
fn what_grows_is_on_every_device() {
    let (a, b, c) = (Device::soft(), Device::soft(), Device::soft());
    let calls = FaultyRegistrar::new(&b).fault(Fault::Register(2, EIO));
    let faulty = Device::custom(calls.clone());
    let builder = rails(MIB, &[&a, &faulty]).max_capacity(4 * MIB).low_watermark(0);
    let pool = builder.growth_by_hand().build().unwrap();
    let at = Duration::from_secs;
    let full = |pool: &Pool<Rails>| -> Vec<_> {
        std::iter::from_fn(|| pool.alloc(512 << 10).ok()).collect()
    };
    let mut held = full(&pool);
    // The second device refuses: the first has to let go again.
    let _ = pool.tick(at(1));
    assert_eq!((regions(&a), calls.live(), pool.stats().growth_failures), (1, 1, 1));
    let _ = pool.tick(at(2));
    assert_eq!(
        (regions(&a), calls.live()),
        (1, 1),
        "nothing is short any more but what was refused"
    );
    held.extend(full(&pool));
    let _ = pool.tick(at(3));
    assert_eq!((regions(&a), calls.live()), (2, 2));
    let change = pool.add_device(&c);
    assert!(!change.is_done(), "no thread but who ticks");
    let _ = pool.tick(at(3));
    change.wait().unwrap();
    assert_eq!(regions(&c), 2);
    held.extend(full(&pool));
    let _ = pool.tick(at(4));
    held.extend(full(&pool));
    assert_eq!((regions(&a), calls.live(), regions(&c), held.len()), (3, 3, 3, 6));
    for buf in &mut held {
        reaches(buf, &[&a, &c]);
        assert!(buf.keys_on(&faulty).is_ok());
    }
    let arenas = pool.arenas_on(&c).unwrap();
    assert_eq!(arenas.len(), 3);
    held.clear();
    (1..40).for_each(|i| _ = pool.tick(at(50 * i)));
    assert_eq!((regions(&a), calls.live(), regions(&c)), (1, 1, 1));
    assert_eq!(pool.keys_of_on(arenas[2].addr.as_ptr(), &c), Ok(None));
    pool.check();
}

#[test]
fn the_end_of_a_pool_answers_whoever_waits() {
    let a = Device::soft();
    let held = Held::new(FaultyRegistrar::new(&Device::soft()));
    held.hold();
    let pool = rails(2 * MIB, &[&a]).build().unwrap();
    let (first, second) = (pool.add_device(&held.device()), pool.add_device(&Device::soft()));
    held.await_call();
    let ender = thread::spawn(move || drop(pool));
    let e = second.wait().unwrap_err();
    assert!(matches!(e, DeviceChangeError::Closed), "{e}");
    held.release();
    let e = first.wait().unwrap_err();
    assert!(matches!(e, DeviceChangeError::Closed), "{e}");
    ender.join().unwrap();
    assert_eq!((regions(&a), held.calls.live()), (0, 0));
}

#[test]
fn zero_based_addresses_and_local_pools_work_as_on_one_device() {
    let (a, b) = (Device::soft(), Device::soft());
    let access = pinpool::Access::LOCAL_WRITE | pinpool::Access::ZERO_BASED;
    let pool = rails(2 * MIB, &[&a, &b]).access(access).build().unwrap();
    let local = pool.local();
    let buf = local.alloc(5000).unwrap();
    let sge = buf.sge_on(&b).unwrap();
    assert!(sge.addr < MIB as u64, "an offset");
    assert_eq!(buf.remote_on(&a), Ok(None), "no remote right, no rkey");
    assert_eq!(buf.keys_on(&a).unwrap().rkey, None);
    let text = format!("{buf:?} {pool:?}");
    assert!(!text.contains("key"), "{text}");
    let raw = buf.into_raw();
    // SAFETY: nobody uses it.
    unsafe { pool.free_raw(raw.as_ptr()) }.unwrap();
    assert!(pool.close().is_err(), "the local handle is another");
    drop(local);
    assert_eq!(regions(&a) + regions(&b), 0);
}
