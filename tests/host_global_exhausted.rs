//! The global allocator over a pool that is smaller than what is asked of it. Proves: what the pool has no room
//! for comes from the wrapped allocator, contents and all, and goes back there; every block of the pool is used
//! before; what is freed is used again; books stay right meanwhile.
#![cfg(all(feature = "global", feature = "fault"))]
#![allow(clippy::unwrap_used)]

mod common;

use std::thread;

use common::{Rng, soft};
use pinpool::PinnedAlloc;

#[global_allocator]
static ALLOC: PinnedAlloc = PinnedAlloc::new().sizes(1..=usize::MAX);

fn pinned(v: &[u8]) -> bool {
    ALLOC.keys_of(v.as_ptr()).is_some()
}

// One test, since the whole process shares the pool.
#[test]
fn exhaustion_falls_back_and_recovers() {
    let pool = soft(4 << 20).build().unwrap();
    ALLOC.attach(&pool).unwrap();

    let mut held: Vec<Vec<u8>> = (0..2_000).map(|i| vec![i as u8; 4096]).collect();
    let served = held.iter().filter(|v| pinned(v)).count();
    // All but what the program has besides, and what is left over in slabs of other sizes.
    assert!((900..1_024).contains(&served), "{served}");
    assert!(ALLOC.overflows() >= 900);
    pool.check();
    assert!(held.iter().enumerate().all(|(i, v)| v.iter().all(|&b| b == i as u8)));

    // Growing what lies in either, while there is no room.
    for (i, v) in held.iter_mut().enumerate() {
        v.resize(6000, i as u8);
        assert!(v.iter().all(|&b| b == i as u8));
    }
    pool.check();

    // Freed elsewhere, then there is room again, for all sizes, once the pause since the last refusal is over.
    thread::spawn(move || drop(held)).join().unwrap();
    let again = (0..1_000).map(|_| vec![1u8; 5000]).find(|v| pinned(v));
    assert!(again.is_some());
    let long = (0..1_000).map(|_| vec![1u8; 1 << 20]).find(|v| pinned(v));
    assert!(long.is_some());
    drop((again, long));

    // Threads that together want ten times what there is.
    let threads: Vec<_> = (0..8u64)
        .map(|seed| {
            thread::spawn(move || {
                let mut rng = Rng(seed);
                let mut held: Vec<Vec<u8>> = Vec::new();
                for i in 0..5_000usize {
                    let len = rng.size(1, 100_000);
                    held.push(vec![len as u8; len]);
                    if i % 3 == 0 || held.len() > 100 {
                        let v = held.swap_remove(rng.below(held.len()));
                        assert!(v.iter().all(|&b| b == v.len() as u8));
                    }
                    if i % 5 == 0 {
                        let n = rng.below(held.len().max(1));
                        if let Some(v) = held.get_mut(n) {
                            let (len, old) = (rng.size(1, 100_000), v.len());
                            v.resize(len, 0);
                            assert!(v[..old.min(len)].iter().all(|&b| b == old as u8));
                            v.fill(len as u8);
                            v.shrink_to_fit();
                        }
                    }
                }
            })
        })
        .collect();
    threads.into_iter().for_each(|t| t.join().unwrap());
    pool.check();
    let mine = pool.stats().live_buffers;
    assert!(mine < 1_000, "only what the test runner has is left, not {mine} blocks");
}
