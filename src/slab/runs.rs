//! Free runs of pages: the best fit is taken, and what comes back merges with its neighbours inside its arena.

use super::{Slabs, State};
use crate::{
    ordered::{Nodes, Ordered, Pair},
    page_map::{PageEntry, PageMap},
    size_class::PAGE_SHIFT,
    sync::atomic::Ordering::Relaxed,
};

impl State {
    /// Pages in free runs.
    pub(super) fn free_pages(&self) -> usize {
        self.arenas.iter().map(|a| (a.pages - a.used) as usize).sum()
    }

    /// The set that a run at a page belongs to.
    fn runs_at(&mut self, first: u32) -> (&mut Ordered, &mut Nodes) {
        let set = if first < self.parked_from { &mut self.runs } else { &mut self.parked_runs };
        (set, &mut self.nodes)
    }

    pub(super) fn insert_run(&mut self, run: Pair) {
        let (set, nodes) = self.runs_at(run.1);
        set.insert(nodes, run);
    }

    pub(super) fn remove_run(&mut self, run: Pair) -> bool {
        let (set, nodes) = self.runs_at(run.1);
        set.remove(nodes, run)
    }
}

impl Slabs {
    pub(super) fn mark_free(map: &PageMap, (pages, first): (u32, u32)) {
        map.set(first, PageEntry::free_run(pages));
        map.set(first + pages - 1, PageEntry::free_run(pages));
    }

    /// Takes the best-fitting run whose start can be aligned, and gives back what is cut off. From parked
    /// arenas only what no other has, and only if `parked` permits it.
    pub(super) fn take_run(
        &self,
        state: &mut State,
        pages: u32,
        align_pages: u32,
        parked: bool,
    ) -> Option<u32> {
        // Alignment is one of addresses, and lent memory may start at any page.
        let base = self.map.base() >> PAGE_SHIFT;
        let aligned = |first: u32| {
            let page = (base + first as usize).checked_next_multiple_of(align_pages as usize)?;
            u32::try_from(page - base).ok()
        };
        let fits = |&(len, first): &(u32, u32)| {
            aligned(first).is_some_and(|a| (a - first).checked_add(pages).is_some_and(|n| n <= len))
        };
        let best = |runs: &Ordered| runs.range(&state.nodes, (pages, 0)).find(fits);
        let last = || best(&state.parked_runs).filter(|_| parked);
        let (len, first) = best(&state.runs).or_else(last)?;
        let start = aligned(first)?;
        self.cut.fetch_add((pages as usize) << PAGE_SHIFT, Relaxed);
        let arena = &mut state.arenas[(first / self.map.stride_pages()) as usize];
        arena.used += pages;
        arena.touched = true;
        state.remove_run((len, first));
        let (before, after) = (start - first, first + len - start - pages);
        for run in [(before, first), (after, start + pages)] {
            if run.0 > 0 {
                Self::mark_free(&self.map, run);
                state.insert_run(run);
            }
        }
        Some(start)
    }

    /// Puts a run back, merged with free neighbours in the same arena.
    pub(super) fn give_run(&self, state: &mut State, mut first: u32, mut pages: u32) {
        let stride = self.map.stride_pages();
        let end = first + pages;
        state.arenas[(first / stride) as usize].used -= pages;
        if !first.is_multiple_of(stride)
            && let Some(n) = self.map.get(first - 1).as_free_run()
        {
            state.remove_run((n, first - n));
            first -= n;
            pages += n;
        }
        let last = (self.map.len() >> PAGE_SHIFT) as u32;
        if !end.is_multiple_of(stride)
            && end < last
            && let Some(n) = self.map.get(end).as_free_run()
        {
            state.remove_run((n, end));
            pages += n;
        }
        Self::mark_free(&self.map, (pages, first));
        state.insert_run((pages, first));
    }
}
