//! The global allocator, in a process of its own. Proves: sizes in the range lie in registered memory and no
//! others do; memory goes back where it came from, whatever was attached when it was made and whoever frees it;
//! resizing over both edges of the range keeps contents and alignment; zeroed is zero; detaching and attaching
//! again; a second pool is refused.
#![cfg(all(feature = "global", feature = "fault"))]
#![allow(clippy::unwrap_used)]

mod common;

use std::{
    alloc::{GlobalAlloc, Layout, alloc, alloc_zeroed, dealloc, realloc},
    thread,
};

use common::{Rng, soft};
use parking_lot::{Mutex, MutexGuard};
use pinpool::{AttachError, PinnedAlloc, Pool};
use static_assertions::{assert_impl_all, assert_not_impl_any};

#[global_allocator]
static ALLOC: PinnedAlloc = PinnedAlloc::new().sizes(FIRST..=LAST);

const FIRST: usize = 1024;
const LAST: usize = 4 << 20;

struct World {
    pool: Pool,
    early: Mutex<Vec<Box<[u8]>>>,
}

/// Attached once; before that, boxes in the range and outside of it are made.
fn world() -> &'static World {
    // Not a lock of the standard library's: the thread sanitizer does not see those.
    static WORLD: Mutex<Option<&'static World>> = Mutex::new(None);
    WORLD.lock().get_or_insert_with(|| {
        let early: Vec<Box<[u8]>> =
            (0..200).map(|i| vec![i as u8; 1 + i * 100].into_boxed_slice()).collect();
        assert!(early.iter().all(|b| ALLOC.keys_of(b.as_ptr()).is_none()));
        assert_eq!(ALLOC.sge_of(&early[50]), None);
        let pool = soft(64 << 20).build().unwrap();
        ALLOC.attach(&pool).unwrap();
        Box::leak(Box::new(World { pool, early: Mutex::new(early) }))
    })
}

/// Tests that detach, or count, and those that rely on being served, one at a time.
fn alone() -> MutexGuard<'static, ()> {
    static ONE: Mutex<()> = Mutex::new(());
    world();
    ONE.lock()
}

fn pinned<T: ?Sized>(at: *const T) -> bool {
    let (keys, of) = (ALLOC.keys_of(at), world().pool.keys_of(at));
    assert_eq!(keys, of);
    keys.is_some()
}

#[test]
fn the_range_lies_in_registered_memory_and_nothing_else_does() {
    let _one = alone();
    for (len, there) in [
        (1, false),
        (FIRST - 1, false),
        (FIRST, true),
        (100_000, true),
        (LAST, true),
        (LAST + 1, false),
    ] {
        let v = vec![1u8; len];
        assert_eq!(pinned(v.as_ptr()), there, "{len}");
        assert_eq!(ALLOC.sge_of(&v).is_some(), there);
        assert_eq!(ALLOC.remote_of(&v).is_some(), there);
    }
    // Whole slices only: these begin and end in registered memory, and lie beyond it in between.
    let v = vec![1u8; 4096];
    let sge = ALLOC.sge_of(&v[100..200]).unwrap();
    assert_eq!((sge.addr, sge.length), (v.as_ptr() as u64 + 100, 100));
}

#[test]
fn boxes_from_before_are_freed_after() {
    let _one = alone();
    let early = std::mem::take(&mut *world().early.lock());
    assert!(early.iter().enumerate().all(|(i, b)| b.iter().all(|&x| x == i as u8)));
    let (here, there): (Vec<_>, Vec<_>) = early.into_iter().partition(|b| b.len() % 200 == 1);
    thread::spawn(move || drop(there)).join().unwrap();
    // Made before, resized now: comes into the pool if its size is in the range.
    for b in here {
        let (len, first) = (b.len(), b[0]);
        let mut v = b.into_vec();
        v.extend_from_slice(&[9; 3000]);
        assert!(v[..len].iter().all(|&x| x == first) && v[len..].iter().all(|&x| x == 9));
        assert!(pinned(v.as_ptr()));
    }
}

#[test]
fn b30_resizing_keeps_alignment_and_contents() {
    let _one = alone();
    for shift in 0..=16 {
        let align = 1usize << shift;
        for size in [8, 4096] {
            // The field's case: 8 bytes aligned to a page.
            let layout = Layout::from_size_align(size, align).unwrap();
            // SAFETY: not of size 0; freed below with the size it was last given.
            unsafe {
                let at = alloc(layout);
                assert_eq!(at as usize % align, 0);
                dealloc(at, layout);
            }
        }
        let mut layout = Layout::from_size_align(1, align).unwrap();
        // SAFETY: one allocation, always named by its last layout; no size is 0.
        unsafe {
            let mut at = alloc(layout);
            at.write(0x5a);
            for size in [3, 4097, (2 << 20) + 1, 5 << 20, 7, 1024, 1023, 70_000] {
                at = realloc(at, layout, size);
                assert_eq!(at as usize % align, 0, "{size}/{align}");
                let kept = size.min(layout.size());
                layout = Layout::from_size_align(size, align).unwrap();
                assert_eq!(pinned(at), (FIRST..=LAST).contains(&size), "{size}");
                let bytes = std::slice::from_raw_parts_mut(at, size);
                assert!(bytes[..kept].iter().enumerate().all(|(i, &b)| b == 0x5a ^ i as u8));
                bytes.iter_mut().enumerate().for_each(|(i, b)| *b = 0x5a ^ i as u8);
            }
            dealloc(at, layout);
            // Where dirty blocks were just freed.
            for size in [1, 1024, 4097, 70_000, 5 << 20] {
                let layout = Layout::from_size_align(size, align).unwrap();
                let at = alloc_zeroed(layout);
                assert_eq!(at as usize % align, 0);
                let bytes = std::slice::from_raw_parts_mut(at, size);
                assert!(bytes.iter().all(|&b| b == 0), "{size}/{align}");
                bytes.fill(0xff);
                dealloc(at, layout);
            }
        }
    }
    world().pool.check();
}

#[test]
fn memory_goes_back_where_it_came_from_on_any_thread() {
    let _one = alone();
    let (send, receive) = std::sync::mpsc::sync_channel::<Vec<u8>>(64);
    let makers: Vec<_> = (0..4u64)
        .map(|seed| {
            let send = send.clone();
            thread::spawn(move || {
                let mut rng = Rng(seed);
                for _ in 0..2_000 {
                    let len = rng.size(1, 100_000);
                    send.send(vec![len as u8; len]).unwrap();
                }
            })
        })
        .collect();
    drop(send);
    for mut v in receive {
        let len = v.len();
        assert!(v.iter().all(|&b| b == len as u8));
        assert_eq!(pinned(v.as_ptr()), len >= FIRST);
        if len % 3 == 0 {
            v.truncate(len / 3);
            v.shrink_to_fit();
            assert!(v.iter().all(|&b| b == len as u8));
        }
    }
    makers.into_iter().for_each(|m| m.join().unwrap());
    world().pool.check();
}

#[test]
fn detaching_stops_serving_and_takes_nothing_away() {
    let _one = alone();
    let before = vec![1u8; 5000];
    assert!(pinned(before.as_ptr()));
    ALLOC.detach();
    let between = vec![2u8; 5000];
    assert!(!pinned(between.as_ptr()));
    let mut moved = before.clone();
    drop(before);
    moved.resize(20_000, 1);
    assert!(!pinned(moved.as_ptr()) && moved.iter().all(|&b| b == 1));
    ALLOC.attach(&world().pool).unwrap();
    let after = vec![3u8; 5000];
    assert!(pinned(after.as_ptr()));
    drop((between, moved, after));
    world().pool.check();
}

#[test]
fn a_second_pool_is_refused_and_so_is_one_that_can_serve_nothing() {
    let _one = alone();
    let other = soft(1 << 20).build().unwrap();
    assert_eq!(ALLOC.attach(&other), Err(AttachError::Attached));
    other.close().unwrap();
    let handles = world().pool.clone();
    drop(handles);
    assert!(matches!(world().pool.clone().close(), Err(pinpool::CloseError::Shared(_))));

    let small = soft(64 << 10).build().unwrap();
    let large: PinnedAlloc = PinnedAlloc::new().sizes(1 << 20..=2 << 20);
    let refused = large.attach(&small);
    assert_eq!(refused, Err(AttachError::Sizes { first: 1 << 20, max_len: 64 << 10 }));
    assert!(refused.unwrap_err().to_string().contains("1048576"));
    #[allow(clippy::reversed_empty_ranges)]
    let nothing: PinnedAlloc = PinnedAlloc::new().sizes(2..=1);
    assert!(nothing.attach(&small).is_err());
    small.close().unwrap();
}

#[test]
fn an_allocator_that_is_not_the_global_one_works_by_itself() {
    let _one = alone();
    let pool = soft(1 << 20).build().unwrap();
    static OWN: PinnedAlloc = PinnedAlloc::new().sizes(1..=usize::MAX);
    let own = &OWN;
    let layout = Layout::from_size_align(100, 8).unwrap();
    // SAFETY: not of size 0; each is freed once with its layout, by the allocator that it came from.
    unsafe {
        let early = own.alloc(layout);
        own.attach(&pool).unwrap();
        let late = own.alloc(layout);
        assert!(own.keys_of(early).is_none() && own.keys_of(late).is_some());
        own.dealloc(early, layout);
        own.dealloc(late, layout);
    }
    pool.check();
    assert_eq!(pool.stats().live_buffers, 0);
    assert_eq!(own.overflows(), 0);
}

assert_impl_all!(PinnedAlloc: Send, Sync);
assert_impl_all!(AttachError: Send, Sync, std::error::Error);
assert_not_impl_any!(PinnedAlloc<std::cell::Cell<u8>>: Sync);
assert_not_impl_any!(PinnedAlloc<std::rc::Rc<u8>>: Send, Sync);
assert_not_impl_any!(PinnedAlloc: Clone);
