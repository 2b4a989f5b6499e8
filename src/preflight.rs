//! Judges a plan by what device and system permit, before the first page is mapped. Pure: all it knows of
//! the machine are the [`Facts`] that it is given, so tests make machines up.

mod nodes;

use self::nodes::Nodes;
use crate::{
    config::{Numa, Placement},
    device::{DeviceInfo, Pinning},
    problem::{self, Problem},
    sys::limits::{Counted, Facts, Memlock, Node},
};

/// What a pool will ask of device and system.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Demand<'a> {
    /// Every arena is registered on each.
    pub(crate) infos: &'a [DeviceInfo],
    /// Each arena's length; its sum is the capacity.
    pub(crate) arenas: &'a [usize],
    /// Bytes of an arena, for what is said of them.
    pub(crate) stride: usize,
    /// Page sizes to try for each arena, best first.
    pub(crate) page_sizes: &'a [usize],
    /// Bytes of a base page.
    pub(crate) base_page: usize,
    /// Where pages shall come from.
    pub(crate) numa: Numa,
    /// Whether all of it is mapped already, and will only be registered.
    pub(crate) there: bool,
}

/// What was found.
#[derive(Clone, Default, PartialEq, Eq, Debug)]
pub(crate) struct Findings {
    /// What makes building fail.
    pub(crate) problems: Vec<Problem>,
    /// What does not, and is worth knowing.
    pub(crate) notes: Vec<Problem>,
    /// Bytes that will be on hugepages, and on base pages.
    pub(crate) huge: u64,
    pub(crate) base: u64,
    /// Where pages will come from.
    pub(crate) placement: Placement,
}

impl Findings {
    /// With what was found of arenas in memory that is there already: what a device permits holds against
    /// `arenas`, which are all.
    pub(crate) fn with(
        mut self,
        there: Self,
        infos: &[DeviceInfo],
        arenas: &[usize],
        stride: usize,
        facts: &Facts,
    ) -> Self {
        let apart = [there.problems, std::mem::take(&mut self.problems)].concat();
        let of_all = infos.iter().flat_map(|i| device(i, arenas, stride, &facts.memlock));
        self.problems = of_all.collect();
        let same =
            |p: &Problem, q: &Problem| std::mem::discriminant(p) == std::mem::discriminant(q);
        for problem in apart {
            if !self.problems.iter().any(|p| same(p, &problem)) {
                self.problems.push(problem);
            }
        }
        self.notes.splice(0..0, there.notes);
        (self.huge, self.base) = (self.huge + there.huge, self.base + there.base);
        self
    }
}

/// Judges all of it.
pub(crate) fn judge(demand: &Demand<'_>, facts: &Facts) -> Findings {
    let mut found = Findings::default();
    let Demand { infos, arenas, stride, .. } = *demand;
    found.problems.extend(infos.iter().filter_map(|i| regions(i, arenas, stride)));
    // RDMA charges pages once a region; what is locked is locked once.
    let mut locks = infos.iter().filter(|i| i.pinning == Pinning::Locked);
    let pins = infos.iter().filter(|i| i.pinning == Pinning::Pinned);
    let (bytes, times) = (sum(arenas), pins.clone().count() as u64);
    let pinned = pins.clone().next();
    let pinned = pinned.and_then(|i| memlock(i, bytes.saturating_mul(times), &facts.memlock));
    found.problems.extend(pinned.or_else(|| memlock(locks.next()?, bytes, &facts.memlock)));
    if !demand.there {
        let nodes = Nodes::of(facts);
        found.placement = nodes::place(demand, facts, &nodes, &mut found.problems);
        hugepages(demand, facts, &nodes, &mut found);
        base_pages(demand, facts, &nodes, &mut found);
    }
    // One for each arena, and some for the guards beside them and the tables.
    let needed = (arenas.len() as u64).saturating_add(8);
    if let Some(limit) = facts.max_maps
        && facts.maps.saturating_add(needed) > limit
    {
        found.problems.push(Problem::MapCount { needed, used: facts.maps, limit });
    }
    found
}

/// Judges a device on which arenas are to be registered beside others.
pub(crate) fn device(
    info: &DeviceInfo,
    arenas: &[usize],
    stride: usize,
    m: &Memlock,
) -> impl Iterator<Item = Problem> + use<> {
    let pinned = info.pinning == Pinning::Pinned;
    let memlock = memlock(info, sum(arenas), m).filter(|_| pinned);
    regions(info, arenas, stride).into_iter().chain(memlock)
}

/// The problem there is if a device holds too few regions.
fn regions(info: &DeviceInfo, arenas: &[usize], stride: usize) -> Option<Problem> {
    (arenas.len() as u64 > info.max_mr).then(|| Problem::TooManyArenas {
        device: info.name.clone(),
        arenas: arenas.len(),
        arena_size: stride,
        max_mr: info.max_mr,
    })
}

fn sum(arenas: &[usize]) -> u64 {
    arenas.iter().fold(0, |sum: u64, &a| sum.saturating_add(a as u64))
}

/// The problem there is if pinning `bytes` more exceeds the limit; `None` when the numbers permit it.
pub(crate) fn memlock(info: &DeviceInfo, bytes: u64, m: &Memlock) -> Option<Problem> {
    // The kernel counts the two apart, each against the whole limit.
    let pinned = match info.pinning {
        Pinning::Pinned => m.pinned,
        Pinning::Locked => m.locked,
        Pinning::Free => return None,
    };
    let unlimited = m.exempt || m.soft == u64::MAX;
    let fits = pinned.checked_add(bytes).is_some_and(|sum| sum <= m.soft);
    (!unlimited && !fits).then_some(Problem::Memlock {
        asked: bytes,
        pinned,
        soft: m.soft,
        hard: m.hard,
    })
}

/// Judges hugepages, and tells which bytes will be on them.
fn hugepages(demand: &Demand<'_>, facts: &Facts, nodes: &Nodes, found: &mut Findings) {
    let asked = sum(demand.arenas);
    let Some(&page) = demand.page_sizes.first().filter(|&&p| p > demand.base_page) else {
        found.base = asked;
        return;
    };
    let may_fall_back = demand.page_sizes.len() > 1;
    let mut lacking = Vec::new();
    // Bytes that can be had in pages of this size; unknown is judged by nobody.
    let mut room = u64::MAX;
    if let Some(pool) = facts.huge_pools.iter().find(|p| p.page_size == page) {
        let usable = nodes::huge_pool(demand, pool, nodes, &found.placement, &mut lacking);
        room = usable.saturating_mul(page as u64);
    }
    for c in facts.cgroups.iter().filter(|c| c.counted == Counted::Hugetlb(page)) {
        room = room.min(c.limit.saturating_sub(c.used));
        if c.used.saturating_add(asked) > c.limit {
            lacking.push(Problem::HugetlbCgroup {
                page_size: page,
                asked,
                used: c.used,
                limit: c.limit,
                file: c.file.clone(),
            });
        }
    }
    if may_fall_back {
        // Arena by arena, all of it or nothing.
        for &len in demand.arenas {
            let len = len as u64;
            if len <= room {
                room -= len;
                found.huge = found.huge.saturating_add(len);
            } else {
                found.base = found.base.saturating_add(len);
            }
        }
        found.notes.extend(lacking);
    } else {
        found.huge = asked;
        found.problems.extend(lacking);
    }
}

/// Judges what will be on base pages.
fn base_pages(demand: &Demand<'_>, facts: &Facts, nodes: &Nodes, found: &mut Findings) {
    let asked = found.base;
    if asked == 0 {
        return;
    }
    for c in facts.cgroups.iter().filter(|c| c.counted == Counted::Memory) {
        if c.used.saturating_add(asked) > c.limit {
            found.problems.push(Problem::MemoryCgroup {
                asked,
                used: c.used,
                limit: c.limit,
                file: c.file.clone(),
            });
        }
    }
    let m = &facts.memory;
    if let (true, Some(limit), Some(committed)) = (m.strict, m.commit_limit, m.committed)
        && committed.saturating_add(asked) > limit
    {
        found.problems.push(Problem::Overcommit { asked, committed, limit });
    }
    // Beyond what the nodes in question have, a fault would have the kernel kill processes.
    let on = nodes.of_placement(&found.placement).filter(|on| on.len() < nodes.there.len());
    let of = |f: fn(&Node) -> u64| {
        let on = on.unwrap_or_default();
        facts.nodes.iter().filter(|n| on.contains(&n.number)).map(f).sum::<u64>()
    };
    let available = of(|n| n.available);
    if on.is_some() && !facts.nodes.is_empty() && asked > available {
        found.problems.push(match on {
            Some(&[node]) => Problem::Node {
                node,
                problem: match found.placement {
                    Placement::On(_) => "it has less",
                    _ => "it is the only one that this process may use, and has less",
                }
                .to_owned(),
                fix: problem::node_fix(node, demand.base_page, None, 0),
                needed: asked,
                page_size: demand.base_page,
                free: Some(available),
            },
            _ => Problem::Memory { asked, available, total: of(|n| n.total) },
        });
        return;
    }
    if let (Some(total), Some(available)) = (m.total, m.available) {
        let problem = Problem::Memory { asked, available, total };
        if asked > total {
            found.problems.push(problem);
        } else if asked > available {
            found.notes.push(problem);
        }
    }
}

#[cfg(test)]
mod tests;
