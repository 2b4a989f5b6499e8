//! Forked children. Proves: a child can use malloc, stdio and exit; using the pool in it is an error, not
//! a crash; it never tears anything down, and the parent goes on. One process, one test at a time.
#![cfg(feature = "fault")]
#![allow(clippy::unwrap_used, clippy::disallowed_methods)]

mod common;
#[path = "common/held.rs"]
mod held;

use std::{cell::Cell, io::Write, sync::Mutex};

use common::soft;
use held::Held;
use pinpool::{
    Access, AllocError, Class, CloseError, Device, DeviceChangeError, LeaseQp, Outcome, Reserve,
    TokenError,
    device::FaultyRegistrar,
    lease::{LeaseError, leaked},
};

/// Forks one at a time: a fork copies whatever locks other threads hold.
static ONE: Mutex<()> = Mutex::new(());

/// Runs `child` in a forked child and returns its wait status.
fn in_child(child: impl FnOnce() -> bool) -> i32 {
    // SAFETY: the child runs `child` and leaves by `_exit`, never returning into the test runner.
    let pid = unsafe { libc::fork() };
    assert!(pid >= 0);
    if pid == 0 {
        let ok = std::panic::catch_unwind(std::panic::AssertUnwindSafe(child)).unwrap_or(false);
        // SAFETY: ends the child.
        unsafe { libc::_exit(if ok { 0 } else { 1 }) };
    }
    let mut status = 0;
    // SAFETY: `pid` is the child, and `status` is valid to write to.
    assert_eq!(unsafe { libc::waitpid(pid, &mut status, 0) }, pid);
    status
}

#[test]
fn a_child_uses_the_heap_and_is_refused_the_pool() {
    let _one = ONE.lock().unwrap_or_else(|e| e.into_inner());
    let registrar = FaultyRegistrar::new(&Device::soft());
    let pool = soft(1 << 20).device(Device::custom(registrar.clone())).build().unwrap();
    let kept = pool.alloc(4096).unwrap();
    let dropped = pool.alloc(4096).unwrap();
    let before = pool.stats();
    let status = in_child(|| {
        for i in 0..10_000 {
            drop(std::hint::black_box(vec![0u8; 1 + i % 3000]));
        }
        for _ in 0..100 {
            let mut f = std::fs::File::open("/proc/self/stat").unwrap();
            std::io::copy(&mut f, &mut std::io::sink()).unwrap();
        }
        std::io::stdout().flush().unwrap();
        let refused = matches!(pool.alloc(4096), Err(AllocError::ForeignProcess { .. }));
        let readable = pool.stats().capacity == before.capacity;
        drop(dropped);
        drop(pool.clone());
        drop(pool);
        refused && readable && registrar.deregister_calls() == 0
    });
    assert_eq!(status, 0, "the child's exit status");
    assert!(std::ptr::eq(kept.as_ptr(), kept.as_ptr()));
    assert_eq!(registrar.deregister_calls(), 0);
    drop(kept);
}

#[test]
fn a_child_is_refused_classes_and_shares_too() {
    let _one = ONE.lock().unwrap_or_else(|e| e.into_inner());
    let registrar = FaultyRegistrar::new(&Device::soft());
    let pool = soft(1 << 20)
        .device(Device::custom(registrar.clone()))
        .class("other", Access::LOCAL_WRITE, 1 << 20)
        .share("own", Reserve::buffers(2, 4096))
        .build()
        .unwrap();
    let class: Class = pool.class("other").unwrap();
    let share = pool.share("own").unwrap();
    // Two of the reserve, one beyond it, one of the class: freed by the child, each kept by the books.
    let held: Vec<_> = (0..3).map(|_| share.alloc(4096)).chain([class.alloc(4096)]).collect();
    let status = in_child(|| {
        let foreign = |e| matches!(e, Err(AllocError::ForeignProcess { .. }));
        let refused = foreign(pool.alloc_in(&class, 64)) && foreign(share.alloc(4096));
        let long = foreign(share.alloc(64 << 10));
        // SAFETY: the child's own copies, of which it has one each; the parent's are others.
        unsafe {
            held.iter().for_each(|buf| drop(std::ptr::read(buf)));
            drop((std::ptr::read(&class), std::ptr::read(&share), std::ptr::read(&pool)));
        }
        refused && long && registrar.deregister_calls() == 0
    });
    assert_eq!(status, 0, "the child's exit status");
    assert_eq!(pool.stats().live_buffers, 4);
    drop((held, class));
    drop(share.alloc(4096).unwrap());
    pool.check();
    drop((share, pool));
    assert_eq!((registrar.deregister_calls(), registrar.live()), (2, 0));
}

#[test]
fn the_parent_goes_on_and_tears_down_itself() {
    let _one = ONE.lock().unwrap_or_else(|e| e.into_inner());
    let registrar = FaultyRegistrar::new(&Device::soft());
    let pool = soft(1 << 20).device(Device::custom(registrar.clone())).build().unwrap();
    let buf = pool.alloc(100).unwrap();
    assert_eq!(in_child(|| true), 0);
    assert_eq!(pool.stats().live_buffers, 1);
    let more: Vec<_> = (0..10).map(|_| pool.alloc(10_000).unwrap()).collect();
    drop((more, buf));
    pool.check();
    pool.close().unwrap();
    assert_eq!((registrar.deregister_calls(), registrar.live()), (1, 0));
}

#[test]
fn a_child_that_drops_the_last_handle_tears_nothing_down() {
    let _one = ONE.lock().unwrap_or_else(|e| e.into_inner());
    let registrar = FaultyRegistrar::new(&Device::soft());
    let pool = soft(1 << 20).device(Device::custom(registrar.clone())).build().unwrap();
    drop(pool.alloc(64).unwrap());
    let close = |pool: &pinpool::Pool| {
        // SAFETY: the child's own copy of the handle, of which it has one; the parent's is another.
        let pool = unsafe { std::ptr::read(pool) };
        let refused = matches!(pool.close(), Err(CloseError::ForeignProcess { .. }));
        refused && registrar.deregister_calls() == 0
    };
    assert_eq!(in_child(|| close(&pool)), 0);
    // A child that no fork handler saw.
    // SAFETY: the child does nothing but close its copy and end.
    let pid = unsafe { libc::syscall(libc::SYS_fork) };
    if pid == 0 {
        let ok = close(&pool);
        // SAFETY: ends the child.
        unsafe { libc::_exit(if ok { 0 } else { 1 }) };
    }
    let mut status = 0;
    // SAFETY: `pid` is the child, and `status` is valid to write to.
    assert_eq!(i64::from(unsafe { libc::waitpid(pid as i32, &mut status, 0) }), pid);
    assert_eq!(status, 0, "the child of a bare system call");
    pool.close().unwrap();
    assert_eq!(registrar.deregister_calls(), 1);
}

#[test]
fn a_child_neither_waits_nor_completes() {
    let _one = ONE.lock().unwrap_or_else(|e| e.into_inner());
    let pool = soft(4096).build().unwrap();
    let posted = pool.post(pool.alloc(4096).unwrap(), |_, _| Ok::<_, ()>(())).unwrap();
    let token = posted.token();
    let poll = |f: &mut pinpool::AllocFuture<'_>| {
        let mut cx = std::task::Context::from_waker(std::task::Waker::noop());
        Future::poll(std::pin::Pin::new(f), &mut cx)
    };
    let mut future = pool.alloc_async(4096);
    assert!(poll(&mut future).is_pending());
    // A child's drops are its own: its copies of the future and of the guard must do no harm there.
    let mut in_line = Some(future);
    let mut guard = Some(posted);
    let status = in_child(|| {
        use std::task::Poll::Ready;
        let foreign = |e: &_| matches!(e, AllocError::ForeignProcess { .. });
        let long = std::time::Duration::from_secs(1000);
        let waited = pool.alloc_wait(4096, long).is_err_and(|e| foreign(&e));
        let fresh = matches!(poll(&mut pool.alloc_async(64)), Ready(Err(e)) if foreign(&e));
        let mut future = in_line.take().unwrap();
        let begun = matches!(poll(&mut future), Ready(Err(e)) if foreign(&e));
        drop(future);
        let done = Outcome::default();
        let completed =
            matches!(pool.complete(token, done), Err(TokenError::ForeignProcess { .. }));
        let taken = guard.take().unwrap().try_take().is_err();
        waited && fresh && begun && completed && taken && pool.in_flight().is_empty()
    });
    assert_eq!(status, 0, "the child's exit status");
    pool.complete(token, Outcome::default()).unwrap();
    drop(guard.unwrap().try_take().unwrap());
    assert!(matches!(poll(&mut in_line.unwrap()), std::task::Poll::Ready(Ok(_))));
    assert_eq!(pool.stats().live, 0);
}

#[test]
fn a_fork_in_the_middle_of_growth_leaves_both_fine() {
    let _one = ONE.lock().unwrap_or_else(|e| e.into_inner());
    const MIB: usize = 1 << 20;
    for fails in [false, true] {
        let calls = Held::new(FaultyRegistrar::new(&Device::soft()));
        let pool = soft(MIB)
            .device(calls.device())
            .arena_size(MIB)
            .max_capacity(2 * MIB)
            .low_watermark(256 << 10)
            .build()
            .unwrap();
        calls.hold();
        let mut held: Vec<_> = (0..13).map(|_| pool.alloc(64 << 10).unwrap()).collect();
        calls.await_call();
        // The grower holds its lock, the second arena is mapped, and the device is about to have it.
        let status = in_child(|| {
            let refused = matches!(pool.alloc(4096), Err(AllocError::ForeignProcess { .. }));
            let s = pool.stats();
            let looks = s.capacity == MIB && s.max_capacity == 2 * MIB && pool.arenas().len() == 1;
            drop(std::mem::take(&mut held));
            // SAFETY: the child's own copy of the handle, of which it has one; the parent's is another.
            let own = unsafe { std::ptr::read(&pool) };
            // Does not wait for a grower that this process does not have.
            let kept = matches!(own.close(), Err(CloseError::ForeignProcess { .. }));
            drop(std::hint::black_box(vec![1u8; 10 << 20]));
            refused && looks && kept && calls.calls.deregister_calls() == 0
        });
        assert_eq!(status, 0, "the child's exit status");
        if fails {
            calls.panic_once();
        }
        calls.release();
        // The parent's growth goes on where it was.
        while pool.stats().growths + pool.stats().growth_failures == 0 {
            std::thread::yield_now();
        }
        let s = pool.stats();
        assert_eq!((s.growths, s.growth_failures), if fails { (0, 1) } else { (1, 0) });
        assert_eq!(s.live_buffers, 13);
        held.push(pool.alloc(64 << 10).unwrap());
        pool.check();
        // A child after it: still nothing to tear down, and the parent is none the worse.
        assert_eq!(in_child(|| pool.alloc(64).is_err()), 0);
        drop(held);
        pool.close().unwrap();
        assert_eq!(calls.calls.live(), 0);
    }
}

#[test]
fn a_child_is_refused_changes_of_devices() {
    let _one = ONE.lock().unwrap_or_else(|e| e.into_inner());
    let (a, b) = (Device::soft(), Device::soft());
    let pool = pinpool::Pool::builder().devices([a.clone()]).capacity(1 << 20).build().unwrap();
    let child = || {
        let refused = pool.add_device(&b).wait().unwrap_err();
        matches!(refused, DeviceChangeError::ForeignProcess { .. })
            && pool.alloc(64).is_err()
            && pool.keys_of_on(std::ptr::null::<u8>(), &a).is_ok()
            && pool.arenas_on(&b).is_err()
    };
    assert_eq!(in_child(child), 0);
    pool.add_device(&b).wait().unwrap();
    assert_eq!(b.as_soft().unwrap().regions(), 1);
}

#[test]
fn a_child_ends_none_of_its_parents_leases() {
    let _one = ONE.lock().unwrap_or_else(|e| e.into_inner());
    let device = Device::soft();
    let access = Access::LOCAL_WRITE | Access::MW_BIND;
    let pool = soft(1 << 20).device(device.clone()).access(access).build().unwrap();
    let qp = LeaseQp::soft(&device).unwrap();
    let lease = || pool.alloc(64).unwrap().lease(&qp, Access::REMOTE_WRITE).unwrap();
    let (a, b, c, spare) = (lease(), lease(), lease(), pool.alloc(64).unwrap());
    let remotes = [a.remote(), b.remote(), c.remote()];
    let reachable = |soft: &pinpool::device::SoftDevice| {
        let reaches = |to: &pinpool::RemoteBuf| {
            // SAFETY: nobody has a reference to the bytes.
            unsafe { soft.write(to.rkey, to.addr, &[1]) }.is_ok()
        };
        remotes.iter().filter(|to| reaches(to)).count()
    };
    let status = in_child(|| {
        use std::ptr::read;
        // SAFETY: the child's own copies, of which it has one each; the parent's are others.
        let (a, b, spare, qp) = unsafe { (read(&a), read(&b), read(&spare), read(&qp)) };
        let refused = spare.lease(&qp, Access::REMOTE_WRITE).unwrap_err();
        let foreign = matches!(refused.error, LeaseError::ForeignProcess);
        let revoked = a.revoke().unwrap_err();
        let foreign = foreign && matches!(*revoked.invalidate, LeaseError::ForeignProcess);
        drop(b);
        drop(qp);
        // The child's copy of the device's tables is untouched.
        foreign && reachable(device.as_soft().unwrap()) == 3
    });
    assert_eq!(status, 0, "the child's exit status");
    assert_eq!(reachable(device.as_soft().unwrap()), 3);
    assert_eq!(leaked(), 0);
    drop(qp);
    assert_eq!(reachable(device.as_soft().unwrap()), 0);
    drop((a, b, c, spare));
    pool.close().unwrap();
}

thread_local! {
    /// Made before the thread meets a pool, so destroyed after what it has of pools.
    static LAST: LeavesIfArmed = const { LeavesIfArmed(Cell::new(false)) };
}

struct LeavesIfArmed(Cell<bool>);

impl Drop for LeavesIfArmed {
    fn drop(&mut self) {
        if self.0.get() {
            // SAFETY: ends the child, before what else runs at an exit.
            unsafe { libc::_exit(0) };
        }
    }
}

#[test]
fn a_child_whose_thread_ends_waits_for_no_lock_that_another_thread_held() {
    let _one = ONE.lock().unwrap_or_else(|e| e.into_inner());
    let pool = soft(1 << 20).build().unwrap();
    LAST.with(|last| last.0.set(false));
    // This thread has magazines, to be given back when it ends, in the child as well.
    drop(pool.alloc(64).unwrap());
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|s| {
        // Calls caches back most of the time, under the lock that giving back takes.
        s.spawn(|| {
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                pool.trim();
            }
        });
        for i in 0..50 {
            // SAFETY: the child sets an alarm and ends.
            let pid = unsafe { libc::fork() };
            if pid == 0 {
                LAST.with(|last| last.0.set(true));
                // SAFETY: no pointers; `exit` runs this thread's destructors as its end would, and the
                // signal ends a child that waits.
                unsafe {
                    libc::alarm(20);
                    libc::exit(1)
                };
            }
            let mut status = 0;
            // SAFETY: `pid` is the child, and `status` is valid to write to.
            assert_eq!(unsafe { libc::waitpid(pid, &mut status, 0) }, pid);
            if status != 0 {
                stop.store(true, std::sync::atomic::Ordering::Relaxed);
            }
            assert_eq!(status, 0, "child {i} ended");
        }
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
    });
    pool.check();
}

#[test]
fn a_child_takes_none_of_its_parents_flights() {
    let _one = ONE.lock().unwrap_or_else(|e| e.into_inner());
    let pool = soft(4 << 20).build().unwrap();
    // Blocks at a page's start and inside one, lengths that a record holds and not.
    let lens = [4096, 100, 64, 40_000, 1 << 20];
    let tokens: Vec<_> = lens.iter().map(|&len| pool.alloc(len).unwrap().into_token()).collect();
    let posted = pool.post(pool.alloc(4096).unwrap(), |_, _| Ok::<_, ()>(())).unwrap();
    let status = in_child(|| {
        let foreign = |e| matches!(e, TokenError::ForeignProcess { .. });
        tokens.iter().chain([&posted.token(), &0]).all(|&token| {
            pool.from_token(token).is_err_and(foreign)
                && pool.from_any_token(token).is_err_and(foreign)
                && pool.complete(token, Outcome::default()).is_err_and(foreign)
        }) && pool.in_flight().is_empty()
    });
    assert_eq!(status, 0, "the child's exit status");
    assert_eq!(pool.in_flight().len(), lens.len() + 1);
    for (token, len) in tokens.into_iter().zip(lens) {
        assert_eq!(pool.from_token(token).unwrap().len(), len);
    }
    pool.complete(posted.token(), Outcome::default()).unwrap();
    drop(posted);
    assert_eq!(pool.stats().live_buffers, 0);
    pool.close().unwrap();
}

#[test]
fn b25_nothing_is_unmapped_under_a_token() {
    let _one = ONE.lock().unwrap_or_else(|e| e.into_inner());
    // In a process of its own, since what it loses stays lost. The pool is that process's, so it is no child
    // to it.
    let status = in_child(|| {
        let device = Device::soft();
        let pool = soft(1 << 20).device(device.clone()).build().unwrap();
        let other = pool.alloc(64).unwrap();
        let mut buf = pool.alloc(5000).unwrap();
        buf.fill(7);
        let addr = buf.as_ptr();
        let _lost = buf.into_token();
        let handle = pool.clone();
        drop(pool);
        let live = matches!(handle.close(), Err(CloseError::Live { buffers: 2, .. }));
        drop(other);
        let registered = device.as_soft().unwrap().regions() == 1;
        // SAFETY: the arena stays mapped while a token of it is out, and nobody else uses the block.
        live && registered && unsafe { addr.add(4999).read() } == 7
    });
    assert_eq!(status, 0, "the child's exit status");
}
