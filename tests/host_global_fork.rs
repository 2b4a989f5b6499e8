//! The global allocator in forked children. Proves: a child of a process with many threads allocates, frees what
//! it inherited, starts threads and ends; it uses no memory of the pool for anything new; the parent goes on.
#![cfg(all(feature = "global", feature = "fault"))]
#![allow(clippy::unwrap_used)]

mod common;

use std::{
    sync::atomic::{AtomicBool, Ordering::Relaxed},
    thread,
};

use common::soft;
use pinpool::PinnedAlloc;

#[global_allocator]
static ALLOC: PinnedAlloc = PinnedAlloc::new().sizes(1..=usize::MAX);

fn pinned(v: &[u8]) -> bool {
    ALLOC.keys_of(v.as_ptr()).is_some()
}

#[test]
fn children_go_on_with_malloc() {
    let pool = soft(64 << 20).build().unwrap();
    ALLOC.attach(&pool).unwrap();
    let stop = AtomicBool::new(false);
    thread::scope(|s| {
        // Threads in the middle of anything while the others fork.
        let busy: Vec<_> = (0..3)
            .map(|_| {
                s.spawn(|| {
                    while !stop.load(Relaxed) {
                        let held: Vec<Vec<u8>> = (1..200).map(|i| vec![1; i * 64]).collect();
                        drop(std::hint::black_box(held));
                        pool.trim();
                    }
                })
            })
            .collect();
        for round in 0..50 {
            let inherited: Vec<Vec<u8>> = (1..100).map(|i| vec![round; i * 100]).collect();
            assert!(inherited.iter().all(|v| pinned(v)));
            // SAFETY: the child does what a child of a process with threads may not be able to with a lesser
            // allocator, and leaves by `_exit`.
            let pid = unsafe { libc::fork() };
            assert!(pid >= 0);
            if pid == 0 {
                let ok = child(inherited, round);
                // SAFETY: ends the child.
                unsafe { libc::_exit(if ok { 0 } else { 1 }) };
            }
            let mut status = 0;
            // SAFETY: `pid` is the child, and `status` is valid to write to.
            assert_eq!(unsafe { libc::waitpid(pid, &mut status, 0) }, pid);
            assert_eq!(status, 0, "round {round}: the child's exit status");
            assert!(inherited.iter().all(|v| v.iter().all(|&b| b == round)));
        }
        stop.store(true, Relaxed);
        busy.into_iter().for_each(|t| t.join().unwrap());
    });
    pool.check();
    assert!(pinned(&vec![1u8; 1000]));
}

fn child(mut inherited: Vec<Vec<u8>>, round: u8) -> bool {
    let mut ok = inherited.iter().all(|v| v.iter().all(|&b| b == round));
    // Resized: moves out, unless it stays where it is.
    inherited[50].resize(50_000, round);
    ok &= !pinned(&inherited[50]) && inherited[50].iter().all(|&b| b == round);
    drop(inherited);
    let mut fresh: Vec<Vec<u8>> = (1..500).map(|i| vec![2; i * 50]).collect();
    ok &= fresh.iter().all(|v| !pinned(v));
    fresh.iter_mut().for_each(|v| v.shrink_to_fit());
    let text = thread::spawn(move || format!("{:?}", fresh.iter().map(Vec::len).sum::<usize>()));
    ok && text.join().unwrap() == (1..500).map(|i| i * 50).sum::<usize>().to_string()
}
