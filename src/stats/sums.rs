//! How the books sum: from size classes to a heap, from heaps to access classes and the pool; and whether they
//! balance (P5).

use std::time::Duration;

use super::{
    AccessStats, ArenaStats, Books, CacheStats, ClassStats, Counted, GuardStats, PageStats, Stats,
};
use crate::{
    size_class::{self, CLASSES},
    slab::Counts,
};

/// What adds up, a number or a set of them.
pub(crate) trait Sum {
    fn add(&mut self, other: &Self);
}

macro_rules! numbers {
    ($($number:ty)+) => { $(impl Sum for $number {
        fn add(&mut self, other: &Self) {
            *self += *other;
        }
    })+ };
}
numbers!(usize u64 Duration);

/// Of what is told of every part, the fields that add up and those of which the largest counts.
macro_rules! fields {
    ($part:ty, sum: $($sum:ident)+ $(, largest: $($largest:ident)+)?) => {
        impl Sum for $part {
            fn add(&mut self, other: &Self) {
                $(self.$sum.add(&other.$sum);)+
                $($(self.$largest = self.$largest.max(other.$largest);)+)?
            }
        }
    };
}
fields!(CacheStats, sum: hits misses from_depot);
fields!(GuardStats, sum: written_after_free written_beyond_end quarantined);
fields!(ClassStats, sum: capacity live cached free unused live_buffers high_water caches waits wait_time);

/// The same, of parts whose fields [`Stats`] has as its own, for the total.
macro_rules! flat_fields {
    ($part:ident as $read:ident, $add:ident, sum: $($sum:ident)+, largest: $($largest:ident)+) => {
        fields!($part, sum: $($sum)+, largest: $($largest)+);

        impl Stats {
            pub(crate) fn $read(&self) -> $part {
                $part { $($sum: self.$sum,)+ $($largest: self.$largest,)+ }
            }

            fn $add(&mut self, other: &$part) {
                let mut sum = self.$read();
                sum.add(other);
                $(self.$sum = sum.$sum;)+
                $(self.$largest = sum.$largest;)+
            }
        }
    };
}
flat_fields!(
    Books as books, add_books,
    sum: capacity live cached free unused live_buffers high_water caches free_runs scattered waits wait_time refused,
    largest: largest_free longest_wait
);
flat_fields!(
    ArenaStats as bringing_up, add_bringing_up,
    sum: arenas regions register_calls register_time growths shrinks growth_failures growth_time,
    largest: longest_register
);

impl Stats {
    /// Sums up.
    pub(crate) fn new(counts: &Counts, counted: &Counted<'_>) -> Self {
        let cached = counted.cached;
        let mut s = Self::default();
        let mut sum = ClassStats::of(0);
        for (class, c) in counts.classes.iter().enumerate() {
            let (caches, waits) = ((counted.caches)(class), (counted.waits)(class));
            let high_water = counts.peaks[class];
            if (c.bytes, caches, waits.times, high_water) == (0, CacheStats::default(), 0, 0) {
                continue;
            }
            let mut entry = if class < CLASSES {
                let block = size_class::size_of(class);
                let in_cache = cached.blocks[class].min(c.taken);
                let out = c.taken - in_cache;
                let (live, cached, free) = (out * block, in_cache * block, c.free * block);
                let unused = c.bytes - live - cached - free;
                ClassStats {
                    capacity: c.bytes,
                    live,
                    cached,
                    free,
                    unused,
                    live_buffers: out,
                    ..ClassStats::of(block)
                }
            } else {
                let cached_bytes = cached.span_bytes.min(c.bytes);
                ClassStats {
                    capacity: c.bytes,
                    live: c.bytes - cached_bytes,
                    cached: cached_bytes,
                    live_buffers: c.taken - cached.blocks[class].min(c.taken),
                    ..ClassStats::of(0)
                }
            };
            (entry.caches, entry.high_water) = (caches, high_water);
            (entry.waits, entry.wait_time) = (waits.times, waits.time);
            sum.add(&entry);
            s.longest_wait = s.longest_wait.max(waits.longest);
            s.classes.push(entry);
        }
        Self {
            capacity: counts.capacity,
            max_capacity: counts.capacity,
            live: sum.live,
            cached: sum.cached,
            free: sum.free,
            unused: counts.free_runs + sum.unused,
            live_buffers: sum.live_buffers,
            // Not the classes', which have their peaks at different times.
            high_water: counts.peak,
            caches: sum.caches,
            largest_free: counts.largest_run,
            free_runs: counts.runs,
            scattered: counts.scattered,
            waits: sum.waits,
            wait_time: sum.wait_time,
            table_bytes: counts.table_bytes,
            ..s
        }
    }

    /// Adds what another heap has; but for who waits, since some stand in two lines.
    pub(crate) fn absorb(&mut self, other: &Self) {
        self.add_books(&other.books());
        self.add_bringing_up(&other.bringing_up());
        self.max_capacity += other.max_capacity;
        self.table_bytes += other.table_bytes;
        self.guards.add(&other.guards);
        other.pages.iter().for_each(|p| self.add_pages(*p));
        for c in &other.classes {
            match self.classes.iter_mut().find(|own| own.block == c.block) {
                Some(own) => own.add(c),
                None => self.classes.push(*c),
            }
        }
        // Spans, whose block is 0, last.
        self.classes.sort_by_key(|c| c.block.wrapping_sub(1));
    }

    /// Adds the arenas of one page size.
    pub(crate) fn add_pages(&mut self, of: PageStats) {
        match self.pages.iter_mut().find(|own| own.page_size == of.page_size) {
            Some(own) => (own.arenas, own.bytes) = (own.arenas + of.arenas, own.bytes + of.bytes),
            None => self.pages.push(of),
        }
        self.pages.sort_by_key(|p| p.page_size);
    }

    /// Whether the books balance: in total, for every class, access class and share, and their sums; and whether
    /// what was counted by class, by access class and share, and in total, is the same.
    pub fn balanced(&self) -> bool {
        let class = |c: &ClassStats| c.live + c.cached + c.free + c.unused == c.capacity;
        let mut all = Books::default();
        self.access_classes.iter().for_each(|a| all.add(&a.all));
        let summed = |a: &AccessStats| {
            let mut sum = a.unreserved;
            self.shares.iter().filter(|s| s.class == a.name).for_each(|s| sum.add(&s.reserve));
            sum == a.all && a.all.balanced() && a.unreserved.balanced()
        };
        self.books().balanced()
            && self.classes.iter().all(class)
            && self.classes_sum()
            && self.pages_sum()
            && self.shares.iter().all(|s| s.reserve.balanced())
            && self.access_classes.iter().all(summed)
            && (self.access_classes.is_empty() || (all == self.books() && self.arenas_sum()))
    }

    /// Whether what is told by size class sums to the total.
    fn classes_sum(&self) -> bool {
        let mut sum = ClassStats::of(0);
        self.classes.iter().for_each(|c| sum.add(c));
        sum.live == self.live
            && sum.cached == self.cached
            && sum.free == self.free
            && sum.live_buffers == self.live_buffers
            && sum.caches == self.caches
            && (sum.waits, sum.wait_time) == (self.waits, self.wait_time)
            && self.caches.from_depot <= self.caches.misses
            && (self.live..=sum.high_water).contains(&self.high_water)
    }

    /// Whether the arenas by page size are all of them.
    fn pages_sum(&self) -> bool {
        self.pages.iter().map(|p| p.arenas).sum::<usize>() == self.arenas
    }

    /// Whether what bringing arenas up came to in each access class sums to the total.
    fn arenas_sum(&self) -> bool {
        let mut sum = ArenaStats::default();
        self.access_classes.iter().for_each(|a| sum.add(&a.bringing_up));
        sum == self.bringing_up()
    }
}

impl ClassStats {
    fn of(block: usize) -> Self {
        Self {
            block,
            capacity: 0,
            live: 0,
            cached: 0,
            free: 0,
            unused: 0,
            live_buffers: 0,
            high_water: 0,
            caches: CacheStats::default(),
            waits: 0,
            wait_time: Duration::ZERO,
        }
    }
}

impl Books {
    /// Whether they balance.
    pub fn balanced(&self) -> bool {
        self.live + self.cached + self.free + self.unused == self.capacity
    }
}
