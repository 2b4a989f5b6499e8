//! The books: what is where at this moment, heap by heap and summed up over a pool (P5).

use std::sync::atomic::Ordering::Relaxed;

use super::{Core, family::Heaps};
use crate::{
    magazine::Local,
    size_class::CLASSES,
    stats::{AccessStats, Cached, Counted, ShareStats, Stats, Sum, WaitCounts},
};

impl Core {
    /// Blocks in magazines and depot, and in quarantine.
    pub(super) fn cached(&self) -> Cached {
        self.cached_beside(|| ()).0
    }

    /// The same, and what `slabs` sees of the slabs at that moment: nothing is on its way from here to there, by whose
    /// recall ever, so that no block is missed in both. `slabs` takes no lock but theirs, and no memory.
    fn cached_beside<T>(&self, slabs: impl FnOnce() -> T) -> (Cached, T) {
        let mut sum = [0; CLASSES + 1];
        // Caches are emptied under this.
        let registry = self.registry.lock();
        // Held until the depot is counted too: no magazine moves meanwhile.
        let mut holds = Local::hold_all(&registry.locals);
        holds.for_each(|hold| hold.count_into(&self.depot, &mut sum));
        for (class, sum) in sum.iter_mut().enumerate().take(CLASSES) {
            *sum += self.depot.blocks(class);
        }
        let Some(guard) = &self.guard else {
            return (Cached { blocks: sum, span_bytes: 0 }, slabs());
        };
        // So is the quarantine.
        let quarantine = guard.quarantine.lock();
        sum.iter_mut().zip(quarantine.counts()).for_each(|(sum, n)| *sum += n);
        (Cached { blocks: sum, span_bytes: quarantine.span_bytes() }, slabs())
    }

    /// Of this heap alone.
    pub(super) fn stats(&self) -> Stats {
        let caches = |class| self.depot.counted(class);
        let mut stats = if self.foreign() {
            // Locks may have been held by threads that this process does not have.
            let cached = &Cached::default();
            let counted = Counted { cached, caches: &caches, waits: &|_| WaitCounts::default() };
            Stats::new(&self.slabs.counts_at_fork(), &counted)
        } else {
            let mut room = self.slabs.room_to_count();
            let (cached, counts) = &self.cached_beside(|| self.slabs.counts_in(&mut room));
            let waited = self.waited.lock().counts();
            let waits = |class: usize| waited[class];
            Stats::new(counts, &Counted { cached, caches: &caches, waits: &waits })
        };
        stats.refused = self.refused.times();
        if !self.foreign() {
            stats.waiting = self.waiters.count();
        }
        if let Some(shown) = self.shown() {
            shown.count_into(&mut stats);
        }
        self.grower.count_into(&mut stats);
        stats.table_bytes += self.depot.table_bytes();
        stats.guards = self.guard_stats();
        stats
    }
}

impl Heaps<'_> {
    /// Of all heaps, and what is whose.
    pub(super) fn stats(self) -> Stats {
        let mut sum = Stats::default();
        for (class, shares) in self.classes() {
            let unreserved = class.stats();
            let mut all = unreserved.books();
            sum.absorb(&unreserved);
            sum.waiting += unreserved.waiting;
            let bringing_up = unreserved.bringing_up();
            for share in shares {
                let own = share.stats();
                all.add(&own.books());
                sum.absorb(&own);
                let count =
                    |of: fn(&super::share::Beyond) -> u64| share.beyond.as_ref().map_or(0, of);
                sum.shares.push(ShareStats {
                    name: share.name.clone(),
                    class: class.name.clone(),
                    reserve: own.books(),
                    ran_dry: count(|b| b.ran_dry.load(Relaxed)),
                    refused: count(|b| b.refused.load(Relaxed)),
                    waiting: own.waiting,
                    waits: own.waits,
                    wait_time: own.wait_time,
                });
            }
            sum.access_classes.push(AccessStats {
                name: class.name.clone(),
                access: class.access,
                arenas: unreserved.arenas,
                bringing_up,
                waiting: unreserved.waiting,
                all,
                unreserved: unreserved.books(),
            });
        }
        sum
    }
}
