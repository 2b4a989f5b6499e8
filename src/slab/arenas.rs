//! Arenas that come and go under the slabs' lock: what of each is in use, which are parked (to be used last,
//! so that they fall empty), and how much is left in all. When to grow or shrink is the pool's business.

use super::{Slabs, State};
use crate::{
    page_map::{PageEntry, PageMap},
    size_class::PAGE_SHIFT,
    sync::atomic::Ordering::Relaxed,
};

/// Bytes of most slabs.
const USUAL_SLAB: usize = 64 << 10;

/// What of one arena is in use. All zero for a slot without one.
#[derive(Clone, Copy, Default, Debug)]
pub(super) struct ArenaUse {
    pub(super) pages: u32,
    /// Pages in slabs and spans.
    pub(super) used: u32,
    /// Whether a run of it was taken since the last look.
    pub(super) touched: bool,
}

/// What a look at one arena finds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Use {
    pub(crate) len: usize,
    /// No block or span of it is out of the slabs.
    pub(crate) free: bool,
    /// It was not free all the time since the last look.
    pub(crate) touched: bool,
}

impl State {
    /// Bytes that are not taken.
    pub(super) fn idle(&self) -> usize {
        self.capacity - self.taken_bytes
    }

    pub(super) fn insert_arena(&mut self, map: &PageMap, offset: usize, len: usize) {
        let run = ((len >> PAGE_SHIFT) as u32, (offset >> PAGE_SHIFT) as u32);
        Slabs::mark_free(map, run);
        self.insert_run(run);
        let slot = (run.1 / map.stride_pages()) as usize;
        self.arenas[slot] = ArenaUse { pages: run.0, used: 0, touched: true };
        self.capacity += len;
    }
}

impl Slabs {
    /// Brings the side tables of an arena that is to come into memory, as far as it will probably need them,
    /// so that allocs meet no page fault there, under the lock at that.
    pub(crate) fn prepare_arena(&self, offset: usize, len: usize) {
        self.map.populate(offset, len);
        let next = self.state.lock().next as usize;
        self.table.populate(next, len / USUAL_SLAB);
    }

    /// Takes over one more arena, which is published.
    pub(crate) fn add_arena(&self, offset: usize, len: usize) {
        let mut state = self.state.lock();
        state.insert_arena(&self.map, offset, len);
        self.capacity.store(state.capacity, Relaxed);
    }

    /// Gives an arena up, if it is wholly free and was not touched since the last look, and says where it was.
    /// From then on no block of it can be had.
    pub(crate) fn remove_arena(&self, slot: usize) -> Option<usize> {
        let mut state = self.state.lock();
        let ArenaUse { pages, used, touched } = state.arenas[slot];
        let first = slot as u32 * self.map.stride_pages();
        if pages == 0 || used > 0 || touched || state.draining {
            return None;
        }
        let was = state.remove_run((pages, first));
        debug_assert!(was, "a free arena is one run");
        // Its other pages name slabs that are no longer, or nothing.
        self.map.set(first, PageEntry::slab(0));
        self.map.set(first + pages - 1, PageEntry::slab(0));
        state.arenas[slot] = ArenaUse::default();
        state.capacity -= (pages as usize) << PAGE_SHIFT;
        self.capacity.store(state.capacity, Relaxed);
        Some((first as usize) << PAGE_SHIFT)
    }

    /// The arenas from a slot on, in order: slot, length, and whether any of it is out of the slabs.
    pub(crate) fn arenas_from(&self, slot: usize) -> Vec<(usize, usize, bool)> {
        // Nothing is allocated under the lock.
        let mut found = Vec::with_capacity(self.slots.saturating_sub(slot));
        let state = self.state.lock();
        let all = state.arenas.iter().enumerate().skip(slot).filter(|(_, a)| a.pages > 0);
        found.extend(all.map(|(i, a)| (i, (a.pages as usize) << PAGE_SHIFT, a.used > 0)));
        drop(state);
        found
    }

    /// Looks at the arena of a slot, if there is one, and begins a new time between looks.
    pub(crate) fn look_at(&self, slot: usize) -> Option<Use> {
        let mut state = self.state.lock();
        let arena = &mut state.arenas[slot];
        let found = Use {
            len: (arena.pages as usize) << PAGE_SHIFT,
            free: arena.used == 0,
            touched: std::mem::take(&mut arena.touched),
        };
        (found.len > 0).then_some(found)
    }

    /// Parks all arenas from a slot on, and no other.
    pub(crate) fn park_from(&self, slot: Option<usize>) {
        let mut state = self.state.lock();
        let page = slot.map_or(u32::MAX, |s| s as u32 * self.map.stride_pages());
        if page == state.parked_from {
            return;
        }
        state.parked_from = page;
        let State { runs, parked_runs, nodes, .. } = &mut *state;
        runs.part(nodes, parked_runs, |(_, first)| first >= page);
        parked_runs.part(nodes, runs, |(_, first)| first < page);
    }

    /// Bytes that are not out of the slabs.
    pub(crate) fn idle(&self) -> usize {
        self.state.lock().idle()
    }

    /// Sets below how many idle bytes the bell is rung; 0 is never. Says whether that is so already.
    pub(crate) fn ring_below(&self, bytes: usize) -> bool {
        let state = self.state.lock();
        self.ring_below.store(bytes, Relaxed);
        state.idle() < bytes
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use crate::{
        access::{LKey, PackedKeys, RKey},
        bell::Bell,
        error::FreeError,
        page_map::PageMap,
        slab::Slabs,
    };

    const MIB: usize = 1 << 20;
    const BASE: usize = 1 << 40;

    /// Room for four arenas of 1 MiB; the first is there.
    fn slabs() -> Slabs {
        let map = PageMap::new(BASE, 4 * MIB, 20).expect("map");
        map.publish(0, MIB, PackedKeys::new(LKey::new(1), RKey::new(1)));
        let bell = Arc::new(Bell::new());
        Slabs::new(map, [(0, MIB)].into_iter(), MIB, 0, bell).expect("slabs")
    }

    fn add(s: &Slabs, slot: usize) {
        let key = slot as u32 + 1;
        s.map.publish(slot << 20, MIB, PackedKeys::new(LKey::new(key), RKey::new(key)));
        s.add_arena(slot << 20, MIB);
        s.check();
    }

    fn slot_of(e: &super::super::Entry) -> usize {
        (e.ptr.as_ptr() as usize - BASE) >> 20
    }

    #[test]
    fn an_arena_comes_serves_and_goes_only_when_free_and_untouched() {
        let s = slabs();
        let first = s.take_span(MIB, 1).expect("the first arena");
        assert!(s.take_span(4096, 1).is_none());
        add(&s, 1);
        assert_eq!(s.capacity(), 2 * MIB);
        let one = s.take_span(4096, 1).expect("of the second");
        assert_eq!(slot_of(&one), 1);
        assert!(s.remove_arena(1).is_none(), "a block is out");
        let _ = s.give([one.ptr].into_iter());
        assert!(s.remove_arena(1).is_none(), "touched since the last look");
        assert!(s.look_at(1).is_some_and(|u| u.free && u.touched));
        assert_eq!(s.remove_arena(1), Some(MIB));
        s.check();
        assert_eq!((s.capacity(), s.idle()), (MIB, 0));
        assert!(s.remove_arena(1).is_none(), "twice");
        assert!(s.take_span(4096, 1).is_none());
        let addr = one.ptr.as_ptr() as usize;
        assert_eq!(s.refusal(addr), FreeError::NotOut { addr });
        // It comes again; what was left in the tables is not taken for anything.
        add(&s, 1);
        assert_eq!(s.refusal(addr), FreeError::NotOut { addr });
        assert_eq!(s.take_span(MIB, 1).map(|e| slot_of(&e)), Some(1));
        let _ = s.give([first.ptr].into_iter());
        s.check();
    }

    #[test]
    fn parked_arenas_are_used_last() {
        let s = slabs();
        (1..4).for_each(|slot| add(&s, slot));
        let class = crate::size_class::class_of(4096);
        // A slab in each arena: the spans keep all else.
        let spans: Vec<_> = (0..4).filter_map(|_| s.take_span(MIB - (64 << 10), 1)).collect();
        let mut taken = Vec::new();
        s.take(class, usize::MAX, |e| taken.push(e));
        let _ = s.give(spans.iter().map(|e| e.ptr));
        s.park_from(Some(2));
        s.check();
        // One free block in each arena's slab, and much free besides.
        for slot in 0..4 {
            let at = taken.iter().position(|e| slot_of(e) == slot).expect("a block of each");
            let _ = s.give([taken.swap_remove(at).ptr].into_iter());
        }
        let mut next = Vec::new();
        let room = 2 * (MIB - (64 << 10)) / 4096;
        s.take(class, room, |e| next.push(e));
        assert!(next.iter().all(|e| slot_of(e) < 2), "the others had room");
        s.take(class, usize::MAX, |e| next.push(e));
        assert!(
            next.iter().any(|e| slot_of(e) == 3),
            "what is parked serves when nothing else does"
        );
        assert_eq!(s.idle(), 0);
        s.park_from(None);
        s.check();
        let _ = s.give(next.iter().chain(&taken).map(|e| e.ptr));
        s.check();
        assert_eq!(s.counts().largest_run, MIB);
    }
}
