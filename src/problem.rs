//! What a machine can lack for a pool: each with its numbers and the line that mends it. Words only; the
//! judging is in `preflight`.

use std::{fmt, path::PathBuf};

use crate::error::{BuildError, Bytes, Limit};

/// Something that stands, or may stand, in the way of a pool.
///
/// [`Display`](fmt::Display) gives the numbers and what to do about it in one sentence;
/// [`what`](Problem::what) and [`fix`](Problem::fix) give the two apart.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Problem {
    /// The process may not pin so much.
    Memlock {
        /// Bytes that the pool would pin.
        asked: u64,
        /// Bytes that the process has pinned or locked already.
        pinned: u64,
        /// `RLIMIT_MEMLOCK`, soft; `u64::MAX` is unlimited.
        soft: u64,
        /// ... and hard.
        hard: u64,
    },
    /// The device holds too few regions.
    TooManyArenas {
        /// The device's name.
        device: String,
        /// Arenas that the capacity comes to.
        arenas: usize,
        /// Bytes of one.
        arena_size: usize,
        /// The device's limit.
        max_mr: u64,
    },
    /// The device's regions are too small for a page.
    MrTooSmall {
        /// The device's name.
        device: String,
        /// Bytes of a page.
        page_size: usize,
        /// The device's limit.
        max_mr_size: u64,
    },
    /// The arena size is not usable.
    ArenaSize {
        /// Bytes asked.
        asked: usize,
        /// What is wrong with it, with the bound.
        problem: String,
    },
    /// The system has no pages of that size at all.
    PageSizeAbsent {
        /// Bytes of the page asked for.
        asked: usize,
        /// Bytes of those that exist.
        offered: Vec<usize>,
    },
    /// Too few hugepages are to be had.
    Hugepages {
        /// Bytes of a page.
        page_size: usize,
        /// Pages that the pool needs.
        needed: u64,
        /// Free ones.
        free: u64,
        /// Of those, promised to others already.
        reserved: u64,
        /// That the system may make beyond its pool.
        surplus: u64,
        /// That its pool holds, used ones included.
        total: u64,
        /// Free ones of each NUMA node that the pool may use, where known.
        nodes: Vec<(u32, u64)>,
        /// Free ones on nodes that this process may not use, which `free` does not count; `None` when it
        /// may use all.
        forbidden: Option<u64>,
    },
    /// A NUMA node that was asked for cannot give what the pool needs of it.
    Node {
        /// The node.
        node: u32,
        /// What is wrong.
        problem: String,
        /// What to do about it.
        fix: String,
        /// Bytes that were to come from it.
        needed: u64,
        /// Bytes of a page.
        page_size: usize,
        /// Bytes that are free there in pages of that size, where the system says.
        free: Option<u64>,
    },
    /// A cgroup allows fewer bytes of hugepages.
    HugetlbCgroup {
        /// Bytes of a page.
        page_size: usize,
        /// Bytes that the pool needs.
        asked: u64,
        /// Bytes that the cgroup uses already.
        used: u64,
        /// Its limit.
        limit: u64,
        /// The file that sets it.
        file: PathBuf,
    },
    /// A cgroup allows fewer bytes of memory.
    MemoryCgroup {
        /// Bytes on base pages that the pool needs.
        asked: u64,
        /// Bytes that the cgroup uses and cannot drop.
        used: u64,
        /// Its limit.
        limit: u64,
        /// The file that sets it.
        file: PathBuf,
    },
    /// The process may not have so many mappings.
    MapCount {
        /// Mappings that the pool needs.
        needed: u64,
        /// Mappings that the process has.
        used: u64,
        /// `vm.max_map_count`.
        limit: u64,
    },
    /// Strict overcommit leaves too little to promise.
    Overcommit {
        /// Bytes on base pages that the pool needs.
        asked: u64,
        /// `Committed_AS`.
        committed: u64,
        /// `CommitLimit`.
        limit: u64,
    },
    /// The machine has too little memory, at all or at the moment.
    Memory {
        /// Bytes on base pages that the pool needs.
        asked: u64,
        /// `MemAvailable`.
        available: u64,
        /// `MemTotal`.
        total: u64,
    },
    /// There is no RDMA device, or none that can be used.
    Device {
        /// What is wrong.
        problem: String,
        /// What to do about it.
        fix: String,
    },
    /// The device has no active port: it registers memory, but moves no bytes.
    NoActivePort {
        /// The device's name.
        device: String,
    },
    /// Pages written after a fork may part from those that the device uses.
    ForkUnsafe,
    /// Some of a thread's work takes a lock that it would not take with `membarrier(2)`.
    NoMembarrier,
}

impl Problem {
    /// A word for programs: the variant's name in lower case.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Memlock { .. } => "memlock",
            Self::TooManyArenas { .. } => "too_many_arenas",
            Self::MrTooSmall { .. } => "mr_too_small",
            Self::ArenaSize { .. } => "arena_size",
            Self::PageSizeAbsent { .. } => "page_size_absent",
            Self::Hugepages { .. } => "hugepages",
            Self::Node { .. } => "node",
            Self::HugetlbCgroup { .. } => "hugetlb_cgroup",
            Self::MemoryCgroup { .. } => "memory_cgroup",
            Self::MapCount { .. } => "map_count",
            Self::Overcommit { .. } => "overcommit",
            Self::Memory { .. } => "memory",
            Self::Device { .. } => "device",
            Self::NoActivePort { .. } => "no_active_port",
            Self::ForkUnsafe => "fork_unsafe",
            Self::NoMembarrier => "no_membarrier",
        }
    }

    /// What is wrong, with the numbers.
    pub fn what(&self) -> String {
        match self {
            Self::Memlock { asked, pinned, soft, hard } => format!(
                "pinning {} more exceeds the locked-memory limit: {} of it is in use, RLIMIT_MEMLOCK is {} soft, \
                 {} hard, and the process lacks CAP_IPC_LOCK in the initial user namespace",
                Bytes(*asked),
                Bytes(*pinned),
                Limit(*soft),
                Limit(*hard)
            ),
            Self::TooManyArenas { device, arenas, arena_size, max_mr } => format!(
                "{arenas} arenas of {} need {arenas} memory regions, {device} holds {max_mr} in all (max_mr)",
                Bytes(*arena_size as u64)
            ),
            Self::MrTooSmall { device, page_size, max_mr_size } => format!(
                "one page of {} is larger than the largest memory region of {device} (max_mr_size {})",
                Bytes(*page_size as u64),
                Bytes(*max_mr_size)
            ),
            Self::ArenaSize { asked, problem } => {
                format!("arena size {} {problem}", Bytes(*asked as u64))
            }
            Self::PageSizeAbsent { asked, offered } => {
                let all: Vec<_> = offered.iter().map(|&s| Bytes(s as u64).to_string()).collect();
                format!(
                    "this system has no pages of {}; it has {}",
                    Bytes(*asked as u64),
                    all.join(", ")
                )
            }
            Self::Hugepages {
                page_size, needed, free, reserved, surplus, nodes, forbidden, ..
            } => {
                let mut text = format!(
                    "hugepages of {}: {needed} are needed, {free} are free",
                    Bytes(*page_size as u64)
                );
                if nodes.len() > 1 || forbidden.is_some() {
                    let all: Vec<_> =
                        nodes.iter().map(|(n, free)| format!("{free} on node {n}")).collect();
                    text += &format!(" ({})", all.join(", "));
                }
                if *reserved > 0 {
                    text += &format!(", {reserved} of them reserved by others");
                }
                if *surplus > 0 {
                    text += &format!(", {surplus} more may be made");
                }
                if let Some(n) = forbidden {
                    text += &format!(", {n} more are on nodes that this process may not use");
                }
                text
            }
            Self::Node { node, problem, needed, page_size, free, .. } => {
                node_words(*node, problem, *needed, *page_size, *free)
            }
            Self::HugetlbCgroup { page_size, asked, used, limit, file } => format!(
                "{} of hugepages of {} are needed, the cgroup allows {} and uses {} ({})",
                Bytes(*asked),
                Bytes(*page_size as u64),
                Bytes(*limit),
                Bytes(*used),
                file.display()
            ),
            Self::MemoryCgroup { asked, used, limit, file } => format!(
                "{} of memory are needed, the cgroup allows {} and uses {} that it cannot drop ({})",
                Bytes(*asked),
                Bytes(*limit),
                Bytes(*used),
                file.display()
            ),
            Self::MapCount { needed, used, limit } => format!(
                "{needed} mappings more are needed, the process has {used} and may have {limit} \
                 (vm.max_map_count)"
            ),
            Self::Overcommit { asked, committed, limit } => format!(
                "{} of memory are needed, overcommit is off (vm.overcommit_memory=2) and {} of {} are \
                 committed (CommitLimit)",
                Bytes(*asked),
                Bytes(*committed),
                Bytes(*limit)
            ),
            Self::Memory { asked, available, total } => format!(
                "{} of memory are needed, the machine has {}, {} of it available now",
                Bytes(*asked),
                Bytes(*total),
                Bytes(*available)
            ),
            Self::Device { problem, .. } => problem.clone(),
            Self::NoActivePort { device } => {
                format!("{device} has no active port: it registers memory, but moves no bytes")
            }
            Self::ForkUnsafe => {
                "after a fork the device may go on with other pages than this process: the kernel is older than \
                 5.12 and libibverbs was not prepared"
                    .to_owned()
            }
            Self::NoMembarrier => "membarrier(2) is missing or barred here: each alloc and free takes its \
                                   thread's lock"
                .to_owned(),
        }
    }

    /// What to do about it: lines to run or to write.
    pub fn fix(&self) -> String {
        match self {
            Self::Memlock { .. } => "Raise it: `ulimit -l unlimited`, `LimitMEMLOCK=infinity` in a systemd \
                                     unit, or a memlock line in /etc/security/limits.conf"
                .to_owned(),
            Self::TooManyArenas { .. } => "ask for larger arenas".to_owned(),
            Self::MrTooSmall { .. } => "Ask for smaller pages (`Pages::Base`)".to_owned(),
            Self::ArenaSize { .. } => {
                "Ask for another `arena_size`, or for none: then it is chosen".to_owned()
            }
            Self::PageSizeAbsent { asked, .. } => format!(
                "Ask for a size that it has, or boot with `hugepagesz={}K hugepages=N` where the processor \
                 knows that size",
                asked >> 10
            ),
            Self::Hugepages { nodes, forbidden: Some(_), page_size, needed, free, .. }
                if nodes.len() == 1 =>
            {
                let (node, kb) = (nodes[0].0, page_size >> 10);
                format!(
                    "Reserve {} more on node {node} (in /sys/devices/system/node/node{node}/hugepages/\
                     hugepages-{kb}kB/nr_hugepages), or let this process use other nodes (`cpuset.mems` of \
                     its cgroup, `numactl --membind`)",
                    needed.saturating_sub(*free)
                )
            }
            Self::Hugepages { page_size, needed, free, reserved, surplus, total, .. } => {
                let usable = free.saturating_sub(*reserved).saturating_add(*surplus);
                let total = total.saturating_add(needed.saturating_sub(usable));
                let kb = page_size >> 10;
                format!(
                    "Reserve more: `echo {total} > /sys/kernel/mm/hugepages/hugepages-{kb}kB/nr_hugepages` \
                     (at boot: `hugepagesz={kb}K hugepages={total}`). `Pages::Prefer` does without"
                )
            }
            Self::HugetlbCgroup { asked, used, file, .. } => format!(
                "Raise it: `echo {} > {}`, or ask for less",
                used.saturating_add(*asked),
                file.display()
            ),
            Self::MemoryCgroup { asked, used, file, .. } => {
                // The rest of the process will want some, too.
                let sum = used.saturating_add(*asked);
                let limit = sum.saturating_add(sum / 16).div_ceil(1 << 20).saturating_mul(1 << 20);
                format!("Raise it: `echo {limit} > {}`, or ask for less", file.display())
            }
            Self::MapCount { needed, used, .. } => {
                format!("Raise it: `sysctl vm.max_map_count={}`", used.saturating_add(*needed) * 2)
            }
            Self::Overcommit { .. } => {
                "Permit it: `sysctl vm.overcommit_memory=0`, or raise `vm.overcommit_ratio`, or use \
                 hugepages, which do not count"
                    .to_owned()
            }
            Self::Memory { .. } => "Ask for less".to_owned(),
            Self::Device { fix, .. } | Self::Node { fix, .. } => fix.clone(),
            Self::NoActivePort { device } => {
                format!("Bring its link up; `rdma link show {device}/1` tells its state")
            }
            Self::ForkUnsafe => "Open the device before anything else registers memory, or set \
                                 `RDMAV_FORK_SAFE=1`, or do not fork"
                .to_owned(),
            Self::NoMembarrier => {
                "Use Linux 4.14 or later, and let the sandbox's filter pass membarrier(2)".to_owned()
            }
        }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let glue = if matches!(self, Self::TooManyArenas { .. }) { "; " } else { ". " };
        write!(f, "{}{glue}{}", self.what(), self.fix())
    }
}

impl std::error::Error for Problem {}

impl From<Problem> for BuildError {
    /// A problem alone keeps its own variant where it has one.
    fn from(problem: Problem) -> Self {
        match problem {
            Problem::Memlock { asked, pinned, soft, hard } => {
                Self::Memlock { asked, pinned, soft, hard, errno: None }
            }
            Problem::TooManyArenas { device, arenas, arena_size, max_mr } => {
                Self::TooManyArenas { device, arenas, arena_size, max_mr }
            }
            Problem::MrTooSmall { device, page_size, max_mr_size } => {
                Self::MrTooSmall { device, page_size, max_mr_size }
            }
            Problem::ArenaSize { asked, problem } => Self::ArenaSize { asked, problem },
            Problem::PageSizeAbsent { asked, offered } => Self::PageSizeAbsent { asked, offered },
            Problem::Node { node, problem, fix, needed, page_size, free } => {
                Self::Node { node, problem, fix, needed, page_size, free, errno: None }
            }
            other => Self::Preflight(vec![other]),
        }
    }
}

/// What is wrong with a node, in words.
pub(crate) fn node_words(
    node: u32,
    problem: &str,
    needed: u64,
    page_size: usize,
    free: Option<u64>,
) -> String {
    let free = match free {
        None => String::new(),
        Some(free) if page_size <= MOST_BASE => format!("; {} are free there", Bytes(free)),
        Some(free) => format!("; {} such pages are free there", free / page_size as u64),
    };
    format!(
        "NUMA node {node} cannot give {} in pages of {}: {problem}{free}",
        Bytes(needed),
        Bytes(page_size as u64)
    )
}

/// What to do about a node that has too few pages. `pages` are those that it has, used ones included, and
/// `lacking` those that it lacks, where they are hugepages that can be reserved.
pub(crate) fn node_fix(node: u32, page_size: usize, pages: Option<u64>, lacking: u64) -> String {
    match pages {
        Some(pages) if page_size > MOST_BASE => format!(
            "Reserve more there: `echo {} > /sys/devices/system/node/node{node}/hugepages/\
             hugepages-{}kB/nr_hugepages`, or ask for another node",
            pages.saturating_add(lacking),
            page_size >> 10
        ),
        _ => "Ask for less, for another node, or for `Numa::Any`".to_owned(),
    }
}

/// The longest base page that any system has; hugepages are longer.
const MOST_BASE: usize = 64 << 10;

/// All problems as one error; `None` of none.
pub(crate) fn all(mut problems: Vec<Problem>) -> Option<BuildError> {
    match problems.len() {
        0 => None,
        1 => problems.pop().map(BuildError::from),
        _ => Some(BuildError::Preflight(problems)),
    }
}

/// The problems as the text of one error: one in a sentence, several in a list.
pub(crate) fn list(problems: &[Problem]) -> String {
    match problems {
        [one] => one.to_string(),
        many => {
            let mut text = format!("{} things stand in the way of this pool:", many.len());
            for (i, p) in many.iter().enumerate() {
                text += &format!("\n  {}. {p}", i + 1);
            }
            text
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn memlock() -> Problem {
        Problem::Memlock { asked: 4 << 30, pinned: 0, soft: 8 << 20, hard: u64::MAX }
    }

    #[test]
    fn one_keeps_its_variant_and_several_are_listed() {
        assert!(all(Vec::new()).is_none());
        assert!(matches!(all(vec![memlock()]), Some(BuildError::Memlock { errno: None, .. })));
        let maps = Problem::MapCount { needed: 10, used: 65_525, limit: 65_530 };
        let one = all(vec![maps.clone()]).expect("one");
        assert!(matches!(&one, BuildError::Preflight(p) if p.len() == 1));
        assert!(one.to_string().contains("sysctl vm.max_map_count="), "{one}");
        let text = all(vec![memlock(), maps]).expect("two").to_string();
        for part in [
            "2 things",
            "\n  1. pinning 4 GiB",
            "unlimited hard",
            "\n  2. 10 mappings",
            "ulimit -l",
        ] {
            assert!(text.contains(part), "{part:?} in {text}");
        }
    }

    #[test]
    fn the_error_of_one_problem_says_what_the_problem_says() {
        assert_eq!(BuildError::from(memlock()).to_string(), memlock().to_string());
        let many = Problem::TooManyArenas {
            device: "d".into(),
            arenas: 10,
            arena_size: 1 << 20,
            max_mr: 3,
        };
        assert_eq!(BuildError::from(many.clone()).to_string(), many.to_string());
    }
}
