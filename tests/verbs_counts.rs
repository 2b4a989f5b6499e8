//! How often the verbs are called, counted between this program and libibverbs:
//! - as many registrations as there are arenas, whatever is allocated, by however many threads;
//! - as many deregistrations, and one PD for all pools on a device, freed once and never busy.
#![cfg(all(feature = "loopback", any(feature = "rdma-sys", feature = "rdma-mummy-sys")))]

#[path = "common/calls.rs"]
mod calls;
#[path = "common/verbs.rs"]
mod common;

use std::thread;

use common::{alone, device};
use pinpool::{Access, Buf, Device, Pages, Pool};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Counts {
    register: u64,
    deregister: u64,
    alloc_pd: u64,
    dealloc_pd: u64,
    failed: u64,
}

impl Counts {
    fn now() -> Self {
        use calls::{ALLOC_PD, DEALLOC_PD, DEREGISTER, REGISTER};
        Self {
            register: REGISTER.made(),
            deregister: DEREGISTER.made(),
            alloc_pd: ALLOC_PD.made(),
            dealloc_pd: DEALLOC_PD.made(),
            failed: [&REGISTER, &DEREGISTER, &ALLOC_PD, &DEALLOC_PD]
                .map(|c| c.failed())
                .iter()
                .sum(),
        }
    }

    fn since(self, start: Self) -> Self {
        Self {
            register: self.register - start.register,
            deregister: self.deregister - start.deregister,
            alloc_pd: self.alloc_pd - start.alloc_pd,
            dealloc_pd: self.dealloc_pd - start.dealloc_pd,
            failed: self.failed - start.failed,
        }
    }
}

fn pool(device: &Device, capacity: usize, arena: usize) -> Pool {
    Pool::builder()
        .device(device.clone())
        .access(Access::LOCAL_WRITE | Access::REMOTE_READ)
        .capacity(capacity)
        .arena_size(arena)
        .pages(Pages::Base)
        .build()
        .expect("build")
}

#[test]
fn the_calls_are_seen() {
    let _alone = alone();
    let start = Counts::now();
    let device = device();
    let opened = Counts::now().since(start);
    assert_eq!((opened.alloc_pd, opened.register), (1, 0), "{opened:?}");
    drop(pool(&device, 1 << 20, 1 << 20));
    let used = Counts::now().since(start);
    assert_eq!((used.register, used.deregister, used.dealloc_pd), (1, 1, 0), "{used:?}");
    // Each of the three calls that register, and one that fails.
    for extra in [Access::ZERO_BASED, Access::RELAXED_ORDERING] {
        drop(common::Registered::new(&device, 4096, Access::LOCAL_WRITE | extra));
    }
    assert!(common::Registered::try_new(&device, 4096, Access::REMOTE_WRITE).is_err());
    drop(device);
    let expected = Counts { register: 4, deregister: 3, alloc_pd: 1, dealloc_pd: 1, failed: 1 };
    assert_eq!(Counts::now().since(start), expected);
}

#[test]
fn b18_a_hundred_thousand_buffers_of_one_arena_are_one_registration() {
    let _alone = alone();
    let device = device();
    let start = Counts::now();
    let pool = pool(&device, 32 << 20, 32 << 20);
    let bufs: Vec<Buf> = (0..100_000).map(|i| pool.alloc(1 + i % 256).expect("alloc")).collect();
    assert_eq!(Counts::now().since(start).register, 1);
    assert_eq!((pool.stats().register_calls, pool.stats().live_buffers), (1, 100_000));
    let keys = pool.keys_of(bufs[0].as_ptr()).expect("keys");
    assert!(bufs.iter().all(|b| b.keys() == keys));
    drop(bufs);
    drop(pool);
    let counts = Counts::now().since(start);
    assert_eq!((counts.register, counts.deregister, counts.failed), (1, 1, 0));
}

#[test]
fn threads_and_sizes_register_nothing() {
    let _alone = alone();
    let device = device();
    let start = Counts::now();
    let (arenas, threads) = (8u64, 4);
    let pool = pool(&device, 64 << 20, 8 << 20);
    thread::scope(|s| {
        for t in 0..threads {
            let pool = &pool;
            s.spawn(move || {
                let mut held: Vec<Buf> = Vec::new();
                let random = common::pattern(t, 25_000);
                for (round, bits) in random.into_iter().enumerate() {
                    // Up to 128 KiB, and over the edges of classes.
                    if let Ok(buf) = pool.alloc((1 << (bits % 18)) + round % 7) {
                        held.push(buf);
                    }
                    if held.len() > 32 {
                        held.swap_remove(round % 32);
                    }
                }
            });
        }
    });
    assert_eq!(Counts::now().since(start).register, arenas);
    assert_eq!(pool.arenas().len() as u64, arenas);
    let stats = pool.stats();
    assert!(stats.balanced() && stats.live == 0, "{stats:?}");
    drop(pool);
    let counts = Counts::now().since(start);
    assert_eq!((counts.register, counts.deregister, counts.failed), (arenas, arenas, 0));
}

/// The `n`th order of five things; 0 to 119 are all of them.
fn order(mut n: usize) -> Vec<usize> {
    let mut left: Vec<usize> = (0..5).collect();
    let mut order = Vec::new();
    while !left.is_empty() {
        order.push(left.remove(n % left.len()));
        n /= left.len() + 1;
    }
    order
}

#[test]
fn b23_two_pools_on_one_pd_in_all_drop_orders_free_it_once() {
    let _alone = alone();
    let all: std::collections::HashSet<_> = (0..120).map(order).collect();
    assert_eq!(all.len(), 120, "every order occurs");
    for round in 0..1_000 {
        let start = Counts::now();
        let owned = device();
        // Every other time the pools stand on a lent PD, whose owner is still there to free it.
        let lent = round % 2 == 1;
        let on = if lent {
            // SAFETY: `owned` outlives, in this round, everything that is built on its PD.
            unsafe { Device::from_raw_pd(owned.as_verbs().expect("verbs").pd()) }.expect("lend")
        } else {
            owned.clone()
        };
        let (a, b) = (pool(&on, 1 << 16, 1 << 16), pool(&on, 1 << 16, 1 << 16));
        let (x, y) = (a.alloc(4096).expect("alloc"), b.alloc(100).expect("alloc"));
        let outer = lent.then(|| owned.clone());
        drop(owned);
        let mut things: [Option<Box<dyn std::any::Any>>; 5] = [
            Some(Box::new(on)),
            Some(Box::new(a)),
            Some(Box::new(b)),
            Some(Box::new(x)),
            Some(Box::new(y)),
        ];
        for i in order(round) {
            let before = Counts::now().since(start);
            assert_eq!(before.dealloc_pd, 0, "round {round}: freed while in use");
            things[i] = None;
        }
        let counts = Counts::now().since(start);
        let freed = u64::from(!lent);
        let expected =
            Counts { register: 2, deregister: 2, alloc_pd: 1, dealloc_pd: freed, failed: 0 };
        assert_eq!(counts, expected, "round {round}, order {:?}, lent {lent}", order(round));
        drop(outer);
        assert_eq!(Counts::now().since(start), Counts { dealloc_pd: 1, ..expected });
    }
}
