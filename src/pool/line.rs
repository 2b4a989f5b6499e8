//! A heap's line of waiting requests: what is waited for, where blocks come from, and emptying the caches. The
//! order is `waiters.rs`'s; how a caller waits is `wait.rs`'s.

use std::{
    task::Waker,
    time::{Duration, Instant},
};

use super::Core;
use crate::{
    size_class::{self, CLASSES, PAGE, SPAN_CLASS},
    slab::{Entry, Given},
    stats::WaitCounts,
    waiters::Passed,
};

/// What a request needs; of two that are equal one can be served when the other can.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Need {
    pub(super) len: usize,
    pub(super) align: usize,
    /// The class to take from, or a span's.
    pub(super) class: usize,
    /// The smallest whose blocks hold it in any case.
    fit: usize,
}

/// A block and its class.
pub(crate) type Block = (Entry, usize);

/// What waiting has come to, over a pool's life: how often a request got in line, how long those that have left it
/// stood there, by class. Whole from the start, for it is written under a lock.
pub(super) struct Waited(Box<[WaitCounts; CLASSES + 1]>);

impl Waited {
    pub(super) fn new() -> Self {
        Self(Box::new([WaitCounts::default(); CLASSES + 1]))
    }

    fn at(&mut self, class: usize) -> &mut WaitCounts {
        &mut self.0[class]
    }

    pub(super) fn counts(&self) -> [WaitCounts; CLASSES + 1] {
        *self.0
    }
}

/// A place in the line.
pub(super) struct Turn {
    pub(super) ticket: u64,
    since: Instant,
    class: usize,
}

impl Core {
    pub(super) fn need(&self, len: usize, align: usize) -> Need {
        let fit = size_class::class_of_aligned(len.max(1), align.min(PAGE));
        Need { len, align, class: self.class_for(len, align), fit }
    }

    /// Takes from the slabs, which have all that is free while somebody waits.
    pub(super) fn take_now(&self, need: &Need) -> Option<Block> {
        let mut got = None;
        if need.class < CLASSES {
            self.slabs.take(need.class, 1, |entry| got = Some((entry, need.class)));
        }
        // Where no slab can be cut any more, single pages may be left, or larger blocks.
        got.or_else(|| self.slabs.take_span(need.len, need.align).map(|e| (e, SPAN_CLASS)))
            .or_else(|| self.slabs.take_larger(need.fit, need.align))
    }

    /// Lets those who wait have what has come free: to be called, without any of the pool's locks, whenever
    /// blocks have come to the slabs or memory to the pool.
    pub(crate) fn wake_waiters(&self) {
        if self.waiters.any() {
            self.waiters.serve(|need| self.take_now(need));
        }
    }

    /// An alloc that does not wait, while others do: it may pass them a bounded number of times.
    #[cold]
    pub(super) fn alloc_passing(&self, need: &Need) -> Passed<Block> {
        self.waiters.pass(need, |need| self.take_now(need))
    }

    /// Gets in line, and everybody served who can be, this request too.
    pub(super) fn enter_line(&self, need: Need, waker: Waker) -> Turn {
        self.waited.lock().at(need.class).times += 1;
        self.stand_in_line(need, waker)
    }

    /// The same without counting it.
    pub(super) fn stand_in_line(&self, need: Need, waker: Waker) -> Turn {
        let (since, class) = (Instant::now(), need.class);
        let entered = self.waiters.enter(need, waker);
        if let Some(round) = entered.unsettled {
            self.call_back();
            self.waiters.settle(round);
        }
        self.wake_waiters();
        if self.waiters.any() {
            self.grower.refused(need.len);
        }
        Turn { ticket: entered.ticket, since, class }
    }

    /// Ends a turn: for the books.
    pub(super) fn end(&self, turn: &Turn) -> Duration {
        let stood = turn.since.elapsed();
        let mut waited = self.waited.lock();
        let counts = waited.at(turn.class);
        counts.time += stood;
        counts.longest = counts.longest.max(stood);
        stood
    }

    /// Leaves the line: with the block, if one was assigned by now, or with how many were ahead.
    pub(super) fn leave_line(&self, turn: &Turn) -> Result<Block, usize> {
        let left = self.waiters.leave(turn.ticket);
        // Those behind may have waited for this one alone.
        self.wake_waiters();
        left
    }

    /// Leaves the line and gives on what was assigned.
    pub(super) fn quit(&self, turn: &Turn) {
        if let Ok((entry, _)) = self.leave_line(turn) {
            self.stir();
            // The caller has a handle, so this is not the last block of a pool that ends.
            let given = self.slabs.give(std::iter::once(entry.ptr));
            debug_assert_eq!(given, Given::More);
            self.wake_waiters();
        }
    }
}
