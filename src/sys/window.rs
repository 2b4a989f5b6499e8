//! Type-2 memory windows, as owners, and the work requests that bind and invalidate them; and queue
//! pairs that somebody else made, to post those on. Leaves waiting, pooling and what a failure means to
//! the layers above.
#![allow(clippy::disallowed_methods)]

use std::{
    ffi::{c_int, c_void},
    mem, process,
    ptr::{self, NonNull},
    sync::Arc,
};

use super::verbs::{CallError, MrPtr, Pd, check, check_ptr, ffi, status_name};
use crate::access::{Access, RKey};

/// A memory window of type 2. Keeps its protection domain. Given back when dropped, which unbinds it.
pub(crate) struct Window {
    /// `None` once given back.
    raw: Option<NonNull<ffi::ibv_mw>>,
    pd: Arc<Pd>,
    process: u32,
}

// SAFETY: a handle for thread-safe calls, not tied to the thread that made it (see `Context`).
unsafe impl Send for Window {}
// SAFETY: as above; what is written (the key that libibverbs keeps) takes `&mut`.
unsafe impl Sync for Window {}

impl Window {
    /// Allocates one, bound to nothing.
    pub(crate) fn new(pd: &Arc<Pd>) -> Result<Self, CallError> {
        const CALL: &str = "ibv_alloc_mw";
        // SAFETY: the PD is allocated, and `Self` keeps it so. A provider without windows is told by
        // the wrapper, with errno.
        let raw = unsafe { ffi::ibv_alloc_mw(pd.as_ptr(), ffi::ibv_mw_type::IBV_MW_TYPE_2) };
        #[cfg(not(feature = "rdma-mummy-sys"))]
        let raw = raw.unwrap_or(ptr::null_mut());
        let raw = check_ptr(CALL, raw)?;
        Ok(Self { raw: Some(raw), pd: pd.clone(), process: process::id() })
    }

    /// The key that it has now: once bound, the one that peers use.
    pub(crate) fn rkey(&self) -> RKey {
        // SAFETY: not given back yet, so a window that libibverbs allocated; plain memory of its own.
        RKey::new(self.raw.map_or(0, |raw| unsafe { (*raw.as_ptr()).rkey }))
    }

    /// The key that the next bind gives it: the index in the upper 24 bits stays, the lower eight, which
    /// are the consumer's to choose, count on.
    pub(crate) fn next_rkey(&self) -> RKey {
        let now = self.rkey().get();
        RKey::new((now & !0xff) | (now.wrapping_add(1) & 0xff))
    }

    /// Gives it back, which unbinds it whatever state its queue pair is in (ibv_alloc_mw(3)). After an
    /// error it is as it was. In a forked child always an error (EPERM): it is the parent's.
    pub(crate) fn dealloc(&mut self) -> Result<(), CallError> {
        const CALL: &str = "ibv_dealloc_mw";
        let Some(raw) = self.raw else { return Ok(()) };
        if self.process != process::id() {
            let source = std::io::Error::from_raw_os_error(libc::EPERM);
            return Err(CallError { call: CALL, source });
        }
        // SAFETY: allocated in this process and not given back (it is taken out below once it is), and
        // its PD is alive through `self.pd`.
        check(CALL, unsafe { ffi::ibv_dealloc_mw(raw.as_ptr()) })?;
        self.raw = None;
        Ok(())
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        // Nobody is left to hear of a failure; whoever has to know calls `dealloc` first.
        let _ = self.dealloc();
        let _ = &self.pd;
    }
}

/// One work request on a window.
pub(crate) enum Step<'a> {
    /// Binds a window to a part of a region, under [`Window::next_rkey`].
    Bind {
        window: &'a mut Window,
        region: MrPtr,
        /// As on the wire.
        addr: u64,
        len: u64,
        /// What peers may do: remote rights alone.
        rights: Access,
    },
    /// Invalidates the window that has this key.
    Invalidate(RKey),
}

/// How many steps go into one post at most.
pub(crate) const CHAIN: usize = 16;

/// A queue pair that somebody else owns.
#[derive(Clone, Copy)]
pub(crate) struct QpPtr(NonNull<ffi::ibv_qp>);

/// A completion queue that somebody else owns.
#[derive(Clone, Copy)]
pub(crate) struct CqPtr(NonNull<ffi::ibv_cq>);

// SAFETY: addresses; all that uses them is unsafe, and the calls behind it are thread-safe.
unsafe impl Send for QpPtr {}
// SAFETY: as above.
unsafe impl Sync for QpPtr {}
// SAFETY: as above.
unsafe impl Send for CqPtr {}
// SAFETY: as above.
unsafe impl Sync for CqPtr {}

impl QpPtr {
    pub(super) const fn new(raw: NonNull<ffi::ibv_qp>) -> Self {
        Self(raw)
    }

    /// Takes an `ibv_qp *` of any binding; `None` if it is null.
    pub(crate) fn from_raw(raw: *mut c_void) -> Option<Self> {
        NonNull::new(raw.cast()).map(Self)
    }

    /// The `ibv_qp *`.
    #[cfg(feature = "loopback")]
    pub(crate) fn as_raw(self) -> *mut c_void {
        self.0.as_ptr().cast()
    }

    /// Its PD, as an address to compare.
    ///
    /// # Safety
    /// The queue pair exists.
    pub(crate) unsafe fn pd(self) -> *mut c_void {
        // SAFETY: it exists (contract); the field is set when it is made and never changes.
        unsafe { (*self.0.as_ptr()).pd }.cast()
    }

    /// Whether its type can bind windows: reliably or unreliably connected.
    ///
    /// # Safety
    /// The queue pair exists.
    pub(crate) unsafe fn is_connected_type(self) -> bool {
        use ffi::ibv_qp_type as t;
        // SAFETY: as in `pd`.
        let kind = unsafe { (*self.0.as_ptr()).qp_type };
        kind == t::IBV_QPT_RC || kind == t::IBV_QPT_UC
    }

    /// The queue that its send queue's completions go to.
    ///
    /// # Safety
    /// The queue pair exists.
    pub(crate) unsafe fn send_cq(self) -> Option<CqPtr> {
        // SAFETY: as in `pd`.
        NonNull::new(unsafe { (*self.0.as_ptr()).send_cq }).map(CqPtr)
    }

    /// Posts up to [`CHAIN`] steps, all with the same number, in one call; of those that succeed only the
    /// last reports, and that only if it is to. The windows have their new keys when this returns. On an error it also says how many
    /// of the steps were posted all the same.
    ///
    /// # Safety
    /// 1. The queue pair exists, and the windows and the queue pair are of one PD.
    /// 2. Each region is registered, with the right to be bound to, and stays so until its window is
    ///    unbound.
    /// 3. A window that is bound here is unbound now, or by a step before; one that is invalidated is
    ///    bound (rxe follows a null pointer when it is not).
    pub(crate) unsafe fn post(
        self,
        wr_id: u64,
        steps: &mut [Step<'_>],
        report: bool,
    ) -> Result<(), (usize, CallError)> {
        // SAFETY: `ibv_send_wr` is integers, pointers and unions of such, for which zero is valid.
        let mut chain: [ffi::ibv_send_wr; CHAIN] = unsafe { mem::zeroed() };
        let n = steps.len().min(CHAIN);
        for (wr, step) in chain.iter_mut().zip(steps.iter_mut()) {
            wr.wr_id = wr_id;
            match step {
                Step::Bind { window, region, addr, len, rights } => {
                    wr.opcode = ffi::ibv_wr_opcode::IBV_WR_BIND_MW;
                    wr.bind_mw_tso_union.bind_mw = ffi::bind_mw_t {
                        mw: window.raw.map_or(ptr::null_mut(), NonNull::as_ptr),
                        rkey: window.next_rkey().get(),
                        bind_info: ffi::ibv_mw_bind_info {
                            mr: region.as_ptr(),
                            addr: *addr,
                            length: *len,
                            mw_access_flags: rights.bits(),
                        },
                    };
                }
                Step::Invalidate(rkey) => {
                    wr.opcode = ffi::ibv_wr_opcode::IBV_WR_LOCAL_INV;
                    wr.imm_data_invalidated_rkey_union =
                        ffi::imm_data_invalidated_rkey_union_t { invalidated_rkey: rkey.get() };
                }
            }
        }
        let Some(last) = n.checked_sub(1) else { return Ok(()) };
        if report {
            chain[last].send_flags = ffi::ibv_send_flags::IBV_SEND_SIGNALED.0;
        }
        let first = chain.as_mut_ptr();
        for i in 0..last {
            // SAFETY: `i + 1 <= last < CHAIN`, so both are elements of the array.
            unsafe { (*first.add(i)).next = first.add(i + 1) };
        }
        let mut bad = ptr::null_mut();
        // SAFETY: the queue pair exists (1). `first` leads through `n` requests of the array above, the
        // last of which has no next; windows and regions they name exist (1, 2, the borrow of `steps`).
        // The call reads them and keeps no pointer to the chain.
        let r = unsafe { ffi::ibv_post_send(self.0.as_ptr(), first, &mut bad) };
        let posted = match r {
            0 => n,
            // SAFETY: the array's own address, not followed.
            _ => (0..n).find(|&i| bad == unsafe { first.add(i) }).unwrap_or(0),
        };
        for step in &mut steps[..posted] {
            if let Step::Bind { window, .. } = step
                && let Some(raw) = window.raw
            {
                let rkey = window.next_rkey().get();
                // SAFETY: a window that is not given back, borrowed exclusively. libibverbs reads this
                // field in the next bind's request as the key that the window has by then; providers
                // that update it themselves (on the completion) store the same.
                unsafe { (*raw.as_ptr()).rkey = rkey };
            }
        }
        check("ibv_post_send", r).map_err(|e| (posted, e))
    }
}

/// What a completion says, and where the device put it, for whoever it is meant for.
pub(crate) struct Arrival<'a> {
    pub(crate) wr_id: u64,
    pub(crate) status: u32,
    pub(crate) vendor_err: u32,
    wc: &'a ffi::ibv_wc,
}

impl Arrival<'_> {
    /// The `ibv_wc *`.
    pub(crate) fn raw(&self) -> *const c_void {
        ptr::from_ref(self.wc).cast()
    }
}

impl CqPtr {
    /// Takes what has arrived, a few at a time; says how many that was.
    ///
    /// # Safety
    /// The completion queue exists.
    pub(crate) unsafe fn poll(
        self,
        mut each: impl FnMut(&Arrival<'_>),
    ) -> Result<usize, CallError> {
        const AT_ONCE: usize = 4;
        // SAFETY: `ibv_wc` is integers and a union of integers; zero is a valid value of each.
        let mut wc: [ffi::ibv_wc; AT_ONCE] = unsafe { mem::zeroed() };
        // SAFETY: the queue exists (contract), and `wc` has room for as many.
        let n = unsafe { ffi::ibv_poll_cq(self.0.as_ptr(), AT_ONCE as c_int, wc.as_mut_ptr()) };
        let n = usize::try_from(n).map_err(|_| CallError {
            call: "ibv_poll_cq",
            source: std::io::Error::from_raw_os_error(n.saturating_abs()),
        })?;
        for wc in &wc[..n] {
            let (wr_id, status, vendor_err) = (wc.wr_id, wc.status, wc.vendor_err);
            each(&Arrival { wr_id, status, vendor_err, wc });
        }
        Ok(n)
    }
}

/// What libibverbs calls a completion status.
pub(crate) fn status_text(status: u32) -> &'static str {
    status_name(status).unwrap_or("unknown")
}
