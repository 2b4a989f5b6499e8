//! The examples run on a verbs device, each to its end, and do there what they say. They are built by
//! `cargo test` without a filter, or by `cargo build --examples`, with the same features.
#![cfg(all(feature = "full", any(feature = "rdma-sys", feature = "rdma-mummy-sys")))]

use std::{path::PathBuf, process::Command};

#[path = "common/verbs.rs"]
mod common;

fn run(name: &str) -> String {
    // Fails without a device, for the examples then would.
    let device = common::device();
    // target/PROFILE/deps/this
    let this = std::env::current_exe().expect("own path");
    let folder: PathBuf = this.ancestors().nth(2).expect("target folder").join("examples");
    let program = folder.join(name);
    assert!(
        program.exists(),
        "{} is not built: `cargo build --examples --features full`",
        program.display()
    );
    let out = Command::new(&program).output().expect("start");
    let (said, erred) =
        (String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
    assert!(out.status.success(), "{name} on {device:?}: {}\n{said}{erred}", out.status);
    said.into_owned()
}

#[test]
fn quickstart() {
    let said = run("quickstart");
    assert!(said.contains("post Sge") && said.contains("Some(RemoteBuf"), "{said}");
}

#[test]
fn kv() {
    let said = run("kv");
    assert!(
        said.contains("key 7: 9 bytes read") && said.contains("key 999: 36964 bytes"),
        "{said}"
    );
}

#[test]
fn echo() {
    let said = run("echo");
    assert!(said.contains("1000 messages there and back"), "{said}");
}

#[test]
fn global() {
    let said = run("global");
    assert!(said.contains("800000 bytes of a Vec arrived"), "{said}");
}
