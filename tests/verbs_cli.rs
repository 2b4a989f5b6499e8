//! The command line on a verbs device: the benches that need one end to end, small.
#![cfg(all(feature = "cli", any(feature = "rdma-sys", feature = "rdma-mummy-sys")))]

mod cli;

use cli::{Left, check_registration, check_transfer, pinpool, run};
use pinpool::Device;

fn first_device() -> String {
    let device = Device::first();
    device.unwrap_or_else(|e| panic!("this test needs a verbs device: {e}")).info().name
}

const BENCH: [&str; 7] =
    ["bench", "registration", "--json", "--sizes", "4K,2M", "--row-seconds", "0.3"];
const SIZES: [u64; 2] = [4 << 10, 2 << 20];

#[test]
fn the_bench_runs_on_the_first_device_and_gives_everything_back() {
    let left = run(&BENCH);
    assert_eq!((left.code, left.stderr.as_str()), (Some(0), ""), "{}", left.stdout);
    let v = left.object();
    check_registration(&v, &SIZES);
    assert_eq!(v["device"], first_device());
    assert_ne!(v["transport"], "soft");
    assert_eq!(v["after"]["pinned"], 0);
    assert!(v["fork"]["support"].is_string());
}

#[test]
fn the_bench_runs_on_each_kind_of_page_and_says_which() {
    for (pages, size) in [("base", 4096), ("2M", 2 << 20)] {
        let left = run(&[&BENCH[..], &["--pages", pages, "--device", &first_device()]].concat());
        assert_eq!((left.code, left.stderr.as_str()), (Some(0), ""), "{}", left.stdout);
        let v = left.object();
        check_registration(&v, &SIZES);
        assert_eq!((&v["page_size"], &v["per_call"]["page_size"]), (&size.into(), &size.into()));
    }
}

#[test]
fn messages_pass_and_are_verified_whoever_registers() {
    let args = ["bench", "transfer", "--json", "--sizes", "4K,1M", "--row-seconds", "0", "--quick"];
    for pages in ["base", "2M"] {
        let left =
            run(&[&args[..], &["--pages", pages, "--buffers", "4", "--cached", "4"]].concat());
        assert_eq!((left.code, left.stderr.as_str()), (Some(0), ""), "{}", left.stdout);
        let v = left.object();
        check_transfer(&v, &[4 << 10, 1 << 20]);
        assert_eq!(v["device"], first_device());
        assert_ne!(v["transport"], "soft");
    }
}

#[test]
fn b05_fork_support_without_its_hugepage_setting_is_met_with_base_pages_and_said() {
    let mut command = pinpool(&BENCH);
    command.env("RDMAV_FORK_SAFE", "1").env_remove("RDMAV_HUGEPAGES_SAFE");
    let left = Left::from(command.output().expect("run"));
    assert_eq!((left.code, left.stderr.as_str()), (Some(0), ""), "{}", left.stdout);
    let v = left.object();
    check_registration(&v, &SIZES);
    assert_eq!((&v["page_size"], &v["fork"]["RDMAV_FORK_SAFE"]), (&4096.into(), &"1".into()));
    assert!(v["note"].as_str().is_some_and(|n| n.contains("RDMAV_HUGEPAGES_SAFE")), "{v}");
}

#[test]
fn a_device_that_is_not_there_is_refused_with_those_that_are() {
    let left = run(&["bench", "registration", "--device", "no-such-device"]);
    left.refused("no-such-device");
    assert!(left.stderr.contains(&first_device()), "{}", left.stderr);
}

#[test]
fn the_lease_bench_tells_what_the_windows_hold_and_both_costs() {
    let left = run(&["bench", "lease", "--json", "--sizes", "64K,4K", "--samples", "20"]);
    assert_eq!((left.code, left.stderr.as_str()), (Some(0), ""), "{}", left.stdout);
    let v = left.object();
    assert_eq!((&v["bench"], &v["device"]), (&"lease".into(), &first_device().into()));
    assert!(v["support"].as_str().is_some_and(|s| s.starts_with("held: revocation")), "{v}");
    let rows = v["rows"].as_array().expect("rows");
    assert_eq!(
        rows.iter().map(|r| r["bytes"].as_u64()).collect::<Vec<_>>(),
        [Some(4096), Some(65536)]
    );
    for row in rows {
        assert_eq!(cli::keys(row)[..3], ["bytes", "lease_ns", "register_ns"]);
        for side in ["lease_ns", "register_ns", "apart_ns"] {
            assert!(row[side].as_f64().is_some_and(|ns| ns > 0.0), "{row}");
        }
        assert_eq!(row["samples"], 20);
    }
    // Two windows: one leased, one that the first lease of each size takes its turn with.
    assert!(v["windows"].as_u64().is_some_and(|n| n <= 2), "{v}");
}
