//! Forked children. Proves: a child can use malloc, stdio and exit; using the pool in it is an error, not
//! a crash; it never tears anything down, and the parent goes on. One process, one test at a time.
#![cfg(feature = "fault")]
#![allow(clippy::unwrap_used, clippy::disallowed_methods)]

mod common;

use std::{io::Write, sync::Mutex};

use common::soft;
use pinpool::{AllocError, CloseError, Device, device::FaultyRegistrar};

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
        let done = pinpool::Outcome::default();
        let completed =
            matches!(pool.complete(token, done), Err(pinpool::TokenError::ForeignProcess { .. }));
        let taken = guard.take().unwrap().try_take().is_err();
        waited && fresh && begun && completed && taken && pool.in_flight().is_empty()
    });
    assert_eq!(status, 0, "the child's exit status");
    pool.complete(token, pinpool::Outcome::default()).unwrap();
    drop(guard.unwrap().try_take().unwrap());
    assert!(matches!(poll(&mut in_line.unwrap()), std::task::Poll::Ready(Ok(_))));
    assert_eq!(pool.stats().live, 0);
}
