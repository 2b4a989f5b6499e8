//! What the system permits: locked memory, hugepages, cgroups, mappings. Reads only, judges nothing; what a
//! file does not say is left out.
#![allow(clippy::disallowed_methods)]

use std::{
    fs,
    path::{Component, Path, PathBuf},
};

use super::numa;

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
    let kb = |field| kib_of(&status, field).unwrap_or(0);
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

/// A field that counts KiB, in bytes.
fn kib_of(text: &str, field: &str) -> Option<u64> {
    Some(field_of(text, field)?.parse::<u64>().ok()?.saturating_mul(1 << 10))
}

fn number(path: &Path) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

/// The system's hugepages of one size.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub(crate) struct HugePool {
    pub(crate) page_size: usize,
    pub(crate) total: u64,
    pub(crate) free: u64,
    /// Of the free ones, promised to mappings that have not touched them yet.
    pub(crate) reserved: u64,
    /// That the system may make beyond its pool, if it finds the memory.
    pub(crate) surplus: u64,
    /// Each node's number, pages and free pages.
    pub(crate) nodes: Vec<(u32, u64, u64)>,
}

impl HugePool {
    /// Pages that a new mapping can count on, or try for.
    pub(crate) fn usable(&self) -> u64 {
        self.free.saturating_sub(self.reserved).saturating_add(self.surplus)
    }

    fn read(page_size: usize, nodes: &[Node]) -> Option<Self> {
        let name = format!("hugepages/hugepages-{}kB", page_size >> 10);
        let dir = Path::new("/sys/kernel/mm").join(&name);
        let get = |file: &str| number(&dir.join(file));
        let made = get("surplus_hugepages").unwrap_or(0);
        let node = |n: &Node| {
            let dir = n.dir().join(&name);
            let (total, free) =
                (number(&dir.join("nr_hugepages"))?, number(&dir.join("free_hugepages"))?);
            Some((n.number, total, free))
        };
        Some(Self {
            page_size,
            total: get("nr_hugepages")?,
            free: get("free_hugepages")?,
            reserved: get("resv_hugepages").unwrap_or(0),
            surplus: get("nr_overcommit_hugepages").unwrap_or(0).saturating_sub(made),
            nodes: nodes.iter().filter_map(node).collect(),
        })
    }
}

/// The hugepages of each size that the system offers, smallest first.
pub(crate) fn huge_pools(nodes: &[Node]) -> Vec<HugePool> {
    page_sizes().into_iter().skip(1).filter_map(|size| HugePool::read(size, nodes)).collect()
}

/// A NUMA node.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Node {
    pub(crate) number: u32,
    /// Its processors, as the kernel lists them.
    pub(crate) cpus: String,
    pub(crate) total: u64,
    pub(crate) free: u64,
    /// Free, or given up by the system when asked.
    pub(crate) available: u64,
}

impl Node {
    fn dir(&self) -> PathBuf {
        PathBuf::from(format!("/sys/devices/system/node/node{}", self.number))
    }
}

/// The NUMA nodes, lowest first; none where the kernel knows none.
pub(crate) fn nodes() -> Vec<Node> {
    let dir = fs::read_dir("/sys/devices/system/node").into_iter().flatten().flatten();
    let mut nodes: Vec<Node> = dir
        .filter_map(|e| {
            let number = e.file_name().to_str()?.strip_prefix("node")?.parse().ok()?;
            let text = |f: &str| fs::read_to_string(e.path().join(f)).unwrap_or_default();
            let memory = text("meminfo");
            // "Node 0 MemTotal:  17393440 kB"
            let field = |name: &str| {
                let mut lines =
                    memory.lines().filter_map(|l| l.split_whitespace().nth(2).zip(Some(l)));
                let (_, line) = lines.find(|(n, _)| n.strip_suffix(':') == Some(name))?;
                line.split_whitespace().nth(3)?.parse::<u64>().ok()?.checked_mul(1 << 10)
            };
            Some(Node {
                number,
                cpus: text("cpulist").trim().to_owned(),
                total: field("MemTotal").unwrap_or(0),
                free: field("MemFree").unwrap_or(0),
                available: numa::available(&memory).unwrap_or(0),
            })
        })
        .collect();
    nodes.sort_by_key(|n| n.number);
    nodes
}

/// What a cgroup counts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Counted {
    Memory,
    /// Hugepages of this many bytes.
    Hugetlb(usize),
}

/// A limit of one cgroup that this process is in.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct CgroupLimit {
    pub(crate) counted: Counted,
    /// The file that sets it.
    pub(crate) file: PathBuf,
    pub(crate) limit: u64,
    /// Bytes in use that the kernel cannot drop by itself.
    pub(crate) used: u64,
}

/// The limits of this process's cgroups, innermost first; unlimited ones are left out.
pub(crate) fn cgroup_limits() -> Vec<CgroupLimit> {
    let read = |f| fs::read_to_string(f).unwrap_or_default();
    let mut limits = Vec::new();
    for (dir, top, v2) in cgroup_dirs(&read("/proc/self/cgroup"), &read("/proc/self/mountinfo")) {
        for dir in dir.ancestors().take_while(|d| d.starts_with(&top)) {
            limits_in(dir, v2, &mut limits);
        }
    }
    limits
}

/// The folders of this process's cgroups that may limit memory: folder, mount point, whether v2.
fn cgroup_dirs(cgroup: &str, mountinfo: &str) -> Vec<(PathBuf, PathBuf, bool)> {
    let mut dirs: Vec<(PathBuf, PathBuf, bool)> = Vec::new();
    for line in mountinfo.lines() {
        // "36 35 0:32 /root /mount/point options... - type source super-options"
        let Some((left, right)) = line.split_once(" - ") else { continue };
        let mut left = left.split(' ').skip(3);
        let (Some(root), Some(point)) = (left.next(), left.next()) else { continue };
        let mut right = right.split(' ');
        let v2 = match right.next() {
            Some("cgroup2") => true,
            Some("cgroup") => false,
            _ => continue,
        };
        let options = right.nth(1).unwrap_or_default();
        let relevant = |names: &str| names.split(',').any(|n| n == "memory" || n == "hugetlb");
        if !v2 && !relevant(options) {
            continue;
        }
        let path = cgroup.lines().find_map(|l| {
            let mut parts = l.splitn(3, ':');
            let (number, names, path) = (parts.next()?, parts.next()?, parts.next()?);
            let same = if v2 {
                number == "0" && names.is_empty()
            } else {
                names.split(',').any(|n| relevant(n) && options.split(',').any(|o| o == n))
            };
            same.then_some(path)
        });
        let Some(path) = path else { continue };
        let point = PathBuf::from(unescape(point));
        // The mount may show a part of the tree only; a path outside it cannot be followed, and the mount
        // point is then the nearest that can be seen.
        let inside = Path::new(path).strip_prefix(unescape(root)).unwrap_or(Path::new(""));
        let followed = inside != Path::new("")
            && inside.components().all(|c| matches!(c, Component::Normal(_)));
        let dir = if followed { point.join(inside) } else { point.clone() };
        if !dirs.iter().any(|(d, ..)| *d == dir) {
            dirs.push((dir, point, v2));
        }
    }
    dirs
}

/// Undoes what mountinfo does to white space and backslashes.
fn unescape(text: &str) -> String {
    [("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")]
        .iter()
        .fold(text.to_owned(), |t, (from, to)| t.replace(from, to))
}

fn limits_in(dir: &Path, v2: bool, limits: &mut Vec<CgroupLimit>) {
    // v1 writes "no limit" as the largest multiple of a page.
    const UNLIMITED: u64 = 1 << 62;
    let mut add = |counted, limit: &str, used: &str, droppable: u64| {
        let file = dir.join(limit);
        // "max" is no number, and no limit.
        let Some(limit) = number(&file).filter(|&l| l < UNLIMITED) else { return };
        let used = number(&dir.join(used)).unwrap_or(0).saturating_sub(droppable);
        limits.push(CgroupLimit { counted, file, limit, used });
    };
    let stat = fs::read_to_string(dir.join("memory.stat")).unwrap_or_default();
    let cache = |prefix: &str| {
        let of = |name: &str| {
            let value = |l: &str| {
                l.strip_prefix(prefix)?.strip_prefix(name)?.strip_prefix(' ')?.parse().ok()
            };
            stat.lines().find_map(value).unwrap_or(0u64)
        };
        of("inactive_file").saturating_add(of("active_file"))
    };
    if v2 {
        add(Counted::Memory, "memory.max", "memory.current", cache(""));
    } else {
        add(Counted::Memory, "memory.limit_in_bytes", "memory.usage_in_bytes", cache("total_"));
    }
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let Some(name) = name.to_str().filter(|n| n.starts_with("hugetlb.")) else { continue };
        let (limit, used) =
            if v2 { (".max", ".current") } else { (".limit_in_bytes", ".usage_in_bytes") };
        let Some(stem) = name.strip_suffix(limit) else { continue };
        let size = stem.trim_start_matches("hugetlb.").trim_end_matches(".rsvd");
        let Some(page) = page_of(size) else { continue };
        add(Counted::Hugetlb(page), name, &format!("{stem}{used}"), 0);
    }
}

/// Bytes of a page size as cgroups write it: `64KB`, `2MB`, `1GB`.
fn page_of(text: &str) -> Option<usize> {
    let unit = text.find(|c: char| !c.is_ascii_digit())?;
    let shift = match &text[unit..] {
        "KB" => 10,
        "MB" => 20,
        "GB" => 30,
        _ => return None,
    };
    text[..unit].parse::<usize>().ok()?.checked_mul(1 << shift)
}

/// Memory as the whole system counts it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Memory {
    pub(crate) total: Option<u64>,
    pub(crate) available: Option<u64>,
    /// `vm.overcommit_memory` is 2: what is promised must be there.
    pub(crate) strict: bool,
    pub(crate) commit_limit: Option<u64>,
    pub(crate) committed: Option<u64>,
}

fn memory() -> Memory {
    let info = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    Memory {
        total: kib_of(&info, "MemTotal"),
        available: kib_of(&info, "MemAvailable"),
        strict: number(Path::new("/proc/sys/vm/overcommit_memory")) == Some(2),
        commit_limit: kib_of(&info, "CommitLimit"),
        committed: kib_of(&info, "Committed_AS"),
    }
}

/// All that a plan is judged by.
#[derive(Clone, Debug)]
pub(crate) struct Facts {
    pub(crate) memlock: Memlock,
    pub(crate) huge_pools: Vec<HugePool>,
    pub(crate) cgroups: Vec<CgroupLimit>,
    pub(crate) memory: Memory,
    /// `vm.max_map_count`.
    pub(crate) max_maps: Option<u64>,
    /// Mappings that this process has.
    pub(crate) maps: u64,
    pub(crate) nodes: Vec<Node>,
    /// Nodes that the cpuset of this process permits; `None` where the kernel does not say.
    pub(crate) cpuset: Option<Vec<u32>>,
    /// Nodes that the memory policy of this thread is bound to; `None` when it is not.
    pub(crate) bound: Option<Vec<u32>>,
}

impl Facts {
    /// Looks around.
    pub(crate) fn gather() -> Self {
        let nodes = nodes();
        let maps = fs::read("/proc/self/maps").unwrap_or_default();
        Self {
            memlock: memlock(),
            huge_pools: huge_pools(&nodes),
            cgroups: cgroup_limits(),
            memory: memory(),
            max_maps: number(Path::new("/proc/sys/vm/max_map_count")),
            maps: maps.iter().filter(|&&b| b == b'\n').count() as u64,
            nodes,
            cpuset: numa::cpuset(),
            bound: numa::bound(),
        }
    }
}

/// The kernel's release.
pub(crate) fn kernel() -> String {
    let text = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    text.trim().to_owned()
}

/// The setting of transparent hugepages, the word in brackets; `None` where the kernel has none.
pub(crate) fn thp() -> Option<String> {
    let text = fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled").ok()?;
    Some(text.split_once('[')?.1.split_once(']')?.0.to_owned())
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

/// The calling thread's number, as `ps -L` shows it.
pub(crate) fn thread_id() -> u32 {
    // SAFETY: asks for a number.
    let id = unsafe { libc::gettid() };
    id.unsigned_abs()
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
    fn odd_contents_of_files_are_no_numbers() {
        assert_eq!(kib_of("VmPin: 18446744073709551615 kB", "VmPin"), Some(u64::MAX));
        assert_eq!(kib_of("VmPin: many kB", "VmPin"), None);
        assert_eq!(kib_of("VmPin:", "VmPin"), None);
        for (text, page) in
            [("2MB", Some(2 << 20)), ("1GB", Some(1 << 30)), ("64KB", Some(64 << 10))]
        {
            assert_eq!(page_of(text), page);
        }
        for text in ["", "2", "MB", "2MB.x", "99999999999999999999GB", "17179869184GB"] {
            assert_eq!(page_of(text), None, "{text}");
        }
    }

    #[test]
    fn cgroups_are_found_in_both_versions() {
        let cgroup =
            "9:name=systemd:/s\n4:memory:/a/b\n3:cpu,hugetlb:/h\n0::/user.slice/x y\nodd\n";
        let mounts = "35 31 0:32 / /cg/memory rw - cgroup cgroup rw,memory\n\
                      36 31 0:33 /a /cg/part rw - cgroup cgroup rw,memory\n\
                      37 31 0:34 /z /cg/other rw - cgroup cgroup rw,memory\n\
                      38 31 0:35 / /cg/huge rw shared:9 - cgroup cgroup rw,cpu,hugetlb\n\
                      39 31 0:36 / /cg/freezer rw - cgroup cgroup rw,freezer\n\
                      41 31 0:38 / /cg/uni\\040fied rw - cgroup2 cgroup2 rw\n\
                      odd\n - \n1 2 3 - cgroup\n";
        let found = cgroup_dirs(cgroup, mounts);
        let short: Vec<_> =
            found.iter().map(|(d, _, v2)| (d.to_str().expect("UTF-8"), *v2)).collect();
        let expected = [
            ("/cg/memory/a/b", false),
            ("/cg/part/b", false),
            ("/cg/other", false),
            ("/cg/huge/h", false),
            ("/cg/uni fied/user.slice/x y", true),
        ];
        assert_eq!(short, expected);
        // Outside of what a namespace shows.
        let found = cgroup_dirs("0::/../x", "41 31 0:38 / /cg rw - cgroup2 cgroup2 rw");
        assert_eq!(found, [(PathBuf::from("/cg"), PathBuf::from("/cg"), true)]);
    }

    #[test]
    fn a_cgroups_limits_are_read_without_its_cache() {
        let dir = std::env::temp_dir().join(format!("pinpool-cgroup-{}", process_id()));
        fs::create_dir_all(&dir).expect("a folder");
        for (file, text) in [
            ("memory.max", "1000000\n"),
            ("memory.current", "600000\n"),
            ("memory.stat", "anon 1\ninactive_file 300000\nactive_file 100000\nactive_filex 9\n"),
            ("hugetlb.2MB.max", "4194304\n"),
            ("hugetlb.2MB.current", "2097152\n"),
            ("hugetlb.1GB.max", "max\n"),
            ("hugetlb.2MB.rsvd.max", "2097152\n"),
            ("hugetlb.odd.max", "1\n"),
            ("memory.limit_in_bytes", "9223372036854771712\n"),
            ("hugetlb.2MB.limit_in_bytes", "0\n"),
        ] {
            fs::write(dir.join(file), text).expect("written");
        }
        let read = |v2| {
            let mut found = Vec::new();
            limits_in(&dir, v2, &mut found);
            let mut short: Vec<_> =
                found.iter().map(|l| (l.limit, l.used, l.counted == Counted::Memory)).collect();
            short.sort_unstable();
            short
        };
        let (v2, v1) = (read(true), read(false));
        fs::remove_dir_all(&dir).expect("removed");
        assert_eq!(
            v2,
            [(1_000_000, 200_000, true), (2 << 20, 0, false), (4 << 20, 2 << 20, false)]
        );
        assert_eq!(v1, [(0, 0, false)]);
    }

    #[test]
    fn this_machine_can_be_looked_at() {
        let facts = Facts::gather();
        assert!(facts.maps > 0 && facts.memory.total.is_some(), "{facts:?}");
        assert!(facts.nodes.iter().all(|n| n.total > 0 || n.cpus.is_empty()), "{facts:?}");
        assert!(!kernel().is_empty());
    }

    #[test]
    fn the_base_page_is_listed_first() {
        assert_eq!(page_sizes()[0], super::super::mmap::base_page());
    }
}
