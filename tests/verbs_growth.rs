//! Pools that grow and shrink, and pools on several devices, on verbs devices:
//! - an arena that came while the pool served is the device's like any other, by SEND, WRITE and READ;
//! - one that went is nobody's: its rkey is refused, its pages are not pinned any more;
//! - one buffer carries traffic on two devices, each under that device's keys, also when one of them came while
//!   traffic was under way on the other, and goes again;
//! - a growth that cannot bind to nodes fails like any other.
//!
//! The second device is asked for by name or found; without two, the tests of several devices fail.
#![cfg(all(
    feature = "loopback",
    feature = "fault",
    any(feature = "rdma-sys", feature = "rdma-mummy-sys")
))]

#[path = "common/verbs.rs"]
mod common;

use std::{sync::Mutex, thread, time::Duration};

use common::{check, device, fill, vm_pin};
use pinpool::{
    Access, Buf, Builder, Device, Event, Numa, Pages, Pool,
    loopback::{Pair, Status},
    reach::Rails,
};

const MIB: usize = 1 << 20;
const ALL: Access = Access::LOCAL_WRITE.union(Access::REMOTE);

/// What is pinned is the whole process's, so the tests take turns.
static ONE: Mutex<()> = Mutex::new(());

fn builder() -> Builder {
    Pool::builder().access(ALL).pages(Pages::Base).capacity(2 * MIB).arena_size(2 * MIB)
}

fn secs(n: u64) -> Duration {
    Duration::from_secs(n)
}

/// Two devices, or the test can show nothing.
fn two() -> (Device, Device) {
    let names = Device::list().expect("list");
    assert!(names.len() >= 2, "two verbs devices are needed, there are {names:?}");
    (Device::open(&names[0]).expect("open"), Device::open(&names[1]).expect("open"))
}

fn traffic(pair: &mut Pair, a: &mut Buf, b: &mut Buf, seed: u64) {
    fill(a, seed);
    b.fill(0);
    let to = b.remote().expect("a remote right");
    // SAFETY: both buffers are borrowed exclusively, and the call is over when it returns.
    unsafe { pair.write(a.sge(), to.addr, to.rkey) }.expect("write");
    check(b, seed);
    a.fill(0);
    let from = b.remote().expect("a remote right");
    // SAFETY: as above.
    unsafe { pair.read(a.sge(), from.addr, from.rkey) }.expect("read");
    check(a, seed);
    fill(a, seed + 1);
    // SAFETY: as above.
    unsafe { pair.send_recv(a.sge(), b.sge()) }.expect("send");
    check(b, seed + 1);
}

#[test]
fn what_grew_is_reached_and_what_went_is_not() {
    let _one = ONE.lock().unwrap_or_else(|e| e.into_inner());
    let device = device();
    let mut pair = Pair::connect(&device).expect("connect");
    let pinned = vm_pin();
    let pool = builder()
        .device(device.clone())
        .max_capacity(6 * MIB)
        .low_watermark(64 << 10)
        .growth_by_hand()
        .build()
        .expect("build");
    assert_eq!(vm_pin() - pinned, 2 << 20);
    for round in 0..3 {
        let now = secs(10_000 * round);
        let mut held: Vec<Buf> = Vec::new();
        while held.len() < 6 {
            held.extend(pool.alloc(990 << 10).ok());
            let _ = pool.tick(now);
        }
        assert_eq!((pool.arenas().len(), vm_pin() - pinned), (3, 6 << 20));
        // Between any two arenas.
        for i in 0..3 {
            let mut a = held.remove(0);
            let mut b = held.pop().expect("six");
            traffic(&mut pair, &mut a, &mut b, 10 * round + 2 * i);
            held.insert(2, a);
            held.insert(2, b);
        }
        let arena = pool.arenas()[2];
        let rkey = arena.keys.rkey.expect("a remote right");
        drop(held);
        (1..30).for_each(|i| _ = pool.tick(now + secs(50 * i)));
        assert_eq!((pool.arenas().len(), vm_pin() - pinned), (1, 2 << 20), "given back");
        // The peer still has the rkey; the device has no such region.
        let from = pool.alloc(4096).expect("alloc");
        // SAFETY: the range is reserved and nobody's; that the device refuses it is what is shown.
        let refused = unsafe { pair.write(from.sge(), arena.addr.as_ptr() as u64, rkey) };
        assert_eq!(refused.expect_err("gone").status(), Some(Status::REM_ACCESS_ERR));
        pair.reset().expect("reset");
        pool.check();
    }
    let s = pool.stats();
    assert_eq!((s.growths, s.shrinks, s.growth_failures), (6, 6, 0));
    pool.close().expect("close");
    assert_eq!(vm_pin(), pinned);
}

#[test]
fn the_thread_grows_it_while_the_device_is_at_work() {
    let _one = ONE.lock().unwrap_or_else(|e| e.into_inner());
    let device = device();
    let mut pair = Pair::connect(&device).expect("connect");
    let pinned = vm_pin();
    let pool = builder()
        .device(device.clone())
        .max_capacity(16 * MIB)
        .low_watermark(MIB)
        .shrink_after(Duration::from_millis(50))
        .build()
        .expect("build");
    let (mut a, mut b) = (pool.alloc(100_000).expect("a"), pool.alloc(100_000).expect("b"));
    let mut held = Vec::new();
    let mut seed = 0;
    while held.len() < 14 {
        held.extend(pool.alloc(1000 << 10).ok());
        traffic(&mut pair, &mut a, &mut b, seed);
        seed += 2;
    }
    assert!(pool.capacity() >= 14 * MIB && vm_pin() - pinned >= 14 << 20);
    // The last of them, in an arena that came, from and to one that was there.
    let mut last = held.pop().expect("14");
    last.truncate(100_000);
    traffic(&mut pair, &mut last, &mut b, seed);
    drop((held, last));
    while pool.capacity() > 4 * MIB {
        traffic(&mut pair, &mut a, &mut b, seed);
        seed += 2;
        pool.trim();
    }
    pool.check();
    drop((a, b));
    pool.close().expect("close");
    assert_eq!(vm_pin(), pinned);
}

/// From one buffer to the other through one device, by that device's keys.
fn on_one(pair: &mut Pair, device: &Device, a: &mut Buf<Rails>, b: &mut Buf<Rails>, seed: u64) {
    fill(a, seed);
    b.fill(0);
    let to = b.remote_on(device).expect("known").expect("a remote right");
    // SAFETY: both buffers are borrowed exclusively, and the call is over when it returns.
    unsafe { pair.write(a.sge_on(device).expect("known"), to.addr, to.rkey) }.expect("write");
    check(b, seed);
    fill(b, seed + 1);
    let (from, into) = (b.sge_on(device).expect("known"), a.sge_on(device).expect("known"));
    // SAFETY: as above.
    unsafe { pair.send_recv(from, into) }.expect("send");
    check(a, seed + 1);
}

#[test]
fn one_buffer_carries_traffic_on_two_devices() {
    let _one = ONE.lock().unwrap_or_else(|e| e.into_inner());
    let (first, second) = two();
    let mut pairs = [&first, &second].map(|d| (d.clone(), Pair::connect(d).expect("connect")));
    let pinned = vm_pin();
    let pool = builder()
        .devices([first.clone(), second.clone()])
        .max_capacity(4 * MIB)
        .build()
        .expect("build");
    assert_eq!(vm_pin() - pinned, 4 << 20, "charged once for each device");
    let (mut a, mut b) = (pool.alloc(300_000).expect("a"), pool.alloc(300_000).expect("b"));
    for round in 0..4 {
        for (device, pair) in &mut pairs {
            on_one(pair, device, &mut a, &mut b, 10 * round);
        }
    }
    // At the same time: both devices read one buffer and write two others.
    fill(&mut a, 99);
    let mut c = pool.alloc(300_000).expect("c");
    let source = &a;
    thread::scope(|s| {
        for ((device, pair), target) in pairs.iter_mut().zip([&mut b, &mut c]) {
            s.spawn(move || {
                for _ in 0..10 {
                    target.fill(0);
                    let to = target.remote_on(device).expect("known").expect("a remote right");
                    let from = source.sge_on(device).expect("known");
                    // SAFETY: `source` is only read by anybody, `target` is this thread's.
                    unsafe { pair.write(from, to.addr, to.rkey) }.expect("write");
                    check(target, 99);
                }
            });
        }
    });
    pool.check();
    drop((a, b, c));
    pool.close().expect("close");
    assert_eq!(vm_pin(), pinned);
}

#[test]
fn a_device_comes_and_goes_under_traffic() {
    let _one = ONE.lock().unwrap_or_else(|e| e.into_inner());
    let (first, second) = two();
    let mut pair = Pair::connect(&first).expect("connect");
    let mut other = Pair::connect(&second).expect("connect");
    let pinned = vm_pin();
    let pool = builder().capacity(6 * MIB).devices([first.clone()]).build().expect("build");
    let (mut a, mut b) = (pool.alloc(300_000).expect("a"), pool.alloc(300_000).expect("b"));
    for round in 0..3 {
        let change = pool.add_device(&second);
        while !change.is_done() {
            on_one(&mut pair, &first, &mut a, &mut b, round);
        }
        change.wait().expect("added");
        assert_eq!(vm_pin() - pinned, 12 << 20);
        on_one(&mut other, &second, &mut a, &mut b, 50 + round);
        on_one(&mut pair, &first, &mut a, &mut b, 60 + round);
        let stale = b.remote_on(&second).expect("known").expect("a remote right");
        let change = pool.remove_device(&second);
        while !change.is_done() {
            on_one(&mut pair, &first, &mut a, &mut b, 70 + round);
        }
        change.wait().expect("removed");
        assert_eq!(vm_pin() - pinned, 6 << 20, "its registrations are gone");
        assert!(a.keys_on(&second).is_err());
        // A pool of the second device's own sends from; the target's key is gone.
        let own = builder().device(second.clone()).build().expect("build");
        let from = own.alloc(4096).expect("alloc");
        // SAFETY: nobody uses `b` meanwhile; that it is refused is what is shown.
        let refused = unsafe { other.write(from.sge(), stale.addr, stale.rkey) };
        assert!(refused.is_err(), "a stale key reached the buffer");
        other.reset().expect("reset");
    }
    drop((a, b));
    pool.close().expect("close");
    assert_eq!(vm_pin(), pinned);
}

#[test]
fn a_growth_that_cannot_bind_fails_like_any_other() {
    let _one = ONE.lock().unwrap_or_else(|e| e.into_inner());
    let nodes = std::fs::read_to_string("/sys/devices/system/node/has_memory").expect("sysfs");
    assert!(nodes.trim() != "0", "one node alone is bound to without asking; there is {nodes}");
    let (told, heard) = std::sync::mpsc::channel();
    let told = Mutex::new(told);
    let pool = builder()
        .device(device())
        .numa(Numa::Interleave)
        .max_capacity(4 * MIB)
        .growth_by_hand()
        .on_event(move |e| {
            if let Event::GrowthFailed { error, .. } = e {
                told.lock().expect("unpoisoned").send(error.to_string()).expect("sent");
            }
        })
        .build()
        .expect("build");
    let held = pool.alloc(2 * MIB).expect("all of it");
    thread::scope(|s| {
        s.spawn(|| {
            forbid(libc::SYS_mbind);
            let _ = pool.tick(secs(1));
        })
        .join()
        .expect("joined")
    });
    let text = heard.try_recv().expect("told");
    assert!(text.contains("binding to nodes"), "{text}");
    assert_eq!(pool.capacity(), 2 * MIB);
    let _ = pool.tick(secs(2));
    assert_eq!(pool.capacity(), 4 * MIB);
    drop(held);
    pool.check();
}

/// Fails a system call with EPERM on this thread from now on.
fn forbid(call: libc::c_long) {
    let op = |code, jt, jf, k| libc::sock_filter { code, jt, jf, k };
    // Classic BPF: load the call's number; that one fails, all others are let through.
    let mut program = [
        op(0x20, 0, 0, 0),
        op(0x15, 0, 1, call as u32),
        op(0x06, 0, 0, libc::SECCOMP_RET_ERRNO | libc::EPERM as u32),
        op(0x06, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let filter = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    // SAFETY: both calls read their arguments, which live across them.
    unsafe {
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        assert_eq!(libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &filter), 0);
    }
}
