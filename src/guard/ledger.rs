//! The ledger: who has which block, and who had those that were given back. All of it lies in this process's
//! heap (P2); addresses are the only thing that it knows of a block.

use std::{
    collections::{BTreeMap, HashMap},
    time::Instant,
};

use crate::damage::Owner;

/// A block that is out.
#[derive(Clone, Debug)]
pub(crate) struct Out {
    /// Bytes that were asked for, and may be used.
    pub(crate) len: usize,
    /// Canary bytes behind them.
    pub(crate) canary: usize,
    /// Bytes of the block.
    pub(crate) block: usize,
    pub(crate) since: Instant,
    pub(crate) owner: Owner,
}

/// A buffer that was given back.
#[derive(Clone, Debug)]
pub(crate) struct Freed {
    pub(crate) addr: usize,
    pub(crate) len: usize,
    pub(crate) since: Instant,
    pub(crate) owner: Owner,
    pub(crate) by: Owner,
}

/// What of a freed buffer's block is still free: all of it, until a part goes out in a block of another size.
#[derive(Clone, Debug)]
pub(crate) struct Piece {
    pub(crate) start: usize,
    pub(crate) end: usize,
    pub(crate) freed: Freed,
}

#[derive(Default)]
pub(crate) struct Ledger {
    out: HashMap<usize, Out>,
    /// By first byte: one past the last. They do not overlap.
    free: BTreeMap<usize, (usize, Freed)>,
}

impl Ledger {
    pub(crate) fn out(&self) -> impl Iterator<Item = (usize, &Out)> {
        self.out.iter().map(|(&addr, out)| (addr, out))
    }

    pub(crate) fn get(&mut self, addr: usize) -> Option<&mut Out> {
        self.out.get_mut(&addr)
    }

    pub(crate) fn went_out(&mut self, addr: usize, out: Out) {
        self.out.insert(addr, out);
    }

    pub(crate) fn came_back(&mut self, addr: usize) -> Option<Out> {
        self.out.remove(&addr)
    }

    pub(crate) fn freed(&mut self, block: usize, freed: Freed) {
        debug_assert!(self.pieces(freed.addr, block).is_empty(), "two buffers in one place");
        self.free.insert(freed.addr, (freed.addr + block, freed));
    }

    /// The first bytes of all pieces that there are now.
    pub(crate) fn starts(&self) -> Vec<usize> {
        self.free.keys().copied().collect()
    }

    /// The piece that starts at an address.
    pub(crate) fn piece(&self, start: usize) -> Option<Piece> {
        let (end, freed) = self.free.get(&start)?;
        Some(Piece { start, end: *end, freed: freed.clone() })
    }

    /// First bytes of the pieces that a range meets.
    fn pieces(&self, start: usize, len: usize) -> Vec<usize> {
        let end = start + len;
        let before = self.free.range(..start).next_back().filter(|(_, (e, _))| *e > start);
        before.into_iter().chain(self.free.range(start..end)).map(|(&s, _)| s).collect()
    }

    /// Takes a range out: what was freed there, cut to the range. What lies beside it stays.
    pub(crate) fn take(&mut self, start: usize, len: usize) -> Vec<Piece> {
        let end = start + len;
        let mut taken = Vec::new();
        for s in self.pieces(start, len) {
            let Some((e, freed)) = self.free.remove(&s) else { continue };
            if s < start {
                self.free.insert(s, (start, freed.clone()));
            }
            if e > end {
                self.free.insert(end, (e, freed.clone()));
            }
            taken.push(Piece { start: s.max(start), end: e.min(end), freed });
        }
        taken
    }

    /// Bytes of the ledger, about.
    pub(crate) fn table_bytes(&self) -> usize {
        let out = self.out.capacity() * (size_of::<Out>() + size_of::<usize>());
        out + self.free.len() * (size_of::<Freed>() + 2 * size_of::<usize>())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_cut_where_blocks_of_other_sizes_go_out() {
        let owner = Owner { thread: None, tid: 1, site: None };
        let freed = |addr, len| Freed {
            addr,
            len,
            since: Instant::now(),
            owner: owner.clone(),
            by: owner.clone(),
        };
        let mut l = Ledger::default();
        l.freed(4096, freed(8192, 4000));
        l.freed(64, freed(4096, 60));
        let taken = l.take(8192 + 1024, 1024);
        let shown = |p: &Piece| (p.start, p.end, p.freed.addr, p.freed.len);
        assert_eq!(taken.iter().map(shown).collect::<Vec<_>>(), [(9216, 10240, 8192, 4000)]);
        assert_eq!(l.starts(), [4096, 8192, 10240]);
        // A block over all that is left takes it all.
        let taken = l.take(0, 1 << 20);
        assert_eq!(
            taken.iter().map(shown).collect::<Vec<_>>(),
            [(4096, 4160, 4096, 60), (8192, 9216, 8192, 4000), (10240, 12288, 8192, 4000)]
        );
        assert!(l.starts().is_empty() && l.take(0, 1 << 20).is_empty());
    }
}
