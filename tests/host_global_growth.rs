//! The global allocator over a pool that grows. Proves: running out has the pool grow, in the background, on a
//! thread whose own allocations come to the same allocator; what it grew by is served then, and goes back; an
//! arena that is free goes again, with the global allocator at work.
#![cfg(all(feature = "global", feature = "fault"))]
#![allow(clippy::unwrap_used)]

mod common;

use std::{
    thread,
    time::{Duration, Instant},
};

use common::soft;
use pinpool::PinnedAlloc;

#[global_allocator]
static ALLOC: PinnedAlloc = PinnedAlloc::new().sizes(1..=usize::MAX);

fn until(mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < Duration::from_secs(120), "it does not come");
        thread::yield_now();
    }
}

#[test]
fn a_heap_that_grows_and_shrinks() {
    let pool = soft(4 << 20)
        .max_capacity(16 << 20)
        .arena_size(4 << 20)
        .shrink_after(Duration::from_millis(50))
        .build()
        .unwrap();
    ALLOC.attach(&pool).unwrap();
    let mut held: Vec<Vec<u8>> = Vec::new();
    // Many of these come from the wrapped allocator, while the pool grows.
    until(|| {
        held.push(vec![held.len() as u8; 16 << 10]);
        pool.capacity() == 16 << 20 || held.len() > 100_000
    });
    assert_eq!(pool.capacity(), 16 << 20);
    until(|| {
        held.push(vec![held.len() as u8; 16 << 10]);
        let pinned = held.iter().filter(|v| ALLOC.keys_of(v.as_ptr()).is_some()).count();
        pinned > 8 << 6 || held.len() > 200_000
    });
    assert!(held.iter().enumerate().all(|(i, v)| v.iter().all(|&b| b == i as u8)));
    pool.check();
    drop(held);
    pool.trim();
    until(|| {
        drop(std::hint::black_box(vec![1u8; 1000]));
        pool.trim();
        pool.capacity() < 16 << 20
    });
    pool.check();
}
