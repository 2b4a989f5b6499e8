//! What comes back of binds and invalidations: polled here or handed on by whoever polls, and who waits for it.

use std::{ffi::c_void, fmt, hint, sync::atomic::Ordering::Relaxed, thread, time::Instant};

use super::Inner;
use crate::{
    buf::Buf,
    lease::{
        end::{End, Sent, Window},
        error::LeaseError,
    },
};

pub(super) const SEQUENCE: u64 = (1 << 48) - 1;
/// How often a wait looks before it gives the processor away between looks.
const LOOKS: u32 = 2;
/// How often it then gives it away before it looks at the clock, too.
const UNTIMED: u32 = 16;
pub(super) const INVALIDATING: &str = "invalidating a memory window";

/// Takes completions that are not the leases', each an `ibv_wc *` that is valid during the call.
pub type Others = Box<dyn Fn(*const c_void) + Send + Sync>;

/// How the completions of bind and invalidate requests get here.
#[non_exhaustive]
#[derive(Default)]
pub enum Completions {
    /// Lease calls poll the queue pair's send completion queue themselves, and nobody else polls it
    /// while they run. Completions of other requests that they meet are lost: for a queue of the leases'
    /// own.
    #[default]
    Polled,
    /// As [`Polled`](Completions::Polled), and completions of other requests are handed on.
    PolledFor(Others),
    /// Somebody else polls, and passes the completions for which [`is_mine`](crate::LeaseQp::is_mine) on to
    /// [`complete`](crate::LeaseQp::complete). Binding then does not wait, and what is to end is invalidated in the
    /// background, unless [`Lease::revoke`](crate::Lease::revoke) or
    /// [`exchange`](crate::Lease::exchange) waits for it, on another thread than
    /// the one that polls.
    Routed,
}

impl fmt::Debug for Completions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Polled => "Polled",
            Self::PolledFor(_) => "PolledFor(..)",
            Self::Routed => "Routed",
        })
    }
}

/// What is to happen at a completion.
pub(super) enum Awaited {
    /// A call waits for it.
    Call,
    /// It has come, with its status and vendor code.
    Come(u32, u32),
    /// A revocation that nobody waits for: the buffer goes back, the window rests.
    Nobody(Window, Buf),
}

impl Inner {
    pub(super) fn new_wr_id(&self) -> u64 {
        self.tag | (self.next.fetch_add(1, Relaxed) & SEQUENCE)
    }

    /// Posts, and waits for the completion if asked to and there is one to come.
    pub(super) fn run(
        &self,
        operation: &'static str,
        wait: bool,
        post: impl FnOnce(u64) -> Result<Sent, LeaseError>,
    ) -> Result<(), LeaseError> {
        let wr_id = self.new_wr_id();
        if wait {
            self.arrivals.lock().insert(wr_id, Awaited::Call);
        }
        match post(wr_id) {
            Ok(Sent::Underway) if wait => self.wait(wr_id, operation),
            done => {
                if wait {
                    self.arrivals.lock().remove(&wr_id);
                }
                done.map(drop)
            }
        }
    }

    pub(super) fn wait(&self, wr_id: u64, operation: &'static str) -> Result<(), LeaseError> {
        // Most waits end before the clock need be read, which is slow on some machines.
        let mut deadline = None;
        let (mut looks, mut late) = (0_u32, false);
        loop {
            let mut arrivals = self.arrivals.lock();
            if self.routed() && matches!(arrivals.get(&wr_id), Some(Awaited::Call)) {
                let until = *deadline.get_or_insert_with(|| Instant::now() + self.timeout);
                late = self.arrived.wait_until(&mut arrivals, until).timed_out();
            }
            let come = match arrivals.get(&wr_id) {
                Some(&Awaited::Come(status, vendor_err)) => {
                    Some(judge(operation, status, vendor_err))
                }
                _ if late => Some(Err(LeaseError::TimedOut { operation, after: self.timeout })),
                _ => None,
            };
            if let Some(come) = come {
                arrivals.remove(&wr_id);
                return come;
            }
            drop(arrivals);
            if self.routed() {
                continue;
            }
            match self.poll() {
                Ok(0) => {
                    looks = looks.saturating_add(1);
                    if looks < LOOKS {
                        hint::spin_loop();
                        continue;
                    }
                    // A soft device needs the processor to make progress.
                    thread::yield_now();
                    if looks > LOOKS + UNTIMED {
                        let until = *deadline.get_or_insert_with(|| Instant::now() + self.timeout);
                        late = Instant::now() > until;
                    }
                }
                Ok(_) => {}
                Err(e) => {
                    self.arrivals.lock().remove(&wr_id);
                    return Err(e);
                }
            }
        }
    }

    /// Takes in what has arrived; says how many.
    pub(super) fn poll(&self) -> Result<usize, LeaseError> {
        match self.end {
            End::Soft => Ok(0),
            #[cfg(any(feature = "rdma-sys", feature = "rdma-mummy-sys"))]
            End::Verbs(_, cq) => {
                // SAFETY: whoever waits has entered, or is closing, so the queue pair is not closed, and
                // its completion queue exists (`from_raw`'s contract). No lock is held, so that the
                // callback may do as it likes.
                let polled = unsafe {
                    cq.poll(|arrival| {
                        let mine = self.note(arrival.wr_id, arrival.status, arrival.vendor_err);
                        if let (false, Completions::PolledFor(others)) = (mine, &self.completions) {
                            others(arrival.raw());
                        }
                    })
                };
                polled.map_err(|e| LeaseError::Call {
                    call: e.call,
                    device: self.device_name(),
                    source: e.source,
                })
            }
        }
    }

    /// Enters a completion; false if it is not a lease's.
    pub(super) fn note(&self, wr_id: u64, status: u32, vendor_err: u32) -> bool {
        if wr_id & !SEQUENCE != self.tag {
            return false;
        }
        let mut arrivals = self.arrivals.lock();
        match arrivals.get_mut(&wr_id) {
            Some(awaited @ Awaited::Call) => {
                *awaited = Awaited::Come(status, vendor_err);
                if self.routed() {
                    self.arrived.notify_all();
                }
            }
            Some(Awaited::Nobody(..)) => {
                let Some(Awaited::Nobody(window, buf)) = arrivals.remove(&wr_id) else {
                    return true;
                };
                drop(arrivals);
                if status != 0 {
                    self.failed.fetch_add(1, Relaxed);
                }
                let how = judge(INVALIDATING, status, vendor_err);
                self.ended(window, buf, how);
            }
            // Of a chain each request that fails reports; the first says why.
            Some(Awaited::Come(..)) => {}
            None if status != 0 => drop(self.failed.fetch_add(1, Relaxed)),
            None => {}
        }
        true
    }
}

fn judge(operation: &'static str, status: u32, vendor_err: u32) -> Result<(), LeaseError> {
    if status == 0 {
        return Ok(());
    }
    #[cfg(any(feature = "rdma-sys", feature = "rdma-mummy-sys"))]
    let text = crate::sys::window::status_text(status);
    #[cfg(not(any(feature = "rdma-sys", feature = "rdma-mummy-sys")))]
    let text = "unknown";
    Err(LeaseError::Completion { operation, status, text, vendor_err })
}
