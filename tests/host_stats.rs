//! The numbers of a pool on the software device. Proves: what is told by size class, by access class and share,
//! and in total is the same (P5); each number is what happened; hits are a bound from below, and exact when asked
//! for; the peaks bound what was out; what arenas are made of and what bringing them up took.
#![cfg(feature = "fault")]
#![allow(clippy::unwrap_used)]

mod common;

use std::time::Duration;

use common::{Rng, soft};
use pinpool::{
    Access, Buf, ClassStats, Device, Pages, Pool, Stats,
    device::{Fault, FaultyRegistrar},
};

const MIB: usize = 1 << 20;

fn class(stats: &Stats, block: usize) -> &ClassStats {
    stats.classes.iter().find(|c| c.block == block).unwrap()
}

#[test]
fn counted_hits_are_exact() {
    let pool = soft(8 * MIB).count_hits(true).build().unwrap();
    for _ in 0..1000 {
        drop(pool.alloc(4096).unwrap());
    }
    let held: Vec<_> = (0..100).map(|_| pool.alloc(64).unwrap()).collect();
    let s = pool.stats();
    assert!(s.hits_exact && s.balanced(), "{s:#?}");
    let page = class(&s, 4096).caches;
    assert_eq!((page.hits, page.misses), (999, 1));
    let small = class(&s, 64).caches;
    assert_eq!(small.hits + small.misses, 100);
    assert!((2..=20).contains(&small.misses), "refills come by the magazine: {small:?}");
    assert_eq!(s.caches.hits + s.caches.misses, 1100);
    assert!(s.caches.hit_rate().unwrap() > 0.9);
    drop(held);
    pool.check();
}

#[test]
fn uncounted_hits_are_a_bound_from_below() {
    let pool = soft(8 * MIB).build().unwrap();
    let mut rng = Rng(11);
    let (mut allocs, mut held) = (0u64, Vec::new());
    for _ in 0..200 {
        for _ in 0..rng.below(300) {
            held.push(pool.alloc(4096).unwrap());
            allocs += 1;
        }
        let keep = rng.below(held.len() + 1);
        held.truncate(keep);
        let caches = pool.stats().caches;
        assert!(caches.hits + caches.misses <= allocs, "{caches:?}, {allocs} allocs");
    }
    held.clear();
    if pool.stats().hits_exact {
        return; // A kernel without membarrier: nothing is uncounted.
    }
    // One that never frees leaves a full trace: all but what its last refill may have left.
    pool.trim();
    let before = pool.stats().caches;
    let held: Vec<_> = (0..1000).map(|_| pool.alloc(4096).unwrap()).collect();
    let after = pool.stats().caches;
    let seen = after.hits + after.misses - before.hits - before.misses;
    assert!(seen > 1000 - 513 && seen <= 1000, "{seen}");
    drop(held);
    // One that frees as it allocates leaves none.
    let before = pool.stats().caches;
    for _ in 0..1000 {
        drop(pool.alloc(4096).unwrap());
    }
    let after = pool.stats().caches;
    assert_eq!(after.hits + after.misses, before.hits + before.misses + u64::from(after != before));
    pool.check();
}

#[test]
fn the_depot_makes_misses_good() {
    let pool = soft(8 * MIB).build().unwrap();
    let (tx, rx) = std::sync::mpsc::sync_channel::<Vec<Buf>>(1);
    let p = pool.clone();
    let consumer = std::thread::spawn(move || {
        while let Ok(bufs) = rx.recv() {
            drop(bufs);
        }
        drop(p);
    });
    for _ in 0..20 {
        tx.send((0..500).map(|_| pool.alloc(256).unwrap()).collect()).unwrap();
    }
    drop(tx);
    consumer.join().unwrap();
    let caches = class(&pool.stats(), 256).caches;
    assert!(caches.from_depot > 0 && caches.from_depot <= caches.misses, "{caches:?}");
    pool.check();
}

#[test]
fn the_high_water_bounds_the_peak_and_stays() {
    let pool = soft(16 * MIB).build().unwrap();
    let mut peak = 0;
    for n in [10, 500, 50] {
        let held: Vec<_> = (0..n).map(|_| pool.alloc(4096).unwrap()).collect();
        peak = peak.max(pool.stats().live);
        drop(held);
    }
    let span = pool.alloc(3 * MIB + 5).unwrap();
    let spans = span.capacity();
    drop(span);
    let s = pool.stats();
    let page = class(&s, 4096);
    assert_eq!((s.live, peak), (0, 500 * 4096));
    assert!(page.high_water >= peak && page.high_water <= peak + 64 * 4096, "{page:?}");
    assert!(s.high_water >= page.high_water.max(spans), "{s:#?}");
    let before = s.high_water;
    pool.trim();
    assert_eq!(pool.stats().high_water, before, "what goes back changes no peak");
    assert_eq!(class(&pool.stats(), 4096).capacity, 0, "a class that had slabs stays listed");
    pool.check();
}

#[test]
fn waits_are_counted_by_class_and_by_share() {
    let pool = soft(MIB).share("own", 64 << 10).build().unwrap();
    let share = pool.share("own").unwrap();
    let all: Vec<_> = std::iter::from_fn(|| pool.alloc(4096).ok()).collect();
    let reserve: Vec<_> = std::iter::from_fn(|| share.alloc(4096).ok()).collect();
    assert!(pool.alloc_wait(4096, Duration::from_millis(3)).is_err());
    assert!(pool.alloc_wait(100, Duration::from_millis(1)).is_err());
    assert!(share.alloc_wait(4096, Duration::from_millis(2)).is_err());
    let s = pool.stats();
    assert!(s.balanced(), "{s:#?}");
    assert_eq!((s.waits, s.waiting), (3, 0));
    assert_eq!((class(&s, 4096).waits, class(&s, 128).waits), (2, 1));
    // How long is the machine's affair: the search before the wait counts against the timeout, too.
    assert!(class(&s, 4096).wait_time > Duration::ZERO);
    assert!(s.longest_wait > Duration::ZERO && s.longest_wait < s.wait_time);
    let a = &s.access_classes[0];
    assert_eq!((a.all.waits, a.unreserved.waits, s.shares[0].waits), (3, 2, 1));
    assert!(s.shares[0].wait_time > Duration::ZERO);
    assert_eq!(a.all.wait_time, s.wait_time);
    drop((all, reserve));
    pool.check();
}

#[test]
fn what_arenas_are_made_of_and_what_they_took() {
    let device = Device::custom(FaultyRegistrar::new(&Device::soft()));
    let pool = soft(2 * MIB)
        .devices([device, Device::soft()])
        .arena_size(MIB)
        .max_capacity(4 * MIB)
        .growth_by_hand()
        .class("shared", Access::LOCAL_WRITE | Access::REMOTE_READ, MIB)
        .build()
        .unwrap();
    let held: Vec<_> = std::iter::from_fn(|| pool.alloc(64 << 10).ok()).collect();
    pool.tick(Duration::ZERO);
    let s = pool.stats();
    assert!(s.balanced(), "{s:#?}");
    assert!(s.growths >= 1);
    assert_eq!(s.regions, 2 * s.arenas, "one a device");
    assert_eq!(s.register_calls as usize, s.regions);
    assert!(s.register_time >= s.longest_register && s.longest_register > Duration::ZERO);
    let pages: Vec<_> = s.pages.iter().map(|p| (p.page_size, p.arenas, p.bytes)).collect();
    assert_eq!(pages, [(4096, s.arenas, s.capacity)]);
    let by_class: Vec<_> = s.access_classes.iter().map(|a| a.bringing_up).collect();
    assert_eq!((by_class[0].growths, by_class[1].growths), (s.growths, 0));
    assert_eq!(by_class[1].register_calls, 2);
    drop(held);
    pool.check();
}

#[test]
fn refused_register_calls_take_time_too() {
    let registrar = FaultyRegistrar::new(&Device::soft()).fault(Fault::Register(2, 12));
    let pool = soft(MIB)
        .device(Device::custom(registrar.clone()))
        .max_capacity(2 * MIB)
        .growth_by_hand()
        .build()
        .unwrap();
    let before = pool.stats();
    let held: Vec<_> = std::iter::from_fn(|| pool.alloc(64 << 10).ok()).collect();
    pool.tick(Duration::ZERO);
    let s = pool.stats();
    assert_eq!((s.growth_failures, s.register_calls), (1, before.register_calls + 1));
    assert!(s.register_time > before.register_time);
    assert!(s.balanced(), "{s:#?}");
    drop(held);
}

#[test]
fn fragmentation_is_what_lies_apart() {
    let pool = soft(4 * MIB).arena_size(MIB).build().unwrap();
    assert_eq!(pool.stats().fragmentation(), 0.0, "four whole arenas");
    assert_eq!((pool.stats().free_runs, pool.stats().scattered), (4, 0));
    // All pages out, then every second one back: runs of one page, one of which is an arena's longest.
    let mut held: Vec<_> =
        (0..4 * MIB / (64 << 10)).map(|_| pool.alloc(64 << 10).unwrap()).collect();
    held.sort_by_key(|b| b.as_ptr() as usize);
    assert_eq!(pool.stats().fragmentation(), 0.0, "nothing free is not fragmented");
    let mut i = 0;
    held.retain(|_| {
        i += 1;
        i % 2 == 0
    });
    pool.trim();
    let s = pool.stats();
    assert_eq!((s.free_runs, s.largest_free), (32, 64 << 10));
    assert_eq!(s.scattered, s.unused - 4 * (64 << 10));
    assert_eq!(s.fragmentation(), 28.0 / 32.0);
    drop(held);
    pool.trim();
    assert_eq!(pool.stats().fragmentation(), 0.0);
    pool.check();
}

/// Mixed work on eight threads with classes and shares, the books looked at meanwhile and balanced after.
#[test]
fn the_numbers_sum_after_any_work() {
    let pool: Pool = soft(8 * MIB)
        .class("shared", Access::LOCAL_WRITE | Access::REMOTE_READ, 4 * MIB)
        .share("a", MIB)
        .share_in("shared", "b", MIB)
        .pages(Pages::Base)
        .build()
        .unwrap();
    std::thread::scope(|scope| {
        for seed in 0..8 {
            let pool = &pool;
            scope.spawn(move || {
                let mut rng = Rng(seed);
                let (a, b) = (pool.share("a").unwrap(), pool.share("b").unwrap());
                let class: pinpool::Class = pool.class("shared").unwrap();
                let mut held: Vec<Buf> = Vec::new();
                for _ in 0..3000 {
                    let len = rng.size(1, 100_000);
                    let got = match rng.below(5) {
                        0 => pool.alloc(len),
                        1 => class.alloc(len),
                        2 => a.alloc(len),
                        3 => b.alloc(len),
                        _ => pool.alloc_wait(len, Duration::from_micros(50)),
                    };
                    held.extend(got);
                    if rng.below(3) == 0 {
                        held.truncate(rng.below(held.len() + 1));
                    }
                }
            });
        }
        for _ in 0..50 {
            let s = pool.stats();
            assert!(s.caches.from_depot <= s.caches.misses);
        }
    });
    let s = pool.stats();
    assert!(s.balanced(), "{s:#?}");
    assert_eq!((s.live, s.live_buffers), (0, 0));
    assert!(s.caches.misses > 0 && s.high_water > 0 && s.high_water <= s.capacity);
    pool.check();
}
