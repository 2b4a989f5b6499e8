//! Pools as allocators. Proves: collections of the standard shape live in registered memory; blocks are as
//! long and as aligned as asked, answered with their real length, and go back where they came from whatever
//! served them; sizes change in place where the class allows it; contents survive every way of resizing;
//! a public suite passes; a model of the trait's contract holds under random calls, when memory is short too.
#![cfg(all(feature = "allocator-api2", feature = "fault"))]
#![allow(clippy::unwrap_used)]

mod common;

use std::{alloc::Layout, collections::BTreeMap, ptr::NonNull, thread};

use allocator_api2::{alloc::Allocator, boxed::Box as PoolBox, vec::Vec as PoolVec};
use common::{Rng, soft};
use hashbrown::{DefaultHashBuilder, HashMap};
use pinpool::{Buf, Pool, reach};
use proptest::prelude::*;
use static_assertions::{assert_impl_all, assert_not_impl_any};

fn layout(size: usize, align: usize) -> Layout {
    Layout::from_size_align(size, align).unwrap()
}

/// The pool is as it was built: nothing out, all merged.
fn whole(pool: &Pool) {
    pool.check();
    pool.trim();
    let stats = pool.stats();
    assert_eq!((stats.live, stats.live_buffers), (0, 0));
    assert_eq!(stats.free + stats.unused, stats.capacity);
}

#[test]
fn collections_lie_in_registered_memory() {
    let pool = soft(8 << 20).build().unwrap();
    let keys = Some(pool.arenas()[0].keys);
    let mut v: PoolVec<u8, &Pool> = PoolVec::new_in(&pool);
    for i in 0..100_000u32 {
        v.push(i as u8);
    }
    assert!(v.iter().enumerate().all(|(i, &b)| b == i as u8));
    assert_eq!(pool.keys_of(v.as_ptr()), keys);
    assert_eq!(pool.sge_of(&v).unwrap().length, 100_000);
    assert_eq!(pool.remote_of(&v).map(|r| r.addr), Some(v.as_ptr() as u64));

    let b: PoolBox<[u64], &Pool> = {
        let mut v = PoolVec::with_capacity_in(1000, &pool);
        v.extend(0..1000);
        v.into_boxed_slice()
    };
    assert_eq!((b[999], pool.keys_of(&*b)), (999, keys));

    let mut map: HashMap<u32, PoolVec<u8, &Pool>, DefaultHashBuilder, &Pool> =
        HashMap::new_in(&pool);
    for i in 0..1000 {
        let mut value = PoolVec::new_in(&pool);
        value.resize(1 + i as usize % 300, i as u8);
        map.insert(i, value);
    }
    for (k, value) in &map {
        assert!(value.iter().all(|&b| b == *k as u8));
        assert_eq!(pool.keys_of(value.as_ptr()), keys);
        assert_eq!(pool.keys_of(std::ptr::from_ref(k)), keys, "the table itself");
    }
    assert_eq!(pool.stats().live_buffers, 1003);
    drop((v, b, map));
    whole(&pool);
}

#[test]
fn an_owned_handle_keeps_the_pool() {
    let pool = soft(1 << 20).build().unwrap();
    let mut v: PoolVec<u64, Pool> = PoolVec::new_in(pool.clone());
    v.extend(0..100);
    drop(pool);
    let v = thread::spawn(move || {
        let mut more = v.clone();
        more.extend(100..1000);
        drop(v);
        more
    })
    .join()
    .unwrap();
    assert!(v.iter().copied().eq(0..1000));
    assert!(v.allocator().keys_of(v.as_ptr()).is_some());
    let pool = v.allocator().clone();
    drop(v);
    whole(&pool);
    pool.close().unwrap();
}

#[test]
fn nothing_is_taken_for_nothing() {
    let pool = soft(1 << 20).build().unwrap();
    for align in [1, 8, 4096, 1 << 30] {
        let nothing = pool.allocate(layout(0, align)).unwrap();
        assert_eq!((nothing.len(), nothing.cast::<u8>().as_ptr() as usize % align), (0, 0));
        // SAFETY: allocated just now with this layout; then grown and shrunk as the contract allows.
        unsafe {
            assert_eq!(pool.stats().live_buffers, 0);
            if align <= 4096 {
                let some = pool.grow(nothing.cast(), layout(0, align), layout(10, align)).unwrap();
                assert!(some.len() >= 10 && pool.stats().live_buffers == 1);
                let none = pool.shrink(some.cast(), layout(10, align), layout(0, align)).unwrap();
                assert_eq!((none.len(), pool.stats().live_buffers), (0, 0));
                pool.deallocate(none.cast(), layout(0, align));
            }
        }
    }
    whole(&pool);
}

#[test]
fn blocks_are_answered_with_their_real_length() {
    let pool = soft(8 << 20).build().unwrap();
    for (size, align, len) in [
        (1, 1, 64),
        (65, 8, 128),
        (4096, 1, 4096),
        (4097, 64, 4608),
        (1, 4096, 4096),
        (33 << 10, 1, 36 << 10),
    ] {
        let block = pool.allocate(layout(size, align)).unwrap();
        assert_eq!(block.len(), len, "{size}/{align}");
        let first = block.cast::<u8>();
        // SAFETY: the block is this test's and `len` bytes long; any size up to that fits it.
        unsafe {
            first.write_bytes(0xa5, len);
            pool.deallocate(first, layout(len, align));
        }
        pool.check();
    }
    assert!(pool.allocate(layout((8 << 20) + 1, 1)).is_err());
    assert!(pool.allocate(layout(1, 16 << 20)).is_err());
    whole(&pool);
}

#[test]
fn sizes_change_in_place_where_the_class_allows_it() {
    let pool = soft(8 << 20).build().unwrap();
    let a = pool.allocate(layout(4097, 1)).unwrap().cast::<u8>();
    // SAFETY: a block of this test's; each call passes the layout of the one before.
    unsafe {
        let b = pool.grow(a, layout(4097, 1), layout(4608, 1)).unwrap().cast::<u8>();
        assert_eq!(a, b, "the same class");
        let c = pool.shrink(b, layout(4608, 1), layout(4100, 1)).unwrap().cast::<u8>();
        assert_eq!(a, c);
        let d = pool.grow(c, layout(4100, 1), layout(4609, 1)).unwrap().cast::<u8>();
        assert_ne!(a, d, "a larger one");
        let e = pool.shrink(d, layout(4609, 1), layout(64, 1)).unwrap().cast::<u8>();
        assert_ne!(d, e, "a smaller one, lest a long block be kept for little");
        pool.deallocate(e, layout(64, 1));
    }
    whole(&pool);
}

#[test]
fn b30_realloc_chains_keep_alignment_and_contents() {
    // So little that the chain's longest links meet the end of the pool.
    for capacity in [8 << 20, 64 << 20] {
        let pool = soft(capacity).build().unwrap();
        for shift in 0..=16 {
            let align = 1usize << shift;
            let mut at = pool.allocate(layout(1, align)).unwrap().cast::<u8>();
            let mut old = layout(1, align);
            // SAFETY: one block, always named by the layout that the last call was given.
            unsafe {
                at.write(0x5a);
                for size in [3, 4097, (2 << 20) + 1, 8, 4096, 7] {
                    let new = layout(size, align);
                    let to = if size >= old.size() {
                        pool.grow(at, old, new)
                    } else {
                        pool.shrink(at, old, new)
                    };
                    let to = to.unwrap();
                    assert!(to.len() >= size);
                    assert_eq!(to.cast::<u8>().as_ptr() as usize % align, 0, "{size}/{align}");
                    let bytes = std::slice::from_raw_parts_mut(to.cast::<u8>().as_ptr(), size);
                    let kept = size.min(old.size());
                    assert!(bytes[..kept].iter().enumerate().all(|(i, &b)| b == 0x5a ^ i as u8));
                    bytes.iter_mut().enumerate().for_each(|(i, b)| *b = 0x5a ^ i as u8);
                    (at, old) = (to.cast(), new);
                }
                pool.deallocate(at, old);
            }
            // What was used before is zero when asked so.
            let zero = pool.allocate_zeroed(layout(4097, align)).unwrap();
            // SAFETY: the block is this test's; then grown and freed with its layouts.
            unsafe {
                assert!(zero.as_ref().iter().all(|&b| b == 0));
                zero.cast::<u8>().write_bytes(0xff, 4097);
                let more = pool
                    .grow_zeroed(zero.cast(), layout(4097, align), layout(70_000, align))
                    .unwrap();
                assert!(more.as_ref()[..4097].iter().all(|&b| b == 0xff));
                assert!(more.as_ref()[4097..70_000].iter().all(|&b| b == 0));
                pool.deallocate(more.cast(), layout(70_000, align));
            }
        }
        whole(&pool);
    }
}

#[test]
fn a_block_from_elsewhere_goes_back_there() {
    // All memory is taken as blocks of one class, then a few of those are freed: what is asked for now is
    // served by larger blocks, and by single pages.
    let pool = soft(1 << 20).build().unwrap();
    let mut held: Vec<Buf> = std::iter::from_fn(|| pool.alloc(8192).ok()).collect();
    held.truncate(held.len() - 4);
    let mut small: Vec<NonNull<[u8]>> = Vec::new();
    while let Ok(block) = pool.allocate(layout(100, 8)) {
        // Longer sizes of this length's class alone fit.
        assert!(block.len() <= 128);
        // SAFETY: the block is this test's.
        unsafe { block.cast::<u8>().write_bytes(1, block.len()) };
        small.push(block);
    }
    assert!(small.len() >= 4);
    pool.check();
    // While such blocks are out, all others are told apart too: by the thread that has them and by others.
    let other = PoolVec::<u8, _>::with_capacity_in(0, &pool);
    drop(other);
    let half = small.split_off(small.len() / 2);
    let addresses: Vec<(usize, usize)> =
        half.iter().map(|b| (b.cast::<u8>().as_ptr() as usize, b.len())).collect();
    let p = &pool;
    thread::scope(|s| {
        s.spawn(move || {
            for (addr, len) in addresses {
                let ptr = NonNull::new(addr as *mut u8).unwrap();
                // SAFETY: handed over by the other thread; any size up to what was answered fits.
                unsafe { p.deallocate(ptr, layout(len, 8)) };
            }
        });
    });
    for block in small {
        // SAFETY: this test's; the size that was asked for fits.
        unsafe { pool.deallocate(block.cast(), layout(100, 8)) };
    }
    drop(held);
    whole(&pool);
    // Nothing is counted as out of the ordinary any more: frees go by the layout again, and rightly.
    let v = PoolVec::<u8, _>::with_capacity_in(100, &pool);
    drop(v);
    whole(&pool);
}

#[test]
fn a_full_pool_still_shrinks() {
    let pool = soft(256 << 10).build().unwrap();
    let mut v = PoolVec::<u8, _>::with_capacity_in(64 << 10, &pool);
    v.extend_from_slice(&[7; 100]);
    let held: Vec<Buf> = (6..17)
        .rev()
        .flat_map(|shift| std::iter::from_fn(|| pool.alloc(1 << shift).ok()).collect::<Vec<_>>())
        .collect();
    let at = v.as_ptr();
    v.shrink_to_fit();
    assert_eq!(v.as_ptr(), at, "there is no shorter block to be had");
    assert!(v.try_reserve(64 << 10).is_err() && v.iter().all(|&b| b == 7));
    drop(held);
    v.shrink_to_fit();
    drop(v);
    whole(&pool);
}

#[test]
fn a_pool_that_is_out_says_so() {
    let pool = soft(1 << 20).build().unwrap();
    let mut v = PoolVec::<u8, _>::new_in(&pool);
    assert!(v.try_reserve(2 << 20).is_err());
    v.try_reserve(1 << 20).unwrap();
    let mut w = PoolVec::<u8, _>::new_in(&pool);
    assert!(w.try_reserve(1).is_err());
    drop(v);
    w.try_reserve(1).unwrap();
    drop(w);
    whole(&pool);
}

#[test]
fn vectors_outlive_threads_and_teardown() {
    let (made, pool) = {
        let pool = soft(4 << 20).build().unwrap();
        let p = pool.clone();
        let made = thread::spawn(move || {
            (0..100u32)
                .map(|i| {
                    let mut v = PoolVec::<u32, Pool>::new_in(p.clone());
                    v.extend(0..i * 10);
                    v
                })
                .collect::<Vec<_>>()
        });
        (made.join().unwrap(), pool)
    };
    drop(pool);
    assert!(made.iter().enumerate().all(|(i, v)| v.iter().copied().eq(0..i as u32 * 10)));
    let soft = made[0].allocator().clone();
    drop(made);
    whole(&soft);
}

#[test]
fn the_public_suite() {
    let pool = soft(32 << 20).build().unwrap();
    allocator_api2_tests::test_sizes(&pool);
    allocator_api2_tests::test_vec(&pool);
    allocator_api2_tests::test_many_boxes(&pool);
    for shift in 0..22 {
        allocator_api2_tests::test_allocate_layout(&pool, layout(3 << shift, 1 << shift));
    }
    allocator_api2_tests::test_sizes(pool.clone());
    allocator_api2_tests::test_vec(pool.clone());
    whole(&pool);
}

#[test]
fn threads_free_for_one_another() {
    let pool = soft(16 << 20).build().unwrap();
    let (send, receive) = std::sync::mpsc::sync_channel::<PoolVec<u8, Pool>>(64);
    let makers: Vec<_> = (0..4u64)
        .map(|seed| {
            let (send, pool) = (send.clone(), pool.clone());
            thread::spawn(move || {
                let mut rng = Rng(seed);
                for _ in 0..2_000 {
                    let len = rng.size(1, 20_000);
                    let mut v = PoolVec::new_in(pool.clone());
                    v.resize(len, len as u8);
                    send.send(v).unwrap();
                }
            })
        })
        .collect();
    drop(send);
    for mut v in receive {
        let len = v.len();
        assert!(v.iter().all(|&b| b == len as u8));
        if len % 3 == 0 {
            v.extend_from_slice(&[len as u8; 100]);
            v.truncate(len / 2);
            v.shrink_to_fit();
        }
    }
    makers.into_iter().for_each(|m| m.join().unwrap());
    whole(&pool);
}

/// One call of the trait, on what is out.
#[derive(Clone, Copy, Debug)]
enum Call {
    Allocate { size: usize, align: usize, zeroed: bool },
    Resize { which: usize, size: usize, align: usize, zeroed: bool },
    Deallocate { which: usize, up: usize },
}

fn calls() -> impl Strategy<Value = Call> {
    let size = prop_oneof![0usize..300, 0usize..70_000, 0usize..600_000];
    let align = prop_oneof![4 => 0u32..7, 1 => 0u32..18].prop_map(|s| 1usize << s);
    prop_oneof![
        4 => (size.clone(), align.clone(), any::<bool>())
            .prop_map(|(size, align, zeroed)| Call::Allocate { size, align, zeroed }),
        4 => (any::<usize>(), size, align, any::<bool>())
            .prop_map(|(which, size, align, zeroed)| Call::Resize { which, size, align, zeroed }),
        3 => (any::<usize>(), any::<usize>())
            .prop_map(|(which, up)| Call::Deallocate { which, up }),
    ]
}

struct Out {
    at: NonNull<u8>,
    layout: Layout,
    /// What was answered: any size from the layout's up to this fits.
    len: usize,
    seed: u8,
}

struct Model {
    pool: Pool,
    out: Vec<Out>,
    ranges: BTreeMap<usize, usize>,
    seed: u8,
}

impl Model {
    fn byte(seed: u8, i: usize) -> u8 {
        (i as u8).wrapping_mul(37) ^ (i >> 8) as u8 ^ seed
    }

    fn took(
        &mut self,
        block: NonNull<[u8]>,
        layout: Layout,
        filled: usize,
        seed: u8,
        zeroed: bool,
    ) {
        let (at, len) = (block.cast::<u8>(), block.len());
        assert!(len >= layout.size());
        assert_eq!(at.as_ptr() as usize % layout.align(), 0);
        // SAFETY: the block is the model's, and `len` bytes long.
        let bytes = unsafe { std::slice::from_raw_parts_mut(at.as_ptr(), len) };
        assert!((0..filled).all(|i| bytes[i] == Self::byte(seed, i)), "contents are kept");
        assert!(!zeroed || bytes[filled..].iter().all(|&b| b == 0), "zeroed is zero");
        self.seed = self.seed.wrapping_add(29);
        let seed = self.seed;
        bytes.iter_mut().enumerate().for_each(|(i, b)| *b = Self::byte(seed, i));
        if len > 0 {
            let start = at.as_ptr() as usize;
            let before = self.ranges.range(..start + len).next_back();
            assert!(before.is_none_or(|(_, &end)| end <= start), "overlaps a live block");
            assert!(self.pool.keys_of(at.as_ptr()).is_some());
            assert!(self.pool.keys_of(at.as_ptr().wrapping_add(len - 1)).is_some());
            self.ranges.insert(start, start + len);
        }
        self.out.push(Out { at, layout, len, seed });
    }

    fn pick(&mut self, which: usize) -> Option<Out> {
        if self.out.is_empty() {
            return None;
        }
        let n = which % self.out.len();
        let out = self.out.swap_remove(n);
        if out.len > 0 {
            self.ranges.remove(&(out.at.as_ptr() as usize));
        }
        // SAFETY: the block is the model's.
        let bytes = unsafe { std::slice::from_raw_parts(out.at.as_ptr(), out.len) };
        assert!(bytes.iter().enumerate().all(|(i, &b)| b == Self::byte(out.seed, i)));
        Some(out)
    }

    fn step(&mut self, call: Call) {
        match call {
            Call::Allocate { size, align, zeroed } => {
                let layout = layout(size, align);
                let got = if zeroed {
                    self.pool.allocate_zeroed(layout)
                } else {
                    self.pool.allocate(layout)
                };
                match got {
                    Ok(block) => self.took(block, layout, 0, 0, zeroed),
                    Err(_) => self.refused(layout),
                }
            }
            Call::Resize { which, size, align, zeroed } => {
                let Some(out) = self.pick(which) else { return };
                let new = layout(size, align);
                // The layout that a collection remembers may have any size that fits.
                let old = out.layout;
                // SAFETY: `old` fits the block, and the calls' conditions on the sizes are looked at here.
                let got = unsafe {
                    if size < old.size() {
                        self.pool.shrink(out.at, old, new)
                    } else if zeroed {
                        self.pool.grow_zeroed(out.at, old, new)
                    } else {
                        self.pool.grow(out.at, old, new)
                    }
                };
                match got {
                    Ok(block) => {
                        let kept = old.size().min(size);
                        self.took(block, new, kept, out.seed, zeroed && size >= old.size());
                    }
                    Err(_) => {
                        // Still there, as it was.
                        let start = out.at.as_ptr() as usize;
                        if out.len > 0 {
                            self.ranges.insert(start, start + out.len);
                        }
                        self.out.push(out);
                        self.refused(new);
                    }
                }
            }
            Call::Deallocate { which, up } => {
                let Some(out) = self.pick(which) else { return };
                let size = out.layout.size() + up % (out.len - out.layout.size() + 1);
                // SAFETY: any size from the one asked for to the one answered fits.
                unsafe { self.pool.deallocate(out.at, layout(size, out.layout.align())) };
            }
        }
        self.check();
    }

    fn refused(&self, layout: Layout) {
        let stats = self.pool.stats();
        let pages = layout.size().next_multiple_of(4096) + layout.align().saturating_sub(4096);
        assert!(stats.largest_free < pages, "{layout:?} would have fitted: {stats:?}");
    }

    fn check(&self) {
        self.pool.check();
        let stats = self.pool.stats();
        assert_eq!(stats.live_buffers, self.ranges.len());
        // What may be used is at most what is out.
        assert!(self.ranges.iter().map(|(a, b)| b - a).sum::<usize>() <= stats.live);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 32, ..ProptestConfig::default() })]

    #[test]
    fn the_contract_holds_under_random_calls(script in prop::collection::vec(calls(), 1..200)) {
        let pool = soft(2 << 20).arena_size(1 << 20).build().unwrap();
        let mut model = Model { pool, out: vec![], ranges: BTreeMap::new(), seed: 0 };
        for call in script {
            model.step(call);
        }
        for out in std::mem::take(&mut model.out) {
            // SAFETY: the layout asked for fits.
            unsafe { model.pool.deallocate(out.at, out.layout) };
        }
        whole(&model.pool);
        // No block is still counted as odd: a block freed by its layout lands in the right class.
        let v = PoolVec::<u8, _>::with_capacity_in(5000, &model.pool);
        drop(v);
        whole(&model.pool);
    }
}

// `Send` and `Sync` as they should be, and not more.
assert_impl_all!(PoolVec<u8, Pool>: Send, Sync);
assert_impl_all!(PoolVec<u8, &Pool>: Send, Sync);
assert_impl_all!(PoolVec<u8, Pool<reach::Local>>: Send, Sync);
assert_impl_all!(PoolBox<[u64], Pool<reach::Remote>>: Send, Sync);
assert_impl_all!(HashMap<u8, u8, DefaultHashBuilder, Pool>: Send, Sync);
assert_impl_all!(Pool: Allocator, Clone);
assert_not_impl_any!(PoolVec<std::cell::Cell<u8>, Pool>: Sync);
assert_not_impl_any!(PoolVec<std::rc::Rc<u8>, Pool>: Send, Sync);
assert_not_impl_any!(PoolBox<*mut u8, Pool>: Send, Sync);
