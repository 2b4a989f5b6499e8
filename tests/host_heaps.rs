//! Access classes and shares, without a device. Proves:
//! - a class has arenas of its own, registered with exactly its rights; a key of one class covers no byte of
//!   another; the types say who can reach a buffer;
//! - nobody takes a share's last buffer, and caches do not either (B26); unreserved memory serves all; two
//!   directions that wait for one another go on where each has a share, and are stuck where not;
//! - a refusal is true: while a block is free at every moment, none is refused;
//! - pool, classes, shares and buffers may be dropped in any order, and each class's arenas go with the last
//!   that stands on them; a failed build leaves nothing;
//! - books, raw pointers and look-ups cover all heaps.
#![cfg(feature = "fault")]
#![allow(clippy::unwrap_used)]

mod common;

use std::{
    collections::VecDeque,
    sync::{
        Barrier,
        atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed},
        mpsc,
    },
    task::{Context, Poll, Waker},
    thread,
    time::Duration,
};

use common::{Rng, soft};
// The standard library's is not compiled for the thread sanitizer, which then misses its orderings.
use parking_lot::Mutex;
use pinpool::{
    Access, AllocError, Batch, Buf, BuildError, Class, CloseError, Device, FreeError, LookupError,
    Outcome, Pool, Reserve, Share, TokenError,
    device::{Fault, FaultyMapping, FaultyRegistrar, MapFault, MapStep},
    reach::{Any, Local, Rails, Remote},
};

const MIB: usize = 1 << 20;
const SHARED: Access = Access::LOCAL_WRITE.union(Access::REMOTE_READ);

fn scaled(n: usize) -> usize {
    if std::env::var_os("PINPOOL_GUEST").is_some() { n / 20 } else { n }
}

#[track_caller]
fn exhausted<T>(got: Result<T, AllocError>) -> pinpool::Exhausted {
    match got {
        Err(AllocError::Exhausted(e)) => *e,
        Err(e) => panic!("{e}"),
        Ok(_) => panic!("there was one"),
    }
}

/// Three classes: nothing for peers, reading, everything.
fn three() -> (FaultyRegistrar, Pool) {
    let registrar = FaultyRegistrar::new(&Device::soft());
    let pool = soft(2 * MIB)
        .device(Device::custom(registrar.clone()))
        .access(Access::LOCAL_WRITE)
        .arena_size(MIB)
        .class("read", SHARED, MIB)
        .class("all", Access::LOCAL_WRITE | Access::REMOTE, MIB / 2)
        .build()
        .unwrap();
    (registrar, pool)
}

#[test]
fn each_class_has_arenas_of_its_own_with_exactly_its_rights() {
    let (registrar, pool) = three();
    let all = Access::LOCAL_WRITE | Access::REMOTE;
    let asked: Vec<_> = registrar.requests().iter().map(|r| (r.access, r.len)).collect();
    let l = Access::LOCAL_WRITE;
    assert_eq!(asked, [(l, MIB), (l, MIB), (SHARED, MIB), (all, MIB / 2)]);
    assert_eq!(pool.arenas().len(), 4);
    assert_eq!(pool.capacity(), 3 * MIB + MIB / 2);

    // A key of one class covers no byte of another: all arenas, pairwise.
    for (i, a) in pool.arenas().iter().enumerate() {
        let (start, end) = (a.addr.as_ptr() as usize, a.addr.as_ptr() as usize + a.len);
        for b in &pool.arenas()[i + 1..] {
            let (first, last) = (b.addr.as_ptr() as usize, b.addr.as_ptr() as usize + b.len);
            assert!(end <= first || last <= start, "arenas do not overlap");
            assert_ne!(a.keys.lkey, b.keys.lkey);
        }
        assert_eq!(a.keys.rkey.is_some(), a.access.is_remote());
        for at in [start, end - 1] {
            assert_eq!(pool.keys_of(at as *const u8), Some(a.keys));
        }
        assert_eq!(pool.keys_of((start - 1) as *const u8), None, "no arena touches another");
        assert_eq!(pool.keys_of(end as *const u8), None);
    }

    for name in ["default", "read", "all"] {
        let class: Class = pool.class(name).unwrap();
        assert_eq!(class.name(), name);
        assert_eq!(class.capacity(), class.arenas().iter().map(|a| a.len).sum::<usize>());
        let bufs: Vec<Buf> =
            std::iter::from_fn(|| pool.alloc_in(&class, 5000).ok()).take(10_000).collect();
        for buf in &bufs {
            let addr = buf.as_ptr() as usize;
            let arena = class.arenas().into_iter().find(|a| {
                (a.addr.as_ptr() as usize..a.addr.as_ptr() as usize + a.len).contains(&addr)
            });
            assert_eq!(buf.keys(), arena.expect("inside its class").keys);
            assert_eq!(pool.keys_of(buf.as_ptr()), Some(buf.keys()));
            assert_eq!(buf.remote().is_some(), class.access().is_remote());
        }
        // One class's exhaustion is not another's.
        exhausted(class.alloc(5000));
        let elsewhere = if name == "all" { "read" } else { "all" };
        drop(pool.class::<Any>(elsewhere).unwrap().alloc(5000).unwrap());
    }
    pool.check();
}

#[test]
fn the_type_says_who_can_reach_a_buffer() {
    let (_, pool) = three();
    let private: Class<Local> = pool.class("default").unwrap();
    let read: Class<Remote> = pool.class("read").unwrap();
    let buf: Buf<Remote> = pool.alloc_in(&read, 100).unwrap();
    let remote = buf.remote();
    assert_eq!(Some(remote.rkey), buf.keys().rkey);
    let local: Buf<Local> = pool.alloc_in(&private, 100).unwrap();
    assert_eq!(local.keys().rkey, None);
    let any: Buf = buf.into();
    assert_eq!(any.remote(), Some(remote));

    let error = pool.class::<Local>("read").unwrap_err();
    assert_eq!(error, LookupError::NotLocal { class: "read".into(), access: SHARED });
    let error = pool.class::<Remote>("default").unwrap_err();
    let access = Access::LOCAL_WRITE;
    assert_eq!(error, LookupError::NotRemote { class: "default".into(), access });
    let error = pool.class::<Any>("red").unwrap_err();
    let present = ["default", "read", "all"].map(str::to_owned).to_vec();
    assert_eq!(error, LookupError::NoClass { asked: "red".into(), present });
    assert!(error.to_string().contains("default, read, all"), "{error}");
}

#[test]
fn a_class_of_another_pool_is_refused() {
    let ((_, one), (_, other)) = (three(), three());
    let class: Class<Remote> = other.class("read").unwrap();
    assert_eq!(one.alloc_in(&class, 64).unwrap_err(), AllocError::OtherPool);
    let own: Class<Remote> = one.class("read").unwrap();
    drop(one.alloc_in(&own, 64).unwrap());
    // Through a handle whose own class is another, too.
    let narrow: Class<Local> = one.class("default").unwrap();
    drop(narrow.pool().alloc_in(&own, 64).unwrap());
    assert_eq!(own.pool().alloc_in(&class, 64).unwrap_err(), AllocError::OtherPool);
    drop((one, narrow));
    drop(own.pool().alloc_in(&own, 64).unwrap());
}

#[test]
fn a_class_handle_does_all_that_a_pool_handle_does() {
    let (_, pool) = three();
    let class: Class<Remote> = pool.class("read").unwrap();
    drop(pool);
    let inside = |buf: &Buf<Remote>| assert_eq!(buf.keys(), class.arenas()[0].keys);
    let mut batch = Batch::with_capacity(16);
    assert_eq!(class.alloc_many(&mut batch, 1000, 16).unwrap(), 16);
    let bufs: Vec<_> = std::iter::from_fn(|| batch.pop()).collect();
    bufs.iter().for_each(inside);
    inside(&class.local().alloc(77).unwrap());
    let zeroed = class.alloc_zeroed(3000).unwrap();
    assert!(zeroed.iter().all(|&b| b == 0));
    inside(&zeroed);
    let layout = std::alloc::Layout::from_size_align(8, 64 << 10).unwrap();
    let aligned = class.alloc_layout(layout).unwrap();
    assert_eq!(aligned.as_ptr() as usize % (64 << 10), 0);
    inside(&aligned);
    inside(&class.pool().alloc(5).unwrap());
    assert_eq!(class.pool().access(), SHARED);
}

#[test]
fn b26_shares_nobody_takes_anothers_last_buffer() {
    for len in [4096, 64 << 10, MIB] {
        let pool = soft(32 * len)
            .share("send", Reserve::buffers(8, len))
            .share("recv", Reserve::buffers(8, len))
            .build()
            .unwrap();
        let (send, recv) = (pool.share("send").unwrap(), pool.share("recv").unwrap());
        assert_eq!((send.reserved(), recv.reserved()), (8 * len, 8 * len));
        // Threads that took some, gave them back, and stay: their magazines keep blocks.
        let (stay, wait) = mpsc::channel::<()>();
        let (ready, is_ready) = mpsc::channel();
        let (p, s, r) = (pool.clone(), send.clone(), recv.clone());
        let idle = thread::spawn(move || {
            drop((p.alloc(len).unwrap(), s.alloc(len).unwrap(), r.alloc(len).unwrap()));
            ready.send(()).unwrap();
            wait.recv().unwrap();
        });
        is_ready.recv().unwrap();

        // Thread A takes all that it can get: what is not reserved, to the last.
        let p = pool.clone();
        let a = thread::spawn(move || {
            let bufs: Vec<Buf> = std::iter::from_fn(|| p.alloc(len).ok()).collect();
            let e = exhausted(p.alloc(len));
            assert_eq!((e.live_buffers, e.live, e.not_live), (16, 16 * len, 0));
            assert_eq!((e.capacity, e.reserved), (16 * len, 16 * len));
            bufs
        })
        .join()
        .unwrap();
        assert_eq!(a.len(), 16);
        // Each direction has its eight, whatever the other does.
        let s: Vec<_> =
            (0..8).map(|i| send.alloc(len).unwrap_or_else(|e| panic!("{i}: {e}"))).collect();
        let e = exhausted(send.alloc(len));
        assert_eq!((e.live_buffers, e.capacity, e.reserved), (24, 24 * len, 8 * len));
        assert!(e.to_string().contains("reserved for other shares"), "{e}");
        let r: Vec<_> =
            (0..8).map(|i| recv.alloc(len).unwrap_or_else(|e| panic!("{i}: {e}"))).collect();
        exhausted(recv.alloc(len));
        exhausted(pool.alloc(len));

        let stats = pool.stats();
        assert_eq!((stats.live, stats.live_buffers, stats.capacity), (32 * len, 32, 32 * len));
        for share in &stats.shares {
            assert_eq!((share.reserve.live_buffers, share.refused), (8, 1), "{share:?}");
            assert!(share.ran_dry >= 1 && share.class == "default");
        }
        // Unreserved memory serves all: what A gives back, each direction may have beyond its reserve.
        drop(a);
        let more: Vec<_> =
            (0..8).map(|_| (send.alloc(len).unwrap(), recv.alloc(len).unwrap())).collect();
        exhausted(send.alloc(len));
        exhausted(pool.alloc(len));
        // What comes back to a reserve serves its share again, before it is out of luck elsewhere.
        drop(s);
        drop(send.alloc(len).unwrap());
        exhausted(recv.alloc(len));
        exhausted(pool.alloc(len));
        stay.send(()).unwrap();
        idle.join().unwrap();
        drop((r, more));
        pool.check();
        assert_eq!(pool.stats().live, 0);
    }
}

#[test]
fn eight_greedy_threads_get_nothing_of_a_share() {
    const OWN: usize = 20;
    let pool = soft(64 * 4096).share("own", Reserve::buffers(OWN, 4096)).build().unwrap();
    let share = pool.share("own").unwrap();
    let done = AtomicBool::new(false);
    let reserve = {
        let bufs: Vec<_> = (0..OWN).map(|_| share.alloc(4096).unwrap()).collect();
        let mut addrs: Vec<_> = bufs.iter().map(|b| b.as_ptr() as usize).collect();
        addrs.sort_unstable();
        addrs
    };
    thread::scope(|s| {
        for _ in 0..8 {
            s.spawn(|| {
                let mut held: VecDeque<Buf> = VecDeque::new();
                let mut rng = Rng(7);
                while !done.load(Relaxed) {
                    match pool.alloc(rng.size(64, 16 << 10)) {
                        Ok(buf) => {
                            let addr = buf.as_ptr() as usize;
                            assert!(!reserve.contains(&(addr & !4095)), "of the reserve");
                            held.push_back(buf);
                        }
                        Err(_) => held.truncate(held.len() / 2),
                    }
                    if rng.below(50) == 0 {
                        pool.trim();
                    }
                }
            });
        }
        for round in 0..scaled(400) {
            // Its reserve is there to the last, every time, however the others press.
            let bufs: Vec<_> = (0..OWN)
                .map(|i| share.alloc(4096).unwrap_or_else(|e| panic!("{round}.{i}: {e}")))
                .collect();
            if round % 3 == 0 {
                thread::scope(|s| {
                    s.spawn(move || drop(bufs));
                });
            }
        }
        done.store(true, Relaxed);
    });
    pool.check();
}

#[test]
fn an_exhausted_share_under_threads_never_lies() {
    // All 4 blocks, half of them reserved, are out. Each thread frees any of them, and may have one for it:
    // at every moment one is free for each that looks, though it may move from the reserve and back to it.
    let pool = soft(4 * 4096).share("own", Reserve::buffers(2, 4096)).build().unwrap();
    let share = pool.share("own").unwrap();
    let pot: Mutex<Vec<Buf>> = Mutex::new((0..4).map(|_| share.alloc(4096).unwrap()).collect());
    thread::scope(|s| {
        for i in 0..4 {
            let (share, pot) = (&share, &pot);
            s.spawn(move || {
                let mut rng = Rng(i);
                for round in 0..scaled(4_000) {
                    let one = {
                        let mut pot = pot.lock();
                        let which = rng.below(pot.len());
                        pot.swap_remove(which)
                    };
                    drop(one);
                    if rng.below(2) == 0 {
                        thread::yield_now();
                    }
                    let next = share.alloc(4096).unwrap_or_else(|e| panic!("{i}, {round}: {e}"));
                    pot.lock().push(next);
                }
            });
        }
    });
    // By the lock, since the sanitizer does not see a scope's joins.
    pot.lock().clear();
    pool.check();
    assert_eq!(pool.stats().shares[0].refused, 0);
}

/// Requests hold a receive buffer until their reply has a send buffer; a reply gives both back once it is out.
/// Requests come faster than replies go. Says how many were answered before nothing moved any more.
fn serve(requests: usize, recv: impl Fn() -> Option<Buf>, send: impl Fn() -> Option<Buf>) -> usize {
    let (mut waiting, mut answered, mut to_come) = (VecDeque::new(), 0, requests);
    loop {
        let mut moved = false;
        // The network is greedy: all that there is room for arrives first.
        while to_come > 0
            && let Some(request) = recv()
        {
            waiting.push_back(request);
            to_come -= 1;
            moved = true;
        }
        let mut replies = Vec::new();
        while !waiting.is_empty()
            && let Some(reply) = send()
        {
            replies.push((reply, waiting.pop_front()));
            moved = true;
        }
        answered += replies.len();
        if !moved {
            return answered;
        }
    }
}

#[test]
fn two_directions_that_wait_for_one_another_go_on_with_shares_and_not_without() {
    const REQUESTS: usize = 1000;
    let bare = soft(32 * 4096).build().unwrap();
    let stuck = serve(REQUESTS, || bare.alloc(4096).ok(), || bare.alloc(4096).ok());
    assert_eq!(stuck, 0, "without shares requests have it all, and no reply can be sent");

    let pool = soft(32 * 4096)
        .share("send", Reserve::buffers(1, 4096))
        .share("recv", Reserve::buffers(1, 4096))
        .build()
        .unwrap();
    let (send, recv) = (pool.share("send").unwrap(), pool.share("recv").unwrap());
    assert_eq!(serve(REQUESTS, || recv.alloc(4096).ok(), || send.alloc(4096).ok()), REQUESTS);

    // The same with a thread for each direction: each tries again until it has one, and all come through.
    let (requests, inbox) = mpsc::channel::<Buf>();
    let tries = AtomicUsize::new(0);
    let again = |share: &Share| loop {
        match share.alloc(4096) {
            Ok(buf) => break buf,
            Err(AllocError::Exhausted(_)) => {
                tries.fetch_add(1, Relaxed);
                thread::yield_now();
            }
            Err(e) => panic!("{e}"),
        }
    };
    thread::scope(|s| {
        s.spawn(|| {
            for _ in 0..scaled(20_000) {
                requests.send(again(&recv)).unwrap();
            }
            drop(requests);
        });
        s.spawn(|| {
            for request in inbox {
                drop((again(&send), request));
            }
        });
    });
    pool.check();
    assert_eq!(pool.stats().live, 0);
}

#[test]
fn a_class_that_is_all_shares_leaves_the_pool_nothing() {
    let pool = soft(MIB).share("a", MIB / 2).share("b", MIB / 2).build().unwrap();
    let e = exhausted(pool.alloc(1));
    assert_eq!((e.capacity, e.reserved), (0, MIB));
    exhausted(pool.alloc(2 * MIB));
    assert!(matches!(
        pool.alloc_layout(std::alloc::Layout::from_size_align(1, 2 * MIB).unwrap()),
        Err(AllocError::Alignment { .. })
    ));
    let mut batch = Batch::with_capacity(4);
    exhausted(pool.alloc_many(&mut batch, 64, 4));
    let a = pool.share("a").unwrap();
    assert_eq!(a.max_len(), MIB / 2);
    let whole = a.alloc(MIB / 2).unwrap();
    exhausted(a.alloc(1));
    drop(whole);
    assert!(
        matches!(a.alloc(MIB / 2 + 1), Err(AllocError::TooLarge { max, .. }) if max == MIB / 2)
    );
    pool.check();
}

#[test]
fn a_share_larger_than_an_arena_lies_in_several() {
    let pool =
        soft(4 * MIB).arena_size(MIB).share("big", Reserve::buffers(40, 64 << 10)).build().unwrap();
    let big = pool.share("big").unwrap();
    assert_eq!(pool.stats().shares[0].reserve.capacity, 40 * (64 << 10));
    let taken: Vec<_> = std::iter::from_fn(|| pool.alloc(4096).ok()).collect();
    assert_eq!(taken.len() * 4096, 4 * MIB - 40 * (64 << 10));
    let bufs: Vec<_> = (0..40).map(|_| big.alloc(64 << 10).unwrap()).collect();
    for b in &bufs {
        let arena = pool.arenas().into_iter().find(|a| pool.keys_of(b.as_ptr()) == Some(a.keys));
        assert_eq!(b.keys(), arena.unwrap().keys, "inside one region (P3)");
    }
    assert_eq!(pool.arenas().len(), 4, "a share has no region of its own");
    pool.check();
}

#[test]
fn a_share_takes_lengths_alignments_and_batches_beyond_its_reserve() {
    let pool = soft(MIB).share("own", Reserve::buffers(4, 4096)).build().unwrap();
    let own = pool.share("own").unwrap();
    // Longer than the reserve.
    let long = own.alloc(MIB / 2).unwrap();
    assert_eq!(pool.stats().shares[0].reserve.live, 0);
    drop(long);
    let layout = std::alloc::Layout::from_size_align(100, 64 << 10).unwrap();
    let aligned = own.alloc_layout(layout).unwrap();
    assert_eq!(aligned.as_ptr() as usize % (64 << 10), 0);
    assert!(own.alloc_zeroed(5000).unwrap().iter().all(|&b| b == 0));
    // A batch from the reserve, and one from beyond, which goes on there.
    let mut batch = Batch::with_capacity(64);
    assert_eq!(own.alloc_many(&mut batch, 4096, 4).unwrap(), 4);
    assert_eq!(pool.stats().shares[0].reserve.live_buffers, 4);
    let mut second = Batch::with_capacity(64);
    assert_eq!(own.alloc_many(&mut second, 4096, 10).unwrap(), 10);
    batch.free();
    assert_eq!(own.alloc_many(&mut second, 4096, 10).unwrap(), 10);
    assert_eq!(pool.stats().shares[0].reserve.live_buffers, 0);
    assert!(matches!(own.alloc_many(&mut second, 64, 1), Err(AllocError::BatchInUse { .. })));
    second.free();
    let rest: Vec<_> = std::iter::from_fn(|| own.alloc(4096).ok()).collect();
    exhausted(own.alloc_many(&mut second, 4096, 1));
    assert_eq!(own.alloc_many(&mut second, 4096, 0).unwrap(), 0);
    drop((rest, aligned, second));
    pool.check();
}

#[test]
fn what_other_threads_keep_of_a_reserve_is_found_before_a_refusal() {
    // Everything is freed by threads that stay, so it lies in their magazines, of both heaps.
    let pool = soft(64 * 4096).share("own", Reserve::buffers(32, 4096)).build().unwrap();
    let share = pool.share("own").unwrap();
    let all: Vec<Buf> = (0..64).map(|_| share.alloc(4096).unwrap()).collect();
    exhausted(share.alloc(4096));
    let (freed, meet) = (Barrier::new(9), Barrier::new(9));
    let parts: Vec<Vec<Buf>> = {
        let mut all = all;
        (0..8).map(|_| all.split_off(all.len() - 8)).collect()
    };
    thread::scope(|s| {
        for part in parts {
            let (freed, meet) = (&freed, &meet);
            s.spawn(move || {
                drop(part);
                freed.wait();
                meet.wait();
            });
        }
        freed.wait();
        let again: Vec<Buf> =
            (0..64).map(|i| share.alloc(4096).unwrap_or_else(|e| panic!("{i}: {e}"))).collect();
        exhausted(share.alloc(4096));
        meet.wait();
        drop(again);
    });
    pool.check();
}

/// Everything that keeps a pool of two classes and two shares alive, and a buffer of each heap.
enum Part {
    Pool(Pool),
    Class(Class<Remote>),
    Share(Share),
    ClassShare(Share<Remote>),
    Buf(Buf),
    ClassBuf(Buf<Remote>),
}

fn parts(device: &Device) -> Vec<Part> {
    let pool = soft(256 << 10)
        .device(device.clone())
        .class("shared", SHARED, 256 << 10)
        .share("own", Reserve::buffers(1, 4096))
        .share_in("shared", "theirs", Reserve::buffers(1, 4096))
        .build()
        .unwrap();
    let class: Class<Remote> = pool.class("shared").unwrap();
    let (own, theirs) = (pool.share("own").unwrap(), class.share("theirs").unwrap());
    let (unreserved, reserved) = (pool.alloc(4096).unwrap(), own.alloc(4096).unwrap());
    let (in_class, in_share) = (class.alloc(4096).unwrap(), theirs.alloc(4096).unwrap());
    vec![
        Part::Buf(unreserved),
        Part::Buf(reserved),
        Part::ClassBuf(in_class),
        Part::ClassBuf(in_share),
        Part::Pool(pool),
        Part::Class(class),
        Part::Share(own),
        Part::ClassShare(theirs),
    ]
}

/// Everything that is left works.
fn exercise(part: &mut Part, byte: u8) {
    match part {
        Part::Buf(b) => b.fill(byte),
        Part::ClassBuf(b) => b.fill(byte),
        Part::Pool(pool) => pool.alloc(64).unwrap().fill(byte),
        Part::Class(class) => class.alloc(64).unwrap().fill(byte),
        Part::Share(share) => share.alloc(64).unwrap().fill(byte),
        Part::ClassShare(share) => share.alloc(64).unwrap().fill(byte),
    }
}

/// Drops in the given order, and says at each step which regions must still be there.
fn drop_in_order(device: &Device, order: &[usize]) {
    let soft = device.as_soft().unwrap();
    let before = soft.regions();
    let mut parts: Vec<Option<Part>> = parts(device).into_iter().map(Some).collect();
    assert_eq!(soft.regions(), before + 2);
    for &i in order {
        for part in parts.iter_mut().flatten() {
            exercise(part, i as u8);
        }
        drop(parts[i].take());
        let any = |range: std::ops::Range<usize>| parts[range].iter().any(Option::is_some);
        let handles = any(4..8);
        let expected = usize::from(handles || any(0..2)) + usize::from(handles || any(2..4));
        assert_eq!(soft.regions(), before + expected, "{order:?} at {i}");
    }
}

fn permutations(n: usize, mut visit: impl FnMut(&[usize])) {
    let mut order: Vec<usize> = (0..n).collect();
    let mut counters = vec![0; n];
    visit(&order);
    let mut i = 0;
    while i < n {
        if counters[i] < i {
            order.swap(if i % 2 == 0 { 0 } else { counters[i] }, i);
            visit(&order);
            counters[i] += 1;
            i = 0;
        } else {
            counters[i] = 0;
            i += 1;
        }
    }
}

#[test]
fn every_drop_order_is_safe_and_each_classs_arenas_go_with_the_last_on_them() {
    let device = Device::soft();
    // Every order of six, after a buffer and a handle that the others stand for.
    permutations(6, |order| {
        let rest = order.iter().map(|&i| [0, 1, 3, 4, 5, 7][i]);
        drop_in_order(&device, &[2, 6].into_iter().chain(rest).collect::<Vec<_>>());
    });
    // And some of all eight.
    let mut count = 0usize;
    permutations(8, |order| {
        count += 1;
        if count.is_multiple_of(101) {
            drop_in_order(&device, order);
        }
    });
    assert_eq!(count, 40_320);
    assert_eq!(device.as_soft().unwrap().regions(), 0);
}

#[test]
fn drops_on_many_threads_at_once_tear_each_class_down_once() {
    let device = Device::soft();
    for _ in 0..scaled(300) {
        let parts = parts(&device);
        let start = Barrier::new(parts.len());
        thread::scope(|s| {
            for part in parts {
                let start = &start;
                s.spawn(move || {
                    start.wait();
                    drop(part);
                });
            }
        });
        assert_eq!(device.as_soft().unwrap().regions(), 0);
    }
    assert_eq!(pinpool::leaked_bytes(), 0);
}

#[test]
fn close_reports_over_all_heaps() {
    let (registrar, device) = {
        let r = FaultyRegistrar::new(&Device::soft());
        (r.clone(), Device::custom(r))
    };
    let build = || {
        soft(64 << 10)
            .device(device.clone())
            .class("shared", SHARED, 64 << 10)
            .share_in("shared", "own", Reserve::buffers(2, 4096))
            .build()
            .unwrap()
    };
    let pool = build();
    let class: Class = pool.class("shared").unwrap();
    let share = pool.share("own").unwrap();
    assert!(matches!(pool.close(), Err(CloseError::Shared(2))));
    let buf = share.alloc(4096).unwrap();
    let other = class.alloc(100).unwrap();
    drop(share);
    let pool = class.pool().clone();
    drop(class);
    assert!(matches!(pool.close(), Err(CloseError::Live { buffers: 2, bytes: 4224 })));
    assert_eq!(registrar.live(), 1, "the default class had nothing out");
    drop(other);
    assert_eq!(registrar.live(), 1, "a share's buffer keeps its class's arenas");
    drop(buf);
    assert_eq!(registrar.live(), 0);
    build().close().unwrap();
    assert_eq!(registrar.live(), 0);
}

#[test]
fn a_failure_in_a_later_class_undoes_the_earlier_ones() {
    const ENOMEM: i32 = 12;
    for nth in 1..=4 {
        let registrar = FaultyRegistrar::new(&Device::soft()).fault(Fault::Register(nth, ENOMEM));
        let error = soft(2 * MIB)
            .device(Device::custom(registrar.clone()))
            .arena_size(MIB)
            .start_threads(1)
            .class("a", SHARED, MIB)
            .class("b", SHARED, MIB)
            .share_in("a", "s", 4096)
            .build()
            .unwrap_err();
        let BuildError::Register { arena, arenas, .. } = error else { panic!("{error}") };
        assert_eq!((arena as u64, arenas), (nth - 1, 4), "numbered over the whole pool");
        assert_eq!((registrar.live(), registrar.deregister_calls()), (0, nth - 1));
    }
}

#[test]
fn tables_that_cannot_be_had_undo_all_classes_and_shares() {
    // Three tables a heap, two heaps a class, two classes.
    for nth in 1..=13 {
        let registrar = FaultyRegistrar::new(&Device::soft());
        let mapping = FaultyMapping::new().fault(MapFault::Fail(MapStep::Table, nth, 12));
        let built = soft(MIB)
            .device(Device::custom(registrar.clone()))
            .faulty_mapping(&mapping)
            .class("a", SHARED, MIB)
            .share("s", 4096)
            .share_in("a", "t", 4096)
            .build();
        assert_eq!(built.is_err(), nth <= 12);
        assert_eq!(registrar.live(), if nth <= 12 { 0 } else { 2 });
        match built {
            Err(e) => assert!(matches!(e, BuildError::Reserve { .. }), "{e}"),
            Ok(pool) => pool.close().unwrap(),
        }
        assert_eq!(registrar.live(), 0);
    }
}

#[test]
fn all_classes_are_judged_together_before_the_first_page() {
    let registrar = FaultyRegistrar::new(&Device::soft()).max_mr(3);
    let build = |b: usize| {
        soft(2 * MIB)
            .device(Device::custom(registrar.clone()))
            .arena_size(MIB)
            .class("b", SHARED, b)
            .build()
    };
    let error = build(2 * MIB).unwrap_err();
    assert!(matches!(error, BuildError::TooManyArenas { arenas: 4, max_mr: 3, .. }), "{error}");
    assert_eq!(registrar.register_calls(), 0);
    drop(build(MIB).unwrap());
    // What is wrong for every class is said once.
    let error = soft(2 * MIB).class("b", SHARED, MIB).arena_size(3 << 20).build().unwrap_err();
    assert!(matches!(error, BuildError::ArenaSize { .. }), "{error}");
}

#[test]
fn progress_runs_over_all_classes() {
    let (seen, all) = mpsc::channel();
    let pool = soft(2 * MIB)
        .class("b", SHARED, MIB)
        .start_threads(1)
        .on_progress(move |p| seen.send(p).unwrap())
        .build()
        .unwrap();
    let all: Vec<_> = all.iter().collect();
    assert!(all.iter().all(|p| p.bytes_total == 3 * MIB as u64 && p.bytes_done <= p.bytes_total));
    assert_eq!(all.last().unwrap().bytes_done, 3 * MIB as u64);
    drop(pool);
}

#[test]
fn what_cannot_be_built_is_refused_with_its_name() {
    let class = |b: pinpool::Builder| match b.build().unwrap_err() {
        BuildError::Class { name, problem } => (name, problem),
        e => panic!("{e}"),
    };
    assert_eq!(class(soft(MIB).class("", SHARED, MIB)).0, "");
    assert_eq!(class(soft(MIB).class("default", SHARED, MIB)).0, "default");
    let twice = soft(MIB).class("a", SHARED, MIB).class("a", SHARED, MIB);
    assert!(class(twice).1.contains("two"));
    assert!(class(soft(MIB).class("a", SHARED, 0)).1.contains("capacity is 0"));
    let conflict = soft(MIB).class("a", Access::REMOTE_WRITE, MIB).build().unwrap_err();
    assert!(matches!(conflict, BuildError::Access { .. }), "{conflict}");

    let share = |b: pinpool::Builder| match b.build().unwrap_err() {
        BuildError::Share { name, asked, free, problem, .. } => (name, asked, free, problem),
        e => panic!("{e}"),
    };
    assert_eq!(share(soft(MIB).share("", 4096)).0, "");
    assert!(share(soft(MIB).share("a", 4096).share("a", 4096)).3.contains("two"));
    assert!(share(soft(MIB).share_in("b", "a", 4096)).3.contains("no class"));
    assert!(share(soft(MIB).share("a", 0)).3.contains("nothing"));
    assert!(share(soft(MIB).share("a", usize::MAX)).3.contains("nothing"));
    let (_, asked, free, _) = share(soft(MIB).share("a", MIB / 2).share("b", MIB / 2 + 1));
    assert_eq!((asked, free), (MIB / 2, MIB / 2 - 4096), "the longest is placed first");
    let torn = soft(2 * MIB)
        .arena_size(MIB)
        .share("a", Reserve::buffers(2, MIB / 2 + 1))
        .share("b", MIB / 2);
    assert!(torn.build().is_ok(), "one in each arena, and b beside");
    let torn = soft(2 * MIB).arena_size(MIB).share("a", Reserve::buffers(3, MIB / 2 + 1)).build();
    assert!(matches!(torn, Err(BuildError::Share { .. })));
}

#[test]
fn shares_are_found_by_name_and_only_as_their_class_allows() {
    let pool = soft(MIB)
        .access(Access::LOCAL_WRITE)
        .class("shared", SHARED, MIB)
        .share("own", 4096)
        .share_in("shared", "theirs", 4096)
        .build()
        .unwrap();
    let error = pool.share("mine").unwrap_err();
    let present = vec!["own".to_owned(), "theirs".to_owned()];
    assert_eq!(error, LookupError::NoShare { asked: "mine".into(), present });
    let shared: Class<Remote> = pool.class("shared").unwrap();
    let theirs = shared.share("theirs").unwrap();
    let buf: Buf<Remote> = theirs.alloc(64).unwrap();
    assert_eq!(pool.keys_of(buf.as_ptr()).unwrap().rkey, Some(buf.remote().rkey));
    assert!(matches!(shared.share("own"), Err(LookupError::NoShare { .. })));
    assert!(matches!(shared.pool().share("own"), Err(LookupError::NotRemote { .. })));
    assert!(pool.share("theirs").unwrap().alloc(64).unwrap().remote().is_some());
    assert!(format!("{theirs:?} {shared:?}").contains("shared"));
}

#[test]
fn raw_pointers_and_look_ups_cover_all_heaps() {
    let pool = soft(MIB)
        .access(Access::LOCAL_WRITE)
        .class("shared", SHARED, MIB)
        .share("own", 64 << 10)
        .build()
        .unwrap();
    let (class, own): (Class<Remote>, _) =
        (pool.class("shared").unwrap(), pool.share("own").unwrap());
    let raws = [
        pool.alloc(100).unwrap().into_raw(),
        own.alloc(100).unwrap().into_raw(),
        class.alloc(100).unwrap().into_raw(),
    ];
    assert_eq!(pool.stats().live_buffers, 3);
    for (i, raw) in raws.iter().enumerate() {
        let ptr = raw.as_ptr();
        // SAFETY: the only copy of each pointer; wrong ones must be refused.
        unsafe {
            assert!(matches!(pool.free_raw(ptr.wrapping_add(1)), Err(FreeError::Interior { .. })));
            // A handle whose type says Remote gives no buffer that is not.
            let typed = class.pool().from_raw(ptr);
            if i < 2 {
                let addr = ptr as usize;
                assert_eq!(typed.unwrap_err(), FreeError::OtherReach { addr, remote: false });
                let back = pool.from_raw(ptr).unwrap();
                assert_eq!(back.as_ptr(), ptr.cast_const());
                assert_eq!(back.remote(), None);
            } else {
                assert_eq!(typed.unwrap().remote().len, 128);
            }
            assert!(matches!(pool.free_raw(ptr), Err(FreeError::NotOut { .. })), "twice");
        }
    }
    // SAFETY: must be refused.
    unsafe {
        assert_eq!(pool.free_raw(std::ptr::null_mut()), Err(FreeError::Null));
        assert_eq!(class.pool().free_raw(std::ptr::null_mut()), Err(FreeError::Null));
        let mut on_stack = 0u8;
        assert!(matches!(pool.free_raw(&raw mut on_stack), Err(FreeError::Foreign { .. })));
    }
    assert_eq!(pool.stats().live_buffers, 0);
    // Each went home: the share has all of its reserve again.
    pool.trim();
    assert_eq!(pool.stats().shares[0].reserve.largest_free, 64 << 10);
    pool.check();
}

#[test]
fn books_are_kept_apart_and_sum_up() {
    let pool = soft(MIB)
        .class("shared", SHARED, MIB)
        .share("own", 64 << 10)
        .share_in("shared", "theirs", 128 << 10)
        .build()
        .unwrap();
    let class: Class = pool.class("shared").unwrap();
    let (own, theirs) = (pool.share("own").unwrap(), pool.share("theirs").unwrap());
    let held = [
        (0..3).map(|_| pool.alloc(4096).unwrap()).collect::<Vec<_>>(),
        (0..5).map(|_| own.alloc(4096).unwrap()).collect(),
        (0..7).map(|_| class.alloc(4096).unwrap()).collect(),
        (0..9).map(|_| theirs.alloc(8192).unwrap()).collect(),
    ];
    let s = pool.stats();
    assert!(s.balanced(), "{s:#?}");
    assert_eq!((s.live_buffers, s.arenas, s.register_calls, s.capacity), (24, 2, 2, 2 * MIB));
    let names: Vec<_> = s.access_classes.iter().map(|a| (&*a.name, a.arenas)).collect();
    assert_eq!(names, [("default", 1), ("shared", 1)]);
    let (default, shared) = (&s.access_classes[0], &s.access_classes[1]);
    assert_eq!((default.all.live_buffers, default.unreserved.live_buffers), (8, 3));
    assert_eq!((shared.all.live_buffers, shared.unreserved.live_buffers), (16, 7));
    assert_eq!((default.all.capacity, default.unreserved.capacity), (MIB, MIB - (64 << 10)));
    assert_eq!(shared.access, SHARED);
    let shares: Vec<_> =
        s.shares.iter().map(|s| (&*s.name, &*s.class, s.reserve.live_buffers, s.refused)).collect();
    assert_eq!(shares, [("own", "default", 5, 0), ("theirs", "shared", 9, 0)]);
    let block = |n| s.classes.iter().find(|c| c.block == n).unwrap().live_buffers;
    assert_eq!((block(4096), block(8192)), (15, 9));
    drop(held);
    pool.check();
}

#[test]
fn more_heaps_than_slots_work_too() {
    let device = Device::soft();
    let mut pools = Vec::new();
    for i in 0..100 {
        let pool = soft(64 << 10)
            .device(device.clone())
            .class("b", SHARED, 64 << 10)
            .share("s", Reserve::buffers(2, 4096))
            .build()
            .unwrap_or_else(|e| panic!("{i}: {e}"));
        pools.push((pool.class::<Any>("b").unwrap(), pool.share("s").unwrap(), pool));
    }
    for (class, share, pool) in &pools {
        let rest: Vec<_> = std::iter::from_fn(|| pool.alloc(4096).ok()).collect();
        assert_eq!(rest.len(), 14);
        let held =
            [share.alloc(4096).unwrap(), share.alloc(4096).unwrap(), class.alloc(4096).unwrap()];
        exhausted(share.alloc(4096));
        drop(rest);
        drop(share.alloc(4096).unwrap());
        drop(held);
        drop(share.alloc(4096).unwrap());
        pool.check();
    }
    drop(pools);
    assert_eq!(device.as_soft().unwrap().regions(), 0);
}

#[test]
fn a_thread_that_ends_gives_back_to_each_heap() {
    let pool = soft(MIB).class("b", SHARED, MIB).share("s", 256 << 10).build().unwrap();
    let (class, share): (Class, _) = (pool.class("b").unwrap(), pool.share("s").unwrap());
    for _ in 0..20 {
        thread::scope(|s| {
            s.spawn(|| {
                let all: Vec<Buf> = (0..30)
                    .flat_map(|_| [pool.alloc(900), class.alloc(900), share.alloc(900)])
                    .map(Result::unwrap)
                    .collect();
                drop(all);
            });
        });
    }
    let s = pool.stats();
    assert_eq!((s.live, s.live_buffers), (0, 0));
    pool.trim();
    let s = pool.stats();
    assert_eq!(s.shares[0].reserve.largest_free, 256 << 10);
    assert_eq!(s.access_classes[1].unreserved.largest_free, MIB);
    pool.check();
}

#[test]
fn a_pool_that_grows_keeps_its_shares_and_serves_all_from_what_comes() {
    let pool = soft(MIB)
        .max_capacity(3 * MIB)
        .arena_size(MIB)
        .low_watermark(0)
        .growth_by_hand()
        .class("b", SHARED, MIB)
        .share("own", Reserve::buffers(64, 4096))
        .build()
        .unwrap();
    let own = pool.share("own").unwrap();
    assert_eq!((pool.capacity(), pool.max_capacity()), (2 * MIB, 4 * MIB));
    let first: Vec<_> = std::iter::from_fn(|| pool.alloc(4096).ok()).collect();
    assert_eq!(first.len(), 192);
    let e = exhausted(pool.alloc(4096));
    assert_eq!(
        (e.capacity, e.reserved, e.max_capacity),
        (768 << 10, 256 << 10, 3 * MIB - (256 << 10))
    );
    let reserve: Vec<_> = (0..64).map(|_| own.alloc(4096).unwrap()).collect();
    // A share that is refused asks for more, as everybody does.
    let e = exhausted(own.alloc(4096));
    assert!(e.to_string().contains("may grow"), "{e}");
    pool.tick(Duration::from_secs(1));
    assert_eq!((pool.capacity(), pool.stats().growths), (3 * MIB, 1));
    let more: Vec<_> = (0..256).map(|_| own.alloc(4096).unwrap()).collect();
    exhausted(own.alloc(4096));
    exhausted(pool.alloc(4096));
    assert_eq!(pool.stats().shares[0].reserve.live_buffers, 64);
    drop(reserve);
    exhausted(pool.alloc(4096));
    drop((own.alloc(4096).unwrap(), more, first));
    pool.check();
    let stats = pool.stats();
    assert_eq!((stats.live, stats.access_classes[0].all.capacity), (0, 2 * MIB));
}

#[test]
fn several_devices_have_all_classes_and_shares() {
    let registrars: Vec<_> = (0..3).map(|_| FaultyRegistrar::new(&Device::soft())).collect();
    let devices: Vec<_> = registrars.iter().map(|r| Device::custom(r.clone())).collect();
    let [a, b, c] = &devices[..] else { unreachable!() };
    let pool = soft(MIB)
        .access(Access::LOCAL_WRITE)
        .devices([a.clone(), b.clone()])
        .class("shared", SHARED, MIB)
        .share("own", Reserve::buffers(2, 4096))
        .share_in("shared", "theirs", Reserve::buffers(2, 4096))
        .build()
        .unwrap();
    let shared: Class<Rails> = pool.class("shared").unwrap();
    let bufs = [
        pool.alloc(4096).unwrap(),
        pool.share("own").unwrap().alloc(4096).unwrap(),
        pool.alloc_in(&shared, 4096).unwrap(),
        shared.share("theirs").unwrap().alloc(4096).unwrap(),
    ];
    let check = |device: &Device, there: bool| {
        for (i, buf) in bufs.iter().enumerate() {
            let keys = buf.keys_on(device);
            assert_eq!(keys.is_ok(), there, "buffer {i}");
            let Ok(keys) = keys else { continue };
            assert_eq!(pool.keys_of_on(buf.as_ptr(), device).unwrap(), Some(keys));
            assert_eq!(keys.rkey.is_some(), i >= 2);
            let addr = buf.as_ptr() as usize;
            let arenas = pool.arenas_on(device).unwrap();
            let of = |a: &&pinpool::ArenaInfo| {
                (a.addr.as_ptr() as usize..a.addr.as_ptr() as usize + a.len).contains(&addr)
            };
            assert_eq!(arenas.iter().find(of).unwrap().keys, keys);
        }
    };
    check(a, true);
    check(b, true);
    check(c, false);
    assert_eq!(registrars.iter().map(FaultyRegistrar::live).collect::<Vec<_>>(), [2, 2, 0]);
    // From a handle of any class a device comes and goes with all of them.
    shared.pool().add_device(c).wait().unwrap();
    check(c, true);
    assert_eq!(registrars[2].live(), 2);
    pool.remove_device(a).wait().unwrap();
    check(a, false);
    check(c, true);
    assert_eq!(registrars[0].live(), 0);
    // One that refuses the second class's arena has none of them.
    let odd = FaultyRegistrar::new(&Device::soft()).fault(Fault::Register(2, 12));
    let device = Device::custom(odd.clone());
    pool.add_device(&device).wait().unwrap_err();
    check(&device, false);
    assert_eq!((odd.register_calls(), odd.live()), (2, 0));
    drop((pool, shared));
    check_live(&registrars[1..], 2);
    drop(bufs);
    check_live(&registrars[1..], 0);
}

#[track_caller]
fn check_live(registrars: &[FaultyRegistrar], regions: u64) {
    assert!(registrars.iter().all(|r| r.live() == regions));
}

#[test]
fn adopted_memory_is_one_class_and_others_are_mapped_beside_it() {
    let mut memory = memmap2::MmapMut::map_anon(MIB).unwrap();
    let range = memory.as_ptr_range();
    // SAFETY: the mapping is used by the pool alone until it is closed below.
    let builder = unsafe { Pool::builder().adopt(memory.as_mut_ptr(), memory.len()) };
    let pool = builder
        .device(Device::soft())
        .pages(pinpool::Pages::Base)
        .class("b", SHARED, MIB)
        .share("own", 64 << 10)
        .build()
        .unwrap();
    let own = pool.share("own").unwrap().alloc(64 << 10).unwrap();
    assert!(range.contains(&own.as_ptr()));
    assert!(range.contains(&pool.alloc(4096).unwrap().as_ptr()));
    let beside = pool.class::<Remote>("b").unwrap().alloc(4096).unwrap();
    assert!(!range.contains(&beside.as_ptr()));
    pool.check();
    drop((own, beside));
    pool.close().unwrap();
    memory[..3].copy_from_slice(b"yes");
}

const LONG: Duration = Duration::from_secs(600);

#[test]
fn two_directions_that_wait_for_one_another_are_served_by_their_shares() {
    // Requests hold their buffer until the reply has one; both wait for as long as it takes. With one buffer
    // for each direction, and all else taken, they go on.
    let pool = soft(16 * 4096)
        .share("send", Reserve::buffers(1, 4096))
        .share("recv", Reserve::buffers(1, 4096))
        .build()
        .unwrap();
    let hoard: Vec<_> = std::iter::from_fn(|| pool.alloc(4096).ok()).collect();
    assert_eq!(hoard.len(), 14);
    let (send, recv) = (pool.share("send").unwrap(), pool.share("recv").unwrap());
    let (requests, inbox) = mpsc::channel::<Buf>();
    let rounds = scaled(5_000);
    thread::scope(|s| {
        s.spawn(|| {
            for _ in 0..rounds {
                requests.send(recv.alloc_wait(4096, LONG).unwrap()).unwrap();
            }
            drop(requests);
        });
        s.spawn(|| {
            for request in inbox {
                let reply = send.alloc_wait(4096, LONG).unwrap();
                drop(request);
                drop(reply);
            }
        });
    });
    drop(hoard);
    pool.check();
    let stats = pool.stats();
    assert_eq!((stats.live, stats.waiting), (0, 0));
    assert_eq!(
        stats.waits,
        stats.shares.iter().map(|s| s.waits).sum::<u64>(),
        "in the shares' books"
    );

    // Without shares the first request that finds no reply's buffer waits for itself.
    let bare = soft(2 * 4096).build().unwrap();
    let held = [bare.alloc(4096).unwrap(), bare.alloc(4096).unwrap()];
    let error = bare.alloc_wait(4096, Duration::from_millis(20)).unwrap_err();
    assert!(matches!(error, AllocError::TimedOut { .. }), "{error}");
    drop(held);
}

#[test]
fn who_waits_through_a_share_is_served_by_either_heap_and_leaves_both_lines() {
    for from_reserve in [true, false] {
        let pool = soft(4 * 4096).share("own", Reserve::buffers(2, 4096)).build().unwrap();
        let own = pool.share("own").unwrap();
        let reserve = [own.alloc(4096).unwrap(), own.alloc(4096).unwrap()];
        let rest = [pool.alloc(4096).unwrap(), pool.alloc(4096).unwrap()];
        let mut future = Box::pin(own.alloc_async(4096));
        let mut cx = Context::from_waker(Waker::noop());
        assert!(future.as_mut().poll(&mut cx).is_pending());
        let stats = pool.stats();
        assert_eq!((stats.waiting, stats.shares[0].waiting, stats.waits), (1, 1, 1));
        let (freed, kept) = if from_reserve { (reserve, rest) } else { (rest, reserve) };
        let addrs = freed.each_ref().map(|b| b.as_ptr());
        let [one, two] = freed;
        drop(one);
        let Poll::Ready(Ok(got)) = future.as_mut().poll(&mut cx) else { panic!("one is free") };
        assert!(addrs.contains(&got.as_ptr()));
        let stats = pool.stats();
        assert_eq!((stats.waiting, stats.shares[0].waiting), (0, 0), "out of both lines");
        drop(two);
        drop((got, kept));
        drop(own.alloc(4096).unwrap());
        pool.check();
        assert_eq!(pool.stats().live, 0);
    }
}

#[test]
fn a_wait_through_a_share_that_is_given_up_gives_on_what_both_lines_assigned() {
    let pool = soft(4 * 4096).share("own", Reserve::buffers(2, 4096)).build().unwrap();
    let own = pool.share("own").unwrap();
    let reserve = [own.alloc(4096).unwrap(), own.alloc(4096).unwrap()];
    let rest = [pool.alloc(4096).unwrap(), pool.alloc(4096).unwrap()];
    let mut cx = Context::from_waker(Waker::noop());
    let mut first = Box::pin(own.alloc_async(4096));
    let mut second = Box::pin(own.alloc_async(4096));
    let mut other = Box::pin(pool.alloc_async(4096));
    assert!(first.as_mut().poll(&mut cx).is_pending());
    assert!(second.as_mut().poll(&mut cx).is_pending());
    assert!(other.as_mut().poll(&mut cx).is_pending());
    // Both lines assign to the first before it looks.
    let [r, _r] = reserve;
    let [u, _u] = rest;
    drop((r, u));
    drop(first);
    assert!(second.as_mut().poll(&mut cx).is_ready(), "one of the two is the second's");
    // Which has been dropped again, so the pool's own waiter has had the unreserved one, or has it now.
    drop(second);
    assert!(other.as_mut().poll(&mut cx).is_ready());
    drop((other, _r, _u));
    pool.check();
    let stats = pool.stats();
    assert_eq!((stats.live, stats.waiting), (0, 0));
}

#[test]
fn a_wait_through_a_share_times_out_with_the_books_and_refuses_what_no_wait_can_bring() {
    let pool = soft(MIB).share("own", 64 << 10).build().unwrap();
    let own = pool.share("own").unwrap();
    assert!(matches!(own.alloc_wait(2 * MIB, LONG), Err(AllocError::TooLarge { .. })));
    // Longer than the reserve: waits for the unreserved memory alone, and stands in no one's way in the other.
    let held = pool.alloc(4096).unwrap();
    let whole = MIB - (64 << 10);
    let mut long = Box::pin(own.alloc_async(whole));
    let mut cx = Context::from_waker(Waker::noop());
    assert!(long.as_mut().poll(&mut cx).is_pending());
    for _ in 0..200 {
        drop(own.alloc(4096).unwrap());
    }
    drop(held);
    let Poll::Ready(Ok(all)) = long.as_mut().poll(&mut cx) else { panic!("all of it is free") };
    let reserve = own.alloc(64 << 10).unwrap();
    let AllocError::TimedOut { books, .. } =
        own.alloc_wait(64, Duration::from_millis(5)).unwrap_err()
    else {
        panic!("nothing is free")
    };
    assert_eq!((books.capacity, books.live_buffers), (MIB, 2));
    drop((all, reserve));
    let aligned = std::alloc::Layout::from_size_align(64, 32 << 10).unwrap();
    drop(own.alloc_layout_wait(aligned, LONG).unwrap());
    pool.check();
}

#[test]
fn waiters_of_shares_and_pool_under_threads_all_come_through() {
    let pool = soft(8 * 4096).share("own", Reserve::buffers(3, 4096)).build().unwrap();
    let own = pool.share("own").unwrap();
    thread::scope(|s| {
        for i in 0..8u64 {
            let (pool, own) = (&pool, &own);
            s.spawn(move || {
                let mut rng = Rng(i);
                for _ in 0..scaled(2_000) {
                    if rng.below(4) == 0 {
                        // Given up at once, now and then while something is assigned.
                        let mut f = Box::pin(own.alloc_async(4096));
                        let mut cx = Context::from_waker(Waker::noop());
                        drop(f.as_mut().poll(&mut cx));
                        continue;
                    }
                    let got = if i % 2 == 0 {
                        own.alloc_wait(4096, LONG)
                    } else {
                        pool.alloc_wait(4096, LONG)
                    };
                    drop(got.unwrap());
                }
            });
        }
    });
    pool.check();
    let stats = pool.stats();
    assert_eq!((stats.live, stats.waiting), (0, 0));
}

#[test]
fn tokens_and_posted_work_of_all_heaps_come_back_through_any_handle() {
    let pool = soft(MIB)
        .access(Access::LOCAL_WRITE)
        .class("shared", SHARED, MIB)
        .share("own", 64 << 10)
        .share_in("shared", "theirs", 64 << 10)
        .build()
        .unwrap();
    let (class, own): (Class<Remote>, _) =
        (pool.class("shared").unwrap(), pool.share("own").unwrap());
    let theirs = pool.share("theirs").unwrap();
    let bufs = || {
        let any: Class = pool.class("shared").unwrap();
        [pool.alloc(100), own.alloc(100_000 >> 4), any.alloc(4096), theirs.alloc(70)]
            .map(Result::unwrap)
    };
    let mut seen = Vec::new();
    for (i, buf) in bufs().into_iter().enumerate() {
        let (addr, len) = (buf.as_ptr(), buf.len());
        let token = buf.into_token();
        assert!(!seen.contains(&token));
        seen.push(token);
        assert_eq!(pool.in_flight().len(), 1);
        if i > 0 {
            assert!(matches!(pool.from_token(token), Err(TokenError::OtherHeap { .. })));
        }
        let typed = class.pool().from_any_token(token);
        let back: Buf = if i < 2 {
            assert!(matches!(typed, Err(TokenError::OtherReach { remote: false, .. })));
            pool.from_any_token(token).unwrap()
        } else {
            typed.unwrap().into()
        };
        assert_eq!((back.as_ptr(), back.len()), (addr, len));
        assert!(matches!(pool.from_any_token(token), Err(TokenError::NotInFlight { .. })));
    }
    // A bare token whose completion is reported, and posted work that is awaited or dropped.
    for buf in bufs() {
        pool.complete(buf.into_token(), Outcome { status: 0, bytes: 0 }).unwrap();
    }
    for (i, buf) in bufs().into_iter().enumerate() {
        let addr = buf.as_ptr();
        let mut token = 0;
        let posted = pool
            .post(buf, |t, _| {
                token = t;
                Ok::<(), ()>(())
            })
            .map_err(|(_, e)| e)
            .unwrap();
        if i % 2 == 0 {
            drop(posted);
            assert_eq!(pool.stats().in_flight, 1);
            pool.complete(token, Outcome { status: 0, bytes: 0 }).unwrap();
        } else {
            pool.complete(token, Outcome { status: 0, bytes: 0 }).unwrap();
            assert_eq!(posted.try_take().unwrap().0.as_ptr(), addr);
        }
        assert!(pool.complete(token, Outcome { status: 0, bytes: 0 }).is_err(), "once");
    }
    let other = soft(MIB).build().unwrap();
    let strange = other.alloc(64).unwrap();
    assert!(pool.post(strange, |_, _| Ok::<(), ()>(())).is_err(), "of another pool");
    assert!(matches!(pool.from_token(1 << 62), Err(TokenError::OtherPool { .. })));
    assert_eq!((pool.stats().in_flight, pool.stats().live), (0, 0));
    pool.check();
    // A token alone keeps its class's arenas, and the pool's handles may go.
    let token = theirs.alloc(64).unwrap().into_token();
    drop((own, theirs));
    let handle = class.pool().clone();
    drop((class, pool));
    drop(handle.from_any_token(token).unwrap());
    handle.close().unwrap();
}
