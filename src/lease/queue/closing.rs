//! Ending everything on a queue pair, which may be destroyed next.

use std::{mem, sync::atomic::Ordering::Relaxed};

use super::{
    Inner,
    completions::Awaited,
    windows::{Failure, Slot, Slots},
};
use crate::{
    lease::{
        end::{CHAIN, Window},
        error::LeaseError,
    },
    sys::limits,
};

impl Inner {
    /// Ends everything on this queue pair, for it may be destroyed next.
    pub(crate) fn close(&self) {
        // Also in a child that no fork handler saw.
        if self.is_foreign() || limits::process_id() != self.process {
            return;
        }
        self.closing.store(true, Relaxed);
        // From here on nobody else touches the queue pair.
        let mut open = self.open.write();
        if !mem::replace(&mut *open, false) {
            return;
        }
        let bound = |slots: &Slots, from: usize| {
            slots.list[from..].iter().position(|s| matches!(s, Slot::Bound(_))).map(|i| from + i)
        };
        let mut at = 0;
        loop {
            // The lock is not held while waiting; nobody puts windows in any more.
            let (mut numbers, mut windows) = (Vec::new(), Vec::new());
            {
                let mut slots = self.slots.lock();
                while let Some(i) = bound(&slots, at).filter(|_| windows.len() < CHAIN) {
                    if let Slot::Bound(w) = mem::replace(&mut slots.list[i], Slot::Ended(None)) {
                        numbers.push(i);
                        windows.push(w);
                    }
                    at = i + 1;
                }
            }
            if windows.is_empty() {
                break;
            }
            let failures = self.end_all(windows);
            let mut slots = self.slots.lock();
            for (i, failure) in numbers.into_iter().zip(failures) {
                if let Some(stuck) = failure
                    && matches!(slots.list[i], Slot::Ended(None))
                {
                    slots.list[i] = Slot::Ended(Some(stuck));
                }
            }
        }
        // Their requests may never complete now; without their windows they can do nothing.
        let left: Vec<_> = self.arrivals.lock().drain().collect();
        for (_, awaited) in left {
            if let Awaited::Nobody(window, buf) = awaited {
                self.ended(window, buf, Err(LeaseError::Closed));
            }
        }
    }

    /// Ends up to [`CHAIN`] windows; says for each whether, and why, it could not be ended.
    fn end_all(&self, windows: Vec<Window>) -> Vec<Option<(LeaseError, LeaseError)>> {
        let through = self.through();
        // Where somebody else polls, nobody may be left to pass completions on.
        let done = if self.routed() {
            Err(LeaseError::Closed)
        } else {
            self.run("invalidating memory windows", true, |wr_id| {
                // SAFETY: the caller holds `open` exclusively and has not returned, so the queue pair
                // exists. The windows were in slots, and so are bound, through this queue pair.
                unsafe { through.invalidate(wr_id, &windows) }
            })
        };
        let each = |window| match &done {
            Ok(()) => {
                self.invalidated.fetch_add(1, Relaxed);
                through.rest(window);
                None
            }
            Err(e) => match self.force(window, e.retold()) {
                Failure::Undone(_) => None,
                Failure::Stuck(first, second) => Some((first, second)),
            },
        };
        windows.into_iter().map(each).collect()
    }
}
