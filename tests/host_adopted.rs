//! Pools of memory that the caller mapped:
//! - each range that will not do is refused with what and where, and nothing of it is changed;
//! - private and shared mappings that start at any page serve as any arena does, also cut into several, also
//!   with addresses that count from an arena's start;
//! - the mapping comes back as it was: the same in smaps, with what its users left in it;
//! - memory has one allocator, and what a device kept has none.
#![cfg(feature = "fault")]
#![allow(clippy::unwrap_used, clippy::disallowed_methods)]

mod common;

use std::{
    alloc::Layout,
    fs, ptr, slice,
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
};

use common::Rng;
use pinpool::{
    Access, AdoptError, Backing, BuildError, Builder, Device, Numa, PageSize, Pages, Pool,
    device::{Fault, FaultyRegistrar},
};

const PAGE: usize = 4096;
const MIB: usize = 1 << 20;
const ALL: Access = Access::LOCAL_WRITE.union(Access::REMOTE);

/// Tests that look at their mappings' lines, which others' mappings beside them would join.
static ALONE: Mutex<()> = Mutex::new(());

/// A mapping of this test's, with an inaccessible page on both sides, that starts one page past a multiple of
/// `align`.
struct Map {
    whole: *mut u8,
    whole_len: usize,
    addr: *mut u8,
    len: usize,
}

impl Map {
    fn new(len: usize, flags: i32) -> Self {
        let align = len.next_power_of_two();
        let whole_len = len + align + 2 * PAGE;
        // SAFETY: a new mapping, wherever there is room.
        let whole = unsafe {
            libc::mmap(
                ptr::null_mut(),
                whole_len,
                libc::PROT_NONE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        assert_ne!(whole, libc::MAP_FAILED);
        let start = (whole as usize).next_multiple_of(align) + PAGE;
        // SAFETY: inside the mapping above, which nobody else uses.
        let addr = unsafe {
            libc::mmap(
                start as *mut _,
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                flags | libc::MAP_ANONYMOUS | libc::MAP_FIXED,
                -1,
                0,
            )
        };
        assert_eq!(addr as usize, start);
        Self { whole: whole.cast(), whole_len, addr: addr.cast(), len }
    }

    fn private(len: usize) -> Self {
        Self::new(len, libc::MAP_PRIVATE)
    }

    fn at(&self, offset: usize) -> *mut u8 {
        self.addr.wrapping_add(offset)
    }

    fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: mapped readable and writable; the tests call this while no pool uses it.
        unsafe { slice::from_raw_parts_mut(self.addr, self.len) }
    }

    /// All that smaps says of it (what of it is locked, too), but when pages were used last.
    fn smaps(&self) -> String {
        let (start, end) = (self.addr as usize, self.addr as usize + self.len);
        let smaps = fs::read_to_string("/proc/self/smaps").unwrap();
        let mut inside = false;
        let mut lines = String::new();
        for line in smaps.lines() {
            let first = line.split_whitespace().next().unwrap_or_default();
            if let Some((a, b)) = first.split_once('-') {
                let address = |s| usize::from_str_radix(s, 16);
                if let (Ok(a), Ok(b)) = (address(a), address(b)) {
                    inside = a < end && start < b;
                }
            }
            if inside && first != "Referenced:" {
                lines.extend([line, "\n"]);
            }
        }
        lines
    }

    fn protect(&self, offset: usize, len: usize, rights: i32) {
        // SAFETY: pages of this mapping, which nobody uses meanwhile.
        assert_eq!(unsafe { libc::mprotect(self.at(offset).cast(), len, rights) }, 0);
    }
}

impl Drop for Map {
    fn drop(&mut self) {
        // SAFETY: mapped by `new`, and no longer used.
        unsafe { libc::munmap(self.whole.cast(), self.whole_len) };
    }
}

fn adopting(addr: *mut u8, len: usize) -> Builder {
    // SAFETY: each test keeps its mapping until the pool is gone, or is refused.
    unsafe { Pool::builder().adopt(addr, len) }.device(Device::soft()).access(ALL)
}

#[track_caller]
fn refused(builder: Builder) -> AdoptError {
    match builder.build() {
        Err(BuildError::Adopt(e)) => e,
        other => panic!("{other:?}"),
    }
}

#[test]
fn what_is_no_range_is_refused() {
    let map = Map::private(MIB);
    assert!(matches!(refused(adopting(ptr::null_mut(), 4096)), AdoptError::Empty));
    assert!(matches!(refused(adopting(map.addr, 0)), AdoptError::Empty));
    let e = refused(adopting(map.addr, usize::MAX - 100));
    assert!(matches!(e, AdoptError::Wraps { .. }), "{e}");
    let e = refused(adopting(map.addr, usize::MAX / 2));
    assert!(matches!(e, AdoptError::Wraps { .. }), "{e}");
    for (offset, len) in [(1, PAGE), (0, PAGE + 1), (64, 2 * PAGE - 64), (8, 8)] {
        let e = refused(adopting(map.at(offset), len));
        assert!(matches!(e, AdoptError::NotWholePages { page_size: PAGE, .. }), "{e}");
    }
    let text = refused(adopting(map.at(64), 3 * PAGE)).to_string();
    let would_do = format!("{:?}..{:?} would do", map.at(PAGE), map.at(3 * PAGE));
    assert!(text.contains(&would_do), "{would_do} in {text}");
    let text = refused(adopting(map.at(64), 64)).to_string();
    assert!(text.contains("there is none in it"), "{text}");
    let e = refused(adopting(usize::MAX.wrapping_sub(PAGE - 1) as *mut u8, PAGE - 1));
    assert!(matches!(e, AdoptError::NotWholePages { .. }), "{e}");
}

#[test]
fn what_may_not_be_used_or_is_not_there_is_refused() {
    let map = Map::private(MIB);
    let e = refused(adopting(map.at(MIB - PAGE), 2 * PAGE));
    let end = map.at(MIB) as usize;
    assert!(
        matches!(&e, AdoptError::Protection { at, len: PAGE, rights } if *at == end && rights == "---p"),
        "the guard: {e:?}"
    );
    map.protect(8 * PAGE, 3 * PAGE, libc::PROT_READ);
    let e = refused(adopting(map.addr, MIB));
    let at = map.at(8 * PAGE) as usize;
    assert!(
        matches!(&e, AdoptError::Protection { at: a, len, rights } if (*a, *len) == (at, 3 * PAGE) && rights == "r--p"),
        "{e:?}"
    );
    // SAFETY: pages of this test's mapping.
    assert_eq!(unsafe { libc::munmap(map.at(8 * PAGE).cast(), 3 * PAGE) }, 0);
    let e = refused(adopting(map.addr, MIB));
    assert!(
        matches!(e, AdoptError::NotMapped { at: a, len } if (a, len) == (at, 3 * PAGE)),
        "{e:?}"
    );
    adopting(map.addr, 8 * PAGE).build().expect("what is before the hole");
}

#[test]
fn pages_are_insisted_on_or_taken_as_they_are() {
    let map = Map::private(MIB);
    for pages in [Pages::Prefer(PageSize::Huge2M), Pages::Prefer(PageSize::Huge1G), Pages::Base] {
        let pool = adopting(map.addr, MIB).pages(pages).build().expect("base pages");
        assert_eq!(pool.arenas()[0].page_size, PAGE);
    }
    let e = refused(adopting(map.addr, MIB).pages(Pages::Require(PageSize::Huge2M)));
    assert!(matches!(e, AdoptError::OtherPages { asked: 0x20_0000, found: PAGE }), "{e}");
}

#[test]
fn what_the_owner_of_the_mapping_decided_cannot_be_set() {
    let map = Map::private(MIB);
    let conflict = |b: Builder, what: &str| match refused(b) {
        AdoptError::Conflict(w) => assert_eq!(w, what),
        e => panic!("{what}: {e}"),
    };
    conflict(adopting(map.addr, MIB).capacity(MIB), "Builder::capacity");
    conflict(adopting(map.addr, MIB).max_capacity(2 * MIB), "Builder::max_capacity");
    conflict(adopting(map.addr, MIB).numa(Numa::Node(0)), "Builder::numa");
    conflict(adopting(map.addr, MIB).numa(Numa::Interleave), "Builder::numa");
    conflict(adopting(map.addr, MIB).backing(Backing::Memfd), "Builder::backing");
    let e = adopting(map.addr, MIB).access(Access::REMOTE_WRITE).build().unwrap_err();
    assert!(matches!(e, BuildError::Access { .. }), "{e}");
    let e = adopting(map.addr, MIB).arena_size(3 * PAGE).build().unwrap_err();
    assert!(matches!(e, BuildError::ArenaSize { .. }), "{e}");
}

#[test]
fn memory_has_one_allocator() {
    let map = Map::private(MIB);
    let own = common::soft(MIB).build().unwrap();
    let arena = own.arenas()[0];
    let start = arena.addr.as_ptr() as usize;
    let e = refused(adopting(arena.addr.as_ptr(), PAGE));
    let held = (start - PAGE, start + MIB + PAGE);
    assert!(matches!(e, AdoptError::InUse { start, end } if (start, end) == held), "{e}");

    let pool = adopting(map.at(2 * PAGE), 2 * PAGE).build().unwrap();
    let held = (map.at(2 * PAGE) as usize, map.at(4 * PAGE) as usize);
    for (offset, len) in [(0, MIB), (0, 3 * PAGE), (2 * PAGE, PAGE), (3 * PAGE, 10 * PAGE)] {
        let e = refused(adopting(map.at(offset), len));
        assert!(matches!(e, AdoptError::InUse { start, end } if (start, end) == held), "{e}");
    }
    let before = adopting(map.addr, 2 * PAGE).build().expect("up to it");
    let after = adopting(map.at(4 * PAGE), PAGE).build().expect("from its end");
    let live = pool.alloc(100).unwrap();
    drop(pool);
    assert!(matches!(
        refused(adopting(map.addr.wrapping_add(2 * PAGE), PAGE)),
        AdoptError::InUse { .. }
    ));
    drop(live);
    adopting(map.at(2 * PAGE), 2 * PAGE).build().expect("given back with the last buffer");
    drop((before, after));
    adopting(map.addr, MIB).build().expect("all of it");
}

#[test]
fn a_locked_range_is_refused_where_the_device_would_unlock_it() {
    let map = Map::private(16 * PAGE);
    // By the bare call: the address sanitizer's `mlock` does nothing.
    // SAFETY: pages of this test's mapping.
    assert_eq!(unsafe { libc::syscall(libc::SYS_mlock, map.at(4 * PAGE), PAGE) }, 0);
    let e = refused(adopting(map.addr, 16 * PAGE));
    let at = map.at(4 * PAGE) as usize;
    assert!(matches!(&e, AdoptError::Locked { at: a, len: PAGE, .. } if *a == at), "{e:?}");
    // SAFETY: as above.
    assert_eq!(unsafe { libc::syscall(libc::SYS_munlock, map.at(4 * PAGE), PAGE) }, 0);
    adopting(map.addr, 16 * PAGE).build().expect("unlocked");
}

/// Buffers of all kinds from a pool on `map`: inside it, apart, aligned, with contents kept.
fn use_it(pool: &Pool, map: &Map) {
    let inside = map.addr as usize..map.addr as usize + map.len;
    let mut rng = Rng(map.len as u64);
    for _ in 0..20 {
        let mut bufs = Vec::new();
        loop {
            let layout = Layout::from_size_align(
                rng.size(1, map.len / 8),
                1 << rng.below(20.min(map.len.ilog2() as usize - 2)),
            );
            let layout = layout.unwrap();
            let Ok(mut buf) = pool.alloc_layout(layout) else { break };
            let start = buf.as_ptr() as usize;
            assert!(start.is_multiple_of(layout.align()), "{start:#x} {layout:?}");
            assert!(inside.contains(&start) && inside.contains(&(start + buf.capacity() - 1)));
            let fill = bufs.len() as u8;
            buf.set_len(buf.capacity()).unwrap();
            buf.fill(fill);
            assert_eq!(pool.keys_of(buf.as_ptr()), Some(buf.keys()));
            assert_eq!(pool.keys_of(&raw const buf[buf.len() - 1]), Some(buf.keys()), "one region");
            bufs.push((buf, fill));
        }
        assert!(!bufs.is_empty());
        for (buf, fill) in &bufs {
            assert!(buf.iter().all(|b| b == fill), "nobody else's");
        }
        while !bufs.is_empty() {
            bufs.swap_remove(rng.below(bufs.len()));
        }
        pool.check();
    }
}

#[test]
fn mappings_of_each_kind_and_any_start_serve() {
    for flags in [libc::MAP_PRIVATE, libc::MAP_SHARED] {
        for len in [PAGE, 3 * PAGE, MIB, 5 * MIB + 3 * PAGE] {
            let map = Map::new(len, flags);
            let pool = adopting(map.addr, len).build().unwrap();
            assert_eq!((pool.capacity(), pool.max_len(), pool.arenas().len()), (len, len, 1));
            assert_eq!(pool.arenas()[0].addr.as_ptr(), map.addr);
            assert_eq!((pool.stats().register_calls, pool.arenas()[0].access), (1, ALL));
            drop(pool.alloc(len).expect("all of it in one buffer"));
            for foreign in [map.addr.wrapping_sub(1), map.at(len), ptr::null_mut()] {
                assert_eq!(pool.keys_of(foreign), None);
            }
            if len > 3 * PAGE {
                use_it(&pool, &map);
            }
            pool.close().unwrap();
        }
    }
}

#[test]
fn adopted_memory_is_registered_on_each_of_several_devices() {
    let map = Map::private(3 * MIB + PAGE);
    let devices = [Device::soft(), Device::soft()];
    let builder = adopting(map.addr, map.len).arena_size(MIB).devices(devices.clone());
    let pool = builder.build().unwrap();
    for device in &devices {
        assert_eq!(device.as_soft().unwrap().regions(), 4);
    }
    let buf = pool.alloc(1000).unwrap();
    for (i, device) in devices.iter().enumerate() {
        let remote = buf.remote_on(device).unwrap().unwrap();
        // SAFETY: nobody else uses the buffer meanwhile.
        unsafe { device.as_soft().unwrap().write(remote.rkey, remote.addr, &[i as u8; 9]) }
            .unwrap();
        assert_eq!(buf[..9], [i as u8; 9]);
    }
    drop(buf);
    pool.close().unwrap();
    assert!(devices.iter().all(|d| d.as_soft().unwrap().regions() == 0));
}

#[test]
fn a_raw_pointer_behind_the_range_is_foreign() {
    // Shorter than the power of two that arenas are apart.
    let map = Map::private(5 * PAGE);
    let pool = adopting(map.addr, 5 * PAGE).build().unwrap();
    for addr in [map.at(5 * PAGE), map.at(7 * PAGE), map.addr.wrapping_sub(1)] {
        // SAFETY: the pointer is refused.
        let e = unsafe { pool.free_raw(addr) }.unwrap_err();
        assert!(matches!(e, pinpool::FreeError::Foreign { .. }), "{e}");
    }
}

#[test]
fn arenas_are_cut_where_they_are_asked_for_or_the_device_needs_it() {
    let map = Map::private(5 * MIB + 3 * PAGE);
    let lens = |pool: &Pool| pool.arenas().iter().map(|a| a.len).collect::<Vec<_>>();
    let pool = adopting(map.addr, map.len).arena_size(2 * MIB).build().unwrap();
    assert_eq!(lens(&pool), [2 * MIB, 2 * MIB, MIB + 3 * PAGE]);
    use_it(&pool, &map);
    drop(pool);
    let registrar = FaultyRegistrar::new(&Device::soft()).max_mr_size(3 * MIB as u64);
    let device = Device::custom(registrar.clone());
    let pool = adopting(map.addr, map.len).device(device.clone()).build().unwrap();
    assert_eq!(lens(&pool), [2 * MIB, 2 * MIB, MIB + 3 * PAGE]);
    let asked: Vec<_> = registrar.requests().iter().map(|r| (r.addr, r.len, r.access)).collect();
    let mut should: Vec<_> =
        pool.arenas().iter().map(|a| (a.addr.as_ptr() as usize, a.len, ALL)).collect();
    should.sort_unstable();
    let mut asked_sorted = asked;
    asked_sorted.sort_unstable();
    assert_eq!(asked_sorted, should, "exactly these");
    use_it(&pool, &map);
    drop(pool);
    let e = adopting(map.addr, map.len).device(device).arena_size(4 * MIB).build().unwrap_err();
    assert!(matches!(e, BuildError::ArenaSize { .. }), "{e}");
    let small = FaultyRegistrar::new(&Device::soft()).max_mr_size(100);
    let e = adopting(map.addr, map.len).device(Device::custom(small)).build().unwrap_err();
    assert!(matches!(e, BuildError::MrTooSmall { .. }), "{e}");
    let few = FaultyRegistrar::new(&Device::soft()).max_mr_size(MIB as u64).max_mr(3);
    let e = adopting(map.addr, map.len).device(Device::custom(few)).build().unwrap_err();
    assert!(matches!(e, BuildError::TooManyArenas { arenas: 6, max_mr: 3, .. }), "{e}");
}

#[test]
fn zero_based_addresses_count_from_the_arena_wherever_it_lies() {
    let map = Map::private(3 * MIB + PAGE);
    let device = Device::soft();
    let pool = adopting(map.addr, map.len)
        .device(device.clone())
        .access(ALL | Access::ZERO_BASED)
        .arena_size(MIB)
        .build()
        .unwrap();
    let mut bufs: Vec<_> = std::iter::from_fn(|| pool.alloc(100 << 10).ok()).collect();
    assert!(bufs.len() >= 27, "{}", bufs.len());
    for (i, buf) in bufs.iter_mut().enumerate() {
        buf.fill(0);
        let remote = buf.remote().unwrap();
        let of = |a: &&pinpool::ArenaInfo| {
            let start = a.addr.as_ptr() as usize;
            (start..start + a.len).contains(&(buf.as_ptr() as usize))
        };
        let arena = *pool.arenas().iter().find(of).unwrap();
        assert_eq!(remote.addr, buf.as_ptr() as u64 - arena.addr.as_ptr() as u64);
        assert_eq!(buf.sge().addr, remote.addr);
        let soft = device.as_soft().unwrap();
        // SAFETY: nobody else uses the buffer meanwhile.
        unsafe { soft.write(remote.rkey, remote.addr, &[i as u8 + 1; 100]) }.unwrap();
    }
    for (i, buf) in bufs.iter().enumerate() {
        assert!(buf[..100].iter().all(|&b| b == i as u8 + 1) && buf[100..].iter().all(|&b| b == 0));
    }
}

#[test]
fn the_mapping_comes_back_as_it_was() {
    let _alone = ALONE.lock().unwrap_or_else(|e| e.into_inner());
    for flags in [libc::MAP_PRIVATE, libc::MAP_SHARED] {
        let mut map = Map::new(2 * MIB, flags);
        // Every page in memory, so that the figures of smaps do not move for that alone.
        let pattern: Vec<u8> = (0..2 * MIB).map(|i| (i / 97) as u8 | 1).collect();
        map.bytes().copy_from_slice(&pattern);
        let before = map.smaps();
        for round in 0..3u8 {
            let pool = adopting(map.addr, map.len).arena_size(MIB).build().unwrap();
            let whole = pool.alloc(MIB).unwrap();
            let at = whole.as_ptr() as usize - map.addr as usize;
            assert!(*whole == pattern[at..at + MIB], "building changed no contents");
            drop(whole);
            let mut buf = pool.alloc(100).unwrap();
            let at = buf.as_ptr() as usize - map.addr as usize;
            buf.fill(round);
            drop(buf);
            pool.close().unwrap();
            assert_eq!(map.smaps(), before, "round {round}");
            let mut should = pattern.clone();
            should[at..at + 100].fill(round);
            assert!(map.bytes() == should, "contents as the buffers' users left them");
            map.bytes().copy_from_slice(&pattern);
        }
    }
}

#[test]
fn a_refusal_changes_nothing_and_leaves_nothing() {
    let _alone = ALONE.lock().unwrap_or_else(|e| e.into_inner());
    let mut map = Map::private(4 * MIB);
    map.bytes().fill(7);
    let before = map.smaps();
    for n in 1..=4 {
        let registrar = FaultyRegistrar::new(&Device::soft()).fault(Fault::Register(n, libc::EIO));
        let device = Device::custom(registrar.clone());
        let builder = adopting(map.addr, map.len).device(device).arena_size(MIB);
        let e = builder.start_threads(1).build().unwrap_err();
        assert_eq!(e.raw_os_error(), Some(libc::EIO), "{e}");
        assert_eq!((registrar.live(), registrar.deregister_calls()), (0, n - 1));
        assert_eq!(map.smaps(), before);
    }
    assert!(map.bytes().iter().all(|&b| b == 7));
    adopting(map.addr, map.len).build().expect("still free to adopt");
}

#[test]
fn pages_that_are_not_there_are_faulted_in() {
    for flags in [libc::MAP_PRIVATE, libc::MAP_SHARED] {
        let map = Map::new(MIB, flags | libc::MAP_NORESERVE);
        let pool = adopting(map.addr, map.len).build().unwrap();
        let mut there = vec![0u8; MIB / PAGE];
        // SAFETY: the range is mapped, and `there` has a byte for each page.
        assert_eq!(unsafe { libc::mincore(map.addr.cast(), MIB, there.as_mut_ptr()) }, 0);
        assert!(there.iter().all(|&b| b & 1 == 1));
        assert!(pool.alloc(MIB).unwrap().iter().all(|&b| b == 0));
    }
}

#[test]
fn a_file_shorter_than_its_mapping_is_an_error_not_a_signal() {
    let file = tempfile();
    file.set_len(PAGE as u64).unwrap();
    // SAFETY: this test's own file.
    let mut map = unsafe { memmap2::MmapOptions::new().len(4 * PAGE).map_mut(&file) }.expect("map");
    let e = adopting(map.as_mut_ptr(), map.len()).build().unwrap_err();
    assert!(
        matches!(e, BuildError::Back { step: "faulting in", .. })
            && e.raw_os_error() == Some(libc::EFAULT),
        "{e:?}"
    );
    let pool = adopting(map.as_mut_ptr(), PAGE).build().expect("what the file has");
    drop(pool);
}

fn tempfile() -> fs::File {
    static MADE: AtomicUsize = AtomicUsize::new(0);
    let n = MADE.fetch_add(1, Relaxed);
    let path = std::env::temp_dir().join(format!("pinpool-adopted-{}-{n}", std::process::id()));
    let file = fs::File::options().read(true).write(true).create_new(true).open(&path).unwrap();
    fs::remove_file(path).unwrap();
    file
}

#[test]
fn a_file_mapped_shared_gets_what_is_written() {
    let file = tempfile();
    file.set_len(MIB as u64).unwrap();
    // SAFETY: this test's own file.
    let mut map = unsafe { memmap2::MmapMut::map_mut(&file) }.expect("map");
    let pool = adopting(map.as_mut_ptr(), map.len()).build().unwrap();
    let mut buf = pool.alloc(1000).unwrap();
    let at = buf.as_ptr() as u64 - map.as_ptr() as u64;
    buf.fill(0x5a);
    drop(buf);
    pool.close().unwrap();
    let mut got = [0; 1000];
    std::os::unix::fs::FileExt::read_exact_at(&file, &mut got, at).unwrap();
    assert_eq!(got, [0x5a; 1000]);
}

#[test]
fn many_threads_share_adopted_memory() {
    let map = Map::private(3 * MIB + 7 * PAGE);
    let pool = adopting(map.addr, map.len).arena_size(MIB).build().unwrap();
    std::thread::scope(|scope| {
        for t in 0..8u64 {
            let pool = pool.clone();
            scope.spawn(move || {
                let mut rng = Rng(t + 1);
                let mut held = Vec::new();
                for _ in 0..5_000 {
                    if held.len() < 12
                        && let Ok(mut buf) = pool.alloc(rng.size(1, 60_000))
                    {
                        let mark = rng.next() as u8;
                        buf.fill(mark);
                        held.push((buf, mark));
                    } else if !held.is_empty() {
                        let (buf, mark) = held.swap_remove(rng.below(held.len()));
                        assert!(buf.iter().all(|&b| b == mark));
                    }
                }
            });
        }
    });
    pool.check();
    assert_eq!(pool.stats().live, 0);
    pool.close().unwrap();
}

#[test]
fn what_the_device_kept_is_told_and_never_adopted_again() {
    let map = Map::private(2 * MIB);
    let registrar = FaultyRegistrar::new(&Device::soft()).fault(Fault::Deregister(1, libc::EBUSY));
    let builder = adopting(map.addr, map.len).device(Device::custom(registrar)).arena_size(MIB);
    let before = pinpool::leaked_bytes();
    let e = builder.build().unwrap().close().unwrap_err();
    assert!(matches!(e, pinpool::CloseError::Deregister { arenas: 1, bytes: MIB, .. }), "{e}");
    assert!(pinpool::leaked_bytes() >= before + MIB as u64);
    let kept = map.at(MIB) as usize;
    let e = refused(adopting(map.addr, map.len));
    assert!(
        matches!(e, AdoptError::InUse { start, end } if (start, end) == (kept, kept + MIB)),
        "{e}"
    );
    adopting(map.addr, MIB).build().expect("the other half");
    // For ever, as `adopt` asks: the device may still write to it.
    std::mem::forget(map);
}
