//! Arenas that come. Proves: a pool grows before it runs dry, on its own thread, while alloc and free go on (P6);
//! the books balance through ten thousand growths and shrinks under eight threads; the end of a pool waits for a
//! growth and undoes it. Growths that fail are `host_growth_failures`', arenas that go `host_shrinking`'s.
//!
//! Time is invented (`Pool::tick`) wherever a test does not need the thread.
#![cfg(feature = "fault")]
#![allow(clippy::unwrap_used)]

mod common;
#[path = "common/growth.rs"]
mod growth;
#[path = "common/held.rs"]
mod held;

use std::{
    sync::{
        atomic::{AtomicBool, Ordering::Relaxed},
        mpsc,
    },
    thread,
    time::Duration,
};

use common::{Rng, scaled, soft};
use growth::{MIB, faulty, growing, secs};
use held::Held;
use pinpool::{AllocError, Buf, BuildError, Device, device::FaultyRegistrar};

#[test]
fn p6_it_grows_on_its_own_thread_before_it_runs_dry() {
    let calls = Held::new(FaultyRegistrar::new(&Device::soft()));
    let pool = soft(MIB)
        .device(calls.device())
        .arena_size(MIB)
        .max_capacity(4 * MIB)
        .low_watermark(512 << 10)
        .build()
        .unwrap();
    assert_eq!((pool.capacity(), pool.max_capacity(), pool.max_len()), (MIB, 4 * MIB, MIB));
    calls.hold();
    let mut held: Vec<Buf> = Vec::new();
    // Half of it is still there when the next is on its way.
    while pool.stats().capacity - pool.stats().live >= 512 << 10 {
        held.push(pool.alloc(64 << 10).unwrap());
    }
    calls.await_call();
    // A register call is under way, and takes as long as it likes: everybody goes on.
    for _ in 0..1000 {
        drop(pool.alloc(4096).unwrap());
        drop(pool.alloc(100_000).unwrap());
    }
    thread::scope(|s| s.spawn(|| drop(pool.alloc(64 << 10).unwrap())).join().unwrap());
    pool.trim();
    pool.check();
    assert_eq!((pool.arenas().len(), pool.stats().arenas, pool.capacity()), (1, 1, MIB));
    assert!(pool.keys_of(held[0].as_ptr()).is_some());
    calls.release();
    // It comes; nothing that was asked for meanwhile failed.
    while pool.capacity() < 2 * MIB {
        thread::yield_now();
    }
    for _ in 0..6 {
        held.push(pool.alloc(100 << 10).unwrap());
    }
    for buf in &held {
        assert_eq!(pool.keys_of(buf.as_ptr()), Some(buf.keys()));
    }
    pool.check();
    let threads = calls.threads();
    assert_ne!(threads[0], "pinpool-grower", "the first at `build`, by whoever builds");
    assert!(threads[1..].iter().all(|t| t == "pinpool-grower"), "{threads:?}");
    drop((held, pool));
    assert_eq!(calls.calls.live(), 0);
}

#[test]
fn a_pool_that_was_not_asked_to_grow_does_not() {
    let pool = soft(MIB).growth_by_hand().build().unwrap();
    let held: Vec<_> = std::iter::from_fn(|| pool.alloc(64 << 10).ok()).collect();
    assert_eq!(held.len(), 16);
    assert_eq!(pool.tick(secs(0)), None);
    let AllocError::Exhausted(e) = pool.alloc(64).unwrap_err() else { panic!("exhausted") };
    assert_eq!((e.capacity, e.max_capacity), (MIB, MIB));
}

#[test]
fn it_grows_below_the_watermark_and_not_above() {
    let pool = growing(4).low_watermark(256 << 10).build().unwrap();
    let mut held = Vec::new();
    held.push(pool.alloc(768 << 10).unwrap());
    assert_eq!((pool.tick(secs(0)), pool.capacity()), (None, MIB), "256 KiB are left");
    held.push(pool.alloc(4096).unwrap());
    assert!(pool.tick(secs(0)).is_some(), "it will look whether the arena can go");
    assert_eq!(pool.capacity(), 2 * MIB);
    assert_eq!((pool.stats().growths, pool.stats().register_calls), (1, 2));
    assert!(pool.stats().growth_time > Duration::ZERO);
    pool.check();
}

#[test]
fn what_lies_in_caches_is_not_missing() {
    let pool = growing(4).low_watermark(512 << 10).build().unwrap();
    let held = pool.alloc(480 << 10).unwrap();
    // Another thread's magazines keep blocks; all else is free.
    let (stay, wait) = mpsc::channel::<()>();
    let (ready, is_ready) = mpsc::channel();
    thread::scope(|s| {
        let p = &pool;
        s.spawn(move || {
            let held: Vec<_> = (0..28).map(|_| p.alloc(8192).unwrap()).collect();
            drop(held);
            ready.send(()).unwrap();
            let _ = wait.recv();
        });
        is_ready.recv().unwrap();
        let s = pool.stats();
        assert!(s.cached > 0 && s.free + s.unused < 512 << 10, "{s:#?}");
        let _ = pool.tick(secs(0));
        assert_eq!(pool.capacity(), MIB, "544 KiB are left, some of it in caches");
        let more = pool.alloc(64 << 10).unwrap();
        let _ = pool.tick(secs(0));
        assert_eq!(pool.capacity(), 2 * MIB);
        drop((held, more, stay));
    });
    pool.check();
}

#[test]
fn what_is_in_caches_and_then_in_use_is_noticed() {
    // Blocks that go from caches to buffers never meet the slabs' count.
    let pool = growing(4).low_watermark(256 << 10).build().unwrap();
    let fill = |n: usize| (0..n).map(|_| pool.alloc(4096).unwrap()).collect::<Vec<_>>();
    drop(fill(200));
    let _ = pool.tick(secs(0));
    assert_eq!(pool.capacity(), MIB);
    let held = fill(240);
    // Whatever rang or did not: at the latest the refused alloc does, and here nothing had to be refused.
    let _ = pool.tick(secs(0));
    assert_eq!(pool.capacity(), 2 * MIB, "{:#?}", pool.stats());
    drop(held);
}

#[test]
fn a_refused_alloc_is_refused_at_once_and_makes_it_grow() {
    // Much is free, but no run is long enough.
    let pool = growing(4).low_watermark(4096).build().unwrap();
    let held: Vec<_> = std::iter::from_fn(|| pool.alloc(128 << 10).ok()).collect();
    assert_eq!(held.len(), 8);
    let _ = pool.tick(secs(0));
    assert_eq!(pool.capacity(), 2 * MIB);
    let more: Vec<_> = std::iter::from_fn(|| pool.alloc(128 << 10).ok()).collect();
    assert_eq!(more.len(), 8);
    let _ = pool.tick(secs(0));
    let mut held: Vec<_> = held.into_iter().chain(more).collect();
    let mut n = 0;
    held.retain(|_| {
        n += 1;
        n % 2 == 0
    });
    let third = pool.alloc(MIB).unwrap();
    let _ = pool.tick(secs(0));
    drop(third);
    let fourth: Vec<_> = std::iter::from_fn(|| pool.alloc(900 << 10).ok()).collect();
    assert_eq!((fourth.len(), pool.capacity()), (1, 3 * MIB), "eight gaps of 128 KiB");
    let AllocError::Exhausted(e) = pool.alloc(900 << 10).unwrap_err() else { panic!() };
    assert_eq!((e.capacity, e.max_capacity), (3 * MIB, 4 * MIB));
    assert!(e.not_live >= MIB && e.to_string().contains("may grow to 4 MiB"), "{e}");
    let _ = pool.tick(secs(0));
    assert_eq!(pool.capacity(), 4 * MIB);
    let last = pool.alloc(900 << 10).unwrap();
    // What it can never have does not make it grow, and neither does anything at the maximum.
    assert!(matches!(pool.alloc(2 * MIB), Err(AllocError::TooLarge { .. })));
    assert!(pool.alloc(900 << 10).is_err());
    let _ = pool.tick(secs(0));
    assert_eq!(pool.capacity(), 4 * MIB);
    drop((held, fourth, last));
    pool.check();
}

#[test]
fn the_last_arena_is_what_is_left_to_the_maximum() {
    let pool = soft(3 * MIB / 2)
        .arena_size(MIB)
        .max_capacity(3 * MIB + (64 << 10))
        .low_watermark(MIB)
        .growth_by_hand()
        .build()
        .unwrap();
    let held: Vec<_> = std::iter::from_fn(|| {
        let _ = pool.tick(secs(0));
        pool.alloc(16 << 10).ok()
    })
    .collect();
    let lens: Vec<_> = pool.arenas().iter().map(|a| a.len >> 10).collect();
    assert_eq!(lens, [1024, 512, 1024, 576]);
    assert_eq!((pool.capacity(), held.len()), (3 * MIB + (64 << 10), 196));
    pool.check();
}

#[test]
fn what_makes_no_sense_is_refused_with_the_numbers() {
    let e = soft(2 * MIB).max_capacity(MIB).build().unwrap_err();
    assert!(matches!(e, BuildError::MaxCapacity { asked: MIB, capacity } if capacity == 2 * MIB));
    assert!(e.to_string().contains("1 MiB") && e.to_string().contains("2 MiB"), "{e}");
    let e = soft(MIB).max_capacity(2 * MIB).low_watermark(2 * MIB).build().unwrap_err();
    assert!(matches!(e, BuildError::Watermark { .. }), "{e}");
    let e = soft(MIB).max_capacity(usize::MAX).build().unwrap_err();
    assert!(matches!(e, BuildError::CapacityTooLarge { .. } | BuildError::ArenaSize { .. }), "{e}");
    let e = soft(64 << 20).max_capacity(1 << 43).build().unwrap_err();
    assert!(matches!(e, BuildError::CapacityTooLarge { .. }), "{e}");
    // As much as can be asked for costs nothing before it is there.
    let pool = soft(64 << 20).max_capacity(1 << 40).build().unwrap();
    assert!(pool.stats().table_bytes < MIB);
    assert_eq!(pool.max_capacity(), 1 << 40);
    assert!(soft(MIB).max_capacity(MIB).build().is_ok(), "equal is off");
}

#[test]
fn ten_thousand_growths_and_shrinks_under_eight_threads() {
    const ARENA: usize = 64 << 10;
    // Few classes, so that what eight threads have and cache fits the starting capacity, however many of their
    // turns fall between two looks.
    const SIZES: [usize; 4] = [100, 1500, 4096, 8000];
    // PINPOOL_ROUNDS asks for another count: the sanitizers, which make it slow, for fewer.
    let asked = std::env::var("PINPOOL_ROUNDS").ok().map(|n| n.parse().expect("a count"));
    let rounds = asked.unwrap_or_else(|| scaled(10_000) as u64);
    let calls = faulty(&[]);
    let pool = soft(16 * ARENA)
        .device(Device::custom(calls.clone()))
        .arena_size(ARENA)
        .max_capacity(24 * ARENA)
        .low_watermark(4 * ARENA)
        .growth_by_hand()
        .build()
        .unwrap();
    let done = AtomicBool::new(false);
    thread::scope(|s| {
        let workers: Vec<_> = (0..8u64)
            .map(|seed| {
                let (pool, done) = (&pool, &done);
                s.spawn(move || {
                    let mut rng = Rng(seed);
                    let mut held: Vec<(Buf, u8)> = Vec::new();
                    while !done.load(Relaxed) {
                        if held.len() < 3
                            && let Ok(mut buf) = pool.alloc(SIZES[rng.below(4)])
                        {
                            let tag = rng.next() as u8;
                            buf.fill(tag);
                            assert_eq!(pool.keys_of(buf.as_ptr()), Some(buf.keys()));
                            held.push((buf, tag));
                        } else if let Some((buf, tag)) = held.pop() {
                            assert!(buf.iter().all(|&b| b == tag), "nobody else wrote");
                            assert_eq!(pool.keys_of(&buf[buf.len() - 1]), Some(buf.keys()));
                        }
                        if rng.below(16) == 0 {
                            // Let others have the processor, and arenas fall empty.
                            held.clear();
                            thread::yield_now();
                        }
                    }
                })
            })
            .collect();
        let mut now = secs(0);
        let mut peak = Vec::new();
        for i in 0..100 * rounds {
            let s = pool.stats();
            if s.growths >= rounds && s.shrinks >= rounds {
                break;
            }
            // A demand that comes and goes.
            if i % 2 == 0 {
                peak.extend(std::iter::from_fn(|| pool.alloc(ARENA).ok()).take(16));
            } else {
                peak.clear();
            }
            now += secs(301);
            let _ = pool.tick(now);
            if i % 500 == 0 {
                // With others at work the totals hold, and the tables agree at every moment.
                assert_eq!(s.capacity / ARENA, s.arenas);
                assert_eq!(s.live + s.cached + s.free + s.unused, s.capacity);
            }
        }
        done.store(true, Relaxed);
        // Joined by hand, for the thread sanitizer does not see what a scope does at its end.
        workers.into_iter().for_each(|w| w.join().unwrap());
    });
    pool.check();
    let s = pool.stats();
    assert!(s.growths >= rounds && s.shrinks >= rounds, "{} up, {} down", s.growths, s.shrinks);
    assert_eq!((s.live, s.growth_failures), (0, 0));
    assert_eq!(calls.live() as usize, s.arenas);
    assert_eq!(calls.register_calls() - calls.deregister_calls(), s.arenas as u64);
    drop(pool);
    assert_eq!(calls.live(), 0);
}

#[test]
fn the_thread_grows_and_shrinks_by_itself() {
    let calls = faulty(&[]);
    let pool = soft(MIB)
        .device(Device::custom(calls.clone()))
        .arena_size(MIB)
        .max_capacity(8 * MIB)
        .low_watermark(256 << 10)
        .shrink_after(Duration::from_millis(20))
        .build()
        .unwrap();
    for _ in 0..5 {
        let mut held = Vec::new();
        // All that it can become is had without an error that lasts: the thread comes after.
        while held.len() < 100 {
            match pool.alloc(64 << 10) {
                Ok(buf) => held.push(buf),
                Err(_) => thread::yield_now(),
            }
        }
        drop(held);
        pool.trim();
        while pool.capacity() > MIB {
            thread::yield_now();
        }
        pool.check();
    }
    let s = pool.stats();
    assert!(s.growths >= 30 && s.growths == s.shrinks, "{s:#?}");
    drop(pool);
    assert_eq!(calls.live(), 0);
}

#[test]
fn the_end_waits_for_a_growth_and_undoes_it() {
    for in_buffer in [false, true] {
        let calls = Held::new(FaultyRegistrar::new(&Device::soft()));
        let pool = soft(MIB)
            .device(calls.device())
            .arena_size(MIB)
            .max_capacity(4 * MIB)
            .low_watermark(512 << 10)
            .build()
            .unwrap();
        calls.hold();
        let buf = pool.alloc(768 << 10).unwrap();
        calls.await_call();
        let (ended, has_ended) = mpsc::channel();
        let last = in_buffer.then_some(buf);
        let ender = thread::spawn(move || {
            drop(pool);
            drop(last);
            ended.send(()).unwrap();
        });
        assert!(has_ended.try_recv().is_err(), "the device is at the arena");
        calls.release();
        has_ended.recv().unwrap();
        ender.join().unwrap();
        assert_eq!(calls.calls.live(), 0);
    }
}

#[test]
fn pools_that_grow_end_in_any_order() {
    for round in 0..scaled(300) as u64 {
        let calls = faulty(&[]);
        let pool = soft(256 << 10)
            .device(Device::custom(calls.clone()))
            .arena_size(256 << 10)
            .max_capacity(2 * MIB)
            .low_watermark(128 << 10)
            .shrink_after(Duration::ZERO)
            .build()
            .unwrap();
        let mut rng = Rng(round);
        let bufs: Vec<_> = (0..12).filter_map(|_| pool.alloc(rng.size(64, 100_000)).ok()).collect();
        let other = pool.clone();
        thread::scope(|s| {
            s.spawn(move || drop(bufs));
            s.spawn(move || drop(other));
            drop(pool);
        });
        // The grower may hold the core's memory a moment longer, never an arena.
        assert_eq!(calls.live(), 0);
    }
}
