//! The doctor's report as text for people.

use std::fmt;

use super::*;

/// A byte count that is read, not acted on: one decimal, one unit.
pub(super) fn short(bytes: u64) -> String {
    const UNITS: [(u32, &str); 4] = [(40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")];
    if bytes == u64::MAX {
        return "unlimited".to_owned();
    }
    match UNITS.into_iter().find(|&(shift, _)| bytes >> shift > 0) {
        None => format!("{bytes} B"),
        Some((shift, unit)) if bytes.is_multiple_of(1 << shift) => {
            format!("{} {unit}", bytes >> shift)
        }
        Some((shift, unit)) => format!("{:.1} {unit}", bytes as f64 / (1u64 << shift) as f64),
    }
}

pub(super) fn or_unlimited(bytes: Option<u64>) -> String {
    short(bytes.unwrap_or(u64::MAX))
}

/// Headings, and below each its lines: a label and what there is to say.
type Section = (&'static str, Vec<(String, String)>);

impl Report {
    pub(super) fn sections(&self) -> Vec<Section> {
        vec![
            ("Machine", self.machine()),
            ("Devices", self.device_lines()),
            ("Limits", self.limits()),
            ("Memory", self.memory()),
            ("This pool would use", self.pool_lines()),
        ]
    }

    pub(super) fn machine(&self) -> Vec<(String, String)> {
        let line = |label: &str, text: String| (label.to_owned(), text);
        let membarrier = if self.membarrier { "available" } else { "missing" };
        let mut lines = vec![
            line("kernel", self.kernel.clone()),
            line("membarrier", membarrier.to_owned()),
            line("transparent hugepages", self.thp.clone().unwrap_or_else(|| "none".to_owned())),
        ];
        if let Some(fork) = self.fork {
            lines.push(line("registered memory at a fork", fork.to_owned()));
        }
        lines
    }

    pub(super) fn device_lines(&self) -> Vec<(String, String)> {
        if self.devices.is_empty() {
            return vec![("none".to_owned(), String::new())];
        }
        let mut lines = Vec::new();
        for d in &self.devices {
            let chosen = if self.device.as_ref() == Some(&d.name) { " (this pool's)" } else { "" };
            let label = format!("{}{chosen}", d.name);
            let (info, ports) = match &d.state {
                Ok(known) => known,
                Err(e) => {
                    lines.push((label, e.clone()));
                    continue;
                }
            };
            let regions = match info.max_mr {
                u64::MAX => "any number of memory regions".to_owned(),
                n => format!("{n} memory regions"),
            };
            let size = match info.max_mr_size {
                u64::MAX => "any size".to_owned(),
                n => format!("up to {}", short(n)),
            };
            let node = info.numa_node.map_or("unknown".to_owned(), |n| n.to_string());
            lines.push((
                label,
                format!("{}, {regions} of {size}, NUMA node {node}", info.transport),
            ));
            for p in ports {
                let state = if p.active { "active" } else { "not active" };
                lines.push((
                    format!("  port {}", p.number),
                    format!("{state}, {}, MTU {}", p.link, p.mtu),
                ));
            }
            if let Some(leases) = &d.leases {
                lines.push(("  leases".to_owned(), leases.to_string()));
            }
        }
        lines
    }

    pub(super) fn limits(&self) -> Vec<(String, String)> {
        let line = |label: &str, text: String| (label.to_owned(), text);
        let m = &self.memlock;
        let binds = if m.exempt {
            "does not bind (CAP_IPC_LOCK in the initial user namespace)"
        } else {
            "binds (no CAP_IPC_LOCK in the initial user namespace)"
        };
        let mut lines = vec![
            line(
                "locked memory",
                format!("{} soft, {} hard; {binds}", or_unlimited(m.soft), or_unlimited(m.hard)),
            ),
            line(
                "in use",
                format!("{} pinned by RDMA, {} by mlock", short(m.pinned), short(m.locked)),
            ),
        ];
        for c in &self.cgroups {
            let what = c.page_size.map_or("cgroup memory".to_owned(), |p| {
                format!("cgroup hugepages of {}", short(p as u64))
            });
            lines.push((
                what,
                format!("{} of {} used ({})", short(c.used), short(c.limit), c.file.display()),
            ));
        }
        if self.cgroups.is_empty() {
            lines.push(line("cgroups", "none that limits memory or hugepages".to_owned()));
        }
        let most = self.max_map_count.map_or("an unknown number".to_owned(), |n| n.to_string());
        lines.push(line("mappings", format!("{} of {most}", self.map_count)));
        let strict = if self.strict_overcommit { "off (vm.overcommit_memory=2)" } else { "on" };
        lines.push(line("overcommit", strict.to_owned()));
        lines
    }

    pub(super) fn memory(&self) -> Vec<(String, String)> {
        let mut lines = Vec::new();
        if let (Some(total), Some(available)) = (self.memory_total, self.memory_available) {
            lines.push((
                "all".to_owned(),
                format!("{}, {} of it available", short(total), short(available)),
            ));
        }
        for n in &self.nodes {
            lines.push((
                format!("NUMA node {}", n.node),
                format!(
                    "{}, {} of it free; processors {}",
                    short(n.total),
                    short(n.free),
                    if n.cpus.is_empty() { "none" } else { &n.cpus }
                ),
            ));
        }
        for h in &self.hugepages {
            let mut text = format!("{} of {} free", h.free, h.total);
            if h.reserved > 0 {
                text += &format!(", {} of them reserved by others", h.reserved);
            }
            if h.surplus > 0 {
                text += &format!(", {} more may be made", h.surplus);
            }
            if h.nodes.len() > 1 {
                for (node, total, free) in &h.nodes {
                    text += &format!("; node {node}: {free} of {total}");
                }
            }
            lines.push((format!("hugepages of {}", short(h.page_size as u64)), text));
        }
        if self.hugepages.is_empty() {
            lines.push(("hugepages".to_owned(), "none".to_owned()));
        }
        lines
    }

    pub(super) fn pool_lines(&self) -> Vec<(String, String)> {
        let line = |label: &str, text: String| (label.to_owned(), text);
        let p = &self.pool;
        let s = if p.arenas == 1 { "" } else { "s" };
        let mut pages = Vec::new();
        if p.huge_bytes > 0 {
            pages.push(format!(
                "{} on pages of {}",
                short(p.huge_bytes),
                short(p.page_size as u64)
            ));
        }
        if p.base_bytes > 0 {
            pages.push(format!("{} on base pages", short(p.base_bytes)));
        }
        vec![
            line("capacity", Bytes(p.capacity as u64).to_string()),
            line(
                "arenas",
                format!(
                    "{} of {}: {} memory region{s}",
                    p.arenas,
                    short(p.arena_size as u64),
                    p.arenas
                ),
            ),
            line("pages", pages.join(", ")),
            line(
                "from",
                match p.nodes.as_slice() {
                    [] => "any NUMA node".to_owned(),
                    [one] => format!("NUMA node {one}"),
                    many => {
                        let all: Vec<_> = many.iter().map(u32::to_string).collect();
                        format!("NUMA nodes {} in turns", all.join(", "))
                    }
                },
            ),
            line("pinned", short(p.pinned_bytes)),
        ]
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sections = self.sections();
        let width = sections.iter().flat_map(|(_, l)| l).map(|(label, _)| label.chars().count());
        let width = width.max().unwrap_or(0);
        for (heading, lines) in &sections {
            writeln!(f, "{heading}")?;
            for (label, text) in lines {
                writeln!(f, "{}", format!("  {label:width$}  {text}").trim_end())?;
            }
            writeln!(f)?;
        }
        let list = |f: &mut fmt::Formatter<'_>, heading: &str, problems: &[Problem]| {
            writeln!(f, "{heading}")?;
            for (i, p) in problems.iter().enumerate() {
                writeln!(f, "  {}. {}.", i + 1, p.what())?;
                writeln!(f, "     {}.", p.fix())?;
            }
            Ok(())
        };
        if !self.notes.is_empty() {
            list(f, "Worth knowing", &self.notes)?;
            writeln!(f)?;
        }
        if self.problems.is_empty() {
            write!(f, "Nothing to change.")
        } else {
            list(f, "To change", &self.problems)
        }
    }
}
