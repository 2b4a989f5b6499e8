//! What of a builder bears on arenas that come and go: how much a pool may become, when it grows and when
//! it shrinks.

use std::time::Duration;

use super::Builder;
use crate::{error::BuildError, reach::Reach};

/// As the user asked.
#[derive(Clone, Copy, Default)]
pub(super) struct Wishes {
    pub(super) max_capacity: Option<usize>,
    low_watermark: Option<usize>,
    shrink_after: Option<Duration>,
    by_hand: bool,
}

/// As it will be done.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Growth {
    /// The lengths of the arenas that can come on top; none: the pool stays as it is.
    pub(crate) more: Vec<usize>,
    /// Bytes left below which an arena comes.
    pub(crate) watermark: usize,
    pub(crate) shrink_after: Duration,
    /// Whether no thread does it, but whoever says what time it is.
    pub(crate) by_hand: bool,
}

const SHRINK_AFTER: Duration = Duration::from_secs(300);

impl<R: Reach> Builder<R> {
    /// Sets how many bytes the pool may grow to; as many as the [`capacity`](Builder::capacity) unless set,
    /// and it then never grows.
    ///
    /// When less than the [`low_watermark`](Builder::low_watermark) is left, a thread of the pool's own maps,
    /// faults in and registers one arena more ([`arena_size`](Builder::arena_size) bytes, the last one what is
    /// left to the maximum); allocs and frees go on meanwhile. An alloc that finds nothing left does not wait
    /// for that: it is refused, as in a pool that cannot grow. Only address space is reserved beforehand, and
    /// the preflight judges the capacity alone: whether there is memory for more shows when it is needed
    /// ([`Event::GrowthFailed`](crate::Event::GrowthFailed)).
    pub fn max_capacity(mut self, bytes: usize) -> Self {
        self.growth.max_capacity = Some(bytes);
        self
    }

    /// Sets how many bytes shall be left at least, not counting those in buffers: below, the pool grows.
    /// Unless set: an eighth of the capacity. Should be more than what is allocated while one arena is
    /// brought up ([`ArenaInfo`](crate::ArenaInfo) tells how long that takes).
    pub fn low_watermark(mut self, bytes: usize) -> Self {
        self.growth.low_watermark = Some(bytes);
        self
    }

    /// Sets for how long an arena above the starting capacity must have been wholly free before it is given
    /// back; five minutes unless set. One goes only if at least twice the
    /// [`low_watermark`](Builder::low_watermark) stays free without it.
    pub fn shrink_after(mut self, time: Duration) -> Self {
        self.growth.shrink_after = Some(time);
        self
    }

    /// Leaves growing and shrinking to [`Pool::tick`](crate::Pool::tick): no thread is started. For tests.
    #[cfg(feature = "fault")]
    pub fn growth_by_hand(mut self) -> Self {
        self.growth.by_hand = true;
        self
    }
}

impl Wishes {
    /// Checks what can be checked before the first page is mapped. `more` has the arenas above the capacity.
    pub(super) fn plan(self, capacity: usize, more: Vec<usize>) -> Result<Growth, BuildError> {
        let max = more.iter().sum::<usize>() + capacity;
        let watermark = self.low_watermark.unwrap_or(capacity / 8);
        if self.low_watermark.is_some_and(|w| w >= max) {
            return Err(BuildError::Watermark { asked: watermark, max_capacity: max });
        }
        let shrink_after = self.shrink_after.unwrap_or(SHRINK_AFTER);
        Ok(Growth { more, watermark, shrink_after, by_hand: self.by_hand })
    }
}
