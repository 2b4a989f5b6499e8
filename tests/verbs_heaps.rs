//! Access classes and shares on a verbs device:
//! - one region for each class's arena and none for shares, all under one PD, which goes after the last;
//! - a class that peers may read is read, one that they may not reach is refused, by its own key's number and
//!   by the other class's key; bytes move between the classes of one pool;
//! - buffers of a share, reserved or beyond, travel like any other;
//! - a class's region goes with the last that stands on it, while the other's keys still work.
#![cfg(all(feature = "loopback", any(feature = "rdma-sys", feature = "rdma-mummy-sys")))]

#[path = "common/calls.rs"]
mod calls;
#[path = "common/verbs.rs"]
mod common;

use common::{alone, check, device, fill, guessed_rkey};
use pinpool::{
    Access, Buf, Class, Device, Pages, Pool, Reserve,
    loopback::{Completion, LoopbackError, Pair},
    reach::{Local, Remote},
};

const MIB: usize = 1 << 20;
const READ: Access = Access::LOCAL_WRITE.union(Access::REMOTE_READ);
const REMOTE_ACCESS_ERROR: u32 = 10;

/// Register, deregister and PD calls made so far, and how many failed.
fn calls() -> [u64; 4] {
    use calls::{ALLOC_PD, DEALLOC_PD, DEREGISTER, REGISTER};
    let failed = [&REGISTER, &DEREGISTER, &ALLOC_PD, &DEALLOC_PD].map(|c| c.failed());
    [REGISTER.made(), DEREGISTER.made(), DEALLOC_PD.made(), failed.iter().sum()]
}

fn since(start: [u64; 4]) -> [u64; 4] {
    let now = calls();
    std::array::from_fn(|i| now[i] - start[i])
}

fn pool(device: &Device) -> (Pool, Class<Local>, Class<Remote>) {
    let pool = Pool::builder()
        .device(device.clone())
        .access(Access::LOCAL_WRITE)
        .pages(Pages::Base)
        .capacity(MIB)
        .class("shared", READ, MIB)
        .share("recv", Reserve::buffers(8, 4096))
        .share_in("shared", "send", 256 << 10)
        .build()
        .expect("build");
    let (private, shared) =
        (pool.class("default").expect("local"), pool.class("shared").expect("remote"));
    (pool, private, shared)
}

#[track_caller]
fn refused(pair: &mut Pair, result: Result<Completion, LoopbackError>) {
    let e = result.expect_err("to be refused");
    let status = e.status().unwrap_or_else(|| panic!("not a completion: {e}"));
    pair.reset().expect("reset");
    assert_eq!(status.get(), REMOTE_ACCESS_ERROR);
}

#[test]
fn a_remote_class_is_read_and_a_local_one_is_refused() {
    let _alone = alone();
    let start = calls();
    let device = device();
    let (pool, private, shared) = pool(&device);
    assert_eq!(since(start), [2, 0, 0, 0], "one region a class, none for shares");
    let mut pair = Pair::connect(&device).expect("connect");

    let mut open: Buf<Remote> = pool.alloc_in(&shared, 64 << 10).expect("alloc");
    let mut hidden: Buf<Local> = pool.alloc_in(&private, 64 << 10).expect("alloc");
    let mut into: Buf<Local> = private.alloc(64 << 10).expect("alloc");
    fill(&mut open, 1);
    fill(&mut hidden, 2);
    let to = open.remote();
    // SAFETY: all buffers are this test's, and nothing else uses them until it returns.
    unsafe { pair.read(into.sge(), to.addr, to.rkey) }.expect("peers may read this class");
    check(&into, 1);
    fill(&mut into, 3);
    let secret = hidden.as_ptr() as u64;
    // A peer that guesses the local class's rkey, and one that uses the right that it has elsewhere.
    for rkey in [guessed_rkey(hidden.keys()), to.rkey] {
        // SAFETY: as above.
        let done = unsafe { pair.read(into.sge(), secret, rkey) };
        refused(&mut pair, done);
        // SAFETY: as above.
        let done = unsafe { pair.write(into.sge(), secret, rkey) };
        refused(&mut pair, done);
    }
    // Reading is all that the shared class permits.
    // SAFETY: as above.
    let done = unsafe { pair.write(into.sge(), to.addr, to.rkey) };
    refused(&mut pair, done);
    check(&open, 1);
    check(&hidden, 2);
    check(&into, 3);
    // Between the classes, by their own keys.
    // SAFETY: as above.
    unsafe { pair.send_recv(open.sge(), hidden.sge()) }.expect("send");
    check(&hidden, 1);
    drop((open, hidden, into, pool, private, shared, pair, device));
    assert_eq!(since(start), [2, 2, 1, 0], "and the PD after both");
}

#[test]
fn a_shares_buffers_travel_from_its_reserve_and_beyond() {
    let _alone = alone();
    let start = calls();
    let device = device();
    let (pool, private, shared) = pool(&device);
    let mut pair = Pair::connect(&device).expect("connect");
    let (recv, send) =
        (private.share("recv").expect("there"), shared.share("send").expect("there"));
    // More than either has reserved, so that some lie beyond.
    let mut from: Vec<Buf<Remote>> = (0..80).map(|_| send.alloc(4096).expect("alloc")).collect();
    let mut to: Vec<Buf<Local>> = (0..80).map(|_| recv.alloc(4096).expect("alloc")).collect();
    let stats = pool.stats();
    let reserved: Vec<_> = stats.shares.iter().map(|s| s.reserve.live_buffers).collect();
    assert_eq!(reserved, [8, 64]);
    for (i, (from, to)) in from.iter_mut().zip(&mut to).enumerate() {
        fill(from, i as u64);
        let remote = from.remote();
        // SAFETY: both buffers are this test's, and nothing else uses them until it returns.
        unsafe { pair.read(to.sge(), remote.addr, remote.rkey) }.expect("read");
        check(to, i as u64);
    }
    assert_eq!(since(start), [2, 0, 0, 0], "however many travelled");
    let stats = pool.stats();
    assert!(stats.balanced(), "{stats:#?}");
}

#[test]
fn a_classs_region_goes_with_the_last_that_stands_on_it() {
    let _alone = alone();
    let start = calls();
    let device = device();
    let mut pair = Pair::connect(&device).expect("connect");
    let (pool, private, shared) = pool(&device);
    let send = shared.share("send").expect("there");
    let mut reserved = send.alloc(4096).expect("alloc");
    let into = private.alloc(4096).expect("alloc");
    fill(&mut reserved, 7);
    drop((pool, private, shared, send));
    assert_eq!(since(start), [2, 0, 0, 0], "a buffer of each class is out");
    let from = reserved.remote();
    // SAFETY: both buffers are this test's, and nothing else uses them until it returns.
    unsafe { pair.read(into.sge(), from.addr, from.rkey) }.expect("read");
    check(&into, 7);
    drop(into);
    assert_eq!(since(start), [2, 1, 0, 0], "the default class's goes");
    fill(&mut reserved, 8);
    let lent = Pool::builder()
        .device(device.clone())
        .pages(Pages::Base)
        .capacity(MIB)
        .build()
        .expect("build");
    let again = lent.alloc(4096).expect("alloc");
    // SAFETY: as above.
    unsafe { pair.read(again.sge(), from.addr, from.rkey) }
        .expect("the other class's key still works");
    check(&again, 8);
    drop(reserved);
    // SAFETY: as above; the key is of a region that is gone, which is to be refused.
    let done = unsafe { pair.read(again.sge(), from.addr, from.rkey) };
    refused(&mut pair, done);
    drop((again, lent, pair, device));
    assert_eq!(since(start), [3, 3, 1, 0]);
}
