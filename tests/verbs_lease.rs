//! Leases on a verbs device, through a connected pair:
//! - a peer writes and reads through a lease, and after revocation the same is refused;
//! - what the device was found to hold is what it holds: one byte before and behind a lease, rights, other
//!   queue pairs; a lease that requires what is lacking is refused;
//! - an arena without any remote right can be leased, one without `MW_BIND` cannot, and says so;
//! - ten thousand leases leave nothing behind, and allocate no windows;
//! - whatever is dropped first, pool, pair, `LeaseQp` or lease, and whatever state the queue pair is in, what
//!   was leased ends, and regions and PD are given back.
#![cfg(all(feature = "loopback", any(feature = "rdma-sys", feature = "rdma-mummy-sys")))]

#[path = "common/calls.rs"]
mod calls;
#[path = "common/verbs.rs"]
mod common;

use std::thread;

use common::{alone, check, device, fill, vm_pin};
use pinpool::{
    Access, Buf, Device, Guarantees, Lease, LeaseQp, Pages, Pool, RemoteBuf,
    lease::{self, LeaseError, Terms},
    loopback::Pair,
};

const MIB: usize = 1 << 20;
const BINDABLE: Access = Access::LOCAL_WRITE.union(Access::MW_BIND);
const WRITE: Access = Access::REMOTE_WRITE;
const READ: Access = Access::REMOTE_READ;
const REMOTE_ACCESS_ERROR: u32 = 10;

fn pool(device: &Device, access: Access) -> Pool {
    Pool::builder()
        .device(device.clone())
        .access(access)
        .pages(Pages::Base)
        .capacity(4 * MIB)
        .build()
        .expect("build")
}

/// A device, a pair on it, what its responder leases through, and a pool whose arenas grant peers nothing.
struct Scene {
    qp: LeaseQp,
    pair: Pair,
    pool: Pool,
    device: Device,
}

impl Scene {
    fn new(access: Access) -> Self {
        let device = device();
        let mut pair = Pair::connect(&device).expect("connect");
        let qp = LeaseQp::of_pair(&device, &mut pair).expect("lease through it");
        Self { qp, pair, pool: pool(&device, access), device }
    }

    fn buf(&self, len: usize, seed: u64) -> Buf {
        let mut buf = self.pool.alloc(len).expect("alloc");
        fill(&mut buf, seed);
        buf
    }

    fn lease(&self, len: usize, rights: Access) -> Lease {
        self.buf(len, 1).lease(&self.qp, rights).expect("lease")
    }

    /// The pair anew, if it was stopped, and what leases through it.
    fn again(&mut self) {
        self.pair.reset().expect("reset");
        self.qp = LeaseQp::of_pair(&self.device, &mut self.pair).expect("lease through it");
    }
}

/// Writes `from` to `to`, so many bytes off; the status if it was refused.
fn write(pair: &mut Pair, from: &Buf, to: RemoteBuf, off: i64) -> Result<(), u32> {
    let addr = to.addr.wrapping_add_signed(off);
    // SAFETY: `from` is borrowed for the call, which is over when it returns; the tests look at what may
    // have been written only afterwards.
    let done = unsafe { pair.write(from.sge(), addr, to.rkey) };
    done.map(drop).map_err(|e| e.status().unwrap_or_else(|| panic!("no status: {e}")).get())
}

fn read(pair: &mut Pair, into: &mut Buf, from: RemoteBuf) -> Result<(), u32> {
    // SAFETY: as in `write`; `into` is borrowed exclusively.
    let done = unsafe { pair.read(into.sge(), from.addr, from.rkey) };
    done.map(drop).map_err(|e| e.status().unwrap_or_else(|| panic!("no status: {e}")).get())
}

#[test]
fn a_peer_uses_a_lease_and_is_refused_after_revocation() {
    let _alone = alone();
    for len in [1, 64, 4096, 100_000, MIB] {
        let mut scene = Scene::new(BINDABLE);
        let mut from = scene.buf(len, 7);
        let lease = scene.lease(len, WRITE | READ);
        assert_eq!((lease.len(), lease.rights(), lease.is_bound()), (len, WRITE | READ, true));
        let to = lease.remote();
        assert_eq!((to.len, to.rkey), (len as u64, lease.rkey()));
        assert_ne!(to.rkey.get(), lease.sge().lkey.get(), "a key of its own");

        write(&mut scene.pair, &from, to, 0).expect("leased");
        // SAFETY: the write is over, and the peer does nothing by itself.
        check(unsafe { lease.bytes() }, 7);
        from.fill(0);
        read(&mut scene.pair, &mut from, to).expect("leased");
        check(&from, 7);

        let buf = lease.revoke().expect("revoke");
        fill(&mut from, 77);
        assert_eq!(write(&mut scene.pair, &from, to, 0), Err(REMOTE_ACCESS_ERROR));
        check(&buf, 7);
        // That has put the pair's queue pairs in error, and the pair has stopped.
        let refused = buf.lease(&scene.qp, WRITE).expect_err("closed");
        assert!(matches!(refused.error, LeaseError::Closed), "{refused}");
        check(&refused.buf.expect("given back"), 7);
        let mut back = scene.buf(len, 8);
        scene.again();
        assert_eq!(read(&mut scene.pair, &mut back, to), Err(REMOTE_ACCESS_ERROR));
        check(&back, 8);
    }
}

#[test]
fn what_the_device_was_found_to_hold_is_what_it_holds() {
    let _alone = alone();
    // Where the arena itself permits everything, whatever is refused is refused by the lease.
    let mut scene = Scene::new(BINDABLE | Access::REMOTE);
    let support = scene.device.lease_support();
    assert!(support.windows && support.untried().is_empty(), "{support}");
    assert!(support.held.contains(Guarantees::REVOCATION), "{support}");
    assert_eq!(scene.qp.support(), &support);
    let one = scene.buf(1, 3);

    // Three neighbours in one slab; the middle one is leased.
    for (off, guarantee) in [(-1, Guarantees::RANGE), (4096, Guarantees::RANGE)] {
        let bufs: Vec<Buf> = (0..3).map(|_| scene.buf(4096, 5)).collect();
        let mut bufs = bufs.into_iter();
        let (low, middle, high) = (bufs.next(), bufs.next().expect("three"), bufs.next());
        let lease = middle.lease(&scene.qp, WRITE).expect("lease");
        let refused = write(&mut scene.pair, &one, lease.remote(), off).is_err();
        assert_eq!(refused, support.held.contains(guarantee), "a byte {off} off");
        if refused {
            low.iter().chain(&high).for_each(|b| check(b, 5));
            scene.again();
        }
        drop(lease);
    }

    let lease = scene.lease(4096, READ);
    let refused = write(&mut scene.pair, &one, lease.remote(), 0).is_err();
    assert_eq!(refused, support.held.contains(Guarantees::RIGHTS));
    check(&lease.revoke().expect("revoke"), 1);
    scene.again();

    let lease = scene.lease(4096, WRITE);
    let mut other = Pair::connect(&scene.device).expect("connect");
    let refused = write(&mut other, &one, lease.remote(), 0).is_err();
    assert_eq!(refused, support.held.contains(Guarantees::QUEUE_PAIR));
    write(&mut scene.pair, &one, lease.remote(), 0).expect("through its own");
}

#[test]
fn a_lease_that_requires_what_is_lacking_is_refused() {
    let _alone = alone();
    let scene = Scene::new(BINDABLE);
    let support = scene.device.lease_support();
    for what in [Guarantees::REVOCATION, Guarantees::RANGE, Guarantees::RIGHTS, Guarantees::all()] {
        let buf = scene.buf(4096, 2);
        let lease = buf.lease(&scene.qp, Terms::new(WRITE).require(what));
        if support.held.contains(what) {
            lease.expect("held");
            continue;
        }
        let refused = lease.expect_err("lacking");
        check(&refused.buf.expect("given back"), 2);
        let LeaseError::Lacking { missing, support: told, device } = refused.error else {
            panic!("{}", refused.error)
        };
        assert_eq!((missing, *told), (what - support.held, support.clone()));
        assert_eq!(device, scene.device.info().name);
    }
    assert_eq!(scene.qp.stats().live, 0);
}

#[test]
fn unfit_leases_are_refused_by_name_before_anything_is_posted() {
    let _alone = alone();
    let scene = Scene::new(BINDABLE);
    let error = |buf: Buf, rights: Access| {
        let len = buf.len();
        let refused = buf.lease(&scene.qp, rights).expect_err("unfit");
        assert_eq!(refused.buf.expect("given back").len(), len);
        refused.error
    };
    let e =
        error(pool(&scene.device, Access::LOCAL_WRITE | WRITE).alloc(64).expect("alloc"), WRITE);
    assert!(
        matches!(e, LeaseError::NotBindable { .. }) && e.to_string().contains("MW_BIND"),
        "{e}"
    );
    let e = error(pool(&scene.device, Access::MW_BIND).alloc(64).expect("alloc"), WRITE);
    assert!(matches!(e, LeaseError::Rights { .. }) && e.to_string().contains("LOCAL_WRITE"), "{e}");
    for rights in [Access::empty(), Access::LOCAL_WRITE, WRITE | Access::MW_BIND] {
        let e = error(scene.buf(64, 1), rights);
        assert!(matches!(e, LeaseError::Rights { .. }), "{e}");
    }
    let e = error(scene.pool.alloc(0).expect("alloc"), WRITE);
    assert!(matches!(e, LeaseError::Empty), "{e}");
    // Another opening of the same device, and so another PD.
    let e = error(pool(&device(), BINDABLE).alloc(64).expect("alloc"), WRITE);
    assert!(matches!(e, LeaseError::ForeignBuffer { .. }), "{e}");
    let soft = Device::soft();
    let e = error(pool(&soft, BINDABLE).alloc(64).expect("alloc"), WRITE);
    assert!(matches!(e, LeaseError::ForeignBuffer { .. }), "{e}");
    assert_eq!((scene.qp.stats().leased, scene.qp.stats().windows), (0, 0));

    assert!(matches!(LeaseQp::soft(&scene.device), Err(LeaseError::NoWindows { .. })));
    let mut pair = Pair::connect(&device()).expect("connect");
    let e = LeaseQp::of_pair(&scene.device, &mut pair).expect_err("another PD");
    assert!(e.to_string().contains("protection domain"), "{e}");
    let null = std::ptr::null_mut();
    // SAFETY: null is allowed.
    let e =
        unsafe { LeaseQp::from_raw(&scene.device, null, Default::default()) }.expect_err("null");
    assert!(matches!(e, LeaseError::QueuePair { .. }), "{e}");
    // A read-only arena can be leased for reading.
    let read_only = pool(&scene.device, Access::MW_BIND).alloc(64).expect("alloc");
    read_only.lease(&scene.qp, READ).expect("lease").revoke().expect("revoke");
}

#[test]
fn zero_based_arenas_and_buffers_of_each_reach_can_be_leased() {
    let _alone = alone();
    let mut scene = Scene::new(BINDABLE | Access::ZERO_BASED);
    let from = scene.buf(5000, 9);
    let lease = scene.lease(5000, WRITE);
    assert!(lease.remote().addr < 4 * MIB as u64, "an offset");
    write(&mut scene.pair, &from, lease.remote(), 0).expect("leased");
    check(&lease.revoke().expect("revoke"), 9);
}

#[test]
fn an_exchange_ends_one_lease_and_begins_the_next() {
    let _alone = alone();
    let mut scene = Scene::new(BINDABLE);
    let from = scene.buf(4096, 4);
    let mut lease = scene.lease(4096, WRITE);
    let mut old = lease.remote();
    // Longer than a key takes to come back.
    for i in 0..600 {
        let next = scene.buf(4096, 6);
        let (ended, now) = lease.exchange(next, WRITE).expect("exchange");
        lease = now;
        assert_ne!(lease.rkey(), old.rkey, "exchange {i}");
        if i % 100 == 0 {
            write(&mut scene.pair, &from, lease.remote(), 0).expect("leased");
        }
        old = lease.remote();
        drop(ended);
    }
    let stats = scene.qp.stats();
    assert_eq!((stats.live, stats.windows, stats.leased, stats.invalidated), (1, 1, 601, 600));
    // An unfit exchange ends the lease all the same, and both buffers come back.
    let e = lease.exchange(scene.pool.alloc(0).expect("alloc"), WRITE).expect_err("unfit");
    assert!(matches!(*e.error, LeaseError::Empty), "{e}");
    assert!(e.ended.is_some() && e.next.is_some());
    assert_eq!(scene.qp.stats().live, 0);
    assert_eq!(write(&mut scene.pair, &from, old, 0), Err(REMOTE_ACCESS_ERROR));
}

#[test]
fn ten_thousand_leases_leave_nothing_behind() {
    let _alone = alone();
    let mut scene = Scene::new(BINDABLE);
    scene.qp.reserve(4).expect("reserve");
    let pinned = vm_pin();
    for i in 0..10_000_usize {
        let buf = scene.pool.alloc(1 + i % 8192).expect("alloc");
        let terms = Terms::new(if i % 2 == 0 { WRITE } else { READ });
        let lease = buf.lease(&scene.qp, if i % 3 == 0 { terms.in_order() } else { terms });
        let lease = lease.expect("lease");
        if i % 4 == 0 {
            drop(lease);
        } else {
            lease.revoke().expect("revoke");
        }
    }
    let stats = scene.qp.stats();
    assert_eq!((stats.live, stats.leased, stats.invalidated), (0, 10_000, 10_000), "{stats:?}");
    assert_eq!((stats.forced, stats.failed, stats.leaked), (0, 0, 0), "{stats:?}");
    assert_eq!(
        (stats.windows, stats.resting),
        (4, 4),
        "four were reserved, one was used at a time"
    );
    assert_eq!(vm_pin(), pinned);
    let books = scene.pool.stats();
    assert!(books.balanced() && books.live == 0, "{books:?}");
    // And it works still.
    let from = scene.buf(64, 1);
    let lease = scene.lease(64, WRITE);
    write(&mut scene.pair, &from, lease.remote(), 0).expect("leased");
}

#[test]
fn threads_lease_through_one_queue_pair() {
    let _alone = alone();
    let scene = Scene::new(BINDABLE);
    thread::scope(|s| {
        for t in 0..4_usize {
            let scene = &scene;
            s.spawn(move || {
                let mut held: Vec<Lease> = Vec::new();
                for i in 0..250 {
                    held.push(scene.lease(1 + (i * 37 + t) % 4096, WRITE));
                    if held.len() > 5 {
                        held.swap_remove(i % 5).revoke().expect("revoke");
                    }
                }
            });
        }
    });
    let stats = scene.qp.stats();
    assert_eq!((stats.live, stats.leased, stats.invalidated), (0, 1000, 1000), "{stats:?}");
    assert!(stats.windows <= 24, "{stats:?}");
}

/// The `n`th order of five things; 0 to 119 are all of them.
fn order(mut n: usize) -> Vec<usize> {
    let mut left: Vec<usize> = (0..5).collect();
    (1..=5)
        .rev()
        .map(|k| {
            let one = left.remove(n % k);
            n /= k;
            one
        })
        .collect()
}

#[test]
fn whatever_is_dropped_first_regions_windows_and_the_pd_are_given_back() {
    let _alone = alone();
    let (leaked, stuck) = (pinpool::leaked_bytes(), lease::leaked());
    for n in 0..120 {
        let Scene { qp, pair, pool, device } = Scene::new(BINDABLE);
        let lease = |len| pool.alloc(len).expect("alloc").lease(&qp, WRITE).expect("lease");
        let leases: Vec<Lease> = (0..if n == 0 { 40 } else { 2 }).map(|i| lease(64 + i)).collect();
        let before = [&calls::DEREGISTER, &calls::DEALLOC_PD].map(|c| c.failed());
        let (mut qp, mut pair, mut pool, mut device, mut leases) =
            (Some(qp), Some(pair), Some(pool), Some(device), Some(leases));
        for i in order(n) {
            match i {
                0 => drop(qp.take()),
                1 => drop(pair.take()),
                2 => drop(pool.take()),
                3 => drop(device.take()),
                _ => drop(leases.take()),
            }
        }
        let after = [&calls::DEREGISTER, &calls::DEALLOC_PD].map(|c| c.failed());
        // A PD with a window left would be busy, as would a region that one is bound to.
        assert_eq!(after, before, "order {n}");
        let made = |c: &calls::Calls| c.made() - c.failed();
        assert_eq!(made(&calls::REGISTER), made(&calls::DEREGISTER), "order {n}");
        assert_eq!(made(&calls::ALLOC_PD), made(&calls::DEALLOC_PD), "order {n}");
    }
    assert_eq!((pinpool::leaked_bytes(), lease::leaked()), (leaked, stuck));
}

#[test]
fn what_a_queue_pair_in_error_cannot_invalidate_is_ended_all_the_same() {
    let _alone = alone();
    let mut scene = Scene::new(BINDABLE | Access::REMOTE);
    let one = scene.buf(1, 3);
    let leases: Vec<Lease> = (0..3).map(|_| scene.lease(4096, WRITE)).collect();
    let remotes: Vec<RemoteBuf> = leases.iter().map(Lease::remote).collect();
    // A request that must be refused puts both ends in error, without the pair noticing.
    let past = scene.pool.arenas()[0];
    let sge = one.sge();
    let bad = pinpool::loopback::Request {
        wr_id: 1,
        operation: pinpool::loopback::Operation::Write {
            remote_addr: past.addr.as_ptr() as u64 + past.len as u64,
            rkey: past.keys.rkey.expect("remote rights"),
        },
        sge,
        signaled: true,
    };
    // SAFETY: the buffer lives until after the completion, and the target is refused.
    unsafe { scene.pair.post(&bad) }.expect("post");
    let mut done = [pinpool::loopback::Completion::default()];
    while scene.pair.poll(&mut done).expect("poll") == 0 {
        thread::yield_now();
    }
    assert_eq!(done[0].status.get(), REMOTE_ACCESS_ERROR);
    let mut leases = leases.into_iter();
    check(&leases.next().expect("three").revoke().expect("ended"), 1);
    drop(leases.next());
    assert_eq!((scene.qp.stats().forced, scene.qp.stats().live), (2, 1));
    // The queue pair has had it, for leases as well.
    let refused = scene.buf(64, 2).lease(&scene.qp, WRITE).expect_err("in error");
    check(&refused.buf.expect("given back"), 2);
    scene.again();
    assert!(!leases.as_slice()[0].is_bound());
    check(&leases.next().expect("three").revoke().expect("ended when the pair was reset"), 1);
    for to in remotes {
        assert_eq!(write(&mut scene.pair, &one, to, 0), Err(REMOTE_ACCESS_ERROR));
        scene.again();
    }
    assert_eq!(lease::leaked(), 0);
}
