//! Guards, but for the quarantine (`host_quarantine`):
//! - poison: whoever writes to memory that nobody has is told, with address, offset, age and owners, however the
//!   buffer was given back; and the block is whole when it goes out again;
//! - canary: whoever writes beyond an end is told, however the buffer is given back;
//! - zero on free: nobody reads what another left;
//! - guard pages: no arena touches another, whatever the pool asks for;
//! - the books balance (P5), guards lie outside registered memory (P2), and a pool without them tells nothing.
#![cfg(feature = "fault")]
#![allow(clippy::unwrap_used)]

mod common;
#[path = "common/told.rs"]
mod told;

use std::{
    sync::{Arc, Barrier, Mutex},
    thread,
    time::Duration,
};

use common::{Rng, mapped, most_of, soft};
use pinpool::{Access, AllocError, Batch, Buf, Guards, Pool, Reserve, Track};
use told::{MIB, Told, guarded, late_write, peek};

const POISON: u8 = Guards::POISON;

/// Has the pool give out the block at `addr`, and nothing else of that length.
fn again(pool: &Pool, len: usize, addr: usize) -> Buf {
    let mut others = Vec::new();
    loop {
        let buf = pool.alloc(len).unwrap();
        if buf.as_ptr() as usize == addr {
            return buf;
        }
        others.push(buf);
    }
}

/// Every way to give a buffer back.
const WAYS: [&str; 9] =
    ["drop", "elsewhere", "batch", "raw", "from_raw", "token", "thread", "forgotten", "post"];

fn give_back(pool: &Pool, buf: Buf, way: &str) {
    match way {
        "drop" => drop(buf),
        "elsewhere" => thread::spawn(move || drop(buf)).join().unwrap(),
        "batch" => {
            // Through a batch of the same kind, that buffer among them.
            let (addr, len) = (buf.as_ptr(), buf.len());
            drop(buf);
            let mut batch = Batch::with_capacity(512);
            pool.alloc_many(&mut batch, len, 512).unwrap();
            assert!(batch.sges().any(|s| s.addr == addr as u64));
            pool.free_many(&mut batch);
        }
        // SAFETY: nobody else knows the pointer.
        "raw" => unsafe { pool.free_raw(buf.into_raw().as_ptr()).unwrap() },
        // SAFETY: as above.
        "from_raw" => drop(unsafe { pool.from_raw(buf.into_raw().as_ptr()).unwrap() }),
        "token" => drop(pool.from_token(buf.into_token()).unwrap()),
        "thread" => {
            thread_local!(static KEPT: Mutex<Vec<Buf>> = const { Mutex::new(Vec::new()) });
            // Dropped by the thread's own end.
            thread::spawn(move || KEPT.with(|kept| kept.lock().unwrap().push(buf))).join().unwrap();
        }
        "forgotten" => {
            let posted = pool.post(buf, |_, _| Ok::<_, ()>(())).unwrap();
            let token = posted.token();
            drop(posted);
            pool.complete(token, pinpool::Outcome::default()).unwrap();
        }
        "post" => {
            let posted = pool.post(buf, |_, _| Ok::<_, ()>(())).unwrap();
            pool.complete(posted.token(), pinpool::Outcome::default()).unwrap();
            drop(posted.try_take().unwrap());
        }
        other => panic!("{other}"),
    }
}

#[test]
fn a_write_after_free_is_told_whichever_way_the_buffer_was_given_back() {
    for way in WAYS {
        let (pool, told) = guarded(MIB, Guards::new().poison(true));
        let buf = thread::Builder::new()
            .name("owner".to_owned())
            .spawn({
                let pool = pool.clone();
                move || pool.alloc(5000).unwrap()
            })
            .unwrap()
            .join()
            .unwrap();
        let addr = buf.as_ptr() as usize;
        give_back(&pool, buf, way);
        told.none();
        late_write(addr + 123, b"late");
        let again = again(&pool, 5000, addr);
        let damage = told.one("free");
        assert_eq!((damage.addr, damage.len, damage.offset), (addr, 5000, 123), "{way}");
        assert_eq!((damage.extent, &damage.found[..]), (4, &b"late"[..]), "{way}");
        assert!(damage.age.is_some_and(|age| age < Duration::from_secs(300)));
        let owner = damage.owner.as_ref().unwrap();
        if way != "batch" {
            assert_eq!(owner.thread.as_deref(), Some("owner"), "{way}");
        }
        assert!(owner.tid > 0 && owner.site.is_none());
        assert!(damage.freed_by.as_ref().unwrap().tid > 0);
        assert!(again.iter().all(|&b| b == POISON), "{way}: whole again");
        assert_eq!(pool.stats().guards.written_after_free, 1);
        let text = damage.to_string();
        assert!(
            text.contains("offset 123 of the buffer of 5000") && text.contains("6c 61 74 65"),
            "{text}"
        );
        pool.check();
    }
}

#[test]
fn a_write_beyond_the_end_is_told_whichever_way_the_buffer_is_given_back() {
    for way in WAYS {
        for len in [100, 4096, 5000, 65536, 300_000] {
            let (pool, told) = guarded(MIB, Guards::new().canary(true));
            if way == "batch" {
                let mut batch = Batch::with_capacity(1);
                pool.alloc_many(&mut batch, len, 1).unwrap();
                late_write(batch.sges().next().unwrap().addr as usize + len + 3, b"x");
                pool.free_many(&mut batch);
            } else {
                let buf = pool.alloc(len).unwrap();
                assert_eq!((buf.len(), buf.capacity()), (len, len), "{way} {len}");
                let paged = (buf.as_ptr() as usize).is_multiple_of(4096);
                assert!(len % 4096 != 0 || paged);
                late_write(buf.as_ptr() as usize + len + 3, b"x");
                give_back(&pool, buf, way);
            }
            let damage = told.one("end");
            assert_eq!(
                (damage.len, damage.offset, damage.extent),
                (len, len + 3, 1),
                "{way} {len}"
            );
            assert_eq!((&damage.found[..], damage.freed_by.is_none()), (&b"x"[..], true));
            assert_eq!(pool.stats().guards.written_beyond_end, 1);
            pool.check();
        }
    }
}

#[test]
fn nothing_is_told_of_who_stays_inside() {
    let guards = Guards::new().poison(true).canary(true).quarantine(100_000).zero_on_free(true);
    let (pool, told) = guarded(MIB, guards);
    let mut rng = Rng(7);
    let mut held: Vec<Buf> = Vec::new();
    for _ in 0..3000 {
        if rng.next() & 1 == 0 || held.is_empty() {
            let len = rng.next() as usize % 20_000;
            match pool.alloc(len) {
                Ok(mut buf) => {
                    assert!(buf.iter().all(|&b| b == 0), "zeros");
                    assert_eq!(buf.capacity(), len.max(1));
                    assert!(buf.set_len(len.max(1) + 1).is_err());
                    buf.fill(0xff);
                    held.push(buf);
                }
                Err(AllocError::Exhausted(_)) => held.truncate(held.len() / 2),
                Err(e) => panic!("{e}"),
            }
        } else {
            let i = rng.next() as usize % held.len();
            give_back(
                &pool,
                held.swap_remove(i),
                WAYS[rng.next() as usize % WAYS.len()].replace("batch", "drop").as_str(),
            );
        }
        pool.check();
    }
    drop(held);
    assert_eq!(pool.check_free(), 0);
    pool.trim();
    let stats = pool.stats();
    assert_eq!((stats.live, stats.cached, stats.guards.quarantined), (0, 0, 0));
    pool.close().unwrap();
    told.none();
}

#[test]
fn damage_is_told_of_each_buffer_that_a_larger_block_lies_over() {
    let (pool, told) = guarded(MIB, Guards::new().poison(true));
    let small: Vec<_> = (0..64).map(|_| pool.alloc(1000).unwrap()).collect();
    let mut addrs: Vec<_> = small.iter().map(|b| b.as_ptr() as usize).collect();
    addrs.sort_unstable();
    drop(small);
    late_write(addrs[3] + 7, b"a");
    late_write(addrs[5] + 999, b"bc");
    let whole = pool.alloc(MIB).unwrap();
    let mut all = told.take();
    all.sort_by_key(|(_, d)| d.addr);
    let shown: Vec<_> = all.iter().map(|(_, d)| (d.addr, d.len, d.offset, d.extent)).collect();
    assert_eq!(shown, [(addrs[3], 1000, 7, 1), (addrs[5], 1000, 999, 2)]);
    assert!(whole.iter().all(|&b| b == POISON));
    drop(whole);
    // And where nobody was yet, in an arena's last bytes.
    let (pool, told) = guarded(MIB, Guards::new().poison(true));
    let end = pool.arenas()[0].addr.as_ptr() as usize + MIB;
    late_write(end - 1, b"z");
    let whole = pool.alloc(MIB).unwrap();
    let damage = told.one("free");
    assert_eq!((damage.addr, damage.len, damage.offset), (whole.as_ptr() as usize, MIB, MIB - 1));
    assert!(damage.age.is_none() && damage.owner.is_none());
    assert!(damage.to_string().contains("nobody had it yet"), "{damage}");
}

#[test]
fn everything_damaged_is_told_in_bounds_and_filled() {
    let (pool, told) = guarded(MIB, Guards::new().poison(true));
    let small: Vec<_> = (0..200).map(|_| pool.alloc(1000).unwrap()).collect();
    let addrs: Vec<_> = small.iter().map(|b| b.as_ptr() as usize).collect();
    drop(small);
    addrs.iter().for_each(|&addr| late_write(addr, b"x"));
    let whole = pool.alloc(MIB).unwrap();
    assert!(whole.iter().all(|&b| b == POISON), "all of it");
    assert_eq!(told.take().len(), 16);
}

#[test]
fn what_is_free_can_be_looked_at_any_time_and_is_at_the_end() {
    let (pool, told) = guarded(MIB, Guards::new().poison(true).quarantine(MIB));
    let bufs: Vec<_> = (0..3).map(|_| pool.alloc(4096).unwrap()).collect();
    let addrs: Vec<_> = bufs.iter().map(|b| b.as_ptr() as usize).collect();
    drop(bufs);
    assert_eq!(pool.check_free(), 0);
    late_write(addrs[1] + 4095, b"!");
    assert_eq!(pool.check_free(), 1);
    assert_eq!(told.one("free").offset, 4095);
    assert_eq!(pool.check_free(), 0, "filled again");
    late_write(addrs[2], b"!");
    pool.close().unwrap();
    assert_eq!(told.one("free").addr, addrs[2]);
}

#[test]
fn a_canary_is_left_out_where_memory_is_short() {
    for len in [64, 4096, 65536, 1 << 18, MIB] {
        let (pool, told) = guarded(MIB, Guards::new().canary(true));
        let got: Vec<_> = std::iter::from_fn(|| pool.alloc(len).ok()).collect();
        let plain = soft(MIB).build().unwrap();
        let most = most_of(&plain, len);
        assert!(got.len() * 2 >= most, "{len}: {} of {most}", got.len());
        // All bytes are out: nothing was refused that there was room for.
        assert!(pool.stats().largest_free < len);
        got.into_iter().for_each(|mut buf| buf.fill(1));
        told.none();
        pool.check();
    }
}

#[test]
fn nobody_reads_what_another_left() {
    for guards in [
        Guards::new().zero_on_free(true),
        Guards::new().zero_on_free(true).poison(true),
        Guards::new().zero_on_free(true).quarantine(100_000),
    ] {
        let told = Told::default();
        let builder = soft(MIB).share("tenant", Reserve::bytes(200_000)).guards(guards);
        let pool = told.hear(builder).build().unwrap();
        let share = pool.share("tenant").unwrap();
        let mut addrs = Vec::new();
        for round in 0..3 {
            let bufs: Vec<_> = (0..100)
                .map(|i| {
                    let mut buf =
                        if i % 2 == 0 { share.alloc(5000) } else { pool.alloc(5000) }.unwrap();
                    assert!(buf.iter().all(|&b| b == 0), "round {round}");
                    buf.fill(0x55);
                    buf
                })
                .collect();
            addrs = bufs.iter().map(|b| b.as_ptr() as usize).collect();
        }
        // At once, not when the next comes.
        for addr in addrs {
            assert!(!peek(addr, 5000).contains(&0x55));
        }
        pool.check();
        told.none();
    }
}

#[test]
fn adopted_memory_is_guarded_too() {
    let mut memory = memmap2::MmapMut::map_anon(MIB).unwrap();
    memory.fill(9);
    let told = Told::default();
    // SAFETY: the pool alone uses the mapping until it is gone.
    let builder = unsafe { Pool::builder().adopt(memory.as_mut_ptr(), memory.len()) };
    let builder = builder.device(pinpool::Device::soft()).guards(Guards::new().poison(true));
    let pool = told.hear(builder).build().unwrap();
    let buf = pool.alloc(4096).unwrap();
    assert!(buf.iter().all(|&b| b == POISON));
    drop(buf);
    told.none();
    pool.close().unwrap();
    let zeroing = Guards::new().zero_on_free(true);
    memory.fill(9);
    // SAFETY: as above.
    let builder = unsafe { Pool::builder().adopt(memory.as_mut_ptr(), memory.len()) };
    let pool = builder.device(pinpool::Device::soft()).guards(zeroing).build().unwrap();
    assert!(pool.alloc(MIB).unwrap().iter().all(|&b| b == 0));
}

#[test]
fn an_arena_that_comes_is_guarded_from_its_first_byte() {
    let told = Told::default();
    let builder =
        soft(MIB).max_capacity(4 * MIB).arena_size(MIB).guards(Guards::new().poison(true));
    let pool = told.hear(builder).build().unwrap();
    let _held = pool.alloc(MIB).unwrap();
    let more = pool.alloc_wait(MIB, Duration::from_secs(300)).unwrap();
    assert!(more.iter().all(|&b| b == POISON));
    drop(more);
    told.none();
    pool.check();
}

#[test]
fn an_arena_that_goes_is_looked_at_no_more() {
    let told = Told::default();
    let builder = soft(MIB).max_capacity(2 * MIB).arena_size(MIB).growth_by_hand();
    let builder = builder.shrink_after(Duration::from_secs(8)).low_watermark(4096);
    let guards = Guards::new().poison(true).quarantine(MIB);
    let pool = told.hear(builder.guards(guards)).build().unwrap();
    for round in 0..3 {
        let now = |n: u64| Duration::from_secs(1000 * round + n);
        let held = pool.alloc(MIB).unwrap();
        let _ = pool.tick(now(0));
        assert_eq!(pool.capacity(), 2 * MIB, "grown");
        let bufs: Vec<_> = (0..100).map(|_| pool.alloc(5000).unwrap()).collect();
        assert!(bufs.iter().all(|buf| buf.iter().all(|&b| b == POISON)));
        drop((held, bufs));
        assert_eq!(pool.check_free(), 0);
        (1..40).for_each(|n| _ = pool.tick(now(n)));
        assert_eq!(pool.capacity(), MIB, "shrunk, in spite of the quarantine");
        assert_eq!(pool.check_free(), 0);
        pool.check();
    }
    pool.close().unwrap();
    told.none();
}

/// Drops one, outside of the lock.
fn take(passed: &Mutex<Vec<Buf>>) {
    let got = passed.lock().unwrap().pop();
    drop(got);
}

#[test]
fn sixteen_threads_and_every_guard_and_the_books_balance() {
    let guards = Guards::new().poison(true).canary(true).quarantine(1 << 19).zero_on_free(true);
    let told = Told::default();
    let builder =
        soft(8 * MIB).share("part", Reserve::bytes(MIB)).guards(guards).track(Track::every(3));
    let pool = told.hear(builder).build().unwrap();
    let share = pool.share("part").unwrap();
    let rounds: usize = std::env::var("PINPOOL_ROUNDS").map_or(2000, |n| n.parse().unwrap());
    let passed: Mutex<Vec<Buf>> = Mutex::default();
    let start = Barrier::new(16);
    thread::scope(|scope| {
        for n in 0..16 {
            let (pool, share, passed, start) = (&pool, &share, &passed, &start);
            scope.spawn(move || {
                let mut rng = Rng(n);
                let mut held: Vec<Buf> = Vec::new();
                start.wait();
                for _ in 0..rounds {
                    let len = rng.next() as usize % 9000;
                    match rng.next() % 8 {
                        0..4 => {
                            let got = if rng.next() & 3 == 0 {
                                share.alloc(len)
                            } else {
                                pool.alloc(len)
                            };
                            let Ok(mut buf) = got else {
                                held.truncate(held.len() / 2);
                                continue;
                            };
                            assert!(buf.iter().all(|&b| b == 0));
                            buf.fill(n as u8);
                            held.push(buf);
                        }
                        4 => passed.lock().unwrap().extend(held.pop()),
                        5 => take(passed),
                        6 => held.extend(pool.alloc_wait(len, Duration::from_millis(1)).ok().map(
                            |mut buf| {
                                buf.fill(n as u8);
                                buf
                            },
                        )),
                        _ => {
                            if let Some(buf) = held.pop() {
                                assert!(buf.iter().all(|&b| b == n as u8));
                            }
                        }
                    }
                }
            });
        }
        scope.spawn(|| {
            for _ in 0..20 {
                assert_eq!(pool.check_free(), 0);
                let _ = (pool.outstanding().to_string(), pool.stats());
                pool.trim();
            }
        });
    });
    passed.lock().unwrap().clear();
    pool.check();
    let stats = pool.stats();
    assert_eq!((stats.live, stats.live_buffers), (0, 0));
    assert_eq!(stats.cached, stats.guards.quarantined);
    assert_eq!(pool.outstanding().buffers, 0);
    drop(share);
    pool.close().unwrap();
    told.none();
    assert!(told.1.lock().unwrap().is_empty());
}

/// Collections grow and shrink in place: the canary goes along.
#[cfg(feature = "allocator-api2")]
#[test]
fn collections_in_a_guarded_pool_grow_shrink_and_are_watched() {
    use allocator_api2::vec::Vec as PoolVec;
    let guards = Guards::new().poison(true).canary(true).quarantine(8192);
    let (pool, told) = guarded(MIB, guards);
    let mut v = PoolVec::new_in(&pool);
    for i in 0..20_000u32 {
        v.push(i);
        if i % 7 == 0 {
            v.shrink_to_fit();
        }
    }
    assert!(v.iter().enumerate().all(|(i, &n)| i as u32 == n));
    v.truncate(100);
    v.shrink_to_fit();
    told.none();
    // Behind what was asked for, wherever that is by now.
    late_write(v.as_ptr() as usize + 4 * v.capacity(), b"!");
    drop(v);
    let damage = told.one("end");
    assert_eq!((damage.offset - damage.len, damage.extent), (0, 1));
    pool.check();
    assert_eq!(pool.stats().live, 0);
    pool.close().unwrap();
    told.none();
}

#[test]
fn no_arena_touches_another() {
    let page = 4096;
    for builder in [
        soft(MIB),
        soft(4 * MIB + 8192).arena_size(MIB),
        soft(2 * MIB).arena_size(MIB).max_capacity(4 * MIB).class(
            "other",
            Access::LOCAL_WRITE,
            MIB,
        ),
        soft(4 * MIB).arena_size(MIB).access(Access::LOCAL_WRITE | Access::ZERO_BASED),
        soft(4 * MIB).arena_size(MIB).backing(pinpool::Backing::Memfd),
    ] {
        let pool = builder.build().unwrap();
        let mut held = Vec::new();
        while pool.capacity() < pool.max_capacity() {
            held.push(pool.alloc_wait(MIB, Duration::from_secs(300)).unwrap());
        }
        for arena in pool.arenas() {
            let (start, end) =
                (arena.addr.as_ptr() as usize, arena.addr.as_ptr() as usize + arena.len);
            assert!(mapped(start, page) && mapped(end - page, page));
            assert!(!mapped(start - page, page) && !mapped(end, page), "{arena:?}");
        }
        pool.check();
    }
}

#[test]
fn a_buffer_that_comes_back_after_the_last_handle_is_looked_at_too() {
    let (pool, told) = guarded(MIB, Guards::new().poison(true).canary(true).quarantine(MIB));
    let device_side = pool.alloc(100).unwrap();
    drop(pool);
    assert_eq!(told.1.lock().unwrap().pop().unwrap().buffers, 1);
    late_write(device_side.as_ptr() as usize + 101, b"x");
    drop(device_side);
    assert_eq!(told.one("end").offset, 101);
}

#[test]
fn a_hook_may_use_the_pool_and_may_panic() {
    let slot: Arc<Mutex<Option<Pool>>> = Arc::default();
    let hooks = slot.clone();
    let pool = soft(MIB)
        .guards(Guards::new().poison(true).canary(true).quarantine(8192))
        .track(Track::all())
        .on_event(move |_| {
            let pool = hooks.lock().unwrap().clone();
            if let Some(pool) = pool {
                drop(pool.alloc(4096).unwrap());
                let _ = (pool.stats(), pool.outstanding(), pool.check_free());
            }
            panic!("the hook's own affair");
        })
        .build()
        .unwrap();
    *slot.lock().unwrap() = Some(pool.clone());
    let buf = pool.alloc(100).unwrap();
    late_write(buf.as_ptr() as usize + 100, b"x");
    let addr = buf.as_ptr() as usize;
    drop(buf);
    late_write(addr, b"x");
    assert_eq!(pool.check_free(), 1);
    let guards = pool.stats().guards;
    assert_eq!((guards.written_after_free, guards.written_beyond_end), (1, 1));
    *slot.lock().unwrap() = None;
    pool.check();
}

#[test]
fn a_lease_and_classes_keep_their_guards() {
    let told = Told::default();
    let builder =
        soft(MIB).class("other", Access::LOCAL_WRITE, MIB).guards(Guards::new().poison(true));
    let pool = told.hear(builder).build().unwrap();
    let class = pool.class::<pinpool::reach::Local>("other").unwrap();
    let buf = class.alloc(300).unwrap();
    let addr = buf.as_ptr() as usize;
    drop(buf);
    late_write(addr + 299, b"x");
    assert_eq!(pool.check_free(), 1, "whichever class");
    assert_eq!((told.one("free").offset), 299);
}
