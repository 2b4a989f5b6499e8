//! NUMA: which nodes there are, what is free on them, where a range shall lie and where it does. Without
//! libnuma: three system calls and sysfs. No policy lives here.
#![allow(clippy::disallowed_methods)]

use std::{fs, io, ptr, ptr::NonNull};

use super::limits;

/// Nodes that fit a mask; the kernel knows at most 1024.
const MAX_NODES: usize = 1024;
const WORD: usize = usize::BITS as usize;

/// A set of nodes, as the kernel takes it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct NodeSet([usize; MAX_NODES / WORD]);

impl NodeSet {
    pub(crate) fn of(nodes: impl IntoIterator<Item = u32>) -> Self {
        let mut set = Self([0; MAX_NODES / WORD]);
        for node in nodes {
            let node = node as usize;
            if let Some(word) = set.0.get_mut(node / WORD) {
                *word |= 1 << (node % WORD);
            }
        }
        set
    }

    fn numbers(&self) -> impl Iterator<Item = u32> + '_ {
        let has = |&n: &usize| self.0[n / WORD] >> (n % WORD) & 1 == 1;
        (0..MAX_NODES).filter(has).map(|n| n as u32)
    }
}

/// How the pages of a range are to be spread.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Mode {
    /// From these nodes, lowest distance first, and from others where they have none.
    Preferred,
    /// From these nodes or not at all.
    Bind,
    /// From these nodes in turns.
    Interleave,
}

/// Says where the pages of a range shall come from when they are faulted in.
///
/// # Safety
/// The range is mapped by the caller and its own.
pub(crate) unsafe fn bind(
    addr: NonNull<u8>,
    len: usize,
    mode: Mode,
    nodes: &NodeSet,
) -> io::Result<()> {
    let mode: libc::c_int = match mode {
        Mode::Preferred => libc::MPOL_PREFERRED,
        Mode::Bind => libc::MPOL_BIND,
        Mode::Interleave => libc::MPOL_INTERLEAVE,
    };
    // The kernel takes one bit fewer than it is told.
    let bits = MAX_NODES + 1;
    // SAFETY: the range is the caller's (contract), and a policy changes no contents; the mask has
    // MAX_NODES bits and is only read.
    let r = unsafe {
        libc::syscall(libc::SYS_mbind, addr.as_ptr(), len, mode, nodes.0.as_ptr(), bits, 0u32)
    };
    if r == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// The node on which all of a range lies, as far as a sample of its pages tells; `None` when they lie on
/// several, or the kernel does not say.
pub(crate) fn node_of(addr: NonNull<u8>, len: usize, page: usize) -> Option<u32> {
    const SAMPLES: usize = 256;
    let pages = len / page;
    let n = pages.min(SAMPLES);
    let start = addr.as_ptr() as usize;
    // The first and the last, and others evenly between.
    let at = |i: usize| start + (if n > 1 { i * (pages - 1) / (n - 1) } else { 0 }) * page;
    let addrs: Vec<usize> = (0..n).map(at).collect();
    let mut status = vec![-1i32; n];
    // SAFETY: without a list of nodes the call moves nothing. It reads `n` addresses, whatever they
    // point at, and writes `n` numbers to `status`.
    let r = unsafe {
        let nowhere = ptr::null::<libc::c_int>();
        libc::syscall(libc::SYS_move_pages, 0, n, addrs.as_ptr(), nowhere, status.as_mut_ptr(), 0)
    };
    let first = *status.first().filter(|_| r == 0)?;
    status.iter().all(|&s| s == first).then(|| u32::try_from(first).ok()).flatten()
}

/// The nodes that have memory; node 0 alone where the kernel knows no nodes.
pub(crate) fn nodes() -> Vec<u32> {
    fs::read_to_string("/sys/devices/system/node/has_memory")
        .ok()
        .and_then(|list| parse_list(&list))
        .unwrap_or_else(|| vec![0])
}

/// The nodes from which this process may have memory by its cpuset; `None` where the kernel does not say.
pub(crate) fn cpuset() -> Option<Vec<u32>> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    parse_list(status.lines().find_map(|l| l.strip_prefix("Mems_allowed_list:"))?)
}

/// The nodes that this thread's memory policy binds it to, as `numactl --membind` does; `None` when none
/// does.
pub(crate) fn bound() -> Option<Vec<u32>> {
    // Beside the mode there may be flags.
    const MODE: libc::c_int = 0xfff;
    let mut mode: libc::c_int = 0;
    let mut nodes = NodeSet::of([]);
    // SAFETY: the call writes the mode, and a mask of MAX_NODES bits (one fewer than it is told), which the
    // set has; it reads nothing of ours.
    let r = unsafe {
        let (bits, nowhere) = (MAX_NODES + 1, ptr::null::<libc::c_void>());
        libc::syscall(libc::SYS_get_mempolicy, &mut mode, nodes.0.as_mut_ptr(), bits, nowhere, 0)
    };
    (r == 0 && mode & MODE == libc::MPOL_BIND).then(|| nodes.numbers().collect())
}

/// Hugepages of a size on a node: all, and free ones. `None` where the kernel does not say.
pub(crate) fn hugepages_on(node: u32, page: usize) -> Option<(u64, u64)> {
    let dir = format!("/sys/devices/system/node/node{node}/hugepages/hugepages-{}kB", page >> 10);
    let get = |file: &str| fs::read_to_string(format!("{dir}/{file}")).ok()?.trim().parse().ok();
    Some((get("nr_hugepages")?, get("free_hugepages")?))
}

/// Bytes to be had on a node in pages of a size: free hugepages, or memory that is free or that the
/// system gives up when asked. `None` where the kernel does not say.
pub(crate) fn free_on(node: u32, page: usize) -> Option<u64> {
    if page > super::mmap::base_page() {
        return Some(hugepages_on(node, page)?.1 * page as u64);
    }
    available(&fs::read_to_string(format!("/sys/devices/system/node/node{node}/meminfo")).ok()?)
}

/// Free hugepages of a size that no mapping has been promised, over all nodes.
pub(crate) fn unpromised_hugepages(page: usize) -> Option<u64> {
    let file = format!("/sys/kernel/mm/hugepages/hugepages-{}kB/resv_hugepages", page >> 10);
    let promised = fs::read_to_string(file).ok()?.trim().parse().ok()?;
    Some(limits::free_hugepages(page)?.saturating_sub(promised))
}

/// What a node's meminfo has of memory that is free, or given up when asked, in bytes.
pub(super) fn available(meminfo: &str) -> Option<u64> {
    let kb = |field: &str| {
        let line = meminfo.lines().find_map(|l| l.split_once(field).map(|(_, rest)| rest));
        line.and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok())
    };
    let caches = ["Active(file):", "Inactive(file):", "SReclaimable:"];
    let caches: u64 = caches.iter().filter_map(|f| kb(f)).sum();
    Some((kb("MemFree:")? + caches) << 10)
}

/// Reads `0-2,5`.
fn parse_list(list: &str) -> Option<Vec<u32>> {
    let mut nodes = Vec::new();
    for part in list.trim().split(',').filter(|p| !p.is_empty()) {
        let (a, b) = part.split_once('-').unwrap_or((part, part));
        nodes.extend(a.parse::<u32>().ok()?..=b.parse().ok()?);
    }
    (!nodes.is_empty()).then_some(nodes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_nodes_are_read() {
        assert_eq!(parse_list("0\n"), Some(vec![0]));
        assert_eq!(parse_list("\t0-2,5"), Some(vec![0, 1, 2, 5]));
        assert_eq!(parse_list(""), None);
        assert_eq!(parse_list("x"), None);
    }

    #[test]
    fn sets_of_nodes_give_back_what_was_put_in() {
        let all: Vec<u32> = NodeSet::of([1023, 0, 64, 1024, 64]).numbers().collect();
        assert_eq!(all, [0, 64, 1023], "the kernel knows none above");
        // No policy, unless the caller of the tests has set one.
        assert!(bound().is_none_or(|nodes| !nodes.is_empty()));
    }

    #[test]
    fn what_a_node_can_give_is_free_memory_and_caches() {
        let info = "Node 0 MemTotal: 100 kB\nNode 0 MemFree: 10 kB\nNode 0 Active(file): 3 kB\n\
                    Node 0 Inactive(file):  4 kB\n";
        assert_eq!(available(info), Some(17 << 10));
        assert_eq!(available("nothing"), None);
    }

    #[test]
    fn the_node_of_fresh_pages_is_one_that_has_memory() {
        let page = super::super::mmap::base_page();
        let hook = super::super::mapping_faults::StepHook::default();
        let r = super::super::mmap::Reservation::new(16 * page, page, hook).expect("reserve");
        assert_eq!(node_of(r.base(), 16 * page, page), None, "nothing there yet");
        // SAFETY: the range is ours and unused.
        unsafe { r.map_pages(0, 16 * page, page) }.expect("map");
        r.fault_in(0, 16 * page, page).expect("fault in");
        // Sandboxes may bar the call; what it says must be true.
        if let Some(node) = node_of(r.base(), 16 * page, page) {
            assert!(nodes().contains(&node));
        }
    }
}
