//! Tracking. Proves: what is out is told by place and age, at any time and when the last handle goes; a pool that
//! tracks one of so many, or none, tells that much.
#![cfg(feature = "fault")]
#![allow(clippy::unwrap_used)]

mod common;
#[path = "common/told.rs"]
mod told;

use std::{alloc::Layout, time::Duration};

use common::soft;
use pinpool::{Batch, Buf, Pool, Reserve, Track};
use told::{MIB, Told, late_write};

#[test]
fn what_is_out_is_told_by_place_and_when_the_last_handle_goes() {
    let told = Told::default();
    let pool = told.hear(soft(MIB).track(Track::all())).build().unwrap();
    let line = line!() + 1;
    let few: Vec<_> = (0..3).map(|_| pool.alloc(4096).unwrap()).collect();
    let other = pool.alloc_layout(Layout::from_size_align(50_000, 8192).unwrap()).unwrap();
    let mut batch = Batch::with_capacity(2);
    pool.alloc_many(&mut batch, 1024, 2).unwrap();
    let token = pool.alloc_wait(64, Duration::ZERO).unwrap().into_token();
    let report = pool.outstanding();
    assert_eq!((report.buffers, report.in_flight, report.every), (7, 1, 1));
    assert_eq!(report.bytes, pool.stats().live);
    let lines: Vec<_> =
        report.sites.iter().map(|s| (s.site.location().line() - line, s.buffers)).collect();
    assert_eq!(lines, [(1, 1), (0, 3), (3, 2), (4, 1)], "most bytes first");
    assert!(report.sites.iter().all(|s| s.site.location().file() == file!()));
    assert!(report.sites.iter().all(|s| s.site.backtrace().is_none()));
    let text = report.to_string();
    assert!(
        text.contains("3 x, 12 KiB") && text.contains(&format!("{}:{line}:", file!())),
        "{text}"
    );
    // Where the line says nothing the stack is taken in any case.
    #[cfg(feature = "allocator-api2")]
    {
        let v = allocator_api2::vec::Vec::<u8, _>::with_capacity_in(5000, &pool);
        let text = pool.outstanding().to_string();
        assert!(text.contains("what_is_out_is_told_by_place"), "{text}");
        drop(v);
    }
    drop(other);
    drop(batch);
    drop(pool.from_token(token).unwrap());
    drop(pool);
    let still = told.1.lock().unwrap().pop().unwrap();
    assert_eq!((still.buffers, still.sites.len(), still.sites[0].buffers), (3, 1, 3));
    assert!(still.sites[0].oldest > Duration::ZERO);
    drop(few);
    assert!(told.1.lock().unwrap().is_empty(), "told once");
}

#[test]
fn one_of_so_many_is_tracked_and_a_backtrace_says_who_called() {
    let pool = soft(MIB).track(Track::every(10).backtraces(true)).build().unwrap();
    #[inline(never)]
    fn a_wrapper_for_all(pool: &Pool) -> Buf {
        pool.alloc(64).unwrap()
    }
    let bufs: Vec<_> = (0..100).map(|_| a_wrapper_for_all(&pool)).collect();
    let report = pool.outstanding();
    assert_eq!((report.buffers, report.every), (100, 10));
    let sites: usize = report.sites.iter().map(|s| s.buffers).sum();
    assert_eq!((sites, report.sites.len()), (10, 1), "one stack, one line");
    let text = report.to_string();
    assert!(text.contains("one of 10 is tracked") && text.contains("a_wrapper_for_all"), "{text}");
    drop(bufs);
    assert!(pool.outstanding().sites.is_empty());
    // A share's are known by their line, in the reserve and beyond it.
    let pool = soft(MIB).share("part", Reserve::bytes(4096)).track(Track::all()).build().unwrap();
    let share = pool.share("part").unwrap();
    let line = line!() + 1;
    let _bufs: Vec<_> = (0..3).map(|_| share.alloc(4096).unwrap()).collect();
    let report = pool.outstanding();
    assert_eq!((report.sites.len(), report.sites[0].buffers), (1, 3), "{report}");
    assert_eq!(report.sites[0].site.location().line(), line);
}

#[test]
fn a_pool_that_watches_nothing_says_how_much_is_out_and_nothing_more() {
    let told = Told::default();
    let pool = told.hear(soft(MIB)).build().unwrap();
    let bufs: Vec<_> = (0..5).map(|_| pool.alloc(4096).unwrap()).collect();
    late_write(bufs[0].as_ptr() as usize + 4096, b"!");
    assert_eq!(pool.check_free(), 0);
    let report = pool.outstanding();
    assert_eq!((report.buffers, report.every, report.sites.len()), (5, 0, 0));
    drop(pool);
    let still = told.1.lock().unwrap().pop().unwrap();
    assert_eq!((still.buffers, still.bytes), (5, 5 * 4096));
    assert!(still.to_string().contains("not tracked"));
    drop(bufs);
    told.none();
    // Nor of one that is whole when it goes.
    drop(told.hear(soft(MIB)).build().unwrap());
    assert!(told.1.lock().unwrap().is_empty());
}
