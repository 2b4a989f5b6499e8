//! Ordered sets of pairs without the heap: what the slabs look up under their lock. A tree of the standard
//! library's would call the global allocator there, which may be one that waits for a thread which waits for
//! that lock. Manages the nodes; what the pairs mean is the slabs' business.
//!
//! The sets are treaps: search trees by pair, heaps by a hash of it, so that their depth is logarithmic
//! whatever comes and goes. Nodes of all sets lie in one table with room for each page of the pool, touched as
//! far as there were ever nodes.

use std::{
    io,
    sync::atomic::{AtomicU32, Ordering::Relaxed},
};

use crate::sys::table::{Zeroable, ZeroedTable};

pub(crate) type Pair = (u32, u32);

/// No node.
const NONE: u32 = 0;

/// Atomics only since tables are written through shared references; all access is under the owner's lock.
#[repr(C)]
struct Node {
    pair: [AtomicU32; 2],
    /// Children, smaller and greater; of a spare node, `[0]` is the next spare one.
    down: [AtomicU32; 2],
}

// SAFETY: a struct of atomics only, and zero is a valid value of each.
unsafe impl Zeroable for Node {}

/// The nodes of several sets.
pub(crate) struct Nodes {
    table: ZeroedTable<Node>,
    /// The lowest number never used; 0 is none.
    next: u32,
    spare: u32,
}

/// A set, all of whose nodes are of one [`Nodes`].
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Ordered {
    root: u32,
    len: u32,
}

/// Where the number of a node is written: in a set, or in a node, on one side.
#[derive(Clone, Copy)]
enum Link {
    Root,
    Below(u32, usize),
}

impl Nodes {
    /// Makes room for `count` pairs at a time.
    pub(crate) fn new(count: usize) -> io::Result<Self> {
        Ok(Self { table: ZeroedTable::new(count + 1)?, next: 1, spare: NONE })
    }

    /// Bytes of the table that were ever in use.
    pub(crate) fn table_bytes(&self) -> usize {
        self.next as usize * size_of::<Node>()
    }

    fn pair(&self, node: u32) -> Pair {
        let [a, b] = &self.table[node as usize].pair;
        (a.load(Relaxed), b.load(Relaxed))
    }

    fn down(&self, node: u32, side: usize) -> u32 {
        self.table[node as usize].down[side].load(Relaxed)
    }

    /// The greater, the nearer to the root.
    fn rank(&self, node: u32) -> u64 {
        rank(self.pair(node))
    }

    fn take(&mut self, pair: Pair) -> u32 {
        let node = match self.spare {
            NONE => {
                self.next += 1;
                self.next - 1
            }
            spare => {
                self.spare = self.down(spare, 0);
                spare
            }
        };
        let n = &self.table[node as usize];
        n.pair[0].store(pair.0, Relaxed);
        n.pair[1].store(pair.1, Relaxed);
        node
    }

    fn give(&mut self, node: u32) {
        self.table[node as usize].down[0].store(self.spare, Relaxed);
        self.spare = node;
    }

    fn at(&self, set: &Ordered, link: Link) -> u32 {
        match link {
            Link::Root => set.root,
            Link::Below(node, side) => self.down(node, side),
        }
    }

    fn set(&self, set: &mut Ordered, link: Link, to: u32) {
        match link {
            Link::Root => set.root = to,
            Link::Below(node, side) => self.table[node as usize].down[side].store(to, Relaxed),
        }
    }
}

/// The least pair that is greater.
fn after((a, b): Pair) -> Option<Pair> {
    match b.checked_add(1) {
        Some(b) => Some((a, b)),
        None => Some((a.checked_add(1)?, 0)),
    }
}

fn rank((a, b): Pair) -> u64 {
    // Odd numbers without a pattern; what matters is that neighbours are thrown apart.
    let x = (u64::from(a) << 32 | u64::from(b)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (x ^ x >> 32).wrapping_mul(0xd6e8_feb8_6659_fd93)
}

impl Ordered {
    /// Adds a pair that is not there yet.
    pub(crate) fn insert(&mut self, nodes: &mut Nodes, pair: Pair) {
        self.len += 1;
        let new = nodes.take(pair);
        let mine = rank(pair);
        let mut link = Link::Root;
        let mut below = self.root;
        while below != NONE && nodes.rank(below) >= mine {
            debug_assert_ne!(nodes.pair(below), pair);
            link = Link::Below(below, usize::from(nodes.pair(below) < pair));
            below = nodes.at(self, link);
        }
        nodes.set(self, link, new);
        // What is below is parted: the smaller to one side of the new node, the greater to the other. Each
        // side grows at the end that faces the other.
        let mut ends = [Link::Below(new, 0), Link::Below(new, 1)];
        while below != NONE {
            debug_assert_ne!(nodes.pair(below), pair);
            let side = usize::from(nodes.pair(below) > pair);
            nodes.set(self, ends[side], below);
            ends[side] = Link::Below(below, 1 - side);
            below = nodes.down(below, 1 - side);
        }
        for end in ends {
            nodes.set(self, end, NONE);
        }
    }

    /// Takes a pair out; false if it is not there.
    pub(crate) fn remove(&mut self, nodes: &mut Nodes, pair: Pair) -> bool {
        let mut link = Link::Root;
        let gone = loop {
            let node = nodes.at(self, link);
            if node == NONE {
                return false;
            }
            let here = nodes.pair(node);
            if here == pair {
                break node;
            }
            link = Link::Below(node, usize::from(here < pair));
        };
        // Its two sides become one: always the one of the higher rank comes first.
        let (mut small, mut great) = (nodes.down(gone, 0), nodes.down(gone, 1));
        while small != NONE && great != NONE {
            if nodes.rank(small) >= nodes.rank(great) {
                nodes.set(self, link, small);
                link = Link::Below(small, 1);
                small = nodes.down(small, 1);
            } else {
                nodes.set(self, link, great);
                link = Link::Below(great, 0);
                great = nodes.down(great, 0);
            }
        }
        nodes.set(self, link, if small == NONE { great } else { small });
        nodes.give(gone);
        self.len -= 1;
        true
    }

    /// The first pair from this one on.
    pub(crate) fn first_from(&self, nodes: &Nodes, pair: Pair) -> Option<Pair> {
        let (mut node, mut best) = (self.root, None);
        while node != NONE {
            let here = nodes.pair(node);
            if here < pair {
                node = nodes.down(node, 1);
            } else {
                best = Some(here);
                node = nodes.down(node, 0);
            }
        }
        best
    }

    pub(crate) fn first(&self, nodes: &Nodes) -> Option<Pair> {
        self.first_from(nodes, (0, 0))
    }

    pub(crate) fn last(&self, nodes: &Nodes) -> Option<Pair> {
        let (mut node, mut best) = (self.root, None);
        while node != NONE {
            best = Some(nodes.pair(node));
            node = nodes.down(node, 1);
        }
        best
    }

    pub(crate) fn len(&self) -> usize {
        self.len as usize
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.root == NONE
    }

    #[cfg(any(test, feature = "fault"))]
    pub(crate) fn contains(&self, nodes: &Nodes, pair: Pair) -> bool {
        self.first_from(nodes, pair) == Some(pair)
    }

    fn last_before(&self, nodes: &Nodes, pair: Pair) -> Option<Pair> {
        let (mut node, mut best) = (self.root, None);
        while node != NONE {
            let here = nodes.pair(node);
            if here < pair {
                best = Some(here);
                node = nodes.down(node, 1);
            } else {
                node = nodes.down(node, 0);
            }
        }
        best
    }

    /// All pairs, the last one first.
    pub(crate) fn backwards<'a>(&'a self, nodes: &'a Nodes) -> impl Iterator<Item = Pair> + 'a {
        std::iter::successors(self.last(nodes), move |&pair| self.last_before(nodes, pair))
    }

    /// Moves the pairs that `moves` says to another set.
    pub(crate) fn part(&mut self, nodes: &mut Nodes, to: &mut Self, moves: impl Fn(Pair) -> bool) {
        let mut at = self.first(nodes);
        while let Some(pair) = at {
            if moves(pair) {
                self.remove(nodes, pair);
                to.insert(nodes, pair);
            }
            at = after(pair).and_then(|next| self.first_from(nodes, next));
        }
    }

    /// All pairs from this one on, in order.
    pub(crate) fn range<'a>(
        &'a self,
        nodes: &'a Nodes,
        from: Pair,
    ) -> impl Iterator<Item = Pair> + 'a {
        std::iter::successors(self.first_from(nodes, from), move |&pair| {
            self.first_from(nodes, after(pair)?)
        })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// Depth of the tree; panics where its order is broken.
    fn depth(nodes: &Nodes, node: u32, low: Option<Pair>, high: Option<Pair>) -> usize {
        if node == NONE {
            return 0;
        }
        let pair = nodes.pair(node);
        assert!(low.is_none_or(|l| l < pair) && high.is_none_or(|h| pair < h));
        let sides = [(0, low, Some(pair)), (1, Some(pair), high)];
        let deepest = sides.map(|(side, low, high)| {
            let next = nodes.down(node, side);
            assert!(next == NONE || nodes.rank(next) <= nodes.rank(node));
            depth(nodes, next, low, high)
        });
        1 + deepest.into_iter().max().unwrap_or(0)
    }

    #[test]
    fn sets_are_what_the_standard_library_s_are() {
        const ROOM: usize = 1000;
        let mut nodes = Nodes::new(ROOM).expect("table");
        let mut sets = [Ordered::default(); 2];
        let mut models = [BTreeSet::new(), BTreeSet::new()];
        let mut seed = 1u64;
        let mut random = |n: u32| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (seed >> 33) as u32 % n
        };
        for round in 0..40_000 {
            let which = random(2) as usize;
            let (set, model) = (&mut sets[which], &mut models[which]);
            let pair = (random(12), random(40) * 97);
            if model.contains(&pair) || model.len() >= ROOM / 2 {
                assert_eq!(set.remove(&mut nodes, pair), model.remove(&pair));
            } else if random(3) > 0 {
                set.insert(&mut nodes, pair);
                model.insert(pair);
            } else {
                assert!(!set.remove(&mut nodes, pair));
            }
            let from = (random(12), random(4000));
            assert_eq!(set.first_from(&nodes, from), model.range(from..).next().copied());
            assert_eq!(set.last(&nodes), model.last().copied());
            if round % 97 == 0 {
                assert!(set.range(&nodes, from).eq(model.range(from..).copied()));
                assert!(set.range(&nodes, (0, 0)).eq(model.iter().copied()));
                assert!(set.backwards(&nodes).eq(model.iter().rev().copied()));
                assert_eq!((set.len(), set.is_empty()), (model.len(), model.is_empty()));
                assert_eq!(set.contains(&nodes, from), model.contains(&from));
                depth(&nodes, set.root, None, None);
            }
            if round % 5000 == 0 {
                let [one, other] = &mut sets;
                one.part(&mut nodes, other, |(a, b)| !models[1].contains(&(a, b)) && a < 4);
                let gone: Vec<_> = models[0]
                    .iter()
                    .copied()
                    .filter(|p| p.0 < 4 && !models[1].contains(p))
                    .collect();
                for pair in gone {
                    models[0].remove(&pair);
                    models[1].insert(pair);
                }
            }
        }
        // Given back nodes serve again.
        assert!((nodes.next as usize) <= ROOM);
        for (mut set, model) in sets.into_iter().zip(models) {
            for pair in model {
                assert_eq!(set.first(&nodes), Some(pair));
                assert!(set.remove(&mut nodes, pair));
            }
            assert_eq!((set.first(&nodes), set.last(&nodes)), (None, None));
        }
    }

    #[test]
    fn neighbours_in_a_row_make_no_list() {
        let mut nodes = Nodes::new(1 << 16).expect("table");
        let mut set = Ordered::default();
        for i in 0..1 << 16 {
            set.insert(&mut nodes, (0, i));
        }
        let deep = depth(&nodes, set.root, None, None);
        assert!(deep < 64, "{deep}");
        // The ends of what can be: no pair comes after the last.
        set.remove(&mut nodes, (0, 5));
        set.insert(&mut nodes, (u32::MAX, u32::MAX));
        assert_eq!(set.range(&nodes, (0, (1 << 16) - 1)).count(), 2);
    }
}
