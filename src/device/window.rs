//! What a device's memory windows hold, in words; and the windows of one PD that are bound to nothing.
//! Leaves binding them, and finding out what they hold, to the leases.

use std::fmt;

bitflags::bitflags! {
    /// What a lease can be relied on for, if the device's windows hold it.
    #[derive(Clone, Copy, Default, PartialEq, Eq, Hash, Debug)]
    pub struct Guarantees: u8 {
        /// Once revoked, every access through the lease's key is refused.
        const REVOCATION = 1;
        /// Bytes beside the leased ones are out of reach.
        const RANGE = 1 << 1;
        /// What the lease does not permit is refused, even if the arena permits it.
        const RIGHTS = 1 << 2;
        /// The key works through the lease's queue pair alone.
        const QUEUE_PAIR = 1 << 3;
        /// Once a revocation has returned, nothing that was under way by then touches the bytes either.
        ///
        /// This is not found out by trying, for it would show once in a thousand times. The software device
        /// waits for what is under way. NICs are taken to, since their specification has an invalidation
        /// complete only when no access can follow. The kernel's soft RoCE does not: `check_rkey` in its
        /// `rxe_resp.c` lets go of the window before the packet is copied, so that the rest of one packet,
        /// an MTU at most, can still arrive.
        const DRAINED = 1 << 4;
    }
}

impl fmt::Display for Guarantees {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_empty() {
            return f.write_str("nothing");
        }
        let words = [
            (Self::REVOCATION, "revocation"),
            (Self::RANGE, "range"),
            (Self::RIGHTS, "rights"),
            (Self::QUEUE_PAIR, "queue pair"),
            (Self::DRAINED, "drained"),
        ];
        let said: Vec<_> = words.iter().filter(|(g, _)| self.contains(*g)).map(|w| w.1).collect();
        f.write_str(&said.join(", "))
    }
}

/// What the memory windows of a device hold, as found by trying (but for [`Guarantees::DRAINED`]).
///
/// [`Display`](fmt::Display) gives one line.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct LeaseSupport {
    /// Whether buffers can be leased at all: a window of type 2 was bound, and a peer wrote through it.
    /// Unknown, and taken to be so, where the device has such windows and trying was not possible.
    pub windows: bool,
    /// What was seen to hold.
    pub held: Guarantees,
    /// What was seen not to hold. What is in neither could not be tried.
    pub lacking: Guarantees,
    /// Why there are no windows, or not everything could be tried.
    pub why: Option<String>,
}

impl LeaseSupport {
    /// No windows, and why.
    pub(crate) fn none(why: impl Into<String>) -> Self {
        let (held, lacking) = (Guarantees::empty(), Guarantees::empty());
        Self { windows: false, held, lacking, why: Some(why.into()) }
    }

    /// What is neither known to hold nor known not to.
    pub fn untried(&self) -> Guarantees {
        Guarantees::all() - self.held - self.lacking
    }
}

impl fmt::Display for LeaseSupport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.windows {
            f.write_str("no leases")?;
        } else {
            write!(f, "held: {}", self.held)?;
            for (label, what) in [("not held", self.lacking), ("not tried", self.untried())] {
                if !what.is_empty() {
                    write!(f, "; {label}: {what}")?;
                }
            }
        }
        match &self.why {
            Some(why) => write!(f, " ({why})"),
            None => Ok(()),
        }
    }
}

#[cfg(any(feature = "rdma-sys", feature = "rdma-mummy-sys"))]
pub(crate) use self::pool::WindowPool;

#[cfg(any(feature = "rdma-sys", feature = "rdma-mummy-sys"))]
mod pool {
    use std::{
        collections::VecDeque,
        sync::{
            Arc,
            atomic::{AtomicU64, Ordering::Relaxed},
        },
    };

    use parking_lot::Mutex;

    use crate::sys::{
        verbs::{CallError, Pd},
        window::Window,
    };

    /// Windows of one PD that are bound to nothing.
    ///
    /// First in, first out: a window's key has eight bits that change, so the longer it rests, the longer
    /// until a key comes back.
    #[derive(Default)]
    pub(crate) struct WindowPool {
        free: Mutex<VecDeque<Window>>,
        allocated: AtomicU64,
    }

    impl WindowPool {
        /// Takes the window that has rested longest; allocates one if there is none.
        pub(crate) fn take(&self, pd: &Arc<Pd>) -> Result<Window, CallError> {
            let rested = self.free.lock().pop_front();
            match rested {
                Some(window) => Ok(window),
                None => {
                    let window = Window::new(pd)?;
                    self.allocated.fetch_add(1, Relaxed);
                    Ok(window)
                }
            }
        }

        /// Puts a window back that is bound to nothing.
        pub(crate) fn give(&self, window: Window) {
            self.free.lock().push_back(window);
        }

        /// How many lie here.
        pub(crate) fn len(&self) -> usize {
            self.free.lock().len()
        }

        /// How many were ever allocated.
        pub(crate) fn allocated(&self) -> u64 {
            self.allocated.load(Relaxed)
        }
    }
}
