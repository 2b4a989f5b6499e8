//! The books while others work (P5). Proves: a look at them counts each block once, whoever recalls caches or has the
//! quarantine give way at that moment (an operator's `trim`, the grower that shrinks): what is not out is never told as
//! out.
#![allow(clippy::unwrap_used)]

use std::{
    sync::atomic::{AtomicBool, Ordering::Relaxed},
    thread,
};

use pinpool::{Device, Guards, Pages, Pool};

/// Sets a flag however its thread ends.
struct Ends<'a>(&'a AtomicBool);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
    }
}

#[test]
fn a_recall_makes_nothing_look_as_if_it_were_out() {
    for guards in [Guards::new(), Guards::new().quarantine(1 << 20)] {
        let pool = Pool::builder().device(Device::soft()).pages(Pages::Base).capacity(4 << 20);
        let pool = pool.guards(guards).build().unwrap();
        let over = AtomicBool::new(false);
        thread::scope(|s| {
            s.spawn(|| {
                while !over.load(Relaxed) {
                    pool.trim();
                }
            });
            let _over = Ends(&over);
            for look in 0..5000 {
                let held: Vec<_> =
                    (0..64).map(|i| pool.alloc(512 * (i % 9 + 1)).unwrap()).collect();
                drop(held);
                let s = pool.stats();
                assert_eq!((s.live, s.live_buffers), (0, 0), "look {look}: {} cached", s.cached);
                assert_eq!(s.cached + s.free + s.unused, s.capacity);
            }
        });
    }
}
