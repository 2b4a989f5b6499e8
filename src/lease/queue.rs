//! A queue pair that leases are bound to, and who may use it. What is bound through it is in `windows`, waiting
//! for completions in `completions`, the order in which all that ends in `closing`. Leaves the calls to `end.rs`
//! and the face of a single lease to `mod.rs`.
//!
//! **Who may use the queue pair.** Each call that may touch it holds `open` shared; closing holds it
//! exclusively, so that nothing touches it once `close` has returned, and its owner may destroy it.
//!
//! **Where a window is.** In its `Slot` while it is bound, so that closing finds all of them; a lease has
//! the slot's number. Closing ends them and says in the slot how that went.

mod closing;
mod completions;
mod windows;

#[cfg(any(feature = "rdma-sys", feature = "rdma-mummy-sys"))]
use std::ffi::c_void;
use std::{
    collections::HashMap,
    fmt,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use parking_lot::{Condvar, Mutex, RwLock, RwLockReadGuard};

pub(super) use self::windows::{Failure, keep_out};
use self::{
    completions::{Awaited, SEQUENCE},
    windows::{Slot, Slots},
};
pub use self::{
    completions::{Completions, Others},
    windows::leaked,
};
use super::{
    end::{End, Through},
    error::LeaseError,
};
use crate::{
    device::{Device, LeaseSupport},
    sys::{fork, limits},
    tokens::NO_TOKENS,
};

/// How leases use a queue pair. Change what differs from the default.
#[derive(Debug)]
#[non_exhaustive]
pub struct QpOptions {
    /// How completions get here; [`Completions::Polled`] unless set.
    pub completions: Completions,
    /// The upper 16 bits of the `wr_id`s of the leases' requests; 0x7f80 unless set, with which no token of a pool
    /// begins. Another one must not be that of a token, nor of a number of your own, that completes on the same queue.
    pub tag: u16,
    /// How long a call waits for a completion; ten seconds unless set.
    pub timeout: Duration,
}

impl Default for QpOptions {
    fn default() -> Self {
        Self {
            completions: Completions::default(),
            tag: NO_TOKENS,
            timeout: Duration::from_secs(10),
        }
    }
}

/// What leases on one queue pair came to.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct LeaseStats {
    /// Leases that are bound now.
    pub live: usize,
    /// Revocations that were posted by a dropped lease and have not completed.
    pub ending: usize,
    /// Leases that were posted.
    pub leased: u64,
    /// Requests that ended in error and that no call waited for: binds, whose keys never worked then, or
    /// revocations, which were then forced.
    pub failed: u64,
    /// Leases that were ended by invalidating their window.
    pub invalidated: u64,
    /// Leases that were ended by giving their window back, since it could not be invalidated.
    pub forced: u64,
    /// Leases that could not be ended at all, whose buffers are kept out of use for ever.
    pub leaked: u64,
    /// Windows that the device's PD has had allocated, for all its queue pairs.
    pub windows: u64,
    /// How many windows are bound to nothing and ready for the next lease.
    pub resting: usize,
}

/// A queue pair that buffers can be leased through. Dropping it ends all leases on it.
///
/// A lease is bound to one queue pair: its key is for the peer at the other end. **Order:** this value has
/// to go (or be [closed](LeaseQp::close)) before its queue pair is destroyed; what leases are alive then end
/// by that, and their buffers stay with whoever holds them. Pools, buffers and devices may go before or
/// after.
///
/// Calls may be made from several threads.
pub struct LeaseQp {
    pub(super) inner: Arc<Inner>,
}

pub(super) struct Inner {
    // Dropped first: what windows are left go before their PD.
    slots: Mutex<Slots>,
    arrivals: Mutex<HashMap<u64, Awaited>>,
    /// Told when something has arrived that is waited for and not polled for.
    arrived: Condvar,
    /// Held shared by whatever touches the queue pair; false once closed.
    open: RwLock<bool>,
    /// Set ahead of closing, so that nobody enters any more: recursive readers would keep the one that
    /// closes waiting for ever. Only a hint; `open` is what counts.
    closing: AtomicBool,
    end: End,
    completions: Completions,
    tag: u64,
    timeout: Duration,
    support: LeaseSupport,
    generation: u32,
    process: u32,
    next: AtomicU64,
    leased: AtomicU64,
    failed: AtomicU64,
    invalidated: AtomicU64,
    forced: AtomicU64,
    leaked: AtomicU64,
    device: Device,
}

impl LeaseQp {
    /// Leases on the software device, whose peers ([`SoftDevice::write`] and its siblings) come through
    /// no queue pair.
    ///
    /// # Errors
    /// [`LeaseError::NoWindows`] if it is no software device.
    ///
    /// [`SoftDevice::write`]: crate::device::SoftDevice::write
    pub fn soft(device: &Device) -> Result<Self, LeaseError> {
        if device.as_soft().is_none() {
            let why = "it is not the software device".to_owned();
            return Err(LeaseError::NoWindows { device: device.info().name, why });
        }
        Self::new(device, End::Soft, QpOptions::default())
    }

    /// Leases on a queue pair that somebody else made, of any binding of libibverbs: reliably or
    /// unreliably connected, in the device's PD. It must permit what is leased (`qp_access_flags`), binding
    /// windows (`IBV_ACCESS_MW_BIND`) included, and its send queue needs room for one request a call,
    /// two for an exchange, and up to sixteen to close.
    ///
    /// The first queue pair on a device has [`Device::lease_support`] find out what its windows hold.
    ///
    /// # Errors
    /// [`LeaseError::QueuePair`] if it is null, of another type, or in another PD;
    /// [`LeaseError::NoWindows`].
    ///
    /// # Safety
    /// 1. `qp` is null, or an `ibv_qp *` of the libibverbs that this process has loaded.
    /// 2. It, and its send completion queue, exist until the result was dropped or closed.
    /// 3. Nobody else on this host posts requests that name the leases' keys.
    #[cfg(any(feature = "rdma-sys", feature = "rdma-mummy-sys"))]
    pub unsafe fn from_raw(
        device: &Device,
        qp: *mut c_void,
        options: QpOptions,
    ) -> Result<Self, LeaseError> {
        use crate::sys::window::QpPtr;

        let unfit = |problem: &str| LeaseError::QueuePair { problem: problem.to_owned() };
        let verbs = device.as_verbs().ok_or_else(|| LeaseError::NoWindows {
            device: device.info().name,
            why: "queue pairs belong to verbs devices".to_owned(),
        })?;
        let qp = QpPtr::from_raw(qp).ok_or_else(|| unfit("is null"))?;
        // SAFETY: not null, so it exists (1, 2).
        let (pd, fits, cq) = unsafe { (qp.pd(), qp.is_connected_type(), qp.send_cq()) };
        if pd != verbs.pd() {
            let name = device.info().name;
            return Err(unfit(&format!(
                "is in another protection domain than the pools on {name}"
            )));
        }
        if !fits {
            return Err(unfit("is neither reliably nor unreliably connected (RC, UC)"));
        }
        let cq = cq.ok_or_else(|| unfit("has no send completion queue"))?;
        Self::new(device, End::Verbs(qp, cq), options)
    }

    /// Leases to the requester of a pair: bound through its responder, written and read by its blocking
    /// calls. They end when the pair is stopped, reset or dropped.
    ///
    /// # Errors
    /// [`LeaseError::QueuePair`] if the pair is stopped, or in another PD; [`LeaseError::NoWindows`].
    #[cfg(all(feature = "loopback", any(feature = "rdma-sys", feature = "rdma-mummy-sys")))]
    pub fn of_pair(device: &Device, pair: &mut crate::loopback::Pair) -> Result<Self, LeaseError> {
        let problem = || LeaseError::QueuePair { problem: "was stopped by an error".to_owned() };
        let qp = pair.responder().ok_or_else(problem)?;
        // SAFETY: the pair keeps its queue pair until it is stopped, and has these leases closed before
        // that. Its responder posts to its send queue nothing at all, and polls none of its completions.
        let this = unsafe { Self::from_raw(device, qp.as_raw(), QpOptions::default()) }?;
        let inner = this.inner.clone();
        pair.before_stop(move || inner.close());
        Ok(this)
    }

    fn new(device: &Device, end: End, options: QpOptions) -> Result<Self, LeaseError> {
        let support = device.lease_support();
        if !support.windows {
            let why = support.why.unwrap_or_else(|| "it has no memory windows".to_owned());
            return Err(LeaseError::NoWindows { device: device.info().name, why });
        }
        let inner = Inner {
            slots: Mutex::default(),
            arrivals: Mutex::default(),
            arrived: Condvar::new(),
            open: RwLock::new(true),
            closing: AtomicBool::new(false),
            end,
            completions: options.completions,
            tag: u64::from(options.tag) << 48,
            timeout: options.timeout,
            support,
            generation: fork::generation(),
            process: limits::process_id(),
            next: AtomicU64::new(1),
            leased: AtomicU64::new(0),
            failed: AtomicU64::new(0),
            invalidated: AtomicU64::new(0),
            forced: AtomicU64::new(0),
            leaked: AtomicU64::new(0),
            device: device.clone(),
        };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// What leases on this device can be relied on for.
    pub fn support(&self) -> &LeaseSupport {
        &self.inner.support
    }

    /// Has `n` windows ready, so that the next `n` leases allocate none.
    ///
    /// # Errors
    /// [`LeaseError::Call`], when the device has no more; those that were to be had are ready.
    pub fn reserve(&self, n: usize) -> Result<(), LeaseError> {
        self.inner.own_process()?;
        let through = self.inner.through();
        let mut windows = Vec::new();
        let mut failed = Ok(());
        while through.windows().1 + windows.len() < n {
            match through.take() {
                Ok(window) => windows.push(window),
                Err(e) => {
                    failed = Err(e);
                    break;
                }
            }
        }
        windows.into_iter().for_each(|w| through.rest(w));
        failed
    }

    /// Whether a completion with this `wr_id` is of a lease's request.
    pub fn is_mine(&self, wr_id: u64) -> bool {
        wr_id & !SEQUENCE == self.inner.tag
    }

    /// Takes a completion that somebody else polled ([`Completions::Routed`]): its `wr_id`, `status` and
    /// `vendor_err`. False if it [is not](LeaseQp::is_mine) a lease's.
    ///
    /// # Safety
    /// They are those of a completion of this queue pair's send queue, passed on once: by a made-up success a
    /// buffer would go back while its peer can still write to it.
    pub unsafe fn complete(&self, wr_id: u64, status: u32, vendor_err: u32) -> bool {
        self.inner.note(wr_id, status, vendor_err)
    }

    /// Ends all leases on this queue pair, as before it is destroyed; nothing of this value touches it
    /// afterwards, and dropping does the same. Their holders keep the buffers; a lease that could not be
    /// ended says so when it is revoked. Waits for calls of other threads to return.
    pub fn close(&self) {
        self.inner.close();
    }

    /// Counts.
    pub fn stats(&self) -> LeaseStats {
        let inner = &*self.inner;
        let (windows, resting) = inner.through().windows();
        let slots = inner.slots.lock();
        let live = slots.list.iter().filter(|s| matches!(s, Slot::Bound(_))).count();
        drop(slots);
        let arrivals = inner.arrivals.lock();
        let ending = arrivals.values().filter(|a| matches!(a, Awaited::Nobody(..))).count();
        LeaseStats {
            live,
            ending,
            leased: inner.leased.load(Relaxed),
            failed: inner.failed.load(Relaxed),
            invalidated: inner.invalidated.load(Relaxed),
            forced: inner.forced.load(Relaxed),
            leaked: inner.leaked.load(Relaxed),
            windows,
            resting,
        }
    }
}

impl Drop for LeaseQp {
    fn drop(&mut self) {
        self.inner.close();
    }
}

impl fmt::Debug for LeaseQp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LeaseQp")
            .field("device", &self.inner.device)
            .field("completions", &self.inner.completions)
            .finish_non_exhaustive()
    }
}

impl Inner {
    pub(super) fn through(&self) -> Through<'_> {
        Through { device: &self.device, end: &self.end }
    }

    pub(super) fn device_name(&self) -> String {
        self.device.info().name
    }

    pub(super) fn held(&self) -> &LeaseSupport {
        &self.support
    }

    pub(super) fn routed(&self) -> bool {
        matches!(self.completions, Completions::Routed)
    }

    pub(super) fn own_process(&self) -> Result<(), LeaseError> {
        if self.is_foreign() { Err(LeaseError::ForeignProcess) } else { Ok(()) }
    }

    /// Whether this is a forked child of the process that has the queue pair.
    pub(super) fn is_foreign(&self) -> bool {
        fork::generation() != self.generation
    }

    /// Keeps the queue pair from being closed meanwhile. Recursive, for a callback of the user's may drop
    /// a lease while one of these is held.
    pub(super) fn enter(&self) -> Result<RwLockReadGuard<'_, bool>, LeaseError> {
        self.own_process()?;
        if self.closing.load(Relaxed) {
            return Err(LeaseError::Closed);
        }
        let open = self.open.read_recursive();
        if *open { Ok(open) } else { Err(LeaseError::Closed) }
    }
}
