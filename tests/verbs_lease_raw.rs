//! Leases through queue pairs that a framework made itself:
//! - completions polled by the lease calls, with others' handed on, or by the framework and passed on;
//! - a peer process that is killed in mid-write, or goes on writing: after revocation the buffer is its
//!   owner's alone;
//! - what does not fit is refused by name.
#![cfg(all(feature = "loopback", any(feature = "rdma-sys", feature = "rdma-mummy-sys")))]
#![allow(clippy::disallowed_methods, clippy::print_stdout)] // the framework's side, and its peer's words

#[path = "common/verbs.rs"]
mod common;
#[path = "common/raw_qp.rs"]
mod raw_qp;

use std::{
    env,
    io::{BufRead, BufReader, Lines, Write},
    process::{Child, ChildStdout, Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::SeqCst},
    },
    thread,
    time::{Duration, Instant},
};

use common::{check, device, fill, pattern};
use pinpool::{
    Access, Device, Guarantees, LeaseQp, Pages, Pool, RKey,
    lease::{self, Completions, LeaseError, QpOptions},
};
use raw_qp::RawQp;

const MIB: usize = 1 << 20;
const WRITE: Access = Access::REMOTE_WRITE;

fn pool(device: &Device) -> Pool {
    Pool::builder()
        .device(device.clone())
        .access(Access::LOCAL_WRITE | Access::MW_BIND)
        .pages(Pages::Base)
        .capacity(4 * MIB)
        .build()
        .expect("build")
}

/// Two connected queue pairs: the one that is leased through, and its peer.
fn connected(device: &Device) -> (RawQp, RawQp) {
    let (own, peer) = (RawQp::new(device), RawQp::new(device));
    own.connect(peer.number());
    peer.connect(own.number());
    (own, peer)
}

fn options(completions: Completions) -> QpOptions {
    let mut options = QpOptions::default();
    options.completions = completions;
    options
}

#[test]
fn completions_of_others_are_handed_on() {
    let device = device();
    let (own, peer) = connected(&device);
    let (pool, others) = (pool(&device), Arc::new(AtomicU64::new(0)));
    let seen = others.clone();
    let hand_on = Box::new(move |wc| {
        // SAFETY: `PolledFor` gives an `ibv_wc *`.
        seen.fetch_add(unsafe { RawQp::number_in(wc) }, SeqCst);
    });
    // SAFETY: `own` is dropped after `qp`.
    let qp = unsafe {
        LeaseQp::from_raw(&device, own.as_raw(), options(Completions::PolledFor(hand_on)))
    };
    let qp = qp.expect("fits");
    let back = pool.alloc(64).expect("alloc");
    // SAFETY: through the peer's end, so that `own` may write too.
    let peer_qp =
        unsafe { LeaseQp::from_raw(&device, peer.as_raw(), QpOptions::default()) }.expect("fits");
    let target = pool.alloc(64).expect("alloc").lease(&peer_qp, WRITE).expect("lease");
    let to = target.remote();
    for i in 0..20 {
        // SAFETY: `back` lives until the end.
        unsafe { own.write(1000 + i, back.sge(), to.addr, to.rkey) };
        let lease = pool.alloc(64).expect("alloc").lease(&qp, WRITE).expect("lease");
        lease.revoke().expect("revoke");
    }
    // All of them came before the invalidation that was posted after them.
    assert_eq!(others.load(SeqCst), (1000..1020).sum::<u64>());
    assert_eq!(qp.stats().invalidated, 20);
    drop(target);
    drop((qp, peer_qp));
}

#[test]
fn somebody_else_may_poll() {
    let device = device();
    let (own, peer) = connected(&device);
    let pool = pool(&device);
    // SAFETY: `own` is dropped after `qp`.
    let qp = unsafe { LeaseQp::from_raw(&device, own.as_raw(), options(Completions::Routed)) };
    let qp = qp.expect("fits");
    let mut from = pool.alloc(4096).expect("alloc");
    fill(&mut from, 5);
    let write = |to: pinpool::RemoteBuf| {
        // SAFETY: `from` lives until the completion, which is waited for.
        unsafe { peer.write(9, from.sge(), to.addr, to.rkey) };
        let (number, status, _) = peer.next();
        assert_eq!(number, 9);
        status
    };
    // On this thread alone: nothing waits.
    let lease = pool.alloc(4096).expect("alloc").lease(&qp, WRITE).expect("lease");
    // A bind reports now and then; that is passed on as well.
    let pass_on = |(wr_id, status, vendor)| {
        // SAFETY: what `own` polled just now.
        assert!(qp.is_mine(wr_id) && unsafe { qp.complete(wr_id, status, vendor) });
        assert_eq!(status, 0);
    };
    pass_on(own.next());
    assert_eq!(write(lease.remote()), 0);
    // SAFETY: the write is over.
    check(unsafe { lease.bytes() }, 5);
    let live = pool.stats().live_buffers;
    drop(lease);
    assert_eq!(
        (qp.stats().ending, pool.stats().live_buffers),
        (1, live),
        "not before it has ended"
    );
    pass_on(own.next());
    assert_eq!((qp.stats().ending, pool.stats().live_buffers), (0, live - 1));
    // SAFETY: it names no request of a lease's.
    assert!(!unsafe { qp.complete(77, 0, 0) }, "another's");

    // Another thread polls: revoke waits for it.
    let over = AtomicBool::new(false);
    thread::scope(|s| {
        s.spawn(|| {
            while !over.load(SeqCst) {
                own.poll().map_or_else(thread::yield_now, pass_on);
            }
        });
        for _ in 0..200 {
            let lease = pool.alloc(4096).expect("alloc").lease(&qp, WRITE).expect("lease");
            lease.revoke().expect("revoke");
        }
        over.store(true, SeqCst);
    });
    assert_eq!((qp.stats().invalidated, qp.stats().forced), (201, 0));

    // Nobody polls any more: what is left ends when it is closed, and what waits is told.
    let (a, b) = (pool.alloc(64).expect("alloc"), pool.alloc(64).expect("alloc"));
    let a = a.lease(&qp, WRITE).expect("lease");
    let b = b.lease(&qp, WRITE).expect("lease");
    drop(a);
    drop(qp);
    assert!(!b.is_bound());
    assert_eq!(pool.stats().live_buffers, live, "b, and those before");
    let to = b.remote();
    drop(b);
    assert_eq!(write(to), 10);
    assert_eq!(lease::leaked(), 0);
}

#[test]
fn nobody_passes_on() {
    let device = device();
    let (own, _peer) = connected(&device);
    let pool = pool(&device);
    let mut options = options(Completions::Routed);
    options.timeout = Duration::from_millis(50);
    // SAFETY: `own` is dropped after `qp`.
    let qp = unsafe { LeaseQp::from_raw(&device, own.as_raw(), options) }.expect("fits");
    let lease = pool.alloc(64).expect("alloc").lease(&qp, WRITE).expect("lease");
    lease.revoke().expect("forced after the time-out");
    assert_eq!((qp.stats().forced, lease::leaked()), (1, 0));
    let lease = pool.alloc(64).expect("alloc").lease(&qp, WRITE).expect("lease");
    let e = lease.exchange(pool.alloc(64).expect("alloc"), WRITE).expect_err("timed out");
    assert!(
        matches!(*e.error, LeaseError::TimedOut { .. }) && e.to_string().contains("50ms"),
        "{e}"
    );
    assert!(e.ended.is_some() && e.next.is_some());
}

#[test]
fn what_does_not_fit_is_refused() {
    let device = device();
    // A queue pair that was never connected cannot bind.
    let idle = RawQp::new(&device);
    let pool = pool(&device);
    let mut options = QpOptions::default();
    options.timeout = Duration::from_millis(200);
    // SAFETY: `idle` is dropped after `qp`.
    let qp = unsafe { LeaseQp::from_raw(&device, idle.as_raw(), options) }.expect("fits");
    let refused = pool.alloc(64).expect("alloc").lease(&qp, WRITE).expect_err("not connected");
    assert!(refused.buf.is_some(), "{refused}");
    assert_eq!((qp.stats().live, lease::leaked()), (0, 0));
    let other = common::device();
    let foreign = RawQp::new(&other);
    // SAFETY: `foreign` outlives the refused value.
    let e = unsafe { LeaseQp::from_raw(&device, foreign.as_raw(), QpOptions::default()) };
    assert!(matches!(e, Err(LeaseError::QueuePair { .. })));
}

// --- a peer process ----------------------------------------------------------------------------------

const ROLE: &str = "PINPOOL_LEASE_PEER";
const MARK: u8 = 0xee;

/// Not a test of its own: what the tests below start as the peer. Writes without end.
#[test]
fn peer_process() {
    if env::var_os(ROLE).is_none() {
        return;
    }
    let device = device();
    let own = RawQp::new(&device);
    let pool = pool(&device);
    let mut from = pool.alloc(MIB).expect("alloc");
    from.fill(MARK);
    println!("\nnumber {}", own.number());
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).expect("stdin");
    let told: Vec<u64> = line.split_whitespace().map(|n| n.parse().expect("a number")).collect();
    let [number, addr, rkey] = told[..] else { panic!("{line:?}") };
    own.connect(number as u32);
    let rkey = RKey::new(rkey as u32);
    for i in 0.. {
        // Four under way, so that there always is one.
        // SAFETY: `from` lives as long as this process.
        unsafe { own.write(i, from.sge(), addr, rkey) };
        if i < 4 {
            continue;
        }
        match own.next() {
            (done, 0, _) => println!("written {done}"),
            (_, status, _) => {
                println!("refused {status}");
                return;
            }
        }
    }
}

struct Peer {
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Peer {
    fn start() -> Self {
        let program = env::current_exe().expect("this program");
        let mut child = Command::new(program)
            .args(["--exact", "peer_process", "--nocapture", "--test-threads=1"])
            .env(ROLE, "1")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("start");
        let lines = BufReader::new(child.stdout.take().expect("piped")).lines();
        Self { child, lines }
    }

    /// Waits for a line that starts so; gives the number behind it.
    fn hears(&mut self, word: &str) -> u64 {
        loop {
            let line = self.lines.next().expect("the peer has ended").expect("UTF-8");
            if let Some(n) = line.strip_prefix(word) {
                return n.trim().parse().expect("a number");
            }
        }
    }

    fn tell(&mut self, text: &str) {
        let stdin = self.child.stdin.as_mut().expect("piped");
        writeln!(stdin, "{text}").expect("the peer listens");
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A peer that writes to a lease of 1 MiB without end, its lease, and what that goes through.
fn written_to() -> (Peer, lease::Lease, LeaseQp, RawQp, Pool) {
    let device = device();
    let own = RawQp::new(&device);
    let pool = pool(&device);
    let mut peer = Peer::start();
    own.connect(peer.hears("number ") as u32);
    // SAFETY: the caller drops the queue pair last.
    let qp =
        unsafe { LeaseQp::from_raw(&device, own.as_raw(), QpOptions::default()) }.expect("fits");
    let lease = pool.alloc(MIB).expect("alloc").lease(&qp, WRITE).expect("lease");
    let to = lease.remote();
    peer.tell(&format!("{} {} {}", own.number(), to.addr, to.rkey.get()));
    peer.hears("written ");
    (peer, lease, qp, own, pool)
}

/// Bytes of a packet, as the queue pairs here are connected.
const PACKET: usize = 1024;

/// Holds a buffer that was filled with this seed after its lease was revoked to what the device holds: no byte
/// changed, or at most the rest of one packet.
fn check_revoked(bytes: &[u8], seed: u64, held: Guarantees) {
    if held.contains(Guarantees::DRAINED) {
        return check(bytes, seed);
    }
    let should = pattern(seed, bytes.len());
    let differs = |i: &usize| bytes[*i] != should[*i];
    let Some(first) = (0..bytes.len()).find(differs) else { return };
    let last = (first..bytes.len()).rev().find(differs).expect("one at least");
    println!("the rest of a packet: {first}..={last}");
    assert!(last / PACKET == first / PACKET, "{first}..={last} is more than one packet");
    assert!(bytes[last] == MARK);
}

#[test]
fn a_peer_that_goes_on_writing_is_refused() {
    let (mut peer, lease, qp, own, _pool) = written_to();
    let mut buf = lease.revoke().expect("revoke");
    fill(&mut buf, 3);
    // So the device has come to a later packet than the one that may have been under way.
    assert_eq!(peer.hears("refused "), 10);
    check_revoked(&buf, 3, qp.support().held);
    fill(&mut buf, 4);
    peer.child.wait().expect("it has left");
    check(&buf, 4);
    drop((qp, own));
}

#[test]
fn a_buffer_is_safe_to_use_again_after_its_peer_was_killed_in_mid_write() {
    for round in 0..4 {
        let (mut peer, lease, qp, own, pool) = written_to();
        let addr = lease.as_ptr();
        peer.child.kill().expect("kill");
        let mut buf = if round % 2 == 0 {
            lease.revoke().expect("revoke")
        } else {
            drop(lease);
            let bufs: Vec<_> = (0..4).filter_map(|_| pool.alloc(MIB).ok()).collect();
            bufs.into_iter().find(|b| b.as_ptr() == addr).expect("the block came back")
        };
        fill(&mut buf, round);
        peer.child.wait().expect("wait");
        let watch = |check: &dyn Fn()| {
            let start = Instant::now();
            while start.elapsed() < Duration::from_millis(200) {
                check();
            }
        };
        watch(&|| check_revoked(&buf, round, qp.support().held));
        // What was under way is over.
        fill(&mut buf, 100 + round);
        watch(&|| check(&buf, 100 + round));
        assert_eq!((qp.stats().live, lease::leaked()), (0, 0));
        drop((qp, own));
    }
}
