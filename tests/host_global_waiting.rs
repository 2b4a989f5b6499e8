//! The global allocator over a pool that others wait for. Proves: what the heap gives back reaches those who
//! wait, blocking and as futures; the heap does not compete with them; a waker that takes a lock which the
//! freeing code holds does not lock up.
#![cfg(all(feature = "global", feature = "fault"))]
#![allow(clippy::unwrap_used)]

mod common;

use std::{
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering::SeqCst},
    },
    task::{Context, Poll, Wake, Waker},
    thread,
    time::Duration,
};

use common::soft;
use parking_lot::Mutex;
use pinpool::{PinnedAlloc, Pool};

#[global_allocator]
static ALLOC: PinnedAlloc = PinnedAlloc::new().sizes(4096..=usize::MAX);

static HELD: Mutex<Vec<Vec<u8>>> = Mutex::new(Vec::new());

/// Takes the lock that whoever frees may hold, and allocates.
struct Locking(AtomicU32);

impl Wake for Locking {
    fn wake(self: Arc<Self>) {
        let held = HELD.lock();
        drop(std::hint::black_box(vec![0u8; 10_000 + held.len()]));
        self.0.fetch_add(1, SeqCst);
    }
}

/// Takes all of the pool for the heap.
fn fill(pool: &Pool, held: &mut Vec<Vec<u8>>) {
    while pool.alloc(64 << 10).is_ok() {
        held.push(vec![1u8; 64 << 10]);
    }
}

fn waits(pool: &Pool) -> bool {
    pool.stats().waiting > 0
}

// One test, since the whole process shares the pool.
#[test]
fn those_who_wait_get_what_the_heap_gives_back() {
    let pool = soft(4 << 20).build().unwrap();
    ALLOC.attach(&pool).unwrap();

    fill(&pool, &mut HELD.lock());
    thread::scope(|s| {
        let waiter =
            s.spawn(|| pool.alloc_wait(1 << 20, Duration::from_secs(120)).map(|b| b.len()));
        while !waits(&pool) {
            thread::yield_now();
        }
        let mine = vec![2u8; 64 << 10];
        assert!(ALLOC.keys_of(mine.as_ptr()).is_none(), "the heap does not pass those who wait");
        HELD.lock().clear();
        assert_eq!(waiter.join().unwrap().unwrap(), 1 << 20);
    });

    fill(&pool, &mut HELD.lock());
    let waker = Arc::new(Locking(AtomicU32::new(0)));
    let std_waker = Waker::from(waker.clone());
    let mut cx = Context::from_waker(&std_waker);
    let mut future = pin!(pool.alloc_async(1 << 20));
    assert!(future.as_mut().poll(&mut cx).is_pending());
    {
        let mut held = HELD.lock();
        // Frees under the lock that the waker wants.
        held.clear();
        held.shrink_to_fit();
    }
    while waker.0.load(SeqCst) == 0 {
        thread::yield_now();
    }
    let Poll::Ready(Ok(buf)) = future.as_mut().poll(&mut cx) else { panic!("it was woken") };
    assert_eq!(buf.len(), 1 << 20);
    drop(buf);
    pool.check();
    assert_eq!(pool.stats().waiting, 0);
}
