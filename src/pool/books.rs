//! The books of one pool: what is where at this moment (P5).

use super::Core;
use crate::{magazine::Local, size_class::CLASSES, stats::Stats};

impl Core {
    /// Blocks in magazines and depot, by class.
    pub(super) fn cached(&self) -> [usize; CLASSES + 1] {
        let mut sum = [0; CLASSES + 1];
        let registry = self.registry.lock();
        // Held until the depot is counted too: no magazine moves meanwhile.
        let holds = Local::hold_all(&registry.locals);
        for hold in &holds {
            hold.count_into(&self.depot, &mut sum);
        }
        for (class, sum) in sum.iter_mut().enumerate().take(CLASSES) {
            *sum += self.depot.blocks(class);
        }
        sum
    }

    pub(super) fn stats(&self) -> Stats {
        let mut stats = if self.foreign() {
            // Locks may have been held by threads that this process does not have.
            Stats::new(&self.slabs.counts_at_fork(), &[0; CLASSES + 1])
        } else {
            Stats::new(&self.slabs.counts(), &self.cached())
        };
        if !self.foreign() {
            let waited = self.waited.lock();
            (stats.waits, stats.wait_time) = (waited.times, waited.time);
            stats.waiting = self.waiters.count();
        }
        if let Some(shown) = self.shown() {
            (stats.arenas, stats.register_calls) = (shown.arenas, shown.register_calls);
        }
        self.grower.count_into(&mut stats);
        stats.table_bytes += self.depot.table_bytes();
        stats
    }
}
