//! Many threads. Proves: no thread hoards (B26), frees elsewhere come back, thread exit gives all back
//! in any order of destructors, handles and buffers may be dropped in any order on any thread.
#![cfg(feature = "fault")]
#![allow(clippy::unwrap_used)]

mod common;

use std::{
    cell::{RefCell, UnsafeCell},
    sync::{Barrier, mpsc},
    thread,
};

use common::{Rng, scaled, soft};
use pinpool::{
    AllocError, Buf, CloseError, Pool, RegisterError,
    device::{DeviceInfo, MrHandle, MrRequest, Registrar, Registration},
};

#[test]
fn b26_one_thread_cannot_hoard_what_another_needs() {
    for len in [4096, 64 << 10, 1 << 20] {
        let pool = soft(32 * len).build().unwrap();
        let a = pool.alloc(len).unwrap();
        // A thread that took one, gave it back, and stays: its magazine keeps blocks.
        let (stay, wait) = mpsc::channel::<()>();
        let (ready, is_ready) = mpsc::channel();
        let p = pool.clone();
        let idle = thread::spawn(move || {
            drop(p.alloc(len).unwrap());
            ready.send(()).unwrap();
            wait.recv().unwrap();
        });
        is_ready.recv().unwrap();
        let p = pool.clone();
        let rest = thread::spawn(move || -> Vec<Buf> {
            (0..31).map(|i| p.alloc(len).unwrap_or_else(|e| panic!("{i}: {e}"))).collect()
        })
        .join()
        .unwrap();
        let error = pool.alloc(len).unwrap_err();
        let AllocError::Exhausted(e) = error else { panic!("{error}") };
        assert_eq!((e.live_buffers, e.live, e.not_live), (32, 32 * len, 0));
        stay.send(()).unwrap();
        idle.join().unwrap();
        drop((a, rest));
        pool.check();
    }
}

#[test]
fn books_balance_after_threads_freed_for_one_another() {
    const THREADS: usize = 16;
    // PINPOOL_OPS asks for another count: CI's soak for ten million.
    let asked = std::env::var("PINPOOL_OPS").ok().map(|n| n.parse().expect("a count"));
    let ops = asked.unwrap_or_else(|| scaled(30_000));
    let pool = soft(64 << 20).build().unwrap();
    let (senders, receivers): (Vec<_>, Vec<_>) =
        (0..THREADS).map(|_| mpsc::sync_channel::<Buf>(64)).unzip();
    thread::scope(|s| {
        for (i, inbox) in receivers.into_iter().enumerate() {
            let (pool, out) = (&pool, senders[(i + 1) % THREADS].clone());
            s.spawn(move || {
                let mut rng = Rng(i as u64);
                let mut held: Vec<Buf> = Vec::new();
                for _ in 0..ops {
                    match rng.below(4) {
                        0 | 1 => {
                            if let Ok(mut b) = pool.alloc(rng.size(64, 64 << 10)) {
                                let tag = b.as_ptr() as usize as u8;
                                b[0] = tag;
                                held.push(b);
                            }
                        }
                        2 => {
                            if let Some(b) = held.pop() {
                                assert_eq!(b[0], b.as_ptr() as usize as u8, "nobody else wrote");
                                if let Err(mpsc::TrySendError::Full(b)) = out.try_send(b) {
                                    drop(b);
                                }
                            }
                        }
                        _ => {
                            while let Ok(b) = inbox.try_recv() {
                                assert_eq!(b[0], b.as_ptr() as usize as u8);
                            }
                            if held.len() > 100 {
                                held.swap_remove(rng.below(100));
                            }
                        }
                    }
                }
            });
        }
        drop(senders);
    });
    pool.check();
    let s = pool.stats();
    assert_eq!((s.live, s.live_buffers), (0, 0));
    pool.trim();
    assert_eq!(pool.stats().largest_free, 64 << 20, "all runs merged again");
}

#[test]
fn an_exhausted_pool_under_threads_never_lies() {
    // Eight threads over 16 blocks, each holding at most two: none may ever fail.
    let pool = soft(16 << 12).build().unwrap();
    thread::scope(|s| {
        for _ in 0..8 {
            s.spawn(|| {
                for _ in 0..scaled(3_000) {
                    let a = pool.alloc(4096).unwrap();
                    let b = pool.alloc(4096).unwrap();
                    drop((a, b));
                }
            });
        }
    });
    pool.check();
    assert_eq!(pool.stats().live, 0);
}

thread_local! {
    static EARLY: RefCell<Option<(Pool, Buf)>> = const { RefCell::new(None) };
    static LATE: RefCell<Option<Late>> = const { RefCell::new(None) };
}

struct Late(Pool);

impl Drop for Late {
    fn drop(&mut self) {
        // Allocates and frees while the thread's other thread-locals are being destroyed.
        let bufs: Vec<_> = (0..100).map(|_| self.0.alloc(64).unwrap()).collect();
        drop(bufs);
    }
}

#[test]
fn thread_exit_gives_all_back_whatever_the_order_of_destructors() {
    let pool = soft(4 << 20).build().unwrap();
    for first in [true, false] {
        let p = pool.clone();
        thread::spawn(move || {
            let early = |p: &Pool| {
                EARLY.with(|e| *e.borrow_mut() = Some((p.clone(), p.alloc(4096).unwrap())));
            };
            let late = |p: &Pool| LATE.with(|l| *l.borrow_mut() = Some(Late(p.clone())));
            // Destructors run in an order that depends on first use; the pool's own list is used
            // between the two.
            if first {
                early(&p);
                late(&p);
            } else {
                late(&p);
                early(&p);
            }
            drop(p.alloc(100));
        })
        .join()
        .unwrap();
        pool.check();
        assert_eq!(pool.stats().live, 0);
    }
}

#[test]
fn handles_and_buffers_go_in_any_order_on_any_thread() {
    for round in 0..scaled(400) as u64 {
        let device = pinpool::Device::soft();
        let pool = soft(1 << 20).device(device.clone()).build().unwrap();
        let mut rng = Rng(round);
        let bufs: Vec<_> = (0..8).map(|_| pool.alloc(rng.size(64, 100_000)).unwrap()).collect();
        let other = pool.clone();
        let start = Barrier::new(3);
        thread::scope(|s| {
            let (mut a, mut b) = (bufs, Vec::new());
            b.extend(a.drain(..4));
            let start = &start;
            s.spawn(move || {
                start.wait();
                drop(a);
                drop(other);
            });
            s.spawn(move || {
                drop(pool.alloc(64));
                start.wait();
                drop(pool);
                drop(b);
            });
            start.wait();
        });
        assert_eq!(device.as_soft().unwrap().regions(), 0, "torn down by whoever was last");
    }
}

#[test]
fn close_says_what_is_still_out() {
    let device = pinpool::Device::soft();
    let pool = soft(1 << 20).device(device.clone()).build().unwrap();
    let handle = pool.clone();
    let local = pool.local();
    assert!(matches!(handle.close(), Err(CloseError::Shared(2))));
    drop(local);
    let buf = pool.alloc(5000).unwrap();
    match pool.close() {
        Err(CloseError::Live { buffers: 1, bytes }) => assert_eq!(bytes, buf.capacity()),
        other => panic!("{other:?}"),
    }
    assert_eq!(device.as_soft().unwrap().regions(), 1, "a live buffer keeps its arena");
    assert_eq!(buf.len(), 5000);
    drop(buf);
    assert_eq!(device.as_soft().unwrap().regions(), 0);
    let pool = soft(1 << 20).build().unwrap();
    assert!(pool.close().is_ok());
}

#[test]
fn more_pools_than_places_for_magazines() {
    let pools: Vec<_> = (0..70).map(|_| soft(64 << 10).build().unwrap()).collect();
    let mut held = Vec::new();
    for pool in &pools {
        held.push(pool.alloc(4096).unwrap());
        drop(pool.alloc(64).unwrap());
        pool.check();
    }
    drop(pools);
    drop(held);
}

#[test]
fn look_ups_stay_right_while_large_buffers_come_and_go() {
    const LEN: usize = 44_444_444;
    let pool = soft(192 << 20).arena_size(64 << 20).build().unwrap();
    let done = std::sync::atomic::AtomicBool::new(false);
    let started = Barrier::new(4);
    thread::scope(|s| {
        let lookers: Vec<_> = (0..3)
            .map(|_| {
                s.spawn(|| {
                    let mut n = 0u64;
                    while !done.load(std::sync::atomic::Ordering::Relaxed) {
                        for arena in pool.arenas() {
                            let p = arena.addr.as_ptr();
                            assert_eq!(pool.keys_of(p.wrapping_add(LEN - 1)), Some(arena.keys));
                        }
                        let past = pool.arenas()[2].addr.as_ptr().wrapping_add(64 << 20);
                        assert_eq!(pool.keys_of(past), None);
                        assert_eq!(pool.keys_of(std::ptr::null::<u8>()), None);
                        assert_eq!(pool.keys_of(&n), None);
                        n += 1;
                        if n == 1 {
                            started.wait();
                        }
                    }
                })
            })
            .collect();
        started.wait();
        for _ in 0..200 {
            let bufs: Vec<_> = (0..3).map(|_| pool.alloc(LEN).unwrap()).collect();
            for b in &bufs {
                assert_eq!(pool.keys_of(b.as_ptr()), Some(b.keys()));
                assert_eq!(pool.keys_of(&b[LEN - 1]), Some(b.keys()));
            }
            assert!(pool.alloc(LEN).is_err(), "no fourth fits: three arenas of 64 MiB");
        }
        done.store(true, std::sync::atomic::Ordering::Relaxed);
        for l in lookers {
            l.join().unwrap();
        }
    });
}

/// One block is free whenever this thread asks: another always gives it back first. `other` meanwhile.
fn one_block_is_always_had(other: impl Fn(&Pool) + Sync) {
    let pool = soft(1 << 20).build().unwrap();
    let mut held: Vec<_> = std::iter::from_fn(|| pool.alloc(4096).ok()).collect();
    held.pop();
    let done = std::sync::atomic::AtomicBool::new(false);
    let (to, from) = mpsc::sync_channel::<Buf>(0);
    let (ack, acked) = mpsc::sync_channel::<()>(0);
    thread::scope(|s| {
        let caller = s.spawn(|| {
            while !done.load(std::sync::atomic::Ordering::Relaxed) {
                other(&pool);
            }
        });
        let freer = s.spawn(move || {
            for buf in from {
                drop(buf);
                ack.send(()).unwrap();
            }
        });
        let mut failed = None;
        for _ in 0..scaled(20_000) {
            match pool.alloc(4096) {
                Ok(buf) => {
                    to.send(buf).unwrap();
                    acked.recv().unwrap();
                }
                Err(e) => failed = Some(e),
            }
        }
        drop(to);
        done.store(true, std::sync::atomic::Ordering::Relaxed);
        // Joined by hand, for the thread sanitizer does not see what a scope does at its end.
        caller.join().unwrap();
        freer.join().unwrap();
        assert_eq!(failed, None);
    });
    pool.check();
}

#[test]
fn exhausted_means_exhausted_while_others_call_caches_back() {
    one_block_is_always_had(Pool::trim);
    one_block_is_always_had(|pool| assert!(pool.alloc(512 << 10).is_err()));
}

/// Two owners that take turns of their own, so many each, and a thief that comes all the time until one of them is
/// done. Each turn has a tag that no other owner's has.
fn two_owners_and_a_thief(
    turns: usize,
    thief: impl Fn(&Pool, usize) + Sync,
    turn: impl Fn(&Pool, u8) + Sync,
) {
    let pool = soft(4 << 20).build().unwrap();
    let done = std::sync::atomic::AtomicBool::new(false);
    let (pool, done, thief, turn) = (&pool, &done, &thief, &turn);
    thread::scope(|s| {
        s.spawn(move || {
            let going = |_: &usize| !done.load(std::sync::atomic::Ordering::Relaxed);
            (0..).take_while(going).for_each(|i| thief(pool, i));
        });
        for owner in 0..2u8 {
            s.spawn(move || {
                (0..scaled(turns)).for_each(|i| turn(pool, owner << 7 | (i as u8 & 127)));
                done.store(true, std::sync::atomic::Ordering::Relaxed);
            });
        }
    });
    pool.check();
    assert_eq!(pool.stats().live, 0);
}

#[test]
fn a_thief_in_a_loop_never_meets_an_owner() {
    // Owners at full speed and a thread that takes their magazines away all the time: without the barrier
    // that the thief pays for, a block is soon handed out twice.
    two_owners_and_a_thief(
        1_000_000,
        |pool, _| pool.trim(),
        |pool, tag| {
            let mut buf = pool.alloc(64).unwrap();
            buf[0] = tag;
            std::hint::black_box(&mut buf);
            assert_eq!(buf[0], tag, "somebody else has this block too");
        },
    );
}

#[test]
fn owners_that_move_between_their_magazines_are_counted_and_robbed() {
    // More out at a time than a magazine holds, and then none: each turn goes to the previous magazine and back, which
    // an owner does without a lock, and which moves the bounds that thieves close.
    two_owners_and_a_thief(
        100_000,
        |pool, i| {
            let s = pool.stats();
            assert_eq!(s.live + s.cached + s.free + s.unused, s.capacity);
            if i % 4 == 0 {
                pool.trim();
            }
        },
        |pool, tag| {
            let mut bufs: Vec<_> = (0..20).map(|_| pool.alloc(64).unwrap()).collect();
            bufs.iter_mut().for_each(|buf| buf[0] = tag);
            std::hint::black_box(&mut bufs);
            assert!(bufs.iter().all(|buf| buf[0] == tag), "somebody else has a block too");
        },
    );
}

#[test]
fn a_class_that_was_counted_after_its_cap_was_taken_back_still_has_room() {
    const X: usize = 16 << 10;
    for scarce in [false, true] {
        let pool = soft(1 << 20).build().unwrap();
        let mut all: Vec<_> = std::iter::from_fn(|| pool.alloc(X).ok()).collect();
        if scarce {
            // Memory runs short, and is found in a cache: refills stay small for a while.
            all.truncate(all.len() - 2);
            drop(pool.alloc(64).unwrap());
        }
        drop(all);
        // Two more classes than the thread's share has room for: the first one's magazines are to go to the depot,
        // which has all it takes.
        let others = [2 * X, 3 * X / 2].map(|len| pool.alloc(len).unwrap());
        let rest = [X; 2].map(|len| pool.alloc(len).unwrap());
        let held = thread::scope(|s| {
            let take = || (0..8).map(|_| pool.alloc(X).unwrap()).collect::<Vec<_>>();
            s.spawn(take).join().unwrap()
        });
        // Looks into the thread's magazines, and takes nothing.
        assert!(pool.stats().live > 0);
        let more: Vec<_> = (0..8).map(|_| pool.alloc(X).unwrap()).collect();
        drop((others, rest, held, more));
        pool.trim();
        let s = pool.stats();
        assert_eq!((s.live, s.live_buffers), (0, 0), "blocks were lost");
        pool.check();
    }
}

#[test]
fn a_buffer_freed_after_the_end_on_a_fresh_thread_tears_down() {
    let device = pinpool::Device::soft();
    let pool = soft(1 << 20).device(device.clone()).build().unwrap();
    let buf = pool.alloc(64).unwrap();
    drop(pool);
    // This thread has never had magazines of the pool, and must not get any now.
    thread::spawn(move || drop(buf)).join().unwrap();
    assert_eq!(device.as_soft().unwrap().regions(), 0);
}

#[test]
fn places_for_magazines_come_back() {
    for _ in 0..200 {
        let pool = soft(64 << 10).build().unwrap();
        drop(pool.alloc(64).unwrap());
        assert!(pool.stats().cached > 0, "this pool has no magazines");
    }
}

/// A device that reads, when it deregisters, what each handle's thread wrote before it dropped that.
struct Witness(std::sync::Arc<Seen>);

struct Seen {
    inner: pinpool::Device,
    written: [UnsafeCell<u32>; 2],
    sum: std::sync::atomic::AtomicU32,
}

// SAFETY: each cell is written by one thread before it drops its handle, and read when the pool ends, which
// comes after all of those: that is what is being proved.
unsafe impl Sync for Seen {}

// SAFETY: register and deregister are those of the software device.
unsafe impl Registrar for Witness {
    fn info(&self) -> DeviceInfo {
        self.0.inner.info()
    }

    unsafe fn register(&self, request: &MrRequest) -> Result<Registration, RegisterError> {
        // SAFETY: as the caller has it.
        unsafe { self.0.inner.as_soft().unwrap().register(request) }
    }

    unsafe fn deregister(&self, handle: MrHandle) -> Result<(), RegisterError> {
        // SAFETY: see `Sync`.
        let sum = self.0.written.iter().map(|c| unsafe { *c.get() }).sum();
        self.0.sum.store(sum, std::sync::atomic::Ordering::SeqCst);
        // SAFETY: as the caller has it.
        unsafe { self.0.inner.as_soft().unwrap().deregister(handle) }
    }
}

/// The count of handles orders what each of them did before the end. On some processors it does so whatever
/// it says; the thread sanitizer sees what it says.
#[test]
fn what_was_done_before_a_handle_went_is_seen_at_the_end() {
    for _ in 0..scaled(200) {
        let seen = std::sync::Arc::new(Seen {
            inner: pinpool::Device::soft(),
            written: [UnsafeCell::new(0), UnsafeCell::new(0)],
            sum: Default::default(),
        });
        let device = pinpool::Device::custom(Witness(seen.clone()));
        let pool = soft(64 << 10).device(device).build().unwrap();
        let threads = [pool.clone(), pool].into_iter().enumerate().map(|(i, handle)| {
            let seen = seen.clone();
            thread::spawn(move || {
                // SAFETY: this thread's cell; see `Sync`.
                unsafe { *seen.written[i].get() = 1 + i as u32 };
                drop(handle);
            })
        });
        for thread in threads.collect::<Vec<_>>() {
            thread.join().unwrap();
        }
        assert_eq!(seen.sum.load(std::sync::atomic::Ordering::SeqCst), 3);
    }
}
