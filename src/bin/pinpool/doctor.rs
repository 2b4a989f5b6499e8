//! `pinpool doctor`: is this machine set up for a pool, and what to change if not. The looking and judging
//! is the library's; this reads the flags and prints.

use clap::ValueEnum;
use pinpool::{
    Device, DoctorOptions, Guarantees, LeaseSupport, Numa, PageSize, Pages, Problem, Report, doctor,
};
use serde_json::{Value, json};

use crate::cli::{DeviceArgs, Failure, emit, parse_bytes};

/// Look this machine over for a pool: what it would use, and what to change
///
/// Builds no pool, and registers nothing but three pages, for a moment, to see what the device's memory
/// windows hold. Limits are those of the process that runs this: run it as the user, and under
/// the unit or container, that will hold the pool.
#[derive(clap::Args)]
#[command(after_long_help = "\
Exit code: 0 nothing to change; 1 something to change; 2 wrong call or no such device.")]
pub(crate) struct Args {
    #[command(flatten)]
    device: DeviceArgs,
    /// Bytes of the pool
    #[arg(long, value_name = "BYTES", default_value = "1G", value_parser = parse_bytes)]
    capacity: usize,
    /// Bytes of one arena, a power of two [default: chosen]
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes)]
    arena_size: Option<usize>,
    /// Its pages
    #[arg(long, value_enum, default_value_t = PageChoice::Prefer)]
    pages: PageChoice,
    /// The NUMA node of its pages: `device` for that of the device, `any`, `interleave`, or a number
    #[arg(long, value_name = "NODE", default_value = "device", value_parser = parse_numa)]
    numa: Numa,
    /// Print one JSON object instead of text
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
enum PageChoice {
    /// 2 MiB hugepages if enough are free, else base pages
    Prefer,
    /// 2 MiB hugepages
    #[value(name = "2M")]
    Huge2M,
    /// 1 GiB hugepages
    #[value(name = "1G")]
    Huge1G,
    /// The system's base pages
    Base,
}

fn parse_numa(text: &str) -> Result<Numa, String> {
    match text {
        "device" => Ok(Numa::OfDevice),
        "any" => Ok(Numa::Any),
        "interleave" => Ok(Numa::Interleave),
        number => number
            .parse()
            .map(Numa::Node)
            .map_err(|_| "write device, any, interleave, or the number of a node".to_owned()),
    }
}

/// Looks, prints, and says whether anything is to be changed.
pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let device = args.device.open_if_any()?;
    let mut options = DoctorOptions::default();
    options.device = device.as_ref();
    options.capacity = args.capacity;
    options.arena_size = args.arena_size;
    options.numa = args.numa;
    options.pages = match args.pages {
        PageChoice::Prefer => Pages::Prefer(PageSize::Huge2M),
        PageChoice::Huge2M => Pages::Require(PageSize::Huge2M),
        PageChoice::Huge1G => Pages::Require(PageSize::Huge1G),
        PageChoice::Base => Pages::Base,
    };
    let found = doctor(&options).map_err(|e| Failure::Usage(e.to_string()))?;
    emit(&if args.json { object(&found, device.as_ref()).to_string() } else { found.to_string() })?;
    match found.problems.len() {
        0 => Ok(()),
        1 => Err(Failure::Failed("there is something to change, see above".to_owned())),
        n => Err(Failure::Failed(format!("there are {n} things to change, see above"))),
    }
}

fn problems(list: &[Problem]) -> Vec<Value> {
    list.iter().map(|p| json!({ "kind": p.kind(), "what": p.what(), "fix": p.fix() })).collect()
}

fn leases(support: &LeaseSupport) -> Value {
    let names = |what: Guarantees| {
        what.iter_names().map(|(name, _)| name.to_ascii_lowercase()).collect::<Vec<_>>()
    };
    json!({
        "windows": support.windows,
        "held": names(support.held),
        "lacking": names(support.lacking),
        "untried": names(support.untried()),
        "why": support.why,
    })
}

/// The largest number stands for "unlimited", which is null.
fn limited(v: u64) -> Option<u64> {
    (v != u64::MAX).then_some(v)
}

fn object(r: &Report, device: Option<&Device>) -> Value {
    let devices = r.devices.iter().map(|d| match &d.state {
        Err(e) => json!({ "name": d.name, "error": e }),
        Ok((info, ports)) => json!({
            "name": d.name,
            "transport": info.transport,
            "max_mr": limited(info.max_mr),
            "max_mr_size": limited(info.max_mr_size),
            "numa_node": info.numa_node,
            "ports": ports.iter().map(|p| json!({
                "number": p.number, "active": p.active, "link": p.link, "mtu": p.mtu,
            })).collect::<Vec<_>>(),
            "leases": d.leases.as_ref().map(leases),
        }),
    });
    let cgroups = r.cgroups.iter().map(|c| {
        json!({
            "page_size": c.page_size,
            "file": c.file.to_string_lossy(),
            "limit": c.limit,
            "used": c.used,
        })
    });
    let hugepages = r.hugepages.iter().map(|h| {
        json!({
            "page_size": h.page_size,
            "total": h.total,
            "free": h.free,
            "reserved": h.reserved,
            "surplus": h.surplus,
            "nodes": h.nodes.iter().map(|(node, total, free)| json!({
                "node": node, "total": total, "free": free,
            })).collect::<Vec<_>>(),
        })
    });
    let nodes = r
        .nodes
        .iter()
        .map(|n| json!({ "node": n.node, "cpus": n.cpus, "total": n.total, "free": n.free }));
    json!({
        "fit": r.is_fit(),
        "kernel": r.kernel,
        "membarrier": r.membarrier,
        "thp": r.thp,
        "fork": r.fork,
        "device": r.device,
        "device_numa_node": device.and_then(|d| d.info().numa_node),
        "devices": devices.collect::<Vec<_>>(),
        "memlock": {
            "soft": r.memlock.soft,
            "hard": r.memlock.hard,
            "pinned": r.memlock.pinned,
            "locked": r.memlock.locked,
            "exempt": r.memlock.exempt,
        },
        "cgroups": cgroups.collect::<Vec<_>>(),
        "max_map_count": r.max_map_count,
        "map_count": r.map_count,
        "strict_overcommit": r.strict_overcommit,
        "memory": { "total": r.memory_total, "available": r.memory_available },
        "nodes": nodes.collect::<Vec<_>>(),
        "hugepages": hugepages.collect::<Vec<_>>(),
        "pool": {
            "capacity": r.pool.capacity,
            "arenas": r.pool.arenas,
            "arena_size": r.pool.arena_size,
            "page_size": r.pool.page_size,
            "huge_bytes": r.pool.huge_bytes,
            "base_bytes": r.pool.base_bytes,
            "pinned_bytes": r.pool.pinned_bytes,
            "nodes": r.pool.nodes,
        },
        "problems": problems(&r.problems),
        "notes": problems(&r.notes),
    })
}
