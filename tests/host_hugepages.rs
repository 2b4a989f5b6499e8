//! Hugepages that are there, partly there, not there, and there but out of a cgroup's reach (B06): what a
//! pool gets is whole pages of one size for each arena, what it says agrees with smaps, and what it does
//! not keep goes back. Changes the machine's counts of hugepages, and restores them.
#![allow(clippy::unwrap_used, clippy::print_stderr, clippy::disallowed_methods)]

#[path = "common/cgroup.rs"]
mod cgroup;
mod common;

use std::{
    env, fs, io,
    path::{Path, PathBuf},
    sync::{Mutex, MutexGuard, PoisonError},
};

use cgroup::{Cgroup, again, passed};
use common::{page_sizes_of, soft};
use pinpool::{BuildError, Event, PageSize, Pages, Pool, Problem};

const MIB: usize = 1 << 20;
const HUGE_2M: usize = 2 * MIB;
const HUGE_1G: usize = 1 << 30;

/// One size's counts, held by one test at a time; what was reserved before is restored at the end.
struct Hugepages {
    dir: PathBuf,
    before: [(&'static str, u64); 2],
    _alone: MutexGuard<'static, ()>,
}

impl Hugepages {
    fn of(page: usize) -> Option<Self> {
        static ALONE: Mutex<()> = Mutex::new(());
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let dir = Path::new("/sys/kernel/mm/hugepages").join(format!("hugepages-{}kB", page >> 10));
        let before =
            ["nr_hugepages", "nr_overcommit_hugepages"].map(|file| (file, read(&dir, file)));
        let [Some(nr), Some(over)] = before.map(|(_, n)| n) else { return None };
        let before = [("nr_hugepages", nr), ("nr_overcommit_hugepages", over)];
        let this = Self { dir, before, _alone: alone };
        if let Err(e) = this.write("nr_overcommit_hugepages", 0)
            // Pages of 1 GiB are never made on demand, so there is nothing to turn off.
            && e.raw_os_error() != Some(libc::EINVAL)
        {
            panic!("this test reserves hugepages, which takes root: {e}; try `sudo`")
        }
        Some(this)
    }

    fn write(&self, file: &str, n: u64) -> io::Result<()> {
        fs::write(self.dir.join(file), n.to_string())
    }

    fn count(&self, file: &str) -> u64 {
        read(&self.dir, file).unwrap()
    }

    fn free(&self) -> u64 {
        self.count("free_hugepages") - self.count("resv_hugepages")
    }

    /// Has so many pages free, whoever uses others; false where the system has no room.
    fn set_free(&self, n: u64) -> bool {
        let used = self.count("nr_hugepages") - self.count("free_hugepages");
        self.write("nr_hugepages", used + n).unwrap();
        self.free() == n
    }
}

impl Drop for Hugepages {
    fn drop(&mut self) {
        for (file, n) in self.before {
            // A panic here would hide the test's own.
            let _ = self.write(file, n);
        }
    }
}

fn read(dir: &Path, file: &str) -> Option<u64> {
    fs::read_to_string(dir.join(file)).ok()?.trim().parse().ok()
}

/// Checks that every arena is made of pages of the one size that the pool says, and can be written.
fn check(pool: &Pool) {
    for arena in pool.arenas() {
        let found = page_sizes_of(arena.addr.as_ptr() as usize, arena.len);
        assert_eq!(found, [arena.page_size], "what the pool says and smaps");
        let page = arena.page_size;
        assert!(
            (arena.addr.as_ptr() as usize).is_multiple_of(page) && arena.len.is_multiple_of(page)
        );
    }
    let mut bufs: Vec<_> = std::iter::from_fn(|| pool.alloc(MIB).ok()).collect();
    assert!(!bufs.is_empty());
    bufs.iter_mut().for_each(|b| b.fill(0xa5));
}

/// Page size, pages needed and pages free of an error that is about hugepages alone.
fn shortage(error: &BuildError) -> (usize, u64, u64) {
    match error {
        BuildError::Preflight(problems) => match problems.as_slice() {
            [Problem::Hugepages { page_size, needed, free, .. }] => (*page_size, *needed, *free),
            other => panic!("{other:?}"),
        },
        other => panic!("{other}"),
    }
}

#[test]
fn b06_without_hugepages_required_ones_are_an_error_and_preferred_ones_base_pages() {
    let huge = Hugepages::of(HUGE_2M).expect("this system has pages of 2 MiB");
    assert!(huge.set_free(0));
    let error =
        soft(16 * MIB).pages(Pages::Require(PageSize::Huge2M)).build().expect_err("none are free");
    assert_eq!(shortage(&error), (HUGE_2M, 8, 0));
    for part in ["2 MiB", "8 are needed", "0 are free", "nr_hugepages"] {
        assert!(error.to_string().contains(part), "{part} in {error}");
    }
    let pool = soft(16 * MIB).pages(Pages::Prefer(PageSize::Huge2M)).build().unwrap();
    assert_eq!(pool.arenas()[0].page_size, 4096);
    check(&pool);
}

#[test]
fn b06_where_some_are_free_no_arena_is_half_huge_and_none_are_lost() {
    let huge = Hugepages::of(HUGE_2M).expect("this system has pages of 2 MiB");
    assert!(huge.set_free(3));
    let error = soft(16 * MIB).pages(Pages::Require(PageSize::Huge2M)).build().expect_err("3 of 8");
    assert_eq!(shortage(&error), (HUGE_2M, 8, 3));
    assert_eq!(huge.free(), 3);

    let pool = soft(16 * MIB).pages(Pages::Prefer(PageSize::Huge2M)).build().unwrap();
    assert_eq!(pool.arenas()[0].page_size, 4096, "one arena of 8 pages");
    check(&pool);
    assert_eq!(huge.free(), 3);
    drop(pool);

    // Arenas of two pages: the first has them, the others do not, and one page is over.
    static MISSING: Mutex<Vec<(usize, Option<u64>)>> = Mutex::new(Vec::new());
    let pool = soft(16 * MIB)
        .arena_size(4 * MIB)
        .pages(Pages::Prefer(PageSize::Huge2M))
        .on_event(|e| {
            if let Event::HugepagesMissing { arena, free_pages, .. } = e {
                MISSING.lock().unwrap().push((*arena, *free_pages));
            }
        })
        .build()
        .unwrap();
    let sizes: Vec<_> = pool.arenas().iter().map(|a| a.page_size).collect();
    assert_eq!(sizes, [HUGE_2M, 4096, 4096, 4096]);
    assert_eq!(*MISSING.lock().unwrap(), [(1, Some(1)), (2, Some(1)), (3, Some(1))]);
    check(&pool);
    assert_eq!(huge.free(), 1);
    drop(pool);
    assert_eq!(huge.free(), 3);

    let error = soft(16 * MIB)
        .arena_size(4 * MIB)
        .pages(Pages::Require(PageSize::Huge2M))
        .build()
        .expect_err("the second arena cannot have its pages");
    assert_eq!(shortage(&error), (HUGE_2M, 8, 3));
    assert_eq!(huge.free(), 3, "no arena keeps any");
}

#[test]
fn all_arenas_are_huge_where_enough_are_free() {
    let huge = Hugepages::of(HUGE_2M).expect("this system has pages of 2 MiB");
    assert!(huge.set_free(8));
    let pool = soft((15 << 20) + 1)
        .arena_size(4 * MIB)
        .pages(Pages::Require(PageSize::Huge2M))
        .build()
        .unwrap();
    assert_eq!((pool.capacity(), huge.free()), (16 * MIB, 0));
    assert!(pool.arenas().iter().all(|a| a.page_size == HUGE_2M));
    check(&pool);
    drop(pool);
    assert_eq!(huge.free(), 8);
}

#[test]
fn b06_pages_of_1_gib_are_had_or_named() {
    let ask = || soft(HUGE_1G).pages(Pages::Require(PageSize::Huge1G)).build();
    let Some(huge) = Hugepages::of(HUGE_1G) else {
        let error = ask().expect_err("no such size");
        assert!(matches!(error, BuildError::PageSizeAbsent { asked: HUGE_1G, .. }), "{error}");
        assert!(error.to_string().contains("1 GiB"), "{error}");
        return;
    };
    assert!(huge.set_free(0));
    let error = ask().expect_err("none are free");
    assert_eq!(shortage(&error), (HUGE_1G, 1, 0));
    assert!(error.to_string().contains("hugepages-1048576kB"), "{error}");
    if !huge.set_free(1) {
        eprintln!("no page of 1 GiB can be reserved on this machine now; that part is left out");
        return;
    }
    let pool = ask().unwrap();
    assert_eq!(pool.arenas()[0].page_size, HUGE_1G);
    check(&pool);
    drop(pool);
    assert_eq!(huge.free(), 1);
}

const CHILD: &str = "PINPOOL_TEST_IN_CGROUP";

#[test]
fn b06_under_a_smaller_hugetlb_cgroup_it_is_an_error_and_never_a_signal() {
    if let Some(old) = env::var_os(OLD_KERNEL) {
        if old == "1" {
            forget_populate_write();
        }
        return in_the_cgroup();
    }
    let huge = Hugepages::of(HUGE_2M).expect("this system has pages of 2 MiB");
    assert!(huge.set_free(8));
    let group = match Cgroup::new("hugetlb") {
        Ok(group) => group,
        Err(e) => return eprintln!("left out: {e}"),
    };
    // Two pages of the eight that are reserved.
    group.limit("hugetlb.2MB", 2 * HUGE_2M);
    let test = "b06_under_a_smaller_hugetlb_cgroup_it_is_an_error_and_never_a_signal";
    let file = group.file(&group.limit_file("hugetlb.2MB"));
    // The other way of faulting in, of kernels before 5.14, as well.
    for old in ["0", "1"] {
        group.limit("hugetlb.2MB", 2 * HUGE_2M);
        let mut child = again(test, CHILD, file.to_str().unwrap());
        passed(&group.run(child.env(OLD_KERNEL, old)));
        assert_eq!(huge.free(), 8, "what was charged is back");
    }
}

const OLD_KERNEL: &str = "PINPOOL_TEST_OLD_KERNEL";

/// Has madvise(2) answer `MADV_POPULATE_WRITE` as a kernel does that has never heard of it, on this thread
/// and those that it starts.
fn forget_populate_write() {
    const LD: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
    const JEQ: u16 = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
    const RET: u16 = (libc::BPF_RET | libc::BPF_K) as u16;
    let op = |code, jt, jf, k| libc::sock_filter { code, jt, jf, k };
    // Words of seccomp_data: the call's number, and the low half of its third argument.
    let advice = 16 + 2 * 8 + if cfg!(target_endian = "big") { 4 } else { 0 };
    let mut filter = [
        op(LD, 0, 0, 0),
        op(JEQ, 0, 3, libc::SYS_madvise as u32),
        op(LD, 0, 0, advice),
        op(JEQ, 0, 1, libc::MADV_POPULATE_WRITE as u32),
        op(RET, 0, 0, libc::SECCOMP_RET_ERRNO | libc::EINVAL as u32),
        op(RET, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    // SAFETY: the program and its filter are valid for the calls, which copy them.
    unsafe {
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        assert_eq!(libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &program), 0);
        let page = libc::mmap(std::ptr::null_mut(), 4096, 3, 0x22, -1, 0);
        let refused = libc::madvise(page, 4096, libc::MADV_POPULATE_WRITE);
        assert_eq!((refused, io::Error::last_os_error().raw_os_error()), (-1, Some(libc::EINVAL)));
    }
}

fn in_the_cgroup() {
    let error =
        soft(16 * MIB).pages(Pages::Require(PageSize::Huge2M)).build().expect_err("limited");
    assert!(matches!(error, BuildError::Preflight(_)), "{error}");
    assert!(error.to_string().contains("2 MiB"), "{error}");
    // Here the limit is met by faulting in, which answers with an error, not with a signal.
    let pool = soft(16 * MIB).pages(Pages::Prefer(PageSize::Huge2M)).build().unwrap();
    assert_eq!(pool.arenas()[0].page_size, 4096);
    check(&pool);
    drop(pool);
    let pool = soft(2 * HUGE_2M).pages(Pages::Require(PageSize::Huge2M)).build().unwrap();
    check(&pool);
    drop(pool);
    // The limit falls while pages are faulted in, unseen by the preflight.
    let file = env::var(CHILD).unwrap();
    fs::write(&file, (8 * HUGE_2M).to_string()).unwrap();
    let error = soft(16 * MIB)
        .pages(Pages::Require(PageSize::Huge2M))
        .start_threads(1)
        .on_progress(move |_| fs::write(&file, (2 * HUGE_2M).to_string()).unwrap())
        .build()
        .expect_err("limited on the way");
    assert!(matches!(error, BuildError::Back { step: "faulting in", .. }), "{error}");
}

#[cfg(feature = "fault")]
#[test]
fn each_step_that_fails_on_hugepages_gives_all_of_them_back() {
    use pinpool::{
        Device,
        device::{Fault, FaultyMapping, FaultyRegistrar, MapFault, MapStep},
    };
    const EIO: i32 = 5;
    let huge = Hugepages::of(HUGE_2M).expect("this system has pages of 2 MiB");
    assert!(huge.set_free(12));
    // Three arenas of four pages, each faulted in by two calls.
    let build = |mapping: &FaultyMapping, fault: Option<Fault>, threads| {
        let registrar = FaultyRegistrar::new(&Device::soft());
        let registrar = fault.into_iter().fold(registrar, FaultyRegistrar::fault);
        soft(24 * MIB)
            .device(Device::custom(registrar))
            .arena_size(8 * MIB)
            .start_threads(threads)
            .faulty_mapping(mapping)
    };
    let require = Pages::Require(PageSize::Huge2M);
    let dry = FaultyMapping::new();
    drop(build(&dry, None, 1).pages(require).build().unwrap());
    for threads in [1, 3] {
        for (step, n) in [
            (MapStep::Reserve, 1),
            (MapStep::Map, 3),
            (MapStep::FaultIn, 6),
            // The page map, the tokens and the slabs.
            (MapStep::Table, 3),
            (MapStep::Unmap, 0),
        ] {
            assert!(n == 0 || dry.calls(step) == n, "{step:?}: {}", dry.calls(step));
            for k in 1..=n {
                let mapping = FaultyMapping::new().fault(MapFault::Fail(step, k, EIO));
                let error =
                    build(&mapping, None, threads).pages(require).build().expect_err("broken");
                assert_eq!(error.raw_os_error(), Some(EIO), "{step:?} {k}: {error}");
                assert_eq!(huge.free(), 12, "{step:?} {k} of {n}: free and not promised");
            }
        }
        for k in 1..=3 {
            let fault = Some(Fault::Register(k, EIO));
            let built = build(&FaultyMapping::new(), fault, threads).pages(require).build();
            assert_eq!(built.expect_err("refused").raw_os_error(), Some(EIO));
            assert_eq!(huge.free(), 12, "register {k}");
        }
    }
    // Preferred: the arena that met the fault begins anew on base pages, with nothing kept of the others.
    for k in 1..=6 {
        let mapping = FaultyMapping::new().fault(MapFault::Fail(MapStep::FaultIn, k, EIO));
        let prefer = Pages::Prefer(PageSize::Huge2M);
        let pool = build(&mapping, None, 1).pages(prefer).build().unwrap();
        let small = pool.arenas().iter().filter(|a| a.page_size == 4096).count();
        assert_eq!((small, huge.free()), (1, 4), "faulting in {k}");
        check(&pool);
        drop(pool);
        assert_eq!(huge.free(), 12);
    }
}

#[cfg(feature = "fault")]
#[test]
fn hugepages_that_cannot_be_unmapped_go_back_all_the_same() {
    use pinpool::device::{FaultyMapping, MapFault, MapStep};
    const ENOMEM: i32 = 12;
    if env::var_os(CHILD).is_some() {
        // What stays mapped is gone with this process.
        let mapping = FaultyMapping::new()
            .fault(MapFault::Fail(MapStep::Unmap, 1, ENOMEM))
            .fault(MapFault::Fail(MapStep::Unmap, 2, ENOMEM));
        let builder = soft(8 * MIB).pages(Pages::Require(PageSize::Huge2M));
        drop(builder.faulty_mapping(&mapping).build().unwrap());
        let dir = Path::new("/sys/kernel/mm/hugepages/hugepages-2048kB");
        assert_eq!(read(dir, "free_hugepages"), read(dir, "nr_hugepages"));
        assert!(pinpool::leaked_bytes() >= 8 << 20);
        return;
    }
    let huge = Hugepages::of(HUGE_2M).expect("this system has pages of 2 MiB");
    assert!(huge.set_free(4));
    let test = "hugepages_that_cannot_be_unmapped_go_back_all_the_same";
    passed(&again(test, CHILD, "1").output().unwrap());
    assert_eq!(huge.free(), 4);
}
