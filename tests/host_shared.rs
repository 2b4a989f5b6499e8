//! Pools whose memory other processes map too:
//! - a second mapping, in this process and in another, sees and writes the same bytes under keys of its own;
//! - it is told by one line of text and descriptors, by inheritance or by name; what does not fit is refused;
//! - whichever ends first, the other goes on; nobody can make the memory shorter;
//! - a second process can spoil contents and nothing else (P2);
//! - a forked child lets everything be.
#![cfg(feature = "fault")]
#![allow(clippy::unwrap_used, clippy::disallowed_methods)]

mod common;
#[path = "common/helper.rs"]
mod helper;

use std::{
    collections::BTreeMap,
    fs::{self, File},
    os::fd::{AsRawFd, FromRawFd, OwnedFd},
    sync::{
        Mutex,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    thread,
};

use common::{Rng, soft};
use helper::Helper;
use pinpool::{
    Access, AdoptError, Backing, BuildError, Builder, Device, ExportError, ExportLayout, Numa,
    PageSize, Pages, Pool, PoolExport, SharedArenas,
    device::{Fault, FaultyRegistrar},
};

const PAGE: usize = 4096;
const MIB: usize = 1 << 20;
const ALL: Access = Access::LOCAL_WRITE.union(Access::REMOTE);

fn shared(capacity: usize) -> Builder {
    soft(capacity).backing(Backing::Memfd)
}

fn joining(device: &Device) -> Builder {
    Pool::builder().device(device.clone()).access(ALL)
}

fn rights_of(addr: *const u8) -> String {
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    let line = maps.lines().find(|line| {
        let (a, b) = line.split_once(' ').unwrap().0.split_once('-').unwrap();
        let hex = |s| usize::from_str_radix(s, 16).unwrap();
        (hex(a)..hex(b)).contains(&(addr as usize))
    });
    line.unwrap().split_whitespace().nth(1).unwrap().to_owned()
}

#[test]
fn private_is_the_rule_and_shared_the_exception() {
    let pool = soft(MIB).build().unwrap();
    assert_eq!(rights_of(pool.arenas()[0].addr.as_ptr()), "rw-p");
    assert!(matches!(pool.export(), Err(ExportError::Private)));
    let pool = shared(MIB).build().unwrap();
    assert_eq!(rights_of(pool.arenas()[0].addr.as_ptr()), "rw-s");
    assert_eq!(pool.export().unwrap().layout().arenas().len(), 1);
    assert!(pool.export().unwrap().paths().is_empty());
}

#[test]
fn a_second_mapping_has_the_same_bytes_under_keys_of_its_own() {
    for access in [ALL, ALL | Access::ZERO_BASED] {
        let pool = shared(5 * MIB + PAGE).arena_size(2 * MIB).build().unwrap();
        let device = Device::soft();
        let joined = joining(&device).access(access).join(pool.export().unwrap()).unwrap();
        let lens = |arenas: &[pinpool::ArenaInfo]| arenas.iter().map(|a| a.len).collect::<Vec<_>>();
        assert_eq!(lens(joined.arenas()), lens(&pool.arenas()));
        assert_eq!((joined.access(), device.as_soft().unwrap().regions()), (access, 3));
        let soft = device.as_soft().unwrap();
        let mut bufs: Vec<_> = std::iter::from_fn(|| pool.alloc(300_000).ok()).collect();
        assert!(bufs.len() > 12);
        for (i, buf) in bufs.iter_mut().enumerate() {
            buf.fill(i as u8);
            let offset = pool.offset_of(buf.as_ptr()).unwrap();
            let there = joined.ptr_at(offset, buf.len()).unwrap();
            assert_ne!(there.as_ptr().cast_const(), buf.as_ptr());
            assert_eq!(joined.offset_of(there.as_ptr()), Some(offset));
            // SAFETY: `ptr_at` vouched for the range, and nobody writes it meanwhile.
            let seen = unsafe { std::slice::from_raw_parts(there.as_ptr(), buf.len()) };
            assert!(seen.iter().all(|&b| b == i as u8));

            let remote = joined.remote_at(offset, buf.len()).unwrap();
            assert_eq!(joined.keys_of(there.as_ptr()).unwrap().rkey, Some(remote.rkey));
            let sge = joined.sge_at(offset, 10).unwrap();
            assert_eq!((sge.addr, sge.length), (remote.addr, 10));
            soft.check_local(&sge, true).unwrap();
            // SAFETY: nobody else uses the buffer meanwhile.
            unsafe { soft.write(remote.rkey, remote.addr + 5, &[!(i as u8); 7]) }.unwrap();
            assert!(buf[5..12].iter().all(|&b| b == !(i as u8)) && buf[12] == i as u8);
        }
        pool.check();
    }
}

#[test]
fn places_outside_or_across_arenas_are_none() {
    let pool = shared(4 * MIB + PAGE).arena_size(2 * MIB).build().unwrap();
    let joined =
        joining(&Device::soft()).access(Access::empty()).join(pool.export().unwrap()).unwrap();
    // Arenas are two apart.
    assert!(joined.ptr_at(0, 2 * MIB).is_some() && joined.ptr_at(4 * MIB, 2 * MIB).is_some());
    let bad = [
        (0, 2 * MIB + 1),
        (2 * MIB - 1, 2),
        (2 * MIB, 1),
        (4 * MIB - 1, 1),
        (8 * MIB, PAGE + 1),
        (8 * MIB + PAGE, 0),
        (12 * MIB, 1),
        (usize::MAX, 1),
        (usize::MAX, 0),
        (1, usize::MAX),
    ];
    for (offset, len) in bad {
        assert!(joined.ptr_at(offset, len).is_none(), "{offset} {len}");
        assert!(joined.remote_at(offset, len).is_none());
    }
    assert!(joined.sge_at(2 * MIB - 1, 2).is_none());
    assert!(joined.remote_at(0, 1).is_none(), "no remote right was asked for");
    let first = joined.arenas()[0].addr.as_ptr();
    for ptr in [first.wrapping_sub(1), std::ptr::null_mut(), first.wrapping_add(8 * MIB + PAGE)] {
        assert!(joined.keys_of(ptr).is_none() && joined.offset_of(ptr).is_none());
        assert!(pool.offset_of(ptr).is_none());
    }
}

#[test]
fn nobody_makes_it_shorter_or_longer() {
    let pool = shared(MIB).build().unwrap();
    let share = pool.export().unwrap();
    let file = File::from(share.files()[0].try_clone().unwrap());
    for len in [0, MIB as u64 - 1, MIB as u64 + 1, 1 << 40] {
        let e = file.set_len(len).unwrap_err();
        assert_eq!(e.raw_os_error(), Some(libc::EPERM), "{len}");
    }
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    let e = File::options().write(true).truncate(true).open(path).unwrap_err();
    assert_eq!(e.raw_os_error(), Some(libc::EPERM));
    pool.alloc(MIB).unwrap().fill(1);
}

#[test]
fn the_memory_outlives_the_pool_and_the_pool_the_joined() {
    let registrar = FaultyRegistrar::new(&Device::soft());
    let device = Device::custom(registrar.clone());
    let pool = shared(MIB).build().unwrap();
    let join = || joining(&device).join(pool.export().unwrap()).unwrap();
    let (one, two) = (join(), join());
    let mut buf = pool.alloc(1000).unwrap();
    buf.fill(9);
    let offset = pool.offset_of(buf.as_ptr()).unwrap();
    let addr = one.arenas()[0].addr.as_ptr() as usize;
    drop(one);
    assert!(!common::mapped(addr, MIB));
    assert_eq!((registrar.live(), registrar.deregister_calls()), (1, 1));
    assert!(buf.iter().all(|&b| b == 9));
    drop(buf);
    pool.close().unwrap();
    let p = two.ptr_at(offset, 1000).unwrap();
    // SAFETY: `ptr_at` vouched for the range, and nobody else has it any more.
    assert!(unsafe { std::slice::from_raw_parts(p.as_ptr(), 1000) }.iter().all(|&b| b == 9));
    two.close().unwrap();
    assert_eq!((registrar.live(), registrar.deregister_calls()), (0, 2));
}

#[test]
fn what_does_not_fit_is_refused_and_leaves_nothing() {
    let registrar = FaultyRegistrar::new(&Device::soft());
    let device = Device::custom(registrar.clone());
    let pool = shared(2 * MIB).arena_size(MIB).build().unwrap();
    let files = |n: usize| -> Vec<OwnedFd> {
        let share = pool.export().unwrap();
        share.files().iter().take(n).map(|f| f.try_clone().unwrap()).collect()
    };
    let layout = pool.export().unwrap().layout().clone();
    let refused = |share| match joining(&device).join(share) {
        Err(BuildError::Export(e)) => e,
        other => panic!("{other:?}"),
    };
    for n in [0, 1] {
        let e = refused(PoolExport::new(layout.clone(), files(n)));
        assert!(matches!(e, ExportError::Files { arenas: 2, files } if files == n), "{e}");
    }
    let larger: ExportLayout =
        layout.to_string().replace("2097152+1048576", "2097152+2097152").parse().unwrap();
    let e = refused(PoolExport::new(larger, files(2)));
    assert!(matches!(e, ExportError::OtherFile { arena: 1, found: 0x10_0000, .. }), "{e}");
    // Whatever a layout says, it is an error, and not an end of memory.
    let far = format!("pinpool-share-1 {0} {1}+4096/4096", 1u64 << 32, (1u64 << 46) - (1 << 32));
    let far = PoolExport::new(far.parse().unwrap(), files(1));
    let e = joining(&device).join(far).unwrap_err();
    assert!(matches!(e, BuildError::CapacityTooLarge { .. }), "{e}");
    let huge: ExportLayout = "pinpool-share-1 2097152 0+2097152/2097152".parse().unwrap();
    let e = refused(PoolExport::new(huge, files(1)));
    assert!(
        matches!(e, ExportError::OtherFile { page_size: 0x20_0000, found_page: PAGE, .. }),
        "{e}"
    );

    let unsealed = || {
        let path = std::env::temp_dir().join(format!("pinpool-unsealed-{}", std::process::id()));
        let file = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
        fs::remove_file(path).unwrap();
        file.set_len(MIB as u64).unwrap();
        let layout: ExportLayout = "pinpool-share-1 1048576 0+1048576/4096".parse().unwrap();
        (PoolExport::new(layout, vec![file.try_clone().unwrap().into()]), file)
    };
    let e = refused(unsealed().0);
    assert!(
        matches!(e, ExportError::Unsealed { arena: 0 }) && e.to_string().contains("SIGBUS"),
        "{e}"
    );
    let (share, file) = unsealed();
    drop(joining(&device).join(share.trust_unsealed()).expect("trusted"));
    // What is cut off before it is faulted in is an error.
    let (share, _) = unsealed();
    file.set_len(0).unwrap();
    let other = PoolExport::new(share.layout().clone(), vec![file.into()]).trust_unsealed();
    assert!(matches!(refused(other), ExportError::OtherFile { found: 0, .. }));

    let conflict = |b: Builder| match b.join(pool.export().unwrap()) {
        Err(BuildError::Adopt(AdoptError::Conflict(what))) => what,
        other => panic!("{other:?}"),
    };
    assert_eq!(conflict(joining(&device).capacity(MIB)), "Builder::capacity");
    assert_eq!(conflict(joining(&device).arena_size(MIB)), "Builder::arena_size");
    assert_eq!(conflict(joining(&device).numa(Numa::Node(0))), "Builder::numa");
    assert_eq!(conflict(joining(&device).backing(Backing::Memfd)), "Builder::backing");
    let small = FaultyRegistrar::new(&Device::soft()).max_mr_size(MIB as u64 - 1);
    let e = joining(&Device::custom(small)).join(pool.export().unwrap()).unwrap_err();
    assert!(matches!(e, BuildError::ArenaSize { asked: MIB, .. }), "{e}");
    let e = joining(&device).pages(Pages::Require(PageSize::Huge2M)).join(pool.export().unwrap());
    assert!(matches!(e, Err(BuildError::Adopt(AdoptError::OtherPages { .. }))));

    let calls = registrar.register_calls();
    let faulty = Device::custom(registrar.clone().fault(Fault::Register(calls + 2, libc::EIO)));
    let e = joining(&faulty).join(pool.export().unwrap()).unwrap_err();
    assert_eq!(e.raw_os_error(), Some(libc::EIO));
    assert_eq!(registrar.live(), 0);
    let e = shared(MIB).backing(Backing::Hugetlbfs("/proc".into())).build().unwrap_err();
    assert!(matches!(e, BuildError::Export(ExportError::NotHugetlbfs { .. })), "{e}");
    let e = shared(MIB).backing(Backing::Hugetlbfs("/no/such/dir".into())).build().unwrap_err();
    assert!(matches!(e, BuildError::Export(ExportError::System { call: "statfs", .. })), "{e}");
}

#[test]
fn arenas_that_are_no_longer_there_leave_gaps() {
    // As if the middle one of three had been given back.
    let pool = shared(3 * MIB).arena_size(MIB).build().unwrap();
    let share = pool.export().unwrap();
    let layout: ExportLayout =
        "pinpool-share-1 2097152 0+1048576/4096 4194304+1048576/4096".parse().unwrap();
    let files = [0, 2].map(|i| share.files()[i].try_clone().unwrap());
    let joined = joining(&Device::soft()).join(PoolExport::new(layout, files.into())).unwrap();
    let mut bufs: Vec<_> = std::iter::from_fn(|| pool.alloc(PAGE).ok()).collect();
    for buf in &bufs {
        let offset = pool.offset_of(buf.as_ptr()).unwrap();
        assert_eq!(joined.ptr_at(offset, PAGE).is_some(), !(2 * MIB..3 * MIB).contains(&offset));
    }
    let behind = |buf: &&mut pinpool::Buf| pool.offset_of(buf.as_ptr()) >= Some(4 * MIB);
    let last = bufs.iter_mut().find(behind).unwrap();
    last.fill(3);
    let p = joined.ptr_at(pool.offset_of(last.as_ptr()).unwrap(), PAGE).unwrap();
    // SAFETY: `ptr_at` vouched for the byte, and nobody writes it meanwhile.
    assert_eq!(unsafe { p.as_ptr().read() }, 3);
}

#[test]
fn what_a_shared_pool_grows_by_is_shared_when_it_is_shared_again() {
    let pool = shared(MIB).arena_size(MIB).max_capacity(3 * MIB).growth_by_hand().build().unwrap();
    let before = pool.export().unwrap();
    let mut held: Vec<_> = std::iter::from_fn(|| pool.alloc(300_000).ok()).collect();
    pool.tick(std::time::Duration::ZERO);
    assert!(pool.capacity() > MIB, "grown");
    let mut buf = pool.alloc(300_000).unwrap();
    let offset = pool.offset_of(buf.as_ptr()).unwrap();
    assert!(offset >= MIB, "in an arena that came later");
    buf.fill(6);
    assert_eq!(before.layout().arenas().len(), 1);
    let early = joining(&Device::soft()).join(before).unwrap();
    assert!(early.ptr_at(offset, 1).is_none());
    let late = joining(&Device::soft()).join(pool.export().unwrap()).unwrap();
    assert!(late.arenas().len() > 1);
    let p = late.ptr_at(offset, buf.len()).unwrap();
    // SAFETY: `ptr_at` vouched for the range, and nobody writes it meanwhile.
    assert!(unsafe { std::slice::from_raw_parts(p.as_ptr(), buf.len()) }.iter().all(|&b| b == 6));
    // The first arena is at one offset for all.
    held[0].fill(8);
    let first = pool.offset_of(held[0].as_ptr()).unwrap();
    for joined in [&early, &late] {
        // SAFETY: as above.
        assert_eq!(unsafe { joined.ptr_at(first, 1).unwrap().as_ptr().read() }, 8);
    }
    // What is given back here stays with whoever has it mapped.
    drop((held, buf));
    for i in 0..40 {
        pool.tick(std::time::Duration::from_secs(60 * i));
    }
    assert_eq!((pool.capacity(), pool.export().unwrap().layout().arenas().len()), (MIB, 1));
    // SAFETY: as above; the bytes are this process's through `late` alone by now.
    assert_eq!(unsafe { p.as_ptr().read() }, 6);
    pool.check();
}

/// In the helper: joins what it is told of, and plays peer to it until it hears no more.
fn serve(role: &str) {
    let (how, rest) = role.split_once(' ').unwrap();
    let (names, layout) = rest.split_once(' ').unwrap();
    let layout: ExportLayout = layout.parse().unwrap();
    let open = |name: &str| -> OwnedFd {
        match how {
            "named" => File::options().read(true).write(true).open(name).unwrap().into(),
            // SAFETY: inherited, and nobody else's in this process.
            _ => unsafe { OwnedFd::from_raw_fd(name.parse().unwrap()) },
        }
    };
    let files = names.split(',').map(open).collect();
    let device = Device::soft();
    let joined = joining(&device).join(PoolExport::new(layout, files)).unwrap();
    helper::say(&format!("{} arenas", joined.arenas().len()));
    while let Some(line) = helper::hear() {
        let numbers: Vec<usize> = line.split(' ').map(|n| n.parse().unwrap()).collect();
        let &[offset, len, expect, write] = &numbers[..] else { panic!("{line}") };
        let at = joined.remote_at(offset, len).unwrap();
        let mut seen = vec![0; len];
        let soft = device.as_soft().unwrap();
        // SAFETY: the test waits for the answer meanwhile.
        unsafe { soft.read(at.rkey, at.addr, &mut seen) }.unwrap();
        let ok = seen.iter().all(|&b| b == expect as u8);
        // SAFETY: as above.
        unsafe { soft.write(at.rkey, at.addr, &vec![write as u8; len]) }.unwrap();
        helper::say(if ok { "as expected" } else { "something else" });
    }
    joined.close().unwrap();
}

#[test]
fn two_processes_share_a_pool_by_inheritance_and_by_name() {
    if let Some(role) = helper::role() {
        return serve(&role);
    }
    for how in ["named", "inherited"] {
        let pool = shared(3 * MIB).arena_size(MIB).build().unwrap();
        let share = pool.export().unwrap();
        let name = |f: &OwnedFd| match how {
            "named" => format!("/proc/{}/fd/{}", std::process::id(), f.as_raw_fd()),
            _ => {
                // SAFETY: an open file; it is to survive exec.
                assert_eq!(unsafe { libc::fcntl(f.as_raw_fd(), libc::F_SETFD, 0) }, 0);
                f.as_raw_fd().to_string()
            }
        };
        let names: Vec<_> = share.files().iter().map(name).collect();
        let role = format!("{how} {} {}", names.join(","), share.layout());
        let test = "two_processes_share_a_pool_by_inheritance_and_by_name";
        let mut helper = Helper::start(test, &role);
        let mut second = Helper::start(test, &role);
        assert_eq!((helper.hear(), second.hear()), ("3 arenas".into(), "3 arenas".into()));
        for i in 0..30u8 {
            let mut buf = pool.alloc(100_000 + usize::from(i)).unwrap();
            let (offset, len) = (pool.offset_of(buf.as_ptr()).unwrap(), buf.len());
            buf.fill(i);
            let first = format!("{offset} {len} {i} {}", i + 100);
            assert_eq!(helper.ask(&first), "as expected");
            assert!(buf.iter().all(|&b| b == i + 100));
            let then = format!("{offset} {len} {} {}", i + 100, i + 200);
            assert_eq!(second.ask(&then), "as expected");
            assert!(buf.iter().all(|&b| b == i + 200));
        }
        second.kill();
        // The death of one is nothing to the others.
        let mut buf = pool.alloc(1 << 16).unwrap();
        buf.fill(1);
        let offset = pool.offset_of(buf.as_ptr()).unwrap();
        assert_eq!(helper.ask(&format!("{offset} {} 1 2", 1 << 16)), "as expected");
        assert!(buf.iter().all(|&b| b == 2));
        drop(buf);
        pool.check();
        pool.close().unwrap();
        // Nor is the end of the pool.
        assert_eq!(helper.ask(&format!("{offset} {} 2 3", 1 << 16)), "as expected");
        drop(share);
        drop(helper);
    }
}

#[test]
fn a_forked_child_ends_nothing() {
    let registrar = FaultyRegistrar::new(&Device::soft());
    let device = Device::custom(registrar.clone());
    let pool = shared(MIB).device(device.clone()).build().unwrap();
    let mut joined = Some(joining(&device).join(pool.export().unwrap()).unwrap());
    let mut again = Some(joining(&device).join(pool.export().unwrap()).unwrap());
    // SAFETY: the child runs what is below and leaves by `_exit`.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        let child = || {
            let refused = matches!(pool.export(), Err(ExportError::ForeignProcess { .. }));
            let foreign = again.take().map(SharedArenas::close);
            drop(joined.take());
            let closed = matches!(foreign, Some(Err(pinpool::CloseError::ForeignProcess { .. })));
            refused && closed && registrar.deregister_calls() == 0
        };
        let ok = std::panic::catch_unwind(std::panic::AssertUnwindSafe(child)).unwrap_or(false);
        // SAFETY: ends the child.
        unsafe { libc::_exit(i32::from(!ok)) };
    }
    let mut status = 0;
    // SAFETY: `pid` is the child, and `status` is valid to write to.
    assert_eq!(unsafe { libc::waitpid(pid, &mut status, 0) }, pid);
    assert_eq!(status, 0);
    assert_eq!((registrar.live(), registrar.deregister_calls()), (3, 0));
    drop((joined, again));
    pool.close().unwrap();
    assert_eq!((registrar.live(), registrar.deregister_calls()), (0, 3));
}

/// Addresses that are out, of all threads: where each block starts, and one past its end.
#[derive(Default)]
struct Out(Mutex<BTreeMap<usize, usize>>);

impl Out {
    fn add(&self, buf: &pinpool::Buf) {
        let (start, end) = (buf.as_ptr() as usize, buf.as_ptr() as usize + buf.capacity());
        let mut out = self.0.lock().unwrap();
        let below = out.range(..end).next_back();
        assert!(below.is_none_or(|(_, &e)| e <= start), "no byte is had twice");
        out.insert(start, end);
    }

    fn remove(&self, buf: &pinpool::Buf) {
        assert!(self.0.lock().unwrap().remove(&(buf.as_ptr() as usize)).is_some());
    }
}

#[test]
fn scribbling_over_all_of_it_spoils_contents_alone() {
    let pool = shared(4 * MIB + 5 * PAGE).arena_size(MIB).build().unwrap();
    let joined = joining(&Device::soft()).join(pool.export().unwrap()).unwrap();
    let (out, done) = (Out::default(), AtomicBool::new(false));
    let passes = thread::scope(|scope| {
        let scribbler = scope.spawn(|| {
            let mut rng = Rng(1);
            let mut passes = 0;
            while !done.load(Relaxed) || passes < 3 {
                for a in joined.arenas() {
                    let pool_addr = pool.arenas()[0].addr.as_ptr() as u64;
                    for at in (0..a.len).step_by(8) {
                        // What would do most harm where a link or a length is looked for.
                        let word = match rng.next() % 4 {
                            0 => 0,
                            1 => u64::MAX,
                            2 => pool_addr + rng.below(5 * MIB) as u64,
                            _ => rng.next(),
                        };
                        // SAFETY: eight bytes of an arena that is mapped here while `joined` lives; the
                        // other threads look at none of the contents.
                        unsafe { a.addr.as_ptr().add(at).cast::<u64>().write_volatile(word) };
                    }
                }
                passes += 1;
            }
            passes
        });
        let threads: Vec<_> = (0..6u64)
            .map(|t| {
                let (pool, out) = (&pool, &out);
                scope.spawn(move || {
                    let mut rng = Rng(t + 10);
                    let (mut held, mut raw) = (Vec::new(), Vec::new());
                    for _ in 0..8_000 {
                        match rng.below(8) {
                            0..4 => {
                                let Ok(buf) = pool.alloc(rng.size(1, 200_000)) else { continue };
                                out.add(&buf);
                                held.push(buf);
                            }
                            4 if !held.is_empty() => {
                                let buf = held.swap_remove(rng.below(held.len()));
                                raw.push(buf.into_raw());
                            }
                            5 if !raw.is_empty() => {
                                let ptr = raw.swap_remove(rng.below(raw.len()));
                                // SAFETY: this thread's own, given up by it.
                                let buf = unsafe { pool.from_raw(ptr.as_ptr()) }.unwrap();
                                out.remove(&buf);
                            }
                            _ if !held.is_empty() => {
                                let buf = held.swap_remove(rng.below(held.len()));
                                assert_eq!(pool.keys_of(buf.as_ptr()), Some(buf.keys()));
                                out.remove(&buf);
                            }
                            _ => {}
                        }
                    }
                    for ptr in raw {
                        // SAFETY: as above.
                        let buf = unsafe { pool.from_raw(ptr.as_ptr()) }.unwrap();
                        out.remove(&buf);
                    }
                    held.drain(..).for_each(|buf| out.remove(&buf));
                })
            })
            .collect();
        threads.into_iter().for_each(|t| t.join().unwrap());
        done.store(true, Relaxed);
        scribbler.join().unwrap()
    });
    assert!(passes >= 3 && out.0.lock().unwrap().is_empty());
    pool.check();
    let stats = pool.stats();
    assert_eq!((stats.live, stats.live_buffers), (0, 0));
    pool.trim();
    let whole: Vec<_> = (0..4).map(|_| pool.alloc(MIB).expect("all of it is free again")).collect();
    drop(whole);
    pool.close().unwrap();
}
