//! What the device refuses, with which completion status, and that no byte is changed then:
//! - WRITE to a class that peers may only read, READ of one that they may not reach at all;
//! - one byte past an arena, or before it, even where the pool's next arena begins there;
//! - a key whose pool is gone;
//! - the same through the local key.
#![cfg(all(feature = "loopback", any(feature = "rdma-sys", feature = "rdma-mummy-sys")))]

#[path = "common/verbs.rs"]
mod common;

use common::{check, device, fill, guessed_rkey};
use pinpool::{
    Access, Buf, Device, Pages, Pool, RKey, Sge,
    loopback::{Completion, LoopbackError, Pair},
};

const MIB: usize = 1 << 20;
const ALL: Access = Access::LOCAL_WRITE.union(Access::REMOTE);
const READ_ONLY: Access = Access::LOCAL_WRITE.union(Access::REMOTE_READ);

fn pool(device: &Device, access: Access, capacity: usize, arena: usize) -> Pool {
    Pool::builder()
        .device(device.clone())
        .access(access)
        .pages(Pages::Base)
        .capacity(capacity)
        .arena_size(arena)
        .build()
        .expect("build")
}

/// The status that a transfer was refused with. Connects the pair again.
#[track_caller]
fn refusal(pair: &mut Pair, result: Result<Completion, LoopbackError>) -> u32 {
    let e = result.expect_err("to be refused");
    let status = e.status().unwrap_or_else(|| panic!("not a completion: {e}"));
    pair.reset().expect("reset");
    status.get()
}

const REMOTE_ACCESS_ERROR: u32 = 10;
const LOCAL_PROTECTION_ERROR: u32 = 4;
const LOCAL_QP_OPERATION_ERROR: u32 = 2;
/// What rxe of Linux 6.12 makes of a local error: the queue pair goes into error, and its queue is flushed
/// with the request that was at fault in it. Each pair here is fresh, so no other request can be meant.
const FLUSHED: u32 = 5;
const REMOTE_INVALID_REQUEST: u32 = 9;
const REMOTE_OPERATION_ERROR: u32 = 11;

/// Filled buffers of a pool of its own, that everything may be done to: the local side.
fn local(device: &Device) -> (Pool, Buf) {
    let pool = pool(device, ALL, MIB, MIB);
    let mut buf = pool.alloc(4096).expect("alloc");
    fill(&mut buf, 1);
    (pool, buf)
}

#[test]
fn a_write_to_a_read_only_class() {
    let device = device();
    let mut pair = Pair::connect(&device).expect("connect");
    let (_local, from) = local(&device);
    let target = pool(&device, READ_ONLY, MIB, MIB);
    let mut buf = target.alloc(4096).expect("alloc");
    fill(&mut buf, 2);
    let to = buf.remote().expect("peers may read");
    for len in [1, 8, 256, 4096] {
        let sge = from.sge_range(0, len).expect("inside");
        // SAFETY: both buffers are this test's, and nothing else uses them until it returns.
        let done = unsafe { pair.write(sge, to.addr, to.rkey) };
        assert_eq!(refusal(&mut pair, done), REMOTE_ACCESS_ERROR);
    }
    let word = from.sge_range(0, 8).expect("inside");
    // SAFETY: as above.
    let done = unsafe { pair.fetch_add(word, to.addr, to.rkey, 1) };
    assert_eq!(refusal(&mut pair, done), REMOTE_ACCESS_ERROR);
    check(&buf, 2);
    check(&from, 1);
    // What it may, it can.
    // SAFETY: as above.
    unsafe { pair.read(from.sge(), to.addr, to.rkey) }.expect("read");
    check(&from, 2);
}

#[test]
fn a_read_or_write_of_a_local_only_class() {
    let device = device();
    let mut pair = Pair::connect(&device).expect("connect");
    let (_local, mine) = local(&device);
    let target = pool(&device, Access::LOCAL_WRITE, MIB, MIB);
    let mut buf = target.alloc(4096).expect("alloc");
    fill(&mut buf, 3);
    assert_eq!((buf.remote(), buf.keys().rkey), (None, None), "no rkey is given out");
    // A peer that guesses: on some devices the rkey is the lkey's number.
    let (addr, rkey) = (buf.as_ptr() as u64, guessed_rkey(buf.keys()));
    // SAFETY: both buffers are this test's, and nothing else uses them until it returns.
    let done = unsafe { pair.read(mine.sge(), addr, rkey) };
    assert_eq!(refusal(&mut pair, done), REMOTE_ACCESS_ERROR);
    // SAFETY: as above.
    let done = unsafe { pair.write(mine.sge(), addr, rkey) };
    assert_eq!(refusal(&mut pair, done), REMOTE_ACCESS_ERROR);
    check(&buf, 3);
    check(&mine, 1);
}

#[test]
fn one_byte_outside_the_arena() {
    let device = device();
    let mut pair = Pair::connect(&device).expect("connect");
    let (_local, mine) = local(&device);
    // Three arenas in one address range, each a region of its own, with pages without access in between.
    let target = pool(&device, ALL, 3 * MIB, MIB);
    let mut bufs: Vec<Buf> = (0..3).map(|_| target.alloc(MIB).expect("a whole arena")).collect();
    bufs.sort_by_key(|b| b.as_ptr());
    for (i, buf) in bufs.iter_mut().enumerate() {
        fill(buf, 10 + i as u64);
    }
    let middle = bufs[1].remote().expect("a remote right");
    assert_eq!(bufs[2].as_ptr() as u64, middle.addr + 2 * middle.len, "nothing is beside it");
    let end = middle.addr + middle.len;
    for len in [1u32, 2, 9, 256, 1024] {
        let sge = mine.sge_range(0, len).expect("inside");
        for addr in [end + 1 - u64::from(len), middle.addr - 1] {
            // SAFETY: all buffers are this test's, and nothing else uses them until it returns.
            let done = unsafe { pair.write(sge, addr, middle.rkey) };
            assert_eq!(refusal(&mut pair, done), REMOTE_ACCESS_ERROR, "WRITE {len} at {addr:#x}");
            // SAFETY: as above.
            let done = unsafe { pair.read(sge, addr, middle.rkey) };
            assert_eq!(refusal(&mut pair, done), REMOTE_ACCESS_ERROR, "READ {len} at {addr:#x}");
        }
    }
    check(&mine, 1);
    for (i, buf) in bufs.iter().enumerate() {
        check(buf, 10 + i as u64);
    }
    // Up to the last byte it works.
    let sge = mine.sge_range(0, 9).expect("inside");
    // SAFETY: as above.
    unsafe { pair.write(sge, end - 9, middle.rkey) }.expect("the last nine bytes");
    assert_eq!(bufs[1][MIB - 9..], mine[..9]);
}

#[test]
fn one_byte_outside_the_arena_zero_based() {
    let device = device();
    let mut pair = Pair::connect(&device).expect("connect");
    let (_local, mine) = local(&device);
    let target = pool(&device, ALL | Access::ZERO_BASED, 2 * MIB, MIB);
    let mut bufs: Vec<Buf> = (0..2).map(|_| target.alloc(MIB).expect("a whole arena")).collect();
    for (i, buf) in bufs.iter_mut().enumerate() {
        fill(buf, 10 + i as u64);
    }
    for buf in &bufs {
        let to = buf.remote().expect("a remote right");
        assert_eq!(to.addr, 0);
        for addr in [to.len - 8, u64::MAX] {
            let sge = mine.sge_range(0, 9).expect("inside");
            // SAFETY: all buffers are this test's, and nothing else uses them until it returns.
            let done = unsafe { pair.write(sge, addr, to.rkey) };
            assert_eq!(refusal(&mut pair, done), REMOTE_ACCESS_ERROR, "at {addr:#x}");
        }
    }
    for (i, buf) in bufs.iter().enumerate() {
        check(buf, 10 + i as u64);
    }
}

#[test]
fn a_key_after_its_pool_is_gone() {
    let device = device();
    let mut pair = Pair::connect(&device).expect("connect");
    let (_local, mine) = local(&device);
    let target = pool(&device, ALL, MIB, MIB);
    let buf = target.alloc(MIB).expect("a whole arena");
    let (stale, stale_local) = (buf.remote().expect("a remote right"), buf.sge());
    // The last handle is gone but a buffer lives: its keys work.
    drop(target);
    // SAFETY: both buffers are this test's, and nothing else uses them until it returns.
    unsafe { pair.write(mine.sge(), stale.addr, stale.rkey) }
        .expect("a live buffer keeps its arena");
    check(&buf[..4096], 1);
    drop(buf);
    let refused = |pair: &mut Pair| {
        // SAFETY: `mine` is this test's. The key names nothing any more, which is what is tested; if
        // it did, it would name a pool of this test that nothing uses meanwhile.
        let done = unsafe { pair.write(mine.sge(), stale.addr, stale.rkey) };
        assert_eq!(refusal(pair, done), REMOTE_ACCESS_ERROR);
        // SAFETY: as above.
        let done = unsafe { pair.read(mine.sge(), stale.addr, stale.rkey) };
        assert_eq!(refusal(pair, done), REMOTE_ACCESS_ERROR);
        let local = Sge { length: 8, ..stale_local };
        // SAFETY: as above.
        let done =
            unsafe { pair.write(local, mine.remote().expect("remote").addr, rkey_of(&mine)) };
        // The manual's local protection error; rxe, which finds no such key at all, calls it a local
        // queue pair operation error.
        let status = refusal(pair, done);
        let refusals = [LOCAL_PROTECTION_ERROR, LOCAL_QP_OPERATION_ERROR, FLUSHED];
        assert!(refusals.contains(&status), "{status}");
    };
    refused(&mut pair);
    // Its address may well be given to the next pool; its key must not reach that.
    let next = pool(&device, ALL, MIB, MIB);
    let mut buf = next.alloc(MIB).expect("a whole arena");
    fill(&mut buf, 5);
    assert_ne!(buf.remote().expect("a remote right").rkey, stale.rkey);
    refused(&mut pair);
    check(&buf, 5);
    check(&mine, 1);
}

fn rkey_of(buf: &Buf) -> RKey {
    buf.keys().rkey.expect("a remote right")
}

#[test]
fn a_local_range_or_right_that_the_key_lacks() {
    let device = device();
    let mut pair = Pair::connect(&device).expect("connect");
    let (_local, mut peer) = local(&device);
    let target = pool(&device, READ_ONLY, MIB, MIB);
    let mut buf = target.alloc(MIB).expect("a whole arena");
    fill(&mut buf, 7);
    let to = peer.remote().expect("a remote right");
    let past = Sge { addr: buf.sge().addr + MIB as u64 - 8, length: 9, lkey: buf.lkey() };
    // SAFETY: both buffers are this test's, and nothing else uses them until it returns.
    let done = unsafe { pair.write(past, to.addr, to.rkey) };
    let locally = [LOCAL_PROTECTION_ERROR, FLUSHED];
    let status = refusal(&mut pair, done);
    assert!(locally.contains(&status), "{status}");
    check(&peer, 1);
    // SAFETY: as above.
    let done = unsafe { pair.read(past, to.addr, to.rkey) };
    let status = refusal(&mut pair, done);
    assert!(locally.contains(&status), "{status}");
    check(&buf, 7);
    peer.fill(0);
    // A message longer than its receive: the receiver refuses it, and the sender is told so (an invalid
    // request by the specification, an operation error by rxe).
    let (from, into) =
        (buf.sge_range(0, 64).expect("inside"), peer.sge_range(0, 63).expect("inside"));
    // SAFETY: as above.
    let done = unsafe { pair.send_recv(from, into) };
    let status = refusal(&mut pair, done);
    assert!([REMOTE_INVALID_REQUEST, REMOTE_OPERATION_ERROR].contains(&status), "{status}");
    assert!(peer[63..].iter().all(|&b| b == 0), "nothing beyond the receive");
}
