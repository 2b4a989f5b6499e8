//! Judges a plan by what device and system permit, before the first page is mapped. Pure: all it knows of
//! the machine are the [`Facts`] that it is given, so tests make machines up.

use crate::{
    device::{DeviceInfo, Pinning},
    problem::Problem,
    sys::limits::{Counted, Facts, Memlock},
};

/// What a pool will ask of device and system.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Demand<'a> {
    pub(crate) info: &'a DeviceInfo,
    /// Each arena's length; its sum is the capacity.
    pub(crate) arenas: &'a [usize],
    /// Bytes from one arena to the next.
    pub(crate) stride: usize,
    /// Page sizes to try for each arena, best first.
    pub(crate) page_sizes: &'a [usize],
    /// Bytes of a base page.
    pub(crate) base_page: usize,
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
}

/// Judges all of it.
pub(crate) fn judge(demand: &Demand<'_>, facts: &Facts) -> Findings {
    let mut found = Findings::default();
    let Demand { info, arenas, stride, .. } = *demand;
    if arenas.len() as u64 > info.max_mr {
        found.problems.push(Problem::TooManyArenas {
            device: info.name.clone(),
            arenas: arenas.len(),
            arena_size: stride,
            max_mr: info.max_mr,
        });
    }
    found.problems.extend(memlock(info, sum(arenas), &facts.memlock));
    if !demand.there {
        hugepages(demand, facts, &mut found);
        base_pages(facts, &mut found);
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
fn hugepages(demand: &Demand<'_>, facts: &Facts, found: &mut Findings) {
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
        let needed = asked.div_ceil(page as u64);
        room = pool.usable().saturating_mul(page as u64);
        if needed > pool.usable() {
            lacking.push(Problem::Hugepages {
                page_size: page,
                needed,
                free: pool.free,
                reserved: pool.reserved,
                surplus: pool.surplus,
                total: pool.total,
                nodes: pool.nodes.iter().map(|&(n, _, free)| (n, free)).collect(),
            });
        }
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
fn base_pages(facts: &Facts, found: &mut Findings) {
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
mod tests {
    use super::*;
    use crate::sys::limits::{CgroupLimit, HugePool, Memory};

    const MIB: u64 = 1 << 20;
    const GIB: u64 = 1 << 30;
    const HUGE: usize = 2 << 20;
    const BASE: usize = 4096;

    fn machine() -> Facts {
        Facts {
            memlock: Memlock { soft: 8 * MIB, hard: GIB, pinned: 0, locked: 0, exempt: true },
            huge_pools: vec![HugePool {
                page_size: HUGE,
                total: 8,
                free: 8,
                ..HugePool::default()
            }],
            cgroups: Vec::new(),
            memory: Memory {
                total: Some(16 * GIB),
                available: Some(12 * GIB),
                strict: false,
                commit_limit: Some(8 * GIB),
                committed: Some(GIB),
            },
            max_maps: Some(65_530),
            maps: 50,
            nodes: Vec::new(),
        }
    }

    fn device() -> DeviceInfo {
        let mut info = DeviceInfo::new("mlx9_0", "mlx9");
        info.pinning = Pinning::Pinned;
        info
    }

    /// Judges a pool of equal arenas.
    fn found(facts: &Facts, arena: u64, count: usize, page_sizes: &[usize]) -> Findings {
        on(&device(), facts, arena, count, page_sizes)
    }

    fn on(
        info: &DeviceInfo,
        facts: &Facts,
        arena: u64,
        count: usize,
        page_sizes: &[usize],
    ) -> Findings {
        let arenas = vec![arena as usize; count];
        let stride = (arena as usize).next_power_of_two();
        let there = false;
        judge(&Demand { info, arenas: &arenas, stride, page_sizes, base_page: BASE, there }, facts)
    }

    fn kinds(problems: &[Problem]) -> Vec<&'static str> {
        problems.iter().map(Problem::kind).collect()
    }

    fn cgroup(counted: Counted, file: &str, limit: u64, used: u64) -> CgroupLimit {
        CgroupLimit { counted, file: file.into(), limit, used }
    }

    #[test]
    fn a_fit_machine_has_no_problem() {
        let f = found(&machine(), 16 * MIB, 1, &[HUGE]);
        assert_eq!(f, Findings { huge: 16 * MIB, ..Findings::default() });
        let f = found(&machine(), 64 * MIB, 3, &[BASE]);
        assert_eq!(f, Findings { base: 192 * MIB, ..Findings::default() });
    }

    #[test]
    fn memlock_is_judged_by_right_not_by_user() {
        let mut m = machine();
        assert!(found(&m, GIB, 1, &[BASE]).problems.is_empty(), "exempt");
        m.memlock.exempt = false;
        let expected = Problem::Memlock { asked: GIB, pinned: 0, soft: 8 * MIB, hard: GIB };
        assert_eq!(found(&m, GIB, 1, &[BASE]).problems, [expected]);
        m.memlock.soft = u64::MAX;
        m.memlock.pinned = u64::MAX - 5;
        assert!(found(&m, GIB, 1, &[BASE]).problems.is_empty(), "unlimited, whatever the sum");
    }

    #[test]
    fn memlock_counts_what_is_pinned_and_all_arenas() {
        let mut m = machine();
        m.memlock.exempt = false;
        assert!(found(&m, 2 * MIB, 4, &[BASE]).problems.is_empty(), "8 of 8 MiB fit");
        assert_eq!(kinds(&found(&m, 2 * MIB, 5, &[BASE]).problems), ["memlock"]);
        m.memlock.pinned = 1;
        assert_eq!(kinds(&found(&m, 2 * MIB, 4, &[BASE]).problems), ["memlock"]);
        m.memlock.pinned = u64::MAX;
        assert_eq!(kinds(&found(&m, 2 * MIB, 4, &[BASE]).problems), ["memlock"], "no overflow");
        let mut soft = device();
        soft.pinning = Pinning::Locked;
        assert!(on(&soft, &m, 2 * MIB, 4, &[BASE]).problems.is_empty(), "mlock is counted apart");
        m.memlock.locked = 1;
        assert_eq!(kinds(&on(&soft, &m, 2 * MIB, 4, &[BASE]).problems), ["memlock"]);
        soft.pinning = Pinning::Free;
        assert!(on(&soft, &m, GIB, 4, &[BASE]).problems.is_empty());
    }

    #[test]
    fn hugepages_that_others_reserved_are_not_free() {
        let mut m = machine();
        m.huge_pools[0].reserved = 1;
        m.huge_pools[0].nodes = vec![(0, 4, 3), (1, 4, 5)];
        let f = found(&m, 16 * MIB, 1, &[HUGE]);
        assert_eq!(kinds(&f.problems), ["hugepages"]);
        let text = f.problems[0].to_string();
        for part in [
            "hugepages of 2 MiB: 8 are needed, 8 are free (3 on node 0, 5 on node 1), 1 of them reserved",
            "echo 9 > /sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages",
        ] {
            assert!(text.contains(part), "{part:?} in {text}");
        }
        m.huge_pools[0].surplus = 1;
        assert!(found(&m, 16 * MIB, 1, &[HUGE]).problems.is_empty(), "the system may make one");
    }

    #[test]
    fn preferred_hugepages_that_lack_are_a_note_and_base_pages_are_judged() {
        let mut m = machine();
        // 8 pages: two arenas of 3 fit, the other two do not.
        let f = found(&m, 6 * MIB, 4, &[HUGE, BASE]);
        assert_eq!((kinds(&f.problems), kinds(&f.notes)), (vec![], vec!["hugepages"]));
        assert_eq!((f.huge, f.base), (12 * MIB, 12 * MIB));
        m.cgroups.push(cgroup(Counted::Memory, "/cg/memory.max", 20 * MIB, 9 * MIB));
        let f = found(&m, 6 * MIB, 4, &[HUGE, BASE]);
        assert_eq!(kinds(&f.problems), ["memory_cgroup"], "12 + 9 > 20");
        m.cgroups.push(cgroup(Counted::Hugetlb(HUGE), "/cg/hugetlb.2MB.max", 6 * MIB, 0));
        let f = found(&m, 6 * MIB, 4, &[HUGE, BASE]);
        assert_eq!(kinds(&f.notes), ["hugepages", "hugetlb_cgroup"]);
        assert_eq!((f.huge, f.base), (6 * MIB, 18 * MIB));
    }

    #[test]
    fn each_level_of_nested_cgroups_counts_its_own() {
        let mut m = machine();
        let huge = Counted::Hugetlb(HUGE);
        m.cgroups = vec![
            cgroup(huge, "/cg/a/b/hugetlb.2MB.max", 16 * MIB, 0),
            cgroup(huge, "/cg/a/hugetlb.2MB.max", 18 * MIB, 4 * MIB),
            cgroup(Counted::Hugetlb(1 << 30), "/cg/a/hugetlb.1GB.max", 0, 0),
            cgroup(Counted::Memory, "/cg/a/memory.max", MIB, MIB),
        ];
        let f = found(&m, 16 * MIB, 1, &[HUGE]);
        assert_eq!(f.problems.len(), 1, "the outer one alone: {:?}", f.problems);
        let text = f.problems[0].to_string();
        assert!(text.contains("echo 20971520 > /cg/a/hugetlb.2MB.max"), "{text}");
        m.cgroups[1].limit = 0;
        m.cgroups[1].used = u64::MAX;
        assert_eq!(kinds(&found(&m, 16 * MIB, 1, &[HUGE]).problems), ["hugetlb_cgroup"]);
    }

    #[test]
    fn strict_overcommit_counts_base_pages_only() {
        let mut m = machine();
        m.memory.committed = Some(8 * GIB - 8 * MIB);
        assert!(found(&m, 16 * MIB, 1, &[BASE]).problems.is_empty());
        m.memory.strict = true;
        assert_eq!(kinds(&found(&m, 16 * MIB, 1, &[BASE]).problems), ["overcommit"]);
        assert!(found(&m, 16 * MIB, 1, &[HUGE]).problems.is_empty());
    }

    #[test]
    fn more_than_all_memory_is_a_problem_more_than_is_available_a_note() {
        let m = machine();
        assert_eq!(kinds(&found(&m, 13 * GIB, 1, &[BASE]).notes), ["memory"]);
        assert_eq!(kinds(&found(&m, 17 * GIB, 1, &[BASE]).problems), ["memory"]);
    }

    #[test]
    fn all_that_is_wrong_is_listed_at_once() {
        let mut m = machine();
        m.memlock.exempt = false;
        m.huge_pools[0].free = 3;
        m.max_maps = Some(65);
        m.cgroups.push(cgroup(Counted::Hugetlb(HUGE), "/cg/hugetlb.2MB.max", 0, 0));
        let mut info = device();
        info.max_mr = 3;
        let f = on(&info, &m, 2 * MIB, 8, &[HUGE]);
        let all = ["too_many_arenas", "memlock", "hugepages", "hugetlb_cgroup", "map_count"];
        assert_eq!(kinds(&f.problems), all);
        let text = crate::problem::list(&f.problems);
        for part in
            ["5 things", "holds 3", "ulimit -l", "nr_hugepages", "/cg/hugetlb.2MB.max", "sysctl"]
        {
            assert!(text.contains(part), "{part:?} in {text}");
        }
    }

    #[test]
    fn what_is_not_known_is_not_judged() {
        let mut m = machine();
        m.huge_pools.clear();
        m.max_maps = None;
        m.memory = Memory {
            total: None,
            available: None,
            strict: true,
            commit_limit: None,
            committed: None,
        };
        assert!(found(&m, 64 * GIB, 4, &[HUGE]).problems.is_empty());
        assert!(found(&m, 64 * GIB, 4, &[BASE]).problems.is_empty());
    }
}
