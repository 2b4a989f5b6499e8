//! The seam, stood in by something other than verbs: arenas as the fixed buffers of an io_uring.
//! - each arena is registered once; buffers are named by index from then on, and files written and read through
//!   them hold what was meant, from several threads, too;
//! - what the ring cannot do is refused with a reason, and nothing stays pinned;
//! - adopted and shared memory goes through the same seam.
//!
//! Where the kernel has no io_uring, or bars it, each test says so and does nothing.
#![allow(clippy::unwrap_used)]

mod common;
#[path = "../examples/io_uring/ring.rs"]
mod ring;

use std::{
    fs::File,
    io::{self, Write},
    os::unix::fs::FileExt,
    sync::Mutex,
    thread,
};

use common::{Rng, status_kib};
use pinpool::{Access, Backing, BuildError, Builder, Pages, Pool};
use ring::Ring;

const MIB: usize = 1 << 20;

/// `VmPin` is counted for the process.
static ALONE: Mutex<()> = Mutex::new(());

/// A ring; `None`, and a word, where there can be none.
fn ring(slots: u16) -> Option<Ring> {
    match Ring::new(slots) {
        Ok(ring) => Some(ring),
        Err(e) if matches!(e.raw_os_error(), Some(libc::ENOSYS | libc::EPERM)) => {
            assert!(std::env::var_os("PINPOOL_GUEST").is_none(), "the guest's kernel has it: {e}");
            // Past the test runner, which keeps what is printed to itself.
            let _ = writeln!(io::stderr(), "SKIPPED: this kernel gives no io_uring: {e}");
            None
        }
        Err(e) => panic!("{e}"),
    }
}

fn on(ring: &Ring, capacity: usize) -> Builder {
    Pool::builder().device(ring.device()).capacity(capacity).pages(Pages::Base)
}

fn tempfile() -> File {
    static NUMBER: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
    let n = NUMBER.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    let path = std::env::temp_dir().join(format!("pinpool-uring-{}-{n}", std::process::id()));
    let file = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
    std::fs::remove_file(path).unwrap();
    file
}

/// Writes from one buffer and reads into another, each checked against the file's own contents.
fn there_and_back(ring: &Ring, pool: &Pool, file: &File, rng: &mut Rng, at: u64) {
    let len = rng.size(1, 200_000);
    let (mut from, mut into) = (pool.alloc(len).unwrap(), pool.alloc(len).unwrap());
    from.iter_mut().for_each(|b| *b = rng.next() as u8);
    into.fill(0);
    assert_eq!(ring.write(file, &from, at).unwrap(), len);
    let mut plain = vec![0; len];
    file.read_exact_at(&mut plain, at).unwrap();
    assert!(plain == from[..], "what was written");
    plain.iter_mut().for_each(|b| *b = !*b);
    file.write_all_at(&plain, at).unwrap();
    assert_eq!(ring.read(file, &mut into, at).unwrap(), len);
    assert!(plain == into[..], "what was read");
}

#[test]
fn files_are_written_and_read_through_arenas_registered_once() {
    let _alone = ALONE.lock().unwrap_or_else(|e| e.into_inner());
    let Some(ring) = ring(4) else { return };
    let pinned = status_kib("VmPin");
    let pool = on(&ring, 4 * MIB).arena_size(MIB).build().unwrap();
    assert_eq!(status_kib("VmPin"), pinned + 4096);
    let file = tempfile();
    let mut rng = Rng(1);
    let mut held = Vec::new();
    for i in 0..60u64 {
        there_and_back(&ring, &pool, &file, &mut rng, i * 1000);
        if i % 8 == 0 {
            // Moves on to other arenas.
            held.push(pool.alloc(300_000).unwrap());
        }
    }
    let mut slots: Vec<_> = held.iter().map(|b| b.lkey().get()).collect();
    slots.sort_unstable();
    slots.dedup();
    assert!(slots.len() > 1 && slots.iter().all(|&s| s < 4), "{slots:?}");
    for buf in &held {
        assert!(buf.remote().is_none());
        assert_eq!(ring.write(&file, buf, 0).unwrap(), 300_000);
    }
    assert_eq!((pool.stats().register_calls, pool.arenas().len()), (4, 4));
    drop(held);
    pool.close().unwrap();
    assert_eq!(status_kib("VmPin"), pinned);
    // The slots are free for another.
    let pool = on(&ring, 2 * MIB).arena_size(MIB).build().unwrap();
    there_and_back(&ring, &pool, &file, &mut rng, 0);
}

#[test]
fn threads_share_a_ring_and_a_pool() {
    let _alone = ALONE.lock().unwrap_or_else(|e| e.into_inner());
    let Some(ring) = ring(2) else { return };
    let pool = on(&ring, 8 * MIB).arena_size(4 * MIB).build().unwrap();
    thread::scope(|scope| {
        for t in 1..=4 {
            let (ring, pool) = (&ring, pool.clone());
            scope.spawn(move || {
                let (mut rng, file) = (Rng(t), tempfile());
                (0..40).for_each(|i| there_and_back(ring, &pool, &file, &mut rng, i * 777));
            });
        }
    });
    assert_eq!(pool.stats().live, 0);
    pool.close().unwrap();
}

#[test]
fn what_the_ring_cannot_do_is_refused() {
    let _alone = ALONE.lock().unwrap_or_else(|e| e.into_inner());
    let Some(ring) = ring(3) else { return };
    let pinned = status_kib("VmPin");
    for access in [Access::empty(), Access::LOCAL_WRITE | Access::REMOTE_READ, Access::ZERO_BASED] {
        let e = on(&ring, MIB).access(access).build().unwrap_err();
        assert!(matches!(e, BuildError::Register { .. }), "{e}");
        assert_eq!(e.raw_os_error(), Some(libc::EINVAL));
    }
    let e = on(&ring, 4 * MIB).arena_size(MIB).build().unwrap_err();
    assert!(matches!(e, BuildError::TooManyArenas { arenas: 4, max_mr: 3, .. }), "{e}");
    let held = on(&ring, 2 * MIB).arena_size(MIB).build().unwrap();
    let e = on(&ring, 2 * MIB).arena_size(MIB).build().unwrap_err();
    assert_eq!(e.raw_os_error(), Some(libc::ENOSPC), "{e}");
    assert_eq!(status_kib("VmPin"), pinned + 2048, "the half that stood is undone");
    // A buffer of another device has no slot here.
    let other = common::soft(MIB).build().unwrap();
    let e = ring.write(&tempfile(), &other.alloc(100).unwrap(), 0).unwrap_err();
    assert_eq!(e.raw_os_error(), Some(libc::EFAULT), "{e}");
    held.close().unwrap();
    assert_eq!(status_kib("VmPin"), pinned);
}

#[test]
fn adopted_and_shared_memory_go_through_it_too() {
    let _alone = ALONE.lock().unwrap_or_else(|e| e.into_inner());
    let Some(ring) = ring(4) else { return };
    let mut map = memmap2::MmapMut::map_anon(MIB).unwrap();
    // SAFETY: the mapping is the pool's until that is closed, below.
    let adopting = unsafe { Pool::builder().adopt(map.as_mut_ptr(), map.len()) };
    let adopted = adopting.device(ring.device()).build().unwrap();
    let shared = on(&ring, MIB).backing(Backing::Memfd).build().unwrap();
    let joined = Pool::builder().device(ring.device()).join(shared.export().unwrap()).unwrap();
    assert_ne!(joined.arenas()[0].keys.lkey, shared.arenas()[0].keys.lkey);
    let (mut rng, file) = (Rng(9), tempfile());
    for i in 0..10 {
        there_and_back(&ring, &adopted, &file, &mut rng, i);
        there_and_back(&ring, &shared, &file, &mut rng, i);
    }
    adopted.close().unwrap();
    joined.close().unwrap();
    shared.close().unwrap();
    map.fill(1);
}
