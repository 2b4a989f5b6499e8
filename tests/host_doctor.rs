//! The doctor where there is no device to be had, or the software device:
//! - exit code 0, 1, 2 for nothing to change, something, and a wrong call;
//! - text without colours, JSON that is one object;
//! - it judges as building does.
#![cfg(feature = "cli")]

mod cli;

use std::{io::Read, os::fd::FromRawFd, process::Command};

use cli::{Left, keys, run};
use pinpool::{
    Access, BuildError, Device, DoctorOptions, Numa, PageSize, Pages, Pool, Problem, doctor,
};
use serde_json::Value;

fn kinds(list: &Value) -> Vec<&str> {
    list.as_array().expect("a list").iter().map(|p| p["kind"].as_str().expect("a kind")).collect()
}

const SMALL: [&str; 5] = ["doctor", "--capacity", "64K", "--pages", "base"];

#[test]
fn a_fit_machine_ends_in_zero() {
    let left = run(&[&SMALL[..], &["--soft"]].concat());
    assert_eq!((left.code, left.stderr.as_str()), (Some(0), ""), "{}", left.stdout);
    assert!(left.stdout.ends_with("\nNothing to change.\n"), "{}", left.stdout);
    for part in ["Machine\n", "soft (this pool's)", "locked memory", "1 memory region\n"] {
        assert!(left.stdout.contains(part), "{part:?} in {}", left.stdout);
    }
    assert!(!left.stdout.contains('\x1b'), "no colour codes");
    assert!(left.stdout.lines().all(|l| l == l.trim_end()), "{}", left.stdout);
    // Labels are padded to one width.
    let starts: Vec<_> = ["kernel", "locked memory", "capacity"]
        .map(|label| {
            let line = left.stdout.lines().find(|l| l.trim_start().starts_with(label));
            let rest = line.expect("the line").trim_start().strip_prefix(label).expect("label");
            label.len() + rest.len() - rest.trim_start().len()
        })
        .into();
    assert!(starts.iter().all(|&s| s == starts[0]), "{starts:?}: {}", left.stdout);
}

/// Runs it with stdout and stderr on a terminal, and gives what that showed.
fn on_a_terminal(args: &[&str]) -> (Option<i32>, String) {
    // SAFETY: the calls take numbers; the descriptor is wrapped below, at once.
    let (master, name) = unsafe {
        let fd = libc::posix_openpt(libc::O_RDWR | libc::O_NOCTTY);
        assert!(fd >= 0 && libc::grantpt(fd) == 0 && libc::unlockpt(fd) == 0);
        let mut name = [0; 128];
        assert_eq!(libc::ptsname_r(fd, name.as_mut_ptr(), name.len()), 0);
        let name = std::ffi::CStr::from_ptr(name.as_ptr()).to_str().expect("UTF-8").to_owned();
        (std::fs::File::from_raw_fd(fd), name)
    };
    let open = || std::fs::OpenOptions::new().read(true).write(true).open(&name).expect("open");
    let mut command = cli::pinpool(args);
    command.env("TERM", "xterm-256color").stdout(open()).stderr(open());
    let mut child = command.spawn().expect("run");
    // The parent's ends of it, without which reading comes to an end.
    drop(command);
    let mut shown = Vec::new();
    let mut reader = &master;
    let mut part = [0; 4096];
    // When the last of the other ends is closed, reading fails.
    while let Ok(n @ 1..) = reader.read(&mut part) {
        shown.extend_from_slice(&part[..n]);
    }
    let code = child.wait().expect("wait").code();
    (code, String::from_utf8(shown).expect("UTF-8"))
}

#[test]
fn on_a_terminal_it_reads_as_in_a_pipe() {
    let args = [&SMALL[..], &["--soft", "--arena-size", "1K"]].concat();
    let (code, shown) = on_a_terminal(&args);
    let piped = run(&args);
    assert_eq!((code, piped.code), (Some(1), Some(1)), "{shown}");
    // Figures come and go between two runs; what they are about does not.
    let labels = |text: &str| -> Vec<String> {
        let label =
            |l: &str| l.trim_end().chars().take(24).filter(|c| !c.is_ascii_digit()).collect();
        text.lines().map(label).collect()
    };
    assert_eq!(labels(&shown), labels(&(piped.stdout + &piped.stderr)));
    assert!(!shown.contains('\x1b'), "{shown}");
    assert!(shown.ends_with("see above\r\n"), "{shown}");
}

#[test]
fn json_is_one_object() {
    let left = run(&[&SMALL[..], &["--soft", "--json"]].concat());
    assert_eq!((left.code, left.stderr.as_str()), (Some(0), ""), "{}", left.stdout);
    let v = left.object();
    assert_eq!(keys(&v)[..3], ["fit", "kernel", "membarrier"]);
    assert_eq!((&v["fit"], &v["device"]), (&true.into(), &"soft".into()));
    assert_eq!(v["problems"], Value::Array(Vec::new()));
    let pool = &v["pool"];
    assert_eq!((&pool["arenas"], &pool["base_bytes"]), (&1.into(), &65536.into()));
    assert_eq!(pool["pinned_bytes"], 65536);
    assert!(v["memlock"]["exempt"].is_boolean() && v["memory"]["total"].is_u64());
    assert!(v["hugepages"].is_array() && v["nodes"].is_array() && v["cgroups"].is_array());
}

#[test]
fn what_is_to_be_changed_ends_in_one_and_is_listed_whole() {
    // 32 TiB of 1 GiB pages: whatever this machine is, it has fewer.
    let left = run(&["doctor", "--soft", "--json", "--capacity", "32768G", "--pages", "1G"]);
    assert_eq!(left.code, Some(1), "{}", left.stderr);
    assert!(left.stderr.contains("to change"), "{}", left.stderr);
    let v = left.object();
    assert_eq!(v["fit"], false);
    let found = kinds(&v["problems"]);
    assert!(found.contains(&"hugepages") || found.contains(&"page_size_absent"), "{found:?}");
    for p in v["problems"].as_array().expect("a list") {
        assert_eq!(keys(p), ["kind", "what", "fix"]);
        assert!(p["what"].as_str().is_some_and(|t| t.chars().any(|c| c.is_ascii_digit())), "{p}");
        assert!(p["fix"].as_str().is_some_and(|t| !t.is_empty()), "{p}");
    }
    // The same on base pages exceeds memory.
    let left = run(&["doctor", "--soft", "--capacity", "32768G", "--pages", "base"]);
    assert_eq!(left.code, Some(1));
    assert!(left.stdout.contains("To change\n  1. "), "{}", left.stdout);
    assert!(left.stdout.contains("the machine has"), "{}", left.stdout);
}

#[test]
fn without_a_device_that_is_the_thing_to_change() {
    let left = run(&[&SMALL[..], &["--json"]].concat());
    let v = left.object();
    let none = v["device"].is_null();
    assert_eq!(none, Device::first_of_any().is_none());
    assert_eq!(none, kinds(&v["problems"]).contains(&"device"), "{v}");
    assert_eq!(left.code == Some(1), v["fit"] == false, "{v}");
}

#[test]
fn a_node_can_be_asked_for() {
    let ask = |numa| run(&[&SMALL[..], &["--soft", "--json", "--numa", numa]].concat());
    for (numa, nodes) in [("0", &[0][..]), ("any", &[]), ("device", &[])] {
        let left = ask(numa);
        assert_eq!(left.code, Some(0), "{numa}: {}", left.stderr);
        assert_eq!(left.object()["pool"]["nodes"], Value::from(nodes), "{numa}");
    }
    let all = ask("interleave").object()["pool"]["nodes"].clone();
    assert!(all.as_array().is_some_and(|n| !n.is_empty()), "{all}");
    let left = ask("77");
    assert_eq!(left.code, Some(1), "{}", left.stderr);
    let v = left.object();
    assert_eq!(kinds(&v["problems"]), ["node"], "{v}");
    let what = v["problems"][0]["what"].as_str().expect("words");
    assert!(what.contains("NUMA node 77") && what.contains("nodes with memory: "), "{what}");
    // As a call.
    let device = Device::soft();
    let mut options = DoctorOptions::default();
    (options.device, options.capacity, options.pages) = (Some(&device), 4096, Pages::Base);
    options.numa = Numa::Node(77);
    let report = doctor(&options).expect("a report");
    assert!(matches!(report.problems[..], [Problem::Node { node: 77, .. }]), "{report}");
    let built = Pool::builder().device(device).capacity(4096).pages(Pages::Base);
    let error = built.numa(Numa::Node(77)).build().expect_err("no such node");
    assert_eq!(error.to_string(), report.problems[0].to_string());
}

/// Looking for a device by the library, whatever it was built with.
trait FirstOfAny {
    fn first_of_any() -> Option<Device>;
}

impl FirstOfAny for Device {
    #[cfg(any(feature = "rdma-sys", feature = "rdma-mummy-sys"))]
    fn first_of_any() -> Option<Device> {
        Device::first().ok()
    }
    #[cfg(not(any(feature = "rdma-sys", feature = "rdma-mummy-sys")))]
    fn first_of_any() -> Option<Device> {
        None
    }
}

#[test]
fn wrong_calls_end_in_two() {
    for (args, what) in [
        (&["doctor", "--soft", "--capacity", "0"][..], "capacity is 0"),
        (&["doctor", "--soft", "--capacity", "99999999999999999999G"], "address space"),
        (&["doctor", "--soft", "--capacity", "4Q"], "4Q"),
        (
            &["doctor", "--soft", "--capacity", "64G", "--arena-size", "4K", "--pages", "base"],
            "arena size 4 KiB",
        ),
        (&["doctor", "--soft", "--pages", "3M"], "3M"),
        (&["doctor", "--soft", "--numa", "here"], "write device, any, interleave"),
        (&["doctor", "--soft", "--numa", "-1"], "-1"),
        (&["doctor", "--soft", "--device", "rxe0"], "--soft"),
        (&["doctor", "--device", "no-such-device"], "no-such-device"),
        (&["doctor", "--frobnicate"], "'--frobnicate'"),
        (&["doctor", "extra"], "'extra'"),
    ] {
        run(args).refused(what);
    }
}

#[test]
fn a_low_limit_binds_whoever_is_not_exempt() {
    let script = "ulimit -l 64; exec \"$0\" doctor --soft --json --capacity 1M --pages base";
    let out = Command::new("sh").args(["-c", script, env!("CARGO_BIN_EXE_pinpool")]).output();
    let left = Left::from(out.expect("run"));
    let v = left.object();
    assert_eq!(v["memlock"]["soft"], 64 << 10);
    let exempt = v["memlock"]["exempt"] == true;
    assert_eq!(kinds(&v["problems"]), if exempt { vec![] } else { vec!["memlock"] });
    assert_eq!(left.code, Some(if exempt { 0 } else { 1 }));
}

#[test]
fn it_judges_as_building_does() {
    let device = Device::soft();
    for (capacity, arena_size, pages) in [
        (64 << 10, None, Pages::Base),
        (64 << 10, Some(3000), Pages::Base),
        (64 << 10, None, Pages::Prefer(PageSize::Huge1G)),
        (1 << 45, None, Pages::Require(PageSize::Huge1G)),
        (1 << 45, Some(1 << 40), Pages::Require(PageSize::Huge2M)),
        (1 << 45, Some(1 << 40), Pages::Base),
    ] {
        let mut options = DoctorOptions::default();
        options.device = Some(&device);
        (options.capacity, options.arena_size, options.pages) = (capacity, arena_size, pages);
        let report = doctor(&options).expect("a report");
        let mut builder = Pool::builder()
            .device(device.clone())
            .access(Access::LOCAL_WRITE)
            .capacity(capacity)
            .pages(pages);
        if let Some(bytes) = arena_size {
            builder = builder.arena_size(bytes);
        }
        match builder.build() {
            Ok(pool) => {
                assert!(report.is_fit(), "{report}");
                assert_eq!(pool.arenas().len(), report.pool.arenas);
                assert_eq!(pool.capacity(), report.pool.capacity);
                let huge = pool.arenas().into_iter().filter(|a| a.page_size > 64 << 10);
                assert_eq!(huge.map(|a| a.len as u64).sum::<u64>(), report.pool.huge_bytes);
            }
            // Their figures may differ: free memory comes and goes.
            Err(BuildError::Preflight(problems)) => {
                let kinds = |p: &[Problem]| p.iter().map(Problem::kind).collect::<Vec<_>>();
                assert_eq!(kinds(&problems), kinds(&report.problems));
            }
            Err(e) => {
                assert_eq!(report.problems.len(), 1, "{e}");
                assert_eq!(e.to_string(), BuildError::from(report.problems[0].clone()).to_string());
            }
        }
    }
}

#[test]
fn stats_tell_what_the_software_device_locks() {
    let device = Device::soft();
    let pool = Pool::builder().device(device).capacity(64 << 10).pages(Pages::Base).build();
    let stats = pool.expect("64 KiB").stats();
    assert!(stats.locked >= 64 << 10, "{stats:?}");
    assert_eq!(stats.pinned, 0, "nothing of RDMA");
    assert!(stats.memlock_limit.is_none_or(|l| stats.memlock_exempt || l >= stats.locked));
}
