//! Waiting for memory. Proves: any thread's free wakes any thread's waiter, in the order they came, with and
//! without a runtime; who gives up passes its turn on; large and small requests do not starve one another, nor
//! does an alloc that does not wait starve them, within the bound that is promised; nothing is lost meanwhile
//! (P5), and afterwards all is as fast as before.
#![cfg(feature = "fault")]
#![allow(clippy::unwrap_used)]

mod common;
#[path = "common/futures.rs"]
mod futures;

use std::{
    future::Future,
    pin::Pin,
    sync::{
        Arc, Barrier, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst},
        mpsc,
    },
    task::{Context, Poll, Wake, Waker},
    thread,
    time::{Duration, Instant},
};

use common::{Rng, scaled, soft};
use futures::{Count, block_on, poll};
use pinpool::{AllocError, AllocFuture, Buf, Pool};

/// Longer than any test takes: a wait that lasts so long is a hang.
const LONG: Duration = Duration::from_secs(300);

fn one_buffer() -> Pool {
    soft(4096).build().unwrap()
}

fn pending(future: &mut AllocFuture<'_>, count: &Arc<Count>) {
    assert!(poll(future, count).is_pending());
}

fn ready(future: &mut AllocFuture<'_>) -> Buf {
    match poll(future, &Arc::default()) {
        Poll::Ready(buf) => buf.unwrap(),
        Poll::Pending => panic!("it was not served"),
    }
}

/// Waits until so many stand in line.
fn until_waiting(pool: &Pool, n: usize) {
    while pool.stats().waiting != n {
        thread::yield_now();
    }
}

#[test]
fn what_is_there_is_had_at_once() {
    let pool = soft(1 << 20).build().unwrap();
    for len in [0, 1, 4096, 100_000, 1 << 20] {
        assert_eq!(pool.alloc_wait(len, Duration::ZERO).unwrap().len(), len);
        assert_eq!(pool.local().alloc_wait(len, Duration::ZERO).unwrap().len(), len);
        assert_eq!(ready(&mut pool.alloc_async(len)).len(), len);
    }
    let layout = std::alloc::Layout::from_size_align(100, 8192).unwrap();
    let buf = pool.alloc_layout_wait(layout, Duration::ZERO).unwrap();
    assert_eq!((buf.as_ptr() as usize % 8192, buf.len()), (0, 100));
    drop(buf);
    assert_eq!(ready(&mut pool.alloc_layout_async(layout)).as_ptr() as usize % 8192, 0);
    assert_eq!(pool.stats().waits, 0);
}

#[test]
fn what_no_wait_can_bring_is_an_error_at_once() {
    let pool = one_buffer();
    let _held = pool.alloc(1).unwrap();
    let error = pool.alloc_wait(4097, LONG).unwrap_err();
    assert_eq!(error, AllocError::TooLarge { asked: 4097, max: 4096 });
    let polled = poll(&mut pool.alloc_async(usize::MAX), &Arc::default());
    assert!(matches!(polled, Poll::Ready(Err(AllocError::TooLarge { .. }))));
    let layout = std::alloc::Layout::from_size_align(1, 1 << 20).unwrap();
    let error = pool.alloc_layout_wait(layout, LONG).unwrap_err();
    assert!(matches!(error, AllocError::Alignment { .. }));
}

#[test]
fn a_wait_that_times_out_says_so_and_leaves_no_trace() {
    let pool = one_buffer();
    let held = pool.alloc(4096).unwrap();
    let first = &mut pool.alloc_async(4096);
    pending(first, &Arc::default());
    let started = Instant::now();
    match pool.alloc_wait(4096, Duration::from_millis(20)).unwrap_err() {
        AllocError::TimedOut { waited, ahead, books } => {
            assert!(waited >= Duration::from_millis(20) && waited <= started.elapsed());
            assert_eq!(ahead, 1);
            assert_eq!((books.asked, books.live, books.waiting), (4096, 4096, 1));
        }
        e => panic!("{e}"),
    }
    let stats = pool.stats();
    assert_eq!((stats.waiting, stats.waits), (1, 2));
    assert!(stats.wait_time >= Duration::from_millis(20));
    drop(held);
    drop(ready(first));
    assert_eq!(pool.stats().waiting, 0);
    drop(pool.alloc(4096).unwrap());
    pool.check();
}

#[test]
fn first_come_first_served() {
    let pool = one_buffer();
    let mut held = pool.alloc(4096).unwrap();
    let (mut line, wakes): (Vec<_>, Vec<_>) = (0..10)
        .map(|_| {
            let (mut f, count) = (pool.alloc_async(4000), Arc::new(Count::default()));
            pending(&mut f, &count);
            (f, count)
        })
        .unzip();
    assert_eq!(pool.stats().waiting, 10);
    for i in 0..10 {
        drop(held);
        for (j, (f, count)) in line.iter_mut().zip(&wakes).enumerate() {
            assert_eq!(count.0.load(SeqCst), usize::from(j <= i), "{j} after {i} frees");
            if j > i {
                pending(f, count);
            }
        }
        // An alloc that does not wait finds nothing: the block is assigned.
        assert!(pool.alloc(100).is_err());
        held = ready(&mut line[i]);
        assert_eq!(held.len(), 4000);
    }
    drop((held, line));
    assert_eq!(pool.stats().live, 0);
    pool.check();
}

#[test]
fn a_block_in_any_cache_is_found_by_whoever_waits() {
    // One thread has the only free block in its magazine, and stays; another waits for memory of a kind that
    // shares nothing with it but the pages.
    for (there, here) in [(4096, 4096), (4096, 64), (64, 4096)] {
        let pool = one_buffer();
        let (stay, wait) = mpsc::channel::<()>();
        let (ready, is_ready) = mpsc::channel();
        let p = pool.clone();
        let idle = thread::spawn(move || {
            drop(p.alloc(there).unwrap());
            ready.send(()).unwrap();
            wait.recv().unwrap();
        });
        is_ready.recv().unwrap();
        assert_eq!(pool.alloc_wait(here, LONG).unwrap().len(), here);
        stay.send(()).unwrap();
        idle.join().unwrap();
    }
}

#[test]
fn a_free_on_any_thread_wakes_a_waiter_on_any_other() {
    let pool = one_buffer();
    for on_fresh_thread in [false, true] {
        for fast in [false, true] {
            let held = pool.alloc(4096).unwrap();
            if fast {
                // This thread's gate is open until the waiter closes it.
                drop(pool.alloc(64));
            }
            let p = pool.clone();
            let waiter = thread::spawn(move || p.alloc_wait(4096, LONG).unwrap().len());
            until_waiting(&pool, 1);
            if on_fresh_thread {
                thread::spawn(move || drop(held)).join().unwrap();
            } else {
                drop(held);
            }
            assert_eq!(waiter.join().unwrap(), 4096);
        }
    }
    pool.check();
}

#[test]
fn what_a_thread_leaves_behind_is_for_those_who_wait() {
    thread_local! {
        static LATE: std::cell::RefCell<Option<Buf>> = const { std::cell::RefCell::new(None) };
    }
    let pool = one_buffer();
    let (go, gone) = mpsc::channel::<()>();
    let (has, it_has) = mpsc::channel();
    let p = pool.clone();
    let thread = thread::spawn(move || {
        let buf = p.alloc(4096).unwrap();
        // Dropped by a destructor, perhaps after the thread's magazines are gone.
        LATE.with(|l| *l.borrow_mut() = Some(buf));
        has.send(()).unwrap();
        gone.recv().unwrap();
    });
    it_has.recv().unwrap();
    let future = &mut pool.alloc_async(4096);
    pending(future, &Arc::default());
    go.send(()).unwrap();
    thread.join().unwrap();
    drop(ready(future));
}

#[test]
fn a_cancelled_waiter_passes_its_turn_on() {
    let pool = one_buffer();
    let held = pool.alloc(4096).unwrap();
    let count: Arc<Count> = Arc::default();
    let mut line: Vec<_> = (0..4).map(|_| pool.alloc_async(4096)).collect();
    line.iter_mut().for_each(|f| pending(f, &count));
    // One that stands in line, then one that has a block already and never looked.
    drop(line.remove(1));
    drop(held);
    assert_eq!(count.0.load(SeqCst), 1);
    drop(line.remove(0));
    assert_eq!(count.0.load(SeqCst), 2, "the next has it now");
    drop(ready(&mut line[0]));
    drop(ready(&mut line[1]));
    // And the last, with nobody behind.
    let held = pool.alloc(4096).unwrap();
    let mut last = pool.alloc_async(4096);
    pending(&mut last, &count);
    drop(held);
    drop(last);
    drop(pool.alloc(4096).unwrap());
    pool.check();
    assert_eq!(pool.stats().live, 0);
}

#[test]
fn one_buffer_between_eight_waiters_and_a_ninth_thread() {
    // 10,000 rounds on each kind of waiter; who waits gives up at random.
    let rounds = scaled(10_000);
    let pool = one_buffer();
    let done = AtomicBool::new(false);
    let (served, gave_up) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let inside = AtomicBool::new(false);
    // Whoever has the buffer is alone with it.
    let use_it = |buf: &mut Buf| {
        assert!(!inside.swap(true, SeqCst), "two have the only buffer");
        buf[0] = buf[0].wrapping_add(1);
        assert!(inside.swap(false, SeqCst));
        served.fetch_add(1, SeqCst);
    };
    thread::scope(|s| {
        let waiters: Vec<_> = (0..8u64)
            .map(|i| {
                let (pool, done, gave_up, use_it) = (&pool, &done, &gave_up, &use_it);
                s.spawn(move || {
                    let mut rng = Rng(i);
                    while !done.load(SeqCst) {
                        match rng.below(8) {
                            // A future that is dropped in line, or served and dropped unseen.
                            0 => {
                                let mut future = pool.alloc_async(4096);
                                let count = Arc::default();
                                let polled = poll(&mut future, &count);
                                for _ in 0..rng.below(3) {
                                    thread::yield_now();
                                }
                                if let Poll::Ready(buf) = polled {
                                    use_it(&mut buf.unwrap());
                                }
                                gave_up.fetch_add(1, SeqCst);
                            }
                            // A short time-out.
                            1 => {
                                let timeout = Duration::from_micros(rng.below(60) as u64);
                                match pool.alloc_wait(4096, timeout) {
                                    Ok(mut buf) => use_it(&mut buf),
                                    Err(AllocError::TimedOut { .. }) => {
                                        gave_up.fetch_add(1, SeqCst);
                                    }
                                    Err(e) => panic!("{e}"),
                                }
                            }
                            2..5 => use_it(&mut block_on(pool.alloc_async(3900)).unwrap()),
                            _ => use_it(&mut pool.alloc_wait(4096 - rng.below(400), LONG).unwrap()),
                        }
                    }
                })
            })
            .collect();
        // The ninth takes and frees like the others, and frees some on a thread of its own.
        let ninth = s.spawn(|| {
            for round in 0..rounds {
                let mut buf = pool.alloc_wait(4096, LONG).unwrap();
                use_it(&mut buf);
                if round % 64 == 0 {
                    thread::spawn(move || drop(buf)).join().unwrap();
                }
            }
            done.store(true, SeqCst);
        });
        ninth.join().unwrap();
        waiters.into_iter().for_each(|w| w.join().unwrap());
    });
    assert!(served.into_inner() >= rounds);
    let stats = pool.stats();
    assert_eq!((stats.waiting, stats.live), (0, 0));
    drop(pool.alloc(4096).unwrap());
    pool.check();
}

#[test]
fn a_large_request_is_not_starved_by_small_ones() {
    // Four threads churn small buffers through all of the pool; who wants a large run gets it all the same.
    let pool = soft(1 << 20).build().unwrap();
    let done = AtomicBool::new(false);
    thread::scope(|s| {
        let small: Vec<_> = (0..4u64)
            .map(|i| {
                let (pool, done) = (&pool, &done);
                s.spawn(move || {
                    let mut rng = Rng(i);
                    let mut held = Vec::new();
                    while !done.load(SeqCst) {
                        if held.len() > 60 || rng.below(2) == 0 {
                            let at = rng.below(held.len().max(1));
                            if at < held.len() {
                                held.swap_remove(at);
                            }
                        } else if let Ok(buf) = pool.alloc(4096) {
                            held.push(buf);
                        }
                    }
                })
            })
            .collect();
        let large = s.spawn(|| {
            for _ in 0..scaled(200) {
                let buf = pool.alloc_wait(512 << 10, LONG).unwrap();
                assert_eq!(buf.len(), 512 << 10);
            }
            done.store(true, SeqCst);
        });
        large.join().unwrap();
        small.into_iter().for_each(|t| t.join().unwrap());
    });
    pool.check();
}

#[test]
fn large_and_small_that_wait_are_all_served() {
    let pool = soft(256 << 10).build().unwrap();
    thread::scope(|s| {
        let threads: Vec<_> = [64usize, 64, 4096, 4096, 30_000, 128 << 10, 200 << 10, 256 << 10]
            .into_iter()
            .map(|len| {
                let pool = &pool;
                s.spawn(move || {
                    for _ in 0..scaled(400) {
                        let mut buf = pool.alloc_wait(len, LONG).unwrap();
                        buf[0] = 1;
                    }
                })
            })
            .collect();
        threads.into_iter().for_each(|t| t.join().unwrap());
    });
    pool.check();
    assert_eq!(pool.stats().live, 0);
}

#[test]
fn nobody_is_passed_more_than_sixty_four_times() {
    let pool = soft(64 << 10).build().unwrap();
    // Half of the pool in one buffer: the whole cannot be had.
    let held = pool.alloc(4096).unwrap();
    let large = &mut pool.alloc_async(64 << 10);
    pending(large, &Arc::default());
    let passed = (0..1000).take_while(|_| pool.alloc(64).is_ok()).count();
    assert_eq!(passed, 64, "then what is free is kept for the one that waits");
    let error = pool.alloc(64).unwrap_err();
    assert!(error.to_string().contains("1 requests wait"), "{error}");
    let small = &mut pool.alloc_async(64);
    pending(small, &Arc::default());
    drop(held);
    let all = ready(large);
    assert_eq!(all.len(), 64 << 10);
    pending(small, &Arc::default());
    drop(all);
    drop(ready(small));
    // A request that leaves unblocks those behind it.
    let held = pool.alloc(4096).unwrap();
    let mut large = pool.alloc_async(64 << 10);
    pending(&mut large, &Arc::default());
    while pool.alloc(64).is_ok() {}
    pending(small_again(&pool).as_mut().get_mut(), &Arc::default());
    let mut small = pool.alloc_async(64);
    pending(&mut small, &Arc::default());
    drop(large);
    drop(ready(&mut small));
    drop(held);
    pool.check();
}

/// One that is dropped at once.
fn small_again(pool: &Pool) -> Pin<Box<AllocFuture<'_>>> {
    Box::pin(pool.alloc_async(64))
}

#[test]
fn batches_and_plain_allocs_work_while_others_wait() {
    let pool = soft(1 << 20).build().unwrap();
    let held = pool.alloc(4096).unwrap();
    let large = &mut pool.alloc_async(1 << 20);
    pending(large, &Arc::default());
    let mut batch = pinpool::Batch::with_capacity(32);
    assert_eq!(pool.alloc_many(&mut batch, 512, 32).unwrap(), 32);
    pool.check();
    pool.free_many(&mut batch);
    pool.trim();
    pool.check();
    drop(held);
    drop(ready(large));
    // And afterwards caches are in use again.
    drop(pool.alloc(4096).unwrap());
    drop(pool.alloc(4096).unwrap());
    assert!(pool.stats().cached > 0);
}

#[test]
fn exhausted_still_means_exhausted_while_others_begin_and_end_to_wait() {
    // One block of two is free whenever this thread asks, although another waits for both, again and again.
    let pool = soft(8 << 10).build().unwrap();
    let _held = pool.alloc(4096).unwrap();
    let done = AtomicBool::new(false);
    let failed = Mutex::new(None);
    let start = Barrier::new(2);
    thread::scope(|s| {
        let fickle = s.spawn(|| {
            start.wait();
            while !done.load(SeqCst) {
                let mut future = pool.alloc_async(8192);
                pending(&mut future, &Arc::default());
            }
        });
        let asker = s.spawn(|| {
            start.wait();
            for _ in 0..scaled(20_000) {
                // Passing is bounded for each that waits, so now and then it is its turn.
                match pool.alloc(4096) {
                    Ok(_) => {}
                    Err(AllocError::Exhausted(e)) if e.waiting > 0 => {}
                    Err(e) => {
                        if pool.stats().waiting == 0 && pool.alloc(4096).is_err() {
                            *failed.lock().unwrap() = Some(e);
                        }
                    }
                }
            }
            done.store(true, SeqCst);
        });
        asker.join().unwrap();
        fickle.join().unwrap();
    });
    assert_eq!(failed.into_inner().unwrap(), None);
    pool.check();
}

#[test]
fn who_waits_gets_what_growth_brings() {
    const MIB: usize = 1 << 20;
    let pool = soft(MIB).arena_size(MIB).max_capacity(4 * MIB).build().unwrap();
    let held: Vec<_> = (0..4).map(|_| pool.alloc_wait(MIB, LONG).unwrap()).collect();
    assert_eq!(pool.capacity(), 4 * MIB);
    assert!(matches!(pool.alloc_wait(MIB, Duration::ZERO), Err(AllocError::TimedOut { .. })));
    drop(held);
    // Two that wait at a time.
    let pool = soft(MIB).arena_size(MIB).max_capacity(3 * MIB).build().unwrap();
    let _held = pool.alloc(MIB).unwrap();
    thread::scope(|s| {
        let both: Vec<_> =
            (0..2).map(|_| s.spawn(|| pool.alloc_wait(MIB, LONG).unwrap())).collect();
        let both: Vec<_> = both.into_iter().map(|t| t.join().unwrap()).collect();
        assert_eq!(both.len(), 2);
    });
    pool.check();
}

#[test]
fn futures_may_move_between_threads() {
    fn send<T: Send>(_: &T) {}
    let pool = one_buffer();
    send(&pool.alloc_async(1));
    send(&pool.post(pool.alloc(1).unwrap(), |_, _| Err::<(), _>(())));
}

#[test]
fn a_waker_that_panics_harms_nobody() {
    struct Bad;
    impl Wake for Bad {
        fn wake(self: Arc<Self>) {
            panic!("on purpose");
        }
    }
    let pool = one_buffer();
    let held = pool.alloc(4096).unwrap();
    let mut future = pool.alloc_async(4096);
    let waker = Waker::from(Arc::new(Bad));
    assert!(Pin::new(&mut future).poll(&mut Context::from_waker(&waker)).is_pending());
    drop(held);
    drop(ready(&mut future));
    assert_eq!(pool.stats().live, 0);
}

#[test]
fn tokens_and_waiters_meet() {
    let pool = one_buffer();
    let token = pool.alloc(4096).unwrap().into_token();
    let p = pool.clone();
    let waiter = thread::spawn(move || p.alloc_wait(4096, LONG).unwrap().into_token());
    until_waiting(&pool, 1);
    drop(pool.from_token(token).unwrap());
    let next = waiter.join().unwrap();
    assert!(pool.from_token(token).is_err());
    assert_eq!(pool.from_token(next).unwrap().len(), 4096);
}
