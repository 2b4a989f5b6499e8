//! What is bound through a queue pair: binding, exchanging and ending it, and where each window is meanwhile.
//! Waiting is `completions`' business, and ending all of it `closing`'s.

use std::{mem, slice, sync::atomic::Ordering::Relaxed};

use parking_lot::Mutex;

use super::{
    Inner,
    completions::{Awaited, INVALIDATING},
};
use crate::{
    access::Access,
    buf::Buf,
    lease::{
        end::{Sent, Target, Window},
        error::LeaseError,
    },
};

/// Of how many binds that nobody waits for one reports.
const REPORT_EVERY: u64 = 16;
const BINDING: &str = "binding a memory window";

/// They are kept here, so that what is lost stays in sight, of leak checkers too.
static KEPT_OUT: Mutex<Vec<Buf>> = Mutex::new(Vec::new());

/// Buffers of this process that are kept out of use for ever, because a device would neither invalidate
/// their lease nor take its window back. Anything but 0 is a driver's fault worth reporting.
pub fn leaked() -> u64 {
    KEPT_OUT.lock().len() as u64
}

#[derive(Default)]
pub(super) struct Slots {
    pub(super) list: Vec<Slot>,
    pub(super) free: Vec<u32>,
}

pub(super) enum Slot {
    Free,
    Bound(Window),
    /// Ended when the queue pair was closed; why, if that failed.
    Ended(Option<(LeaseError, LeaseError)>),
}

/// How it stands after a failure.
pub(crate) enum Failure {
    /// Nothing is bound.
    Undone(LeaseError),
    /// It is bound, as far as anybody knows: invalidating failed, and then giving the window back.
    Stuck(LeaseError, LeaseError),
}

impl Inner {
    /// Binds a window to a buffer.
    ///
    /// The caller has [entered](Inner::enter).
    pub(crate) fn bind(
        &self,
        target: &Target,
        rights: Access,
        wait: bool,
    ) -> Result<Window, Failure> {
        let through = self.through();
        let mut window = through.take().map_err(Failure::Undone)?;
        let n = self.leased.fetch_add(1, Relaxed);
        // A send queue gets room again by what is reported.
        let report = wait || n.is_multiple_of(REPORT_EVERY);
        let done = self.run(BINDING, wait, |wr_id| {
            // SAFETY: the caller has entered, so the queue pair is not closed, and exists. The target's
            // region is registered while the lease has its buffer, which it has until the window is
            // unbound, or for ever. A window that was taken is bound to nothing.
            unsafe { through.bind(wr_id, &mut window, target, rights, report) }
        });
        match done {
            Ok(()) => {
                if report && !wait && !self.routed() {
                    // What failed shows in the counts, and to whoever waits next.
                    let _ = self.poll();
                }
                Ok(window)
            }
            // Whatever became of the request: without its window it can do nothing.
            Err(e) => {
                self.leased.fetch_sub(1, Relaxed);
                Err(self.force(window, e))
            }
        }
    }

    /// Binds a window that is bound to one buffer to another.
    ///
    /// The caller has [entered](Inner::enter).
    pub(crate) fn rebind(
        &self,
        mut window: Window,
        target: &Target,
        rights: Access,
    ) -> Result<Window, Failure> {
        let through = self.through();
        let done = self.run("exchanging what a memory window is bound to", true, |wr_id| {
            // SAFETY: as in `bind`; the window came from a lease, and so is bound, through this queue
            // pair.
            unsafe { through.rebind(wr_id, &mut window, target, rights) }
        });
        match done {
            Ok(()) => {
                self.invalidated.fetch_add(1, Relaxed);
                self.leased.fetch_add(1, Relaxed);
                Ok(window)
            }
            Err(e) => Err(self.force(window, e)),
        }
    }

    /// Ends what is bound in a slot, and frees the slot.
    pub(crate) fn end(&self, slot: u32) -> Result<(), Failure> {
        self.own_process().map_err(Failure::Undone)?;
        let _open = self.open.read_recursive();
        let window = self.take_out(slot)?;
        let Some(window) = window else { return Ok(()) };
        let through = self.through();
        let done = self.run(INVALIDATING, true, |wr_id| {
            // SAFETY: `open` is held, and closing leaves no window in a slot, so it is not closed and the
            // queue pair exists. The window was in a slot, and so is bound, through this queue pair.
            unsafe { through.invalidate(wr_id, slice::from_ref(&window)) }
        });
        match done {
            Ok(()) => {
                self.invalidated.fetch_add(1, Relaxed);
                through.rest(window);
                Ok(())
            }
            Err(e) => match self.force(window, e) {
                Failure::Undone(_) => Ok(()),
                stuck => Err(stuck),
            },
        }
    }

    /// Has what is bound in a slot invalidated, and takes the buffer until that is done. Waits for
    /// nothing.
    pub(crate) fn end_later(&self, slot: u32, buf: Buf) {
        let _open = self.open.read_recursive();
        let window = match self.take_out(slot) {
            Ok(Some(window)) => window,
            Ok(None) => return,
            Err(_) => return keep_out(buf),
        };
        let through = self.through();
        let wr_id = self.new_wr_id();
        // Held until the entry is there: its completion may come at once.
        let mut arrivals = self.arrivals.lock();
        // SAFETY: as in `end`.
        match unsafe { through.invalidate(wr_id, slice::from_ref(&window)) } {
            Ok(Sent::Underway) => {
                arrivals.insert(wr_id, Awaited::Nobody(window, buf));
            }
            Ok(Sent::Done) => {
                drop(arrivals);
                self.ended(window, buf, Ok(()));
            }
            Err(e) => {
                drop(arrivals);
                self.ended(window, buf, Err(e));
            }
        }
    }

    /// A revocation that nobody waited for has ended.
    pub(super) fn ended(&self, window: Window, buf: Buf, how: Result<(), LeaseError>) {
        match how {
            Ok(()) => {
                self.invalidated.fetch_add(1, Relaxed);
                self.through().rest(window);
            }
            Err(e) => {
                if let Failure::Stuck(..) = self.force(window, e) {
                    keep_out(buf);
                }
            }
        }
    }

    /// Unbinds a window that could not be invalidated, by giving it back.
    pub(super) fn force(&self, mut window: Window, first: LeaseError) -> Failure {
        match self.through().dealloc(&mut window) {
            Ok(()) => {
                self.forced.fetch_add(1, Relaxed);
                Failure::Undone(first)
            }
            Err(second) => {
                self.leaked.fetch_add(1, Relaxed);
                // Its PD stays as long.
                let _ = mem::ManuallyDrop::new(window);
                Failure::Stuck(first, second)
            }
        }
    }

    /// Puts a bound window into a slot.
    pub(crate) fn put_in(&self, window: Window) -> u32 {
        let mut slots = self.slots.lock();
        if let Some(slot) = slots.free.pop() {
            slots.list[slot as usize] = Slot::Bound(window);
            return slot;
        }
        slots.list.push(Slot::Bound(window));
        slots.list.len() as u32 - 1
    }

    /// Takes the window out of a slot, and frees that; `None` if it was ended by closing.
    pub(crate) fn take_out(&self, slot: u32) -> Result<Option<Window>, Failure> {
        let mut slots = self.slots.lock();
        slots.free.push(slot);
        match mem::replace(&mut slots.list[slot as usize], Slot::Free) {
            Slot::Bound(window) => Ok(Some(window)),
            Slot::Ended(None) | Slot::Free => Ok(None),
            Slot::Ended(Some((first, second))) => Err(Failure::Stuck(first, second)),
        }
    }

    /// Whether a slot's window is bound still.
    pub(crate) fn is_bound(&self, slot: u32) -> bool {
        matches!(self.slots.lock().list[slot as usize], Slot::Bound(_))
    }
}

/// Keeps a buffer out of use for ever: a peer may still reach it. Its pool counts it as live, and so never
/// deregisters its arena.
pub(crate) fn keep_out<R>(buf: Buf<R>) {
    KEPT_OUT.lock().push(buf.reached());
}
