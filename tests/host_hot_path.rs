//! P1, as the kernel and the allocator see it: a cached alloc or free makes no system call, allocates
//! nothing and never registers. One process, for it counts every allocation.
#![cfg(feature = "fault")]
#![allow(clippy::unwrap_used, clippy::disallowed_methods)]

mod common;

use std::{
    alloc::{GlobalAlloc, Layout, System},
    cell::Cell,
    hint::black_box,
    thread,
};

use common::soft;
use pinpool::{Batch, Device, device::FaultyRegistrar};

struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

// SAFETY: passes every call on to `System`, which keeps the contract; counting allocates nothing, for
// the thread-local is const and has no destructor.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.with(|n| n.set(n.get() + 1));
        // SAFETY: the caller's contract, passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        ALLOCATIONS.with(|n| n.set(n.get() + 1));
        // SAFETY: the caller's contract, passed on.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static GLOBAL: Counting = Counting;

/// Kills this thread (and so the process) on any system call but `exit`.
fn forbid_system_calls() {
    // The program, in the classic BPF of linux/filter.h: load the call's number; exit is allowed, all
    // else kills.
    let op = |code, jt, jf, k| libc::sock_filter { code, jt, jf, k };
    let mut program = [
        op(0x20, 0, 0, 0),
        op(0x15, 0, 1, libc::SYS_exit as u32),
        op(0x06, 0, 0, libc::SECCOMP_RET_ALLOW),
        op(0x06, 0, 0, libc::SECCOMP_RET_KILL_PROCESS),
    ];
    let filter = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    // SAFETY: the two calls read their arguments; `filter` and `program` live across them.
    unsafe {
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        assert_eq!(libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &filter), 0);
    }
}

#[test]
fn p1_a_million_cached_pairs_without_a_system_call_or_an_allocation() {
    let registrar = FaultyRegistrar::new(&Device::soft());
    let pool = soft(64 << 20).device(Device::custom(registrar.clone())).build().unwrap();
    let before = registrar.register_calls();
    let p = pool.clone();
    // The thread's outcome comes back through its exit code path only when it was not killed; what it
    // counted comes back through memory.
    let counted = std::sync::Arc::new(std::sync::atomic::AtomicU64::new(u64::MAX));
    let out = counted.clone();
    thread::spawn(move || {
        let local = p.local();
        let mut batch = Batch::with_capacity(32);
        let mut held = Vec::with_capacity(64);
        let mut round = |n: usize| {
            for i in 0..n {
                for len in [256, 4096, 65_536, 1 << 20] {
                    let buf = p.alloc(len).unwrap();
                    black_box((buf.as_ptr(), buf.keys(), buf.sge(), buf.remote()));
                    drop(buf);
                    drop(local.alloc(len).unwrap());
                    // As if nobody ever waited, and through a token.
                    let buf = p.alloc_wait(len, std::time::Duration::MAX).unwrap();
                    drop(p.from_token(black_box(buf.into_token())).unwrap());
                }
                if i % 64 == 0 {
                    // Within what two magazines hold: to and fro, still nothing but this thread's own.
                    held.extend((0..32).map(|_| p.alloc(4096).unwrap()));
                    held.clear();
                    p.alloc_many(&mut batch, 4096, 32).unwrap();
                    p.free_many(&mut batch);
                }
            }
        };
        // The first round loads the magazines. A pair of the longest size leaves a block in each.
        round(128);
        let allocations = ALLOCATIONS.with(Cell::get);
        forbid_system_calls();
        round(125_000);
        let after = ALLOCATIONS.with(Cell::get);
        out.store(after - allocations, std::sync::atomic::Ordering::SeqCst);
        // Ending a thread takes system calls, so it cannot; it waits here for the process to end.
        loop {
            std::hint::spin_loop();
        }
    });
    let started = std::time::Instant::now();
    while counted.load(std::sync::atomic::Ordering::SeqCst) == u64::MAX {
        assert!(started.elapsed().as_secs() < 300, "the thread did not get through");
        thread::sleep(std::time::Duration::from_millis(10));
    }
    assert_eq!(counted.load(std::sync::atomic::Ordering::SeqCst), 0, "allocations on the hot path");
    assert_eq!(registrar.register_calls(), before);
}

#[test]
fn the_filter_does_kill() {
    // Without this, the test above could pass because its filter forbids nothing.
    // SAFETY: the child does nothing but install the filter and make one system call.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        forbid_system_calls();
        // SAFETY: getppid takes nothing; the filter ends the process here.
        unsafe { libc::getppid() };
        // SAFETY: reached only if the filter let the call through.
        unsafe { libc::_exit(0) };
    }
    let mut status = 0;
    // SAFETY: `pid` is the child, and `status` is valid to write to.
    assert_eq!(unsafe { libc::waitpid(pid, &mut status, 0) }, pid);
    assert!(libc::WIFSIGNALED(status) && libc::WTERMSIG(status) == libc::SIGSYS);
}
