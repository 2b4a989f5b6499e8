//! Which NUMA nodes a pool's pages come from, and what hugepages those can give.

use super::{Demand, sum};
use crate::{
    config::{Numa, Placement},
    problem::{self, Problem},
    sys::limits::{Facts, HugePool},
};

/// The NUMA nodes, as a pool may have them.
pub(super) struct Nodes {
    /// Those with memory, lowest first.
    pub(super) there: Vec<u32>,
    /// Those of them that this process may use.
    pub(super) usable: Vec<u32>,
}

impl Nodes {
    pub(super) fn of(facts: &Facts) -> Self {
        let with_memory = facts.nodes.iter().filter(|n| n.total > 0).map(|n| n.number);
        let mut there: Vec<u32> = with_memory.collect();
        if there.is_empty() {
            // A kernel that knows no nodes.
            there.push(0);
        }
        let by = |list: &Option<Vec<u32>>, n: &u32| list.as_ref().is_none_or(|l| l.contains(n));
        let may = |n: &u32| by(&facts.cpuset, n) && by(&facts.bound, n);
        let usable = there.iter().copied().filter(may).collect();
        Self { there, usable }
    }

    /// Those that pages will come from; `None` when any will do.
    pub(super) fn of_placement<'a>(&'a self, placement: &'a Placement) -> Option<&'a [u32]> {
        match placement {
            Placement::On(node) => Some(std::slice::from_ref(node)),
            Placement::Interleave(nodes) => Some(nodes),
            // Preferring one does not bar the others.
            Placement::Anywhere | Placement::Near(_) => self.limited().then_some(&self.usable),
        }
    }

    fn limited(&self) -> bool {
        self.usable.len() < self.there.len()
    }
}

/// Decides where pages come from. A node that cannot be had is a problem; the rest is then judged as if none
/// had been asked for.
pub(super) fn place(
    demand: &Demand<'_>,
    facts: &Facts,
    nodes: &Nodes,
    problems: &mut Vec<Problem>,
) -> Placement {
    let page_size = demand.page_sizes.first().copied().unwrap_or(demand.base_page);
    let usable = |node: &u32| nodes.usable.contains(node);
    let node = match demand.numa {
        Numa::Any => return Placement::Anywhere,
        Numa::Interleave => return Placement::Interleave(nodes.usable.clone()),
        Numa::OfDevice => {
            // Of several devices on different nodes the first one's is as good as any.
            let node = demand.infos.iter().find_map(|i| i.numa_node.filter(usable));
            return node.map_or(Placement::Anywhere, Placement::Near);
        }
        Numa::Node(node) if usable(&node) => return Placement::On(node),
        Numa::Node(node) => node,
    };
    let which = match nodes.usable.as_slice() {
        [] => "Let this process use a node".to_owned(),
        [one] => format!("Ask for node {one}"),
        many => format!("Ask for one of {}", list(many)),
    };
    let (problem, fix) = if !nodes.there.contains(&node) {
        let there = list(&nodes.there);
        (format!("it does not exist or has no memory (nodes with memory: {there})"), which)
    } else if let Some(allowed) = facts.cpuset.as_ref().filter(|c| !c.contains(&node)) {
        let problem = format!("this process may not use it (its cpuset allows {})", list(allowed));
        (problem, format!("{which}, or let it: `cpuset.mems` of its cgroup"))
    } else {
        let bound = list(facts.bound.as_deref().unwrap_or_default());
        let problem =
            format!("this process may not use it (its memory policy binds it to {bound})");
        (problem, format!("{which}, or start it without `numactl --membind`"))
    };
    problems.push(Problem::Node {
        node,
        problem,
        fix,
        needed: sum(demand.arenas),
        page_size,
        free: free_on(facts, node, page_size, demand.base_page),
    });
    Placement::Anywhere
}

fn list(nodes: &[u32]) -> String {
    nodes.iter().map(u32::to_string).collect::<Vec<_>>().join(", ")
}

/// Bytes to be had on a node in pages of a size, where known.
fn free_on(facts: &Facts, node: u32, page: usize, base_page: usize) -> Option<u64> {
    if page <= base_page {
        return facts.nodes.iter().find(|n| n.number == node).map(|n| n.available);
    }
    let pool = facts.huge_pools.iter().find(|p| p.page_size == page)?;
    let (_, _, free) = pool.nodes.iter().find(|(n, ..)| *n == node)?;
    Some(free.saturating_mul(page as u64))
}

/// Pages of a pool that these nodes can give.
fn usable_on(pool: &HugePool, nodes: &[u32]) -> u64 {
    if pool.nodes.is_empty() {
        return pool.usable();
    }
    let free = pool.nodes.iter().filter(|(n, ..)| nodes.contains(n)).map(|&(_, _, free)| free);
    // Which node has those that are promised to others is not known.
    free.sum::<u64>().saturating_add(pool.surplus).min(pool.usable())
}

/// Judges the hugepages of a pool of them, on the nodes in question.
pub(super) fn huge_pool(
    demand: &Demand<'_>,
    pool: &HugePool,
    nodes: &Nodes,
    placement: &Placement,
    lacking: &mut Vec<Problem>,
) -> u64 {
    let page = pool.page_size as u64;
    let pages = |bytes: u64| bytes.div_ceil(page);
    let needed = pages(sum(demand.arenas));
    let on = nodes.of_placement(placement);
    let usable = on.map_or_else(|| pool.usable(), |on| usable_on(pool, on));
    // What a node must give at least.
    let share = match placement {
        Placement::On(_) => needed,
        Placement::Interleave(on) if on.len() > 1 => {
            demand.arenas.iter().map(|&a| pages(a as u64) / on.len() as u64).sum()
        }
        _ => 0,
    };
    let mut named = false;
    let each = on.filter(|_| share > 0 && !pool.nodes.is_empty()).unwrap_or_default();
    for &node in each {
        let has = usable_on(pool, &[node]);
        if share <= has {
            continue;
        }
        named = true;
        let (_, total, free) =
            pool.nodes.iter().copied().find(|(n, ..)| *n == node).unwrap_or((node, 0, 0));
        let mut problem = match placement {
            Placement::On(_) => format!("{share} pages are needed"),
            _ => format!("its share of {needed} interleaved pages is {share}"),
        };
        if pool.reserved > 0 {
            problem += &format!(", others have reserved {} (on whichever node)", pool.reserved);
        }
        lacking.push(Problem::Node {
            node,
            problem,
            fix: problem::node_fix(node, pool.page_size, Some(total), share - has),
            needed: share.saturating_mul(page),
            page_size: pool.page_size,
            free: Some(free.saturating_mul(page)),
        });
    }
    if needed > usable && !named {
        let may = |n: u32| on.is_none_or(|on| on.contains(&n));
        let of = |may: &dyn Fn(u32) -> bool| -> Vec<(u32, u64)> {
            pool.nodes.iter().filter(|(n, ..)| may(*n)).map(|&(n, _, free)| (n, free)).collect()
        };
        let (mine, others) = (of(&may), of(&|n| !may(n)));
        let count = |nodes: &[(u32, u64)]| nodes.iter().map(|(_, free)| free).sum();
        let limited = !others.is_empty();
        lacking.push(Problem::Hugepages {
            page_size: pool.page_size,
            needed,
            free: if limited { count(&mine) } else { pool.free },
            reserved: pool.reserved,
            surplus: pool.surplus,
            total: pool.total,
            nodes: mine,
            forbidden: limited.then(|| count(&others)),
        });
    }
    usable
}
