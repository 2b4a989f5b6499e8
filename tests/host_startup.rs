//! Start-up on the software device: optional rights, several threads and their roll-back, progress, nodes.
//! Roll-back is looked at in the kernel's list of mappings, so the tests take turns.
#![cfg(feature = "fault")]
#![allow(clippy::unwrap_used)]

mod common;

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use common::{alone, mapped, soft, status_kib};
use pinpool::{
    Access, BuildError, Builder, Device, Numa, PageSize, Pages, Progress, Stage,
    device::{Fault, FaultyRegistrar},
};

const EIO: i32 = 5;
const ENOMEM: i32 = 12;
const EBUSY: i32 = 16;
const EINVAL: i32 = 22;
const EOPNOTSUPP: i32 = 95;
const MIB: usize = 1 << 20;

/// A builder over the software device, behind a registrar with these faults.
fn faulty(capacity: usize, faults: &[Fault]) -> (FaultyRegistrar, Builder) {
    let registrar = FaultyRegistrar::new(&Device::soft());
    let registrar = faults.iter().fold(registrar, |r, f| r.fault(*f));
    (registrar.clone(), soft(capacity).device(Device::custom(registrar)))
}

#[test]
fn b11_an_optional_right_that_is_refused_is_done_without_once() {
    let _alone = alone();
    let relaxed = Access::RELAXED_ORDERING;
    let required = Access::LOCAL_WRITE | Access::REMOTE_READ;
    for errno in [EINVAL, EOPNOTSUPP] {
        let (registrar, builder) = faulty(2 * MIB, &[Fault::Refuse(relaxed, errno)]);
        let pool =
            builder.access(required).optional_access(relaxed).arena_size(2 * MIB).build().unwrap();
        let asked: Vec<_> = registrar.requests().iter().map(|r| r.access).collect();
        assert_eq!(asked, [required | relaxed, required], "one more call, without");
        assert_eq!(pool.arenas()[0].access, required, "the effective rights");
    }
    // Granted: one call, and the effective rights have it.
    let (registrar, builder) = faulty(2 * MIB, &[]);
    let pool = builder.access(required).optional_access(relaxed).build().unwrap();
    assert_eq!(pool.arenas()[0].access, required | relaxed);
    assert_eq!(registrar.register_calls(), 1);
}

#[test]
fn b11_a_required_right_that_is_refused_is_an_error() {
    let _alone = alone();
    let relaxed = Access::RELAXED_ORDERING;
    let required = Access::LOCAL_WRITE | relaxed;
    let (registrar, builder) = faulty(2 * MIB, &[Fault::Refuse(relaxed, EINVAL)]);
    // Optional as well changes nothing: there is nothing to leave out.
    let error = builder.access(required).optional_access(relaxed).build().unwrap_err();
    assert_eq!((error.raw_os_error(), registrar.register_calls()), (Some(EINVAL), 1));
    assert!(error.to_string().contains("RELAXED_ORDERING"), "{error}");
}

#[test]
fn b11_another_bad_right_or_errno_is_not_retried_away() {
    let _alone = alone();
    let (relaxed, window) = (Access::RELAXED_ORDERING, Access::MW_BIND);
    let required = Access::LOCAL_WRITE | window;
    let (registrar, builder) = faulty(2 * MIB, &[Fault::Refuse(window, EINVAL)]);
    let error = builder.access(required).optional_access(relaxed).build().unwrap_err();
    assert_eq!((error.raw_os_error(), registrar.register_calls()), (Some(EINVAL), 2));
    assert!(error.to_string().contains("MW_BIND"), "{error}");

    let (registrar, builder) = faulty(2 * MIB, &[Fault::Refuse(relaxed, ENOMEM)]);
    let error = builder.optional_access(relaxed).build().unwrap_err();
    assert_eq!((error.raw_os_error(), registrar.register_calls()), (Some(ENOMEM), 1));

    let (registrar, builder) = faulty(2 * MIB, &[]);
    let error = builder.optional_access(Access::REMOTE_ATOMIC).build().unwrap_err();
    assert!(matches!(error, BuildError::Access { .. }), "{error}");
    assert_eq!(registrar.register_calls(), 0);
}

#[test]
fn b11_hugetlb_is_asked_for_on_hugepages_only() {
    let _alone = alone();
    for pages in [Pages::Base, Pages::Prefer(PageSize::Huge2M)] {
        let (registrar, builder) = faulty(2 * MIB, &[]);
        let pool = builder.pages(pages).optional_access(Access::HUGETLB).build().unwrap();
        let arena = pool.arenas()[0];
        let huge = arena.page_size == PageSize::Huge2M.bytes();
        assert_eq!(registrar.requests()[0].access.contains(Access::HUGETLB), huge);
        assert_eq!(arena.access.contains(Access::HUGETLB), huge);
    }
}

#[test]
fn arenas_come_up_on_several_threads_in_their_order() {
    let _alone = alone();
    for threads in [0, 1, 2, 5, 10_000] {
        let (registrar, builder) = faulty(37 * MIB, &[Fault::Delay(1, Duration::from_millis(20))]);
        let pool = builder.arena_size(8 * MIB).start_threads(threads).build().unwrap();
        assert_eq!((pool.capacity(), registrar.register_calls()), (37 * MIB, 5));
        let arenas = pool.arenas();
        assert_eq!(arenas.iter().map(|a| a.len >> 20).collect::<Vec<_>>(), [8, 8, 8, 8, 5]);
        assert!(arenas.windows(2).all(|w| w[0].addr < w[1].addr), "by address");
        for arena in arenas {
            let p = arena.addr.as_ptr();
            assert_eq!(pool.keys_of(p), Some(arena.keys), "each has its own region's keys");
        }
        let bufs: Vec<_> = std::iter::from_fn(|| pool.alloc(MIB).ok()).collect();
        assert_eq!(bufs.len(), 37);
        drop(bufs);
        pool.close().unwrap();
        assert_eq!((registrar.deregister_calls(), registrar.live()), (5, 0));
    }
}

/// Fails a start of eight arenas on four threads, and checks that nothing of it is left.
fn fails(faults: &[Fault]) -> (FaultyRegistrar, BuildError) {
    let locked = status_kib("VmLck");
    let (registrar, builder) = faulty(8 * MIB, faults);
    let error = builder.arena_size(MIB).start_threads(4).build().unwrap_err();
    assert_eq!(registrar.live(), 0);
    assert_eq!(status_kib("VmLck"), locked);
    let places = registrar.requests();
    for r in &places {
        assert!(!mapped(r.addr, r.len), "arena at {:#x} is still mapped", r.addr);
    }
    let addrs: std::collections::HashSet<_> = places.iter().map(|r| r.addr).collect();
    assert_eq!(addrs.len(), places.len(), "each arena was tried once");
    (registrar, error)
}

#[test]
fn a_failed_start_on_several_threads_is_undone_whichever_call_fails() {
    let _alone = alone();
    for k in 1..=8 {
        let (registrar, error) = fails(&[Fault::Register(k, EIO)]);
        assert!(matches!(error, BuildError::Register { arenas: 8, .. }), "{error}");
        assert_eq!(error.raw_os_error(), Some(EIO));
        let calls = registrar.register_calls();
        // Other threads' calls may be under way, or begin before the failed one is noted.
        assert!((k..=8).contains(&calls), "{calls} calls");
        assert_eq!(registrar.deregister_calls(), calls - 1, "one for each that succeeded");
    }
}

#[test]
fn calls_under_way_when_another_fails_are_waited_for_and_undone() {
    let _alone = alone();
    let late = Duration::from_millis(200);
    let (registrar, error) =
        fails(&[Fault::Delay(1, late), Fault::Delay(3, late), Fault::Register(2, EIO)]);
    assert_eq!(error.raw_os_error(), Some(EIO));
    assert_eq!(registrar.deregister_calls(), registrar.register_calls() - 1);
}

#[test]
fn of_two_failures_the_first_in_time_is_told() {
    let _alone = alone();
    let late = Duration::from_secs(1);
    let (registrar, error) =
        fails(&[Fault::Delay(1, late), Fault::Register(1, EIO), Fault::Register(2, EBUSY)]);
    assert_eq!(error.raw_os_error(), Some(EBUSY), "the second call failed while the first waited");
    assert_eq!(registrar.deregister_calls(), registrar.register_calls() - 2);
}

#[test]
fn progress_comes_in_order_and_ends_at_the_whole() {
    let _alone = alone();
    for threads in [1, 4] {
        let heard = Arc::new(Mutex::new(Vec::new()));
        let sink = heard.clone();
        let pool = soft(100 * MIB)
            .arena_size(32 * MIB)
            .start_threads(threads)
            .on_progress(move |p: Progress| sink.lock().unwrap().push(p))
            .build()
            .unwrap();
        let total = pool.capacity() as u64;
        for (stage, calls) in [(Stage::FaultIn, 25), (Stage::Register, 4)] {
            let heard = heard.lock().unwrap();
            let done: Vec<_> =
                heard.iter().filter(|p| p.stage == stage).map(|p| p.bytes_done).collect();
            assert_eq!(done.len(), calls, "{stage:?}: {done:?}");
            assert!(done.is_sorted() && done.last() == Some(&total), "{stage:?}: {done:?}");
            assert!(heard.iter().all(|p| p.bytes_total == total));
        }
    }
}

#[test]
fn a_hook_that_panics_ends_the_start_and_leaves_nothing() {
    let _alone = alone();
    let (registrar, builder) = faulty(8 * MIB, &[]);
    let builder = builder.arena_size(MIB).start_threads(4).on_progress(|p| {
        assert!(p.stage == Stage::FaultIn || p.bytes_done < 3 << 20, "on purpose");
    });
    let built = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| builder.build().is_ok()));
    assert!(built.is_err());
    assert_eq!(registrar.live(), 0);
    assert!(registrar.requests().iter().all(|r| !mapped(r.addr, r.len)));
}

#[test]
fn transparent_hugepages_are_asked_for_on_base_pages() {
    let _alone = alone();
    if !std::path::Path::new("/sys/kernel/mm/transparent_hugepage").exists() {
        return;
    }
    let pool = soft(4 * MIB).build().unwrap();
    let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let head = format!("\n{:x}-", pool.arenas()[0].addr.as_ptr() as usize);
    let (_, entry) = smaps.split_once(&head).expect("the arena's mapping");
    let flags = entry.lines().find_map(|l| l.strip_prefix("VmFlags:")).expect("flags");
    assert!(flags.split_whitespace().any(|f| f == "hg"), "MADV_HUGEPAGE: {flags}");
}

#[test]
fn a_node_that_is_not_there_is_named_before_anything_is_done() {
    let _alone = alone();
    let (registrar, builder) = faulty(2 * MIB, &[]);
    let error = builder.numa(Numa::Node(77)).build().unwrap_err();
    assert!(matches!(error, BuildError::Node { node: 77, .. }), "{error}");
    for part in ["NUMA node 77", "2 MiB", "does not exist"] {
        assert!(error.to_string().contains(part), "{part} in {error}");
    }
    assert_eq!(registrar.register_calls(), 0);
}

#[test]
fn a_node_without_so_much_memory_is_named_with_what_is_free() {
    let _alone = alone();
    // Nothing is faulted in: that would end this process.
    let (registrar, builder) = faulty(1 << 42, &[]);
    let error = builder.numa(Numa::Node(0)).build().unwrap_err();
    match error {
        BuildError::Node { node: 0, free: Some(free), page_size: 4096, .. } => assert!(free > 0),
        // Where the whole machine has less, or the right to lock so much is missing, that is said first.
        BuildError::Preflight(_) | BuildError::Memlock { .. } => {}
        other => panic!("{other}"),
    }
    assert_eq!(registrar.register_calls(), 0);
}

#[test]
fn each_wish_for_a_node_that_is_there_is_served() {
    let _alone = alone();
    for numa in [Numa::OfDevice, Numa::Any, Numa::Interleave, Numa::Node(0)] {
        let pool = soft(4 * MIB).numa(numa).build().unwrap();
        let node = pool.arenas()[0].node;
        if numa == Numa::Node(0) {
            assert!(matches!(node, Some(0) | None), "{node:?}");
        }
    }
}
