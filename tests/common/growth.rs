//! Pools that grow by hand, for the tests of what comes and goes.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used)]

use std::time::Duration;

use pinpool::{
    AllocError, Builder, Device, Pool,
    device::{Fault, FaultyRegistrar},
};

use crate::common::soft;

pub const MIB: usize = 1 << 20;

pub fn secs(n: u64) -> Duration {
    Duration::from_secs(n)
}

/// One arena of 1 MiB that may become `most`, grown by hand; 128 KiB shall be left.
pub fn growing(most: usize) -> Builder {
    soft(MIB).arena_size(MIB).max_capacity(most * MIB).growth_by_hand()
}

pub fn faulty(faults: &[Fault]) -> FaultyRegistrar {
    faults.iter().fold(FaultyRegistrar::new(&Device::soft()), |r, f| r.fault(*f))
}

/// Brings a pool to `arenas` arenas, with nothing out.
pub fn grow_to(pool: &Pool, arenas: usize, now: Duration) {
    let mut held = Vec::new();
    while pool.arenas().len() < arenas {
        match pool.alloc(900 << 10) {
            Ok(buf) => held.push(buf),
            Err(e) => assert!(matches!(e, AllocError::Exhausted(_)), "{e}"),
        }
        let _ = pool.tick(now);
    }
    drop(held);
    pool.check();
}
