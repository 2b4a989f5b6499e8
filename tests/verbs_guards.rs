//! Guards against a real device, which writes behind every processor's back:
//! - an RDMA write to a freed buffer is told with address, offset, age and owner, in quarantine or out of it, and
//!   however many keys and handles are gone by then;
//! - one beyond a buffer's end is told when the buffer is given back;
//! - what a peer writes to free memory, all of it, spoils nothing but that memory, and all of it is told;
//! - a buffer that a device still reads from does not go to somebody else while it is in quarantine.
#![cfg(all(feature = "loopback", any(feature = "rdma-sys", feature = "rdma-mummy-sys")))]

#[path = "common/verbs.rs"]
mod common;

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    thread,
    time::Duration,
};

use common::{check, device, fill};
use pinpool::{
    Access, Damage, Device, Event, Guards, Pages, Pool, RemoteBuf, Sge, Track, loopback::Pair,
};

const MIB: usize = 1 << 20;

type Told = Arc<Mutex<Vec<(bool, Damage)>>>;

/// A pool that peers may write to; what it tells, and whether it was a late write.
fn pool(device: &Device, guards: Guards, track: Track) -> (Pool, Told) {
    let told = Told::default();
    let sink = told.clone();
    let pool = Pool::builder()
        .device(device.clone())
        .access(Access::LOCAL_WRITE | Access::REMOTE_WRITE)
        .pages(Pages::Base)
        .capacity(4 * MIB)
        .guards(guards)
        .track(track)
        .on_event(move |event| match event {
            Event::WrittenAfterFree(damage) => {
                sink.lock().expect("nobody panics with it").push((true, (*damage).clone()))
            }
            Event::WrittenBeyondEnd(damage) => {
                sink.lock().expect("nobody panics with it").push((false, (*damage).clone()));
            }
            _ => {}
        })
        .build()
        .expect("build");
    (pool, told)
}

fn take(told: &Told) -> Vec<(bool, Damage)> {
    std::mem::take(&mut *told.lock().expect("nobody panics with it"))
}

/// Has the peer write.
fn write(pair: &mut Pair, from: Sge, to: RemoteBuf, offset: usize) {
    // SAFETY: the source is borrowed by the caller until this returns, and so until the write is over; nobody has
    // a reference to what is written, which is what the tests are about.
    unsafe { pair.write(from, to.addr + offset as u64, to.rkey) }.expect("write");
}

#[test]
fn a_late_rdma_write_is_told_with_address_offset_age_and_owner() {
    let device = device();
    let mut pair = Pair::connect(&device).expect("connect");
    for quarantine in [0, MIB] {
        let guards = Guards::new().poison(true).quarantine(quarantine);
        let (pool, told) = pool(&device, guards, Track::all());
        let mut from = pool.alloc(64).expect("alloc");
        fill(&mut from, 3);
        let owned = {
            let pool = pool.clone();
            let owner = move || pool.alloc(10_000).expect("alloc");
            thread::Builder::new().name("rx-7".into()).spawn(owner).expect("thread").join()
        };
        let line = line!() - 3;
        let buf = owned.expect("it ran");
        let (to, addr) = (buf.remote().expect("a remote right"), buf.as_ptr() as usize);
        // In time, it is the owner's own affair.
        write(&mut pair, from.sge(), to, 100);
        check_bytes(&buf[100..164], 3);
        drop(buf);
        assert!(take(&told).is_empty() && pool.check_free() == 0);
        // And now it is too late.
        write(&mut pair, from.sge(), to, 4321);
        if quarantine == 0 {
            // Found by whoever has it next.
            let mut others = Vec::new();
            while told.lock().expect("nobody panics with it").is_empty() {
                others.push(pool.alloc(10_000).expect("the block comes back"));
            }
            let next = others.pop().expect("one was damaged");
            assert_eq!(next.as_ptr() as usize, addr);
            assert!(next.iter().all(|&b| b == Guards::POISON), "whole again");
        } else {
            assert_eq!(pool.check_free(), 1);
        }
        let all = take(&told);
        assert_eq!(all.len(), 1, "{all:?}");
        let (late, damage) = &all[0];
        assert!(damage.to_string().contains("last owner"), "{damage}");
        assert!(late);
        assert_eq!((damage.addr, damage.len), (addr, 10_000));
        assert_eq!((damage.offset, damage.extent), (4321, 64));
        check_bytes(&damage.found, 3);
        assert!(damage.age.is_some_and(|age| age > Duration::ZERO));
        let owner = damage.owner.as_ref().expect("it had one");
        assert_eq!(owner.thread.as_deref(), Some("rx-7"));
        let site = owner.site.as_ref().expect("tracked").location();
        assert_eq!((site.file(), site.line()), (file!(), line));
        assert!(damage.freed_by.is_some());
        assert_eq!(pool.stats().guards.written_after_free, 1);
        assert!(pool.stats().balanced());
    }
}

fn check_bytes(bytes: &[u8], seed: u64) {
    assert_eq!(bytes, &common::pattern(seed, bytes.len())[..]);
}

#[test]
fn a_late_write_is_told_when_only_the_device_remembers_the_buffer() {
    let device = device();
    let mut pair = Pair::connect(&device).expect("connect");
    let (pool, told) = pool(&device, Guards::new().poison(true), Track::every(0));
    let mut from = pool.alloc(1).expect("alloc");
    from[0] = 0;
    let to = pool.alloc(MIB).expect("alloc").remote().expect("a remote right");
    write(&mut pair, from.sge(), to, MIB - 1);
    drop(from);
    // As the pool goes.
    pool.close().expect("nothing is out");
    let all = take(&told);
    assert_eq!((all.len(), all[0].1.offset, all[0].1.extent), (1, MIB - 1, 1));
}

#[test]
fn a_write_beyond_the_end_is_told_when_the_buffer_is_given_back() {
    let device = device();
    let mut pair = Pair::connect(&device).expect("connect");
    for len in [100, 4096, 65_536] {
        let (pool, told) = pool(&device, Guards::new().canary(true), Track::every(0));
        let mut from = pool.alloc(32).expect("alloc");
        fill(&mut from, 5);
        let buf = pool.alloc(len).expect("alloc");
        // A peer that believes the buffer is a little longer.
        write(&mut pair, from.sge(), buf.remote().expect("a remote right"), len - 16);
        check_bytes(&buf[len - 16..], 5);
        assert!(take(&told).is_empty());
        drop(buf);
        let all = take(&told);
        assert_eq!(all.len(), 1, "{len}: {all:?}");
        let (late, damage) = &all[0];
        assert!(damage.to_string().contains("last owner"), "{damage}");
        assert!(!late);
        assert_eq!((damage.len, damage.offset, damage.extent), (len, len, 16));
        assert_eq!(damage.found, common::pattern(5, 32)[16..]);
    }
}

#[test]
fn a_peer_that_writes_over_everything_free_spoils_that_and_is_told() {
    let device = device();
    let mut pair = Pair::connect(&device).expect("connect");
    let (pool, told) = pool(&device, Guards::new().poison(true), Track::every(0));
    // What peers write from is another pool's.
    let source = Pool::builder().device(device.clone()).capacity(MIB).pages(Pages::Base);
    let source = source.build().expect("build");
    let mut from = source.alloc(MIB).expect("alloc");
    from.fill(0x11);
    let rkey = pool.arenas()[0].keys.rkey.expect("a remote right");
    let mut held: Vec<_> = (0..100)
        .map(|i| {
            let mut buf = pool.alloc(5000).expect("alloc");
            fill(&mut buf, i);
            buf
        })
        .collect();
    // Every other is given back, and everything free is written over: between those that are held, and behind.
    let mut i = 0;
    held.retain(|_| {
        i += 1;
        i % 2 == 0
    });
    let mut live: Vec<_> =
        held.iter().map(|b| (b.as_ptr() as usize, b.as_ptr() as usize + b.capacity())).collect();
    live.sort_unstable();
    let arena = &pool.arenas()[0];
    let (mut at, end) = (arena.addr.as_ptr() as usize, arena.addr.as_ptr() as usize + arena.len);
    live.push((end, end));
    for (start, next) in live {
        while at < start {
            let n = (start - at).min(MIB);
            let sge = from.sge_range(0, n as u32).expect("inside");
            // SAFETY: free memory, which nobody has a reference to.
            unsafe { pair.write(sge, at as u64, rkey) }.expect("write");
            at += n;
        }
        at = next;
    }
    for (i, buf) in held.iter().enumerate() {
        check(buf, 2 * i as u64 + 1);
    }
    assert_eq!(pool.check_free(), 50, "each that was given back");
    drop(held);
    let whole: Vec<_> = std::iter::from_fn(|| pool.alloc(5000).ok()).collect();
    assert!(whole.iter().all(|b| b.iter().all(|&b| b == Guards::POISON)));
    assert!(take(&told).iter().all(|(late, _)| *late));
    assert!(pool.stats().balanced());
}

#[test]
fn late_writers_hit_the_quarantine_and_nobodys_data() {
    let device = device();
    let mut pair = Pair::connect(&device).expect("connect");
    let (pool, told) =
        pool(&device, Guards::new().poison(true).quarantine(2 * MIB), Track::every(0));
    let mut from = pool.alloc(4096).expect("alloc");
    from.fill(0x22);
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let workers: Vec<_> = (0..2)
            .map(|n: u64| {
                let (pool, stop) = (&pool, &stop);
                scope.spawn(move || {
                    let mut rounds = 0;
                    while !stop.load(Relaxed) || rounds < 20 {
                        let mut buf = pool.alloc(4096).expect("the quarantine gives way");
                        fill(&mut buf, n);
                        thread::yield_now();
                        check(&buf, n);
                        rounds += 1;
                        if rounds > 5_000 {
                            break;
                        }
                    }
                })
            })
            .collect();
        for _ in 0..20 {
            let buf = pool.alloc(4096).expect("alloc");
            let to = buf.remote().expect("a remote right");
            drop(buf);
            write(&mut pair, from.sge(), to, 0);
            assert!(pool.check_free() <= 1, "nobody else had it meanwhile");
        }
        stop.store(true, Relaxed);
        workers.into_iter().for_each(|w| w.join().expect("no data was lost"));
    });
    assert_eq!(take(&told).len(), 20);
    assert!(pool.stats().balanced());
}
