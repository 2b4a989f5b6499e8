//! Instruction gates of the hot path: counts hold on noisy machines where times do not.
//!
//! Each front runs PAIRS cached alloc+free pairs under callgrind, with address and both keys taken, as a
//! user would. A gate is the bound per pair; a front above its gate fails the run. The count includes the
//! loop itself (about three instructions a pair) and the first byte's store.
#![allow(missing_docs, unused_qualifications, clippy::unwrap_used)]

use std::hint::black_box;

use gungraun::{
    Callgrind, EventKind, LibraryBenchmarkConfig, library_benchmark, library_benchmark_group, main,
};
use pinpool::{Batch, Buf, Device, LocalPool, Pages, Pool};

const PAIRS: u64 = 10_000;
/// Allowed for entering and leaving the measured function, and the few slow paths in a round.
const SLACK: u64 = 2_000;

/// The gates, in instructions a pair.
const PLAIN: u64 = 30;
const LOCAL: u64 = 24;
const CROSS: u64 = 36;
const MANY: u64 = 11;

fn pool() -> Pool {
    let pool = Pool::builder()
        .device(Device::soft())
        .access(pinpool::Access::LOCAL_WRITE | pinpool::Access::REMOTE_READ)
        .capacity(64 << 20)
        .pages(Pages::Base)
        .build()
        .unwrap();
    // Load this thread's magazine.
    drop(pool.alloc(4096).unwrap());
    pool
}

#[inline(always)]
fn touch(buf: &mut Buf) {
    buf[0] = 1;
    black_box(buf.as_ptr());
    black_box(buf.lkey());
    black_box(buf.keys().rkey);
}

#[library_benchmark(config = gate(PLAIN), setup = pool)]
fn plain(pool: Pool) -> Pool {
    for _ in 0..PAIRS {
        let Ok(mut buf) = pool.alloc(4096) else { return pool };
        touch(&mut buf);
    }
    pool
}

#[library_benchmark(config = gate(PLAIN + 8), setup = pool)]
fn plain_any_length(pool: Pool) -> Pool {
    for _ in 0..PAIRS {
        let Ok(mut buf) = pool.alloc(black_box(4096)) else { return pool };
        touch(&mut buf);
    }
    pool
}

fn local_pool() -> LocalPool {
    pool().local()
}

#[library_benchmark(config = gate(LOCAL), setup = local_pool)]
fn local(pool: LocalPool) -> LocalPool {
    for _ in 0..PAIRS {
        let Ok(mut buf) = pool.alloc(4096) else { return pool };
        touch(&mut buf);
        pool.free(buf);
    }
    pool
}

/// What one thread allocates another frees: here the frees of buffers that a thread, now ended, made,
/// exchanging whole magazines with the depot, and this thread's allocs of as many.
fn foreign() -> (Pool, Vec<Buf>, Vec<Buf>) {
    let pool = pool();
    let p = pool.clone();
    let bufs =
        std::thread::spawn(move || (0..PAIRS).map(|_| p.alloc(4096).unwrap()).collect::<Vec<_>>())
            .join()
            .unwrap();
    let room = Vec::with_capacity(PAIRS as usize);
    (pool, bufs, room)
}

#[library_benchmark(config = gate(CROSS), setup = foreign)]
fn cross_thread(
    (pool, mut from, mut to): (Pool, Vec<Buf>, Vec<Buf>),
) -> (Pool, Vec<Buf>, Vec<Buf>) {
    for _ in 0..PAIRS {
        drop(from.pop());
    }
    for _ in 0..PAIRS {
        let Ok(mut buf) = pool.alloc(4096) else { break };
        touch(&mut buf);
        if to.len() < to.capacity() {
            to.push(buf);
        }
    }
    (pool, from, to)
}

fn with_batch() -> (Pool, Batch) {
    let pool = pool();
    let held: Vec<_> = (0..64).map(|_| pool.alloc(4096).unwrap()).collect();
    drop(held);
    (pool, Batch::with_capacity(32))
}

#[library_benchmark(config = gate(MANY), setup = with_batch)]
fn many((pool, mut batch): (Pool, Batch)) -> (Pool, Batch) {
    for _ in 0..PAIRS / 32 {
        if pool.alloc_many(&mut batch, 4096, 32).is_err() {
            break;
        }
        for sge in batch.sges() {
            black_box(sge.addr);
            black_box(sge.lkey);
        }
        pool.free_many(&mut batch);
    }
    (pool, batch)
}

fn gate(per_pair: u64) -> LibraryBenchmarkConfig {
    let mut config = LibraryBenchmarkConfig::default();
    let mut callgrind = Callgrind::default();
    callgrind.hard_limits([(EventKind::Ir, per_pair * PAIRS + SLACK)]);
    config.tool(callgrind);
    config
}

library_benchmark_group!(
    name = hot_path,
    benchmarks = [plain, plain_any_length, local, cross_thread, many]
);
main!(library_benchmark_groups = hot_path);
