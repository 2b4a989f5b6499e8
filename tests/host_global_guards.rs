//! The global allocator over a guarded pool that tracks everything. Proves: all of a program's heap passes the guards,
//! growing and shrinking in place too; nothing is told of who stays inside; a write after free and one beyond an end
//! are told; a hook that allocates, a backtrace that is printed and a panic harm nothing.
#![cfg(all(feature = "global", feature = "fault"))]
#![allow(clippy::unwrap_used)]

mod common;

use std::{
    backtrace::Backtrace,
    collections::HashMap,
    fs::File,
    os::unix::fs::FileExt,
    sync::atomic::{AtomicUsize, Ordering::Relaxed},
    thread,
};

use common::{Rng, soft};
use pinpool::{Event, Guards, PinnedAlloc, Track};

#[global_allocator]
static ALLOC: PinnedAlloc = PinnedAlloc::new().sizes(1..=usize::MAX);

static LATE: AtomicUsize = AtomicUsize::new(0);
static BEYOND: AtomicUsize = AtomicUsize::new(0);

/// As a device writes.
fn late_write(addr: usize) {
    let memory = File::options().write(true).open("/proc/self/mem").unwrap();
    memory.write_all_at(b"!", addr as u64).unwrap();
}

// One test, since the whole process shares the pool.
#[test]
fn a_whole_heap_is_guarded() {
    let guards = Guards::new().poison(true).canary(true).quarantine(1 << 20).zero_on_free(true);
    let pool = soft(64 << 20)
        .guards(guards)
        .track(Track::all().backtraces(true))
        .on_event(|event| {
            let counter = match event {
                Event::WrittenAfterFree(_) => &LATE,
                Event::WrittenBeyondEnd(_) => &BEYOND,
                _ => return,
            };
            counter.fetch_add(1, Relaxed);
            assert!(format!("{event:?} and then {}", "some".repeat(1000)).len() > 4000);
        })
        .build()
        .unwrap();
    ALLOC.attach(&pool).unwrap();
    let threads: Vec<_> = (0..4u64)
        .map(|seed| {
            thread::spawn(move || {
                let mut rng = Rng(seed);
                let mut held: HashMap<u64, Vec<u8>> = HashMap::new();
                for i in 0..2000u64 {
                    let v = held.entry(rng.next() % 50).or_default();
                    let (len, byte) = (rng.next() as usize % 5000, v.first().copied());
                    // Grows and shrinks, in place where it can.
                    v.resize(len, byte.unwrap_or(i as u8));
                    v.shrink_to_fit();
                    assert!(v.iter().all(|&b| Some(b) == byte || byte.is_none()));
                }
                held.len()
            })
        })
        .collect();
    threads.into_iter().for_each(|t| _ = t.join().unwrap());
    assert_eq!((LATE.load(Relaxed), BEYOND.load(Relaxed), pool.check_free()), (0, 0, 0));
    pool.check();

    // What takes the standard library's lock for backtraces, and allocates under it.
    assert!(Backtrace::force_capture().to_string().contains("a_whole_heap_is_guarded"));
    assert!(thread::spawn(|| panic!("with a backtrace")).join().is_err());
    let report = pool.outstanding();
    assert!(report.buffers > 0 && report.sites.iter().all(|s| s.site.backtrace().is_none()));

    let v = vec![1u8; 3000];
    let addr = v.as_ptr() as usize;
    assert!(ALLOC.keys_of(v.as_ptr()).is_some());
    late_write(addr + 3000);
    drop(v);
    late_write(addr + 7);
    assert_eq!(pool.check_free(), 1);
    assert_eq!((LATE.load(Relaxed), BEYOND.load(Relaxed)), (1, 1));
    pool.check();
}
