//! Memory that a pool does not simply map for itself, on a verbs device:
//! - mappings that are adopted, private and shared, base pages and hugepages, at any start, take RDMA writes
//!   and reads, and come back as they were;
//! - hugepages are adopted whole or not at all;
//! - two processes share a pool's memory, base pages and hugepages, anonymous and in a hugetlbfs: each
//!   registers it with a device and a PD of its own and writes it by RDMA, and each sees what the other wrote.
#![cfg(all(feature = "loopback", any(feature = "rdma-sys", feature = "rdma-mummy-sys")))]
#![allow(clippy::disallowed_methods, clippy::unwrap_used)]

#[path = "common/verbs.rs"]
mod common;
#[path = "common/helper.rs"]
mod helper;

use std::{
    ffi::CString,
    fs::{self, File},
    os::fd::{AsRawFd, OwnedFd},
    path::PathBuf,
    ptr, slice,
};

use common::{alone, check, device, fill, free_hugepages, pattern, same, vm_pin};
use helper::Helper;
use pinpool::{
    Access, AdoptError, Backing, BuildError, Builder, Device, ExportError, ExportLayout, PageSize,
    Pages, Pool, PoolExport, RKey,
    loopback::{Pair, Status},
};

const PAGE: usize = 4096;
const MIB: usize = 1 << 20;
const ALL: Access = Access::LOCAL_WRITE.union(Access::REMOTE);
const HUGE: Pages = Pages::Require(PageSize::Huge2M);

/// A mapping of the test's own, unmapped at the end.
struct Map {
    addr: *mut u8,
    len: usize,
}

impl Map {
    fn new(len: usize, flags: i32) -> Self {
        let rights = libc::PROT_READ | libc::PROT_WRITE;
        let flags = flags | libc::MAP_ANONYMOUS;
        // SAFETY: a new mapping, wherever there is room.
        let addr = unsafe { libc::mmap(ptr::null_mut(), len, rights, flags, -1, 0) };
        assert_ne!(addr, libc::MAP_FAILED, "{}", std::io::Error::last_os_error());
        Self { addr: addr.cast(), len }
    }

    /// Its bytes, while no pool uses it.
    fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: mapped readable and writable.
        unsafe { slice::from_raw_parts_mut(self.addr, self.len) }
    }

    fn smaps(&self) -> String {
        let (start, end) = (self.addr as usize, self.addr as usize + self.len);
        let (mut inside, mut lines) = (false, String::new());
        for line in fs::read_to_string("/proc/self/smaps").unwrap().lines() {
            let first = line.split_whitespace().next().unwrap_or_default();
            let hex = |s| usize::from_str_radix(s, 16);
            if let Some((a, b)) = first.split_once('-')
                && let (Ok(a), Ok(b)) = (hex(a), hex(b))
            {
                inside = a < end && start < b;
            }
            // How long ago pages were used is the system's to say.
            if inside && first != "Referenced:" {
                lines.extend([line, "\n"]);
            }
        }
        lines
    }
}

impl Map {
    /// It is as it was: `left` is in it, and smaps says what it said. A hugepage that NUMA balancing has marked is
    /// not counted there (it is looked up with `FOLL_DUMP`, which such an entry refuses) until it is touched; so it is
    /// touched, once its contents have shown that it is the same memory.
    fn is_back(&mut self, left: &[u8], before: &str) {
        for _ in 0..100 {
            same(self.bytes(), left);
            if self.smaps() == before {
                return;
            }
        }
        assert_eq!(self.smaps(), before);
    }
}

impl Drop for Map {
    fn drop(&mut self) {
        // SAFETY: mapped by `new`, and no longer used.
        assert_eq!(unsafe { libc::munmap(self.addr.cast(), self.len) }, 0);
    }
}

fn adopting(device: &Device, addr: *mut u8, len: usize) -> Builder {
    // SAFETY: each test keeps its mapping until the pool is gone, or is refused.
    unsafe { Pool::builder().adopt(addr, len) }.device(device.clone())
}

/// Fills all of the pool but one buffer by RDMA from that, and reads it back.
fn by_rdma(device: &Device, pool: &Pool, seed: u64) {
    let mut pair = Pair::connect(device).expect("connect");
    let len = 60_000;
    let mut from = pool.alloc(len).expect("alloc");
    let mut bufs: Vec<_> = std::iter::from_fn(|| pool.alloc(len).ok()).collect();
    assert!(bufs.len() * len * 2 > pool.capacity(), "most of it: {}", bufs.len());
    for (i, to) in bufs.iter_mut().enumerate() {
        to.fill(0);
        fill(&mut from, seed + i as u64);
        let remote = to.remote().expect("a remote right");
        // SAFETY: both buffers are this function's, and the call is over when it returns.
        unsafe { pair.write(from.sge(), remote.addr, remote.rkey) }.expect("write");
    }
    for (i, to) in bufs.iter().enumerate() {
        check(to, seed + i as u64);
        let remote = to.remote().expect("a remote right");
        from.fill(0);
        // SAFETY: as above.
        unsafe { pair.read(from.sge(), remote.addr, remote.rkey) }.expect("read");
        same(&from, to);
    }
}

#[test]
fn adopted_memory_takes_rdma_and_comes_back_as_it_was() {
    let _alone = alone();
    let device = device();
    let huge = libc::MAP_HUGETLB | 21 << libc::MAP_HUGE_SHIFT;
    let kinds = [
        (libc::MAP_PRIVATE, PAGE),
        (libc::MAP_SHARED, PAGE),
        (libc::MAP_PRIVATE | huge, 2 * MIB),
        (libc::MAP_SHARED | huge, 2 * MIB),
    ];
    for (n, (flags, page)) in kinds.into_iter().enumerate() {
        let mut map = Map::new(6 * MIB, flags);
        fill(map.bytes(), n as u64);
        // Made now, lest a mapping of its own join the one that is looked at.
        let mut left = map.bytes().to_vec();
        let (before, pinned) = (map.smaps(), vm_pin());
        for access in [ALL, ALL | Access::ZERO_BASED] {
            for (arena_size, arenas) in [(None, 1), (Some(2 * MIB), 3)] {
                // On base pages from the second page on, so that no start is a multiple of an arena.
                let skip = if page == PAGE { PAGE } else { 0 };
                let builder = adopting(&device, map.addr.wrapping_add(skip), map.len - skip);
                let builder = builder.access(access);
                let pool = match arena_size {
                    Some(size) => builder.arena_size(size).build(),
                    None => builder.build(),
                };
                let pool = pool.expect("build");
                assert_eq!(pool.arenas().len(), arenas);
                let granted = |a: &pinpool::ArenaInfo| (a.page_size, a.access) == (page, access);
                assert!(pool.arenas().iter().all(granted), "{:?}", pool.arenas());
                assert_eq!(vm_pin(), pinned + pool.capacity() as u64);
                let whole = pool.alloc(pool.max_len()).expect("an arena");
                let at = whole.as_ptr() as usize - map.addr as usize;
                same(&whole, &pattern(n as u64, map.len)[at..at + whole.len()]);
                drop(whole);
                by_rdma(&device, &pool, 100);
                left.copy_from_slice(map.bytes());
                pool.close().expect("close");
                map.is_back(&left, &before);
                assert_eq!(vm_pin(), pinned);
                fill(map.bytes(), n as u64);
            }
        }
    }
}

#[test]
fn hugepages_are_adopted_whole_or_not_at_all() {
    let _alone = alone();
    let device = device();
    let huge = libc::MAP_PRIVATE | libc::MAP_HUGETLB | 21 << libc::MAP_HUGE_SHIFT;
    let mut map = Map::new(6 * MIB, huge);
    map.bytes().fill(1);
    let refused =
        |offset: usize, len| match adopting(&device, map.addr.wrapping_add(offset), len).build() {
            Err(BuildError::Adopt(e)) => e,
            other => panic!("{other:?}"),
        };
    for (offset, len) in [(PAGE, 4 * MIB), (0, 3 * MIB), (MIB, 2 * MIB), (0, PAGE)] {
        let e = refused(offset, len);
        assert!(matches!(e, AdoptError::NotWholePages { page_size: 0x20_0000, .. }), "{e}");
    }
    let e = adopting(&device, map.addr, map.len).pages(Pages::Base).build().unwrap_err();
    assert!(matches!(e, BuildError::Adopt(AdoptError::OtherPages { asked: PAGE, .. })), "{e}");
    adopting(&device, map.addr, map.len).pages(HUGE).build().expect("as insisted on");
    // The second hugepage makes way for base pages.
    let second = map.addr.wrapping_add(2 * MIB);
    // SAFETY: a part of this test's own mapping, which nobody uses.
    let p = unsafe {
        libc::mmap(
            second.cast(),
            2 * MIB,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED,
            -1,
            0,
        )
    };
    assert_eq!(p, second.cast());
    let e = refused(0, map.len);
    let mixed = |at: usize| matches!(e, AdoptError::MixedPages { first: 0x20_0000, at: a, other: PAGE } if a == at);
    assert!(mixed(second as usize), "{e}");
}

/// In the helper: joins the pool that it is told of, and does by RDMA what it is told.
fn serve(role: &str) {
    let (flags, rest) = role.split_once(' ').unwrap();
    let (names, layout) = rest.split_once(' ').unwrap();
    let access = Access::from_bits_truncate(flags.parse().unwrap());
    let layout: ExportLayout = layout.parse().unwrap();
    let open = |name: &str| File::options().read(true).write(true).open(name).unwrap().into();
    let files: Vec<OwnedFd> = names.split(',').map(open).collect();
    let device = device();
    let pinned = vm_pin();
    let share = PoolExport::new(layout, files);
    let share = if names.starts_with("/proc") { share } else { share.trust_unsealed() };
    let joined = Pool::builder().device(device.clone()).access(access).join(share).expect("join");
    let bytes: usize = joined.arenas().iter().map(|a| a.len).sum();
    assert_eq!(vm_pin(), pinned + bytes as u64, "a registration of its own");
    let own = Pool::builder().device(device.clone()).capacity(4 * MIB).build().expect("build");
    let mut pair = Pair::connect(&device).expect("connect");
    helper::say(&format!("joined {bytes}"));
    while let Some(line) = helper::hear() {
        let words: Vec<_> = line.split(' ').collect();
        let number = |i: usize| words[i].parse::<usize>().unwrap();
        let (offset, len, seed) = (number(1), number(2), number(3) as u64);
        let at = joined.remote_at(offset, len).expect("a place in the pool");
        let mut buf = own.alloc(len).expect("alloc");
        match words[0] {
            "write" => {
                fill(&mut buf, seed);
                // SAFETY: the buffer is this function's, and the test leaves the place to it meanwhile.
                unsafe { pair.write(buf.sge(), at.addr, at.rkey) }.expect("write");
            }
            "check" => {
                // SAFETY: as above.
                unsafe { pair.read(buf.sge(), at.addr, at.rkey) }.expect("read");
                check(&buf, seed);
                let ptr = joined.ptr_at(offset, len).unwrap();
                // SAFETY: `ptr_at` vouched for the range, and nobody writes it meanwhile.
                check(unsafe { slice::from_raw_parts(ptr.as_ptr(), len) }, seed);
                // As a local element, too: from there to a buffer of the helper's own would need a remote
                // right there, so the other way round, onto itself.
                let sge = joined.sge_at(offset, len as u32).unwrap();
                // SAFETY: as above; the bytes are replaced by themselves.
                unsafe { pair.read(sge, at.addr, at.rkey) }.expect("read");
                // SAFETY: as above.
                check(unsafe { slice::from_raw_parts(ptr.as_ptr(), len) }, seed);
            }
            "foreign" => {
                // The other process's rkey is of another PD.
                let rkey = RKey::new(number(4) as u32);
                assert_ne!(rkey, at.rkey);
                // SAFETY: as above; it is refused.
                let e = unsafe { pair.write(buf.sge(), at.addr, rkey) }.expect_err("refused");
                assert_eq!(e.status(), Some(Status::REM_ACCESS_ERR), "{e}");
                pair.reset().expect("reset");
            }
            other => panic!("{other}"),
        }
        helper::say("done");
    }
    joined.close().expect("close");
    assert_eq!(vm_pin(), pinned + own.capacity() as u64);
}

/// What both processes do with a pool that they share.
fn together(test: &str, device: &Device, pool: &Pool, access: Access) {
    let share = pool.export().expect("share");
    let proc = |f: &OwnedFd| format!("/proc/{}/fd/{}", std::process::id(), f.as_raw_fd());
    let names: Vec<String> = match share.paths() {
        [] => share.files().iter().map(proc).collect(),
        paths => paths.iter().map(|p| p.to_str().unwrap().to_owned()).collect(),
    };
    let role = format!("{} {} {}", access.bits(), names.join(","), share.layout());
    let mut helper = Helper::start(test, &role);
    assert_eq!(helper.hear(), format!("joined {}", pool.capacity()));
    let mut pair = Pair::connect(device).expect("connect");
    let mut held = Vec::new();
    for i in 0..12u64 {
        let len = [4096, 100_000, 64, 1 << 20][i as usize % 4];
        let mut buf = pool.alloc(len).expect("alloc");
        let offset = pool.offset_of(buf.as_ptr()).unwrap();
        // The other process writes by RDMA, this one sees it, through its own keys, too.
        buf.fill(0);
        assert_eq!(helper.ask(&format!("write {offset} {len} {i}")), "done");
        check(&buf, i);
        let mut copy = pool.alloc(len).expect("alloc");
        let remote = buf.remote().expect("a remote right");
        // SAFETY: both buffers are this function's, and the call is over when it returns.
        unsafe { pair.read(copy.sge(), remote.addr, remote.rkey) }.expect("read");
        check(&copy, i);
        // This one writes by RDMA, the other sees it.
        fill(&mut copy, i + 50);
        // SAFETY: as above.
        unsafe { pair.write(copy.sge(), remote.addr, remote.rkey) }.expect("write");
        check(&buf, i + 50);
        assert_eq!(helper.ask(&format!("check {offset} {len} {}", i + 50)), "done");
        let foreign = format!("foreign {offset} {len} 0 {}", remote.rkey.get());
        assert_eq!(helper.ask(&foreign), "done");
        check(&buf, i + 50);
        held.push((buf, i + 50));
    }
    for (buf, seed) in &held {
        check(buf, *seed);
    }
    helper.kill();
    // The death of the other is nothing to this one.
    held.clear();
    by_rdma(device, pool, 7);
}

#[test]
fn two_processes_share_a_memfd_pool_and_write_it_by_rdma() {
    if let Some(role) = helper::role() {
        return serve(&role);
    }
    let _alone = alone();
    let device = device();
    let test = "two_processes_share_a_memfd_pool_and_write_it_by_rdma";
    for pages in [Pages::Base, HUGE] {
        for access in [ALL, ALL | Access::ZERO_BASED] {
            let pinned = vm_pin();
            let builder = Pool::builder().device(device.clone()).access(access).pages(pages);
            let builder = builder.capacity(24 * MIB).arena_size(8 * MIB).backing(Backing::Memfd);
            let pool = builder.build().expect("build");
            let page = if pages == HUGE { 2 * MIB } else { PAGE };
            assert!(pool.arenas().iter().all(|a| a.page_size == page));
            together(test, &device, &pool, access);
            #[cfg(feature = "fault")]
            pool.check();
            pool.close().expect("close");
            assert_eq!(vm_pin(), pinned);
        }
    }
}

/// A hugetlbfs of this test's own, unmounted at the end.
struct Mount(PathBuf);

impl Mount {
    fn new() -> Self {
        let dir = std::env::temp_dir().join(format!("pinpool-hugetlbfs-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        let path = CString::new(dir.to_str().unwrap()).unwrap();
        let (kind, options) = (c"hugetlbfs", c"pagesize=2M");
        // SAFETY: strings that end in NUL.
        let r = unsafe {
            libc::mount(kind.as_ptr(), path.as_ptr(), kind.as_ptr(), 0, options.as_ptr().cast())
        };
        assert_eq!(r, 0, "this test mounts a hugetlbfs: {}", std::io::Error::last_os_error());
        Self(dir)
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let path = CString::new(self.0.to_str().unwrap()).unwrap();
        // SAFETY: a string that ends in NUL.
        unsafe { libc::umount2(path.as_ptr(), libc::MNT_DETACH) };
        let _ = fs::remove_dir(&self.0);
    }
}

#[test]
fn two_processes_share_a_pool_in_a_hugetlbfs_and_write_it_by_rdma() {
    if let Some(role) = helper::role() {
        return serve(&role);
    }
    let _alone = alone();
    let device = device();
    let mount = Mount::new();
    let backing = Backing::Hugetlbfs(mount.0.clone());
    let builder = |capacity| {
        let builder = Pool::builder().device(device.clone()).access(ALL).arena_size(8 * MIB);
        builder.capacity(capacity).backing(backing.clone())
    };
    let (free, pinned) = (free_hugepages(), vm_pin());
    let pool = builder(17 * MIB).build().expect("build");
    assert_eq!((pool.capacity(), pool.arenas()[0].page_size), (18 * MIB, 2 * MIB));
    assert_eq!(free_hugepages(), free - 9);
    let paths = pool.export().expect("share").paths().to_vec();
    assert!(paths.len() == 3 && paths.iter().all(|p| p.starts_with(&mount.0) && p.exists()));
    let unsealed = pool.export().expect("share");
    let e = Pool::builder().device(device.clone()).join(unsealed).expect_err("not sealed");
    assert!(matches!(e, BuildError::Export(ExportError::Unsealed { arena: 0 })), "{e}");
    together("two_processes_share_a_pool_in_a_hugetlbfs_and_write_it_by_rdma", &device, &pool, ALL);
    pool.close().expect("close");
    assert!(paths.iter().all(|p| !p.exists()), "the files are gone");
    assert_eq!((free_hugepages(), vm_pin()), (free, pinned));

    let e = builder(2 * MIB).pages(Pages::Base).build().expect_err("hugepages there");
    assert!(
        matches!(e, BuildError::Export(ExportError::HugetlbfsPages { found: 0x20_0000, .. })),
        "{e}"
    );
    let e = builder(2 * MIB).pages(Pages::Require(PageSize::Huge1G)).build();
    assert!(matches!(e, Err(BuildError::Export(ExportError::HugetlbfsPages { .. }))), "{e:?}");
    builder(2 * MIB).pages(HUGE).build().expect("those that are there");
    // More than there are: an error, and no file stays.
    let e = builder((free as usize + 4) * 2 * MIB).build().expect_err("too many");
    assert!(matches!(e, BuildError::Preflight(_)), "{e}");
    assert_eq!(fs::read_dir(&mount.0).unwrap().count(), 0);
    assert_eq!(free_hugepages(), free);
}
