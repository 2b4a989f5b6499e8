//! The end of pools with several heaps, without a device. Proves: pool, classes, shares and buffers may be dropped in
//! any order, on any thread, and each class's arenas go with the last that stands on them; `close` tells of all heaps;
//! a failed build leaves nothing.
#![cfg(feature = "fault")]
#![allow(clippy::unwrap_used)]

mod common;

use std::{sync::Barrier, thread};

use common::{scaled, soft};
use pinpool::{
    Access, Buf, BuildError, Class, CloseError, Device, Pool, Reserve, Share,
    device::{Fault, FaultyMapping, FaultyRegistrar, MapFault, MapStep},
    reach::Remote,
};

const MIB: usize = 1 << 20;
const SHARED: Access = Access::LOCAL_WRITE.union(Access::REMOTE_READ);

/// Everything that keeps a pool of two classes and two shares alive, and a buffer of each heap.
enum Part {
    Pool(Pool),
    Class(Class<Remote>),
    Share(Share),
    ClassShare(Share<Remote>),
    Buf(Buf),
    ClassBuf(Buf<Remote>),
}

fn parts(device: &Device) -> Vec<Part> {
    let pool = soft(256 << 10)
        .device(device.clone())
        .class("shared", SHARED, 256 << 10)
        .share("own", Reserve::buffers(1, 4096))
        .share_in("shared", "theirs", Reserve::buffers(1, 4096))
        .build()
        .unwrap();
    let class: Class<Remote> = pool.class("shared").unwrap();
    let (own, theirs) = (pool.share("own").unwrap(), class.share("theirs").unwrap());
    let (unreserved, reserved) = (pool.alloc(4096).unwrap(), own.alloc(4096).unwrap());
    let (in_class, in_share) = (class.alloc(4096).unwrap(), theirs.alloc(4096).unwrap());
    vec![
        Part::Buf(unreserved),
        Part::Buf(reserved),
        Part::ClassBuf(in_class),
        Part::ClassBuf(in_share),
        Part::Pool(pool),
        Part::Class(class),
        Part::Share(own),
        Part::ClassShare(theirs),
    ]
}

/// Everything that is left works.
fn exercise(part: &mut Part, byte: u8) {
    match part {
        Part::Buf(b) => b.fill(byte),
        Part::ClassBuf(b) => b.fill(byte),
        Part::Pool(pool) => pool.alloc(64).unwrap().fill(byte),
        Part::Class(class) => class.alloc(64).unwrap().fill(byte),
        Part::Share(share) => share.alloc(64).unwrap().fill(byte),
        Part::ClassShare(share) => share.alloc(64).unwrap().fill(byte),
    }
}

/// Drops in the given order, and says at each step which regions must still be there.
fn drop_in_order(device: &Device, order: &[usize]) {
    let soft = device.as_soft().unwrap();
    let before = soft.regions();
    let mut parts: Vec<Option<Part>> = parts(device).into_iter().map(Some).collect();
    assert_eq!(soft.regions(), before + 2);
    for &i in order {
        for part in parts.iter_mut().flatten() {
            exercise(part, i as u8);
        }
        drop(parts[i].take());
        let any = |range: std::ops::Range<usize>| parts[range].iter().any(Option::is_some);
        let handles = any(4..8);
        let expected = usize::from(handles || any(0..2)) + usize::from(handles || any(2..4));
        assert_eq!(soft.regions(), before + expected, "{order:?} at {i}");
    }
}

fn permutations(n: usize, mut visit: impl FnMut(&[usize])) {
    let mut order: Vec<usize> = (0..n).collect();
    let mut counters = vec![0; n];
    visit(&order);
    let mut i = 0;
    while i < n {
        if counters[i] < i {
            order.swap(if i % 2 == 0 { 0 } else { counters[i] }, i);
            visit(&order);
            counters[i] += 1;
            i = 0;
        } else {
            counters[i] = 0;
            i += 1;
        }
    }
}

#[test]
fn every_drop_order_is_safe_and_each_classs_arenas_go_with_the_last_on_them() {
    let device = Device::soft();
    // Every order of six, after a buffer and a handle that the others stand for.
    permutations(6, |order| {
        let rest = order.iter().map(|&i| [0, 1, 3, 4, 5, 7][i]);
        drop_in_order(&device, &[2, 6].into_iter().chain(rest).collect::<Vec<_>>());
    });
    // And some of all eight.
    let mut count = 0usize;
    permutations(8, |order| {
        count += 1;
        if count.is_multiple_of(101) {
            drop_in_order(&device, order);
        }
    });
    assert_eq!(count, 40_320);
    assert_eq!(device.as_soft().unwrap().regions(), 0);
}

#[test]
fn drops_on_many_threads_at_once_tear_each_class_down_once() {
    let device = Device::soft();
    for _ in 0..scaled(300) {
        let parts = parts(&device);
        let start = Barrier::new(parts.len());
        thread::scope(|s| {
            for part in parts {
                let start = &start;
                s.spawn(move || {
                    start.wait();
                    drop(part);
                });
            }
        });
        assert_eq!(device.as_soft().unwrap().regions(), 0);
    }
    assert_eq!(pinpool::leaked_bytes(), 0);
}

#[test]
fn close_reports_over_all_heaps() {
    let (registrar, device) = {
        let r = FaultyRegistrar::new(&Device::soft());
        (r.clone(), Device::custom(r))
    };
    let build = || {
        soft(64 << 10)
            .device(device.clone())
            .class("shared", SHARED, 64 << 10)
            .share_in("shared", "own", Reserve::buffers(2, 4096))
            .build()
            .unwrap()
    };
    let pool = build();
    let class: Class = pool.class("shared").unwrap();
    let share = pool.share("own").unwrap();
    assert!(matches!(pool.close(), Err(CloseError::Shared(2))));
    let buf = share.alloc(4096).unwrap();
    let other = class.alloc(100).unwrap();
    drop(share);
    let pool = class.pool().clone();
    drop(class);
    assert!(matches!(pool.close(), Err(CloseError::Live { buffers: 2, bytes: 4224 })));
    assert_eq!(registrar.live(), 1, "the default class had nothing out");
    drop(other);
    assert_eq!(registrar.live(), 1, "a share's buffer keeps its class's arenas");
    drop(buf);
    assert_eq!(registrar.live(), 0);
    build().close().unwrap();
    assert_eq!(registrar.live(), 0);
}

#[test]
fn a_failure_in_a_later_class_undoes_the_earlier_ones() {
    const ENOMEM: i32 = 12;
    for nth in 1..=4 {
        let registrar = FaultyRegistrar::new(&Device::soft()).fault(Fault::Register(nth, ENOMEM));
        let error = soft(2 * MIB)
            .device(Device::custom(registrar.clone()))
            .arena_size(MIB)
            .start_threads(1)
            .class("a", SHARED, MIB)
            .class("b", SHARED, MIB)
            .share_in("a", "s", 4096)
            .build()
            .unwrap_err();
        let BuildError::Register { arena, arenas, .. } = error else { panic!("{error}") };
        assert_eq!((arena as u64, arenas), (nth - 1, 4), "numbered over the whole pool");
        assert_eq!((registrar.live(), registrar.deregister_calls()), (0, nth - 1));
    }
}

#[test]
fn tables_that_cannot_be_had_undo_all_classes_and_shares() {
    // Three tables a heap, two heaps a class, two classes.
    for nth in 1..=13 {
        let registrar = FaultyRegistrar::new(&Device::soft());
        let mapping = FaultyMapping::new().fault(MapFault::Fail(MapStep::Table, nth, 12));
        let built = soft(MIB)
            .device(Device::custom(registrar.clone()))
            .faulty_mapping(&mapping)
            .class("a", SHARED, MIB)
            .share("s", 4096)
            .share_in("a", "t", 4096)
            .build();
        assert_eq!(built.is_err(), nth <= 12);
        assert_eq!(registrar.live(), if nth <= 12 { 0 } else { 2 });
        match built {
            Err(e) => assert!(matches!(e, BuildError::Reserve { .. }), "{e}"),
            Ok(pool) => pool.close().unwrap(),
        }
        assert_eq!(registrar.live(), 0);
    }
}
