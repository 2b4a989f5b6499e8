//! The global allocator over one that logs every call through a sink that allocates: each call of the wrapped
//! allocator, those from the middle of the pool's slow paths too, makes strings and vectors, all of
//! which come back to the global allocator. Proves: no recursion, no deadlock, nothing lost.
#![cfg(all(feature = "global", feature = "fault"))]
#![allow(clippy::unwrap_used, clippy::print_stderr)]

mod common;

use std::{
    alloc::{GlobalAlloc, Layout, System},
    backtrace::Backtrace,
    cell::Cell,
    mem,
    sync::{
        Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed},
    },
    thread,
};

use common::{Rng, soft};
use pinpool::PinnedAlloc;

thread_local! {
    static LOGGING: Cell<bool> = const { Cell::new(false) };
}

/// Set while there is nothing but allocs, frees, trims and looks at the books: building and closing a pool takes memory
/// under locks that those do not wait for.
static WATCHING: AtomicBool = AtomicBool::new(false);
/// Calls of the wrapped allocator that came from under a lock of the pool's.
static FOUND: AtomicUsize = AtomicUsize::new(0);

static LOG: Mutex<Vec<String>> = Mutex::new(Vec::new());

/// Logs, unless it is called by its own sink.
struct Logging;

impl Logging {
    fn log(what: &str, size: usize) {
        if LOGGING.replace(true) {
            return;
        }
        // Long enough to be served by the pool, when this is not the middle of it.
        let line = format!("{what:>1000} {size}");
        let held = pinpool::locks_held();
        if held > 0 && WATCHING.load(Relaxed) && FOUND.fetch_add(1, Relaxed) < 5 {
            eprintln!("{what} under {held} locks of the pool:\n{}", Backtrace::force_capture());
        }
        // Allocates and frees under a lock of its own, which is only sound since the wrapped allocator is never
        // called under one of the pool's.
        let mut log = LOG.lock().unwrap_or_else(|e| e.into_inner());
        if log.len() >= 500 {
            // Frees many of the pool's blocks at once, also in its middle.
            log.clear();
            log.shrink_to_fit();
        }
        log.push(line);
        drop(log);
        LOGGING.set(false);
    }
}

// SAFETY: passes everything on to `System`.
unsafe impl GlobalAlloc for Logging {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        Self::log("alloc", layout.size());
        // SAFETY: passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        Self::log("dealloc", layout.size());
        // SAFETY: passed on.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOC: PinnedAlloc<Logging> = PinnedAlloc::over(Logging).sizes(256..=usize::MAX);

#[test]
fn a_sink_that_allocates_neither_recurses_nor_loses() {
    let pool = soft(16 << 20).build().unwrap();
    ALLOC.attach(&pool).unwrap();
    WATCHING.store(true, Relaxed);
    let threads: Vec<_> = (0..4u64)
        .map(|seed| {
            let pool = pool.clone();
            thread::spawn(move || {
                let mut rng = Rng(seed);
                let mut held: Vec<Vec<u8>> = Vec::new();
                for i in 0..3_000 {
                    let len = rng.size(1, 20_000);
                    held.push(vec![len as u8; len]);
                    if held.len() > 50 {
                        let v = held.swap_remove(rng.below(held.len()));
                        assert!(v.iter().all(|&b| b == v.len() as u8));
                    }
                    if i % 100 == 0 {
                        // Slow paths with many calls of the wrapped allocator, called by themselves too.
                        pool.trim();
                        drop(pool.alloc(rng.size(1, 100_000)));
                        assert!(pool.stats().balanced());
                    }
                }
            })
        })
        .collect();
    threads.into_iter().for_each(|t| t.join().unwrap());
    WATCHING.store(false, Relaxed);
    assert_eq!(FOUND.load(Relaxed), 0, "see above");
    let log = mem::take(&mut *LOG.lock().unwrap());
    assert!(log.iter().any(|line| line.contains("alloc")));
    assert!(log.iter().any(|line| ALLOC.keys_of(line.as_ptr()).is_some()));
    drop(log);
    pool.check();
    let live = pool.stats().live_buffers;
    assert!(live < 300, "{live} blocks are out, and only the test runner's should be");
}
