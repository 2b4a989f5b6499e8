//! Control groups and NUMA policies of the process, on real hierarchies. Proves:
//! - a hugetlb limit below the reservation is an error that names the file, never a SIGBUS, also when the
//!   limit falls while pages are faulted in;
//! - a memory limit, of the group or of one above it, is named before a page is touched;
//! - a node that a cpuset or a memory policy forbids is named with its free count, its pages do not count,
//!   and interleaving leaves it out;
//! - the doctor says the same, and the line that it gives mends it.
#![cfg(all(feature = "cli", any(feature = "rdma-sys", feature = "rdma-mummy-sys")))]
#![allow(clippy::print_stderr, clippy::disallowed_methods)]

#[path = "common/cgroup.rs"]
mod cgroup;
mod cli;
#[path = "common/verbs.rs"]
mod common;

use std::{env, fs, process::Command};

use cgroup::{Cgroup, again, command_in, passed};
use cli::Left;
use common::{alone, device, free_hugepages, free_on, two_nodes, vm_pin};
use pinpool::{BuildError, Builder, Numa, PageSize, Pages, Pool, Problem, Stage};
use serde_json::Value;

const MIB: usize = 1 << 20;
const HUGE: usize = 2 * MIB;
const REQUIRE: Pages = Pages::Require(PageSize::Huge2M);
const PREFER: Pages = Pages::Prefer(PageSize::Huge2M);

/// A group with this controller, or `None` on a machine where none is to be had; the guest has all.
fn group(controller: &str) -> Option<Cgroup> {
    match Cgroup::new(controller) {
        Ok(group) => {
            assert!(group.v2 || env::var_os("PINPOOL_GUEST").is_none(), "the guest has version 2");
            Some(group)
        }
        Err(e) => {
            assert!(env::var_os("PINPOOL_GUEST").is_none(), "{e}");
            eprintln!("left out: {e}");
            None
        }
    }
}

/// The child's half of a test: the path of the group that it is in.
const CHILD: &str = "PINPOOL_TEST_IN_CGROUP";

fn child() -> Option<String> {
    env::var(CHILD).ok()
}

fn builder(capacity: usize, pages: Pages) -> Builder {
    Pool::builder().device(device()).capacity(capacity).pages(pages).start_threads(1)
}

fn doctor(args: &[&str]) -> Command {
    cli::pinpool(&[&["doctor", "--json"], args].concat())
}

/// The only problem of a report.
#[track_caller]
fn problem<'a>(v: &'a Value, kind: &str) -> &'a Value {
    let [one] = v["problems"].as_array().expect("a list").as_slice() else { panic!("{v}") };
    assert_eq!(one["kind"], kind, "{v}");
    one
}

/// Runs the command of a problem's remedy.
fn mend(problem: &Value) {
    let command = command_in(problem["fix"].as_str().expect("words"));
    assert!(Command::new("sh").args(["-c", command]).status().expect("sh").success(), "{command}");
}

#[test]
fn a_hugetlb_limit_below_the_reservation_is_an_error_and_never_a_signal() {
    if let Some(group) = child() {
        return under_a_hugetlb_limit(&group);
    }
    let _alone = alone();
    device();
    let Some(group) = group("hugetlb") else { return };
    let free = free_hugepages();
    assert!(free >= 8, "this test needs 8 hugepages of 2 MiB, {free} are free");
    group.limit("hugetlb.2MB", 2 * HUGE);
    let test = "a_hugetlb_limit_below_the_reservation_is_an_error_and_never_a_signal";
    let file = group.file(&group.limit_file("hugetlb.2MB"));
    passed(&group.run(&mut again(test, CHILD, file.to_str().expect("UTF-8"))));
    assert_eq!(free_hugepages(), free, "what was charged is back");
}

fn under_a_hugetlb_limit(limit_file: &str) {
    let (start, free) = (vm_pin(), free_hugepages());
    let error = builder(8 * HUGE, REQUIRE).build().expect_err("limited");
    match &error {
        BuildError::Preflight(problems) => match problems.as_slice() {
            [Problem::HugetlbCgroup { page_size, asked, used, limit, file }] => {
                assert_eq!((*page_size, *asked, *limit), (HUGE, 8 * HUGE as u64, 2 * HUGE as u64));
                assert_eq!((*used, file.to_str()), (0, Some(limit_file)));
            }
            other => panic!("{other:?}"),
        },
        other => panic!("{other}"),
    }
    let pool = builder(8 * HUGE, PREFER).build().expect("on base pages");
    assert_eq!(pool.arenas()[0].page_size, 4096);
    drop(pool);
    let mut pool = builder(2 * HUGE, REQUIRE).build().expect("what is allowed");
    pool.alloc(HUGE).expect("alloc").fill(1);
    assert_eq!((vm_pin() - start, pool.arenas()[0].page_size), (2 * HUGE as u64, HUGE));
    pool = {
        drop(pool);
        // The limit falls below what is in use while pages are faulted in: the preflight saw none of that.
        fs::write(limit_file, (16 * HUGE).to_string()).expect("raised");
        let lower = limit_file.to_owned();
        let falls = |pages| {
            let lower = lower.clone();
            builder(8 * HUGE, pages).on_progress(move |p| {
                if p.stage == Stage::FaultIn && p.bytes_done == 2 * HUGE as u64 {
                    fs::write(&lower, (2 * HUGE).to_string()).expect("lowered");
                }
            })
        };
        let error = falls(REQUIRE).build().expect_err("the limit fell");
        assert!(matches!(error, BuildError::Back { step: "faulting in", .. }), "{error}");
        assert!(error.raw_os_error().is_some(), "{error}");
        assert_eq!((vm_pin(), free_hugepages()), (start, free), "given back");
        fs::write(limit_file, (16 * HUGE).to_string()).expect("raised");
        falls(PREFER).build().expect("begun anew on base pages")
    };
    assert_eq!(pool.arenas()[0].page_size, 4096);
    assert_eq!(free_hugepages(), free);
}

#[test]
fn a_memory_limit_of_any_level_is_named_before_a_page_is_touched() {
    if let Some(group) = child() {
        let start = vm_pin();
        let error = builder(256 * MIB, Pages::Base).build().expect_err("limited");
        match &error {
            BuildError::Preflight(problems) => match problems.as_slice() {
                [Problem::MemoryCgroup { asked, limit, file, .. }] => {
                    assert_eq!((*asked, *limit), (256 << 20, 96 << 20));
                    assert_eq!(file.to_str(), Some(&*group));
                }
                other => panic!("{other:?}"),
            },
            other => panic!("{other}"),
        }
        assert_eq!(vm_pin(), start);
        // Hugepages are not counted as memory.
        drop(builder(4 * HUGE, REQUIRE).build().expect("hugepages"));
        builder(16 * MIB, Pages::Base).build().expect("what is allowed");
        return;
    }
    let _alone = alone();
    device();
    let Some(group) = group("memory") else { return };
    group.limit("memory", 96 * MIB);
    let file = group.file(&group.limit_file("memory"));
    let test = "a_memory_limit_of_any_level_is_named_before_a_page_is_touched";
    let again = || again(test, CHILD, file.to_str().expect("UTF-8"));
    if group.v2 {
        // The process is in a group inside, which limits nothing.
        let inner = group.inner(&["memory"]);
        passed(&inner.run(&mut again()));
    } else {
        passed(&group.run(&mut again()));
    }
}

#[test]
fn the_doctor_names_a_cgroups_limit_and_the_line_that_it_gives_mends_it() {
    let _alone = alone();
    let name = device().info().name;
    for (controller, resource, pages, capacity, limit) in [
        ("hugetlb", "hugetlb.2MB", "2M", 16 * MIB, 4 * MIB),
        ("memory", "memory", "base", 256 * MIB, 96 * MIB),
    ] {
        let Some(group) = group(controller) else { continue };
        group.limit(resource, limit);
        let capacity = capacity.to_string();
        let ask = || {
            let args = ["--device", &name, "--capacity", &capacity, "--pages", pages];
            Left::from(group.run(&mut doctor(&args)))
        };
        let left = ask();
        assert_eq!(left.code, Some(1), "{}", left.stderr);
        let v = left.object();
        let file = group.file(&group.limit_file(resource));
        let shown = v["cgroups"].as_array().expect("a list");
        let shown = shown.iter().find(|c| c["file"] == file.to_str().expect("UTF-8"));
        let shown = shown.unwrap_or_else(|| panic!("{v}"));
        assert_eq!(shown["limit"], limit);
        assert_eq!(shown["page_size"].as_u64(), (pages == "2M").then_some(HUGE as u64));
        let wrong = problem(&v, &format!("{controller}_cgroup"));
        assert!(wrong["what"].as_str().expect("words").contains(file.to_str().expect("UTF-8")));
        mend(wrong);
        let left = ask();
        assert_eq!(left.code, Some(0), "{}", left.stdout);
        // As text, too.
        let mut text = cli::pinpool(&["doctor", "--device", &name, "--capacity", &capacity]);
        let left = Left::from(group.run(text.args(["--pages", pages])));
        assert!(left.stdout.contains(&format!("({})", file.display())), "{}", left.stdout);
    }
}

#[test]
fn a_node_that_the_cpuset_forbids_is_named_with_its_free_count_and_not_used() {
    let test = "a_node_that_the_cpuset_forbids_is_named_with_its_free_count_and_not_used";
    if child().is_some() {
        return with_node_0_alone("cpuset allows 0");
    }
    let _alone = alone();
    let name = device().info().name;
    if !two_nodes() {
        return;
    }
    let Some(group) = group("cpuset") else { return };
    if !group.v2 {
        let cpus = fs::read_to_string("/sys/devices/system/cpu/online").expect("processors");
        group.set("cpuset.cpus", cpus.trim());
    }
    group.set("cpuset.mems", "0");
    passed(&group.run(&mut again(test, CHILD, "1")));
    // The doctor, run in it.
    let ask = |numa| {
        let args = ["--device", &name, "--capacity", "4M", "--pages", "2M", "--numa", numa];
        Left::from(group.run(&mut doctor(&args)))
    };
    let left = ask("1");
    assert_eq!(left.code, Some(1), "{}", left.stderr);
    let v = left.object();
    let what = problem(&v, "node")["what"].as_str().expect("words");
    for part in ["NUMA node 1", "its cpuset allows 0", &format!("{} such pages", free_on(1))] {
        assert!(what.contains(part), "{part:?} in {what}");
    }
    for numa in ["0", "interleave"] {
        let left = ask(numa);
        assert_eq!((left.code, &left.object()["pool"]["nodes"]), (Some(0), &Value::from(&[0][..])));
    }
}

#[test]
fn a_node_that_a_memory_policy_forbids_is_named_with_its_free_count_and_not_used() {
    let test = "a_node_that_a_memory_policy_forbids_is_named_with_its_free_count_and_not_used";
    if child().is_some() {
        let node_0 = 1u64;
        // SAFETY: the call reads a mask of as many bits as it is told, less one.
        let done = unsafe {
            let bind = libc::MPOL_BIND | libc::MPOL_F_STATIC_NODES;
            libc::syscall(libc::SYS_set_mempolicy, bind, &node_0, 65usize)
        };
        assert_eq!(done, 0);
        return with_node_0_alone("policy binds it to 0");
    }
    let _alone = alone();
    device();
    if two_nodes() {
        passed(&again(test, CHILD, "1").output().expect("run"));
    }
}

/// In a process that may use node 0 alone.
fn with_node_0_alone(because: &str) {
    let (start, free) = (vm_pin(), [0, 1].map(free_on));
    assert!(free.iter().all(|&n| n >= 4), "this test needs hugepages on both nodes: {free:?}");
    let ask = |numa, pages: u64| builder(pages as usize * HUGE, REQUIRE).numa(numa).build();
    let error = ask(Numa::Node(1), 2).expect_err("forbidden");
    match &error {
        BuildError::Node { node: 1, free: Some(n), problem, .. } => {
            assert_eq!(*n, free[1] * HUGE as u64);
            assert!(problem.contains(because), "{error}");
        }
        other => panic!("{other}"),
    }
    assert!(
        error.to_string().contains(&format!("{} such pages are free there", free[1])),
        "{error}"
    );
    for numa in [Numa::Interleave, Numa::Any, Numa::OfDevice, Numa::Node(0)] {
        let pool = ask(numa, 4).unwrap_or_else(|e| panic!("{numa:?}: {e}"));
        assert_eq!(pool.arenas()[0].node, Some(0), "{numa:?}");
        assert_eq!([0, 1].map(free_on), [free[0] - 4, free[1]], "{numa:?}");
    }
    // One page more than node 0 has; both together would have it.
    for numa in [Numa::Interleave, Numa::Any, Numa::OfDevice] {
        let error = ask(numa, free[0] + 1).expect_err("too many");
        let text = error.to_string();
        match error {
            BuildError::Preflight(problems) => match problems.as_slice() {
                [Problem::Hugepages { free: f, forbidden, nodes, .. }] => {
                    assert_eq!((*f, *forbidden), (free[0], Some(free[1])), "{text}");
                    assert_eq!(*nodes, [(0, free[0])]);
                }
                other => panic!("{other:?}"),
            },
            other => panic!("{other}"),
        }
    }
    drop(ask(Numa::Any, free[0]).expect("all of node 0"));
    assert_eq!((vm_pin(), [0, 1].map(free_on)), (start, free));
}
