//! The verbs device by itself, without a pool:
//! - it is found, by name and as the first, and describes itself;
//! - what it registers can be reached by RDMA with the keys it gave, through each operation;
//! - `ZERO_BASED` makes addresses count from the start of the range, on both sides;
//! - refusals keep the device's errno, or name the completion status, and stop the pair;
//! - a lent PD is used and not freed.
#![cfg(all(feature = "loopback", any(feature = "rdma-sys", feature = "rdma-mummy-sys")))]

#[path = "common/verbs.rs"]
mod common;

use std::time::Duration;

use common::{Registered, check, device, fill};
use pinpool::{
    Access, Device, DeviceError,
    device::{ForkSupport, Pinning},
    loopback::{Completion, LoopbackError, Operation, Pair, Request, Status},
};

const ALL: Access = Access::LOCAL_WRITE.union(Access::REMOTE);

#[test]
fn it_is_found_by_name_and_describes_itself() {
    let first = device();
    let info = first.info();
    assert!(Device::list().expect("list").contains(&info.name));
    let again = Device::open(&info.name).expect("open by name");
    assert_eq!(again.info().name, info.name);
    assert_eq!(info.pinning, Pinning::Pinned);
    assert!(!info.transport.is_empty());
    assert!(info.max_mr > 0 && info.max_mr_size > 0, "{info:?}");
    if info.name.starts_with("rxe") {
        assert_eq!((info.transport.as_str(), info.numa_node), ("rxe", None));
    }
    let verbs = first.as_verbs().expect("verbs");
    assert!(!verbs.pd().is_null() && !verbs.context().is_null() && !verbs.is_lent());
    assert_ne!(verbs.pd(), again.as_verbs().expect("verbs").pd(), "a PD of its own");
}

#[test]
fn fork_needs_no_care_where_the_kernel_copies_pinned_pages() {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").expect("procfs");
    let mut numbers = release.split(['.', '-']).map_while(|n| n.parse::<u32>().ok());
    let version = (numbers.next(), numbers.next());
    let support = device().as_verbs().expect("verbs").fork_support();
    if version >= (Some(5), Some(12)) {
        assert_eq!(support, ForkSupport::CopyOnFork, "kernel {release}");
    } else {
        assert_eq!(support, ForkSupport::HiddenFromChildren, "kernel {release}");
    }
}

#[test]
fn a_name_that_is_not_there_is_refused_with_those_that_are() {
    let name = device().info().name;
    let e = Device::open("nope").expect_err("refused");
    assert!(matches!(&e, DeviceError::NotFound { present, .. } if present.contains(&name)), "{e}");
}

#[test]
fn write_and_read_move_bytes() {
    let device = device();
    let mut pair = Pair::connect(&device).expect("connect");
    let mut a = Registered::new(&device, 3 << 20, ALL);
    let mut b = Registered::new(&device, 3 << 20, ALL);
    // More than one piece, and not a whole number of them.
    let len = (2 << 20) + 12345;
    fill(&mut a.bytes()[..len], 1);
    let (addr, rkey) = (b.addr() + 7, b.registration.rkey);
    // SAFETY: both ranges live to the end of the test, and nobody uses them meanwhile.
    let done = unsafe { pair.write(a.sge(a.addr(), len as u32), addr, rkey) }.expect("write");
    assert_eq!(done.byte_len as usize, len);
    check(&b.bytes()[7..7 + len], 1);
    assert_eq!((b.bytes()[6], b.bytes()[7 + len]), (0, 0), "nothing beside it");
    a.bytes().fill(0);
    // SAFETY: as above.
    unsafe { pair.read(a.sge(a.addr() + 1, len as u32), addr, rkey) }.expect("read");
    check(&a.bytes()[1..1 + len], 1);
}

#[test]
fn send_reaches_the_posted_receive() {
    let device = device();
    let mut pair = Pair::connect(&device).expect("connect");
    let mut a = Registered::new(&device, 1 << 16, Access::LOCAL_WRITE);
    let mut b = Registered::new(&device, 1 << 16, Access::LOCAL_WRITE);
    fill(a.bytes(), 2);
    for len in [1u32, 4095, 1 << 16] {
        b.bytes().fill(0);
        // SAFETY: both live to the end of the test, and nobody uses them meanwhile.
        let got = unsafe { pair.send_recv(a.sge(a.addr(), len), b.sge(b.addr(), 1 << 16)) };
        assert_eq!(got.expect("send").byte_len, len);
        check(&b.bytes()[..len as usize], 2);
        assert!(b.bytes()[len as usize..].iter().all(|&x| x == 0));
    }
}

#[test]
fn atomics_swap_and_add() {
    let device = device();
    let mut pair = Pair::connect(&device).expect("connect");
    let mut a = Registered::new(&device, 4096, ALL);
    let mut b = Registered::new(&device, 4096, ALL);
    let word = |r: &mut Registered<'_>| u64::from_ne_bytes(r.bytes()[..8].try_into().expect("8"));
    b.bytes()[..8].copy_from_slice(&41u64.to_ne_bytes());
    let (addr, rkey, local) = (b.addr(), b.registration.rkey, a.sge(a.addr(), 8));
    // SAFETY: both live to the end of the test, and nobody uses them meanwhile.
    unsafe { pair.fetch_add(local, addr, rkey, 1) }.expect("fetch_add");
    assert_eq!((word(&mut a), word(&mut b)), (41, 42));
    // SAFETY: as above.
    unsafe { pair.compare_swap(local, addr, rkey, 7, 9) }.expect("no match");
    assert_eq!((word(&mut a), word(&mut b)), (42, 42));
    // SAFETY: as above.
    unsafe { pair.compare_swap(local, addr, rkey, 42, u64::MAX) }.expect("match");
    assert_eq!((word(&mut a), word(&mut b)), (42, u64::MAX));
    // SAFETY: as above.
    unsafe { pair.fetch_add(local, addr, rkey, 1) }.expect("wraps");
    assert_eq!((word(&mut a), word(&mut b)), (u64::MAX, 0));
}

#[test]
fn zero_based_addresses_are_offsets_on_both_sides() {
    let device = device();
    let mut pair = Pair::connect(&device).expect("connect");
    let mut a = Registered::new(&device, 1 << 16, ALL | Access::ZERO_BASED);
    let mut b = Registered::new(&device, 1 << 16, ALL | Access::ZERO_BASED);
    assert_eq!(a.registration.access, ALL | Access::ZERO_BASED);
    fill(&mut a.bytes()[4096..8192], 3);
    let rkey = b.registration.rkey;
    // SAFETY: both live to the end of the test, and nobody uses them meanwhile.
    unsafe { pair.write(a.sge(4096, 4096), 100, rkey) }.expect("by offset");
    check(&b.bytes()[100..4196], 3);
    // SAFETY: as above.
    let e = unsafe { pair.write(a.sge(4096, 8), b.addr(), rkey) }.expect_err("by address");
    assert_eq!(e.status(), Some(Status::REM_ACCESS_ERR), "{e}");
    pair.reset().expect("reset");
    // SAFETY: as above.
    let e = unsafe { pair.write(a.sge(a.addr(), 8), 0, rkey) }.expect_err("by local address");
    // rxe flushes it on later kernels (6.12): the pair is fresh, so it is this request's own error.
    let refused = [Status::LOC_PROT_ERR, Status::WR_FLUSH_ERR].map(Some);
    assert!(refused.contains(&e.status()), "{e}");
}

#[test]
fn optional_rights_are_accepted_together_with_others() {
    let device = device();
    let mut pair = Pair::connect(&device).expect("connect");
    let relaxed = ALL | Access::RELAXED_ORDERING;
    let mut a = Registered::new(&device, 4096, relaxed);
    let mut b = Registered::new(&device, 4096, relaxed | Access::ZERO_BASED);
    fill(a.bytes(), 4);
    // SAFETY: both live to the end of the test, and nobody uses them meanwhile.
    unsafe { pair.write(a.sge(a.addr(), 4096), 0, b.registration.rkey) }.expect("write");
    check(b.bytes(), 4);
}

#[test]
fn a_refused_registration_keeps_the_errno() {
    let device = device();
    let e = Registered::try_new(&device, 4096, Access::REMOTE_WRITE).err().expect("refused");
    assert_eq!(e.raw_os_error(), Some(libc::EINVAL), "{e}");
    let text = e.to_string();
    for part in ["ibv_reg_mr", "4 KiB", "REMOTE_WRITE", &device.info().name] {
        assert!(text.contains(part), "{part} in {text}");
    }
}

#[test]
fn a_refusal_stops_the_pair_until_it_is_reset() {
    let device = device();
    let mut pair = Pair::connect(&device).expect("connect");
    let mut a = Registered::new(&device, 4096, ALL);
    let mut b = Registered::new(&device, 4096, Access::LOCAL_WRITE | Access::REMOTE_READ);
    fill(a.bytes(), 5);
    let (local, addr, rkey) = (a.sge(a.addr(), 64), b.addr(), b.registration.rkey);
    // SAFETY: both live to the end of the test, and nobody uses them meanwhile.
    let e = unsafe { pair.write(local, addr, rkey) }.expect_err("read-only");
    assert_eq!(e.status().map(Status::get), Some(10), "{e}");
    assert!(e.to_string().contains("10 (remote access error)"), "{e}");
    assert!(pair.is_stopped());
    // SAFETY: as above.
    let e = unsafe { pair.read(local, addr, rkey) }.expect_err("stopped");
    assert!(matches!(e, LoopbackError::Stopped));
    assert!(b.bytes().iter().all(|&x| x == 0));
    pair.reset().expect("reset");
    // SAFETY: as above.
    unsafe { pair.read(local, addr, rkey) }.expect("after reset");
    assert!(a.bytes()[..64].iter().all(|&x| x == 0));
}

#[test]
fn a_send_without_a_receive_times_out() {
    let device = device();
    let mut pair = Pair::connect(&device).expect("connect");
    pair.set_timeout(Duration::from_millis(200));
    let a = Registered::new(&device, 4096, Access::LOCAL_WRITE);
    // SAFETY: `a` lives to the end of the test, and nobody uses it meanwhile.
    let e = unsafe { pair.send(a.sge(a.addr(), 64)) }.expect_err("nobody receives");
    assert!(matches!(e, LoopbackError::TimedOut { operation: "SEND", .. }), "{e}");
    assert!(pair.is_stopped());
}

#[test]
fn posted_requests_complete_in_order_and_only_where_asked() {
    let device = device();
    let mut pair = Pair::connect(&device).expect("connect");
    let mut a = Registered::new(&device, 1 << 16, ALL);
    let mut b = Registered::new(&device, 1 << 16, ALL);
    fill(a.bytes(), 6);
    let (from, to, rkey) = (a.addr(), b.addr(), b.registration.rkey);
    let n = 16u64;
    for i in 0..n {
        let operation = Operation::Write { remote_addr: to + i * 4096, rkey };
        let sge = a.sge(from + i * 4096, 4096);
        let request = Request { wr_id: i, operation, sge, signaled: i % 4 == 3 };
        // SAFETY: both live to the end of the test, and nobody uses them before all is done.
        unsafe { pair.post(&request) }.expect("post");
    }
    let mut seen = Vec::new();
    let mut some = [Completion::default(); 3];
    let start = std::time::Instant::now();
    while seen.len() < 4 {
        let got = pair.poll(&mut some).expect("poll");
        for c in &some[..got] {
            assert_eq!(c.status, Status::SUCCESS);
            seen.push(c.wr_id);
        }
        assert!(start.elapsed() < Duration::from_secs(10), "stuck at {seen:?}");
    }
    assert_eq!(seen, [3, 7, 11, 15]);
    check(b.bytes(), 6);
}

#[test]
fn a_lent_pd_is_used_and_left_alone() {
    let owner = device();
    let pd = owner.as_verbs().expect("verbs").pd();
    for _ in 0..3 {
        // SAFETY: `owner` keeps the PD and its context until the end of the test.
        let lent = unsafe { Device::from_raw_pd(pd) }.expect("lend");
        let verbs = lent.as_verbs().expect("verbs");
        assert!(verbs.is_lent() && verbs.pd() == pd);
        assert_eq!(lent.info().name, owner.info().name);
        let mut pair = Pair::connect(&lent).expect("connect");
        let mut a = Registered::new(&lent, 4096, ALL);
        let mut b = Registered::new(&owner, 4096, ALL);
        fill(a.bytes(), 7);
        // SAFETY: both live to the end of the round, and nobody uses them meanwhile.
        unsafe { pair.write(a.sge(a.addr(), 4096), b.addr(), b.registration.rkey) }.expect("write");
        check(b.bytes(), 7);
    }
}
