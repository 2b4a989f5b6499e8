//! The command line on the software device:
//! - an unfit call is answered with one sentence on stderr and exit code 2;
//! - the registration bench prints one JSON object, or a table fit for a pipe, and nothing else;
//! - failed calls are counted and not timed, and end in exit code 1;
//! - an interrupt ends it, with a message and a report that says that it is partial;
//! - the transfer bench compares its four ways and verifies every message;
//! - plots, the HTML report, CSV and comparisons come from the same figures.
#![cfg(feature = "cli")]

mod cli;

use std::{
    env, fs, io,
    os::unix::process::CommandExt,
    path::PathBuf,
    process::{Child, Stdio},
    thread,
    time::{Duration, Instant},
};

use cli::{Left, check_registration, pinpool, run};
use serde_json::Value;

/// A registration bench on the software device, short, with more arguments.
fn soft<'a>(more: &[&'a str]) -> Vec<&'a str> {
    let short = ["bench", "registration", "--soft", "--row-seconds", "0.2"];
    [&short[..], more].concat()
}

#[test]
fn unfit_calls_are_answered_with_one_sentence() {
    for (args, what) in [
        (&["frobnicate"][..], "'frobnicate'"),
        (&["bench", "frobnicate"], "'frobnicate'"),
        (&["bench", "registration", "--frobnicate"], "'--frobnicate'"),
        (&["bench", "registration", "--soft", "extra"], "'extra'"),
        (&["bench", "registration", "--soft", "--device", "rxe0"], "--soft"),
        (&soft(&["--sizes", "2K"]), "4 KiB to 64 MiB"),
        (&soft(&["--sizes", "0"]), "4 KiB to 64 MiB"),
        (&soft(&["--sizes", "4K,65M"]), "4 KiB to 64 MiB"),
        (&soft(&["--sizes", "99999999999999999999G"]), "4 KiB to 64 MiB"),
        (&soft(&["--sizes", "5000"]), "in whole 4 KiB"),
        (&soft(&["--sizes", "64Q"]), "64Q"),
        (&soft(&["--sizes", "-4K"]), "-4"),
        (&soft(&["--sizes", ""]), "--sizes"),
        (&soft(&["--samples", "0"]), "--samples"),
        (&["bench", "registration", "--soft", "--row-seconds", "NaN"], "NaN"),
        (&soft(&["--pages", "3M"]), "3M"),
        (&["bench", "startup", "--soft", "--capacity", "0"], "multiple of 2 MiB"),
        (&["bench", "startup", "--soft", "--capacity", "3M"], "multiple of 2 MiB"),
        (&["bench", "startup", "--soft", "--reps", "0"], "--reps"),
        (&["bench", "transfer", "--soft", "--sizes", "5000"], "in whole 4 KiB"),
        (&["bench", "transfer", "--soft", "--sizes", "17M"], "4 KiB to 16 MiB"),
        (&["bench", "transfer", "--soft", "--receive", "64K"], "--receive"),
        (&["bench", "transfer", "--soft", "--cached", "1"], "--cached"),
        (&["bench", "transfer", "--soft", "--buffers", "0"], "--buffers"),
        (&["bench", "all", "--soft", "--device", "rxe0"], "--soft"),
        (&["bench", "all", "--soft", "--compare", "/no/such.json"], "/no/such.json"),
        (&["bench", "growth", "--soft", "--threads", "0"], "--threads"),
        (&["bench", "growth", "--soft", "--capacity", "5000"], "multiple of 1 MiB"),
        (&["bench", "growth", "--soft", "--max-capacity", "1M"], "could not grow"),
        (&["bench", "lease", "--soft", "--sizes", "2K"], "4 KiB to 64 MiB"),
        (&["bench", "lease", "--soft", "--samples", "0"], "--samples"),
        (&["soak", "--soft", "--seconds", "0"], "--seconds"),
        (&["soak", "--soft", "--capacity", "1M"], "16 MiB or more"),
        (&["soak", "--soft", "--threads", "0"], "--threads"),
    ] {
        run(args).refused(what);
    }
}

#[test]
fn a_device_that_is_not_there_is_never_replaced() {
    for bench in ["registration", "transfer", "startup", "growth", "lease", "all"] {
        run(&["bench", bench, "--device", "no-such-device"]).refused("no-such-device");
    }
}

#[test]
fn help_states_the_method_and_its_bias() {
    for bench in [
        "registration",
        "transfer",
        "startup",
        "growth",
        "lease",
        "alloc",
        "handoff",
        "churn",
        "threads",
    ] {
        let left = run(&["bench", bench, "--help"]);
        assert_eq!((left.code, left.stderr.as_str()), (Some(0), ""));
        for word in ["Compare", "Method:", "Bias:", "Exit code:", "--json", "--plot", "--quick"] {
            assert!(left.stdout.contains(word), "{word} in {}", left.stdout);
        }
    }
}

#[test]
fn json_is_one_object_and_all_of_stdout() {
    // Given out of order and twice.
    let left = run(&soft(&["--json", "--sizes", "1M,4K,4096,64KiB"]));
    assert_eq!((left.code, left.stderr.as_str()), (Some(0), ""));
    let v = left.object();
    check_registration(&v, &[4 << 10, 64 << 10, 1 << 20]);
    assert_eq!((v["device"].as_str(), v["transport"].as_str()), (Some("soft"), Some("soft")));
    assert_eq!(v["after"]["mrs"], 0);
    assert_eq!(v["arenas"], 1);
}

#[test]
fn the_table_is_fit_for_a_pipe() {
    let left = run(&soft(&["--sizes", "4K,64K"]));
    assert_eq!((left.code, left.stderr.as_str()), (Some(0), ""));
    assert!(!left.stdout.contains(['\x1b', '\r']), "{:?}", left.stdout);
    let row = |size: &str| left.stdout.lines().find(|l| l.trim_start().starts_with(size));
    for size in ["4 KiB", "64 KiB"] {
        assert!(row(size).is_some_and(|l| l.ends_with(" 0")), "{}", left.stdout);
    }
    for word in ["soft", "kernel", "memlock", "fork", "pages", "map", "fault in", "register"] {
        assert!(left.stdout.contains(word), "{word} in {}", left.stdout);
    }
    assert!(left.stdout.lines().skip(8).all(|l| l.chars().count() <= 100), "{}", left.stdout);
}

#[test]
fn b36_mapping_faulting_in_and_registering_are_timed_apart() {
    let v = run(&soft(&["--json", "--sizes", "4K,1M"])).object();
    for part in ["map_ns", "fault_in_ns", "register_ns"] {
        assert!(v["pool"][part].as_u64().is_some_and(|ns| ns > 0), "{part}: {}", v["pool"]);
    }
    // The other side's memory was brought up in the same way, on the same pages, before it was timed.
    assert!(v["per_call"]["fault_in_ns"].as_u64().is_some_and(|ns| ns > 0), "{}", v["per_call"]);
    assert_eq!(v["per_call"]["page_size"], v["page_size"]);
}

#[test]
fn the_growth_bench_has_a_row_for_each_number_of_threads() {
    let args = ["bench", "growth", "--soft", "--capacity", "16M", "--max-capacity", "256M"];
    let more = ["--arena", "16M", "--reps", "2", "--threads", "1,3"];
    let left = run(&[&args[..], &more, &["--json"]].concat());
    assert_eq!((left.code, left.stderr.as_str()), (Some(0), ""));
    let v = left.object();
    assert_eq!((&v["bench"], &v["device"]), (&"growth".into(), &"soft".into()));
    let rows = v["rows"].as_array().expect("rows");
    assert_eq!(rows.len(), 2);
    for (row, threads) in rows.iter().zip([1, 3]) {
        let first = ["threads", "quiet_p999_ns", "growing_p999_ns", "ratio"];
        assert_eq!(cli::keys(row)[..4], first);
        let number = |k: &str| row[k].as_f64().expect("a number");
        assert_eq!((row["threads"].as_u64(), row["growths"].as_u64()), (Some(threads), Some(30)));
        let ratio = number("growing_p999_ns") / number("quiet_p999_ns");
        assert!((number("ratio") - ratio).abs() < 0.05 * ratio + 0.01, "{row}");
    }
    let left = run(&[&args[..], &more].concat());
    assert_eq!((left.code, left.stderr.as_str()), (Some(0), ""));
    assert!(left.stdout.contains("16 MiB growing to 256 MiB by 16 MiB"), "{}", left.stdout);
}

#[test]
fn the_startup_bench_has_a_row_for_each_number_of_threads() {
    let args =
        ["bench", "startup", "--soft", "--capacity", "16M", "--pages", "base", "--reps", "2"];
    let left = run(&[&args[..], &["--json"]].concat());
    assert_eq!((left.code, left.stderr.as_str()), (Some(0), ""));
    let v = left.object();
    assert_eq!((&v["bench"], &v["device"]), (&"startup".into(), &"soft".into()));
    let rows = v["rows"].as_array().expect("rows");
    assert_eq!(rows.iter().map(|r| &r["threads"]).collect::<Vec<_>>(), [1, 2]);
    for row in rows {
        let times = ["pool_ms", "bare_ms", "register_ms", "bare_register_ms"];
        assert_eq!(cli::keys(row), [&["bytes", "page_size", "threads"], &times[..]].concat());
        assert_eq!((&row["bytes"], &row["page_size"]), (&(16 << 20).into(), &4096.into()));
        assert!(times.iter().all(|t| row[t].as_f64().is_some_and(|ms| ms > 0.0)), "{row}");
    }
    let left = run(&args);
    assert_eq!((left.code, left.stderr.as_str()), (Some(0), ""));
    for word in ["soft", "kernel", "16 MiB on pages of 4 KiB", "threads", "ratio", "medians of 2"] {
        assert!(left.stdout.contains(word), "{word} in {}", left.stdout);
    }
}

/// Has the child live with so much locked memory, whoever runs it.
fn limit_memlock(command: &mut std::process::Command, bytes: u64) {
    let limit = move || {
        let r = libc::rlimit { rlim_cur: bytes, rlim_max: bytes };
        // SAFETY: two system calls with plain arguments, allowed between fork and exec. The first takes
        // the right to exceed the limit from a root user's child; others lack it, and may not do this.
        let done = unsafe {
            libc::prctl(libc::PR_CAPBSET_DROP, 14, 0, 0, 0);
            libc::setrlimit(libc::RLIMIT_MEMLOCK, &r)
        };
        if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    };
    // SAFETY: `limit` neither allocates nor locks.
    unsafe { command.pre_exec(limit) };
}

#[test]
fn failed_calls_are_counted_and_not_timed() {
    // Enough for the pool of 2 MiB and for 4 KiB beside it, not for 1 MiB.
    let mut command = pinpool(&soft(&["--json", "--sizes", "4K,1M"]));
    limit_memlock(&mut command, (2 << 20) + (512 << 10));
    let left = Left::from(command.output().expect("run"));
    assert_eq!(left.code, Some(1), "{}", left.stderr);
    let v = left.object();
    let [good, bad] = &v["rows"].as_array().expect("rows")[..] else { panic!("{v}") };
    assert_eq!((&good["errors"], &good["verified"]), (&0.into(), &true.into()));
    assert!(good["ratio"].as_f64().is_some_and(|r| r > 0.0));
    assert!(bad["errors"].as_u64().is_some_and(|n| n > 0), "{bad}");
    assert_eq!(bad["verified"], false);
    for key in ["per_call_ns", "pool_ns", "ratio"] {
        assert_eq!(bad[key], Value::Null, "{bad}");
    }
    assert_eq!(v["before"], v["after"]);
    assert!(left.stderr.contains("1 MiB") && left.stderr.contains("mlock"), "{}", left.stderr);
}

#[test]
fn a_pool_that_cannot_be_built_is_a_failure_with_its_numbers() {
    let mut command = pinpool(&soft(&["--json", "--sizes", "4M"]));
    limit_memlock(&mut command, 1 << 20);
    let left = Left::from(command.output().expect("run"));
    assert_eq!((left.code, left.stdout.as_str()), (Some(1), ""));
    for number in ["8 MiB", "1 MiB", "RLIMIT_MEMLOCK"] {
        assert!(left.stderr.contains(number), "{number} in {}", left.stderr);
    }
}

#[test]
fn a_result_that_cannot_be_written_is_a_failure() {
    let full = fs::OpenOptions::new().write(true).open("/dev/full").expect("open");
    let mut command = pinpool(&soft(&["--json", "--sizes", "4K"]));
    let left = Left::from(command.stdout(full).output().expect("run"));
    assert_eq!(left.code, Some(1));
    assert!(left.stderr.contains("stdout"), "{}", left.stderr);
}

#[test]
fn an_interrupt_ends_it_with_a_message_and_a_partial_report() {
    for json in [true, false] {
        let long = ["bench", "registration", "--soft", "--sizes", "4K,64K"];
        let mut command =
            pinpool(&[&long[..], &["--row-seconds", "3600", "--samples", "100000"]].concat());
        if json {
            command.arg("--json");
        }
        let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("spawn");
        wait_until(|| locked(&child));
        let left = interrupt(child);
        assert_eq!(left.code, Some(130));
        assert!(left.stderr.contains("interrupted"), "{}", left.stderr);
        assert_eq!(left.stderr.lines().count(), 1, "{}", left.stderr);
        if json {
            let v = left.object();
            assert_eq!((&v["bench"], &v["partial"]), (&"registration".into(), &true.into()));
            assert_eq!(v["before"], v["after"], "all was given back");
        } else {
            assert!(left.stdout.starts_with("PARTIAL REPORT"), "{}", left.stdout);
        }
    }
}

#[test]
fn an_interrupt_of_all_leaves_what_there_is_and_names_what_there_is_not() {
    let dir = scratch("all");
    let mut command = pinpool(&["bench", "all", "--soft", "--quick", "--json", "--html"]);
    let child = command.arg(&dir).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let child = child.expect("spawn");
    // It stands there after the first bench.
    let page = dir.join("index.html");
    wait_until(|| page.exists());
    let early = fs::read_to_string(&page).expect("read");
    let left = interrupt(child);
    assert_eq!(left.code, Some(130), "{}", left.stderr);
    let v = left.object();
    assert_eq!((&v["bench"], &v["partial"]), (&"all".into(), &true.into()));
    let benches = v["benches"].as_array().expect("benches");
    assert_eq!(benches[0]["bench"], "registration");
    assert_eq!(benches[0]["partial"], Value::Null, "this one had ended");
    let missing = v["missing"].as_array().expect("missing");
    assert!(missing.contains(&"threads".into()), "{missing:?}");
    assert_eq!(benches.len() + missing.len(), 10);
    let late = fs::read_to_string(&page).expect("read");
    for page in [early, late] {
        assert!(page.contains("PARTIAL REPORT") && page.contains("not run:"), "{page}");
        assert!(page.ends_with("</html>"));
    }
    fs::remove_dir_all(&dir).expect("remove");
}

/// Has it end as Ctrl-C does.
fn interrupt(child: Child) -> Left {
    // SAFETY: signals the child just made, which has not been waited for.
    assert_eq!(unsafe { libc::kill(child.id() as i32, libc::SIGINT) }, 0);
    Left::from(child.wait_with_output().expect("wait"))
}

/// A folder of a test's own, not there yet.
fn scratch(name: &str) -> PathBuf {
    let dir = env::temp_dir().join(format!("pinpool-{name}-{}", std::process::id()));
    let _ = fs::remove_dir_all(&dir);
    dir
}

#[test]
fn the_transfer_bench_compares_four_ways_of_registering() {
    let args = ["bench", "transfer", "--soft", "--sizes", "64K,4K", "--row-seconds", "0.1"];
    let left = run(&[&args[..], &["--buffers", "8", "--cached", "8", "--json"]].concat());
    assert_eq!((left.code, left.stderr.as_str()), (Some(0), ""), "{}", left.stdout);
    cli::check_transfer(&left.object(), &[4 << 10, 64 << 10]);
    // With room for all, the cache hits always.
    let left = run(&[&args[..], &["--buffers", "8", "--cached", "16", "--json"]].concat());
    for row in left.object()["rows"].as_array().expect("rows") {
        assert_eq!(row["hits"], row["look_ups"], "{row}");
    }
    let left = run(&args);
    assert_eq!((left.code, left.stderr.as_str()), (Some(0), ""));
    for word in ["pool", "register-per-message", "registration-cache", "bounce-buffer", "p99.9"] {
        assert!(left.stdout.contains(word), "{word} in {}", left.stdout);
    }
}

#[test]
fn failed_messages_are_counted_and_not_timed() {
    // Enough for the pool and the bounce buffer, and for nothing that is registered beside them.
    let args = ["bench", "transfer", "--soft", "--json", "--sizes", "256K", "--row-seconds", "0"];
    let few = ["--receive", "256K", "--buffers", "2", "--cached", "4"];
    let mut command = pinpool(&[&args[..], &few].concat());
    limit_memlock(&mut command, (2 << 20) + (2 << 20) + (384 << 10));
    let left = Left::from(command.output().expect("run"));
    assert_eq!(left.code, Some(1), "{}", left.stderr);
    let v = left.object();
    for row in v["rows"].as_array().expect("rows") {
        let registers = row["contender"].as_str().is_some_and(|c| c.starts_with("regist"));
        assert_eq!(row["errors"] != 0, registers, "{row}");
        assert_eq!(row["ns"] == Value::Null, registers, "{row}");
    }
    assert!(left.stderr.contains("mlock"), "{}", left.stderr);
}

#[test]
fn plots_and_the_report_are_drawn_from_the_figures() {
    let dir = scratch("plots");
    let mut command = pinpool(&soft(&["--sizes", "4K,64K", "--plot"]));
    let left = Left::from(command.arg(&dir).arg("--html").arg(&dir).output().expect("run"));
    assert_eq!((left.code, left.stderr.as_str()), (Some(0), ""));
    let svg = fs::read_to_string(dir.join("registration-time.svg")).expect("a plot");
    assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"));
    let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").expect("kernel");
    for word in [
        "pool: alloc + free",
        "register + deregister",
        "4 KiB",
        "64 KiB",
        " ns",
        "logarithmic",
        "software device",
        kernel.trim(),
    ] {
        assert!(svg.contains(word), "{word} in {svg}");
    }
    let page = fs::read_to_string(dir.join("index.html")).expect("a report");
    for word in ["<svg", "<table", "Method and bias", "register + deregister", kernel.trim()] {
        assert!(page.contains(word), "{word} in {page}");
    }
    assert!(!page.contains("PARTIAL") && !page.contains("http-equiv"), "{page}");
    assert_eq!(fs::read_dir(&dir).expect("list").count(), 2);
    fs::remove_dir_all(&dir).expect("remove");
    // What cannot be made is said before anything is measured.
    run(&soft(&["--plot", "/proc/none"])).refused("/proc/none");
}

#[test]
fn csv_has_a_line_for_each_contender_and_size() {
    let left = run(&soft(&["--sizes", "4K,64K", "--csv"]));
    assert_eq!((left.code, left.stderr.as_str()), (Some(0), ""));
    let lines: Vec<&str> = left.stdout.lines().collect();
    assert_eq!(lines[0], "bench,figure,unit,contender,axis,x,min,median,p99,p999,max");
    assert_eq!(lines.len(), 1 + 2 * 2, "{}", left.stdout);
    assert!(lines[1].starts_with("registration,time,ns,register + deregister,bytes,4096,"));
    run(&soft(&["--csv", "--json"])).refused("--json");
}

#[test]
fn a_comparison_names_what_got_slower() {
    let dir = scratch("compare");
    fs::create_dir_all(&dir).expect("folder");
    let file = dir.join("old.json");
    let path = file.to_str().expect("UTF-8");
    let args = soft(&["--sizes", "4K,64K", "--compare", path]);
    run(&args).refused("old.json");
    for (text, what) in [("{", "no JSON"), ("{\"bench\":\"other\"}", "no bench's output")] {
        fs::write(&file, text).expect("write");
        run(&args).refused(what);
    }
    // As if it had been that much faster, or slower, than it can be.
    let now = run(&soft(&["--sizes", "4K,64K", "--json"])).object();
    for (factor, slower) in [(1e-3, 4), (1e3, 0)] {
        let mut old = now.clone();
        for row in old["rows"].as_array_mut().expect("rows") {
            for side in ["per_call_ns", "pool_ns"] {
                for part in ["min", "median"] {
                    row[side][part] = (row[side][part].as_f64().expect("ns") * factor).into();
                }
            }
        }
        // One bench's output, and the same among those of all.
        for old in [old.clone(), serde_json::json!({ "bench": "all", "benches": [old] })] {
            fs::write(&file, old.to_string()).expect("write");
            let left = run(&[&args[..], &["--json"]].concat());
            assert_eq!((left.code, left.stderr.as_str()), (Some(0), ""));
            let found = &left.object()["comparison"];
            assert_eq!((&found["compared"], &found["elsewhere"]), (&4.into(), &Value::Null));
            assert_eq!(found["slower"].as_array().map(Vec::len), Some(slower), "{found}");
            assert_eq!(found["faster"], 4 - slower, "{found}");
        }
        let left = run(&args);
        let said = format!("of 4 figures {slower} got slower");
        assert!(left.stdout.contains(&said), "{}", left.stdout);
    }
    fs::remove_dir_all(&dir).expect("remove");
}

/// Whether it has locked memory: by then it has its handler and is not far from the first sample.
fn locked(child: &Child) -> bool {
    let locked = |s: &str| s.lines().any(|l| l.starts_with("VmLck:") && !l.ends_with(" 0 kB"));
    let status = format!("/proc/{}/status", child.id());
    fs::read_to_string(&status).is_ok_and(|s| locked(&s))
}

fn wait_until(mut there: impl FnMut() -> bool) {
    let start = Instant::now();
    while !there() {
        assert!(start.elapsed() < Duration::from_secs(120), "it does not come up");
        thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn a_soak_accounts_for_all_of_it() {
    let left = run(&["soak", "--soft", "--seconds", "5", "--threads", "4", "--json"]);
    assert_eq!((left.code, left.stderr.as_str()), (Some(0), ""));
    let v = left.object();
    assert_eq!(v["wrong"], serde_json::json!([]));
    let n = |name: &str| v[name].as_u64().unwrap_or_else(|| panic!("{name} in {v:#}"));
    assert!(n("pools") >= 1 && n("allocs") > 1000 && n("growths") > 0, "{v:#}");
    let faults = v["faults"].as_object().expect("by kind");
    assert!(faults.values().filter_map(|f| f.as_u64()).sum::<u64>() >= 4, "one a second: {v:#}");
    let kept = v["events"]["deregister_failed"].as_u64().expect("a count");
    assert_eq!(n("leaked_bytes"), kept << 20, "what a device kept, and nothing else");
}
