//! Nothing that a peer writes into registered memory, and no token, key or pointer that a caller makes up, makes the
//! allocator misbehave (P2), on the software device:
//! - a peer writes over every byte that is in no buffer, while eight threads allocate, write and check; and over all
//!   of it at any time;
//! - millions of made-up tokens, pointers and addresses, near the true ones above all, while threads work: each is
//!   refused, and nothing is lost.
#![cfg(feature = "fault")]
#![allow(clippy::unwrap_used)]

#[path = "common/trust.rs"]
mod trust;

use std::{
    collections::HashSet,
    sync::{
        Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    thread,
};

use pinpool::{Access, Buf, Class, Device, Pages, Pool, RKey, TokenError};
use trust::{Numbers, scribble};

const MIB: usize = 1 << 20;

fn builder(device: &Device, capacity: usize) -> pinpool::Builder {
    Pool::builder()
        .device(device.clone())
        .access(Access::LOCAL_WRITE | Access::REMOTE_READ | Access::REMOTE_WRITE)
        .capacity(capacity)
        .arena_size(MIB)
        .pages(Pages::Base)
}

/// Writes over a range through the device, as a peer does.
fn peer<'a>(device: &'a Device, pool: &'a Pool) -> impl FnMut(usize, usize) + 'a {
    let mut rng = Numbers::new(7);
    let mut words = vec![0; MIB];
    move |addr, len| {
        scribble(&mut words[..len], pool, &mut rng);
        let rkey = pool.keys_of(addr as *const u8).and_then(|k| k.rkey).unwrap();
        // SAFETY: what is written over is in no buffer, or in buffers whose contents nobody looks at.
        unsafe { device.as_soft().unwrap().write(rkey, addr as u64, &words[..len]) }.unwrap();
    }
}

#[test]
#[cfg_attr(
    pinpool_asan,
    ignore = "the software device writes as this process, to which free memory is nobody's"
)]
fn a_peer_that_writes_over_every_free_byte_spoils_nothing() {
    let device = Device::soft();
    let pool = builder(&device, 4 * MIB).build().unwrap();
    let written = trust::in_rounds(&pool, 20, 400, peer(&device, &pool));
    assert!(written > 20 * MIB, "{written}");
}

#[test]
#[cfg_attr(
    pinpool_asan,
    ignore = "the software device writes as this process, to which free memory is nobody's"
)]
fn a_peer_that_writes_over_all_of_it_at_any_time_spoils_contents_alone() {
    let device = Device::soft();
    let pool = builder(&device, 2 * MIB).build().unwrap();
    // Fewer where a sanitizer looks on.
    let steps = if std::env::var_os("PINPOOL_ROUNDS").is_some() { 4_000 } else { 20_000 };
    trust::at_any_time(&pool, steps, peer(&device, &pool));
}

/// Tokens, raw pointers and buffers that threads have out, for others to guess next to.
#[derive(Default)]
struct Out {
    tokens: Mutex<Vec<u64>>,
    addrs: Mutex<Vec<usize>>,
}

#[test]
fn nothing_made_up_by_a_caller_is_believed() {
    const TRIES: u64 = 200_000;
    let device = Device::soft();
    let pool = builder(&device, 4 * MIB)
        .class("shared", Access::LOCAL_WRITE | Access::REMOTE_READ, MIB)
        .share("own", MIB / 2)
        .build()
        .unwrap();
    let other = builder(&device, MIB).build().unwrap();
    let (out, done) = (Out::default(), AtomicBool::new(false));
    let (refused, landed) = (AtomicU64::new(0), AtomicU64::new(0));
    thread::scope(|scope| {
        let workers: Vec<_> = (0..4u64)
            .map(|t| {
                let (pool, out, done) = (&pool, &out, &done);
                scope.spawn(move || {
                    let mut rng = Numbers::new(t + 1);
                    let share = pool.share("own").unwrap();
                    let class: Class = pool.class("shared").unwrap();
                    let mut held: Vec<Buf> = Vec::new();
                    while !done.load(Relaxed) {
                        let len = 1 + rng.below(20_000);
                        let got = match rng.below(3) {
                            0 => pool.alloc(len),
                            1 => share.alloc(len),
                            _ => class.alloc(len),
                        };
                        held.extend(got);
                        out.addrs.lock().unwrap().extend(held.last().map(|b| b.as_ptr() as usize));
                        if held.len() > 30 {
                            // Out as a token, and as a raw pointer, for a while; never a stranger's.
                            let token = held.swap_remove(rng.below(30)).into_token();
                            let raw = held.swap_remove(rng.below(29));
                            let len = raw.len();
                            let ptr = raw.into_raw().as_ptr();
                            out.tokens.lock().unwrap().push(token);
                            thread::yield_now();
                            // The one thing that cannot be told from a right token is that very number.
                            match pool.from_any_token(token) {
                                Ok(buf) => held.push(buf),
                                Err(e) => panic!("a token that nobody else was given: {e}"),
                            }
                            // SAFETY: this thread's own, given up by it.
                            let mut buf = unsafe { pool.from_raw(ptr) }.unwrap();
                            buf.set_len(len).unwrap();
                            held.truncate(rng.below(held.len()));
                            held.push(buf);
                        }
                    }
                })
            })
            .collect();
        let liars: Vec<_> = (0..4u64)
            .map(|t| {
                let (pool, other, out) = (&pool, &other, &out);
                let (refused, landed) = (&refused, &landed);
                scope.spawn(move || {
                    let mut rng = Numbers::new(t + 50);
                    let (mut tokens, mut addrs) = (Vec::new(), Vec::new());
                    for i in 0..TRIES {
                        if i % 256 == 0 {
                            tokens =
                                out.tokens.lock().unwrap().iter().rev().take(64).copied().collect();
                            addrs =
                                out.addrs.lock().unwrap().iter().rev().take(64).copied().collect();
                        }
                        let near = |list: &[u64], rng: &mut Numbers| match list.len() {
                            0 => rng.next(),
                            n => list[rng.below(n)],
                        };
                        // A token with a bit or two changed, or any number.
                        let token = match rng.below(4) {
                            0 => rng.next(),
                            1 => near(&tokens, &mut rng) ^ 1 << rng.below(63) ^ 1 << rng.below(63),
                            2 => near(&tokens, &mut rng).wrapping_add(rng.next() % 8192),
                            _ => near(&tokens, &mut rng) ^ 1 << rng.below(63),
                        };
                        // By chance it can be the token of a flight that is on, which is no lie: another pool's
                        // never is, so that is asked, and this pool for what it can't be believed to be.
                        match other.from_any_token(token) {
                            Ok(_) => landed.fetch_add(1, Relaxed),
                            Err(TokenError::ForeignProcess { .. }) => panic!("{token:#x}"),
                            Err(_) => refused.fetch_add(1, Relaxed),
                        };
                        let addr = match (rng.below(3), addrs.len()) {
                            (0, _) | (_, 0) => rng.next() as usize,
                            (1, n) => addrs[rng.below(n)].wrapping_add(1 + rng.below(63)),
                            (_, n) => addrs[rng.below(n)] ^ 1 << rng.below(64),
                        };
                        // SAFETY: no buffer that is out raw begins there: the other pool has none at all.
                        match unsafe { other.free_raw(addr as *mut u8) } {
                            Ok(()) => landed.fetch_add(1, Relaxed),
                            Err(_) => refused.fetch_add(1, Relaxed),
                        };
                        // Inside of a block nothing begins, whoever has it: never a multiple of 64.
                        let inside = (addr & !63) | (1 + rng.below(63));
                        // SAFETY: no buffer begins there.
                        match unsafe { pool.from_raw(inside as *mut u8) } {
                            Ok(_) => landed.fetch_add(1, Relaxed),
                            Err(_) => refused.fetch_add(1, Relaxed),
                        };
                        // Looking up is for any pointer, and follows none.
                        let _ = std::hint::black_box(pool.keys_of(addr as *const u8));
                    }
                })
            })
            .collect();
        liars.into_iter().for_each(|t| t.join().unwrap());
        done.store(true, Relaxed);
        workers.into_iter().for_each(|t| t.join().unwrap());
    });
    assert_eq!((landed.into_inner(), refused.into_inner()), (0, 4 * 3 * TRIES));
    pool.check();
    other.check();
    assert_eq!((pool.stats().live, other.stats().live, pool.stats().in_flight), (0, 0, 0));
}

/// Where no flight is on, no number is a token: every generation, offset and tag next to true ones is refused.
#[test]
fn no_number_is_a_token_while_none_is_out() {
    let pool = builder(&Device::soft(), 2 * MIB).share("own", MIB / 2).build().unwrap();
    let mut rng = Numbers::new(3);
    let mut tokens = HashSet::new();
    for len in [1, 64, 100, 4096, 10_000, 300_000] {
        for _ in 0..20 {
            let token = pool.alloc(len).unwrap().into_token();
            tokens.insert(token);
            drop(pool.from_token(token).unwrap());
        }
    }
    let tokens: Vec<_> = tokens.into_iter().collect();
    for _ in 0..1_000_000 {
        let token = match rng.below(4) {
            0 => rng.next(),
            1 => tokens[rng.below(tokens.len())],
            2 => tokens[rng.below(tokens.len())] ^ 1 << rng.below(64),
            _ => tokens[rng.below(tokens.len())].wrapping_add(rng.next() % (1 << 20)),
        };
        assert!(pool.from_token(token).is_err(), "{token:#x}");
        assert!(pool.from_any_token(token).is_err(), "{token:#x}");
        assert!(pool.complete(token, pinpool::Outcome::default()).is_err(), "{token:#x}");
    }
    pool.check();
    assert_eq!(pool.stats().live, 0);
}

/// Keys that nobody was given, at addresses of the pool and elsewhere: the device refuses them.
#[test]
fn keys_made_up_reach_nothing() {
    let device = Device::soft();
    let pool = builder(&device, 2 * MIB).build().unwrap();
    let mut bufs: Vec<_> = (0..50).map(|_| pool.alloc(4096).unwrap()).collect();
    bufs.iter_mut().for_each(|b| b.fill(0xa5));
    let (soft, mut rng) = (device.as_soft().unwrap(), Numbers::new(5));
    let keys: HashSet<u32> = pool.arenas().iter().map(|a| a.keys.rkey.unwrap().get()).collect();
    let mut refused = 0;
    for _ in 0..300_000 {
        let key = match rng.below(2) {
            0 => rng.next() as u32,
            _ => *keys.iter().next().unwrap() ^ 1 << rng.below(32),
        };
        let addr = bufs[rng.below(50)].as_ptr() as u64 + rng.below(4096) as u64;
        if keys.contains(&key) {
            continue;
        }
        // SAFETY: refused, or the assertion fails.
        assert!(unsafe { soft.write(RKey::new(key), addr, &[0]) }.is_err(), "{key:#x}");
        refused += 1;
    }
    assert!(refused > 290_000);
    assert!(bufs.iter().all(|b| b.iter().all(|&x| x == 0xa5)));
}
