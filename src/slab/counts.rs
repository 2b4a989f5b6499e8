//! What the slabs come to: how much is out, free and cut, and where each slab lies. For the books and the map.

use super::{Slab, Slabs, State};
use crate::{
    size_class::{self, CLASSES, PAGE_SHIFT, SPAN_CLASS},
    sync::atomic::Ordering::Relaxed,
};

/// The counts of one class, in blocks and bytes.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub(crate) struct ClassCounts {
    /// Blocks out of their slabs: in caches or in buffers.
    pub(crate) taken: usize,
    /// Blocks in slabs.
    pub(crate) free: usize,
    /// Bytes of the class's slabs.
    pub(crate) bytes: usize,
}

impl ClassCounts {
    /// Bytes of the blocks that are out; these are the counts of `class`.
    pub(super) fn taken_bytes(&self, class: usize) -> usize {
        match class {
            // A span is out for as long as it exists.
            SPAN_CLASS => self.bytes,
            _ => self.taken * size_class::size_of(class),
        }
    }
}

/// The counts of the whole pool at one moment.
#[derive(Clone, Debug)]
pub(crate) struct Counts {
    /// Bytes of all arenas.
    pub(crate) capacity: usize,
    /// By class; the last is spans above the classes, where `taken` counts spans.
    pub(crate) classes: [ClassCounts; CLASSES + 1],
    /// Bytes of free runs.
    pub(crate) free_runs: usize,
    pub(crate) largest_run: usize,
    /// How many free runs there are, and their bytes beside the longest one of each arena.
    pub(crate) runs: usize,
    pub(crate) scattered: usize,
    /// The most bytes that were out of the slabs at one time, in all and by class.
    pub(crate) peak: usize,
    pub(crate) peaks: [usize; CLASSES + 1],
    /// Bytes of side tables in use.
    pub(crate) table_bytes: usize,
}

/// One slab or span, for a map.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SlabUse {
    /// Bytes of its pages.
    pub(crate) len: usize,
    pub(crate) class: usize,
    pub(crate) blocks: usize,
    /// Blocks in it.
    pub(crate) free: usize,
}

impl State {
    pub(super) fn took(&mut self, class: usize, blocks: usize, bytes: usize) {
        let ClassCounts { taken, .. } = &mut self.classes[class];
        *taken += blocks;
        self.taken += blocks;
        self.taken_bytes += bytes;
        self.peak = self.peak.max(self.taken_bytes);
        self.peaks[class] = self.peaks[class].max(self.classes[class].taken_bytes(class));
    }

    /// Pages of the longest free run of each arena, together.
    pub(super) fn longest_runs(&self, stride: u32, without: &mut [bool]) -> usize {
        let mut left = 0;
        for (without, arena) in without.iter_mut().zip(&self.arenas) {
            *without = arena.pages > arena.used;
            left += usize::from(*without);
        }
        let mut sum = 0;
        let sets = [&self.runs, &self.parked_runs];
        let mut runs = sets.into_iter().flat_map(|set| set.backwards(&self.nodes));
        // Longest first, parked ones apart; an arena's runs are all in one of the two sets.
        while left > 0
            && let Some((pages, first)) = runs.next()
        {
            let mine = &mut without[(first / stride) as usize];
            if std::mem::take(mine) {
                sum += pages as usize;
                left -= 1;
            }
        }
        sum
    }
}

impl Slabs {
    /// Room for [`counts_in`](Slabs::counts_in), since nothing is allocated under a lock.
    pub(crate) fn room_to_count(&self) -> Vec<bool> {
        vec![false; self.slots]
    }

    pub(crate) fn counts_in(&self, room: &mut [bool]) -> Counts {
        self.counts_of(&self.state.lock(), room)
    }

    #[cfg(test)]
    pub(crate) fn counts(&self) -> Counts {
        self.counts_in(&mut self.room_to_count())
    }

    /// The counts in a forked child: nobody will ever release a lock that was held at the fork.
    pub(crate) fn counts_at_fork(&self) -> Counts {
        match self.state.try_lock() {
            Some(state) => self.counts_of(&state, &mut vec![false; self.slots]),
            None => Counts {
                capacity: self.capacity(),
                classes: [ClassCounts::default(); CLASSES + 1],
                free_runs: 0,
                largest_run: 0,
                runs: 0,
                scattered: 0,
                peak: 0,
                peaks: [0; CLASSES + 1],
                table_bytes: 0,
            },
        }
    }

    /// `seen` has room for a look at each slot.
    fn counts_of(&self, state: &State, seen: &mut [bool]) -> Counts {
        let bytes = |(pages, _): (u32, u32)| (pages as usize) << PAGE_SHIFT;
        let free_runs = state.free_pages() << PAGE_SHIFT;
        Counts {
            capacity: state.capacity,
            classes: state.classes,
            free_runs,
            runs: state.runs.len() + state.parked_runs.len(),
            scattered: free_runs
                - (state.longest_runs(self.map.stride_pages(), seen) << PAGE_SHIFT),
            peak: state.peak,
            peaks: state.peaks,
            largest_run: [&state.runs, &state.parked_runs]
                .into_iter()
                .filter_map(|r| r.last(&state.nodes).map(bytes))
                .max()
                .unwrap_or(0),
            table_bytes: state.next as usize * size_of::<Slab>()
                + state.nodes.table_bytes()
                + (state.capacity >> PAGE_SHIFT) * size_of::<u32>(),
        }
    }

    /// First page and length in pages of every slab and span that there is, in no order. One that comes or goes
    /// meanwhile may be there or not.
    pub(crate) fn runs_in_use(&self) -> Vec<(u32, u32)> {
        // The lock is let go of now and then: a large pool has a large table.
        const AT_ONCE: usize = 4096;
        let run = |s: &Slab| (s.first.load(Relaxed), s.pages.load(Relaxed));
        let mut runs = Vec::new();
        let mut at = 0;
        loop {
            // Nothing is allocated under the lock.
            runs.reserve(AT_ONCE);
            let state = self.state.lock();
            let next = state.next as usize;
            let end = next.min(at + AT_ONCE);
            runs.extend(self.table[at..end].iter().map(run).filter(|&(_, pages)| pages > 0));
            drop(state);
            at = end;
            if at >= next {
                return runs;
            }
        }
    }

    /// Where every slab and span is, and what of it is out, in no order. As [`runs_in_use`](Slabs::runs_in_use).
    pub(crate) fn uses(&self) -> Vec<(usize, SlabUse)> {
        let of = |(first, _)| {
            // Looked up again, under the lock, since it may have gone meanwhile.
            let _state = self.state.lock();
            let (_, slab) = self.slab_at(first)?;
            let class = slab.class.load(Relaxed) as usize;
            let free = if class < CLASSES { slab.free.load(Relaxed) as usize } else { 0 };
            let use_ = SlabUse {
                len: (slab.pages.load(Relaxed) as usize) << PAGE_SHIFT,
                class,
                blocks: slab.blocks.load(Relaxed) as usize,
                free,
            };
            Some((self.map.addr_of(slab.first.load(Relaxed)), use_))
        };
        self.runs_in_use().into_iter().filter_map(of).collect()
    }
}
