//! The quarantine. Proves: what is freed comes back after so many bytes more, sooner if nothing else is left; nobody
//! is refused while a block is in it.
#![cfg(feature = "fault")]
#![allow(clippy::unwrap_used)]

mod common;
#[path = "common/told.rs"]
mod told;

use std::{thread, time::Duration};

use common::{Rng, most_of, soft};
use pinpool::{Buf, Guards, Reserve};
use told::{MIB, Told, guarded};

#[test]
fn a_quarantined_block_comes_back_after_so_many_bytes_and_no_sooner() {
    const KEPT: usize = 40_960;
    for poison in [false, true] {
        let (pool, told) = guarded(MIB, Guards::new().quarantine(KEPT).poison(poison));
        let first = pool.alloc(4096).unwrap();
        let addr = first.as_ptr() as usize;
        drop(first);
        let mut freed = 0;
        loop {
            let buf = pool.alloc(4096).unwrap();
            let back = buf.as_ptr() as usize == addr;
            assert_eq!(back, freed >= KEPT, "after {freed} bytes");
            if back {
                break;
            }
            drop(buf);
            freed += 4096;
            let stats = pool.stats();
            assert_eq!(stats.guards.quarantined, stats.cached);
            assert!(stats.cached <= KEPT + 4096 && stats.live == 0);
            pool.check();
        }
        told.none();
    }
}

#[test]
fn the_quarantine_gives_way_before_anything_is_refused() {
    let (pool, _) = guarded(MIB, Guards::new().quarantine(usize::MAX));
    for len in [64, 1000, 4096, 50_000, 300_000, MIB] {
        for _ in 0..3 {
            let mut all = Vec::new();
            while let Ok(buf) = pool.alloc(len) {
                all.push(buf);
            }
            // As many as a pool without has.
            let plain = soft(MIB).build().unwrap();
            let most = most_of(&plain, len);
            assert_eq!(all.len(), most, "{len}");
            assert_eq!(pool.stats().guards.quarantined, 0);
            drop(all);
            assert_eq!(pool.stats().live, 0);
            assert!(pool.stats().cached >= MIB * 7 / 8, "all of it waits");
            pool.check();
        }
    }
    // Who waits gets it, too.
    let all: Vec<_> = std::iter::from_fn(|| pool.alloc(MIB / 4).ok()).collect();
    thread::scope(|scope| {
        let waiter = scope.spawn(|| pool.alloc_wait(MIB / 4, Duration::from_secs(300)).unwrap());
        while pool.stats().waiting == 0 {
            thread::yield_now();
        }
        drop(all);
        drop(waiter.join().unwrap());
    });
    pool.check();
    pool.close().unwrap();
}

#[test]
fn nobody_is_refused_while_a_block_is_in_quarantine_or_on_its_way() {
    const EACH: usize = 4;
    let rounds: usize = std::env::var("PINPOOL_ROUNDS").map_or(3000, |n| n.parse().unwrap());
    let all = Guards::new().poison(true).canary(true).quarantine(usize::MAX);
    for guards in [Guards::new().quarantine(usize::MAX), all, all.quarantine(5 * 4096)] {
        // As many buffers as eight threads hold at most, half of them a share's.
        let blocks = 8 * EACH;
        let told = Told::default();
        let builder = soft(blocks * 4096).share("half", Reserve::bytes(blocks * 2048));
        let pool = told.hear(builder.guards(guards)).build().unwrap();
        let share = pool.share("half").unwrap();
        thread::scope(|scope| {
            for n in 0..8u64 {
                let share = &share;
                scope.spawn(move || {
                    let mut rng = Rng(n);
                    let mut held: Vec<Buf> = Vec::new();
                    for round in 0..rounds {
                        if held.len() == EACH || rng.next() & 3 == 0 {
                            held.pop();
                        } else {
                            // With room for the canary.
                            let got = share.alloc(4088);
                            held.push(got.unwrap_or_else(|e| panic!("round {round}: {e}")));
                        }
                    }
                });
            }
        });
        pool.check();
        assert_eq!(pool.stats().live, 0);
        drop(share);
        pool.close().unwrap();
        told.none();
    }
}
