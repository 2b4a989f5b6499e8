//! The judging, on machines that are made up.

use super::*;
use crate::sys::limits::{CgroupLimit, HugePool, Memory};

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
const HUGE: usize = 2 << 20;
const BASE: usize = 4096;

fn machine() -> Facts {
    Facts {
        memlock: Memlock { soft: 8 * MIB, hard: GIB, pinned: 0, locked: 0, exempt: true },
        huge_pools: vec![HugePool { page_size: HUGE, total: 8, free: 8, ..HugePool::default() }],
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
        cpuset: None,
        bound: None,
    }
}

/// A machine with two nodes, with so many free hugepages each.
fn with_nodes(free: [u64; 2]) -> Facts {
    let mut m = machine();
    let node = |number| Node {
        number,
        cpus: String::new(),
        total: 8 * GIB,
        free: 5 * GIB,
        available: 6 * GIB,
    };
    m.nodes = vec![node(0), node(1)];
    m.huge_pools[0].free = free[0] + free[1];
    m.huge_pools[0].total = 20;
    m.huge_pools[0].nodes = vec![(0, 10, free[0]), (1, 10, free[1])];
    m.cpuset = Some(vec![0, 1]);
    m
}

fn placed(facts: &Facts, numa: Numa, bytes: u64, page_sizes: &[usize]) -> Findings {
    let (info, arenas) = (device(), [bytes as usize]);
    let stride = arenas[0].next_power_of_two();
    judge(
        &Demand {
            infos: &[info],
            arenas: &arenas,
            stride,
            page_sizes,
            base_page: BASE,
            numa,
            there: false,
        },
        facts,
    )
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
    let (arenas, numa, there) = (&*arenas, Numa::OfDevice, false);
    let infos = std::slice::from_ref(info);
    judge(&Demand { infos, arenas, stride, page_sizes, base_page: BASE, numa, there }, facts)
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
fn every_device_counts() {
    let mut m = machine();
    m.memlock.exempt = false;
    m.memlock.soft = 8 * MIB;
    let mut few = device();
    few.max_mr = 1;
    let (two, arenas) = ([device(), few], [2 << 20, 2 << 20]);
    let on = |infos: &[DeviceInfo], m: &Facts| {
        let (arenas, page_sizes, numa) = (&arenas, &[BASE], Numa::OfDevice);
        let (stride, base_page) = (2 << 20, BASE);
        judge(&Demand { infos, arenas, stride, page_sizes, base_page, numa, there: false }, m)
            .problems
    };
    assert!(on(&two[..1], &m).is_empty());
    assert_eq!(kinds(&on(&two, &m)), ["too_many_arenas"], "twice 4 MiB is all there may be");
    m.memlock.pinned = 1;
    assert!(on(&two[..1], &m).is_empty());
    let found = on(&two, &m);
    assert_eq!(kinds(&found), ["too_many_arenas", "memlock"]);
    assert!(matches!(found[1], Problem::Memlock { asked, .. } if asked == 8 * MIB), "{found:?}");
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
    let text = problem::list(&f.problems);
    for part in
        ["5 things", "holds 3", "ulimit -l", "nr_hugepages", "/cg/hugetlb.2MB.max", "sysctl"]
    {
        assert!(text.contains(part), "{part:?} in {text}");
    }
}

/// Node, free bytes and text of the one problem, which is a node's.
#[track_caller]
fn node(problems: &[Problem]) -> (u32, Option<u64>, String) {
    match problems {
        [p @ Problem::Node { node, free, .. }] => (*node, *free, p.to_string()),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_node_that_was_asked_for_is_judged_by_what_it_has() {
    let m = with_nodes([7, 2]);
    let f = placed(&m, Numa::Node(0), 14 * MIB, &[HUGE]);
    assert_eq!((f.problems.len(), &f.placement, f.huge), (0, &Placement::On(0), 14 * MIB));
    let f = placed(&m, Numa::Node(1), 6 * MIB, &[HUGE]);
    let (number, free, text) = node(&f.problems);
    assert_eq!((number, free), (1, Some(4 * MIB)));
    for part in [
        "NUMA node 1 cannot give 6 MiB in pages of 2 MiB: 3 pages are needed; 2 such pages are free there",
        "`echo 11 > /sys/devices/system/node/node1/hugepages/hugepages-2048kB/nr_hugepages`",
    ] {
        assert!(text.contains(part), "{part:?} in {text}");
    }
    assert_eq!(placed(&m, Numa::Any, 18 * MIB, &[HUGE]).problems, [], "both together have them");
    // Preferred: a note, and base pages of that node.
    let f = placed(&m, Numa::Node(1), 6 * MIB, &[HUGE, BASE]);
    assert_eq!((kinds(&f.notes), kinds(&f.problems)), (vec!["node"], vec![]));
    assert_eq!((f.huge, f.base), (0, 6 * MIB));
    let f = placed(&m, Numa::Node(1), 7 * GIB, &[BASE]);
    let (number, free, text) = node(&f.problems);
    assert_eq!((number, free), (1, Some(6 * GIB)));
    assert!(text.contains("6 GiB are free there"), "{text}");
    assert_eq!(placed(&m, Numa::Any, 7 * GIB, &[BASE]).problems, [], "from both");
    // What others were promised may lie there.
    let mut reserved = with_nodes([7, 2]);
    reserved.huge_pools[0].reserved = 8;
    let (_, _, text) = node(&placed(&reserved, Numa::Node(1), 4 * MIB, &[HUGE]).problems);
    assert!(text.contains("others have reserved 8"), "{text}");
}

#[test]
fn nodes_that_are_interleaved_are_judged_by_their_shares() {
    let m = with_nodes([7, 2]);
    let f = placed(&m, Numa::Interleave, 8 * MIB, &[HUGE]);
    assert_eq!((f.problems.len(), f.placement), (0, Placement::Interleave(vec![0, 1])));
    let f = placed(&m, Numa::Interleave, 12 * MIB, &[HUGE]);
    let (number, free, text) = node(&f.problems);
    assert_eq!((number, free), (1, Some(4 * MIB)));
    assert!(text.contains("its share of 6 interleaved pages is 3; 2 such pages"), "{text}");
    // Preferred: the other node serves.
    let f = placed(&m, Numa::Interleave, 12 * MIB, &[HUGE, BASE]);
    assert_eq!((kinds(&f.notes), f.huge, f.base), (vec!["node"], 12 * MIB, 0));
    let f = placed(&m, Numa::Interleave, 40 * MIB, &[HUGE]);
    assert_eq!(f.problems.len(), 2, "both are named: {:?}", f.problems);
    // An odd page that neither has.
    let f = placed(&with_nodes([2, 2]), Numa::Interleave, 10 * MIB, &[HUGE]);
    assert_eq!(kinds(&f.problems), ["hugepages"]);
}

#[test]
fn nodes_that_the_process_may_not_use_are_refused_and_do_not_count() {
    for (by, cpuset, bound) in
        [("cpuset allows 0", vec![0], None), ("policy binds it to 0", vec![0, 1], Some(vec![0]))]
    {
        let m = Facts { cpuset: Some(cpuset), bound, ..with_nodes([3, 5]) };
        let f = placed(&m, Numa::Node(1), 4 * MIB, &[HUGE]);
        let (number, free, text) = node(&f.problems);
        assert_eq!((number, free), (1, Some(10 * MIB)), "named with its free count");
        for part in [by, "5 such pages are free there", "Ask for node 0"] {
            assert!(text.contains(part), "{part:?} in {text}");
        }
        let f = placed(&m, Numa::Interleave, 4 * MIB, &[HUGE]);
        assert_eq!((f.problems, f.placement), (vec![], Placement::Interleave(vec![0])));
        // Pages of the other node are not to be had, whatever is asked for.
        for numa in [Numa::Any, Numa::OfDevice, Numa::Interleave] {
            let f = placed(&m, numa, 8 * MIB, &[HUGE]);
            assert_eq!(kinds(&f.problems), ["hugepages"], "{numa:?}");
            let text = f.problems[0].to_string();
            for part in [
                "4 are needed, 3 are free (3 on node 0), 5 more are on nodes that this process may not use",
                "Reserve 1 more on node 0",
            ] {
                assert!(text.contains(part), "{part:?} in {text}");
            }
            let f = placed(&m, numa, 8 * MIB, &[HUGE, BASE]);
            assert_eq!((f.problems.len(), f.huge, f.base), (0, 0, 8 * MIB));
            let f = placed(&m, numa, 7 * GIB, &[BASE]);
            assert_eq!((node(&f.problems).0, node(&f.problems).1), (0, Some(6 * GIB)));
        }
    }
}

#[test]
fn a_node_that_is_not_there_is_listed_with_the_rest() {
    let mut m = with_nodes([3, 5]);
    m.memlock.exempt = false;
    let f = placed(&m, Numa::Node(7), 32 * MIB, &[HUGE]);
    assert_eq!(kinds(&f.problems), ["memlock", "node", "hugepages"]);
    let text = f.problems[1].to_string();
    for part in ["node 7", "32 MiB", "nodes with memory: 0, 1", "Ask for one of 0, 1"] {
        assert!(text.contains(part), "{part:?} in {text}");
    }
    // One without memory of its own.
    m.nodes[1].total = 0;
    let f = placed(&m, Numa::Node(1), 2 * MIB, &[HUGE]);
    assert!(node(&f.problems).2.contains("nodes with memory: 0)"), "{:?}", f.problems);
    let f = placed(&m, Numa::Interleave, 2 * MIB, &[HUGE]);
    assert_eq!(f.placement, Placement::Interleave(vec![0]));
}

#[test]
fn a_device_without_a_node_or_on_one_that_is_not_there_has_no_preference() {
    let m = with_nodes([3, 5]);
    let mut info = device();
    let place = |info: &DeviceInfo| on(info, &m, 2 * MIB, 1, &[HUGE]).placement;
    assert_eq!(place(&info), Placement::Anywhere);
    info.numa_node = Some(1000);
    assert_eq!(place(&info), Placement::Anywhere);
    info.numa_node = Some(1);
    assert_eq!(place(&info), Placement::Near(1));
    // Its node is preferred and no more: the other has the pages.
    let f = on(&info, &with_nodes([5, 0]), 8 * MIB, 1, &[HUGE]);
    assert_eq!((f.problems, f.placement), (vec![], Placement::Near(1)));
}

#[test]
fn a_kernel_without_nodes_has_node_0() {
    let m = machine();
    let f = placed(&m, Numa::Node(0), 16 * MIB, &[HUGE]);
    assert_eq!((f.problems, f.placement), (vec![], Placement::On(0)));
    assert_eq!(kinds(&placed(&m, Numa::Node(1), 2 * MIB, &[HUGE]).problems), ["node"]);
    assert_eq!(kinds(&placed(&m, Numa::Node(0), 18 * MIB, &[HUGE]).problems), ["hugepages"]);
}

#[test]
fn what_is_not_known_is_not_judged() {
    let mut m = machine();
    m.huge_pools.clear();
    m.max_maps = None;
    m.memory =
        Memory { total: None, available: None, strict: true, commit_limit: None, committed: None };
    assert!(found(&m, 64 * GIB, 4, &[HUGE]).problems.is_empty());
    assert!(found(&m, 64 * GIB, 4, &[BASE]).problems.is_empty());
}
