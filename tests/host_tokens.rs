//! Buffers in flight. Proves: a token gives its buffer back once, whole; until then nobody gets the bytes,
//! whatever is dropped (B25); used twice, stale, another pool's and made-up ones are refused, on any number of
//! threads; a lost one leaks and is listed; posted work outlives the future that waits for it; the side tables
//! stay small; lists of several buffers are laid out as verbs want them.
#![cfg(feature = "fault")]
#![allow(clippy::unwrap_used)]

mod common;
#[path = "common/futures.rs"]
mod futures;

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    task::Poll,
    thread,
};

use common::{Rng, scaled, soft};
use futures::{Count, block_on, poll};
use pinpool::{AllocError, Batch, Buf, Outcome, PostError, SgList, SgListError, TokenError};

const OK: Outcome = Outcome { status: 0, bytes: 0 };

#[test]
fn b25_a_buffer_in_flight_is_nobody_elses_until_it_completes() {
    for len in [4096usize, 64 << 10, 1 << 20, 100] {
        // One buffer, whatever its size: smaller ones share the last page.
        let pool = soft(len.next_multiple_of(4096)).build().unwrap();
        let buf = pool.alloc(len).unwrap();
        let rest: Vec<_> = std::iter::from_fn(|| pool.alloc(len).ok()).collect();
        let addr = buf.as_ptr();
        let token = buf.into_token();
        // The handle is gone; so is another handle of the pool.
        drop(pool.clone());
        let error = pool.alloc(len).unwrap_err();
        assert!(matches!(error, AllocError::Exhausted(_)), "{error}");
        let elsewhere = pool.clone();
        thread::spawn(move || assert!(elsewhere.alloc(len).is_err())).join().unwrap();
        // The completion.
        let back = pool.from_token(token).unwrap();
        assert_eq!((back.as_ptr(), back.len()), (addr, len));
        drop(back);
        let again = pool.alloc(len).unwrap();
        assert_eq!(again.as_ptr(), addr, "the only one there is");
        // A token that is lost leaks its block for good, and is found.
        let lost = again.into_token();
        for _ in 0..100 {
            assert!(pool.alloc(len).is_err());
        }
        let list = pool.in_flight();
        assert_eq!(list.len(), 1);
        assert_eq!(list[0].addr.as_ptr().cast_const(), addr);
        assert_eq!((list[0].len, list[0].token), (len, lost));
        assert_eq!(pool.stats().in_flight, 1);
        drop(rest);
        pool.check();
        // Its operator gives it back.
        drop(pool.from_token(list[0].token).unwrap());
        pool.close().unwrap();
    }
}

#[test]
fn length_address_keys_and_contents_survive() {
    for colouring in [false, true] {
        let pool = soft(64 << 20).arena_size(16 << 20).colouring(colouring).build().unwrap();
        let mut held = Vec::new();
        let lens = [0, 1, 64, 100, 3000, 4096, 4097, 5000, 32768, 65_534, 65_535, 65_536, 1 << 20];
        for round in 0..40usize {
            for asked in lens.into_iter().chain([(5 << 20) + 3]) {
                let Ok(mut buf) = pool.alloc(asked) else { continue };
                let byte = (round * 31 + asked) as u8;
                buf.fill(byte);
                buf.truncate(asked.saturating_sub(round));
                let about = (buf.as_ptr(), buf.len(), buf.keys(), buf.capacity(), byte);
                held.push((about, buf.into_token()));
            }
        }
        assert_eq!(pool.in_flight().len(), held.len());
        let tokens: std::collections::HashSet<_> = held.iter().map(|h| h.1).collect();
        assert_eq!(tokens.len(), held.len(), "no two are alike");
        for (about, token) in held {
            assert_eq!(token >> 63, 0, "the top bit is the user's");
            let buf = pool.from_token(token).unwrap();
            assert_eq!((buf.as_ptr(), buf.len(), buf.keys(), buf.capacity()), {
                let (ptr, len, keys, capacity, _) = about;
                (ptr, len, keys, capacity)
            });
            assert!(buf.iter().all(|&b| b == about.4));
        }
        pool.check();
        let stats = pool.stats();
        assert_eq!((stats.live, stats.in_flight), (0, 0));
    }
}

#[test]
fn the_longest_buffer_keeps_its_length() {
    let pool = soft(32 << 20).arena_size(32 << 20).build().unwrap();
    let buf = pool.alloc(32 << 20).unwrap();
    let token = buf.into_token();
    assert_eq!(pool.from_token(token).unwrap().len(), 32 << 20);
}

#[test]
fn used_foreign_and_made_up_tokens_are_refused() {
    let (a, b) = (soft(4 << 20).build().unwrap(), soft(4 << 20).build().unwrap());
    for len in [64, 4096, 100_000] {
        let token = a.alloc(len).unwrap().into_token();
        // The same block of a twin pool is in flight, too.
        let twin = b.alloc(len).unwrap().into_token();
        assert_eq!(a.from_token(twin).unwrap_err(), TokenError::OtherPool { token: twin });
        assert_eq!(b.from_token(token).unwrap_err(), TokenError::OtherPool { token });
        drop(b.from_token(twin).unwrap());
        assert_eq!(b.from_token(twin).unwrap_err(), TokenError::NotInFlight { token: twin });
        let buf = a.from_token(token).unwrap();
        assert_eq!(a.from_token(token).unwrap_err(), TokenError::NotInFlight { token });
        // The next flight of the same block has another token.
        let next = buf.into_token();
        assert_ne!(next, token);
        assert_eq!(a.from_token(token).unwrap_err(), TokenError::NotInFlight { token });
        drop(a.from_token(next).unwrap());
    }
    // One flight among all numbers that differ from its token in one bit, and many that look like nothing.
    let live = a.alloc(4096).unwrap().into_token();
    let mut rng = Rng(7);
    let mutants = (0..64).map(|bit| live ^ 1 << bit).chain((0..200_000).map(|_| rng.next()));
    for made_up in mutants.chain([0, 1, u64::MAX, u64::MAX - 1, live | 1 << 63]) {
        if made_up != live {
            assert!(a.from_token(made_up).is_err(), "{made_up:#x} beside {live:#x}");
        }
    }
    a.check();
    assert_eq!(a.stats().live_buffers, 1);
    assert_eq!(a.from_token(live).unwrap().len(), 4096);
}

#[test]
fn a_stale_token_is_refused_for_as_long_as_is_promised() {
    let pool = soft(64 << 10).build().unwrap();
    for len in [4096, 64] {
        let mut buf = pool.alloc(len).unwrap();
        let stale = buf.into_token();
        buf = pool.from_token(stale).unwrap();
        for flight in 1..32_768 {
            let token = buf.into_token();
            assert!(pool.from_token(stale).is_err(), "after {flight} flights");
            buf = pool.from_token(token).unwrap();
        }
        // And then the number comes round again.
        assert_eq!(buf.into_token(), stale);
        drop(pool.from_token(stale).unwrap());
    }
}

#[test]
fn a_dead_pools_token_is_refused_by_those_that_follow() {
    let stale: Vec<_> = (0..50)
        .map(|_| {
            let pool = soft(64 << 10).build().unwrap();
            let token = pool.alloc(4096).unwrap().into_token();
            drop(pool.from_token(token).unwrap());
            token
        })
        .collect();
    let pool = soft(64 << 10).build().unwrap();
    let held = pool.alloc(4096).unwrap().into_token();
    for token in stale {
        assert_eq!(pool.from_token(token).unwrap_err(), TokenError::OtherPool { token });
    }
    assert_eq!(pool.from_token(held).unwrap().len(), 4096);
}

#[test]
fn of_many_threads_with_one_token_one_gets_the_buffer() {
    let pool = soft(1 << 20).build().unwrap();
    for len in [4096, 100] {
        for round in 0..scaled(400) {
            let mut buf = pool.alloc(len).unwrap();
            buf[0] = round as u8;
            let token = buf.into_token();
            let got = AtomicUsize::new(0);
            let start = std::sync::Barrier::new(4);
            thread::scope(|s| {
                let threads: Vec<_> = (0..4)
                    .map(|_| {
                        s.spawn(|| {
                            start.wait();
                            if let Ok(mut buf) = pool.from_token(token) {
                                assert_eq!(buf[0], round as u8);
                                buf[0] = !round as u8;
                                got.fetch_add(1, SeqCst);
                            }
                        })
                    })
                    .collect();
                threads.into_iter().for_each(|t| t.join().unwrap());
            });
            assert_eq!(got.into_inner(), 1);
        }
    }
    pool.check();
    assert_eq!(pool.stats().live, 0);
}

#[test]
fn tokens_cross_threads_at_speed() {
    let pool = soft(4 << 20).build().unwrap();
    let (to, from) = std::sync::mpsc::sync_channel::<(u64, usize, u8)>(64);
    thread::scope(|s| {
        let poller = s.spawn(|| {
            for (token, len, byte) in from {
                let buf = pool.from_token(token).unwrap();
                assert_eq!(buf.len(), len);
                assert!(buf.iter().all(|&b| b == byte));
            }
        });
        let poster = s.spawn(|| {
            let (mut rng, to) = (Rng(3), to);
            for i in 0..scaled(50_000) {
                let len = rng.size(1, 20_000);
                let mut buf = pool.alloc(len).unwrap();
                buf.fill(i as u8);
                to.send((buf.into_token(), len, i as u8)).unwrap();
            }
        });
        poster.join().unwrap();
        poller.join().unwrap();
    });
    pool.check();
    assert_eq!(pool.stats().live, 0);
}

#[test]
fn side_tables_stay_small_when_every_block_is_in_flight() {
    let pool = soft(256 << 20).build().unwrap();
    let tokens: Vec<_> =
        std::iter::from_fn(|| pool.alloc(4096).ok()).map(Buf::into_token).collect();
    assert_eq!(tokens.len(), 65_536);
    let stats = pool.stats();
    assert_eq!(stats.in_flight, tokens.len());
    assert!(stats.table_bytes * 200 <= stats.capacity, "{} of tables", stats.table_bytes);
    for token in tokens {
        drop(pool.from_token(token).unwrap());
    }
}

#[test]
fn ages_grow_and_the_list_is_oldest_first() {
    let pool = soft(1 << 20).build().unwrap();
    let built = std::time::Instant::now();
    let tokens: Vec<_> = [64, 4096, 9000].map(|n| pool.alloc(n).unwrap().into_token()).into();
    let list = pool.in_flight();
    assert_eq!(list.len(), 3);
    assert!(list.is_sorted_by(|a, b| a.age >= b.age));
    assert!(list.iter().all(|f| f.age <= built.elapsed()), "{list:?}");
    for token in tokens {
        drop(pool.from_token(token).unwrap());
    }
    assert!(pool.in_flight().is_empty());
}

#[test]
fn posted_work_resolves_at_its_completion() {
    let pool = soft(64 << 10).build().unwrap();
    let buf = pool.alloc(3000).unwrap();
    let (addr, sge) = (buf.as_ptr(), buf.sge());
    let mut posted = pool
        .post(buf, |_, given| {
            assert_eq!(given, sge);
            Ok::<_, ()>(())
        })
        .unwrap();
    let (count, later) = (Arc::new(Count::default()), Arc::new(Count::default()));
    assert!(poll(&mut posted, &count).is_pending());
    assert!(poll(&mut posted, &later).is_pending(), "the last waker counts");
    let token = posted.token();
    assert_eq!(pool.from_token(token).unwrap_err(), TokenError::Posted { token });
    let done = Outcome { status: 0, bytes: 17 };
    assert_eq!(pool.in_flight().len(), 1);
    pool.complete(token, done).unwrap();
    assert_eq!((pool.in_flight().len(), pool.stats().live_buffers), (0, 1), "its future's now");
    assert_eq!((count.0.load(SeqCst), later.0.load(SeqCst)), (0, 1));
    assert_eq!(pool.complete(token, done), Err(TokenError::NotInFlight { token }), "once");
    let Poll::Ready((buf, outcome)) = poll(&mut posted, &count) else { panic!("complete") };
    assert_eq!((buf.as_ptr(), buf.len(), outcome), (addr, 3000, done));
    assert!(poll(&mut posted, &count).is_pending(), "resolves once");
    drop((posted, buf));
    assert!(pool.complete(token, done).is_err());
    pool.check();
    assert_eq!(pool.stats().live, 0);
    pool.close().unwrap();
}

#[test]
fn a_dropped_future_leaves_the_buffer_with_the_device() {
    let pool = soft(4096).build().unwrap();
    let posted = pool.post(pool.alloc(4096).unwrap(), |_, _| Ok::<_, ()>(())).unwrap();
    let token = posted.token();
    drop(posted);
    assert!(pool.alloc(64).is_err(), "the device still has it");
    assert_eq!(pool.in_flight()[0].token, token);
    assert_eq!(pool.from_token(token).unwrap_err(), TokenError::Posted { token });
    pool.complete(token, OK).unwrap();
    assert!(pool.complete(token, OK).is_err());
    // Back in the pool. Now completed before it was dropped, and taken without a runtime.
    let posted = pool.post(pool.alloc(4096).unwrap(), |_, _| Ok::<_, ()>(())).unwrap();
    pool.complete(posted.token(), OK).unwrap();
    drop(posted);
    let posted = pool.post(pool.alloc(4096).unwrap(), |_, _| Ok::<_, ()>(())).unwrap();
    let posted = posted.try_take().unwrap_err();
    pool.complete(posted.token(), OK).unwrap();
    assert_eq!(posted.try_take().unwrap().0.len(), 4096);
    // Reported from within the call that then says that it failed: against the contract, but nothing is lost.
    let refused = pool.post(pool.alloc(4096).unwrap(), |token, _| {
        pool.complete(token, OK).unwrap();
        Err("after all")
    });
    assert_eq!(refused.unwrap_err().0.len(), 4096);
    // A bare token completes as well: back to the pool.
    pool.complete(pool.alloc(4096).unwrap().into_token(), OK).unwrap();
    assert_eq!(pool.stats().live, 0);
    pool.close().unwrap();
}

#[test]
fn what_was_not_posted_comes_back_at_once() {
    let (pool, other) = (soft(64 << 10).build().unwrap(), soft(64 << 10).build().unwrap());
    let (buf, e) = pool.post(pool.alloc(100).unwrap(), |_, _| Err("full")).unwrap_err();
    assert_eq!((buf.len(), e), (100, PostError::Refused("full")));
    let (buf, e) = other.post(buf, |_, _| Ok::<_, ()>(())).unwrap_err();
    assert_eq!((buf.len(), e), (100, PostError::OtherPool));
    drop(buf);
    // A panic says nothing about what was posted: the buffer waits for its completion.
    let token = Mutex::new(0);
    let p = pool.clone();
    let died = std::panic::catch_unwind(|| {
        let _ = p.post(p.alloc(100).unwrap(), |t, _| -> Result<(), ()> {
            *token.lock().unwrap() = t;
            panic!("on purpose");
        });
    });
    assert!(died.is_err());
    assert_eq!(pool.stats().in_flight, 1);
    pool.complete(token.into_inner().unwrap_or_else(|e| e.into_inner()), OK).unwrap();
    assert_eq!(pool.stats().live, 0);
}

#[test]
fn futures_and_completions_race_on_many_threads() {
    let pool = soft(1 << 20).build().unwrap();
    let (to, from) = std::sync::mpsc::sync_channel::<u64>(16);
    let ready = Arc::new(AtomicUsize::new(0));
    thread::scope(|s| {
        let poller = s.spawn(|| {
            for token in from {
                pool.complete(token, OK).unwrap();
            }
        });
        let (pool, ready) = (&pool, ready.clone());
        let poster = s.spawn(move || {
            let mut rng = Rng(11);
            for _ in 0..scaled(20_000) {
                let send = |token, _| to.send(token);
                let mut posted = pool.post(pool.alloc(rng.size(1, 9000)).unwrap(), send).unwrap();
                match rng.below(3) {
                    0 => drop(posted),
                    1 => {
                        while let Err(again) = posted.try_take() {
                            posted = again;
                            thread::yield_now();
                        }
                    }
                    _ => {
                        block_on(posted);
                        ready.fetch_add(1, SeqCst);
                    }
                }
            }
        });
        poster.join().unwrap();
        poller.join().unwrap();
    });
    assert!(ready.load(SeqCst) > 0);
    pool.check();
    assert_eq!(pool.stats().live, 0);
    pool.close().unwrap();
}

#[test]
fn a_list_of_buffers_is_laid_out_as_verbs_want_it() {
    let pool = soft(1 << 20).build().unwrap();
    let bufs: Vec<_> = [10, 4096, 300].map(|n| pool.alloc(n).unwrap()).into();
    let mut last = pool.alloc(64).unwrap();
    let last_sge = last.sge();
    let mut list = SgList::<4>::new();
    assert!(list.is_empty() && list.capacity() == 4);
    list.push(&bufs[0]).unwrap();
    list.push_range(&bufs[1], 96, 4000).unwrap();
    let beyond = list.push_range(&bufs[1], 97, 4000);
    assert_eq!(beyond, Err(SgListError::OutOfRange { offset: 97, len: 4000, have: 4096 }));
    list.push(&bufs[2]).unwrap();
    list.push_mut(&mut last).unwrap();
    assert_eq!(list.push(&bufs[2]), Err(SgListError::Full { capacity: 4, len: 4, asked: 1 }));
    assert_eq!((list.len(), list.bytes()), (4, 10 + 4000 + 300 + 64));
    // As `struct ibv_sge`: u64, u32, u32, one after the other.
    // SAFETY: four elements of 16 bytes without padding.
    let words = unsafe { std::slice::from_raw_parts(list.as_ptr().cast::<u64>(), 8) };
    let second = bufs[1].sge();
    assert_eq!(words[2], second.addr + 96);
    assert_eq!(words[3], 4000 | u64::from(second.lkey.get()) << 32);
    assert_eq!(list[3], last_sge);

    let mut batch = Batch::with_capacity(8);
    pool.alloc_many(&mut batch, 2000, 5).unwrap();
    let mut list = SgList::<6>::new();
    list.push_batch(&batch).unwrap();
    assert!(list.iter().copied().eq(batch.sges()));
    let full = SgListError::Full { capacity: 6, len: 5, asked: 5 };
    assert_eq!(list.push_batch(&batch), Err(full));
    list.clear();
    assert_eq!(list.len(), 0);
    let mut none = SgList::<0>::new();
    assert!(none.push(&bufs[0]).is_err());
}

#[test]
fn random_flights_agree_with_a_naive_account() {
    for seed in 0..scaled(40) as u64 {
        let pool = soft(2 << 20).arena_size(1 << 20).colouring(seed % 2 == 1).build().unwrap();
        let mut rng = Rng(seed);
        let (mut flying, mut used) = (HashMap::new(), Vec::new());
        for _ in 0..2000 {
            match rng.below(5) {
                0 | 1 => {
                    let Ok(mut buf) = pool.alloc(rng.size(1, 200_000)) else { continue };
                    let byte = rng.next() as u8;
                    buf.fill(byte);
                    let (addr, len) = (buf.as_ptr(), buf.len());
                    let before = flying.insert(buf.into_token(), (addr, len, byte));
                    assert_eq!(before, None);
                }
                2 => {
                    let Some(&token) = flying.keys().next() else { continue };
                    let (addr, len, byte) = flying.remove(&token).unwrap();
                    let buf = pool.from_token(token).unwrap();
                    assert_eq!((buf.as_ptr(), buf.len()), (addr, len));
                    assert!(buf.iter().all(|&b| b == byte));
                    used.push(token);
                }
                3 => {
                    let Some(&token) = used.get(rng.below(used.len().max(1))) else { continue };
                    assert!(flying.contains_key(&token) || pool.from_token(token).is_err());
                }
                _ => pool.trim(),
            }
        }
        let mut listed: Vec<_> = pool.in_flight().iter().map(|f| f.token).collect();
        let mut mine: Vec<_> = flying.keys().copied().collect();
        listed.sort_unstable();
        mine.sort_unstable();
        assert_eq!(listed, mine);
        pool.check();
        assert_eq!(pool.stats().live_buffers, flying.len());
        for token in mine {
            drop(pool.from_token(token).unwrap());
        }
        pool.close().unwrap();
    }
}
