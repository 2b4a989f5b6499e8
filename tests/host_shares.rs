//! Shares, without a device. Proves:
//! - nobody takes a share's last buffer, and caches do not either (B26); unreserved memory serves all; two
//!   directions that wait for one another go on where each has a share, and are stuck where not;
//! - a refusal is true: while a block is free at every moment, none is refused;
//! - who waits through a share is served by its reserve or by the unreserved memory, whichever has a block first,
//!   and leaves nothing behind in the other's line.
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

use common::{Rng, exhausted, scaled, soft};
// The standard library's is not compiled for the thread sanitizer, which then misses its orderings.
use parking_lot::Mutex;
use pinpool::{
    Access, AllocError, Batch, Buf, Builder, Class, GuardStats, Guards, LookupError, Reserve,
    Share, reach::Remote,
};

const MIB: usize = 1 << 20;
const SHARED: Access = Access::LOCAL_WRITE.union(Access::REMOTE_READ);

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
    // With guards, too: what was assigned and never handed out is no buffer that they could find damaged.
    for guards in [Guards::new(), Guards::new().poison(true).canary(true)] {
        given_up(soft(4 * 4096).guards(guards));
    }
}

fn given_up(builder: Builder) {
    let pool = builder.share("own", Reserve::buffers(2, 4096)).build().unwrap();
    let own = pool.share("own").unwrap();
    let reserve = [own.alloc(4000).unwrap(), own.alloc(4000).unwrap()];
    let rest = [pool.alloc(4000).unwrap(), pool.alloc(4000).unwrap()];
    let mut cx = Context::from_waker(Waker::noop());
    let mut first = Box::pin(own.alloc_async(4000));
    let mut second = Box::pin(own.alloc_async(4000));
    let mut other = Box::pin(pool.alloc_async(4000));
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
    assert_eq!(pool.check_free(), 0);
    let stats = pool.stats();
    assert_eq!((stats.live, stats.waiting, stats.guards), (0, 0, GuardStats::default()));
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
