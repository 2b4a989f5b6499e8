//! Forking with a pool on a verbs device: as it is, with the preparation that `RDMAV_FORK_SAFE` asks libibverbs
//! for, and with the one that is made where the kernel is not known to copy pinned pages:
//! - a child uses malloc, stdio and exit, is refused the pool, and tears nothing down, while the parent goes
//!   on with RDMA (B07);
//! - what the parent writes while a child lives is what the device sees, and the other way round;
//! - registering and deregistering leaves no `MADV_DONTFORK` and no mapping behind.
//!
//! One process forks in one test at a time.
#![cfg(all(
    feature = "loopback",
    feature = "fault",
    any(feature = "rdma-sys", feature = "rdma-mummy-sys")
))]
#![allow(clippy::disallowed_methods)]

#[path = "common/verbs.rs"]
mod common;

use std::{
    env, fs,
    io::{Read, Write, pipe},
    process::Command,
    sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    thread,
};

use common::{alone, check, device, fill, vm_pin};
use pinpool::{
    Access, AllocError, Backing, Device, PageSize, Pages, Pool,
    device::{FaultyRegistrar, ForkSupport, MrRequest, Registrar},
    loopback::Pair,
};

const MIB: usize = 1 << 20;
const ALL: Access = Access::LOCAL_WRITE.union(Access::REMOTE);
const CHILD: &str = "PINPOOL_TEST_FORK_CHILD";

/// How a process comes to libibverbs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Way {
    /// As it is.
    Plain,
    /// Told to prepare for forks.
    ForkSafe,
    /// Unable to ask the kernel whether it copies pinned pages on fork, as on kernels before 5.12.
    Unknowing,
}

impl Way {
    /// The way of this process.
    fn here() -> Self {
        match env::var(CHILD).as_deref() {
            Ok("ForkSafe") => Self::ForkSafe,
            Ok("Unknowing") => Self::Unknowing,
            _ => Self::Plain,
        }
    }
}

/// Runs `test`'s body here and then, each in a process of its own, in other ways.
fn each_way(test: &str, others: &[Way], body: impl FnOnce(Way)) {
    let _alone = alone();
    let here = Way::here();
    if here == Way::Unknowing {
        bar_rdma_netlink();
    }
    body(here);
    if here != Way::Plain {
        return;
    }
    for way in others {
        let mut command = Command::new(env::current_exe().expect("own path"));
        command.args(["--exact", test, "--nocapture", "--test-threads=1"]);
        command.env(CHILD, format!("{way:?}")).env_remove("RDMAV_FORK_SAFE");
        if *way == Way::ForkSafe {
            command.env("RDMAV_FORK_SAFE", "1");
        }
        let out = command.output().expect("start");
        let text = [out.stdout, out.stderr].map(|s| String::from_utf8_lossy(&s).into_owned());
        let ran = out.status.success() && text[0].contains("1 passed");
        assert!(ran, "{way:?}: {}\n{}\n{}", out.status, text[0], text[1]);
    }
}

/// Has `socket(AF_NETLINK, _, NETLINK_RDMA)` fail with EPERM in this thread and those that it starts.
fn bar_rdma_netlink() {
    // The program, in the classic BPF of linux/filter.h: load the call's number, then the low halves of
    // its first and third argument; all three must match.
    let op = |code, jt, jf, k| libc::sock_filter { code, jt, jf, k };
    let refuse = libc::SECCOMP_RET_ERRNO | libc::EPERM as u32;
    let low_half =
        |argument: u32| 16 + 8 * argument + if cfg!(target_endian = "big") { 4 } else { 0 };
    let mut program = [
        op(0x20, 0, 0, 0),
        op(0x15, 0, 5, libc::SYS_socket as u32),
        op(0x20, 0, 0, low_half(0)),
        op(0x15, 0, 3, libc::AF_NETLINK as u32),
        op(0x20, 0, 0, low_half(2)),
        op(0x15, 0, 1, libc::NETLINK_RDMA as u32),
        op(0x06, 0, 0, refuse),
        op(0x06, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let filter = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    // SAFETY: the two calls read their arguments; `filter` and `program` live across them.
    unsafe {
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        assert_eq!(libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &filter), 0);
    }
}

/// Forks; the child runs `child` and exits as C programs do, by `exit`, with 0 if it was true.
fn fork(child: impl FnOnce() -> bool) -> i32 {
    // SAFETY: the child runs `child`, which uses nothing that another thread may hold, and exits.
    let pid = unsafe { libc::fork() };
    assert!(pid >= 0);
    if pid == 0 {
        let ok = std::panic::catch_unwind(std::panic::AssertUnwindSafe(child)).unwrap_or(false);
        // SAFETY: ends the child, through its exit handlers.
        unsafe { libc::exit(i32::from(!ok)) };
    }
    pid
}

#[track_caller]
fn exits_with_0(pid: i32) {
    let mut status = 0;
    // SAFETY: `pid` is a child of this process, and `status` is valid to write to.
    assert_eq!(unsafe { libc::waitpid(pid, &mut status, 0) }, pid);
    assert_eq!(status, 0, "the child's wait status");
}

/// What a child of a C program does: heap, files, a formatted line.
fn malloc_and_stdio() -> bool {
    let mut blocks = [std::ptr::null_mut::<libc::c_void>(); 64];
    for i in 0..10_000usize {
        let block = &mut blocks[i % 64];
        // SAFETY: each block comes from malloc, or is null, and is freed once; it is written within its
        // length.
        unsafe {
            libc::free(*block);
            *block = libc::malloc(1 + i * 7 % 5000);
            if block.is_null() {
                return false;
            }
            libc::memset(*block, 7, 1 + i * 7 % 5000);
        }
    }
    // SAFETY: as above.
    blocks.into_iter().for_each(|b| unsafe { libc::free(b) });
    for _ in 0..200 {
        let mut line = [0u8; 256];
        // SAFETY: two strings that end in NUL, a file that is open, and a buffer of the length told.
        let ok = unsafe {
            let file = libc::fopen(c"/proc/self/status".as_ptr(), c"r".as_ptr());
            !file.is_null()
                && !libc::fgets(line.as_mut_ptr().cast(), 256, file).is_null()
                && libc::fclose(file) == 0
        };
        if !ok || !line.starts_with(b"Name:") {
            return false;
        }
    }
    true
}

fn pools(device: &Device) -> Vec<Pool> {
    let build = |pages, backing| {
        let builder = Pool::builder().device(device.clone()).access(ALL).capacity(4 * MIB);
        builder.pages(pages).backing(backing).build().expect("build")
    };
    let huge = Pages::Require(PageSize::Huge2M);
    vec![
        build(Pages::Base, Backing::Private),
        build(huge, Backing::Private),
        build(Pages::Base, Backing::Memfd),
    ]
}

/// Writes from one buffer of the pool to another by RDMA, and checks what arrived.
fn round(pair: &mut Pair, pool: &Pool, seed: u64) {
    let mut from = pool.alloc(10_000).expect("alloc");
    let mut to = pool.alloc(10_000).expect("alloc");
    fill(&mut from, seed);
    to.fill(0);
    let remote = to.remote().expect("a remote right");
    // SAFETY: both buffers are this function's, and the call is over when it returns.
    unsafe { pair.write(from.sge(), remote.addr, remote.rkey) }.expect("write");
    check(&to, seed);
}

/// A device, and a registrar around it that counts: what is registered there can be reached through it.
fn counted() -> (Device, FaultyRegistrar) {
    let verbs = device();
    let registrar = FaultyRegistrar::new(&verbs);
    (verbs, registrar)
}

#[test]
fn b07_a_child_uses_malloc_and_stdio_and_exits_while_the_parent_goes_on() {
    let name = "b07_a_child_uses_malloc_and_stdio_and_exits_while_the_parent_goes_on";
    each_way(name, &[Way::ForkSafe, Way::Unknowing], |_| {
        let (verbs, registrar) = counted();
        let mut pair = Pair::connect(&verbs).expect("connect");
        for pool in pools(&Device::custom(registrar.clone())) {
            let (capacity, pinned) = (pool.capacity(), vm_pin());
            let (ended, live) = (registrar.deregister_calls(), registrar.live());
            let buf = pool.alloc(5000).expect("alloc");
            let pid = fork(|| {
                let fine = malloc_and_stdio();
                let stats = pool.stats();
                let refused = matches!(pool.alloc(100), Err(AllocError::ForeignProcess { .. }));
                // Neither the last buffer nor the last handle that the child knows ends anything.
                // SAFETY: the child's own copies; it uses neither again, for it leaves by `exit`.
                unsafe {
                    drop(std::ptr::read(&buf));
                    drop(std::ptr::read(&pool));
                }
                let untouched = registrar.deregister_calls() == ended;
                fine && refused && stats.capacity == capacity && untouched
            });
            exits_with_0(pid);
            assert_eq!((vm_pin(), pool.stats().live_buffers), (pinned, 1));
            (0..10).for_each(|seed| round(&mut pair, &pool, seed));
            drop(buf);
            pool.check();
            pool.close().expect("the parent tears it down");
            assert_eq!((registrar.deregister_calls(), registrar.live()), (ended + 1, live - 1));
        }
    });
}

#[test]
fn b07_children_come_and_go_while_other_threads_move_bytes() {
    let _alone = alone();
    let verbs = device();
    for pool in pools(&verbs) {
        let (done, rounds) = (AtomicBool::new(false), AtomicU64::new(0));
        thread::scope(|scope| {
            for t in 1..=2 {
                let (pool, verbs, done, rounds) = (&pool, &verbs, &done, &rounds);
                scope.spawn(move || {
                    let mut pair = Pair::connect(verbs).expect("connect");
                    while !done.load(Relaxed) {
                        round(&mut pair, pool, t << 32 | rounds.fetch_add(1, Relaxed));
                    }
                });
            }
            while rounds.load(Relaxed) < 2 {
                thread::yield_now();
            }
            let before = rounds.load(Relaxed);
            for _ in 0..10 {
                let refused = || matches!(pool.alloc(100), Err(AllocError::ForeignProcess { .. }));
                exits_with_0(fork(|| malloc_and_stdio() && refused()));
            }
            while rounds.load(Relaxed) < before + 10 {
                thread::yield_now();
            }
            done.store(true, Relaxed);
        });
        pool.check();
        assert_eq!(pool.stats().live, 0);
    }
}

#[test]
fn device_and_parent_keep_the_same_pages_while_a_child_lives() {
    let name = "device_and_parent_keep_the_same_pages_while_a_child_lives";
    each_way(name, &[Way::Unknowing], |_| {
        let verbs = device();
        let mut pair = Pair::connect(&verbs).expect("connect");
        for pool in pools(&verbs) {
            let mut from = pool.alloc(MIB).expect("alloc");
            let mut to = pool.alloc(MIB).expect("alloc");
            fill(&mut from, 1);
            fill(&mut to, 2);
            let (mut told, mut tell) = pipe().expect("pipe");
            let pid = fork(|| {
                // Lives until it is told to end.
                told.read(&mut [0]).expect("read") == 1
            });
            // The first writes since the fork: where pages were shared with the child, they part here.
            fill(&mut from, 3);
            let remote = to.remote().expect("a remote right");
            // SAFETY: both buffers are this function's, and the call is over when it returns.
            unsafe { pair.write(from.sge(), remote.addr, remote.rkey) }.expect("write");
            check(&to, 3);
            fill(&mut to, 4);
            // SAFETY: as above.
            unsafe { pair.read(from.sge(), remote.addr, remote.rkey) }.expect("read");
            check(&from, 4);
            tell.write_all(&[1]).expect("tell");
            exits_with_0(pid);
        }
    });
}

/// Mappings of this process, and those of them under a range that children do not inherit.
fn mappings(addr: usize, len: usize) -> (usize, Vec<String>) {
    let smaps = fs::read_to_string("/proc/self/smaps").expect("procfs");
    let (mut all, mut inside, mut hidden) = (0, None, Vec::new());
    for line in smaps.lines() {
        let first = line.split_whitespace().next().unwrap_or_default();
        let hex = |s| usize::from_str_radix(s, 16);
        if let Some((a, b)) = first.split_once('-')
            && let (Ok(a), Ok(b)) = (hex(a), hex(b))
        {
            all += 1;
            inside = (a < addr + len && addr < b).then(|| first.to_owned());
        } else if first == "VmFlags:"
            && line.split_whitespace().any(|flag| flag == "dc")
            && let Some(range) = &inside
        {
            hidden.push(range.clone());
        }
    }
    (all, hidden)
}

const CYCLES: usize = 5_000;
/// Each is two registrations.
const POOLS: usize = 90;

#[test]
fn registering_leaves_neither_advice_nor_mappings_behind() {
    let name = "registering_leaves_neither_advice_nor_mappings_behind";
    each_way(name, &[Way::ForkSafe, Way::Unknowing], |way| {
        let verbs = device();
        let registrar = verbs.as_verbs().expect("verbs");
        // A mapping that outlives its registrations, and parts of it that differ from time to time.
        let mut map = memmap2::MmapMut::map_anon(64 * 4096).expect("map");
        map.fill(1);
        let start = map.as_mut_ptr() as usize;
        let request = |i: usize| {
            let (first, pages) = (i * 7 % 60, 1 + i % 4);
            let addr = std::ptr::NonNull::new((start + first * 4096) as *mut u8).expect("address");
            MrRequest { addr, len: pages * 4096, page_size: 4096, access: ALL }
        };
        let cycle = |i| {
            // SAFETY: mapped until the end of the test, and deregistered before.
            let r = unsafe { registrar.register(&request(i)) }.expect("register");
            // SAFETY: registered just now.
            unsafe { registrar.deregister(r.handle) }.expect("deregister");
        };
        (0..16).for_each(cycle);
        let (before, hidden) = mappings(start, map.len());
        assert!(hidden.is_empty(), "{hidden:?}");
        // SAFETY: as above.
        let held = unsafe { registrar.register(&request(0)) }.expect("register");
        let seen = mappings(start, map.len()).1;
        // Hidden is hidden: what a child would see there is a fault.
        let first = start as *const u8;
        // SAFETY: mapped, and inherited unless it is hidden; then this is a fault that ends the child.
        let look = || unsafe { first.read_volatile() } == 1;
        let mut status = 0;
        // SAFETY: `fork` gives a child of this process, and `status` is valid to write to.
        unsafe { libc::waitpid(fork(look), &mut status, 0) };
        let killed = libc::WIFSIGNALED(status) && libc::WTERMSIG(status) == libc::SIGSEGV;
        assert_eq!((status == 0, killed), (seen.is_empty(), !seen.is_empty()), "{status:#x}");
        let support = registrar.fork_support();
        match way {
            Way::Plain => {
                assert_eq!(seen.is_empty(), support == ForkSupport::CopyOnFork, "{support:?}")
            }
            // Whatever the kernel does, it was told to.
            Way::ForkSafe => assert!(!seen.is_empty(), "{support:?}"),
            Way::Unknowing => {
                assert_eq!((support, seen.is_empty()), (ForkSupport::HiddenFromChildren, false))
            }
        }
        (0..CYCLES).for_each(cycle);
        // SAFETY: registered above.
        unsafe { registrar.deregister(held.handle) }.expect("deregister");
        let (after, hidden) = mappings(start, map.len());
        assert!(hidden.is_empty(), "{hidden:?}");
        // The heap may have taken a few for itself.
        assert!(after <= before + 3, "{before} mappings before {CYCLES} cycles, {after} after");
    });
}

#[test]
fn pools_that_come_and_go_leave_neither_advice_nor_mappings_behind() {
    let name = "pools_that_come_and_go_leave_neither_advice_nor_mappings_behind";
    each_way(name, &[Way::ForkSafe], |_| {
        let verbs = device();
        let mut lent = memmap2::MmapMut::map_anon(16 * 4096).expect("map");
        lent.fill(1);
        let (start, len) = (lent.as_mut_ptr(), lent.len());
        let mut cycle = |i: usize| {
            let builder = Pool::builder().device(verbs.clone()).access(ALL).pages(Pages::Base);
            let builder = match i % 3 {
                0 => builder.capacity(16 * 4096),
                1 => builder.capacity(16 * 4096).backing(Backing::Memfd),
                // SAFETY: mapped until the end of the test, and used by this pool alone until it is gone.
                _ => unsafe { builder.adopt(start, len) },
            };
            let pool = builder.arena_size(8 * 4096).build().expect("build");
            drop(pool.alloc(4096).expect("alloc"));
            pool.close().expect("close");
        };
        (0..15).for_each(&mut cycle);
        let (before, hidden) = mappings(start as usize, len);
        assert!(hidden.is_empty(), "{hidden:?}");
        (0..POOLS).for_each(&mut cycle);
        let (after, hidden) = mappings(start as usize, len);
        assert!(hidden.is_empty(), "{hidden:?}");
        assert!(after <= before + 3, "{before} mappings before {POOLS} pools, {after} after");
        // What was lent is inherited again, and the child sees what is in it.
        let inherited = || {
            // SAFETY: mapped in the parent, and inherited, or this is a fault that the parent sees.
            unsafe { start.add(5 * 4096 + 7).read_volatile() };
            true
        };
        exits_with_0(fork(inherited));
    });
}
