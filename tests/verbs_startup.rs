//! Start-up on a verbs device:
//! - an odd length on hugepages is one register call of whole pages, also with fork support (B05);
//! - pages lie on the node asked for, whoever faults them in (B34);
//! - keys made at the start serve after 70,000 other regions came and went (B38);
//! - several threads pin what one pins, and give all of it back when one fails;
//! - whichever call of whichever step fails, `VmPin` and free hugepages are where they were;
//! - pages of 1 GiB are had, and bytes move through them.
#![allow(clippy::print_stderr)]
#![cfg(all(
    feature = "loopback",
    feature = "fault",
    any(feature = "rdma-sys", feature = "rdma-mummy-sys")
))]

#[path = "common/verbs.rs"]
mod common;

use std::{env, fs, process::Command};

use common::{alone, check, device, fill, free_hugepages, free_on, two_nodes, vm_pin};
use pinpool::{
    Access, BuildError, Builder, Device, Numa, PageSize, Pages, Pool,
    device::{Fault, FaultyMapping, FaultyRegistrar, MapFault, MapStep, MrRequest, Registrar},
    leaked_bytes,
    loopback::Pair,
};

const MIB: usize = 1 << 20;
const EIO: i32 = 5;
const ENOMEM: i32 = 12;
const HUGE: Pages = Pages::Require(PageSize::Huge2M);
const ALL: Access = Access::LOCAL_WRITE.union(Access::REMOTE);

/// A builder whose calls to the device are recorded.
fn recorded(capacity: usize, faults: &[Fault]) -> (FaultyRegistrar, Builder) {
    let registrar = faults.iter().fold(FaultyRegistrar::new(&device()), |r, f| r.fault(*f));
    (registrar.clone(), Pool::builder().device(Device::custom(registrar)).capacity(capacity))
}

/// Runs one test of this program again, in a process with this variable set.
fn again_with(test: &str, set: &[(&str, &str)], unset: &[&str]) {
    let mut command = Command::new(env::current_exe().expect("own path"));
    command.args(["--exact", test, "--nocapture", "--test-threads=1"]);
    unset.iter().for_each(|name| {
        command.env_remove(name);
    });
    let child = command.envs(set.iter().copied()).output().expect("start");
    let (out, err) =
        (String::from_utf8_lossy(&child.stdout), String::from_utf8_lossy(&child.stderr));
    assert!(child.status.success(), "{}\n{out}\n{err}", child.status);
    assert!(out.contains("1 passed"), "the child ran the test: {out}");
}

const CHILD: &str = "PINPOOL_TEST_STARTUP_CHILD";

#[test]
fn b05_an_odd_length_is_registered_once_on_whole_hugepages_with_fork_support_too() {
    if env::var_os(CHILD).is_some() {
        return an_odd_length_is_registered_once();
    }
    let _alone = alone();
    an_odd_length_is_registered_once();
    let name = "b05_an_odd_length_is_registered_once_on_whole_hugepages_with_fork_support_too";
    again_with(name, &[(CHILD, "1"), ("RDMAV_FORK_SAFE", "1")], &["RDMAV_HUGEPAGES_SAFE"]);
}

fn an_odd_length_is_registered_once() {
    let (registrar, builder) = recorded(5 * MIB + 123, &[]);
    let pool = builder.pages(HUGE).access(ALL).build().expect("the first call works");
    let [call] = registrar.requests()[..] else { panic!("{:?}", registrar.requests()) };
    assert_eq!((call.len, call.addr % (2 * MIB), call.page_size), (6 * MIB, 0, 2 * MIB));
    assert_eq!((pool.capacity(), registrar.live()), (6 * MIB, 1));
    drop(pool);
    assert_eq!(registrar.live(), 0);
}

/// Pages on each node, of the mappings that overlap a range, as numa_maps has them.
fn pages_on_nodes(addr: usize, len: usize) -> Vec<(u32, u64)> {
    let maps = fs::read_to_string("/proc/self/numa_maps").expect("a kernel with NUMA");
    let mut found: Vec<(u32, u64)> = Vec::new();
    for line in maps.lines() {
        let mut words = line.split_whitespace();
        let start = words.next().and_then(|w| usize::from_str_radix(w, 16).ok()).expect("address");
        if !(addr..addr + len).contains(&start) {
            continue;
        }
        for word in words {
            let Some((node, pages)) = word.strip_prefix('N').and_then(|w| w.split_once('=')) else {
                continue;
            };
            let (node, pages) = (node.parse().expect("node"), pages.parse().expect("pages"));
            match found.iter_mut().find(|(n, _)| *n == node) {
                Some((_, all)) => *all += pages,
                None => found.push((node, pages)),
            }
        }
    }
    found.sort_unstable();
    found
}

fn pin_to_node(node: u32) {
    let path = format!("/sys/devices/system/node/node{node}/cpulist");
    let list = fs::read_to_string(path).expect("a node");
    let cpu: usize =
        list.trim().split([',', '-']).next().and_then(|c| c.parse().ok()).expect("cpu");
    // SAFETY: a set of plain bits, which the call reads; `cpu` is one of the system's.
    let done = unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(cpu, &mut set);
        libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &set)
    };
    assert_eq!(done, 0);
}

#[test]
fn b34_pages_lie_on_the_node_asked_for_whoever_faults_them_in() {
    let _alone = alone();
    let device = device();
    if !two_nodes() {
        return;
    }
    // A thread of its own, whose pinning ends with it; those that it starts inherit it.
    let pinned = std::thread::spawn(move || {
        pin_to_node(0);
        for node in [1, 0] {
            for (pages, page) in [(Pages::Base, 4096), (HUGE, 2 * MIB)] {
                for threads in [1, 3] {
                    let pool = Pool::builder()
                        .device(device.clone())
                        .capacity(40 * MIB)
                        .arena_size(32 * MIB)
                        .pages(pages)
                        .numa(Numa::Node(node))
                        .start_threads(threads)
                        .build()
                        .expect("build");
                    let arenas = pool.arenas();
                    assert_eq!(arenas.len(), 2);
                    assert!(arenas.iter().all(|a| a.page_size == page && a.node == Some(node)));
                    // From the first to the end of the second, with nothing in between. Base pages
                    // that are huge behind the scenes count as base pages.
                    let start = arenas[0].addr.as_ptr() as usize;
                    let end = arenas[1].addr.as_ptr() as usize + arenas[1].len;
                    let found = pages_on_nodes(start, end - start);
                    assert_eq!(found, [(node, (40 * MIB / page) as u64)], "{pages:?}");
                }
            }
        }
        // Interleaved, both nodes have their share; the device here has no node, so none is preferred.
        let build = |numa| {
            Pool::builder().device(device.clone()).capacity(16 * MIB).pages(HUGE).numa(numa).build()
        };
        let pool = build(Numa::Interleave).expect("build");
        let addr = pool.arenas()[0].addr.as_ptr() as usize;
        assert_eq!(pages_on_nodes(addr, 16 * MIB), [(0, 4), (1, 4)]);
        assert_eq!(pool.arenas()[0].node, None, "on several");
        drop(pool);
        build(Numa::OfDevice).expect("no node is no error");
        the_devices_node_is_preferred();
        lacking_nodes_are_named(&device);
    });
    if let Err(panic) = pinned.join() {
        std::panic::resume_unwind(panic);
    }
}

/// On a device that hangs on node 1: its node by default, and others where that has too few.
fn the_devices_node_is_preferred() {
    let free = [0, 1].map(free_on);
    let build = |pages, capacity| {
        let registrar = FaultyRegistrar::new(&device()).numa_node(1);
        let builder = Pool::builder().device(Device::custom(registrar)).capacity(capacity);
        builder.pages(pages).build().expect("build")
    };
    for (pages, page) in [(Pages::Base, 4096), (HUGE, 2 * MIB)] {
        let pool = build(pages, 16 * MIB);
        let arena = pool.arenas()[0];
        assert_eq!((arena.node, arena.page_size), (Some(1), page));
        let addr = arena.addr.as_ptr() as usize;
        assert_eq!(pages_on_nodes(addr, 16 * MIB), [(1, (16 * MIB / page) as u64)]);
    }
    let pages = free[1] as usize + 3;
    let pool = build(HUGE, pages * 2 * MIB);
    let addr = pool.arenas()[0].addr.as_ptr() as usize;
    assert_eq!(pages_on_nodes(addr, pages * 2 * MIB), [(0, 3), (1, free[1])]);
}

/// More hugepages of one node than it has, and a node that there is not.
fn lacking_nodes_are_named(device: &Device) {
    let (start, before) = (vm_pin(), [0, 1].map(free_on));
    let ask = |node, pages: Pages, capacity| {
        Pool::builder()
            .device(device.clone())
            .capacity(capacity)
            .pages(pages)
            .numa(Numa::Node(node))
            .build()
    };
    match ask(1, HUGE, (before[1] as usize + 1) * 2 * MIB).expect_err("one page too many") {
        e @ BuildError::Node { node: 1, free: Some(free), page_size, .. } => {
            assert_eq!((free, page_size), (before[1] * 2 * MIB as u64, 2 * MIB));
            assert!(e.to_string().contains(&format!("{} such pages are free", before[1])), "{e}");
        }
        other => panic!("{other}"),
    }
    // More than one of the two nodes has, and less than both together.
    let much = 5 << 30;
    match ask(1, Pages::Base, much).expect_err("more than the node has") {
        BuildError::Node { node: 1, free: Some(free), .. } => {
            assert!(free > 0 && free < much as u64)
        }
        other => panic!("{other}"),
    }
    assert!(matches!(ask(7, HUGE, MIB), Err(BuildError::Node { node: 7, free: None, .. })));
    assert_eq!((vm_pin(), [0, 1].map(free_on)), (start, before));
}

#[test]
fn several_threads_pin_what_one_pins_and_give_it_all_back() {
    let _alone = alone();
    let start = vm_pin();
    for pages in [Pages::Base, HUGE] {
        let (registrar, builder) = recorded(40 * MIB, &[]);
        let pool =
            builder.pages(pages).arena_size(8 * MIB).start_threads(4).build().expect("build");
        assert_eq!((vm_pin() - start, registrar.register_calls()), (40 << 20, 5));
        drop(pool);
        assert_eq!(vm_pin(), start);
        for k in 1..=5 {
            let (registrar, builder) = recorded(40 * MIB, &[Fault::Register(k, EIO)]);
            let builder = builder.pages(pages).arena_size(8 * MIB).start_threads(4);
            let error = builder.build().expect_err("a call fails");
            assert_eq!(error.raw_os_error(), Some(EIO), "{error}");
            assert_eq!((vm_pin(), registrar.live()), (start, 0));
        }
    }
}

#[test]
fn each_call_of_each_step_that_fails_leaves_nothing_pinned_mapped_or_taken() {
    let _alone = alone();
    let node = if two_nodes() { 1 } else { 0 };
    // A neighbour on the same device, whose books must not move.
    let neighbour = Pool::builder().device(device()).capacity(MIB).pages(Pages::Base);
    let neighbour = neighbour.access(ALL).build().expect("a neighbour");
    let mut kept = neighbour.alloc(100_000).expect("alloc");
    fill(&mut kept, 7);
    let books = |p: &Pool| (p.stats().live, p.stats().cached, p.stats().free);
    let (start, free, before) = (vm_pin(), free_hugepages(), books(&neighbour));
    let mapped = |at: usize, len: usize| {
        let maps = fs::read_to_string("/proc/self/maps").expect("procfs");
        maps.lines().any(|l| {
            let (a, b) = l.split(' ').next().and_then(|r| r.split_once('-')).expect("a range");
            let [a, b] = [a, b].map(|n| usize::from_str_radix(n, 16).expect("hex"));
            l.contains(" rw") && a < at + len && at < b
        })
    };
    let build = |mapping: &FaultyMapping, faults: &[Fault], pages, threads| {
        let (registrar, builder) = recorded(24 * MIB, faults);
        let builder = builder.pages(pages).arena_size(8 * MIB).numa(Numa::Node(node));
        (registrar, builder.start_threads(threads).faulty_mapping(mapping).build())
    };
    // Three arenas, faulted in by two calls each.
    let steps = [
        (MapStep::Reserve, 1),
        (MapStep::Map, 3),
        (MapStep::Bind, 3),
        (MapStep::FaultIn, 6),
        (MapStep::Table, 3),
    ];
    for (pages, threads) in [(Pages::Base, 1), (HUGE, 1), (HUGE, 3)] {
        let dry = FaultyMapping::new();
        build(&dry, &[], pages, threads).1.expect("no fault");
        let undone = |registrar: &FaultyRegistrar, mapping: &FaultyMapping, what: &str| {
            assert_eq!((vm_pin(), free_hugepages()), (start, free), "{what}");
            assert_eq!((registrar.live(), leaked_bytes()), (0, 0), "{what}");
            for r in mapping.records().iter().filter(|r| r.step == MapStep::Map) {
                assert!(!mapped(r.addr, r.len), "{what}: {:#x} is still mapped", r.addr);
            }
        };
        for (step, n) in steps {
            assert_eq!(dry.calls(step), n, "{step:?}");
            for k in 1..=n {
                // On one node a failed bind changes nothing, and is none.
                if step == MapStep::Bind && node == 0 {
                    continue;
                }
                let mapping = FaultyMapping::new().fault(MapFault::Fail(step, k, EIO));
                let (registrar, built) = build(&mapping, &[], pages, threads);
                let error = built.expect_err("a step fails");
                let what = format!("{pages:?}, {threads} threads, {step:?} {k} of {n}: {error}");
                assert_eq!(error.raw_os_error(), Some(EIO), "{what}");
                if matches!(step, MapStep::Map | MapStep::Bind | MapStep::FaultIn) {
                    assert!(matches!(error, BuildError::Node { .. }), "it is named: {what}");
                }
                undone(&registrar, &mapping, &what);
            }
        }
        for k in 1..=3 {
            let mapping = FaultyMapping::new();
            let (registrar, built) = build(&mapping, &[Fault::Register(k, EIO)], pages, threads);
            assert_eq!(built.expect_err("refused").raw_os_error(), Some(EIO));
            undone(&registrar, &mapping, &format!("register {k}"));
        }
        // Twice: while a refusal is undone, an arena cannot be unmapped, and goes with the rest.
        if threads == 1 {
            let mapping = FaultyMapping::new().fault(MapFault::Fail(MapStep::Unmap, 1, ENOMEM));
            let (registrar, built) = build(&mapping, &[Fault::Register(2, EIO)], pages, 1);
            assert_eq!(built.expect_err("refused").raw_os_error(), Some(EIO), "the first");
            undone(&registrar, &mapping, "twice");
        }
    }
    neighbour.check();
    assert_eq!(books(&neighbour), before);
    check(&kept, 7);
}

#[test]
fn b06_pages_of_1_gib_are_had_in_the_guest_and_bytes_move_through_them() {
    let _alone = alone();
    let dir = "/sys/kernel/mm/hugepages/hugepages-1048576kB";
    let count = |file: &str| {
        let text = fs::read_to_string(format!("{dir}/{file}"));
        text.ok().and_then(|t| t.trim().parse::<u64>().ok())
    };
    let guest = env::var_os("PINPOOL_GUEST").is_some();
    let free = count("free_hugepages").unwrap_or(0);
    if free == 0 {
        assert!(!guest, "the guest has a page of 1 GiB");
        return eprintln!("no page of 1 GiB is free here; left out");
    }
    let (device, start) = (device(), vm_pin());
    let built = Pool::builder().device(device.clone()).access(ALL).capacity(5 * MIB);
    let pool = built.pages(Pages::Require(PageSize::Huge1G)).build().expect("a page of 1 GiB");
    let arena = pool.arenas()[0];
    assert_eq!((pool.capacity(), arena.page_size, arena.len), (1 << 30, 1 << 30, 1 << 30));
    assert_eq!((vm_pin() - start, count("free_hugepages")), (1 << 30, Some(free - 1)));
    let smaps = fs::read_to_string("/proc/self/smaps").expect("procfs");
    let head = format!("{:x}-", arena.addr.as_ptr() as usize);
    let entry = smaps.split_once(&format!("\n{head}")).expect("the mapping").1;
    let page = entry.lines().find_map(|l| l.strip_prefix("KernelPageSize:")).expect("a size");
    assert_eq!(page.trim(), "1048576 kB");
    // The far end of it.
    let bufs: Vec<_> = std::iter::from_fn(|| pool.alloc(256 * MIB).ok()).collect();
    assert_eq!(bufs.len(), 4);
    let mut pair = Pair::connect(&device).expect("connect");
    let last = bufs.into_iter().max_by_key(|b| b.as_ptr()).expect("four");
    let mut local = pool.alloc(4096).expect("alloc");
    fill(&mut local, 3);
    let at = last.remote().expect("a remote right");
    let offset = last.len() - 4096;
    // SAFETY: both buffers are this test's, and nothing else uses them until it returns.
    unsafe { pair.write(local.sge(), at.addr + offset as u64, at.rkey) }.expect("peers write");
    check(&last[offset..], 3);
    drop((last, local, pool));
    assert_eq!((vm_pin(), count("free_hugepages")), (start, Some(free)));
}

#[test]
fn b11_optional_rights_that_the_device_has_are_granted() {
    let _alone = alone();
    let optional = Access::RELAXED_ORDERING | Access::HUGETLB;
    let (registrar, builder) = recorded(4 * MIB, &[]);
    let pool = builder.pages(HUGE).optional_access(optional).build().expect("build");
    let arena = pool.arenas()[0];
    let calls = registrar.requests();
    assert_eq!(calls[0].access, Access::LOCAL_WRITE | optional, "asked with them first");
    assert_eq!(arena.access, calls.last().expect("a call").access, "the rights of the last call");
    assert!(calls.len() <= 2);
}

/// A device that numbers its regions in 16 bits runs out of numbers, or gives one out twice.
const CYCLES: u32 = 70_000;

#[test]
fn b38_keys_made_at_the_start_serve_after_70_000_other_regions() {
    let _alone = alone();
    let device = device();
    let verbs = device.as_verbs().expect("a verbs device");
    let mut pair = Pair::connect(&device).expect("connect");
    let build = |access| {
        let builder = Pool::builder().device(device.clone()).access(access);
        builder.pages(Pages::Base).capacity(MIB).build().expect("build")
    };
    let (pool, scratch) = (build(ALL), build(Access::LOCAL_WRITE));
    let mut target = pool.alloc(4096).expect("alloc");
    let mut local = pool.alloc(4096).expect("alloc");
    let moved = |target: &mut pinpool::Buf, local: &mut pinpool::Buf, pair: &mut Pair, seed| {
        let at = target.remote().expect("a remote right");
        fill(local, seed);
        // SAFETY: both buffers are this test's, and nothing else uses them until it returns.
        unsafe { pair.write(local.sge(), at.addr, at.rkey) }.expect("peers write");
        check(target, seed);
        local.fill(0);
        // SAFETY: as above.
        unsafe { pair.read(local.sge(), at.addr, at.rkey) }.expect("peers read");
        check(local, seed);
    };
    moved(&mut target, &mut local, &mut pair, 1);
    let page = scratch.arenas()[0].addr;
    let request = MrRequest { addr: page, len: 4096, page_size: 4096, access: ALL };
    for i in 0..CYCLES {
        // SAFETY: the page is the scratch pool's, mapped until after this loop.
        let made = unsafe { verbs.register(&request) };
        let made = made.unwrap_or_else(|e| panic!("register {i} of {CYCLES}: {e}"));
        assert!(Some(made.rkey) != target.keys().rkey, "the pool's own key, given out again");
        // SAFETY: made just now, by this device.
        unsafe { verbs.deregister(made.handle) }.unwrap_or_else(|e| panic!("deregister {i}: {e}"));
    }
    moved(&mut target, &mut local, &mut pair, 2);
}
