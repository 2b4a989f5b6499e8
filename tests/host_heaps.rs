//! Access classes, and pools of several heaps, without a device. Proves:
//! - a class has arenas of its own, registered with exactly its rights; a key of one class covers no byte of
//!   another; the types say who can reach a buffer;
//! - what cannot be built is refused by name, all classes judged together;
//! - books, raw pointers, tokens and look-ups cover all heaps; so do growth, devices and adopted memory.
//!
//! What a share's memory is worth is `host_shares`', the order in which all of it ends `host_heap_ends`'.
#![cfg(feature = "fault")]
#![allow(clippy::unwrap_used)]

mod common;

use std::{sync::mpsc, thread, time::Duration};

use common::{exhausted, soft};
use pinpool::{
    Access, AllocError, Batch, Buf, BuildError, Class, Device, FreeError, LookupError, Outcome,
    Pool, Reserve, TokenError,
    device::{Fault, FaultyRegistrar},
    reach::{Any, Local, Rails, Remote},
};

const MIB: usize = 1 << 20;
const SHARED: Access = Access::LOCAL_WRITE.union(Access::REMOTE_READ);

/// Three classes: nothing for peers, reading, everything.
fn three() -> (FaultyRegistrar, Pool) {
    let registrar = FaultyRegistrar::new(&Device::soft());
    let pool = soft(2 * MIB)
        .device(Device::custom(registrar.clone()))
        .access(Access::LOCAL_WRITE)
        .arena_size(MIB)
        .class("read", SHARED, MIB)
        .class("all", Access::LOCAL_WRITE | Access::REMOTE, MIB / 2)
        .build()
        .unwrap();
    (registrar, pool)
}

#[test]
fn each_class_has_arenas_of_its_own_with_exactly_its_rights() {
    let (registrar, pool) = three();
    let all = Access::LOCAL_WRITE | Access::REMOTE;
    let asked: Vec<_> = registrar.requests().iter().map(|r| (r.access, r.len)).collect();
    let l = Access::LOCAL_WRITE;
    assert_eq!(asked, [(l, MIB), (l, MIB), (SHARED, MIB), (all, MIB / 2)]);
    assert_eq!(pool.arenas().len(), 4);
    assert_eq!(pool.capacity(), 3 * MIB + MIB / 2);

    // A key of one class covers no byte of another: all arenas, pairwise.
    for (i, a) in pool.arenas().iter().enumerate() {
        let (start, end) = (a.addr.as_ptr() as usize, a.addr.as_ptr() as usize + a.len);
        for b in &pool.arenas()[i + 1..] {
            let (first, last) = (b.addr.as_ptr() as usize, b.addr.as_ptr() as usize + b.len);
            assert!(end <= first || last <= start, "arenas do not overlap");
            assert_ne!(a.keys.lkey, b.keys.lkey);
        }
        assert_eq!(a.keys.rkey.is_some(), a.access.is_remote());
        for at in [start, end - 1] {
            assert_eq!(pool.keys_of(at as *const u8), Some(a.keys));
        }
        assert_eq!(pool.keys_of((start - 1) as *const u8), None, "no arena touches another");
        assert_eq!(pool.keys_of(end as *const u8), None);
    }

    for name in ["default", "read", "all"] {
        let class: Class = pool.class(name).unwrap();
        assert_eq!(class.name(), name);
        assert_eq!(class.capacity(), class.arenas().iter().map(|a| a.len).sum::<usize>());
        let bufs: Vec<Buf> =
            std::iter::from_fn(|| pool.alloc_in(&class, 5000).ok()).take(10_000).collect();
        for buf in &bufs {
            let addr = buf.as_ptr() as usize;
            let arena = class.arenas().into_iter().find(|a| {
                (a.addr.as_ptr() as usize..a.addr.as_ptr() as usize + a.len).contains(&addr)
            });
            assert_eq!(buf.keys(), arena.expect("inside its class").keys);
            assert_eq!(pool.keys_of(buf.as_ptr()), Some(buf.keys()));
            assert_eq!(buf.remote().is_some(), class.access().is_remote());
        }
        // One class's exhaustion is not another's.
        exhausted(class.alloc(5000));
        let elsewhere = if name == "all" { "read" } else { "all" };
        drop(pool.class::<Any>(elsewhere).unwrap().alloc(5000).unwrap());
    }
    pool.check();
}

#[test]
fn the_type_says_who_can_reach_a_buffer() {
    let (_, pool) = three();
    let private: Class<Local> = pool.class("default").unwrap();
    let read: Class<Remote> = pool.class("read").unwrap();
    let buf: Buf<Remote> = pool.alloc_in(&read, 100).unwrap();
    let remote = buf.remote();
    assert_eq!(Some(remote.rkey), buf.keys().rkey);
    let local: Buf<Local> = pool.alloc_in(&private, 100).unwrap();
    assert_eq!(local.keys().rkey, None);
    let any: Buf = buf.into();
    assert_eq!(any.remote(), Some(remote));

    let error = pool.class::<Local>("read").unwrap_err();
    assert_eq!(error, LookupError::NotLocal { class: "read".into(), access: SHARED });
    let error = pool.class::<Remote>("default").unwrap_err();
    let access = Access::LOCAL_WRITE;
    assert_eq!(error, LookupError::NotRemote { class: "default".into(), access });
    let error = pool.class::<Any>("red").unwrap_err();
    let present = ["default", "read", "all"].map(str::to_owned).to_vec();
    assert_eq!(error, LookupError::NoClass { asked: "red".into(), present });
    assert!(error.to_string().contains("default, read, all"), "{error}");
}

#[test]
fn a_class_of_another_pool_is_refused() {
    let ((_, one), (_, other)) = (three(), three());
    let class: Class<Remote> = other.class("read").unwrap();
    assert_eq!(one.alloc_in(&class, 64).unwrap_err(), AllocError::OtherPool);
    let own: Class<Remote> = one.class("read").unwrap();
    drop(one.alloc_in(&own, 64).unwrap());
    // Through a handle whose own class is another, too.
    let narrow: Class<Local> = one.class("default").unwrap();
    drop(narrow.pool().alloc_in(&own, 64).unwrap());
    assert_eq!(own.pool().alloc_in(&class, 64).unwrap_err(), AllocError::OtherPool);
    drop((one, narrow));
    drop(own.pool().alloc_in(&own, 64).unwrap());
}

#[test]
fn a_class_handle_does_all_that_a_pool_handle_does() {
    let (_, pool) = three();
    let class: Class<Remote> = pool.class("read").unwrap();
    drop(pool);
    let inside = |buf: &Buf<Remote>| assert_eq!(buf.keys(), class.arenas()[0].keys);
    let mut batch = Batch::with_capacity(16);
    assert_eq!(class.alloc_many(&mut batch, 1000, 16).unwrap(), 16);
    let bufs: Vec<_> = std::iter::from_fn(|| batch.pop()).collect();
    bufs.iter().for_each(inside);
    inside(&class.local().alloc(77).unwrap());
    let zeroed = class.alloc_zeroed(3000).unwrap();
    assert!(zeroed.iter().all(|&b| b == 0));
    inside(&zeroed);
    let layout = std::alloc::Layout::from_size_align(8, 64 << 10).unwrap();
    let aligned = class.alloc_layout(layout).unwrap();
    assert_eq!(aligned.as_ptr() as usize % (64 << 10), 0);
    inside(&aligned);
    inside(&class.pool().alloc(5).unwrap());
    assert_eq!(class.pool().access(), SHARED);
}

#[test]
fn all_classes_are_judged_together_before_the_first_page() {
    let registrar = FaultyRegistrar::new(&Device::soft()).max_mr(3);
    let build = |b: usize| {
        soft(2 * MIB)
            .device(Device::custom(registrar.clone()))
            .arena_size(MIB)
            .class("b", SHARED, b)
            .build()
    };
    let error = build(2 * MIB).unwrap_err();
    assert!(matches!(error, BuildError::TooManyArenas { arenas: 4, max_mr: 3, .. }), "{error}");
    assert_eq!(registrar.register_calls(), 0);
    drop(build(MIB).unwrap());
    // What is wrong for every class is said once.
    let error = soft(2 * MIB).class("b", SHARED, MIB).arena_size(3 << 20).build().unwrap_err();
    assert!(matches!(error, BuildError::ArenaSize { .. }), "{error}");
}

#[test]
fn progress_runs_over_all_classes() {
    let (seen, all) = mpsc::channel();
    let pool = soft(2 * MIB)
        .class("b", SHARED, MIB)
        .start_threads(1)
        .on_progress(move |p| seen.send(p).unwrap())
        .build()
        .unwrap();
    let all: Vec<_> = all.iter().collect();
    assert!(all.iter().all(|p| p.bytes_total == 3 * MIB as u64 && p.bytes_done <= p.bytes_total));
    assert_eq!(all.last().unwrap().bytes_done, 3 * MIB as u64);
    drop(pool);
}

#[test]
fn what_cannot_be_built_is_refused_with_its_name() {
    let class = |b: pinpool::Builder| match b.build().unwrap_err() {
        BuildError::Class { name, problem } => (name, problem),
        e => panic!("{e}"),
    };
    assert_eq!(class(soft(MIB).class("", SHARED, MIB)).0, "");
    assert_eq!(class(soft(MIB).class("default", SHARED, MIB)).0, "default");
    let twice = soft(MIB).class("a", SHARED, MIB).class("a", SHARED, MIB);
    assert!(class(twice).1.contains("two"));
    assert!(class(soft(MIB).class("a", SHARED, 0)).1.contains("capacity is 0"));
    let conflict = soft(MIB).class("a", Access::REMOTE_WRITE, MIB).build().unwrap_err();
    assert!(matches!(conflict, BuildError::Access { .. }), "{conflict}");

    let share = |b: pinpool::Builder| match b.build().unwrap_err() {
        BuildError::Share { name, asked, free, problem, .. } => (name, asked, free, problem),
        e => panic!("{e}"),
    };
    assert_eq!(share(soft(MIB).share("", 4096)).0, "");
    assert!(share(soft(MIB).share("a", 4096).share("a", 4096)).3.contains("two"));
    assert!(share(soft(MIB).share_in("b", "a", 4096)).3.contains("no class"));
    assert!(share(soft(MIB).share("a", 0)).3.contains("nothing"));
    assert!(share(soft(MIB).share("a", usize::MAX)).3.contains("nothing"));
    let (_, asked, free, _) = share(soft(MIB).share("a", MIB / 2).share("b", MIB / 2 + 1));
    assert_eq!((asked, free), (MIB / 2, MIB / 2 - 4096), "the longest is placed first");
    let torn = soft(2 * MIB)
        .arena_size(MIB)
        .share("a", Reserve::buffers(2, MIB / 2 + 1))
        .share("b", MIB / 2);
    assert!(torn.build().is_ok(), "one in each arena, and b beside");
    let torn = soft(2 * MIB).arena_size(MIB).share("a", Reserve::buffers(3, MIB / 2 + 1)).build();
    assert!(matches!(torn, Err(BuildError::Share { .. })));
}

#[test]
fn raw_pointers_and_look_ups_cover_all_heaps() {
    let pool = soft(MIB)
        .access(Access::LOCAL_WRITE)
        .class("shared", SHARED, MIB)
        .share("own", 64 << 10)
        .build()
        .unwrap();
    let (class, own): (Class<Remote>, _) =
        (pool.class("shared").unwrap(), pool.share("own").unwrap());
    let raws = [
        pool.alloc(100).unwrap().into_raw(),
        own.alloc(100).unwrap().into_raw(),
        class.alloc(100).unwrap().into_raw(),
    ];
    assert_eq!(pool.stats().live_buffers, 3);
    for (i, raw) in raws.iter().enumerate() {
        let ptr = raw.as_ptr();
        // SAFETY: the only copy of each pointer; wrong ones must be refused.
        unsafe {
            assert!(matches!(pool.free_raw(ptr.wrapping_add(1)), Err(FreeError::Interior { .. })));
            // A handle whose type says Remote gives no buffer that is not.
            let typed = class.pool().from_raw(ptr);
            if i < 2 {
                let addr = ptr as usize;
                assert_eq!(typed.unwrap_err(), FreeError::OtherReach { addr, remote: false });
                let back = pool.from_raw(ptr).unwrap();
                assert_eq!(back.as_ptr(), ptr.cast_const());
                assert_eq!(back.remote(), None);
            } else {
                assert_eq!(typed.unwrap().remote().len, 128);
            }
            assert!(matches!(pool.free_raw(ptr), Err(FreeError::NotOut { .. })), "twice");
        }
    }
    // SAFETY: must be refused.
    unsafe {
        assert_eq!(pool.free_raw(std::ptr::null_mut()), Err(FreeError::Null));
        assert_eq!(class.pool().free_raw(std::ptr::null_mut()), Err(FreeError::Null));
        let mut on_stack = 0u8;
        assert!(matches!(pool.free_raw(&raw mut on_stack), Err(FreeError::Foreign { .. })));
    }
    assert_eq!(pool.stats().live_buffers, 0);
    // Each went home: the share has all of its reserve again.
    pool.trim();
    assert_eq!(pool.stats().shares[0].reserve.largest_free, 64 << 10);
    pool.check();
}

#[test]
fn books_are_kept_apart_and_sum_up() {
    let pool = soft(MIB)
        .class("shared", SHARED, MIB)
        .share("own", 64 << 10)
        .share_in("shared", "theirs", 128 << 10)
        .build()
        .unwrap();
    let class: Class = pool.class("shared").unwrap();
    let (own, theirs) = (pool.share("own").unwrap(), pool.share("theirs").unwrap());
    let held = [
        (0..3).map(|_| pool.alloc(4096).unwrap()).collect::<Vec<_>>(),
        (0..5).map(|_| own.alloc(4096).unwrap()).collect(),
        (0..7).map(|_| class.alloc(4096).unwrap()).collect(),
        (0..9).map(|_| theirs.alloc(8192).unwrap()).collect(),
    ];
    let s = pool.stats();
    assert!(s.balanced(), "{s:#?}");
    assert_eq!((s.live_buffers, s.arenas, s.register_calls, s.capacity), (24, 2, 2, 2 * MIB));
    let names: Vec<_> = s.access_classes.iter().map(|a| (&*a.name, a.arenas)).collect();
    assert_eq!(names, [("default", 1), ("shared", 1)]);
    let (default, shared) = (&s.access_classes[0], &s.access_classes[1]);
    assert_eq!((default.all.live_buffers, default.unreserved.live_buffers), (8, 3));
    assert_eq!((shared.all.live_buffers, shared.unreserved.live_buffers), (16, 7));
    assert_eq!((default.all.capacity, default.unreserved.capacity), (MIB, MIB - (64 << 10)));
    assert_eq!(shared.access, SHARED);
    let shares: Vec<_> =
        s.shares.iter().map(|s| (&*s.name, &*s.class, s.reserve.live_buffers, s.refused)).collect();
    assert_eq!(shares, [("own", "default", 5, 0), ("theirs", "shared", 9, 0)]);
    let block = |n| s.classes.iter().find(|c| c.block == n).unwrap().live_buffers;
    assert_eq!((block(4096), block(8192)), (15, 9));
    drop(held);
    pool.check();
}

#[test]
fn more_heaps_than_slots_work_too() {
    let device = Device::soft();
    let mut pools = Vec::new();
    for i in 0..100 {
        let pool = soft(64 << 10)
            .device(device.clone())
            .class("b", SHARED, 64 << 10)
            .share("s", Reserve::buffers(2, 4096))
            .build()
            .unwrap_or_else(|e| panic!("{i}: {e}"));
        pools.push((pool.class::<Any>("b").unwrap(), pool.share("s").unwrap(), pool));
    }
    for (class, share, pool) in &pools {
        let rest: Vec<_> = std::iter::from_fn(|| pool.alloc(4096).ok()).collect();
        assert_eq!(rest.len(), 14);
        let held =
            [share.alloc(4096).unwrap(), share.alloc(4096).unwrap(), class.alloc(4096).unwrap()];
        exhausted(share.alloc(4096));
        drop(rest);
        drop(share.alloc(4096).unwrap());
        drop(held);
        drop(share.alloc(4096).unwrap());
        pool.check();
    }
    drop(pools);
    assert_eq!(device.as_soft().unwrap().regions(), 0);
}

#[test]
fn a_thread_that_ends_gives_back_to_each_heap() {
    let pool = soft(MIB).class("b", SHARED, MIB).share("s", 256 << 10).build().unwrap();
    let (class, share): (Class, _) = (pool.class("b").unwrap(), pool.share("s").unwrap());
    for _ in 0..20 {
        thread::scope(|s| {
            s.spawn(|| {
                let all: Vec<Buf> = (0..30)
                    .flat_map(|_| [pool.alloc(900), class.alloc(900), share.alloc(900)])
                    .map(Result::unwrap)
                    .collect();
                drop(all);
            });
        });
    }
    let s = pool.stats();
    assert_eq!((s.live, s.live_buffers), (0, 0));
    pool.trim();
    let s = pool.stats();
    assert_eq!(s.shares[0].reserve.largest_free, 256 << 10);
    assert_eq!(s.access_classes[1].unreserved.largest_free, MIB);
    pool.check();
}

#[test]
fn a_pool_that_grows_keeps_its_shares_and_serves_all_from_what_comes() {
    let pool = soft(MIB)
        .max_capacity(3 * MIB)
        .arena_size(MIB)
        .low_watermark(0)
        .growth_by_hand()
        .class("b", SHARED, MIB)
        .share("own", Reserve::buffers(64, 4096))
        .build()
        .unwrap();
    let own = pool.share("own").unwrap();
    assert_eq!((pool.capacity(), pool.max_capacity()), (2 * MIB, 4 * MIB));
    let first: Vec<_> = std::iter::from_fn(|| pool.alloc(4096).ok()).collect();
    assert_eq!(first.len(), 192);
    let e = exhausted(pool.alloc(4096));
    assert_eq!(
        (e.capacity, e.reserved, e.max_capacity),
        (768 << 10, 256 << 10, 3 * MIB - (256 << 10))
    );
    let reserve: Vec<_> = (0..64).map(|_| own.alloc(4096).unwrap()).collect();
    // A share that is refused asks for more, as everybody does.
    let e = exhausted(own.alloc(4096));
    assert!(e.to_string().contains("may grow"), "{e}");
    pool.tick(Duration::from_secs(1));
    assert_eq!((pool.capacity(), pool.stats().growths), (3 * MIB, 1));
    let more: Vec<_> = (0..256).map(|_| own.alloc(4096).unwrap()).collect();
    exhausted(own.alloc(4096));
    exhausted(pool.alloc(4096));
    assert_eq!(pool.stats().shares[0].reserve.live_buffers, 64);
    drop(reserve);
    exhausted(pool.alloc(4096));
    drop((own.alloc(4096).unwrap(), more, first));
    pool.check();
    let stats = pool.stats();
    assert_eq!((stats.live, stats.access_classes[0].all.capacity), (0, 2 * MIB));
}

#[test]
fn several_devices_have_all_classes_and_shares() {
    let registrars: Vec<_> = (0..3).map(|_| FaultyRegistrar::new(&Device::soft())).collect();
    let devices: Vec<_> = registrars.iter().map(|r| Device::custom(r.clone())).collect();
    let [a, b, c] = &devices[..] else { unreachable!() };
    let pool = soft(MIB)
        .access(Access::LOCAL_WRITE)
        .devices([a.clone(), b.clone()])
        .class("shared", SHARED, MIB)
        .share("own", Reserve::buffers(2, 4096))
        .share_in("shared", "theirs", Reserve::buffers(2, 4096))
        .build()
        .unwrap();
    let shared: Class<Rails> = pool.class("shared").unwrap();
    let bufs = [
        pool.alloc(4096).unwrap(),
        pool.share("own").unwrap().alloc(4096).unwrap(),
        pool.alloc_in(&shared, 4096).unwrap(),
        shared.share("theirs").unwrap().alloc(4096).unwrap(),
    ];
    let check = |device: &Device, there: bool| {
        for (i, buf) in bufs.iter().enumerate() {
            let keys = buf.keys_on(device);
            assert_eq!(keys.is_ok(), there, "buffer {i}");
            let Ok(keys) = keys else { continue };
            assert_eq!(pool.keys_of_on(buf.as_ptr(), device).unwrap(), Some(keys));
            assert_eq!(keys.rkey.is_some(), i >= 2);
            let addr = buf.as_ptr() as usize;
            let arenas = pool.arenas_on(device).unwrap();
            let of = |a: &&pinpool::ArenaInfo| {
                (a.addr.as_ptr() as usize..a.addr.as_ptr() as usize + a.len).contains(&addr)
            };
            assert_eq!(arenas.iter().find(of).unwrap().keys, keys);
        }
    };
    check(a, true);
    check(b, true);
    check(c, false);
    assert_eq!(registrars.iter().map(FaultyRegistrar::live).collect::<Vec<_>>(), [2, 2, 0]);
    // From a handle of any class a device comes and goes with all of them.
    shared.pool().add_device(c).wait().unwrap();
    check(c, true);
    assert_eq!(registrars[2].live(), 2);
    pool.remove_device(a).wait().unwrap();
    check(a, false);
    check(c, true);
    assert_eq!(registrars[0].live(), 0);
    // One that refuses the second class's arena has none of them.
    let odd = FaultyRegistrar::new(&Device::soft()).fault(Fault::Register(2, 12));
    let device = Device::custom(odd.clone());
    pool.add_device(&device).wait().unwrap_err();
    check(&device, false);
    assert_eq!((odd.register_calls(), odd.live()), (2, 0));
    drop((pool, shared));
    check_live(&registrars[1..], 2);
    drop(bufs);
    check_live(&registrars[1..], 0);
}

#[track_caller]
fn check_live(registrars: &[FaultyRegistrar], regions: u64) {
    assert!(registrars.iter().all(|r| r.live() == regions));
}

#[test]
fn adopted_memory_is_one_class_and_others_are_mapped_beside_it() {
    let mut memory = memmap2::MmapMut::map_anon(MIB).unwrap();
    let range = memory.as_ptr_range();
    // SAFETY: the mapping is used by the pool alone until it is closed below.
    let builder = unsafe { Pool::builder().adopt(memory.as_mut_ptr(), memory.len()) };
    let pool = builder
        .device(Device::soft())
        .pages(pinpool::Pages::Base)
        .class("b", SHARED, MIB)
        .share("own", 64 << 10)
        .build()
        .unwrap();
    let own = pool.share("own").unwrap().alloc(64 << 10).unwrap();
    assert!(range.contains(&own.as_ptr()));
    assert!(range.contains(&pool.alloc(4096).unwrap().as_ptr()));
    let beside = pool.class::<Remote>("b").unwrap().alloc(4096).unwrap();
    assert!(!range.contains(&beside.as_ptr()));
    pool.check();
    drop((own, beside));
    pool.close().unwrap();
    memory[..3].copy_from_slice(b"yes");
}

#[test]
fn tokens_and_posted_work_of_all_heaps_come_back_through_any_handle() {
    let pool = soft(MIB)
        .access(Access::LOCAL_WRITE)
        .class("shared", SHARED, MIB)
        .share("own", 64 << 10)
        .share_in("shared", "theirs", 64 << 10)
        .build()
        .unwrap();
    let (class, own): (Class<Remote>, _) =
        (pool.class("shared").unwrap(), pool.share("own").unwrap());
    let theirs = pool.share("theirs").unwrap();
    let bufs = || {
        let any: Class = pool.class("shared").unwrap();
        [pool.alloc(100), own.alloc(100_000 >> 4), any.alloc(4096), theirs.alloc(70)]
            .map(Result::unwrap)
    };
    let mut seen = Vec::new();
    for (i, buf) in bufs().into_iter().enumerate() {
        let (addr, len) = (buf.as_ptr(), buf.len());
        let token = buf.into_token();
        assert!(!seen.contains(&token));
        seen.push(token);
        assert_eq!(pool.in_flight().len(), 1);
        if i > 0 {
            assert!(matches!(pool.from_token(token), Err(TokenError::OtherHeap { .. })));
        }
        let typed = class.pool().from_any_token(token);
        let back: Buf = if i < 2 {
            assert!(matches!(typed, Err(TokenError::OtherReach { remote: false, .. })));
            pool.from_any_token(token).unwrap()
        } else {
            typed.unwrap().into()
        };
        assert_eq!((back.as_ptr(), back.len()), (addr, len));
        assert!(matches!(pool.from_any_token(token), Err(TokenError::NotInFlight { .. })));
    }
    // A bare token whose completion is reported, and posted work that is awaited or dropped.
    for buf in bufs() {
        pool.complete(buf.into_token(), Outcome { status: 0, bytes: 0 }).unwrap();
    }
    for (i, buf) in bufs().into_iter().enumerate() {
        let addr = buf.as_ptr();
        let mut token = 0;
        let posted = pool
            .post(buf, |t, _| {
                token = t;
                Ok::<(), ()>(())
            })
            .map_err(|(_, e)| e)
            .unwrap();
        if i % 2 == 0 {
            drop(posted);
            assert_eq!(pool.stats().in_flight, 1);
            pool.complete(token, Outcome { status: 0, bytes: 0 }).unwrap();
        } else {
            pool.complete(token, Outcome { status: 0, bytes: 0 }).unwrap();
            assert_eq!(posted.try_take().unwrap().0.as_ptr(), addr);
        }
        assert!(pool.complete(token, Outcome { status: 0, bytes: 0 }).is_err(), "once");
    }
    let other = soft(MIB).build().unwrap();
    let strange = other.alloc(64).unwrap();
    assert!(pool.post(strange, |_, _| Ok::<(), ()>(())).is_err(), "of another pool");
    assert!(matches!(pool.from_token(1 << 62), Err(TokenError::OtherPool { .. })));
    assert_eq!((pool.stats().in_flight, pool.stats().live), (0, 0));
    pool.check();
    // A token alone keeps its class's arenas, and the pool's handles may go.
    let token = theirs.alloc(64).unwrap().into_token();
    drop((own, theirs));
    let handle = class.pool().clone();
    drop((class, pool));
    drop(handle.from_any_token(token).unwrap());
    handle.close().unwrap();
}
