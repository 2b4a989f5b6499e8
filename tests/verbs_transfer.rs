//! Bytes move by RDMA between buffers of one pool, and arrive where they should and nowhere else:
//! - SEND/RECV, RDMA WRITE, RDMA READ, compare-and-swap, fetch-and-add;
//! - into every page of a 64 MiB arena, on base pages and on hugepages, and round the edges of 64 KiB
//!   and 2 MiB;
//! - the same with `ZERO_BASED`, where the addresses that buffers give are offsets;
//! - also through a lent PD, and between two pools on one device.
#![cfg(all(feature = "loopback", any(feature = "rdma-sys", feature = "rdma-mummy-sys")))]

#[path = "common/verbs.rs"]
mod common;

use common::{check, device, fill, pattern, same};
use pinpool::{Access, Buf, Device, PageSize, Pages, Pool, loopback::Pair};

const MIB: usize = 1 << 20;
const ALL: Access = Access::LOCAL_WRITE.union(Access::REMOTE);
const HUGE: Pages = Pages::Require(PageSize::Huge2M);

fn pool(device: &Device, access: Access, pages: Pages, capacity: usize, arena: usize) -> Pool {
    Pool::builder()
        .device(device.clone())
        .access(access)
        .pages(pages)
        .capacity(capacity)
        .arena_size(arena)
        .build()
        .expect("build")
}

fn pair(device: &Device) -> Pair {
    Pair::connect(device).expect("connect")
}

/// Writes all of `from` to `to`, from `offset` on.
fn write(pair: &mut Pair, from: &Buf, to: &mut Buf, offset: usize) {
    let remote = to.remote().expect("a remote right");
    assert!(offset + from.len() <= remote.len as usize);
    // SAFETY: both buffers are borrowed for the call, `to` exclusively, and it is over when it returns.
    unsafe { pair.write(from.sge(), remote.addr + offset as u64, remote.rkey) }.expect("write");
}

/// Reads all of `into` from `from`, from `offset` on.
fn read(pair: &mut Pair, into: &mut Buf, from: &Buf, offset: usize) {
    let remote = from.remote().expect("a remote right");
    assert!(offset + into.len() <= remote.len as usize);
    // SAFETY: as in `write`, with the roles exchanged.
    unsafe { pair.read(into.sge(), remote.addr + offset as u64, remote.rkey) }.expect("read");
}

/// Every operation, with both buffers from `pool`.
fn each_operation(device: &Device, pool: &Pool) {
    let mut pair = pair(device);
    let (mut a, mut b) = (pool.alloc(MIB).expect("alloc"), pool.alloc(MIB).expect("alloc"));

    for (i, len) in [1, 8, 4096, 65_537, MIB].into_iter().enumerate() {
        a.set_len(len).expect("fits");
        fill(&mut a, 10 + i as u64);
        b.fill(0);
        // SAFETY: both buffers are this function's, and nothing else uses them until it returns.
        let got = unsafe { pair.send_recv(a.sge(), b.sge()) }.expect("send");
        assert_eq!(got.byte_len as usize, len);
        check(&b[..len], 10 + i as u64);
        assert!(b[len..].iter().all(|&x| x == 0), "RECV kept to the message");

        fill(&mut a, 20 + i as u64);
        b.fill(0);
        write(&mut pair, &a, &mut b, 0);
        check(&b[..len], 20 + i as u64);
        assert!(b[len..].iter().all(|&x| x == 0), "WRITE kept to its length");

        fill(&mut b, 30 + i as u64);
        a.fill(0);
        read(&mut pair, &mut a, &b, 0);
        same(&a, &b[..len]);
    }

    let mut old = pool.alloc(8).expect("alloc");
    let mut word = pool.alloc(8).expect("alloc");
    word.copy_from_slice(&5u64.to_ne_bytes());
    let value = |b: &Buf| u64::from_ne_bytes(b[..].try_into().expect("eight bytes"));
    let to = word.remote().expect("a remote right");
    // SAFETY: as above.
    unsafe { pair.fetch_add(old.sge(), to.addr, to.rkey, 37) }.expect("fetch-and-add");
    assert_eq!((value(&old), value(&word)), (5, 42));
    // SAFETY: as above.
    unsafe { pair.compare_swap(old.sge(), to.addr, to.rkey, 5, 99) }.expect("compare-and-swap");
    assert_eq!((value(&old), value(&word)), (42, 42), "no match, no swap");
    old.fill(0);
    // SAFETY: as above.
    unsafe { pair.compare_swap(old.sge(), to.addr, to.rkey, 42, 99) }.expect("compare-and-swap");
    assert_eq!((value(&old), value(&word)), (42, 99));
}

#[test]
fn each_operation_on_base_pages() {
    let device = device();
    each_operation(&device, &pool(&device, ALL, Pages::Base, 8 * MIB, 8 * MIB));
}

#[test]
fn each_operation_on_hugepages() {
    let device = device();
    each_operation(&device, &pool(&device, ALL, HUGE, 8 * MIB, 8 * MIB));
}

#[test]
fn each_operation_zero_based() {
    let device = device();
    for pages in [Pages::Base, HUGE] {
        let pool = pool(&device, ALL | Access::ZERO_BASED, pages, 8 * MIB, 4 * MIB);
        each_operation(&device, &pool);
    }
}

#[test]
fn each_operation_on_a_lent_pd() {
    let owner = device();
    let pd = owner.as_verbs().expect("verbs").pd();
    // SAFETY: `owner` keeps the PD until the end of the test, after everything built on it.
    let lent = unsafe { Device::from_raw_pd(pd) }.expect("lend");
    each_operation(&lent, &pool(&lent, ALL, Pages::Base, 8 * MIB, 8 * MIB));
}

#[test]
fn two_pools_on_one_device_reach_each_other() {
    let device = device();
    let a = pool(&device, Access::LOCAL_WRITE, Pages::Base, 2 * MIB, 2 * MIB);
    let b = pool(&device, ALL | Access::ZERO_BASED, HUGE, 2 * MIB, 2 * MIB);
    let (mut from, mut to) = (a.alloc(10_000).expect("alloc"), b.alloc(10_000).expect("alloc"));
    fill(&mut from, 1);
    let mut pair = pair(&device);
    write(&mut pair, &from, &mut to, 0);
    check(&to, 1);
    from.fill(0);
    read(&mut pair, &mut from, &to, 0);
    check(&from, 1);
}

/// One buffer that is a whole arena of `len` bytes, and two of 1 MiB in another of the same pool.
fn whole_arena(device: &Device, access: Access, pages: Pages, len: usize) -> (Pool, Buf, Buf, Buf) {
    let pool = pool(device, access, pages, len + 4 * MIB, len);
    let whole = pool.alloc(len).expect("a whole arena");
    let arena = pool.arenas()[0];
    assert_eq!((whole.as_ptr(), whole.len()), (arena.addr.as_ptr().cast_const(), arena.len));
    assert_eq!(arena.page_size, if pages == HUGE { 2 * MIB } else { 4096 });
    let (from, back) = (pool.alloc(MIB).expect("alloc"), pool.alloc(MIB).expect("alloc"));
    (pool, whole, from, back)
}

const PAGE: usize = 4096;

/// Gives every page of an arena its own pattern by RDMA WRITE, then reads all of them by RDMA READ.
fn every_page(access: Access, pages: Pages, len: usize) {
    let device = device();
    let mut pair = pair(&device);
    let (_pool, mut whole, mut from, mut back) = whole_arena(&device, access, pages, len);
    let seed = |offset: usize| (offset / PAGE) as u64 + 1;
    for offset in (0..len).step_by(MIB) {
        for (i, page) in from.chunks_exact_mut(PAGE).enumerate() {
            fill(page, seed(offset + i * PAGE));
        }
        write(&mut pair, &from, &mut whole, offset);
    }
    for (i, page) in whole.chunks_exact(PAGE).enumerate() {
        check(page, seed(i * PAGE));
    }
    for offset in (0..len).step_by(MIB) {
        read(&mut pair, &mut back, &whole, offset);
        same(&back, &whole[offset..offset + MIB]);
    }
}

#[test]
fn every_page_of_an_arena_on_base_pages() {
    every_page(ALL, Pages::Base, 64 * MIB);
}

#[test]
fn every_page_of_an_arena_on_hugepages() {
    every_page(ALL, HUGE, 64 * MIB);
}

#[test]
fn every_page_of_an_arena_zero_based() {
    every_page(ALL | Access::ZERO_BASED, Pages::Base, 8 * MIB);
    every_page(ALL | Access::ZERO_BASED, HUGE, 8 * MIB);
}

/// Writes and reads that start or end just before, on and just after `edge`.
fn round_edge(pair: &mut Pair, whole: &mut Buf, from: &mut Buf, back: &mut Buf, edge: usize) {
    let mut seed = edge as u64;
    for len in [1, 2, 3, PAGE + 1] {
        for start in [edge - len - 1, edge - len, edge - len + 1, edge - 1, edge, edge + 1] {
            if start + len > whole.len() {
                continue;
            }
            seed += 1;
            let around = start - 8..(start + len + 8).min(whole.len());
            let mut should = whole[around.clone()].to_vec();
            should[8..8 + len].copy_from_slice(&pattern(seed, len));
            from.set_len(len).expect("fits");
            fill(from, seed);
            write(pair, from, whole, start);
            same(&whole[around], &should);

            back.set_len(len + 16).expect("fits");
            back.fill(0);
            back.set_len(len).expect("fits");
            read(pair, back, whole, start);
            check(back, seed);
            back.set_len(len + 16).expect("fits");
            assert!(back[len..].iter().all(|&b| b == 0), "READ kept to its length");
        }
    }
}

fn edges(access: Access, pages: Pages) {
    let device = device();
    let mut pair = pair(&device);
    let len = 8 * MIB;
    let (_pool, mut whole, mut from, mut back) = whole_arena(&device, access, pages, len);
    let whole_seed = 77;
    fill(&mut whole, whole_seed);
    const K64: usize = 64 << 10;
    for edge in [K64, 2 * K64, 31 * K64, 2 * MIB, 4 * MIB, 6 * MIB, 6 * MIB + K64, len - K64] {
        round_edge(&mut pair, &mut whole, &mut from, &mut back, edge);
    }
}

#[test]
fn round_the_edges_on_base_pages() {
    edges(ALL, Pages::Base);
}

#[test]
fn round_the_edges_on_hugepages() {
    edges(ALL, HUGE);
}

#[test]
fn round_the_edges_zero_based() {
    edges(ALL | Access::ZERO_BASED, HUGE);
}

#[test]
fn zero_based_addresses_are_offsets_into_the_arena() {
    let device = device();
    let pool = pool(&device, ALL | Access::ZERO_BASED, Pages::Base, 4 * MIB, 2 * MIB);
    let bufs: Vec<Buf> = (0..4).map(|_| pool.alloc(MIB).expect("alloc")).collect();
    for buf in &bufs {
        let of = |a: &pinpool::ArenaInfo| {
            let start = a.addr.as_ptr() as usize;
            (start..start + a.len).contains(&(buf.as_ptr() as usize))
        };
        let arena = pool.arenas().into_iter().find(of).expect("an arena");
        let offset = buf.as_ptr() as u64 - arena.addr.as_ptr() as u64;
        let remote = buf.remote().expect("a remote right");
        assert_eq!((buf.sge().addr, remote.addr), (offset, offset));
        assert_eq!(Some(remote.rkey), arena.keys.rkey);
    }
}
