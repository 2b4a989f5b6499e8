//! Buffers in flight on a real device: the token rides in `wr_id`, the completion brings it back, and until then
//! the buffer is nobody's (B25); posted work as a future whose completion a poller reports.
#![cfg(all(feature = "loopback", any(feature = "rdma-sys", feature = "rdma-mummy-sys")))]

#[path = "common/verbs.rs"]
mod common;

use std::time::{Duration, Instant};

use common::{check, device, fill};
use pinpool::{
    Access, AllocError, Buf, Device, Outcome, Pages, Pool, TokenError,
    loopback::{Completion, Operation, Pair, Request, Status},
};

fn pool(device: &Device, capacity: usize) -> Pool {
    Pool::builder()
        .device(device.clone())
        .access(Access::LOCAL_WRITE | Access::REMOTE_WRITE)
        .pages(Pages::Base)
        .capacity(capacity)
        .build()
        .expect("build")
}

/// Polls until a completion is there.
fn one(mut poll: impl FnMut(&mut [Completion]) -> usize) -> Completion {
    let started = Instant::now();
    let mut out = [Completion::default()];
    while poll(&mut out) == 0 {
        assert!(started.elapsed() < Duration::from_secs(60), "no completion");
        std::thread::yield_now();
    }
    assert_eq!(out[0].status, Status::SUCCESS);
    out[0]
}

#[test]
fn b25_a_write_in_flight_keeps_its_buffer_until_the_completion() {
    let device = device();
    // One buffer to write from, another pool's to write to.
    let (from, to) = (pool(&device, 4096), pool(&device, 4096));
    let mut pair = Pair::connect(&device).expect("connect");
    let target = to.alloc(4096).expect("alloc");
    let remote = target.remote().expect("a remote right");
    for round in 0..20u64 {
        let mut buf = from.alloc(4096).expect("the one buffer");
        let len = 4096 - 100 * round as usize;
        buf.truncate(len);
        fill(&mut buf, round);
        let (addr, sge) = (buf.as_ptr(), buf.sge());
        let wr_id = buf.into_token();
        let operation = Operation::Write { remote_addr: remote.addr, rkey: remote.rkey };
        // SAFETY: the bytes are the device's until the completion, for the token keeps them from everybody;
        // `target` lives on, and is looked at only after the completion.
        unsafe { pair.post(&Request { wr_id, operation, sge, signaled: true }) }.expect("post");
        let error = from.alloc(1).expect_err("it is in flight");
        assert!(matches!(error, AllocError::Exhausted(_)), "{error}");
        assert_eq!(from.in_flight().len(), 1);
        let completion = one(|out| pair.poll(out).expect("poll"));
        assert_eq!(completion.wr_id, wr_id);
        let back = from.from_token(completion.wr_id).expect("its first return");
        assert_eq!((back.as_ptr(), back.len()), (addr, len));
        check(&target[..len], round);
        assert_eq!(from.from_token(wr_id).unwrap_err(), TokenError::NotInFlight { token: wr_id });
    }
    assert_eq!(from.stats().live, 0);
}

#[test]
fn receives_and_sends_by_token_fill_and_drain_a_queue() {
    let device = device();
    let pool = pool(&device, 1 << 20);
    let mut pair = Pair::connect(&device).expect("connect");
    const N: u64 = 32;
    for round in 0..4 {
        for _ in 0..N {
            let buf = pool.alloc(2048).expect("alloc");
            let sge = buf.sge();
            // SAFETY: the token keeps the bytes from everybody until the completion.
            unsafe { pair.post_recv(buf.into_token(), sge) }.expect("post");
        }
        for i in 0..N {
            let mut buf = pool.alloc(100 + i as usize).expect("alloc");
            fill(&mut buf, round * N + i);
            let (sge, operation) = (buf.sge(), Operation::Send);
            let wr_id = buf.into_token();
            // SAFETY: as above.
            unsafe { pair.post(&Request { wr_id, operation, sge, signaled: true }) }.expect("post");
        }
        assert_eq!(pool.in_flight().len() as u64, 2 * N, "{:?}", pool.stats());
        for i in 0..N {
            let done = one(|out| pair.poll_recv(out).expect("poll"));
            let mut buf = pool.from_token(done.wr_id).expect("a receive's");
            assert_eq!((buf.len(), done.byte_len as u64), (2048, 100 + i));
            buf.truncate(done.byte_len as usize);
            check(&buf, round * N + i);
            let done = one(|out| pair.poll(out).expect("poll"));
            drop(pool.from_token(done.wr_id).expect("a send's"));
        }
        assert_eq!(pool.stats().live, 0);
    }
}

#[test]
fn posted_work_outlives_the_future_that_waited_for_it() {
    let device = device();
    let (from, to) = (pool(&device, 4096), pool(&device, 4096));
    let mut pair = Pair::connect(&device).expect("connect");
    let target = to.alloc(4096).expect("alloc");
    let remote = target.remote().expect("a remote right");
    let operation = Operation::Write { remote_addr: remote.addr, rkey: remote.rkey };
    for keep in [false, true] {
        let mut buf: Buf = from.alloc(4096).expect("alloc");
        fill(&mut buf, u64::from(keep));
        let posted = from
            .post(buf, |wr_id, sge| {
                // SAFETY: the bytes are the device's until the completion, which alone ends the flight.
                unsafe { pair.post(&Request { wr_id, operation, sge, signaled: true }) }
            })
            .expect("post");
        let kept = keep.then_some(posted);
        assert!(from.alloc(1).is_err(), "the device has it, whoever waits");
        let done = one(|out| pair.poll(out).expect("poll"));
        let outcome = Outcome { status: done.status.get(), bytes: done.byte_len };
        from.complete(done.wr_id, outcome).expect("its first completion");
        if let Some(posted) = kept {
            let (buf, outcome) = posted.try_take().expect("complete");
            assert_eq!((buf.len(), outcome.status), (4096, 0));
        }
        assert_eq!(from.stats().live, 0);
        check(&target, u64::from(keep));
    }
}
