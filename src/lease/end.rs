//! What leases are bound through: a verbs queue pair or the software device. Knows the calls; leaves who
//! waits, and what a failure means, to `queue.rs`.

use std::io;

use super::error::LeaseError;
#[cfg(any(feature = "rdma-sys", feature = "rdma-mummy-sys"))]
use crate::sys::{
    verbs::{CallError, MrPtr},
    window::{self as verbs, Step},
};
use crate::{
    access::{Access, LKey, RKey},
    buf::Buf,
    device::{Device, SoftDevice, SoftPart, WindowId},
    reach::OneDevice,
};

/// A memory window.
pub(super) enum Window {
    Soft(WindowId, RKey),
    #[cfg(any(feature = "rdma-sys", feature = "rdma-mummy-sys"))]
    Verbs(verbs::Window),
}

impl Window {
    /// The key that it is bound under.
    pub(super) fn rkey(&self) -> RKey {
        match self {
            Self::Soft(_, rkey) => *rkey,
            #[cfg(any(feature = "rdma-sys", feature = "rdma-mummy-sys"))]
            Self::Verbs(window) => window.rkey(),
        }
    }
}

/// The part of a region that a window is bound to.
#[derive(Clone, Copy)]
pub(super) struct Target {
    addr: u64,
    len: u64,
    lkey: LKey,
    #[cfg(any(feature = "rdma-sys", feature = "rdma-mummy-sys"))]
    region: Option<MrPtr>,
}

/// Whether what was posted is done, or will report.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Sent {
    Done,
    #[cfg_attr(
        not(any(feature = "rdma-sys", feature = "rdma-mummy-sys")),
        expect(dead_code, reason = "only verbs report")
    )]
    Underway,
}

pub(super) enum End {
    Soft,
    #[cfg(any(feature = "rdma-sys", feature = "rdma-mummy-sys"))]
    Verbs(verbs::QpPtr, verbs::CqPtr),
}

/// How many windows one call invalidates at most.
#[cfg(any(feature = "rdma-sys", feature = "rdma-mummy-sys"))]
pub(super) const CHAIN: usize = verbs::CHAIN;
#[cfg(not(any(feature = "rdma-sys", feature = "rdma-mummy-sys")))]
pub(super) const CHAIN: usize = 16;

/// An end with its device: what the calls need.
#[derive(Clone, Copy)]
pub(super) struct Through<'a> {
    pub(super) device: &'a Device,
    pub(super) end: &'a End,
}

impl Through<'_> {
    fn name(&self) -> String {
        self.device.info().name
    }

    fn soft(&self) -> &SoftDevice {
        self.device.as_soft().expect("an end is of its device's kind")
    }

    fn soft_error(&self, call: &'static str) -> impl FnOnce(io::Error) -> LeaseError {
        let device = self.name();
        move |source| LeaseError::Call { call, device, source }
    }

    #[cfg(any(feature = "rdma-sys", feature = "rdma-mummy-sys"))]
    fn call_error(&self, e: CallError) -> LeaseError {
        LeaseError::Call { call: e.call, device: self.name(), source: e.source }
    }

    /// Where the buffer lies for a window, if its region can be bound to with these rights.
    pub(super) fn target(
        &self,
        buf: &Buf<impl OneDevice>,
        rights: Access,
    ) -> Result<Target, LeaseError> {
        let (ptr, len, sge) = (buf.as_ptr() as usize, buf.len(), buf.sge());
        if len == 0 {
            return Err(LeaseError::Empty);
        }
        #[cfg(any(feature = "rdma-sys", feature = "rdma-mummy-sys"))]
        let mut at = None;
        let access = match self.end {
            End::Soft => self.soft().region_access(sge.lkey, ptr, len),
            #[cfg(any(feature = "rdma-sys", feature = "rdma-mummy-sys"))]
            End::Verbs(..) => {
                let verbs = self.device.as_verbs();
                let region = verbs.and_then(|v| v.region_of(sge.lkey, ptr, len));
                at = region.map(|r| r.ptr);
                region.map(|r| r.access)
            }
        };
        let foreign = || LeaseError::ForeignBuffer { addr: ptr, len, device: self.name() };
        let access = access.ok_or_else(foreign)?;
        if !access.contains(Access::MW_BIND) {
            return Err(LeaseError::NotBindable { access });
        }
        let writes = rights.intersects(Access::REMOTE_WRITE | Access::REMOTE_ATOMIC);
        if writes && !access.contains(Access::LOCAL_WRITE) {
            let problem = "the buffer's arena lacks LOCAL_WRITE, without which no peer may write";
            return Err(LeaseError::Rights { rights, problem });
        }
        Ok(Target {
            addr: sge.addr,
            len: len as u64,
            lkey: sge.lkey,
            #[cfg(any(feature = "rdma-sys", feature = "rdma-mummy-sys"))]
            region: at,
        })
    }

    /// A window that is bound to nothing.
    pub(super) fn take(&self) -> Result<Window, LeaseError> {
        match self.end {
            End::Soft => Ok(Window::Soft(self.soft().take_window(), RKey::new(0))),
            #[cfg(any(feature = "rdma-sys", feature = "rdma-mummy-sys"))]
            End::Verbs(..) => {
                let verbs = self.device.as_verbs().expect("an end is of its device's kind");
                verbs.take_window().map(Window::Verbs).map_err(|e| self.call_error(e))
            }
        }
    }

    /// Puts a window back that is bound to nothing.
    pub(super) fn rest(&self, window: Window) {
        match window {
            Window::Soft(id, _) => self.soft().rest_window(id),
            #[cfg(any(feature = "rdma-sys", feature = "rdma-mummy-sys"))]
            Window::Verbs(window) => {
                if let Some(verbs) = self.device.as_verbs() {
                    verbs.windows().give(window);
                }
            }
        }
    }

    /// How many windows the device has, and how many of them rest.
    pub(super) fn windows(&self) -> (u64, usize) {
        match self.end {
            End::Soft => self.soft().window_counts(),
            #[cfg(any(feature = "rdma-sys", feature = "rdma-mummy-sys"))]
            End::Verbs(..) => self.device.as_verbs().map_or((0, 0), |v| {
                let windows = v.windows();
                (windows.allocated(), windows.len())
            }),
        }
    }

    /// Binds a window that is bound to nothing. Without `report` it is heard of only if it fails.
    ///
    /// # Safety
    /// The end's queue pair exists; the target's region is registered, and stays so until the window is
    /// unbound.
    pub(super) unsafe fn bind(
        &self,
        wr_id: u64,
        window: &mut Window,
        target: &Target,
        rights: Access,
        report: bool,
    ) -> Result<Sent, LeaseError> {
        // SAFETY: passed on.
        unsafe { self.invalidate_and_bind(wr_id, None, window, target, rights, report) }
    }

    /// Ends what a window is bound to and binds it anew, in one post.
    ///
    /// # Safety
    /// As [`bind`](Through::bind), and the window is bound, through this queue pair.
    pub(super) unsafe fn rebind(
        &self,
        wr_id: u64,
        window: &mut Window,
        target: &Target,
        rights: Access,
    ) -> Result<Sent, LeaseError> {
        let old = window.rkey();
        // SAFETY: passed on.
        unsafe { self.invalidate_and_bind(wr_id, Some(old), window, target, rights, true) }
    }

    /// # Safety
    /// As [`bind`](Through::bind) without a key, else as [`rebind`](Through::rebind), of whose window
    /// `old` is the key.
    #[cfg_attr(
        not(any(feature = "rdma-sys", feature = "rdma-mummy-sys")),
        expect(unused_variables, reason = "only verbs report")
    )]
    unsafe fn invalidate_and_bind(
        &self,
        wr_id: u64,
        old: Option<RKey>,
        window: &mut Window,
        target: &Target,
        rights: Access,
        report: bool,
    ) -> Result<Sent, LeaseError> {
        match (self.end, window) {
            (End::Soft, Window::Soft(id, rkey)) => {
                if old.is_some() {
                    let done = self.soft().invalidate_window(*id);
                    done.map_err(self.soft_error("soft invalidate"))?;
                }
                let Target { addr, len, lkey, .. } = *target;
                let bound = self.soft().bind_window(*id, SoftPart { addr, len, lkey }, rights);
                *rkey = bound.map_err(self.soft_error("soft bind"))?;
                Ok(Sent::Done)
            }
            #[cfg(any(feature = "rdma-sys", feature = "rdma-mummy-sys"))]
            (End::Verbs(qp, _), Window::Verbs(window)) => {
                let region = target.region.expect("a target is of its end's kind");
                let Target { addr, len, .. } = *target;
                let bind = Step::Bind { window, region, addr, len, rights };
                let posted = match old {
                    // SAFETY: the queue pair exists, and the region is registered with the right to be
                    // bound to (contract; `target` looked). The window is of the device's PD, which is the
                    // queue pair's (`LeaseQp` looked), and bound to nothing.
                    None => unsafe { qp.post(wr_id, &mut [bind], report) },
                    // SAFETY: as above, but that the window is bound (contract), until the first step.
                    Some(old) => unsafe {
                        qp.post(wr_id, &mut [Step::Invalidate(old), bind], report)
                    },
                };
                posted.map(|()| Sent::Underway).map_err(|(_, e)| self.call_error(e))
            }
            #[cfg(any(feature = "rdma-sys", feature = "rdma-mummy-sys"))]
            _ => unreachable!("a window is of its end's kind"),
        }
    }

    /// Invalidates up to [`CHAIN`] windows in one post.
    ///
    /// # Safety
    /// The end's queue pair exists, and the windows are bound, through it.
    #[cfg_attr(
        not(any(feature = "rdma-sys", feature = "rdma-mummy-sys")),
        expect(unused_variables, reason = "only verbs report")
    )]
    pub(super) unsafe fn invalidate(
        &self,
        wr_id: u64,
        windows: &[Window],
    ) -> Result<Sent, LeaseError> {
        match self.end {
            End::Soft => {
                for window in windows {
                    let done = match window {
                        Window::Soft(id, _) => self.soft().invalidate_window(*id),
                        #[cfg(any(feature = "rdma-sys", feature = "rdma-mummy-sys"))]
                        Window::Verbs(_) => unreachable!("a window is of its end's kind"),
                    };
                    done.map_err(self.soft_error("soft invalidate"))?;
                }
                Ok(Sent::Done)
            }
            #[cfg(any(feature = "rdma-sys", feature = "rdma-mummy-sys"))]
            End::Verbs(qp, _) => {
                let key = |i: usize| windows.get(i).map_or(RKey::new(0), Window::rkey);
                let mut steps: [Step<'_>; CHAIN] =
                    std::array::from_fn(|i| Step::Invalidate(key(i)));
                let n = windows.len().min(CHAIN);
                // SAFETY: the queue pair exists, the windows are bound (contract).
                let posted = unsafe { qp.post(wr_id, &mut steps[..n], true) };
                posted.map(|()| Sent::Underway).map_err(|(_, e)| self.call_error(e))
            }
        }
    }

    /// Gives a window back, which unbinds it whatever the state of its queue pair.
    pub(super) fn dealloc(&self, window: &mut Window) -> Result<(), LeaseError> {
        match window {
            Window::Soft(id, _) => {
                self.soft().dealloc_window(*id).map_err(self.soft_error("soft give back window"))
            }
            #[cfg(any(feature = "rdma-sys", feature = "rdma-mummy-sys"))]
            Window::Verbs(window) => window.dealloc().map_err(|e| self.call_error(e)),
        }
    }
}
