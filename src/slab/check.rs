//! A checker of the whole structure: every table against every other. For tests.

use super::{ClassCounts, Slabs, State};
use crate::{
    page_map::PageEntry,
    size_class::{CLASSES, PAGE_SHIFT},
    sync::atomic::Ordering::Relaxed,
};

impl Slabs {
    /// Walks every table and panics on the first contradiction. For tests.
    pub(crate) fn check(&self) {
        let state = self.state.lock();
        let mut free_pages = 0;
        let sets = [&state.runs, &state.parked_runs];
        let runs = || sets.into_iter().flat_map(|set| set.range(&state.nodes, (0, 0)));
        for (pages, first) in runs() {
            assert_eq!(self.map.get(first), PageEntry::free_run(pages));
            assert_eq!(self.map.get(first + pages - 1), PageEntry::free_run(pages));
            free_pages += pages as usize;
        }
        let mut starts: Vec<_> = runs().map(|(pages, first)| (first, pages, true)).collect();
        let mut counts = [ClassCounts::default(); CLASSES + 1];
        let mut used_pages = 0;
        for slab in self.table[..state.next as usize].iter() {
            let (first, pages) = (slab.first.load(Relaxed), slab.pages.load(Relaxed));
            if pages == 0 {
                continue;
            }
            starts.push((first, pages, false));
            used_pages += pages as usize;
            let class = slab.class.load(Relaxed) as usize;
            let bits: u32 = slab.free_map.iter().map(|w| w.load(Relaxed).count_ones()).sum();
            let (free, blocks) = (slab.free.load(Relaxed), slab.blocks.load(Relaxed));
            if class < CLASSES {
                assert_eq!(bits, free);
                let partial = state.partial[class].contains(&state.nodes, (first, 0));
                assert_eq!(partial, free > 0, "listed exactly when it has a free block");
                counts[class].free += free as usize;
                counts[class].taken += (blocks - free) as usize;
            } else {
                counts[class].taken += 1;
            }
            counts[class].bytes += (pages as usize) << PAGE_SHIFT;
        }
        assert_eq!(counts, state.classes);
        assert_eq!((free_pages + used_pages) << PAGE_SHIFT, state.capacity);
        assert_eq!(self.capacity(), state.capacity);
        assert_eq!(free_pages, state.free_pages());
        assert!(state.peak >= state.taken_bytes && state.peak <= state.peaks.iter().sum());
        self.check_arenas(&state, &starts);
        assert_eq!(counts.iter().map(|c| c.taken).sum::<usize>(), state.taken);
        starts.sort_unstable();
        let stride = self.map.stride_pages();
        for pair in starts.windows(2) {
            let ((first, pages, free), (next, _, next_free)) = (pair[0], pair[1]);
            assert!(first + pages <= next, "runs do not overlap");
            let touch = first + pages == next && next % stride != 0;
            assert!(!(touch && free && next_free), "free neighbours are merged");
        }
    }

    /// The part of `check` that is about arenas; `starts` has all runs and slabs.
    fn check_arenas(&self, state: &State, starts: &[(u32, u32, bool)]) {
        let stride = self.map.stride_pages();
        for (slot, arena) in state.arenas.iter().enumerate() {
            let of = |free| {
                let here = starts.iter().filter(|s| (s.0 / stride) as usize == slot && s.2 == free);
                here.map(|s| s.1).sum::<u32>()
            };
            assert_eq!(of(false), arena.used, "pages in use in slot {slot}");
            assert_eq!(of(true), arena.pages - arena.used, "pages free in slot {slot}");
        }
        assert!(state.runs.range(&state.nodes, (0, 0)).all(|r| r.1 < state.parked_from));
        assert!(state.parked_runs.range(&state.nodes, (0, 0)).all(|r| r.1 >= state.parked_from));
        let taken_bytes = |(class, n): (usize, &ClassCounts)| n.taken_bytes(class);
        let bytes: usize = state.classes.iter().enumerate().map(taken_bytes).sum();
        assert_eq!(bytes, state.taken_bytes);
    }
}
