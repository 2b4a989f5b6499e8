//! Arenas that go. Proves: what was long free goes and can come again; what is in use, touched or needed soon stays;
//! nothing of what went is taken for what came after it; an arena that the device keeps is leaked.
//!
//! Time is invented (`Pool::tick`).
#![cfg(feature = "fault")]
#![allow(clippy::unwrap_used)]

mod common;
#[path = "common/growth.rs"]
mod growth;

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use common::{Rng, mapped, soft};
use growth::{MIB, faulty, grow_to, growing, secs};
use pinpool::{Buf, Device, Event, FreeError, Pool, device::Fault, leaked_bytes};

const EBUSY: i32 = 16;

#[test]
fn what_was_long_free_goes_and_can_come_again() {
    let calls = faulty(&[]);
    let pool =
        growing(4).device(Device::custom(calls.clone())).low_watermark(64 << 10).build().unwrap();
    grow_to(&pool, 3, secs(0));
    let base = pool.arenas()[0].addr.as_ptr() as usize;
    let went: Vec<_> = pool.arenas()[1..].to_vec();
    // Looked at every 37.5 s: first found free at the first look, and gone 300 s after it.
    let mut now = secs(0);
    while now < secs(330) {
        now += pool.tick(now).unwrap().max(Duration::from_millis(1));
        assert!(now > secs(337) || pool.arenas().len() == 3, "too early: {now:?}");
    }
    for _ in 0..3 {
        now += secs(38);
        let _ = pool.tick(now);
    }
    let s = pool.stats();
    assert_eq!((s.arenas, s.capacity, s.growths, s.shrinks), (1, MIB, 2, 2), "{now:?}");
    assert_eq!((calls.live(), calls.deregister_calls()), (1, 2));
    assert!(!mapped(base + MIB, 3 * MIB), "given back");
    for arena in &went {
        assert_eq!(pool.keys_of(arena.addr.as_ptr()), None);
        // SAFETY: refused, so that nothing is given back.
        let refused = unsafe { pool.free_raw(arena.addr.as_ptr()) };
        assert!(matches!(refused, Err(FreeError::NotOut { .. })), "{refused:?}");
    }
    pool.check();
    // It comes again, under other keys.
    grow_to(&pool, 3, now);
    let came = pool.arenas();
    assert_eq!(came[1].addr, went[0].addr);
    assert_ne!(came[1].keys, went[0].keys);
    assert_eq!(pool.keys_of(went[0].addr.as_ptr()), Some(came[1].keys));
    let buf = pool.alloc(900 << 10).unwrap();
    assert!(buf.iter().all(|&b| b == 0), "fresh pages, not what was there");
}

#[test]
fn what_is_in_use_stays_until_it_is_not() {
    let pool = growing(2).low_watermark(0).build().unwrap();
    grow_to(&pool, 2, secs(0));
    let all: Vec<_> = std::iter::from_fn(|| pool.alloc(256 << 10).ok()).collect();
    assert_eq!(all.len(), 8);
    let arena = pool.arenas()[1];
    let inside = |b: &Buf| b.as_ptr() as usize >= arena.addr.as_ptr() as usize;
    let mut of_it: Vec<_> = all.into_iter().filter(inside).collect();
    let (raw, buf) = (of_it.pop().unwrap().into_raw(), of_it.pop().unwrap());
    drop(of_it);
    let long = |from: u64| (1..30).for_each(|i| _ = pool.tick(secs(from + 50 * i)));
    long(0);
    assert_eq!(pool.arenas().len(), 2, "a buffer and a raw pointer of it are out");
    drop(buf);
    long(10_000);
    assert_eq!(pool.arenas().len(), 2, "a raw pointer of it is out");
    // SAFETY: nobody uses it any more.
    unsafe { pool.free_raw(raw.as_ptr()) }.unwrap();
    // It lies in this thread's cache now, which keeps nothing.
    long(20_000);
    assert_eq!(pool.arenas().len(), 1);
    pool.check();
    // SAFETY: refused.
    assert!(unsafe { pool.free_raw(raw.as_ptr()) }.is_err(), "stale");
}

#[test]
fn what_would_soon_be_needed_again_stays() {
    // Twice the watermark must stay free without it.
    let pool = growing(2).low_watermark(512 << 10).build().unwrap();
    grow_to(&pool, 2, secs(0));
    let one = pool.alloc(4096).unwrap();
    (1..60).for_each(|i| _ = pool.tick(secs(50 * i)));
    assert_eq!(pool.arenas().len(), 2, "1 MiB less 4 KiB would be left, less than twice 512 KiB");
    drop(one);
    (60..120).for_each(|i| _ = pool.tick(secs(50 * i)));
    assert_eq!(pool.arenas().len(), 1);
}

#[test]
fn a_pulse_every_minute_makes_nothing_come_and_go() {
    let calls = faulty(&[]);
    let pool =
        growing(4).device(Device::custom(calls.clone())).low_watermark(64 << 10).build().unwrap();
    let mut now = secs(0);
    let mut pulse = |pool: &Pool| {
        let mut held = Vec::new();
        while held.len() < 3 {
            held.extend(pool.alloc(900 << 10).ok());
            let _ = pool.tick(now);
        }
        drop(held);
        // The thread's own looks, until the next pulse.
        let next = now + secs(60);
        while now < next {
            now += pool.tick(now).map_or(secs(60), |d| d.max(secs(1))).min(next - now);
        }
    };
    (0..3).for_each(|_| pulse(&pool));
    let (growths, registers) = (pool.stats().growths, calls.register_calls());
    assert_eq!(growths, 2);
    (0..1000).for_each(|_| pulse(&pool));
    let s = pool.stats();
    assert_eq!(
        (s.growths, calls.register_calls(), calls.deregister_calls()),
        (growths, registers, 0)
    );
    assert_eq!(s.shrinks, 0);
    // And when the pulses end, all of it goes.
    for _ in 0..20 {
        now += secs(50);
        let _ = pool.tick(now);
    }
    assert_eq!(pool.arenas().len(), 1);
}

#[test]
fn an_arena_falls_empty_while_others_have_room() {
    // Traffic all the time, of small blocks that live for a while: what could be spared is used last.
    let pool = soft(4 * MIB)
        .arena_size(MIB)
        .max_capacity(8 * MIB)
        .low_watermark(128 << 10)
        .growth_by_hand()
        .build()
        .unwrap();
    grow_to(&pool, 8, secs(0));
    // One block in each growth arena, amid traffic.
    let mut held: std::collections::VecDeque<_> =
        std::iter::from_fn(|| pool.alloc(4096).ok()).collect();
    assert_eq!(held.len(), 2048);
    let mut rng = Rng(1);
    let mut now = secs(1);
    for _ in 0..60 {
        // A quarter of the blocks is in use at every look, never for more than some looks.
        while held.len() > 64 {
            held.swap_remove_back(rng.below(held.len()));
        }
        now += secs(40);
        let _ = pool.tick(now);
        held.extend((0..192).map(|_| pool.alloc(4096).unwrap()));
    }
    assert_eq!(pool.arenas().len(), 4, "{:#?}", pool.stats());
    assert_eq!(pool.stats().shrinks, 4);
    pool.check();
}

#[test]
fn an_arena_that_the_device_keeps_is_leaked_and_not_used_again() {
    let calls = faulty(&[Fault::Deregister(1, EBUSY)]);
    let told = Arc::new(AtomicU64::new(0));
    let sink = told.clone();
    let pool = growing(3)
        .device(Device::custom(calls.clone()))
        .low_watermark(0)
        .on_event(move |e| {
            if let Event::DeregisterFailed { len, .. } = e {
                sink.fetch_add(*len as u64, Relaxed);
            }
        })
        .build()
        .unwrap();
    grow_to(&pool, 2, secs(0));
    let (addr, before) = (pool.arenas()[1].addr.as_ptr() as usize, leaked_bytes());
    (1..30).for_each(|i| _ = pool.tick(secs(50 * i)));
    assert_eq!((pool.arenas().len(), told.load(Relaxed)), (1, MIB as u64));
    assert!(leaked_bytes() >= before + MIB as u64);
    assert!(mapped(addr, MIB), "the device may still write here");
    assert_eq!(pool.keys_of(addr as *const u8), None);
    grow_to(&pool, 2, secs(10_000));
    assert_eq!(pool.arenas()[1].addr.as_ptr() as usize, addr + 2 * MIB);
    let all: Vec<_> = std::iter::from_fn(|| pool.alloc(MIB).ok()).collect();
    let _ = pool.tick(secs(10_001));
    assert_eq!((all.len(), pool.capacity()), (2, 2 * MIB), "no third place");
    drop(all);
    pool.check();
    pool.close().unwrap();
    assert!(mapped(addr, MIB));
    assert_eq!(calls.live(), 1);
}
