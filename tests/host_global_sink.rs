//! The global allocator over one that logs every call through a sink that allocates: each call of the wrapped
//! allocator, those from the middle of the pool's slow paths too, makes strings and vectors, all of
//! which come back to the global allocator. Proves: no recursion, no deadlock, nothing lost.
#![cfg(all(feature = "global", feature = "fault"))]
#![allow(clippy::unwrap_used)]

mod common;

use std::{
    alloc::{GlobalAlloc, Layout, System},
    cell::Cell,
    mem,
    sync::Mutex,
    thread,
};

use common::{Rng, soft};
use pinpool::PinnedAlloc;

thread_local! {
    static LOGGING: Cell<bool> = const { Cell::new(false) };
}

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
        // Nothing is allocated or freed under the sink's own lock: who calls the global allocator with a lock held,
        // from within an allocator that it is over, has two locks in two orders.
        let rest = {
            let mut log = LOG.lock().unwrap_or_else(|e| e.into_inner());
            if log.len() < log.capacity() {
                log.push(line);
                None
            } else {
                Some(line)
            }
        };
        if let Some(line) = rest {
            let mut fresh = Vec::with_capacity(500);
            fresh.push(line);
            let old = mem::replace(&mut *LOG.lock().unwrap_or_else(|e| e.into_inner()), fresh);
            // Frees many of the pool's blocks at once, also in its middle.
            drop(old);
        }
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
    let log = mem::take(&mut *LOG.lock().unwrap());
    assert!(log.iter().any(|line| line.contains("alloc")));
    assert!(log.iter().any(|line| ALLOC.keys_of(line.as_ptr()).is_some()));
    drop(log);
    pool.check();
    let live = pool.stats().live_buffers;
    assert!(live < 300, "{live} blocks are out, and only the test runner's should be");
}
