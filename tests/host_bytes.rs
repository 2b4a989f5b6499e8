//! Buffers as `bytes`, streams, parts and plain old data. Proves: what stays registered stays where it is, and
//! is out as long as anything refers to it; what leaves is copied, and the buffer comes back; nothing grows
//! beyond the capacity; parts are freed independently; views are checked.
#![cfg(all(feature = "bytes", feature = "bytemuck", feature = "fault"))]
#![allow(clippy::unwrap_used)]

mod common;

use std::{
    alloc::{GlobalAlloc, Layout, System},
    cell::Cell,
    io::{BufRead, Cursor, ErrorKind, Read, Write},
    thread,
};

use bytes::{Buf as _, BufMut, Bytes, BytesMut};
use common::soft;
use pinpool::{Buf, Part, PodError, Pool, Typed, reach};
use static_assertions::{assert_impl_all, assert_not_impl_any};

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

/// Counts the heap allocations of each thread.
struct Counting;

// SAFETY: passes everything on to `System`.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        // SAFETY: passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: passed on.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

fn allocations<T>(f: impl FnOnce() -> T) -> (T, u64) {
    let before = ALLOCATIONS.get();
    let t = f();
    (t, ALLOCATIONS.get() - before)
}

fn pool() -> Pool {
    soft(1 << 20).build().unwrap()
}

fn filled(pool: &Pool, len: usize) -> Buf {
    let mut buf = pool.alloc(len).unwrap();
    buf.iter_mut().enumerate().for_each(|(i, b)| *b = i as u8);
    buf
}

fn live(pool: &Pool) -> usize {
    pool.check();
    pool.stats().live_buffers
}

#[test]
fn bytes_of_a_buffer_are_the_buffer() {
    let pool = pool();
    drop(Bytes::from(filled(&pool, 1000)));
    let buf = filled(&pool, 1000);
    let (at, keys) = (buf.as_ptr(), buf.keys());
    let (bytes, made) = allocations(|| Bytes::from(buf));
    assert_eq!((bytes.as_ptr(), bytes.len(), made), (at, 1000, 1), "one allocation, no copy");
    assert_eq!(pool.keys_of(bytes.as_ptr()), Some(keys));
    assert_eq!(pool.sge_of(&bytes).map(|s| (s.addr, s.length)), Some((at as u64, 1000)));
    let slice = bytes.slice(10..20);
    let clone = bytes.clone();
    assert_eq!(&slice[..], &clone[10..20]);
    drop(bytes);
    assert_eq!(live(&pool), 1);
    thread::spawn(move || drop(clone)).join().unwrap();
    assert_eq!(live(&pool), 1, "a slice keeps it all");
    assert!(slice.iter().copied().eq(10..20));
    let ((), freed) = allocations(|| drop(slice));
    assert_eq!((live(&pool), freed), (0, 0));
}

#[test]
fn b32_an_owner_is_dropped_when_its_bytes_become_a_vec() {
    let pool = soft(16 << 10).build().unwrap();
    let free = |pool: &Pool| {
        let held: Vec<Buf> = std::iter::from_fn(|| pool.alloc(4096).ok()).collect();
        held.len()
    };
    assert_eq!(free(&pool), 4, "a pool of four");
    for i in 0..1_000 {
        let buf = filled(&pool, 4096);
        let bytes = Bytes::from(buf);
        match i % 3 {
            0 => {
                let vec = Vec::from(bytes);
                assert!(vec.len() == 4096 && pool.keys_of(vec.as_ptr()).is_none());
            }
            1 => {
                let copy = BytesMut::from(bytes);
                assert!(copy[5] == 5 && pool.keys_of(copy.as_ptr()).is_none());
            }
            _ => match bytes.try_into_mut() {
                Ok(_) => panic!("registered memory does not turn into the heap's"),
                Err(bytes) => drop(Vec::from(bytes.slice(1..3))),
            },
        }
    }
    assert_eq!(free(&pool), 4);
    pool.check();
}

#[test]
fn nothing_grows_beyond_its_capacity() {
    let pool = pool();
    let mut buf = pool.alloc(5000).unwrap();
    let (at, capacity) = (buf.as_ptr(), buf.capacity());
    assert_eq!((capacity, buf.remaining_mut()), (5120, 120));
    buf.clear();
    buf.put_u32(0x0102_0304);
    buf.put_slice(&[9; 10]);
    assert_eq!((&buf[..5], buf.len()), (&[1, 2, 3, 4, 9][..], 14));
    buf.write_all(&[8; 5000]).unwrap();
    assert_eq!(buf.remaining_mut(), capacity - 5014);
    assert_eq!(buf.write(&[7; 500]).unwrap(), capacity - 5014);
    assert_eq!(buf.write(&[7]).unwrap(), 0);
    assert_eq!(buf.write_all(&[7]).unwrap_err().kind(), ErrorKind::WriteZero);
    assert_eq!((buf.len(), buf.as_ptr(), buf.chunk_mut().len()), (capacity, at, 0));
    buf.flush().unwrap();
    // SAFETY: too much, which must not take it beyond its end.
    unsafe { buf.advance_mut(usize::MAX) };
    assert_eq!(buf.len(), capacity);
    assert!(std::panic::catch_unwind(move || buf.put_u8(1)).is_err(), "the trait's contract");
    assert_eq!(live(&pool), 0);
}

#[test]
fn whole_buffers_are_read_through_slices_and_cursors() {
    let pool = pool();
    let buf = filled(&pool, 100);
    let mut ten = [0; 10];
    (&buf[..]).read_exact(&mut ten).unwrap();
    assert!(ten.iter().copied().eq(0..10));
    let mut cursor = Cursor::new(buf);
    cursor.read_exact(&mut ten).unwrap();
    assert_eq!((cursor.get_u8(), cursor.remaining()), (10, 89));
    assert_eq!(cursor.into_inner().len(), 100);
    assert_eq!(live(&pool), 0);
}

#[test]
fn parts_are_freed_independently() {
    let pool = pool();
    let buf = filled(&pool, 1000);
    let (at, keys, capacity) = (buf.as_ptr() as usize, buf.keys(), buf.capacity());
    let (mut head, made) = allocations(|| Part::from(buf));
    assert_eq!((made, head.len(), head.capacity()), (1, 1000, capacity));
    let (tail, made) = allocations(|| head.split_off(600).unwrap());
    assert_eq!((made, head.len(), head.capacity()), (0, 600, 600));
    assert_eq!((tail.len(), tail.capacity()), (400, capacity - 600));
    assert_eq!((tail.as_ptr() as usize, tail.keys()), (at + 600, keys));
    assert_eq!((tail.sge().addr, tail.sge().length), (at as u64 + 600, 400));
    assert_eq!(tail.sge_range(10, 391), None);
    assert_eq!(tail.sge_range(10, 390).unwrap().addr, at as u64 + 610);
    assert_eq!(tail.remote().unwrap().addr, at as u64 + 600);
    assert_eq!((head[599], tail[0]), (87, 88));
    assert!(head.split_off(601).is_err() && head.len() == 600);
    // Written by two threads at once.
    let mut tail = tail;
    thread::scope(|s| {
        let other = s.spawn(|| head.fill(1));
        tail.fill(2);
        other.join().unwrap();
    });
    assert!(head.iter().all(|&b| b == 1) && tail.iter().all(|&b| b == 2));
    drop(head);
    assert_eq!(live(&pool), 1);
    thread::spawn(move || drop(tail)).join().unwrap();
    assert_eq!(live(&pool), 0);
}

#[test]
fn neighbours_join_and_become_the_buffer_again() {
    let pool = pool();
    let buf = filled(&pool, 300);
    let at = buf.as_ptr();
    let mut a = Part::from(buf);
    let mut b = a.split_off(100).unwrap();
    let c = b.split_off(100).unwrap();
    let (a, c) = a.unsplit(c).unwrap_err();
    let (c, b) = c.unsplit(b).unwrap_err();
    let whole = a.unsplit(b).unwrap().unsplit(c).unwrap();
    assert!(whole.len() == 300 && whole.iter().enumerate().all(|(i, &x)| x == i as u8));
    let mut first = whole;
    let second = first.split_to(64).unwrap();
    assert_eq!((second.len(), first.len()), (64, 236));
    let first = first.into_buf().unwrap_err();
    let second = second.into_buf().unwrap_err();
    drop(first);
    let buf = second.into_buf().unwrap();
    assert_eq!((buf.as_ptr(), buf.len(), buf.capacity()), (at, 64, 320));
    drop(buf);
    assert_eq!(live(&pool), 0);
    // Empty parts, at both ends.
    let mut all = Part::from(filled(&pool, 64));
    let end = all.split_off(64).unwrap();
    let none = all.split_to(0).unwrap();
    assert_eq!((end.len(), end.capacity(), none.len(), all.len()), (0, 0, 0, 64));
    assert_eq!(all.unsplit(end).unwrap().len(), 64);
}

#[test]
fn parts_are_read_from_the_front_and_written_at_the_end() {
    let pool = pool();
    let mut part = Part::from(pool.alloc(100).unwrap());
    part.clear();
    writeln!(part, "first line").unwrap();
    write!(part, "second").unwrap();
    let mut line = String::new();
    part.read_line(&mut line).unwrap();
    assert_eq!((line.as_str(), &part[..]), ("first line\n", &b"second"[..]));
    let mut three = [0; 3];
    part.read_exact(&mut three).unwrap();
    assert_eq!((&three, part.get_u8(), part.remaining()), (b"sec", b'o', 2));
    part.advance(usize::MAX);
    assert_eq!((part.len(), part.read(&mut three).unwrap()), (0, 0));
    assert_eq!(part.capacity(), 128 - 17);
    part.put_bytes(3, 128 - 17);
    assert_eq!(part.write(b"x").unwrap(), 0);
    let bytes = Bytes::from(part);
    assert!(pool.keys_of(bytes.as_ptr()).is_some());
    drop(bytes);
    assert_eq!(live(&pool), 0);
}

#[test]
fn nothing_of_the_payload_is_shown() {
    let pool = pool();
    let mut buf = pool.alloc(64).unwrap();
    buf.copy_from_slice(&[b'S'; 64]);
    let shown = format!("{buf:?}");
    assert!(!shown.contains("83, 83") && !shown.contains("SSS"), "{shown}");
    let typed: Typed<u8> = buf.typed().unwrap();
    let shown = format!("{typed:?}");
    assert!(!shown.contains("83, 83") && shown.contains("u8"), "{shown}");
    let shown = format!("{:?}", Part::from(typed.into_buf()));
    assert!(!shown.contains("83, 83") && shown.contains("lkey"), "{shown}");
}

#[derive(Clone, Copy, bytemuck::Zeroable, bytemuck::Pod, PartialEq, Debug)]
#[repr(C)]
struct Header {
    kind: u32,
    len: u32,
    seq: u64,
}

#[derive(Clone, Copy, bytemuck::Zeroable, bytemuck::Pod)]
#[repr(C, align(128))]
struct Wide([u8; 128]);

#[test]
fn views_are_checked() {
    let pool = pool();
    let mut buf = pool.alloc_zeroed(4 * size_of::<Header>()).unwrap();
    buf.view_mut::<Header>().unwrap()[2] = Header { kind: 1, len: 2, seq: 3 };
    assert_eq!(buf.view::<Header>().unwrap()[2], Header { kind: 1, len: 2, seq: 3 });
    assert_eq!(buf[32..36], 1u32.to_ne_bytes());
    buf.truncate(60);
    let error = buf.view::<Header>().unwrap_err();
    assert!(matches!(error, PodError::Length { len: 60, size: 16, .. }), "{error}");
    assert!(error.to_string().contains("Header"), "{error}");
    assert!(buf.view_mut::<Header>().is_err() && buf.typed::<Header>().is_err());
    assert_eq!(live(&pool), 0);

    // A block aligned to 64 alone, for a type that wants more.
    let held: Vec<Buf> = (0..4).map(|_| pool.alloc(192).unwrap()).collect();
    let odd = held
        .iter()
        .find(|b| !(b.as_ptr() as usize).is_multiple_of(128))
        .expect("192 is no multiple of 128");
    let mut bytes = pool.alloc_typed::<Wide>(3).unwrap();
    bytes[2].0[127] = 1;
    assert_eq!((bytes.len(), bytes.as_ptr() as usize % 128), (3, 0));
    assert!(matches!(
        odd.view::<Wide>(),
        Err(PodError::Length { .. } | PodError::Alignment { .. })
    ));
    drop(held);

    let mut counters = pool.alloc_typed::<u64>(100).unwrap();
    assert!(counters.iter().all(|&c| c == 0));
    counters[99] = u64::MAX;
    assert_eq!((counters.len(), counters.buf().sge().length), (100, 800));
    assert_eq!(counters.into_buf()[792..], [0xff; 8]);
    assert_eq!(pool.alloc_typed::<u64>(0).unwrap().len(), 0);
    let error = pool.alloc_typed::<u64>(usize::MAX).unwrap_err();
    assert!(matches!(error, PodError::TooMany { size: 8, .. }), "{error}");
    let error = pool.alloc_typed::<u64>(1 << 20).unwrap_err();
    assert!(matches!(error, PodError::Alloc(_)), "{error}");
    drop(bytes);
    assert_eq!(live(&pool), 0);
}

#[test]
fn bytes_outlive_their_pool() {
    let device = pinpool::Device::soft();
    let pool = soft(64 << 10).device(device.clone()).build().unwrap();
    let bytes = Bytes::from(filled(&pool, 100));
    let part = Part::from(filled(&pool, 100));
    let typed = filled(&pool, 100).typed::<u32>().unwrap();
    drop(pool);
    let soft = device.as_soft().unwrap();
    assert_eq!((bytes[99], part[99], typed.len()), (99, 99, 25));
    drop(bytes);
    drop(part);
    assert_eq!(soft.regions(), 1);
    drop(typed);
    assert_eq!(soft.regions(), 0);
}

assert_impl_all!(Part: Send, Sync, AsRef<[u8]>, AsMut<[u8]>, Read, BufRead, Write, std::fmt::Debug);
assert_impl_all!(Part<reach::Remote>: Send, Sync);
assert_impl_all!(Buf: Send, Sync, AsRef<[u8]>, AsMut<[u8]>, Write, BufMut, std::fmt::Debug);
assert_impl_all!(Cursor<Buf>: Read, BufRead, std::io::Seek);
assert_impl_all!(Typed<u64>: Send, Sync);
assert_impl_all!(PodError: Send, Sync, std::error::Error);
assert_not_impl_any!(Typed<Cell<u8>>: Sync);
assert_not_impl_any!(Typed<std::rc::Rc<u8>>: Send, Sync);
assert_not_impl_any!(Part: Clone);
assert_not_impl_any!(Typed<u8>: Clone, std::ops::DerefMut<Target = Buf>);
