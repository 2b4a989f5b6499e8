//! Slabs and spans by themselves: all that fits is had and comes back, nothing overlaps, and wrong addresses are
//! told.

use super::*;
use crate::access::{LKey, RKey};

const BASE: usize = 1 << 40;

/// Two arenas, 1 MiB apart, of 1 MiB and 512 KiB.
fn slabs() -> Slabs {
    let map = PageMap::new(BASE, 2 << 20, 20).expect("map");
    let ranges = [(0, 1 << 20), (1 << 20, 512 << 10)];
    for (i, &(offset, len)) in ranges.iter().enumerate() {
        map.publish(offset, len, PackedKeys::new(LKey::new(i as u32 + 1), RKey::new(9)));
    }
    Slabs::new(map, ranges.into_iter(), 1 << 20, 0, Arc::new(Bell::new())).expect("slabs")
}

fn take(s: &Slabs, class: usize, want: usize) -> Vec<Entry> {
    let mut v = Vec::new();
    s.take(class, want, |e| v.push(e));
    s.check();
    v
}

#[test]
fn every_class_can_use_all_that_fits_and_gives_all_back() {
    let s = slabs();
    for class in (0..CLASSES).filter(|&c| s.serves(c)) {
        let got = take(&s, class, usize::MAX);
        let size = size_class::size_of(class);
        assert!(!got.is_empty(), "class {class}");
        let mut addrs: Vec<_> = got.iter().map(|e| e.ptr.as_ptr() as usize).collect();
        addrs.sort_unstable();
        assert!(addrs.windows(2).all(|w| w[0] + size <= w[1]), "no overlap");
        for e in &got {
            let (first, last) = (e.ptr.as_ptr() as usize, e.ptr.as_ptr() as usize + size - 1);
            assert_eq!(s.map.keys_of(first), Some(e.keys));
            assert_eq!(s.map.keys_of(last), Some(e.keys), "inside one region (P3)");
        }
        let _ = s.give(got.iter().map(|e| e.ptr));
        s.check();
        assert_eq!(s.counts().largest_run, 1 << 20, "class {class}: merged again");
    }
}

#[test]
fn runs_do_not_merge_across_arenas() {
    let s = slabs();
    let whole = s.take_span(1 << 20, 1).expect("an arena");
    let half = s.take_span(512 << 10, 1).expect("the other");
    assert!(s.take_span(1, 1).is_none());
    let _ = s.give([whole.ptr, half.ptr].into_iter());
    s.check();
    assert!(s.take_span((1 << 20) + 1, 1).is_none(), "no span straddles two regions");
}

#[test]
fn aligned_spans_are_aligned_and_leave_the_rest() {
    let s = slabs();
    let small = s.take_span(4096, 1).expect("a page");
    let e = s.take_span(100_000, 256 << 10).expect("aligned");
    s.check();
    assert_eq!(e.ptr.as_ptr() as usize % (256 << 10), 0);
    let _ = s.give([small.ptr, e.ptr].into_iter());
    s.check();
    assert_eq!(s.counts().free_runs, 3 << 19);
}

#[test]
fn wrong_pointers_are_told() {
    let s = slabs();
    let e = take(&s, size_class::class_of(4096), 1)[0];
    let addr = e.ptr.as_ptr() as usize;
    assert_eq!(s.refusal(addr), FreeError::NotOut { addr });
    let inside = FreeError::Interior { addr: addr + 64, offset: 64, block: 4096 };
    assert_eq!(s.refusal(addr + 64), inside);
    assert_eq!(s.refusal(0), FreeError::Null);
    assert!(matches!(s.refusal(BASE - 1), FreeError::Foreign { .. }));
    assert!(matches!(s.refusal(BASE + (2 << 20)), FreeError::Foreign { .. }));
    let _ = s.give([e.ptr].into_iter());
    assert_eq!(s.refusal(addr), FreeError::NotOut { addr }, "stale");
}

#[test]
fn the_last_block_of_a_draining_pool_is_told() {
    let s = slabs();
    let got = take(&s, 3, 2);
    assert_eq!(s.start_draining(), Given::More);
    assert_eq!(s.give([got[0].ptr].into_iter()), Given::More);
    assert_eq!(s.give([got[1].ptr].into_iter()), Given::Last);
}
