//! The pool on the software device. Proves: buffers are distinct, aligned, in one region (P3), carry
//! keys that work; look-ups; the books (P5); raw pointers; batches; lengths at every edge.
#![cfg(feature = "fault")]
#![allow(clippy::unwrap_used)]

mod common;

use std::{alloc::Layout, collections::HashSet};

use common::{Rng, soft};
use pinpool::{AllocError, Batch, FreeError, PageSize, Pages};

#[test]
fn keys_work_on_the_device_and_differ() {
    let device = pinpool::Device::soft();
    let pool = soft(4 << 20).device(device.clone()).build().unwrap();
    let mut buf = pool.alloc(10_000).unwrap();
    buf.fill(7);
    let (sge, remote) = (buf.sge(), buf.remote().unwrap());
    assert_ne!(sge.lkey.get(), remote.rkey.get());
    let peer = device.as_soft().unwrap();
    let mut got = vec![0; 10_000];
    // SAFETY: here and below, nothing refers to the bytes while the calls run.
    unsafe { peer.read(remote.rkey, remote.addr, &mut got) }.unwrap();
    assert!(got.iter().all(|&b| b == 7));
    // SAFETY: as above.
    unsafe { peer.write(remote.rkey, remote.addr + 9_999, &[9]) }.unwrap();
    assert_eq!(buf[9_999], 9);
    peer.check_local(&sge, true).unwrap();
    let (start, len) = (pool.arenas()[0].addr.as_ptr() as u64, pool.arenas()[0].len as u64);
    // SAFETY: as above.
    let past = unsafe { peer.write(remote.rkey, start + len - 1, &[1, 2]) };
    assert!(past.is_err(), "one byte past the arena");
    // SAFETY: as above.
    let atomic = unsafe { peer.fetch_add(remote.rkey, remote.addr, 1) };
    assert!(atomic.is_err(), "no atomic right was asked for");
    drop((buf, pool));
    assert_eq!(peer.regions(), 0);
    // SAFETY: as above.
    let gone = unsafe { peer.read(remote.rkey, remote.addr, &mut got) };
    assert!(gone.is_err(), "the key is gone with its pool");
}

#[test]
fn zero_based_addresses_are_offsets() {
    let device = pinpool::Device::soft();
    let access =
        pinpool::Access::LOCAL_WRITE | pinpool::Access::REMOTE_WRITE | pinpool::Access::ZERO_BASED;
    let pool =
        soft(8 << 20).device(device.clone()).access(access).arena_size(4 << 20).build().unwrap();
    let bufs: Vec<_> = std::iter::from_fn(|| pool.alloc(1 << 20).ok()).collect();
    assert_eq!(bufs.len(), 8);
    for buf in &bufs {
        let remote = buf.remote().unwrap();
        assert_eq!(remote.addr, buf.sge().addr);
        assert!(remote.addr < 4 << 20, "an offset into the arena");
        // SAFETY: nothing refers to the bytes while the call runs.
        unsafe { device.as_soft().unwrap().write(remote.rkey, remote.addr, b"offset") }.unwrap();
        assert_eq!(&buf[..6], b"offset");
    }
}

#[test]
fn lengths_at_every_edge_fit_and_are_aligned() {
    let pool = soft(32 << 20).build().unwrap();
    let mut lens = vec![0, 1];
    for shift in 6..=24 {
        lens.extend([(1 << shift) - 1, 1 << shift, (1 << shift) + 1]);
    }
    for len in lens {
        let mut buf = pool.alloc(len).unwrap();
        assert_eq!(buf.len(), len);
        assert!(buf.capacity() >= len.max(1));
        assert!(len < 1024 || (buf.capacity() - len) * 8 <= buf.capacity(), "{len}");
        let addr = buf.as_ptr() as usize;
        assert_eq!(addr % 64, 0);
        if buf.capacity().is_multiple_of(4096) {
            assert_eq!(addr % 4096, 0);
        }
        buf.fill(0xa5);
        let cap = buf.capacity();
        buf.set_len(cap).unwrap();
        assert!(buf.set_len(cap + 1).is_err());
        buf.fill(0x5a);
        assert_eq!(pool.keys_of(&buf[cap - 1]), Some(buf.keys()));
    }
    assert_eq!(pool.stats().live, 0);
    pool.check();
}

#[test]
fn layouts_are_aligned_up_to_the_arena() {
    let pool = soft(16 << 20).build().unwrap();
    let coloured = soft(16 << 20).colouring(true).build().unwrap();
    for pool in [&pool, &coloured] {
        for shift in 0..=22 {
            for size in [1, 100, 5000, 70_000] {
                let buf =
                    pool.alloc_layout(Layout::from_size_align(size, 1 << shift).unwrap()).unwrap();
                assert_eq!(buf.as_ptr() as usize % (1 << shift), 0);
                assert!(buf.capacity() >= size);
            }
        }
        let too_much = Layout::from_size_align(1, 1 << 25).unwrap();
        assert!(matches!(pool.alloc_layout(too_much), Err(AllocError::Alignment { .. })));
        pool.check();
    }
}

#[test]
fn look_ups_know_their_own_and_nothing_else() {
    let pool = soft(2 << 20).build().unwrap();
    let other = soft(2 << 20).build().unwrap();
    let buf = pool.alloc(100).unwrap();
    let arena = &pool.arenas()[0];
    let on_stack = 0u8;
    assert_eq!(pool.keys_of(buf.as_ptr()), Some(buf.keys()));
    assert_eq!(pool.keys_of(other.alloc(1).unwrap().as_ptr()), None);
    assert_eq!(pool.keys_of(&on_stack), None);
    assert_eq!(pool.keys_of(std::ptr::null::<u8>()), None);
    assert_eq!(pool.keys_of(arena.addr.as_ptr().wrapping_add(arena.len)), None);
    assert_eq!(pool.keys_of(arena.addr.as_ptr().wrapping_sub(1)), None);
    assert_eq!(pool.keys_of(usize::MAX as *const u8), None);
}

#[test]
fn zeroed_is_zero_on_reuse() {
    let pool = soft(1 << 20).build().unwrap();
    for _ in 0..3 {
        let mut buf = pool.alloc_zeroed(5000).unwrap();
        assert!(buf.iter().all(|&b| b == 0));
        buf.fill(0xff);
    }
}

#[test]
fn the_books_balance_and_exhaustion_says_how() {
    let pool = soft(4 << 20).build().unwrap();
    let mut out = Vec::new();
    let error = loop {
        match pool.alloc(10_000) {
            Ok(b) => out.push(b),
            Err(e) => break e,
        }
        if out.len() % 50 == 0 {
            pool.check();
        }
    };
    let AllocError::Exhausted(e) = &error else { panic!("{error}") };
    assert_eq!((e.asked, e.capacity, e.live_buffers), (10_000, 4 << 20, out.len()));
    assert!(e.live as f64 > 0.97 * e.capacity as f64, "{error}");
    let text = error.to_string();
    for number in ["10000", "4 MiB", &out.len().to_string()] {
        assert!(text.contains(number), "{text}");
    }
    out.truncate(out.len() / 2);
    pool.check();
    out.clear();
    pool.check();
    assert_eq!(pool.stats().live, 0);
    pool.trim();
    let s = pool.stats();
    assert_eq!((s.cached, s.unused, s.largest_free), (0, 4 << 20, 4 << 20));
}

#[test]
fn a_change_of_sizes_strands_nothing() {
    let pool = soft(16 << 20).build().unwrap();
    let fill = |len: usize| {
        let out: Vec<_> = std::iter::from_fn(|| pool.alloc(len).ok()).collect();
        pool.check();
        out.len() * len
    };
    for len in [4096, 1 << 20, 64, 48 << 10, 4 << 20, 16 << 20, 4096] {
        assert!(fill(len) as f64 > 0.96 * (16 << 20) as f64, "{len}");
    }
    let mut rng = Rng(1);
    let mut mixed = Vec::new();
    while let Ok(b) = pool.alloc(rng.size(64, 1 << 20)) {
        mixed.push(b);
    }
    drop(mixed);
    // The first may be a block that lay in the cache, at any place; all others are placed anew.
    assert!(fill(1 << 20) >= 15 << 20);
}

#[test]
fn raw_pointers_come_back_once() {
    let pool = soft(2 << 20).build().unwrap();
    let other = soft(2 << 20).build().unwrap();
    for len in [100, 4096, 300_000] {
        let raw = pool.alloc(len).unwrap().into_raw().as_ptr();
        // SAFETY: nobody else has the pointer.
        unsafe {
            assert!(matches!(other.free_raw(raw), Err(FreeError::Foreign { .. })));
            assert!(matches!(pool.free_raw(raw.add(1)), Err(FreeError::Interior { .. })));
            assert_eq!(pool.free_raw(std::ptr::null_mut()), Err(FreeError::Null));
            let buf = pool.from_raw(raw).unwrap();
            assert!(buf.len() >= len);
            assert!(
                matches!(pool.free_raw(raw), Err(FreeError::NotOut { .. })),
                "owned by a handle"
            );
            drop(buf);
            assert!(matches!(pool.free_raw(raw), Err(FreeError::NotOut { .. })), "twice");
        }
    }
    let held = pool.alloc(64).unwrap();
    // SAFETY: the call must refuse; nothing is taken.
    let refused = unsafe { pool.free_raw(held.as_ptr().cast_mut()) };
    assert!(matches!(refused, Err(FreeError::NotOut { .. })), "a handle owns it");
    pool.check();
}

#[test]
fn batches_fill_and_free() {
    let pool = soft(16 << 20).build().unwrap();
    let mut batch = Batch::with_capacity(700);
    for len in [64, 4096, 100_000, 5 << 20] {
        let n = pool.alloc_many(&mut batch, len, 700).unwrap();
        assert!(n == 700 || n * len > 13 << 20, "{n} of {len}");
        assert_eq!(batch.len(), n);
        let addrs: HashSet<_> = batch.sges().map(|s| s.addr).collect();
        assert_eq!(addrs.len(), n);
        assert_eq!(pool.stats().live_buffers, n);
        let one = batch.pop().unwrap();
        assert_eq!(one.len(), len);
        drop(one);
        pool.free_many(&mut batch);
        pool.check();
        assert_eq!(pool.stats().live, 0);
    }
    let all: Vec<_> = std::iter::from_fn(|| pool.alloc(1 << 20).ok()).collect();
    assert!(matches!(pool.alloc_many(&mut batch, 1 << 20, 4), Err(AllocError::Exhausted(_))));
    drop(all);
}

#[test]
fn coloured_blocks_spread_over_cache_sets() {
    let pool = soft(8 << 20).colouring(true).build().unwrap();
    let bufs: Vec<_> = (0..64).map(|_| pool.alloc(4096).unwrap()).collect();
    let sets: HashSet<_> = bufs.iter().map(|b| b.as_ptr() as usize / 64 % 64).collect();
    assert!(sets.len() >= 16, "{} sets", sets.len());
    pool.check();
}

#[test]
fn side_tables_stay_below_half_a_percent_at_4_kib() {
    let pool = soft(64 << 20).build().unwrap();
    let all: Vec<_> = std::iter::from_fn(|| pool.alloc(4096).ok()).collect();
    assert_eq!(all.len(), (64 << 20) / 4096);
    drop(all);
    let s = pool.stats();
    assert!(s.table_bytes * 200 <= s.capacity, "{} of {}", s.table_bytes, s.capacity);
}

#[test]
fn hugepages_are_taken_whole_or_reported() {
    let pool = soft(3 << 20).pages(Pages::Prefer(PageSize::Huge2M)).build().unwrap();
    let arena = &pool.arenas()[0];
    assert_eq!(arena.len, 4 << 20, "whole hugepages, whichever pages were got");
    assert!([4096, 2 << 20].contains(&arena.page_size));
}

#[test]
fn elements_of_parts_stay_inside() {
    let pool = soft(64 << 10).build().unwrap();
    let buf = pool.alloc(100).unwrap();
    let part = buf.sge_range(10, 90).unwrap();
    assert_eq!((part.addr, part.length), (buf.sge().addr + 10, 90));
    assert!(buf.sge_range(0, 100).is_some() && buf.sge_range(100, 0).is_some());
    for (offset, len) in [(1, 100), (101, 0), (usize::MAX, 1), (0, u32::MAX)] {
        assert_eq!(buf.sge_range(offset, len), None, "{offset}, {len}");
    }
}

#[test]
fn a_batch_never_frees_what_it_holds_unasked() {
    let (pool, other) = (soft(1 << 20).build().unwrap(), soft(1 << 20).build().unwrap());
    let mut batch = Batch::with_capacity(8);
    assert_eq!(pool.alloc_many(&mut batch, 4096, 5).unwrap(), 5);
    let in_use = AllocError::BatchInUse { held: 5, len: 4096 };
    assert_eq!(pool.alloc_many(&mut batch, 64, 1), Err(in_use.clone()));
    assert_eq!(other.alloc_many(&mut batch, 4096, 1), Err(in_use));
    assert_eq!(pool.stats().live_buffers, 5);
    assert_eq!(pool.alloc_many(&mut batch, 4096, 0), Ok(0));
    assert_eq!(pool.alloc_many(&mut batch, 4096, 9), Ok(3), "what it has room for");
    batch.free();
    assert_eq!(other.alloc_many(&mut batch, 64, 1), Ok(1), "empty, it takes on another pool");
}

#[test]
fn filling_a_batch_ends() {
    for len in [3072, 5000, 9000, 10_000] {
        let pool = soft(1 << 20).build().unwrap();
        let mut batch = Batch::with_capacity(4096);
        let error = loop {
            match pool.alloc_many(&mut batch, len, 16) {
                Ok(n) => assert!(n > 0, "{len}: nothing, and no error either"),
                Err(e) => break e,
            }
        };
        let expected = matches!(error, AllocError::Exhausted(_) | AllocError::BatchMixed { .. });
        assert!(expected, "{error}");
        let alone: Vec<_> = std::iter::from_fn(|| pool.alloc(len).ok()).collect();
        assert!(matches!(pool.alloc(len), Err(AllocError::Exhausted(_))));
        drop(alone);
        pool.check();
    }
}

#[test]
fn a_larger_block_serves_when_nothing_else_is_left() {
    // Full of blocks of 8 KiB, every second one free: no page is, and no slab can be cut.
    let pool = soft(16 << 20).build().unwrap();
    let mut held: Vec<_> = std::iter::from_fn(|| pool.alloc(8192).ok()).collect();
    let mut n = 0;
    held.retain(|_| {
        n += 1;
        n % 2 == 0
    });
    for (size, align) in [(4096, 1), (4096, 4096), (2048, 2048), (1000, 1024), (100, 128)] {
        let layout = Layout::from_size_align(size, align).unwrap();
        let buf = pool.alloc_layout(layout).unwrap_or_else(|e| panic!("{layout:?}: {e}"));
        assert_eq!((buf.capacity(), buf.as_ptr() as usize % align), (8192, 0));
    }
    // In an arena of one page a class whose slab is longer than that has blocks of others to use.
    let pool = soft(4096).build().unwrap();
    let live = pool.alloc(2048).unwrap();
    for len in [1024, 1025, 1500, 1793, 2048] {
        assert!(pool.alloc(len).is_ok(), "{len}");
    }
    drop(live);
}
