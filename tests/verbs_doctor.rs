//! The doctor on a verbs device:
//! - the device shows with its ports;
//! - uid 0 without the right in the initial user namespace, and a user without any, are held to the limit;
//! - what a pool pins shows in its stats.
#![cfg(all(feature = "cli", any(feature = "rdma-sys", feature = "rdma-mummy-sys")))]

mod cli;

use std::{os::unix::process::CommandExt, process::Command};

use cli::{Left, run};
use pinpool::{Device, DoctorOptions, Pages, Pool, doctor};
use serde_json::Value;

fn first_device() -> Device {
    Device::first().unwrap_or_else(|e| panic!("this test needs a verbs device: {e}"))
}

fn kinds(v: &Value) -> Vec<&str> {
    let list = v["problems"].as_array().expect("a list");
    list.iter().map(|p| p["kind"].as_str().expect("a kind")).collect()
}

#[test]
fn the_device_shows_with_its_ports() {
    let info = first_device().info();
    let left = run(&["doctor", "--json", "--capacity", "1M", "--pages", "base"]);
    assert_eq!((left.code, left.stderr.as_str()), (Some(0), ""), "{}", left.stdout);
    let v = left.object();
    assert_eq!(v["device"], info.name);
    let all = v["devices"].as_array().expect("a list");
    let d = all.iter().find(|d| d["name"] == info.name).expect("listed");
    assert_eq!(
        (&d["transport"], &d["max_mr"]),
        (&info.transport.clone().into(), &info.max_mr.into())
    );
    let port = &d["ports"][0];
    assert_eq!((&port["number"], &port["active"]), (&1.into(), &true.into()), "{d}");
    assert!(port["mtu"].as_u64().is_some_and(|m| m >= 256), "{d}");
    assert!(v["fork"].is_string());
    let leases = &d["leases"];
    let held = leases["held"].as_array().expect("a list");
    assert!(leases["windows"] == true && held.contains(&"revocation".into()), "{leases}");
    assert_eq!(leases["untried"], Value::Array(Vec::new()));
    // Soft RoCE does not check a window's range.
    let lacking = leases["lacking"].as_array().expect("a list");
    assert_eq!(lacking.contains(&"range".into()), d["transport"] == "rxe", "{leases}");

    let left = run(&["doctor", "--device", &info.name, "--capacity", "1M", "--pages", "base"]);
    assert_eq!(left.code, Some(0), "{}", left.stderr);
    for part in [
        format!("{} (this pool's)", info.name),
        "port 1".into(),
        "active, ".into(),
        "leases".into(),
    ] {
        assert!(left.stdout.contains(&part), "{part:?} in {}", left.stdout);
    }
    run(&["doctor", "--device", "no-such-device"]).refused(&info.name);
}

const SCRIPT: &str = "ulimit -l 64; exec \"$0\" doctor --json \"$@\"";

#[test]
fn root_of_another_user_namespace_is_held_to_the_limit() {
    first_device();
    let program = env!("CARGO_BIN_EXE_pinpool");
    let asked = ["--capacity", "1000G", "--pages", "1G"];
    let mut command = Command::new("unshare");
    command.args(["-Ur", "sh", "-c", &format!("[ $(id -u) = 0 ] || exit 9; {SCRIPT}"), program]);
    let left = Left::from(command.args(asked).output().expect("run"));
    assert_eq!(left.code, Some(1), "{}", left.stderr);
    let v = left.object();
    assert_eq!((&v["memlock"]["exempt"], &v["memlock"]["soft"]), (&false.into(), &65536.into()));
    let found = kinds(&v);
    assert!(found.contains(&"memlock"), "{found:?}");
    assert!(found.contains(&"hugepages") || found.contains(&"page_size_absent"), "all: {found:?}");
    // What fits the limit fits.
    let mut command = Command::new("unshare");
    command.args(["-Ur", "sh", "-c", SCRIPT, program, "--capacity", "64K", "--pages", "base"]);
    let v = Left::from(command.output().expect("run")).object();
    assert!(!kinds(&v).contains(&"memlock"), "{v}");
}

#[test]
fn a_user_without_rights_is_held_to_the_limit() {
    first_device();
    let mut command = Command::new("sh");
    command.args(["-c", SCRIPT, env!("CARGO_BIN_EXE_pinpool")]);
    command.args(["--capacity", "1M", "--pages", "base"]);
    const NOBODY: u32 = 65534;
    let left = Left::from(command.uid(NOBODY).gid(NOBODY).output().expect("run"));
    assert_eq!(left.code, Some(1), "{}", left.stderr);
    let v = left.object();
    assert_eq!(v["memlock"]["exempt"], false);
    let found = kinds(&v);
    assert!(found.contains(&"memlock"), "{found:?}");
    // The device's file may be root's own; then that is listed beside the limit.
    assert_eq!(v["device"].is_null(), found.contains(&"device"), "{v}");
}

#[test]
fn stats_and_doctor_tell_what_is_pinned() {
    let device = first_device();
    let pool = Pool::builder()
        .device(device.clone())
        .capacity(1 << 20)
        .pages(Pages::Base)
        .build()
        .expect("1 MiB");
    let stats = pool.stats();
    assert_eq!((stats.pinned, stats.locked), (stats.capacity as u64, 0), "{stats:?}");
    let mut options = DoctorOptions::default();
    (options.device, options.capacity, options.pages) = (Some(&device), 4096, Pages::Base);
    assert_eq!(doctor(&options).expect("a report").memlock.pinned, 1 << 20);
    drop(pool);
    assert_eq!(doctor(&options).expect("a report").memlock.pinned, 0);
}
