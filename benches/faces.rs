//! Instruction gates of the allocator faces: what `Vec` in a pool and the global allocator's dispatch add.
//!
//! As in `instructions.rs`, each front runs PAIRS cached pairs under callgrind, the first byte's store and the
//! loop counted too. No front looks at keys, so the pair to hold them against is `bare`.
#![allow(missing_docs, unused_qualifications, clippy::unwrap_used)]

use std::{
    alloc::{GlobalAlloc, Layout},
    cell::UnsafeCell,
    hint::black_box,
};

use allocator_api2::{alloc::Allocator, vec::Vec};
use gungraun::{
    Callgrind, EventKind, LibraryBenchmarkConfig, library_benchmark, library_benchmark_group, main,
};
use pinpool::{Access, Device, Pages, PinnedAlloc, Pool};

const PAIRS: u64 = 10_000;
/// Allowed for entering and leaving the measured function, and the few slow paths in a round.
const SLACK: u64 = 2_000;

/// A pair of `Pool::alloc`, without a look at keys.
const BARE: u64 = 27;
const BARE_ANY_LENGTH: u64 = 40;
/// At most 1.3 times that.
const VEC: u64 = BARE * 13 / 10;
/// `Vec` looks at its capacity three times, and the class is computed at both ends.
const VEC_ANY_LENGTH: u64 = 61;
/// A pair of calls of an allocator that does nothing, and one of the pool's, without a collection.
const NOTHING: u64 = 6;
const RAW: u64 = 36;
/// What telling sizes and addresses apart may add to each of alloc and free.
const DISPATCH: u64 = 15;

fn pool() -> Pool {
    let pool = Pool::builder()
        .device(Device::soft())
        .access(Access::LOCAL_WRITE | Access::REMOTE_READ)
        .capacity(64 << 20)
        .pages(Pages::Base)
        .build()
        .unwrap();
    // Load this thread's magazine.
    drop(pool.alloc(4096).unwrap());
    pool
}

#[library_benchmark(config = gate(BARE), setup = pool)]
fn bare(pool: Pool) -> Pool {
    for _ in 0..PAIRS {
        let Ok(mut buf) = pool.alloc(4096) else { return pool };
        if let Some(first) = buf.first_mut() {
            *first = 1;
        }
        black_box(buf.as_ptr());
    }
    pool
}

#[library_benchmark(config = gate(BARE_ANY_LENGTH), setup = pool)]
fn bare_any_length(pool: Pool) -> Pool {
    for _ in 0..PAIRS {
        let Ok(mut buf) = pool.alloc(black_box(4096)) else { return pool };
        if let Some(first) = buf.first_mut() {
            *first = 1;
        }
        black_box(buf.as_ptr());
    }
    pool
}

#[library_benchmark(config = gate(VEC), setup = pool)]
fn vec(pool: Pool) -> Pool {
    for _ in 0..PAIRS {
        let mut v = Vec::<u8, &Pool>::with_capacity_in(4096, &pool);
        v.push(1);
        black_box(v.as_ptr());
    }
    pool
}

#[library_benchmark(config = gate(VEC_ANY_LENGTH), setup = pool)]
fn vec_any_length(pool: Pool) -> Pool {
    for _ in 0..PAIRS {
        let mut v = Vec::<u8, &Pool>::with_capacity_in(black_box(4096), &pool);
        v.push(1);
        black_box(v.as_ptr());
    }
    pool
}

/// Has one block, for ever.
struct Nothing(UnsafeCell<[u64; 8]>);

// SAFETY: the one thread that measures is the only one that uses the block.
unsafe impl Sync for Nothing {}

// SAFETY: one block at a time is out, and all that are asked for fit it.
unsafe impl GlobalAlloc for Nothing {
    #[inline(always)]
    unsafe fn alloc(&self, _: Layout) -> *mut u8 {
        self.0.get().cast()
    }

    #[inline(always)]
    unsafe fn dealloc(&self, at: *mut u8, _: Layout) {
        black_box(at);
    }
}

static NOTHING_ELSE: Nothing = Nothing(UnsafeCell::new([0; 8]));
static ALLOC: PinnedAlloc<&Nothing> = PinnedAlloc::over(&NOTHING_ELSE);

// SAFETY: as for `Nothing`.
unsafe impl GlobalAlloc for &Nothing {
    #[inline(always)]
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: passed on.
        unsafe { (**self).alloc(layout) }
    }

    #[inline(always)]
    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: passed on.
        unsafe { (**self).dealloc(at, layout) }
    }
}

fn attached() -> Pool {
    let pool = pool();
    ALLOC.attach(&pool).unwrap();
    pool
}

/// A pair of raw calls, as `Box` makes them.
#[inline(always)]
fn pair(alloc: &impl GlobalAlloc, size: usize) {
    // SAFETY: not of size 0; freed with the layout that it was allocated with.
    unsafe {
        let layout = Layout::from_size_align_unchecked(size, 8);
        let at = alloc.alloc(layout);
        at.write(1);
        alloc.dealloc(black_box(at), layout);
    }
}

#[library_benchmark(config = gate(NOTHING), setup = attached)]
fn nothing(pool: Pool) -> Pool {
    for _ in 0..PAIRS {
        pair(&NOTHING_ELSE, 64);
    }
    pool
}

#[library_benchmark(config = gate(NOTHING + 2 * DISPATCH), setup = attached)]
fn global_passed_on(pool: Pool) -> Pool {
    for _ in 0..PAIRS {
        pair(&ALLOC, 64);
    }
    pool
}

#[library_benchmark(config = gate(RAW), setup = attached)]
fn raw(pool: Pool) -> Pool {
    let layout = Layout::new::<[u64; 512]>();
    for _ in 0..PAIRS {
        let Ok(block) = pool.allocate(layout) else { break };
        let at = block.cast::<u8>();
        // SAFETY: the block was just allocated, with this layout.
        unsafe {
            at.write(1);
            pool.deallocate(black_box(at), layout);
        }
    }
    pool
}

#[library_benchmark(config = gate(RAW + 2 * DISPATCH), setup = attached)]
fn global_served(pool: Pool) -> Pool {
    for _ in 0..PAIRS {
        pair(&ALLOC, 4096);
    }
    pool
}

library_benchmark_group!(
    name = faces,
    benchmarks =
        [bare, bare_any_length, vec, vec_any_length, nothing, global_passed_on, raw, global_served]
);
fn gate(per_pair: u64) -> LibraryBenchmarkConfig {
    let mut config = LibraryBenchmarkConfig::default();
    let mut callgrind = Callgrind::default();
    callgrind.hard_limits([(EventKind::Ir, per_pair * PAIRS + SLACK)]);
    config.tool(callgrind);
    config
}

main!(library_benchmark_groups = faces);
