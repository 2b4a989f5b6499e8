//! Mapping that fails on demand, on the software device. Proves, for each call of each step of a start-up:
//! - what succeeded before it is undone, as the registrar, the kernel's list of mappings, `VmLck` and the
//!   count of leaked bytes show it, and a neighbour pool is as it was;
//! - the caller gets the errno of what failed first, whatever fails while that is undone;
//! - a failed unmap is counted and reported, keeps no memory, and panics nowhere.
//!
//! Hugepages and `VmPin` are looked at in `host_hugepages` and `verbs_startup`, with the same faults.
#![cfg(feature = "fault")]
#![allow(clippy::unwrap_used)]

mod common;

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use common::{alone, mapped, soft, status_kib};
use pinpool::{
    BuildError, Builder, Device, Event, PageSize, Pages, Pool,
    device::{Fault, FaultyMapping, FaultyRegistrar, MapFault, MapStep},
    leaked_bytes,
};

const EIO: i32 = 5;
const ENOMEM: i32 = 12;
const EBUSY: i32 = 16;
const MIB: usize = 1 << 20;
/// Three arenas, each faulted in by two calls.
const ARENAS: u64 = 3;
const CAPACITY: usize = 24 * MIB;

struct Watched {
    mapping: FaultyMapping,
    registrar: FaultyRegistrar,
    builder: Builder,
}

fn watched(map_faults: &[MapFault], faults: &[Fault], threads: usize) -> Watched {
    let mapping = map_faults.iter().fold(FaultyMapping::new(), |m, f| m.fault(*f));
    let registrar = FaultyRegistrar::new(&Device::soft());
    let registrar = faults.iter().fold(registrar, |r, f| r.fault(*f));
    let builder = soft(CAPACITY)
        .device(Device::custom(registrar.clone()))
        .arena_size(8 * MIB)
        .start_threads(threads)
        .faulty_mapping(&mapping);
    Watched { mapping, registrar, builder }
}

/// Where arenas were mapped, failed attempts included.
fn places(mapping: &FaultyMapping) -> Vec<(usize, usize)> {
    let records = mapping.records();
    records.iter().filter(|r| r.step == MapStep::Map).map(|r| (r.addr, r.len)).collect()
}

fn lines_of_maps() -> usize {
    std::fs::read_to_string("/proc/self/maps").unwrap().lines().count()
}

/// Has a start fail, and checks that nothing of it is left. Gives the error.
fn undone(map_faults: &[MapFault], faults: &[Fault], threads: usize) -> (Watched, BuildError) {
    let (locked, leaked) = (status_kib("VmLck"), leaked_bytes());
    let w = watched(map_faults, faults, threads);
    let Watched { mapping, registrar, builder } = w;
    let error = builder.build().unwrap_err();
    assert_eq!((registrar.live(), status_kib("VmLck")), (0, locked), "{map_faults:?} {faults:?}");
    assert_eq!(leaked_bytes(), leaked, "{map_faults:?} {faults:?}");
    for (addr, len) in places(&mapping) {
        assert!(!mapped(addr, len), "{map_faults:?} {faults:?}: {addr:#x} is still mapped");
    }
    (Watched { mapping, registrar, builder: soft(1) }, error)
}

#[test]
fn each_call_of_each_step_that_fails_is_undone_and_its_errno_survives() {
    let _alone = alone();
    let neighbour = soft(4 * MIB).build().unwrap();
    let mut kept = neighbour.alloc(MIB).unwrap();
    kept.fill(0x5a);
    let books = |p: &Pool| (p.stats().live, p.stats().cached, p.stats().free);
    let before = books(&neighbour);

    let dry = watched(&[], &[], 1);
    drop(dry.builder.build().unwrap());
    let steps = [MapStep::Reserve, MapStep::Map, MapStep::FaultIn, MapStep::Table];
    let counts = steps.map(|s| dry.mapping.calls(s));
    assert_eq!(counts, [1, ARENAS, 2 * ARENAS, 3]);
    // Each arena's pages, then what is left, at once.
    assert_eq!(dry.mapping.calls(MapStep::Unmap), ARENAS + 1);

    let mut lines = None;
    for threads in [1, 3] {
        for (step, n) in steps.into_iter().zip(counts) {
            for k in 1..=n {
                let (w, error) = undone(&[MapFault::Fail(step, k, EIO)], &[], threads);
                assert_eq!(error.raw_os_error(), Some(EIO), "{step:?} {k} of {n}: {error}");
                let named = match step {
                    MapStep::Reserve | MapStep::Table => "reserving",
                    MapStep::Map => "when mapping",
                    _ => "when faulting in",
                };
                assert!(error.to_string().contains(named), "{step:?} {k}: {error}");
                assert!(w.mapping.calls(step) >= k, "{step:?} {k}");
                let registered = match step {
                    MapStep::Reserve | MapStep::Map => 0,
                    MapStep::Table => ARENAS,
                    // Arenas before it may be in memory, and then are registered.
                    _ => w.registrar.register_calls(),
                };
                assert_eq!(w.registrar.register_calls(), registered);
                assert_eq!(w.registrar.deregister_calls(), registered);
            }
        }
        // Registering, the step after them.
        for k in 1..=ARENAS {
            let (_, error) = undone(&[], &[Fault::Register(k, EIO)], threads);
            assert_eq!(error.raw_os_error(), Some(EIO), "register {k}: {error}");
        }
        // By now threads have stacks, which the C library keeps.
        let now = lines_of_maps();
        assert!(lines.replace(now).is_none_or(|l| now <= l + 12), "{lines:?}, then {now}");
    }
    // All of it again changes nothing.
    let now = lines_of_maps();
    for _ in 0..20 {
        undone(&[MapFault::Fail(MapStep::FaultIn, 4, EIO)], &[], 3);
    }
    assert!(lines_of_maps() <= now + 2, "{now} mappings before, {} now", lines_of_maps());

    neighbour.check();
    assert_eq!(books(&neighbour), before);
    assert!(kept.iter().all(|&b| b == 0x5a));
}

#[test]
fn of_two_failed_steps_the_first_in_time_is_told() {
    let _alone = alone();
    let late = Duration::from_secs(1);
    let twice = [
        MapFault::Delay(MapStep::FaultIn, 1, late),
        MapFault::Fail(MapStep::FaultIn, 1, EBUSY),
        MapFault::Fail(MapStep::FaultIn, 3, EIO),
    ];
    // The first call waits while the other thread meets the third.
    let (w, error) = undone(&twice, &[], 2);
    assert_eq!(error.raw_os_error(), Some(EIO), "{error}");
    assert_eq!(w.registrar.register_calls(), 0);
    // A register call and a fault at once: whichever came first, one of the two is told, and all undone.
    let both = [MapFault::Fail(MapStep::FaultIn, 3, EIO)];
    let (_, error) = undone(&both, &[Fault::Delay(1, late), Fault::Register(1, EBUSY)], 2);
    assert_eq!(error.raw_os_error(), Some(EIO), "the register call was under way: {error}");
}

#[test]
fn what_fails_while_a_failure_is_undone_does_not_hide_it() {
    let _alone = alone();
    // One thread: the first arena is registered when the second cannot be faulted in.
    let first = MapFault::Fail(MapStep::FaultIn, 3, EIO);
    // The pages of one arena do not go by themselves, and then go with the rest.
    let (w, error) = undone(&[first, MapFault::Fail(MapStep::Unmap, 1, ENOMEM)], &[], 1);
    assert_eq!((error.raw_os_error(), w.registrar.register_calls()), (Some(EIO), 1));

    let heard = Arc::new(Mutex::new(Vec::new()));
    let sink = heard.clone();
    let leaked = leaked_bytes();
    let w = watched(&[first], &[Fault::Deregister(1, EBUSY)], 1);
    let builder = w.builder.on_event(move |e| {
        if let Event::DeregisterFailed { addr, len, error } = e {
            sink.lock().unwrap().push((*addr, *len, error.raw_os_error()));
        }
    });
    let error = builder.build().unwrap_err();
    assert_eq!(error.raw_os_error(), Some(EIO), "{error}");
    let all = places(&w.mapping);
    assert_eq!(*heard.lock().unwrap(), [(all[0].0, 8 * MIB, Some(EBUSY))]);
    assert_eq!((leaked_bytes() - leaked, w.registrar.live()), (8 << 20, 1));
    assert!(mapped(all[0].0, all[0].1), "the device may still write here");
    assert!(!mapped(all[1].0, all[1].1) && !mapped(all[2].0, all[2].1));
}

#[test]
fn a_failed_unmap_is_counted_and_reported_and_keeps_no_memory() {
    let _alone = alone();
    let resident = || status_kib("VmRSS");
    drop(watched(&[], &[], 1).builder.build().unwrap());
    for fails in [true, false] {
        let heard = Arc::new(Mutex::new(Vec::new()));
        let sink = heard.clone();
        let (leaked, before) = (leaked_bytes(), resident());
        let last = [MapFault::Fail(MapStep::Unmap, ARENAS + 1, ENOMEM)];
        let w = watched(if fails { &last } else { &[] }, &[], 1);
        let builder = w.builder.on_event(move |e| {
            if let Event::UnmapFailed { addr, len, error } = e {
                sink.lock().unwrap().push((*addr, *len, error.raw_os_error()));
            }
        });
        let pool = builder.build().unwrap();
        let all = places(&w.mapping);
        assert!(resident() >= before + (CAPACITY as u64 >> 10) / 2);
        pool.close().expect("the device let go of all");
        assert!(resident() < before + (CAPACITY as u64 >> 10) / 2, "the memory is back");
        assert_eq!(w.registrar.live(), 0);
        let heard = heard.lock().unwrap().clone();
        if !fails {
            assert_eq!((heard.len(), leaked_bytes()), (0, leaked));
            continue;
        }
        let [(addr, len, Some(ENOMEM))] = heard[..] else { panic!("{heard:?}") };
        assert_eq!(leaked_bytes() - leaked, len as u64);
        assert!(all.iter().all(|&(a, l)| addr <= a && a + l <= addr + len), "all of the range");
    }
    // Those of single arenas fail, and the last takes all.
    let each: Vec<_> = (1..=ARENAS).map(|k| MapFault::Fail(MapStep::Unmap, k, ENOMEM)).collect();
    let leaked = leaked_bytes();
    let w = watched(&each, &[], 1);
    drop(w.builder.build().unwrap());
    assert_eq!((leaked_bytes(), w.registrar.live()), (leaked, 0));
    assert!(places(&w.mapping).iter().all(|&(addr, len)| !mapped(addr, len)));
}

#[test]
fn a_step_that_takes_longer_changes_nothing_else() {
    let _alone = alone();
    let late = Duration::from_millis(50);
    let slow = [
        MapFault::Delay(MapStep::Reserve, 1, late),
        MapFault::Delay(MapStep::Map, 2, late),
        MapFault::Delay(MapStep::FaultIn, 1, late),
        MapFault::Delay(MapStep::Table, 1, late),
        MapFault::Delay(MapStep::Unmap, 2, late),
    ];
    let w = watched(&slow, &[], 2);
    let pool = w.builder.build().unwrap();
    assert_eq!((pool.capacity(), w.registrar.register_calls()), (CAPACITY, ARENAS));
    let arenas = pool.arenas();
    assert!(arenas.iter().any(|a| a.fault_in_time >= late) && arenas[1].map_time >= late);
    drop(pool);
    assert_eq!(w.registrar.live(), 0);
}

#[test]
fn pages_of_a_size_can_be_refused_as_on_a_machine_without() {
    let _alone = alone();
    let huge = PageSize::Huge2M;
    let missing = Arc::new(Mutex::new(Vec::new()));
    let sink = missing.clone();
    let refuse = [MapFault::Refuse(MapStep::Map, huge.bytes(), ENOMEM)];
    let w = watched(&refuse, &[], 2);
    let pool = w
        .builder
        .pages(Pages::Prefer(huge))
        .on_event(move |e| {
            if let Event::HugepagesMissing { arena, page_size, .. } = e {
                sink.lock().unwrap().push((*arena, *page_size));
            }
        })
        .build()
        .unwrap();
    assert!(pool.arenas().iter().all(|a| a.page_size == 4096));
    let expected: Vec<_> = (0..ARENAS as usize).map(|i| (i, huge.bytes())).collect();
    assert_eq!(*missing.lock().unwrap(), expected);
    // Base pages refused as well: the last that was tried is told.
    let all = [refuse[0], MapFault::Refuse(MapStep::Map, 4096, EIO)];
    let w = watched(&all, &[], 2);
    let error = w.builder.pages(Pages::Prefer(huge)).build().unwrap_err();
    assert!(matches!(error, BuildError::Back { arena: 0, page_size: 4096, .. }), "{error}");
    assert_eq!(error.raw_os_error(), Some(EIO));
    assert_eq!(w.registrar.register_calls(), 0);
}
