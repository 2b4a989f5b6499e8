//! What a pool pins and gives back, as the kernel counts it:
//! - `VmPin` rises by the capacity and is back where it was after the last handle and buffer;
//! - a pool that fails half built has given everything back;
//! - above the memlock limit, without privilege or as root of another user namespace, the error has the numbers and nothing stays pinned
//!   (B01).
#![cfg(all(feature = "loopback", any(feature = "rdma-sys", feature = "rdma-mummy-sys")))]

#[path = "common/verbs.rs"]
mod common;

use std::{env, process::Command};

use common::{Registered, alone, device, free_hugepages, vm_pin};
use pinpool::{Access, BuildError, Device, PageSize, Pages, Pool, Problem};

#[test]
fn vm_pin_returns_to_where_it_was() {
    let _alone = alone();
    let device = device();
    let start = vm_pin();
    for pages in [Pages::Base, Pages::Require(PageSize::Huge2M)] {
        let pool = Pool::builder()
            .device(device.clone())
            .capacity(20 << 20)
            .arena_size(8 << 20)
            .pages(pages)
            .build()
            .expect("build");
        assert_eq!(pool.arenas().len(), 3);
        assert_eq!(vm_pin() - start, 20 << 20, "{pages:?}");
        let buf = pool.alloc(5000).expect("alloc");
        drop(pool);
        assert_eq!(vm_pin() - start, 20 << 20, "a live buffer keeps its arena");
        drop(buf);
        assert_eq!(vm_pin(), start, "{pages:?}");
    }
}

#[cfg(feature = "fault")]
#[test]
fn a_pool_that_fails_half_built_leaves_nothing_pinned() {
    use pinpool::device::{Fault, FaultyRegistrar};
    const EIO: i32 = 5;
    let _alone = alone();
    let device = device();
    let (start, free) = (vm_pin(), free_hugepages());
    assert!(free >= 4, "this test needs some 2 MiB hugepages, {free} are free");
    // Four arenas, of which the device takes three.
    let registrar = FaultyRegistrar::new(&device).fault(Fault::Register(4, EIO));
    let refused = Pool::builder()
        .device(Device::custom(registrar.clone()))
        .capacity(4 * HUGE)
        .arena_size(HUGE)
        .pages(Pages::Require(PageSize::Huge2M))
        .build()
        .expect_err("the fourth is refused");
    assert!(matches!(refused, BuildError::Register { arena: 3, .. }), "{refused:?}");
    assert_eq!(refused.raw_os_error(), Some(EIO));
    assert_eq!((registrar.deregister_calls(), registrar.live()), (3, 0));
    assert_eq!((vm_pin(), free_hugepages()), (start, free));
}

#[test]
fn hugepages_that_lack_are_counted_before_the_first_is_mapped() {
    let _alone = alone();
    let device = device();
    let (start, free) = (vm_pin(), free_hugepages());
    let refused = Pool::builder()
        .device(device)
        .capacity((free as usize + 1) * HUGE)
        .arena_size(HUGE)
        .pages(Pages::Require(PageSize::Huge2M))
        .build()
        .expect_err("more hugepages than there are");
    match &refused {
        BuildError::Preflight(problems) => match problems.as_slice() {
            [Problem::Hugepages { needed, free: f, .. }] => {
                assert_eq!((*needed, *f), (free + 1, free));
            }
            other => panic!("{other:?}"),
        },
        other => panic!("{other:?}"),
    }
    assert!(refused.to_string().contains("nr_hugepages"), "{refused}");
    assert_eq!((vm_pin(), free_hugepages()), (start, free));
}

const HUGE: usize = 2 << 20;

const CHILD: &str = "PINPOOL_TEST_B01_CHILD";
const LIMIT: u64 = 1 << 20;
const ASKED: usize = 64 << 20;

#[test]
fn b01_a_small_memlock_limit_gives_the_numbers_and_leaves_nothing_pinned() {
    if env::var_os(CHILD).is_some() {
        // The device's file may be root's own, so open it first.
        let device = device();
        limit_memlock();
        drop_privileges();
        return limited(device);
    }
    let _alone = alone();
    device(); // fails here, not in the child, without one
    let name = "b01_a_small_memlock_limit_gives_the_numbers_and_leaves_nothing_pinned";
    in_child(Command::new(env::current_exe().expect("own path")), name);
}

#[test]
fn b01_root_of_another_user_namespace_is_held_to_the_limit_too() {
    if env::var_os(CHILD).is_some() {
        // SAFETY: asks for a number.
        assert_eq!(unsafe { libc::geteuid() }, 0);
        let status = std::fs::read_to_string("/proc/self/status").expect("procfs");
        let all = status.lines().find_map(|l| l.strip_prefix("CapEff:")).expect("rights").trim();
        let all = u64::from_str_radix(all, 16).expect("hex");
        const CAP_IPC_LOCK: u32 = 14;
        assert_eq!(all >> CAP_IPC_LOCK & 1, 1, "it has the right, in its own namespace");
        limit_memlock();
        return limited(device());
    }
    let _alone = alone();
    device();
    let mut command = Command::new("unshare");
    command.arg("-Ur").arg(env::current_exe().expect("own path"));
    in_child(command, "b01_root_of_another_user_namespace_is_held_to_the_limit_too");
}

/// Runs a test in a process of its own, which gives up rights for good.
fn in_child(mut command: Command, name: &str) {
    command.args(["--exact", name, "--nocapture", "--test-threads=1"]).env(CHILD, "1");
    let child = command.output().expect("start");
    let out = String::from_utf8_lossy(&child.stdout);
    let err = String::from_utf8_lossy(&child.stderr);
    assert!(child.status.success(), "{}\n{out}\n{err}", child.status);
    assert!(out.contains("1 passed"), "the child ran the test: {out}");
}

/// Under the limit, without the right to exceed it.
fn limited(device: Device) {
    let start = vm_pin();

    let refused = Pool::builder()
        .device(device.clone())
        .capacity(ASKED)
        .pages(Pages::Base)
        .build()
        .expect_err("64 MiB exceed 1 MiB");
    let text = refused.to_string();
    match refused {
        BuildError::Memlock { asked, pinned, soft, hard, .. } => {
            assert_eq!((asked, pinned, soft, hard), (ASKED as u64, start, LIMIT, LIMIT));
        }
        other => panic!("{other:?}"),
    }
    for part in ["64 MiB", "1 MiB soft", "1 MiB hard", "RLIMIT_MEMLOCK", "ulimit -l"] {
        assert!(text.contains(part), "{part:?} in {text}");
    }
    assert_eq!(vm_pin(), start);

    // The device itself, asked past the pool's own check, says ENOMEM and keeps nothing either.
    let e = Registered::try_new(&device, ASKED, Access::LOCAL_WRITE).err().expect("refused");
    assert_eq!(e.raw_os_error(), Some(libc::ENOMEM), "{e}");
    assert_eq!(vm_pin(), start);

    // What fits, works: neither refusal used the limit up.
    let pool = Pool::builder()
        .device(device)
        .capacity(512 << 10)
        .pages(Pages::Base)
        .build()
        .expect("512 KiB fit");
    assert_eq!(vm_pin() - start, 512 << 10);
    drop(pool);
    assert_eq!(vm_pin(), start);
}

fn limit_memlock() {
    let limit = libc::rlimit { rlim_cur: LIMIT, rlim_max: LIMIT };
    // SAFETY: `limit` is valid for the call.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_MEMLOCK, &limit) }, 0);
}

fn drop_privileges() {
    const NOBODY: libc::uid_t = 65534;
    // SAFETY: the calls take numbers, and no list of groups.
    unsafe {
        if libc::geteuid() == 0 {
            assert_eq!(libc::setgroups(0, std::ptr::null()), 0);
            assert_eq!(libc::setgid(NOBODY), 0);
            assert_eq!(libc::setuid(NOBODY), 0);
        }
        assert_ne!(libc::geteuid(), 0);
    }
}
