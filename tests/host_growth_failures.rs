//! Growths that fail. Proves: one that fails at any step, or whose registrar panics, is undone, told, and tried again
//! later, ever more rarely; who waits is served by what comes then; the hook that is told may use the pool and end it.
//!
//! Time is invented (`Pool::tick`) wherever a test does not need the thread.
#![cfg(feature = "fault")]
#![allow(clippy::unwrap_used, clippy::disallowed_methods)]

mod common;
#[path = "common/growth.rs"]
mod growth;
#[path = "common/held.rs"]
mod held;

use std::{
    sync::{Arc, Mutex, mpsc},
    thread,
    time::Duration,
};

use common::{mapped, soft};
use growth::{MIB, faulty, growing, secs};
use held::Held;
use pinpool::{
    Builder, Device, Event, Pool,
    device::{Fault, FaultyRegistrar},
    leaked_bytes,
};

const EIO: i32 = 5;
const ENOMEM: i32 = 12;

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
