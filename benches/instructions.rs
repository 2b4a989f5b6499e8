//! Instruction gates of the hot path: counts hold on noisy machines where times do not.
//!
//! Each front runs PAIRS cached alloc+free pairs under callgrind: the alloc, the handle, its drop, and in
//! between what a user does at least, the first byte's store and a look at both keys. That look (six
//! instructions), the store and the loop (two) are counted too, so that a pair with the keys in registers
//! is nine less than its gate. A front above its gate fails the run; gates go down, never up.
#![allow(missing_docs, unused_qualifications, clippy::unwrap_used)]

use std::hint::black_box;

use gungraun::{
    Callgrind, EventKind, LibraryBenchmarkConfig, library_benchmark, library_benchmark_group, main,
};
use pinpool::{
    Access, Batch, Buf, Builder, Class, Device, Pages, Pool, Reserve, Share,
    reach::{OneDevice, Rails, Remote},
};

const PAIRS: u64 = 10_000;
/// Allowed for entering and leaving the measured function, and the few slow paths in a round.
const SLACK: u64 = 2_000;

/// The gates, in instructions a pair.
const PLAIN: u64 = 32;
/// The length is not known when compiling, so its class is computed.
const ANY_LENGTH: u64 = 45;
/// Without a look at keys, for on several devices that is a look-up.
const RAILS: u64 = 27;
/// With one such look-up, of the second device.
const RAILS_KEYS: u64 = 65;
const LOCAL: u64 = 32;
/// From an access class, by `Pool::alloc_in`: two more, to see that it is one of this pool.
const CLASS: u64 = 34;
/// From a share's reserve: three more, since where the buffer goes back to is not known when compiling, and
/// the drop cannot use the slot that the alloc has found.
const SHARE: u64 = 35;
/// Every block passes through the depot.
const CROSS: u64 = 67;
/// One object of a batch of 32, looked at through its scatter-gather element (nine instructions).
const MANY: u64 = 17;
/// A plain pair with a trip into a token and back in between, of which the bench itself takes three (the token
/// and the length pass through memory).
const TOKEN: u64 = PLAIN + 42;
/// A bare address and back, any length; wrong ones are told.
const RAW: u64 = 77;
/// The same through the C interface, where nothing is inlined.
const C: u64 = 97;

fn builder() -> Builder {
    Pool::builder()
        .device(Device::soft())
        .access(Access::LOCAL_WRITE | Access::REMOTE_READ)
        .capacity(64 << 20)
        .pages(Pages::Base)
}

fn pool() -> Pool {
    let pool = builder().build().unwrap();
    // Load this thread's magazine.
    drop(pool.alloc(4096).unwrap());
    pool
}

/// A pool that can grow, and has: the arena that came serves beside the first.
fn growing() -> Pool {
    let pool =
        builder().capacity(4 << 20).max_capacity(64 << 20).low_watermark(1 << 20).build().unwrap();
    let held = pool.alloc(7 << 19).unwrap();
    while pool.stats().growths == 0 {
        std::thread::yield_now();
    }
    drop(held);
    drop(pool.alloc(4096).unwrap());
    pool
}

/// A pool on three devices, one of which came while it served.
fn rails() -> (Pool<Rails>, Device) {
    let second = Device::soft();
    let pool = builder().devices([Device::soft(), second.clone()]).build().unwrap();
    pool.add_device(&Device::soft()).wait().unwrap();
    drop(pool.alloc(4096).unwrap());
    (pool, second)
}

#[inline(always)]
fn touch<R: OneDevice>(buf: &mut Buf<R>) {
    if let Some(first) = buf.first_mut() {
        *first = 1;
    }
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

#[library_benchmark(config = gate(TOKEN), setup = pool)]
fn token(pool: Pool) -> Pool {
    for _ in 0..PAIRS {
        let Ok(mut buf) = pool.alloc(4096) else { return pool };
        touch(&mut buf);
        let token = black_box(buf.into_token());
        let Ok(buf) = pool.from_token(token) else { return pool };
        black_box(buf.len());
        drop(buf);
    }
    pool
}

#[library_benchmark(config = gate(PLAIN), setup = growing)]
fn plain_growing(pool: Pool) -> Pool {
    for _ in 0..PAIRS {
        let Ok(mut buf) = pool.alloc(4096) else { return pool };
        touch(&mut buf);
    }
    pool
}

#[library_benchmark(config = gate(RAILS), setup = rails)]
fn plain_rails((pool, second): (Pool<Rails>, Device)) -> (Pool<Rails>, Device) {
    for _ in 0..PAIRS {
        let Ok(mut buf) = pool.alloc(4096) else { break };
        if let Some(first) = buf.first_mut() {
            *first = 1;
        }
        black_box(buf.as_ptr());
    }
    (pool, second)
}

#[library_benchmark(config = gate(RAILS_KEYS), setup = rails)]
fn rails_keys((pool, second): (Pool<Rails>, Device)) -> (Pool<Rails>, Device) {
    for _ in 0..PAIRS {
        let Ok(mut buf) = pool.alloc(4096) else { break };
        if let Some(first) = buf.first_mut() {
            *first = 1;
        }
        let Ok(keys) = buf.keys_on(&second) else { break };
        black_box((keys.lkey, keys.rkey));
    }
    (pool, second)
}

#[library_benchmark(config = gate(ANY_LENGTH), setup = pool)]
fn plain_any_length(pool: Pool) -> Pool {
    for _ in 0..PAIRS {
        let Ok(mut buf) = pool.alloc(black_box(4096)) else { return pool };
        touch(&mut buf);
    }
    pool
}

#[library_benchmark(config = gate(LOCAL), setup = pool)]
fn local(pool: Pool) -> Pool {
    let local = pool.local();
    for _ in 0..PAIRS {
        let Ok(mut buf) = local.alloc(4096) else { break };
        touch(&mut buf);
    }
    drop(local);
    pool
}

fn family() -> Pool {
    Pool::builder()
        .device(Device::soft())
        .capacity(64 << 20)
        .class("shared", Access::LOCAL_WRITE | Access::REMOTE_READ, 64 << 20)
        .share("recv", Reserve::buffers(1024, 4096))
        .pages(Pages::Base)
        .build()
        .unwrap()
}

fn class() -> (Pool, Class<Remote>) {
    let pool = family();
    let class = pool.class("shared").unwrap();
    drop(class.alloc(4096).unwrap());
    (pool, class)
}

#[library_benchmark(config = gate(CLASS), setup = class)]
fn alloc_in((pool, class): (Pool, Class<Remote>)) -> (Pool, Class<Remote>) {
    for _ in 0..PAIRS {
        let Ok(mut buf) = pool.alloc_in(&class, 4096) else { break };
        touch(&mut buf);
    }
    (pool, class)
}

fn share() -> Share {
    let share = family().share("recv").unwrap();
    drop(share.alloc(4096).unwrap());
    share
}

#[library_benchmark(config = gate(SHARE), setup = share)]
fn share_alloc(share: Share) -> Share {
    for _ in 0..PAIRS {
        let Ok(mut buf) = share.alloc(4096) else { break };
        touch(&mut buf);
    }
    share
}

/// What crossing threads costs, amortised: frees of many more buffers than magazines hold, then allocs of
/// as many, so that every block passes through the depot, in whole magazines.
const CROSSING: u64 = 1_000;

fn crossing() -> (Pool, Vec<Buf>) {
    let pool = pool();
    let p = pool.clone();
    let make = move || (0..CROSSING).map(|_| p.alloc(4096).unwrap()).collect();
    let mut bufs: Vec<Buf> = std::thread::spawn(make).join().unwrap();
    // One round to have the magazines made.
    round(&pool, &mut bufs);
    (pool, bufs)
}

#[inline(always)]
fn round(pool: &Pool, bufs: &mut Vec<Buf>) {
    bufs.clear();
    while bufs.len() < bufs.capacity().min(CROSSING as usize) {
        let Ok(mut buf) = pool.alloc(4096) else { break };
        touch(&mut buf);
        bufs.push(buf);
    }
}

#[library_benchmark(config = gate(CROSS), setup = crossing)]
fn cross_thread((pool, mut bufs): (Pool, Vec<Buf>)) -> (Pool, Vec<Buf>) {
    for _ in 0..PAIRS / CROSSING {
        round(&pool, &mut bufs);
    }
    (pool, bufs)
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
        look(&batch);
        pool.free_many(&mut batch);
    }
    (pool, batch)
}

#[inline(always)]
fn look(batch: &Batch) {
    for sge in batch.sges() {
        black_box(sge.addr);
        black_box(sge.lkey);
    }
}

// The raw pair: an address and back, with every wrong pointer detected.
#[library_benchmark(config = gate(RAW), setup = pool)]
fn raw(pool: Pool) -> Pool {
    for _ in 0..PAIRS {
        let Ok(mut buf) = pool.alloc(black_box(4096)) else { return pool };
        touch(&mut buf);
        let ptr = buf.into_raw();
        // SAFETY: nobody else knows the pointer.
        let freed = unsafe { pool.free_raw(black_box(ptr.as_ptr())) };
        black_box(freed.is_ok());
    }
    pool
}

// The same through the C interface, called as C does: nothing is inlined.
use pinpool::capi::*;
use std::ptr;

type Alloc = unsafe extern "C" fn(*const pinpool_t, usize, *mut pinpool_buf_t) -> i32;
type Free = unsafe extern "C" fn(*const pinpool_t, *mut std::ffi::c_void) -> i32;

fn opened() -> *mut pinpool_t {
    let mut pool = ptr::null_mut();
    // SAFETY: the structs are plain data, and every pointer leads to one of them.
    unsafe {
        let mut o = std::mem::zeroed();
        pinpool_options_init(&mut o);
        (o.capacity, o.device, o.pages) = (64 << 20, c"soft".as_ptr(), PINPOOL_PAGES_BASE);
        (o.access, o.numa) = (5, PINPOOL_NUMA_ANY);
        assert_eq!(pinpool_open(&o, &mut pool), 0);
        let mut buf = std::mem::zeroed();
        assert_eq!(pinpool_alloc(pool, 4096, &mut buf), 0);
        assert_eq!(pinpool_free(pool, buf.addr), 0);
    }
    pool
}

#[library_benchmark(config = gate(C), setup = opened)]
fn c_pair(pool: *mut pinpool_t) -> *mut pinpool_t {
    let (alloc, free) = black_box((pinpool_alloc as Alloc, pinpool_free as Free));
    for _ in 0..PAIRS {
        let mut buf = std::mem::MaybeUninit::<pinpool_buf_t>::uninit();
        // SAFETY: the pool is open; the buffer is written before it is read, and freed once.
        unsafe {
            if alloc(pool, 4096, buf.as_mut_ptr()) != 0 {
                return pool;
            }
            let buf = buf.assume_init();
            *buf.addr.cast::<u8>() = 1;
            black_box(buf.lkey);
            black_box(buf.rkey);
            if free(pool, buf.addr) != 0 {
                return pool;
            }
        }
    }
    pool
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
    benchmarks = [
        plain,
        plain_growing,
        plain_rails,
        rails_keys,
        plain_any_length,
        local,
        alloc_in,
        share_alloc,
        cross_thread,
        many,
        token,
        raw,
        c_pair
    ]
);
main!(library_benchmark_groups = hot_path);
