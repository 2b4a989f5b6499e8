//! What the system permits: locked memory and hugepages. Reads only.
#![allow(clippy::disallowed_methods)]

use std::fs;

/// How much memory this process may pin, and what of it is used.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Memlock {
    /// `RLIMIT_MEMLOCK`, soft; `u64::MAX` when unlimited.
    pub(crate) soft: u64,
    /// `RLIMIT_MEMLOCK`, hard.
    pub(crate) hard: u64,
    /// Pinned by RDMA already (`VmPin`).
    pub(crate) pinned: u64,
    /// Locked by `mlock` already (`VmLck`).
    pub(crate) locked: u64,
    /// Whether the limit does not bind: `CAP_IPC_LOCK`, effective, in the initial user namespace.
    pub(crate) exempt: bool,
}

/// Reads the limit and the counters. Counters that cannot be read count as zero.
pub(crate) fn memlock() -> Memlock {
    let mut r = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `r` is a valid rlimit to write to.
    let ok = unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, &mut r) } == 0;
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let kb =
        |field| field_of(&status, field).and_then(|v| v.parse::<u64>().ok()).unwrap_or(0) << 10;
    let cap =
        field_of(&status, "CapEff").and_then(|v| u64::from_str_radix(v, 16).ok()).unwrap_or(0);
    const CAP_IPC_LOCK: u32 = 14;
    let initial_namespace = fs::read_to_string("/proc/self/uid_map")
        .is_ok_and(|m| m.split_whitespace().eq(["0", "0", "4294967295"]));
    let limit = |v: libc::rlim_t| if !ok || v == libc::RLIM_INFINITY { u64::MAX } else { v };
    Memlock {
        soft: limit(r.rlim_cur),
        hard: limit(r.rlim_max),
        pinned: kb("VmPin"),
        locked: kb("VmLck"),
        exempt: cap >> CAP_IPC_LOCK & 1 == 1 && initial_namespace,
    }
}

/// The first word of a field of `/proc/<pid>/status`.
fn field_of<'a>(status: &'a str, field: &str) -> Option<&'a str> {
    status
        .lines()
        .find_map(|l| l.strip_prefix(field)?.strip_prefix(':'))
        .and_then(|v| v.split_whitespace().next())
}

/// Free hugepages of a size, over all nodes; `None` when the system has no such size.
pub(crate) fn free_hugepages(page: usize) -> Option<u64> {
    let path = format!("/sys/kernel/mm/hugepages/hugepages-{}kB/free_hugepages", page >> 10);
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

/// The page sizes that the system offers, base page first.
pub(crate) fn page_sizes() -> Vec<usize> {
    let mut sizes = vec![super::mmap::base_page()];
    let dir = fs::read_dir("/sys/kernel/mm/hugepages").into_iter().flatten().flatten();
    sizes.extend(dir.filter_map(|e| {
        let name = e.file_name();
        let kb = name.to_str()?.strip_prefix("hugepages-")?.strip_suffix("kB")?;
        Some(kb.parse::<usize>().ok()? << 10)
    }));
    sizes.sort_unstable();
    sizes
}

/// This process's id; differs in a forked child.
pub(crate) fn process_id() -> u32 {
    std::process::id()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_found_whole() {
        let s = "Name:\tx\nVmPin:\t      12 kB\nVmPinned:\t 9 kB\nCapEff:\t000001ffffffffff\n";
        assert_eq!(field_of(s, "VmPin"), Some("12"));
        assert_eq!(field_of(s, "CapEff"), Some("000001ffffffffff"));
        assert_eq!(field_of(s, "VmLck"), None);
    }

    #[test]
    fn the_base_page_is_listed_first() {
        assert_eq!(page_sizes()[0], super::super::mmap::base_page());
    }
}
