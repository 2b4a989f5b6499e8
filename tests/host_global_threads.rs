//! The global allocator and the ends of threads and of the process. Proves: a thousand threads with
//! destructors of thread-locals that allocate, free and resize, in any order to the pool's own; blocks that
//! outlive their thread; handlers that run after `main`.
#![cfg(all(feature = "global", feature = "fault"))]
#![allow(clippy::unwrap_used)]

mod common;

use std::{
    cell::RefCell,
    process::Command,
    sync::{
        OnceLock,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    thread,
};

use common::soft;
use parking_lot::Mutex;
use pinpool::{PinnedAlloc, Pool};

#[global_allocator]
static ALLOC: PinnedAlloc = PinnedAlloc::new().sizes(64..=usize::MAX);

fn pool() -> &'static Pool {
    static POOL: OnceLock<Pool> = OnceLock::new();
    POOL.get_or_init(|| {
        let pool = soft(256 << 20).build().unwrap();
        ALLOC.attach(&pool).unwrap();
        pool
    })
}

fn pinned(v: &[u8]) -> bool {
    ALLOC.keys_of(v.as_ptr()).is_some()
}

static ENDED: AtomicUsize = AtomicUsize::new(0);

/// Allocates, resizes and frees when its thread ends.
struct AtEnd(Vec<u8>);

impl Drop for AtEnd {
    fn drop(&mut self) {
        assert!(self.0.iter().all(|&b| b == 7));
        let mut v = vec![8u8; 3000];
        v.extend_from_slice(&self.0);
        self.0.extend_from_slice(&v);
        let text = format!("{} bytes, {:?}", self.0.len(), &self.0[..4]);
        assert!(text.starts_with("9000 bytes, [7"));
        // Pinned all the same, if the pool has room: through the slabs' lock once the magazines are gone.
        assert!(pinned(&v) && pinned(&self.0));
        ENDED.fetch_add(1, Relaxed);
    }
}

thread_local! {
    // One that is made before the thread first uses the pool, and so destroyed after the pool's, and one that
    // is made after.
    static FIRST: RefCell<Option<AtEnd>> = const { RefCell::new(None) };
    static SECOND: RefCell<Option<AtEnd>> = const { RefCell::new(None) };
}

#[test]
fn a_thousand_threads_with_destructors_that_allocate() {
    let pool = pool();
    // Under a sanitizer or emulation, fewer at a time, as many in all.
    const AT_ONCE: usize = 100;
    // A lock whose waiting threads are kept in a table, which is locked as a whole while it grows: that it is
    // allocated from the pool meanwhile must not end in waiting for it.
    let left = Mutex::new(Vec::new());
    for _ in 0..1_000 / AT_ONCE {
        thread::scope(|s| {
            let threads: Vec<_> = (0..AT_ONCE)
                .map(|i| {
                    let left = &left;
                    thread::Builder::new()
                        .stack_size(256 << 10)
                        .spawn_scoped(s, move || {
                            FIRST.with(|f| *f.borrow_mut() = None);
                            let v = vec![7u8; 3000];
                            assert!(pinned(&v));
                            FIRST.with(|f| *f.borrow_mut() = Some(AtEnd(v)));
                            SECOND.with(|f| *f.borrow_mut() = Some(AtEnd(vec![7u8; 3000])));
                            let mine: Vec<Vec<u8>> =
                                (0..20).map(|n| vec![i as u8; 64 << (n % 8)]).collect();
                            left.lock().extend(mine);
                        })
                        .unwrap()
                })
                .collect();
            // Joined by hand, so that the sanitizers see it.
            threads.into_iter().for_each(|t| t.join().unwrap());
        });
        let outlived = std::mem::take(&mut *left.lock());
        assert_eq!(outlived.len(), 20 * AT_ONCE);
        assert!(outlived.iter().all(|v| v.iter().all(|b| *b == v[0]) && pinned(v)));
    }
    assert_eq!(ENDED.load(Relaxed), 2_000);
    assert_eq!(ALLOC.overflows(), 0);
    pool.check();
}

static LATE: Mutex<Option<Vec<u8>>> = Mutex::new(None);

extern "C" fn at_exit() {
    // After the main thread's thread-locals are gone.
    let made = LATE.lock().take().unwrap();
    assert!(pinned(&made) && made.iter().all(|&b| b == 5));
    let mut v = made.clone();
    drop(made);
    v.resize(100_000, 6);
    let said = format!("{} bytes in an exit handler\n", v.len());
    assert!(pinned(&v));
    drop(v);
    // SAFETY: writes the bytes of a string that lives across the call.
    unsafe { libc::write(1, said.as_ptr().cast(), said.len()) };
    thread::spawn(|| vec![1u8; 5000]).join().unwrap();
}

#[test]
fn a_process_ends_with_memory_out_and_handlers_that_allocate() {
    if std::env::var_os("PINPOOL_ENDS").is_some() {
        pool();
        *LATE.lock() = Some(vec![5u8; 5000]);
        FIRST.with(|f| *f.borrow_mut() = Some(AtEnd(vec![7u8; 3000])));
        // SAFETY: the handler is a function that does not unwind unless the test fails.
        assert_eq!(unsafe { libc::atexit(at_exit) }, 0);
        std::process::exit(0);
    }
    let name = "a_process_ends_with_memory_out_and_handlers_that_allocate";
    let out = Command::new(std::env::current_exe().unwrap())
        .args([name, "--exact", "--nocapture", "--test-threads=1"])
        .env("PINPOOL_ENDS", "1")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&out.stdout);
    assert!(out.status.success() && said.contains("100000 bytes in an exit handler"), "{out:?}");
}
