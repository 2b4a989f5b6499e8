//! A lock-free stack of numbered nodes (Treiber's), with a tag against ABA. Nodes are named by number
//! and never freed while the stack lives, so a stale read is harmless and caught by the tag.

use crate::sync::atomic::{
    AtomicU32, AtomicU64,
    Ordering::{Acquire, Relaxed, Release},
};

/// Where the link to the node below lies. The stack owns the link of every node that is on it.
pub(crate) trait Links {
    /// The link of node `id`.
    fn link(&self, id: u32) -> &AtomicU32;
}

/// The head: node number in the low half (0 is none), tag in the high half.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Head(u64);

impl Head {
    const fn id(self) -> u32 {
        self.0 as u32
    }

    /// The next head: another node on top, and a tag never seen with it before (in 2^32 changes).
    const fn with(self, id: u32) -> Self {
        Self((((self.0 >> 32) as u32).wrapping_add(1) as u64) << 32 | id as u64)
    }
}

#[derive(Debug)]
pub(crate) struct Stack {
    head: AtomicU64,
}

impl Stack {
    pub(crate) fn new() -> Self {
        Self { head: AtomicU64::new(0) }
    }

    /// Puts node `id` (not 0) on top. The caller owns it and gives it up.
    pub(crate) fn push(&self, id: u32, links: &impl Links) {
        let mut head = Head(self.head.load(Relaxed));
        loop {
            links.link(id).store(head.id(), Relaxed);
            // Release pairs with the Acquire in `pop`: who pops the node sees its link and contents.
            match self.head.compare_exchange_weak(head.0, head.with(id).0, Release, Relaxed) {
                Ok(_) => return,
                Err(now) => head = Head(now),
            }
        }
    }

    /// Takes the top node, which the caller then owns.
    pub(crate) fn pop(&self, links: &impl Links) -> Option<u32> {
        // Acquire pairs with the Release in `push`.
        let mut head = Head(self.head.load(Acquire));
        loop {
            if head.id() == 0 {
                return None;
            }
            // May be stale if another thread took the node meanwhile; then the tag has moved on and
            // the exchange fails. The node itself is never freed.
            let below = links.link(head.id()).load(Relaxed);
            match self.head.compare_exchange_weak(head.0, head.with(below).0, Acquire, Acquire) {
                Ok(_) => return Some(head.id()),
                Err(now) => head = Head(now),
            }
        }
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    //! Every interleaving of two threads: no node is lost, none is had twice, contents travel along.
    use loom::{cell::UnsafeCell, sync::Arc, thread};

    use super::*;

    struct Nodes {
        links: [AtomicU32; 4],
        data: [UnsafeCell<u32>; 4],
    }

    impl Links for Nodes {
        fn link(&self, id: u32) -> &AtomicU32 {
            &self.links[id as usize]
        }
    }

    fn fixture() -> Arc<(Stack, Nodes)> {
        let nodes = Nodes {
            links: std::array::from_fn(|_| AtomicU32::new(0)),
            data: std::array::from_fn(|_| UnsafeCell::new(0)),
        };
        Arc::new((Stack::new(), nodes))
    }

    fn drain(f: &(Stack, Nodes)) -> Vec<u32> {
        std::iter::from_fn(|| f.0.pop(&f.1)).collect()
    }

    #[test]
    fn loom_push_and_pop_lose_nothing() {
        loom::model(|| {
            let f = fixture();
            f.0.push(1, &f.1);
            f.0.push(2, &f.1);
            let g = f.clone();
            let other = thread::spawn(move || {
                // Pop, change, push again: the ABA shape.
                if let Some(id) = g.0.pop(&g.1) {
                    // SAFETY: a popped node is this thread's alone; loom checks it.
                    g.1.data[id as usize].with_mut(|p| unsafe { *p += 1 });
                    g.0.push(id, &g.1);
                }
            });
            let mine = f.0.pop(&f.1);
            if let Some(id) = mine {
                // SAFETY: as above.
                f.1.data[id as usize].with_mut(|p| unsafe { *p += 1 });
            }
            other.join().unwrap();
            let mut all = drain(&f);
            all.extend(mine);
            all.sort_unstable();
            assert_eq!(all, [1, 2]);
        });
    }

    #[test]
    fn loom_the_tag_catches_aba() {
        loom::model(|| {
            let f = fixture();
            f.0.push(1, &f.1);
            f.0.push(2, &f.1);
            let g = f.clone();
            let other = thread::spawn(move || {
                // Takes both and puts the upper one back: the head's number is as before, what lies below
                // it is not.
                let (a, b) = (g.0.pop(&g.1), g.0.pop(&g.1));
                if let (Some(a), Some(_)) = (a, b) {
                    g.0.push(a, &g.1);
                    return b;
                }
                if let Some(a) = a {
                    g.0.push(a, &g.1);
                }
                None
            });
            let mut all: Vec<_> = f.0.pop(&f.1).into_iter().collect();
            all.extend(other.join().unwrap());
            all.extend(drain(&f));
            all.sort_unstable();
            assert_eq!(all, [1, 2]);
        });
    }

    #[test]
    fn loom_two_pushers_and_a_popper() {
        loom::model(|| {
            let f = fixture();
            let pushers: Vec<_> = (1..3)
                .map(|id| {
                    let g = f.clone();
                    thread::spawn(move || {
                        // SAFETY: not pushed yet, so this thread's alone.
                        g.1.data[id as usize].with_mut(|p| unsafe { *p = id });
                        g.0.push(id, &g.1);
                    })
                })
                .collect();
            let mut all = Vec::new();
            all.extend(f.0.pop(&f.1));
            for p in pushers {
                p.join().unwrap();
            }
            all.extend(drain(&f));
            for &id in &all {
                // SAFETY: popped, so this thread's alone.
                f.1.data[id as usize].with(|p| assert_eq!(unsafe { *p }, id));
            }
            all.sort_unstable();
            assert_eq!(all, [1, 2]);
        });
    }
}
