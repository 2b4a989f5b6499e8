//! Looks a machine over for a pool: the preflight without building, and the facts that explain it.
//! Gathers and words; the judging is in `preflight`.

mod text;

use std::path::PathBuf;

use crate::{
    access::Access,
    config::{Asked, Layout, Numa, Pages, Placement},
    device::{self, Device, DeviceInfo, LeaseSupport, Pinning, PortInfo},
    error::{BuildError, Bytes},
    problem::Problem,
    sys::{
        limits::{self, Counted, Facts},
        membarrier,
    },
};

/// The pool to look the machine over for. Change what differs from the default.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct DoctorOptions<'a> {
    /// The device; without one, a verbs device without limits is assumed.
    pub device: Option<&'a Device>,
    /// Bytes of the pool; 1 GiB unless set.
    pub capacity: usize,
    /// Bytes that it may grow to, as [`Builder::max_capacity`](crate::Builder::max_capacity); what the machine
    /// lacks for them is a note.
    pub max_capacity: Option<usize>,
    /// Bytes of one arena, as [`Builder::arena_size`](crate::Builder::arena_size).
    pub arena_size: Option<usize>,
    /// The pages; [`Pages::Prefer`] of 2 MiB unless set.
    pub pages: Pages,
    /// The rights; [`Access::LOCAL_WRITE`] unless set.
    pub access: Access,
    /// The NUMA node; [`Numa::OfDevice`] unless set.
    pub numa: Numa,
}

impl Default for DoctorOptions<'_> {
    fn default() -> Self {
        Self {
            device: None,
            capacity: 1 << 30,
            max_capacity: None,
            arena_size: None,
            pages: Pages::Prefer(crate::config::PageSize::Huge2M),
            access: Access::LOCAL_WRITE,
            numa: Numa::OfDevice,
        }
    }
}

/// What [`doctor`] found. Its [`Display`](std::fmt::Display) is what `pinpool doctor` prints.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Report {
    /// The kernel's release.
    pub kernel: String,
    /// Whether `membarrier(2)` works: without it each alloc and free takes a lock.
    pub membarrier: bool,
    /// The setting of transparent hugepages; `None` where the kernel has none.
    pub thp: Option<String>,
    /// How registered memory fares at a fork; `None` without a verbs device.
    pub fork: Option<&'static str>,
    /// The verbs devices of this machine, and the software device if that was asked about.
    pub devices: Vec<DeviceReport>,
    /// The name of the device that the pool was judged for.
    pub device: Option<String>,
    /// Locked memory.
    pub memlock: MemlockReport,
    /// Limits of this process's cgroups on memory and hugepages, innermost first.
    pub cgroups: Vec<CgroupReport>,
    /// Hugepages by size.
    pub hugepages: Vec<HugepageReport>,
    /// NUMA nodes.
    pub nodes: Vec<NodeReport>,
    /// `MemTotal`.
    pub memory_total: Option<u64>,
    /// `MemAvailable`.
    pub memory_available: Option<u64>,
    /// Whether `vm.overcommit_memory` is 2.
    pub strict_overcommit: bool,
    /// `vm.max_map_count`.
    pub max_map_count: Option<u64>,
    /// Mappings that this process has.
    pub map_count: u64,
    /// What the pool would use.
    pub pool: PoolReport,
    /// What stands in its way.
    pub problems: Vec<Problem>,
    /// What does not, and is worth knowing.
    pub notes: Vec<Problem>,
}

/// A device.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct DeviceReport {
    /// Its name.
    pub name: String,
    /// What is known of it, or why nothing is.
    pub state: Result<(DeviceInfo, Vec<PortInfo>), String>,
    /// What leases on it can be relied on for; of the device that the pool was judged for alone.
    pub leases: Option<LeaseSupport>,
}

/// How much this process may pin.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct MemlockReport {
    /// `RLIMIT_MEMLOCK`, soft; `None` is unlimited.
    pub soft: Option<u64>,
    /// ... and hard.
    pub hard: Option<u64>,
    /// Pinned by RDMA (`VmPin`).
    pub pinned: u64,
    /// Locked by `mlock` (`VmLck`).
    pub locked: u64,
    /// Whether the limit does not bind: `CAP_IPC_LOCK`, effective, in the initial user namespace.
    pub exempt: bool,
}

/// A cgroup's limit.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct CgroupReport {
    /// Bytes of the hugepages that it counts; `None`: memory.
    pub page_size: Option<usize>,
    /// The file that sets it.
    pub file: PathBuf,
    /// Bytes.
    pub limit: u64,
    /// Bytes in use, without page cache.
    pub used: u64,
}

/// Hugepages of one size, counted in pages.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct HugepageReport {
    /// Bytes of a page.
    pub page_size: usize,
    /// All.
    pub total: u64,
    /// Free ones.
    pub free: u64,
    /// Of those, reserved by others.
    pub reserved: u64,
    /// That the system may make beyond `total`.
    pub surplus: u64,
    /// Each node's number, pages and free pages.
    pub nodes: Vec<(u32, u64, u64)>,
}

/// A NUMA node.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct NodeReport {
    /// Its number.
    pub node: u32,
    /// Its processors, as the kernel lists them.
    pub cpus: String,
    /// Bytes of memory.
    pub total: u64,
    /// Bytes of free memory.
    pub free: u64,
}

/// What a pool would use.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct PoolReport {
    /// Bytes, rounded up to whole pages.
    pub capacity: usize,
    /// Arenas, and so memory regions.
    pub arenas: usize,
    /// Bytes of one; the last may be shorter.
    pub arena_size: usize,
    /// Bytes of the page that was asked for.
    pub page_size: usize,
    /// Bytes that would be on such pages if they are hugepages.
    pub huge_bytes: u64,
    /// Bytes that would be on base pages.
    pub base_bytes: u64,
    /// Bytes charged to `RLIMIT_MEMLOCK`.
    pub pinned_bytes: u64,
    /// The NUMA nodes that its pages would come from, in turns if several; empty: any.
    pub nodes: Vec<u32>,
}

impl Report {
    /// Whether nothing stands in the pool's way.
    pub fn is_fit(&self) -> bool {
        self.problems.is_empty()
    }
}

/// Looks this machine over for a pool, without building it. What leases on the device can be relied on for is
/// found by trying, for which three pages are registered for a moment ([`Device::lease_support`]).
///
/// ```
/// use pinpool::{Device, DoctorOptions, doctor};
///
/// let device = Device::soft();
/// let mut options = DoctorOptions::default();
/// options.device = Some(&device);
/// options.capacity = 64 << 10;
/// let report = doctor(&options)?;
/// println!("{report}");
/// for problem in &report.problems {
///     eprintln!("{}: {}", problem.what(), problem.fix());
/// }
/// # Ok::<(), pinpool::BuildError>(())
/// ```
///
/// # Errors
/// [`BuildError`] when what is asked for makes no sense on any machine: capacity 0, rights in conflict.
pub fn doctor(options: &DoctorOptions<'_>) -> Result<Report, BuildError> {
    let facts = Facts::gather();
    let info = options.device.map_or_else(any_device, Device::info);
    let asked = Asked {
        access: options.access,
        capacity: options.capacity,
        max_capacity: options.max_capacity,
        arena_size: options.arena_size,
        pages: options.pages,
        numa: options.numa,
    };
    let (layout, found) = asked.examine(std::slice::from_ref(&info), &facts)?;
    let mut notes = found.notes;
    let mut problems = found.problems;

    let (mut devices, unlisted) = match device::survey() {
        Ok(devices) => (devices, None),
        Err(e) => (Vec::new(), Some(e.to_string())),
    };
    let mut devices: Vec<DeviceReport> =
        devices.drain(..).map(|(name, state)| DeviceReport { name, state, leases: None }).collect();
    match options.device {
        None => problems.splice(0..0, no_device(&devices, unlisted)).for_each(drop),
        Some(device) if !devices.iter().any(|d| d.name == info.name) => {
            let own = (device.info(), Vec::new());
            let name = info.name.clone();
            devices.insert(0, DeviceReport { name, state: Ok(own), leases: None });
        }
        Some(_) => {
            let ports = devices.iter().find(|d| d.name == info.name).map(|d| &d.state);
            if let Some(Ok((_, ports))) = ports
                && !ports.iter().any(|p| p.active)
            {
                notes.push(Problem::NoActivePort { device: info.name.clone() });
            }
        }
    }
    if let Some(device) = options.device
        && let Some(report) = devices.iter_mut().find(|d| d.name == info.name)
    {
        report.leases = Some(device.lease_support());
    }
    let (fork, unsafe_fork) = fork_support(options.device);
    if unsafe_fork {
        notes.push(Problem::ForkUnsafe);
    }
    let membarrier = membarrier::available();
    if !membarrier {
        notes.push(Problem::NoMembarrier);
    }
    Ok(Report {
        kernel: limits::kernel(),
        membarrier,
        thp: limits::thp(),
        fork,
        devices,
        device: options.device.map(|_| info.name.clone()),
        pool: PoolReport {
            nodes: nodes_of(&found.placement),
            ..pool_report(&layout, &info, found.huge, found.base)
        },
        problems,
        notes,
        ..facts_report(facts)
    })
}

/// What stands for a verbs device when none is given.
fn any_device() -> DeviceInfo {
    let mut info = DeviceInfo::new("the device", "verbs");
    info.pinning = Pinning::Pinned;
    info
}

/// Why no device could be given, if that is so.
fn no_device(devices: &[DeviceReport], unlisted: Option<String>) -> Option<Problem> {
    if let Some(e) = unlisted {
        return Some(Problem::Device {
            problem: format!("RDMA devices cannot be listed: {e}"),
            fix: "Install rdma-core (libibverbs), and load `ib_uverbs`".to_owned(),
        });
    }
    if devices.is_empty() {
        return Some(Problem::Device {
            problem: "this machine has no RDMA device that this program can see".to_owned(),
            fix: if device::HAS_VERBS {
                "Load the NIC's driver (`modprobe mlx5_ib`), or add a soft one (`modprobe rdma_rxe; \
                 rdma link add rxe0 type rxe netdev <netdev>`)"
            } else {
                "Build with the feature `rdma-sys` or `rdma-mummy-sys`: this program knows the software \
                 device only"
            }
            .to_owned(),
        });
    }
    let refused: Vec<_> = devices.iter().map_while(|d| d.state.as_ref().err()).collect();
    (refused.len() == devices.len()).then(|| Problem::Device {
        problem: format!("none of the RDMA devices opens: {}", refused[0]),
        fix: "Give this user the right to `/dev/infiniband/uverbs*` and `/dev/infiniband/rdma_cm`, or see \
              `dmesg`"
            .to_owned(),
    })
}

#[cfg(any(feature = "rdma-sys", feature = "rdma-mummy-sys"))]
fn fork_support(device: Option<&Device>) -> (Option<&'static str>, bool) {
    use crate::device::ForkSupport;
    match device.and_then(Device::as_verbs).map(device::VerbsDevice::fork_support) {
        None => (None, false),
        Some(ForkSupport::CopyOnFork) => (Some("the kernel copies pinned pages"), false),
        Some(ForkSupport::HiddenFromChildren) => (Some("hidden from children"), false),
        Some(ForkSupport::Unsafe) => (Some("unsafe"), true),
    }
}

#[cfg(not(any(feature = "rdma-sys", feature = "rdma-mummy-sys")))]
fn fork_support(_: Option<&Device>) -> (Option<&'static str>, bool) {
    (None, false)
}

fn pool_report(layout: &Layout, info: &DeviceInfo, huge: u64, base: u64) -> PoolReport {
    let capacity = layout.capacity;
    PoolReport {
        capacity,
        arenas: layout.arenas.len(),
        arena_size: layout.stride.min(capacity),
        page_size: layout.page_sizes.first().copied().unwrap_or_default(),
        huge_bytes: huge,
        base_bytes: base,
        pinned_bytes: if info.pinning == Pinning::Free { 0 } else { capacity as u64 },
        nodes: Vec::new(),
    }
}

fn nodes_of(placement: &Placement) -> Vec<u32> {
    match placement {
        Placement::Anywhere => Vec::new(),
        Placement::Near(node) | Placement::On(node) => vec![*node],
        Placement::Interleave(nodes) => nodes.clone(),
    }
}

/// The facts, in a report that is empty otherwise.
fn facts_report(facts: Facts) -> Report {
    let limited = |v: u64| (v != u64::MAX).then_some(v);
    let m = facts.memlock;
    Report {
        kernel: String::new(),
        membarrier: false,
        thp: None,
        fork: None,
        devices: Vec::new(),
        device: None,
        memlock: MemlockReport {
            soft: limited(m.soft),
            hard: limited(m.hard),
            pinned: m.pinned,
            locked: m.locked,
            exempt: m.exempt,
        },
        cgroups: facts
            .cgroups
            .into_iter()
            .map(|c| CgroupReport {
                page_size: match c.counted {
                    Counted::Memory => None,
                    Counted::Hugetlb(page) => Some(page),
                },
                file: c.file,
                limit: c.limit,
                used: c.used,
            })
            .collect(),
        hugepages: facts
            .huge_pools
            .into_iter()
            .map(|p| HugepageReport {
                page_size: p.page_size,
                total: p.total,
                free: p.free,
                reserved: p.reserved,
                surplus: p.surplus,
                nodes: p.nodes,
            })
            .collect(),
        nodes: facts
            .nodes
            .into_iter()
            .map(|n| NodeReport { node: n.number, cpus: n.cpus, total: n.total, free: n.free })
            .collect(),
        memory_total: facts.memory.total,
        memory_available: facts.memory.available,
        strict_overcommit: facts.memory.strict,
        max_map_count: facts.max_maps,
        map_count: facts.maps,
        pool: PoolReport {
            capacity: 0,
            arenas: 0,
            arena_size: 0,
            page_size: 0,
            huge_bytes: 0,
            base_bytes: 0,
            pinned_bytes: 0,
            nodes: Vec::new(),
        },
        problems: Vec::new(),
        notes: Vec::new(),
    }
}

// --- in words -----------------------------------------------------------------------------------

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_is_aligned_and_ends_in_what_to_change() {
        let device = Device::soft();
        let options = DoctorOptions {
            device: Some(&device),
            capacity: 4096,
            pages: Pages::Base,
            ..DoctorOptions::default()
        };
        let mut report = doctor(&options).expect("a report");
        assert!(report.is_fit(), "{report}");
        let text = report.to_string();
        assert!(text.ends_with("Nothing to change."), "{text}");
        for part in [
            "  leases",
            "held: revocation, range",
            "soft (this pool's)",
            "1 of 4 KiB: 1 memory region\n",
            "4 KiB on base pages",
        ] {
            assert!(text.contains(part), "{part:?} in {text}");
        }
        assert!(!text.lines().any(|l| l.ends_with(' ')), "{text}");
        report.problems.push(Problem::NoActivePort { device: "d".into() });
        report.problems.push(Problem::ForkUnsafe);
        let text = report.to_string();
        assert!(text.contains("To change\n  1. d has no active port") && text.contains("\n  2. "));
    }

    #[test]
    fn without_a_device_it_says_so_or_judges_for_any() {
        let options = DoctorOptions { capacity: 4096, pages: Pages::Base, ..Default::default() };
        let report = doctor(&options).expect("a report");
        let missing = report.problems.iter().any(|p| p.kind() == "device");
        assert_eq!(missing, !report.devices.iter().any(|d| d.state.is_ok()), "{report}");
        assert_eq!(report.pool.pinned_bytes, 4096);
    }

    #[test]
    fn devices_that_do_not_open_are_one_problem() {
        let report = |name: &str, state| DeviceReport { name: name.into(), state, leases: None };
        let closed = |name: &str| report(name, Err("EACCES".into()));
        let open = report("c", Ok((any_device(), Vec::new())));
        let all = no_device(&[closed("a"), closed("b")], None).expect("a problem");
        assert!(all.to_string().contains("EACCES. Give this user"), "{all}");
        assert_eq!(no_device(&[closed("a"), open], None), None);
        assert!(no_device(&[], Some("EIO".into())).is_some_and(|p| p.what().contains("EIO")));
    }

    #[test]
    fn nonsense_is_an_error() {
        let options = DoctorOptions { capacity: 0, ..Default::default() };
        assert!(matches!(doctor(&options), Err(BuildError::ZeroCapacity)));
        let options = DoctorOptions { access: Access::REMOTE_WRITE, ..Default::default() };
        assert!(matches!(doctor(&options), Err(BuildError::Access { .. })));
    }
}
