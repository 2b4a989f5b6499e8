//! Leases on the software device:
//! - a peer reaches the leased bytes, not one before or behind them, with the rights leased, until revocation;
//! - nothing is posted, and the buffer comes back, when a lease is refused;
//! - a window that cannot be invalidated is given back; when that fails too, the buffer is kept out of use,
//!   counted and reported, and its arena stays;
//! - windows are used in turn and kept; keys come back after 256 leases of each at the earliest;
//! - whatever is dropped first, a buffer is never its pool's again while a peer reaches it;
//! - a forked child ends none of its parent's leases.
#![cfg(feature = "fault")]

mod common;

use std::{panic, thread};

use common::Rng;
use pinpool::{
    Access, Buf, Device, Guarantees, Lease, LeaseQp, Pages, Pool, RemoteBuf,
    device::{FaultyRegistrar, SoftDevice, SoftError},
    lease::{self, LeaseError, Terms},
};

const BINDABLE: Access = Access::LOCAL_WRITE.union(Access::MW_BIND);
const WRITE: Access = Access::REMOTE_WRITE;
const READ: Access = Access::REMOTE_READ;

fn pool(device: &Device, access: Access) -> Pool {
    let builder = Pool::builder().device(device.clone()).access(access);
    builder.capacity(1 << 20).pages(Pages::Base).build().expect("build")
}

fn scene(access: Access) -> (Device, LeaseQp, Pool) {
    let device = Device::soft();
    let qp = LeaseQp::soft(&device).expect("windows");
    let pool = pool(&device, access);
    (device, qp, pool)
}

fn soft(device: &Device) -> &SoftDevice {
    device.as_soft().expect("the software device")
}

fn write(device: &Device, to: RemoteBuf, off: i64, bytes: &[u8]) -> Result<(), SoftError> {
    // SAFETY: the tests hold no reference into leased bytes while they call this.
    unsafe { soft(device).write(to.rkey, to.addr.wrapping_add_signed(off), bytes) }
}

fn read(device: &Device, from: RemoteBuf, off: i64, len: usize) -> Result<Vec<u8>, SoftError> {
    let mut bytes = vec![0; len];
    // SAFETY: as in `write`.
    unsafe { soft(device).read(from.rkey, from.addr.wrapping_add_signed(off), &mut bytes) }?;
    Ok(bytes)
}

#[test]
fn a_lease_reaches_its_bytes_and_none_beside_them() {
    for access in [BINDABLE, BINDABLE | Access::REMOTE, BINDABLE | Access::ZERO_BASED] {
        let (device, qp, pool) = scene(access);
        let support = device.lease_support();
        assert!(support.held.contains(Guarantees::RANGE) && support.untried().is_empty());
        for len in [1, 63, 64, 4096, 5000, 100_000] {
            let mut buf = pool.alloc(len).expect("alloc");
            buf.fill(1);
            let terms = Terms::new(WRITE | READ).require(support.held);
            let lease = buf.lease(&qp, terms).expect("lease");
            let to = lease.remote();
            assert_eq!(to.len, len as u64);
            write(&device, to, 0, &vec![2; len]).expect("all of it");
            write(&device, to, len as i64 - 1, &[3]).expect("the last byte");
            assert_eq!(
                read(&device, to, 0, 1).expect("the first byte"),
                [if len == 1 { 3 } else { 2 }]
            );
            for (off, n) in [(-1, 1), (-1, len + 1), (0, len + 1), (len as i64, 1), (-64, 64)] {
                let e = write(&device, to, off, &vec![9; n]).expect_err("beside it");
                assert!(matches!(e, SoftError::Range { .. }), "{e}");
                assert!(read(&device, to, off, n).is_err());
            }
            let buf = lease.revoke().expect("revoke");
            assert!(buf[..len - 1].iter().all(|&b| b == 2) && buf[len - 1] == 3);
            let e = write(&device, to, 0, &[9]).expect_err("revoked");
            assert!(matches!(e, SoftError::UnknownKey(_)), "{e}");
            drop(buf);
            assert!(write(&device, to, 0, &[9]).is_err());
        }
        assert!(pool.stats().balanced());
    }
}

#[test]
fn a_lease_permits_what_it_says() {
    let (device, qp, pool) = scene(BINDABLE | Access::REMOTE);
    let lease = |rights| pool.alloc(64).expect("alloc").lease(&qp, rights).expect("lease");
    let (r, w, a) = (lease(READ), lease(WRITE), lease(Access::REMOTE_ATOMIC));
    let atomic = |l: &Lease| {
        let to = l.remote();
        // SAFETY: nobody has a reference to the bytes.
        unsafe { soft(&device).fetch_add(to.rkey, to.addr, 1) }.is_ok()
    };
    let can = |l: &Lease| {
        let to = l.remote();
        (read(&device, to, 0, 8).is_ok(), write(&device, to, 0, &[1; 8]).is_ok(), atomic(l))
    };
    assert_eq!(can(&r), (true, false, false));
    assert_eq!(can(&w), (false, true, false));
    assert_eq!(can(&a), (false, false, true));
    // One arena, three keys.
    assert!(r.rkey() != w.rkey() && w.rkey() != a.rkey() && a.rkey() != r.rkey());
}

#[test]
fn a_refused_lease_gives_the_buffer_back_and_says_what_to_change() {
    let (device, qp, good) = scene(BINDABLE);
    let refused = |buf: Buf, terms: Terms| {
        let len = buf.len();
        let refused = buf.lease(&qp, terms).expect_err("unfit");
        assert_eq!(refused.buf.expect("given back").len(), len);
        (refused.error.to_string(), refused.error)
    };
    let alloc = |pool: &Pool| pool.alloc(64).expect("alloc");
    let (text, e) = refused(alloc(&pool(&device, Access::LOCAL_WRITE)), WRITE.into());
    assert!(
        matches!(e, LeaseError::NotBindable { .. }) && text.contains("Access::MW_BIND"),
        "{text}"
    );
    let (text, e) = refused(alloc(&pool(&device, Access::MW_BIND)), WRITE.into());
    assert!(matches!(e, LeaseError::Rights { .. }) && text.contains("LOCAL_WRITE"), "{text}");
    for rights in [Access::empty(), Access::LOCAL_WRITE, Access::all()] {
        let (text, e) = refused(alloc(&good), rights.into());
        assert!(matches!(e, LeaseError::Rights { .. }) && text.contains("REMOTE_READ"), "{text}");
    }
    let (text, e) = refused(alloc(&good), Terms::new(READ).require(Guarantees::all()));
    let LeaseError::Lacking { missing, .. } = e else { panic!("{text}") };
    assert_eq!(missing, Guarantees::QUEUE_PAIR);
    assert!(text.contains("queue pair") && text.contains("soft"), "{text}");
    let (_, e) = refused(good.alloc(0).expect("alloc"), READ.into());
    assert!(matches!(e, LeaseError::Empty));
    let (text, e) = refused(alloc(&pool(&Device::soft(), BINDABLE)), READ.into());
    assert!(matches!(e, LeaseError::ForeignBuffer { .. }) && text.contains("clone"), "{text}");
    assert_eq!((qp.stats().leased, soft(&device).windows()), (0, 0));

    let custom = Device::custom(FaultyRegistrar::new(&device));
    let e = LeaseQp::soft(&custom).expect_err("no windows");
    assert!(matches!(e, LeaseError::NoWindows { .. }), "{e}");
    assert!(!custom.lease_support().windows);
    // But a pool on it, through the device that it wraps.
    alloc(&pool(&custom, BINDABLE)).lease(&qp, READ).expect("lease");
}

#[test]
fn windows_are_kept_and_used_in_turn() {
    let (device, qp, pool) = scene(BINDABLE);
    qp.reserve(3).expect("reserve");
    qp.reserve(2).expect("there are more already");
    let windows = soft(&device).windows();
    assert_eq!(windows, 3);
    let mut last_seen = std::collections::HashMap::new();
    for i in 0..3000_usize {
        let lease = pool.alloc(64).expect("alloc").lease(&qp, READ).expect("lease");
        if let Some(before) = last_seen.insert(lease.rkey(), i) {
            assert!(i - before >= 3 * 256, "a key came back after {}", i - before);
        }
    }
    assert_eq!(soft(&device).windows(), windows);
    let stats = qp.stats();
    assert_eq!((stats.leased, stats.invalidated, stats.live, stats.resting), (3000, 3000, 0, 3));
}

#[test]
fn what_cannot_be_invalidated_is_given_back_and_what_cannot_is_kept_out_of_use() {
    let (device, qp, pool) = scene(BINDABLE);
    let lease = || pool.alloc(4096).expect("alloc").lease(&qp, WRITE).expect("lease");
    // Binding fails: the buffer is back, the window gone.
    soft(&device).fail_windows(libc::EIO, 0, 0);
    let refused = pool.alloc(64).expect("alloc").lease(&qp, WRITE).expect_err("injected");
    assert!(matches!(refused.error, LeaseError::Call { .. }) && refused.buf.is_some());
    assert_eq!(soft(&device).windows(), 0);
    drop(refused);

    soft(&device).fail_windows(0, libc::EIO, 0);
    let (a, b) = (lease(), lease());
    let to = [a.remote(), b.remote()];
    a.revoke().expect("forced");
    drop(b);
    assert!(to.iter().all(|&to| write(&device, to, 0, &[1]).is_err()));
    assert_eq!((qp.stats().forced, soft(&device).windows(), lease::leaked()), (3, 0, 0));

    soft(&device).fail_windows(0, libc::EIO, libc::EBUSY);
    let (a, b, c) = (lease(), lease(), lease());
    let (addr, to) = (a.as_ptr() as usize, a.remote());
    let e = a.revoke().expect_err("stuck");
    assert_eq!((e.addr, e.len), (addr, 4096));
    let text = e.to_string();
    assert!(
        text.contains("4 KiB") && text.contains("soft invalidate") && text.contains("give back"),
        "{text}"
    );
    drop(b);
    // An exchange that gets nowhere: neither buffer can be trusted.
    let e = c.exchange(pool.alloc(64).expect("alloc"), WRITE).expect_err("stuck");
    assert!(e.ended.is_none() && e.next.is_none());
    assert_eq!((qp.stats().leaked, lease::leaked()), (3, 4));
    assert_eq!(pool.stats().live_buffers, 4, "out for good");
    write(&device, to, 0, &[1]).expect("as the device says: it still reaches it");
    // Closing meets the same, and says so to the holder.
    soft(&device).fail_windows(0, 0, 0);
    let d = lease();
    soft(&device).fail_windows(0, libc::EIO, libc::EBUSY);
    drop(qp);
    assert!(!d.is_bound());
    d.revoke().expect_err("stuck when it was closed");
    soft(&device).fail_windows(0, 0, 0);
    // The arena stays: the peer may reach it.
    let regions = soft(&device).regions();
    drop(pool);
    assert_eq!(soft(&device).regions(), regions);
    write(&device, to, 0, &[1]).expect("still mapped");
}

#[test]
fn an_arena_is_not_taken_down_under_a_lease() {
    let (device, qp, pool) = scene(BINDABLE);
    let lease = pool.alloc(4096).expect("alloc").lease(&qp, WRITE).expect("lease");
    let to = lease.remote();
    drop(pool);
    assert_eq!(soft(&device).regions(), 1);
    write(&device, to, 0, &[1]).expect("leased");
    drop(qp);
    assert!(!lease.is_bound());
    assert!(write(&device, to, 0, &[1]).is_err(), "closed");
    let buf = lease.revoke().expect("it has ended");
    assert_eq!((buf[0], soft(&device).regions()), (1, 1));
    let e = buf.lease(&LeaseQp::soft(&device).expect("another"), READ);
    drop(e.expect("lease"));
    assert_eq!((soft(&device).regions(), pinpool::leaked_bytes()), (0, 0));
}

#[test]
fn leases_end_in_any_order_and_from_any_thread() {
    let (device, qp, pool) = scene(BINDABLE);
    thread::scope(|s| {
        for t in 0..8 {
            let (device, qp, pool) = (&device, &qp, &pool);
            s.spawn(move || {
                let mut rng = Rng(t);
                let mut held: Vec<Lease> = Vec::new();
                for i in 0..2000_u64 {
                    match rng.below(4) {
                        0 | 1 if held.len() < 8 => {
                            let buf = pool.alloc(1 + rng.below(4000)).expect("alloc");
                            held.push(buf.lease(qp, WRITE).expect("lease"));
                        }
                        _ if held.is_empty() => {}
                        2 => {
                            let lease = held.swap_remove(rng.below(held.len()));
                            let (to, mark) = (lease.remote(), (i % 251) as u8);
                            write(device, to, 0, &[mark]).expect("leased");
                            assert_eq!(lease.revoke().expect("revoke")[0], mark);
                            assert!(write(device, to, 0, &[mark]).is_err());
                        }
                        _ => {
                            let lease = held.swap_remove(rng.below(held.len()));
                            let next = pool.alloc(64).expect("alloc");
                            held.push(lease.exchange(next, WRITE).expect("exchange").1);
                        }
                    }
                }
            });
        }
    });
    let stats = qp.stats();
    assert_eq!((stats.live, stats.leased), (0, stats.invalidated), "{stats:?}");
    assert!(stats.windows <= 64 && stats.resting == stats.windows as usize, "{stats:?}");
    let books = pool.stats();
    assert!(books.balanced() && books.live == 0);
}

#[test]
fn closing_meets_leasing_on_other_threads() {
    for round in 0..50 {
        let (device, qp, pool) = scene(BINDABLE);
        let qp = &qp;
        let left: Vec<RemoteBuf> = thread::scope(|s| {
            let lessees: Vec<_> = (0..4)
                .map(|_| {
                    let pool = pool.clone();
                    s.spawn(move || {
                        let mut seen = Vec::new();
                        let mut held = Vec::new();
                        loop {
                            match pool.alloc(64).expect("alloc").lease(qp, WRITE) {
                                Ok(lease) => {
                                    seen.push(lease.remote());
                                    held.push(lease);
                                }
                                Err(e) => {
                                    assert!(matches!(e.error, LeaseError::Closed), "{e}");
                                    break;
                                }
                            }
                            if held.len() > 3 {
                                held.remove(0).revoke().expect("revoke");
                            }
                        }
                        seen
                    })
                })
                .collect();
            while qp.stats().leased < round * 10 {
                thread::yield_now();
            }
            qp.close();
            lessees.into_iter().flat_map(|t| t.join().expect("no panic")).collect()
        });
        for to in left {
            assert!(write(&device, to, 0, &[1]).is_err(), "a lease outlived closing");
        }
        assert_eq!((qp.stats().live, pool.stats().live), (0, 0));
    }
}

#[test]
fn a_panic_with_a_lease_ends_it() {
    let (device, qp, pool) = scene(BINDABLE);
    let buf = pool.alloc(64).expect("alloc");
    let mut to = None;
    let panicked = panic::catch_unwind(panic::AssertUnwindSafe(|| {
        let lease = buf.lease(&qp, WRITE).expect("lease");
        to = Some(lease.remote());
        panic::resume_unwind(Box::new(()));
    }));
    assert!(panicked.is_err());
    assert!(write(&device, to.expect("leased"), 0, &[1]).is_err());
    assert_eq!(pool.stats().live, 0);
}

/// Whoever polls a queue for leases and tokens alike asks `is_mine` of each `wr_id`: a token must never be taken for
/// a lease's, whichever pool of the process it is of, and wherever its block lies.
#[test]
fn no_token_of_any_pool_is_taken_for_a_leases_request() {
    let device = Device::soft();
    let qp = LeaseQp::soft(&device).expect("windows");
    for n in 0..600 {
        let builder = Pool::builder().device(device.clone()).capacity(64 << 10);
        let pool = builder.pages(Pages::Base).build().expect("build");
        // One at each of a page's 64 places.
        let tokens: Vec<_> = (0..64).map(|_| pool.alloc(1).expect("room").into_token()).collect();
        for token in tokens {
            assert!(!qp.is_mine(token), "{token:#x} of pool {n}");
            drop(pool.from_token(token).expect("in flight"));
        }
    }
}
