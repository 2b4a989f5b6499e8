//! Roll-back, as the kernel's list of mappings shows it. A single test, so that nothing else in the
//! process maps memory where an arena has just gone.
#![cfg(feature = "fault")]
#![allow(clippy::unwrap_used)]

mod common;

use common::{mapped, soft};
use pinpool::{
    BuildError, CloseError, Device, Event,
    device::{Fault, FaultyRegistrar},
    leaked_bytes,
};

const EIO: i32 = 5;
const EBUSY: i32 = 16;

/// A registrar over the software device, and a device over that.
fn faulty(fault: Fault) -> (FaultyRegistrar, Device) {
    let registrar = FaultyRegistrar::new(&Device::soft()).fault(fault);
    (registrar.clone(), Device::custom(registrar))
}

#[test]
fn b20_what_failed_half_way_leaves_nothing() {
    a_failed_start_is_undone();
    a_pool_that_ends_leaves_no_mapping();
    a_pool_that_grew_leaves_no_mapping();
    a_failed_deregister_leaks_counts_and_reports();
}

fn a_pool_that_grew_leaves_no_mapping() {
    const MIB: usize = 1 << 20;
    let lines = || std::fs::read_to_string("/proc/self/maps").unwrap().lines().count();
    let round = |n: u64| {
        // Every other second arena fails on its second device.
        let (registrar, device) = faulty(Fault::Register(2 + n % 2, EIO));
        let pool = soft(MIB)
            .arena_size(MIB)
            .max_capacity(4 * MIB)
            .low_watermark(0)
            .growth_by_hand()
            .devices([Device::soft(), device])
            .build()
            .unwrap();
        let mut held = Vec::new();
        for second in 1..20 {
            held.extend(pool.alloc(MIB).ok());
            let _ = pool.tick(std::time::Duration::from_secs(second));
        }
        assert_eq!((held.len(), pool.stats().growth_failures), (4, 1));
        held.truncate(2);
        (1..20).for_each(|i| _ = pool.tick(std::time::Duration::from_secs(100 * i)));
        assert_eq!((pool.stats().arenas, registrar.live()), (2, 2));
        let places = registrar.requests();
        drop(pool);
        drop(held);
        assert_eq!(registrar.live(), 0);
        assert!(places.iter().all(|r| !mapped(r.addr, r.len)));
    };
    round(0);
    let maps = lines();
    (0..50).for_each(round);
    assert!(lines() <= maps + 2, "{maps} mappings before, {} now", lines());
}

fn a_failed_start_is_undone() {
    for k in 1..=5 {
        let (registrar, device) = faulty(Fault::Register(k, EIO));
        let error = soft(5 << 20).device(device).arena_size(1 << 20).build().unwrap_err();
        match &error {
            BuildError::Register { arena, arenas: 5, .. } => assert_eq!(*arena as u64, k - 1),
            other => panic!("{other}"),
        }
        assert_eq!(error.raw_os_error(), Some(EIO), "the original errno");
        assert_eq!(registrar.register_calls(), k);
        assert_eq!((registrar.deregister_calls(), registrar.live()), (k - 1, 0));
        for r in registrar.requests() {
            assert!(!mapped(r.addr, r.len), "arena at {:#x} is still mapped", r.addr);
        }
    }
}

fn a_failed_deregister_leaks_counts_and_reports() {
    let heard = std::sync::Arc::new(std::sync::Mutex::new(Vec::new()));
    let sink = heard.clone();
    let (registrar, device) = faulty(Fault::Deregister(2, EBUSY));
    let pool = soft(3 << 20)
        .device(device)
        .arena_size(1 << 20)
        .on_event(move |e| {
            if let Event::DeregisterFailed { addr, len, error, .. } = e {
                sink.lock().unwrap().push((*addr, *len, error.raw_os_error()));
            }
        })
        .build()
        .unwrap();
    let before = leaked_bytes();
    let places: Vec<_> = registrar.requests().iter().map(|r| (r.addr, r.len)).collect();
    match pool.close() {
        Err(CloseError::Deregister { arenas: 1, bytes, first }) => {
            assert_eq!((bytes, first.raw_os_error()), (1 << 20, Some(EBUSY)));
        }
        other => panic!("{other:?}"),
    }
    // Last first, so the second call was for the middle one.
    let (addr, len) = places[1];
    assert_eq!(*heard.lock().unwrap(), [(addr, len, Some(EBUSY))]);
    assert_eq!(leaked_bytes() - before, 1 << 20);
    assert!(mapped(addr, len), "the device may still write here, so it stays mapped");
    assert!(!mapped(places[0].0, len) && !mapped(places[2].0, len));
    assert_eq!(registrar.deregister_calls(), 3, "the others were still let go");
}

fn a_pool_that_ends_leaves_no_mapping() {
    let lines = || std::fs::read_to_string("/proc/self/maps").unwrap().lines().count();
    let round = || {
        let registrar = FaultyRegistrar::new(&Device::soft());
        let pool = soft(4 << 20)
            .device(Device::custom(registrar.clone()))
            .arena_size(1 << 20)
            .build()
            .unwrap();
        let places = registrar.requests();
        drop(pool.alloc(5000).unwrap());
        drop(pool);
        assert!(places.iter().all(|r| !mapped(r.addr, r.len)));
    };
    round();
    let (maps, resident) = (lines(), common::status_kib("VmRSS"));
    for _ in 0..50 {
        round();
    }
    assert!(lines() <= maps + 2, "{maps} mappings before, {} now", lines());
    let now = common::status_kib("VmRSS");
    // A quarter of what the arenas came to: the address sanitizer keeps freed heap for a while.
    assert!(now < resident + (50 << 10), "{resident} KiB resident before, {now} now");
}
