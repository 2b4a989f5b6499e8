//! The machine's hugepages of 2 MiB, and its nodes.

use std::{env, fs};

fn number(file: &str) -> u64 {
    fs::read_to_string(file).expect(file).trim().parse().expect("a number")
}

/// How many are free.
pub(crate) fn free_hugepages() -> u64 {
    number("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages")
}

/// How many are free on a node.
pub(crate) fn free_on(node: u32) -> u64 {
    let dir = format!("/sys/devices/system/node/node{node}/hugepages/hugepages-2048kB");
    number(&format!("{dir}/free_hugepages"))
}

/// Whether there are the nodes 0 and 1; the guest has them, a user's own machine may not.
pub(crate) fn two_nodes() -> bool {
    let nodes = fs::read_to_string("/sys/devices/system/node/has_memory").unwrap_or_default();
    let two = nodes.trim() == "0-1";
    assert!(
        two || env::var_os("PINPOOL_GUEST").is_none(),
        "the guest has two nodes, not {nodes:?}"
    );
    two
}
