//! Arenas that come and go. Proves: a pool grows before it runs dry, on its own thread, while alloc and free go
//! on (P6); a growth that fails at any step is undone, told, and tried again later; what was long free goes, what
//! is in use, touched or needed soon stays; nothing of what went is taken for what came after it; the books
//! balance through ten thousand growths under eight threads; the end of a pool waits for a growth and undoes it.
//!
//! Time is invented (`Pool::tick`) wherever a test does not need the thread.
#![cfg(feature = "fault")]
#![allow(clippy::unwrap_used, clippy::disallowed_methods)]

mod common;
#[path = "common/held.rs"]
mod held;

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
        mpsc,
    },
    thread,
    time::Duration,
};

use common::{Rng, mapped, soft};
use held::Held;
use pinpool::{
    AllocError, Buf, BuildError, Builder, Device, Event, FreeError, Pool,
    device::{Fault, FaultyRegistrar},
    leaked_bytes,
};

const MIB: usize = 1 << 20;
const EIO: i32 = 5;
const ENOMEM: i32 = 12;
const EBUSY: i32 = 16;

fn secs(n: u64) -> Duration {
    Duration::from_secs(n)
}

/// One arena of 1 MiB that may become `most`, grown by hand; 128 KiB shall be left.
fn growing(most: usize) -> Builder {
    soft(MIB).arena_size(MIB).max_capacity(most * MIB).growth_by_hand()
}

fn faulty(faults: &[Fault]) -> FaultyRegistrar {
    faults.iter().fold(FaultyRegistrar::new(&Device::soft()), |r, f| r.fault(*f))
}

/// Brings a pool to `arenas` arenas, with nothing out.
fn grow_to(pool: &Pool, arenas: usize, now: Duration) {
    let mut held = Vec::new();
    while pool.arenas().len() < arenas {
        match pool.alloc(900 << 10) {
            Ok(buf) => held.push(buf),
            Err(e) => assert!(matches!(e, AllocError::Exhausted(_)), "{e}"),
        }
        let _ = pool.tick(now);
    }
    drop(held);
    pool.check();
}

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

/// Events of failed growths, as (failures, retry after, errno).
type Failures = Arc<Mutex<Vec<(u32, Duration, Option<i32>, String)>>>;

fn heard(builder: Builder) -> (Builder, Failures) {
    let heard: Failures = Arc::default();
    let sink = heard.clone();
    let builder = builder.on_event(move |e| {
        if let Event::GrowthFailed {
            len,
            capacity,
            max_capacity,
            failures,
            retry_after,
            error,
            ..
        } = e
        {
            assert_eq!((*len, *capacity, *max_capacity), (MIB, MIB, 4 * MIB));
            let text = error.to_string();
            sink.lock().unwrap().push((*failures, *retry_after, error.raw_os_error(), text));
        }
    });
    (builder, heard)
}

/// Fails the named call on this thread, and thread alone, from now on: (number, argument, low half of its
/// value, errno).
fn fail_calls(calls: &[(libc::c_long, u32, u32, i32)]) {
    let op = |code, jt, jf, k| libc::sock_filter { code, jt, jf, k };
    // Classic BPF: for each call, its number, then its argument's low half.
    let mut program = Vec::new();
    for &(number, argument, value, errno) in calls {
        program.push(op(0x20, 0, 0, 0));
        program.push(op(0x15, 0, 3, number as u32));
        program.push(op(0x20, 0, 0, 16 + 8 * argument));
        program.push(op(0x15, 0, 1, value));
        program.push(op(0x06, 0, 0, libc::SECCOMP_RET_ERRNO | errno as u32));
    }
    program.push(op(0x06, 0, 0, libc::SECCOMP_RET_ALLOW));
    let filter = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    // SAFETY: both calls read their arguments, which live across them.
    unsafe {
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        assert_eq!(libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &filter), 0);
    }
}

const POPULATE_WRITE: u32 = 23;

#[test]
fn a_growth_that_fails_at_any_step_harms_nothing() {
    // Each step, by the system call that fails on the thread that grows, or the register call that does.
    let mprotect = (libc::SYS_mprotect, 1, MIB as u32, ENOMEM);
    let populate = (libc::SYS_madvise, 2, POPULATE_WRITE, ENOMEM);
    let mlock = (libc::SYS_mlock, 1, MIB as u32, ENOMEM);
    let steps: [(&str, Option<_>, Option<u64>, i32); 4] = [
        ("when mapping", Some(mprotect), None, ENOMEM),
        ("when faulting in", Some(populate), None, ENOMEM),
        ("registering arena 1 of 4", Some(mlock), None, ENOMEM),
        ("registering arena 1 of 4", None, Some(2), EIO),
    ];
    for (step, call, register, errno) in steps {
        let faults: Vec<_> = register.map(|n| Fault::Register(n, EIO)).into_iter().collect();
        let calls = faulty(&faults);
        let (builder, heard) = heard(growing(4).device(Device::custom(calls.clone())));
        let pool = builder.build().unwrap();
        let mut held: Vec<_> = std::iter::from_fn(|| pool.alloc(64 << 10).ok()).collect();
        let before = pool.stats();
        if call.is_some_and(|c| c.0 == libc::SYS_mlock) && before.locked == 0 {
            // Under a sanitizer: those make nothing of `mlock`.
            continue;
        }
        let base = pool.arenas()[0].addr.as_ptr() as usize;
        let next = thread::scope(|s| {
            s.spawn(|| {
                fail_calls(&call.into_iter().collect::<Vec<_>>());
                pool.tick(secs(1))
            })
            .join()
            .unwrap()
        });
        assert_eq!(next, Some(Duration::from_millis(100)), "{step}");
        let failures = heard.lock().unwrap().clone();
        assert_eq!(failures.len(), 1, "{step}");
        let (n, retry, number, text) = &failures[0];
        assert_eq!((*n, *retry, *number), (1, Duration::from_millis(100), Some(errno)), "{text}");
        assert!(text.contains(step), "{step}: {text}");
        // Nothing is left of it, and the pool is as it was.
        let after = pool.stats();
        assert_eq!((after.growths, after.growth_failures), (0, 1));
        assert_eq!((after.capacity, after.live, after.arenas), (MIB, before.live, 1));
        assert_eq!(calls.live(), 1);
        assert!(!mapped(base + MIB, 7 * MIB), "{step}");
        held.pop();
        held.push(pool.alloc(64 << 10).unwrap());
        pool.check();
        // Not at once again, whatever is asked.
        assert!(pool.alloc(64 << 10).is_err());
        assert!(pool.tick(secs(1)).is_some());
        assert_eq!(pool.stats().growth_failures, 1);
        // But later, in the same place.
        let _ = pool.tick(secs(2));
        assert_eq!((pool.capacity(), pool.stats().growths), (2 * MIB, 1), "{step}");
        // Arenas are two apart.
        assert_eq!(pool.arenas()[1].addr.as_ptr() as usize, base + 2 * MIB);
        held.push(pool.alloc(64 << 10).unwrap());
        drop(held);
        pool.check();
        pool.close().unwrap();
        assert_eq!(calls.live(), 0);
    }
}

#[test]
fn failures_in_a_row_are_tried_ever_more_rarely() {
    let faults: Vec<_> = (2..14).map(|n| Fault::Register(n, EIO)).collect();
    let (builder, heard) = heard(growing(4).device(Device::custom(faulty(&faults))));
    let pool = builder.build().unwrap();
    let held: Vec<_> = std::iter::from_fn(|| pool.alloc(64 << 10).ok()).collect();
    let mut now = secs(1);
    while pool.stats().growths == 0 {
        let next = pool.tick(now).unwrap();
        assert_eq!(pool.tick(now), Some(next), "a tick too early changes nothing");
        now += next;
    }
    let waits: Vec<_> = heard.lock().unwrap().iter().map(|f| f.1.as_millis()).collect();
    assert_eq!(waits[..4], [100, 200, 400, 800]);
    assert_eq!(waits[9..], [51_200, 60_000, 60_000]);
    assert_eq!(heard.lock().unwrap().last().unwrap().0, 12);
    drop(held);
}

#[test]
fn who_waits_is_served_by_what_comes_after_a_failure_too() {
    let calls = faulty(&[Fault::Register(2, EIO), Fault::Register(3, EIO)]);
    let pool = growing(4).device(Device::custom(calls)).low_watermark(0).build().unwrap();
    let mut held: Vec<_> = std::iter::from_fn(|| pool.alloc(64 << 10).ok()).collect();
    let mut n = 0;
    held.retain(|_| {
        n += 1;
        n % 2 == 0
    });
    // Half is free, and nobody else asks: only the one that waits says that it is not enough.
    thread::scope(|s| {
        let waiter = s.spawn(|| pool.alloc_wait(512 << 10, secs(600)));
        let mut now = secs(1);
        while !waiter.is_finished() {
            let _ = pool.tick(now);
            now += secs(1);
            thread::yield_now();
        }
        assert_eq!(waiter.join().unwrap().unwrap().len(), 512 << 10);
    });
    assert_eq!((pool.stats().growths, pool.stats().growth_failures), (1, 2));
    drop(held);
    pool.check();
}

#[test]
fn a_registrar_that_panics_costs_an_arena_and_no_more() {
    let calls = Held::new(FaultyRegistrar::new(&Device::soft()));
    let (builder, heard) = heard(growing(4).device(calls.device()));
    let pool = builder.build().unwrap();
    let held = pool.alloc(MIB).unwrap();
    let before = leaked_bytes();
    calls.panic_once();
    let _ = pool.tick(secs(1));
    assert_eq!(heard.lock().unwrap().len(), 1);
    assert!(heard.lock().unwrap()[0].3.contains("panicked"));
    assert!(leaked_bytes() >= before + MIB as u64, "whether the device has it is not known");
    let _ = pool.tick(secs(2));
    assert_eq!(pool.capacity(), 2 * MIB);
    let gap = pool.arenas()[1].addr.as_ptr() as usize - held.as_ptr() as usize;
    assert_eq!(gap, 4 * MIB, "the place is not used again");
    pool.check();
    drop(held);
}

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

/// Scales a count down where the processor is emulated.
fn scaled(n: u64) -> u64 {
    if std::env::var_os("PINPOOL_GUEST").is_some() { n / 20 } else { n }
}

#[test]
fn ten_thousand_growths_and_shrinks_under_eight_threads() {
    const ARENA: usize = 64 << 10;
    // Few classes, so that what eight threads have and cache fits the starting capacity, however many of their
    // turns fall between two looks.
    const SIZES: [usize; 4] = [100, 1500, 4096, 8000];
    // PINPOOL_ROUNDS asks for another count: the sanitizers, which make it slow, for fewer.
    let asked = std::env::var("PINPOOL_ROUNDS").ok().map(|n| n.parse().expect("a count"));
    let rounds = asked.unwrap_or_else(|| scaled(10_000));
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
    for round in 0..scaled(300) {
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

#[test]
fn an_event_hook_may_use_the_pool_and_end_it() {
    let slot: Arc<Mutex<Option<Pool>>> = Arc::default();
    let (told, is_told) = mpsc::channel();
    let (inside, told) = (slot.clone(), Mutex::new(told));
    let calls = faulty(&[Fault::Register(2, EIO)]);
    let pool = soft(MIB)
        .device(Device::custom(calls.clone()))
        .arena_size(MIB)
        .max_capacity(2 * MIB)
        .on_event(move |e| {
            assert!(matches!(e, Event::GrowthFailed { .. }));
            // The last handle, on the grower's own thread.
            let pool = inside.lock().unwrap().take().unwrap();
            assert_eq!((pool.stats().growth_failures, pool.arenas().len()), (1, 1));
            drop(pool);
            told.lock().unwrap().send(()).unwrap();
        })
        .build()
        .unwrap();
    *slot.lock().unwrap() = Some(pool.clone());
    let buf = pool.alloc(1000 << 10).unwrap();
    drop(pool);
    is_told.recv().unwrap();
    assert_eq!(calls.live(), 1, "the buffer keeps its arena");
    drop(buf);
    assert_eq!(calls.live(), 0);
}
