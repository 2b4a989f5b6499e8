//! Nothing that a peer writes into registered memory makes the allocator misbehave (P2), on a real device: a peer
//! writes by RDMA WRITE over every byte of a pool that is in no buffer, while eight threads allocate, write a
//! pattern of their own, and check it; and over all of another pool, at any time. No buffer is wrong, none overlap,
//! keys are right, the books balance, and not a page is lost.
#![cfg(all(feature = "loopback", any(feature = "rdma-sys", feature = "rdma-mummy-sys")))]
#![allow(clippy::print_stdout)] // How much was written is the point of it.

#[path = "common/verbs.rs"]
mod common;
#[path = "common/trust.rs"]
mod trust;

use common::device;
use pinpool::{Access, Buf, Device, Pages, Pool, loopback::Pair};
use trust::{Numbers, scribble};

const MIB: usize = 1 << 20;

fn pool(device: &Device, capacity: usize) -> Pool {
    Pool::builder()
        .device(device.clone())
        .access(Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ)
        .pages(Pages::Base)
        .capacity(capacity)
        .arena_size(MIB)
        .build()
        .expect("build")
}

/// A peer with a key of every arena, and what it writes.
struct Peer {
    pair: Pair,
    words: Buf,
    keys: Vec<(std::ops::Range<usize>, pinpool::RKey)>,
    rng: Numbers,
    _own: Pool,
}

impl Peer {
    fn new(device: &Device, of: &Pool) -> Self {
        let own = pool(device, 2 * MIB);
        let keys = of.arenas().into_iter().map(|a| {
            let start = a.addr.as_ptr() as usize;
            (start..start + a.len, a.keys.rkey.expect("a remote right"))
        });
        let mut peer = Self {
            pair: Pair::connect(device).expect("connect"),
            words: own.alloc(MIB).expect("alloc"),
            keys: keys.collect(),
            rng: Numbers::new(9),
            _own: own,
        };
        scribble(&mut peer.words, of, &mut peer.rng);
        peer
    }

    /// RDMA WRITEs over `len` bytes inside one arena.
    fn write(&mut self, addr: usize, len: usize) {
        let (_, rkey) = self.keys.iter().find(|(r, _)| r.contains(&addr)).expect("an arena");
        let mut sge = self.words.sge();
        // From another place of the words each time; not across their end.
        let from = self.rng.below(MIB - len + 1) / 8 * 8;
        (sge.addr, sge.length) = (sge.addr + from as u64, len as u32);
        // SAFETY: the words are this peer's own. What is written over is either in no buffer, or in buffers whose
        // contents nobody looks at; the call returns when the device is done.
        unsafe { self.pair.write(sge, addr as u64, *rkey) }.expect("write");
    }
}

#[test]
fn a_peer_that_writes_over_every_free_byte_spoils_nothing() {
    let device = device();
    let pool = pool(&device, 4 * MIB);
    let mut peer = Peer::new(&device, &pool);
    let written = trust::in_rounds(&pool, 5, 40, |addr, len| peer.write(addr, len));
    println!("{written} free bytes written over by RDMA in 5 rounds");
    assert!(written > 5 * MIB, "{written}");
}

#[test]
fn a_peer_that_writes_over_all_of_it_at_any_time_spoils_contents_alone() {
    let device = device();
    let pool = pool(&device, 2 * MIB);
    let mut peer = Peer::new(&device, &pool);
    let times = trust::at_any_time(&pool, 250, |addr, len| peer.write(addr, len));
    println!("all of the pool written over {times} times by RDMA");
}
