//! The standard library's own collections in a pool, by its unstable `Allocator`. Needs a nightly compiler.
#![cfg(all(feature = "nightly", feature = "fault"))]
#![feature(allocator_api)]
#![allow(clippy::unwrap_used)]

mod common;

use std::alloc::{Allocator, Layout};

use common::soft;
use pinpool::Pool;

#[test]
fn the_standard_collections_lie_in_registered_memory() {
    let pool = soft(4 << 20).build().unwrap();
    let keys = Some(pool.arenas()[0].keys);
    let mut v: Vec<u32, &Pool> = Vec::new_in(&pool);
    v.extend(0..10_000);
    let b: Box<[u8], Pool> = vec_in(&pool).into_boxed_slice();
    assert_eq!((pool.keys_of(v.as_ptr()), pool.keys_of(&*b)), (keys, keys));
    assert!(v.iter().copied().eq(0..10_000));
    v.truncate(10);
    v.shrink_to_fit();
    let nothing = pool.allocate(Layout::from_size_align(0, 64).unwrap()).unwrap();
    assert_eq!(nothing.len(), 0);
    assert_eq!(pool.stats().live_buffers, 2);
    drop((v, b));
    pool.check();
    assert_eq!(pool.stats().live_buffers, 0);
}

fn vec_in(pool: &Pool) -> Vec<u8, Pool> {
    let mut v = Vec::with_capacity_in(100, pool.clone());
    v.extend([7; 100]);
    v
}
