//! A queue pair that leases are bound to: waiting for its completions, what is bound through it, and the
//! order in which all that ends. Leaves the calls to `end.rs` and the face of a single lease to `mod.rs`.
//!
//! **Who may use the queue pair.** Each call that may touch it holds `open` shared; closing holds it
//! exclusively, so that nothing touches it once `close` has returned, and its owner may destroy it.
//!
//! **Where a window is.** In its `Slot` while it is bound, so that closing finds all of them; a lease has
//! the slot's number. Closing ends them and says in the slot how that went.

mod completions;

use std::{
    collections::HashMap,
    ffi::c_void,
    fmt, hint, mem, slice,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    thread,
    time::{Duration, Instant},
};

use parking_lot::{Condvar, Mutex, RwLock, RwLockReadGuard};

use super::{
    end::{CHAIN, End, Sent, Target, Through, Window},
    error::LeaseError,
};
use crate::{
    access::Access,
    buf::Buf,
    device::{Device, LeaseSupport},
    sys::{fork, limits},
};

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
    /// Somebody else polls, and passes the completions for which [`LeaseQp::is_mine`] on to
    /// [`LeaseQp::complete`]. Binding then does not wait, and what is to end is invalidated in the
    /// background, unless [`Lease::revoke`](super::Lease::revoke) or
    /// [`exchange`](super::Lease::exchange) waits for it, on another thread than
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

/// How leases use a queue pair. Change what differs from the default.
#[derive(Debug)]
#[non_exhaustive]
pub struct QpOptions {
    /// How completions get here; [`Completions::Polled`] unless set.
    pub completions: Completions,
    /// The upper 16 bits of the `wr_id`s of the leases' requests; 0x1ea5 unless set.
    pub tag: u16,
    /// How long a call waits for a completion; ten seconds unless set.
    pub timeout: Duration,
}

impl Default for QpOptions {
    fn default() -> Self {
        Self { completions: Completions::default(), tag: 0x1ea5, timeout: Duration::from_secs(10) }
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

#[derive(Default)]
struct Slots {
    list: Vec<Slot>,
    free: Vec<u32>,
}

enum Slot {
    Free,
    Bound(Window),
    /// Ended when the queue pair was closed; why, if that failed.
    Ended(Option<(LeaseError, LeaseError)>),
}

/// What is to happen at a completion.
enum Awaited {
    /// A call waits for it.
    Call,
    /// It has come, with its status and vendor code.
    Come(u32, u32),
    /// A revocation that nobody waits for: the buffer goes back, the window rests.
    Nobody(Window, Buf),
}

/// How it stands after a failure.
pub(super) enum Failure {
    /// Nothing is bound.
    Undone(LeaseError),
    /// It is bound, as far as anybody knows: invalidating failed, and then giving the window back.
    Stuck(LeaseError, LeaseError),
}

const SEQUENCE: u64 = (1 << 48) - 1;
/// How often a wait looks before it gives the processor away between looks.
const LOOKS: u32 = 2;
/// How often it then gives it away before it looks at the clock, too.
const UNTIMED: u32 = 16;
/// Of how many binds that nobody waits for one reports.
const REPORT_EVERY: u64 = 16;
const BINDING: &str = "binding a memory window";
const INVALIDATING: &str = "invalidating a memory window";

/// They are kept here, so that what is lost stays in sight, of leak checkers too.
static KEPT_OUT: Mutex<Vec<Buf>> = Mutex::new(Vec::new());

/// Buffers of this process that are kept out of use for ever, because a device would neither invalidate
/// their lease nor take its window back. Anything but 0 is a driver's fault worth reporting.
pub fn leaked() -> u64 {
    KEPT_OUT.lock().len() as u64
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

// --- binding and ending ----------------------------------------------------------------------------

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

    /// Binds a window to a buffer.
    ///
    /// The caller has [entered](Inner::enter).
    pub(super) fn bind(
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
    pub(super) fn rebind(
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
    pub(super) fn end(&self, slot: u32) -> Result<(), Failure> {
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
    pub(super) fn end_later(&self, slot: u32, buf: Buf) {
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
    fn ended(&self, window: Window, buf: Buf, how: Result<(), LeaseError>) {
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
    fn force(&self, mut window: Window, first: LeaseError) -> Failure {
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
    pub(super) fn put_in(&self, window: Window) -> u32 {
        let mut slots = self.slots.lock();
        if let Some(slot) = slots.free.pop() {
            slots.list[slot as usize] = Slot::Bound(window);
            return slot;
        }
        slots.list.push(Slot::Bound(window));
        slots.list.len() as u32 - 1
    }

    /// Takes the window out of a slot, and frees that; `None` if it was ended by closing.
    pub(super) fn take_out(&self, slot: u32) -> Result<Option<Window>, Failure> {
        let mut slots = self.slots.lock();
        slots.free.push(slot);
        match mem::replace(&mut slots.list[slot as usize], Slot::Free) {
            Slot::Bound(window) => Ok(Some(window)),
            Slot::Ended(None) | Slot::Free => Ok(None),
            Slot::Ended(Some((first, second))) => Err(Failure::Stuck(first, second)),
        }
    }

    /// Whether a slot's window is bound still.
    pub(super) fn is_bound(&self, slot: u32) -> bool {
        matches!(self.slots.lock().list[slot as usize], Slot::Bound(_))
    }
}

/// Keeps a buffer out of use for ever: a peer may still reach it. Its pool counts it as live, and so never
/// deregisters its arena.
pub(super) fn keep_out<R>(buf: Buf<R>) {
    KEPT_OUT.lock().push(buf.reached());
}

// --- closing ---------------------------------------------------------------------------------------

impl Inner {
    /// Ends everything on this queue pair, for it may be destroyed next.
    pub(super) fn close(&self) {
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
