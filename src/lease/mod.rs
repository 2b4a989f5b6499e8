//! Leases: the right to one buffer alone, for one peer, that can be taken back.
//!
//! An rkey of an arena lets a peer reach every buffer in it, until the pool is gone. A lease binds a
//! *memory window* (type 2) to a single buffer: a key of its own, with the rights asked, for whoever is at
//! the other end of one queue pair, and only until [`Lease::revoke`] or drop. The pool's arenas need
//! [`Access::MW_BIND`], and need no remote right at all: a pool with
//! `Access::LOCAL_WRITE | Access::MW_BIND` gives peers nothing but what is leased to them.
//!
//! ```
//! use pinpool::{Access, Device, LeaseQp, Pages, Pool};
//!
//! let device = Device::soft(); // on verbs: LeaseQp::from_raw(&device, qp, options)
//! let pool = Pool::builder()
//!     .device(device.clone())
//!     .access(Access::LOCAL_WRITE | Access::MW_BIND)
//!     .capacity(1 << 20)
//!     .build()?;
//! let qp = LeaseQp::soft(&device)?;
//!
//! let lease = pool.alloc(4096)?.lease(&qp, Access::REMOTE_WRITE)?;
//! let to = lease.remote(); // send it to the peer
//! # let peer = device.as_soft().expect("the software device");
//! # // SAFETY: nobody has a reference to the leased bytes.
//! # unsafe { peer.write(to.rkey, to.addr, b"hello")? };
//! let buf = lease.revoke()?; // from here on the key is refused
//! # assert_eq!(&buf[..5], b"hello");
//! # // SAFETY: refused.
//! # assert!(unsafe { peer.write(to.rkey, to.addr, b"again") }.is_err());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # What it can be relied on for
//! Devices differ in what their windows hold. [`Device::lease_support`](crate::Device::lease_support) finds out by trying, once a
//! device: whether a key is refused after revocation, whether neighbouring bytes, rights and other queue
//! pairs are refused. A lease that is to be relied on for what does not hold, or could not be tried, is
//! [refused](LeaseError::Lacking). Every lease requires [`Guarantees::REVOCATION`] unless told otherwise;
//! [`Terms::require`] asks for more. The kernel's soft RoCE (`rdma_rxe`), for one, does not hold the range,
//! so that a leased key reaches the whole arena, and may finish copying a packet that it had begun when the
//! lease was revoked ([`Guarantees::DRAINED`]).
//!
//! Where that is not enough, or windows are missing: give each tenant a pool and a [`Device`](crate::Device) of its own.
//! Each `Device` is a PD, and no key of one PD works through a queue pair of another. That costs arenas
//! for every tenant, and holds on every device.
//!
//! # Cost, and what is allocated
//! Windows are allocated once and rest in the device's PD while nobody needs them; [`LeaseQp::reserve`]
//! allocates ahead. Binding and invalidating are one work request each on the lease's queue pair, waited
//! for. [`Lease::exchange`] chains both in one post, and closing a [`LeaseQp`] up to sixteen. `pinpool bench lease` compares that with registering.
//!
//! # Keys come back
//! A window's key has 24 bits that stay and eight that count on with each bind, so after 256 leases of one
//! window a key is in use again. Windows are used in turn, and a key works through its own queue pair
//! only (where that holds), so a stale key reaches at most what its own peer was leased later.

mod end;
mod error;
mod probe;
mod queue;

use std::{fmt, mem::ManuallyDrop, sync::Arc};

use self::queue::{Failure, Inner, keep_out};
pub use self::{
    error::{ExchangeError, LeaseError, Refused, RevokeError},
    queue::{Completions, LeaseQp, LeaseStats, Others, QpOptions, leaked},
};
use crate::{
    access::{Access, RKey, RemoteBuf, Sge},
    buf::Buf,
    device::Guarantees,
    reach::{Any, OneDevice},
};
/// What a lease permits, and what it has to be relied on for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Terms {
    rights: Access,
    require: Guarantees,
    wait: bool,
}

impl Terms {
    /// A lease of these rights: any of [`Access::REMOTE`]. Requires [`Guarantees::REVOCATION`].
    pub const fn new(rights: Access) -> Self {
        Self { rights, require: Guarantees::REVOCATION, wait: true }
    }

    /// Has [`Buf::lease`] not wait until the key works. It then works for whatever the peer does upon a
    /// message that is sent *through the same queue pair* from now on, since a queue pair binds before it
    /// goes on to the next request; by another way (another queue pair, a socket) the peer could be too
    /// early. A bind that fails is told by the queue pair's state, and counted in
    /// [`LeaseStats::failed`].
    pub const fn in_order(mut self) -> Self {
        self.wait = false;
        self
    }

    /// Sets what has to hold on the device; what does not is an error.
    pub const fn require(mut self, what: Guarantees) -> Self {
        self.require = what;
        self
    }

    fn check(&self, inner: &Inner) -> Result<(), LeaseError> {
        let rights = self.rights;
        let problem = if rights.is_empty() {
            "it permits nothing; ask for REMOTE_READ, REMOTE_WRITE or REMOTE_ATOMIC"
        } else if !Access::REMOTE.contains(rights) {
            "only REMOTE_READ, REMOTE_WRITE and REMOTE_ATOMIC can be leased"
        } else {
            let missing = self.require - inner.held().held;
            if missing.is_empty() {
                return Ok(());
            }
            let support = Box::new(inner.held().clone());
            return Err(LeaseError::Lacking { device: inner.device_name(), missing, support });
        };
        Err(LeaseError::Rights { rights, problem })
    }
}

impl From<Access> for Terms {
    fn from(rights: Access) -> Self {
        Self::new(rights)
    }
}

impl<R: OneDevice> Buf<R> {
    /// Leases this buffer's `len` bytes, and none beside them, to the peer at the other end of `qp`, under
    /// a key of its own. The lease keeps the buffer; [`Lease::revoke`] gives it back.
    ///
    /// When this returns, the key works; see [`Terms::in_order`], which is how it always is with
    /// [`Completions::Routed`].
    ///
    /// # Errors
    /// [`Refused`], with the buffer: [`LeaseError::NotBindable`] if the pool was built without
    /// [`Access::MW_BIND`], [`Lacking`](LeaseError::Lacking), [`Rights`](LeaseError::Rights),
    /// [`ForeignBuffer`](LeaseError::ForeignBuffer), [`Empty`](LeaseError::Empty),
    /// [`Closed`](LeaseError::Closed), [`ForeignProcess`](LeaseError::ForeignProcess) before anything is
    /// posted; [`Call`](LeaseError::Call), [`Completion`](LeaseError::Completion),
    /// [`TimedOut`](LeaseError::TimedOut) after.
    pub fn lease(self, qp: &LeaseQp, terms: impl Into<Terms>) -> Result<Lease<R>, Refused<R>> {
        let inner = &qp.inner;
        let terms = terms.into();
        let rights = terms.rights;
        if let Err(error) = terms.check(inner) {
            return Err(Refused { buf: Some(self), error });
        }
        let bound = || {
            let undone = Failure::Undone;
            let _open = inner.enter().map_err(undone)?;
            let target = inner.through().target(&self, rights).map_err(undone)?;
            let window = inner.bind(&target, rights, terms.wait && !inner.routed())?;
            Ok((window.rkey(), inner.put_in(window)))
        };
        match bound() {
            Ok((rkey, slot)) => {
                let buf = ManuallyDrop::new(self);
                Ok(Lease { buf, inner: inner.clone(), slot, rkey, rights })
            }
            Err(Failure::Undone(error)) => Err(Refused { buf: Some(self), error }),
            Err(Failure::Stuck(error, _)) => {
                keep_out(self);
                Err(Refused { buf: None, error })
            }
        }
    }
}

/// A buffer that a peer may reach, under a key of its own, until this is revoked or dropped.
///
/// It owns the buffer, keeps its arena registered, and may outlive the `LeaseQp`, the pool's handles and the
/// device's; see [`LeaseQp`] for the one order that matters.
///
/// Dropping it revokes, and gives the buffer back to its pool after that, never before: a peer that is
/// late, gone or malicious cannot write to the buffer's next owner. With [`Completions::Routed`] that happens
/// at the completion, without waiting; otherwise drop waits for it, as long as
/// [`QpOptions::timeout`]. When the queue pair is in error and cannot invalidate any more, the window is given
/// back, which ends it as well. If that fails too, the buffer is kept out of use for ever and
/// [counted](leaked).
///
/// [`QpOptions::timeout`]: QpOptions#structfield.timeout
pub struct Lease<R: OneDevice = Any> {
    buf: ManuallyDrop<Buf<R>>,
    inner: Arc<Inner>,
    slot: u32,
    rkey: RKey,
    rights: Access,
}

impl<R: OneDevice> Lease<R> {
    /// What the peer needs.
    pub fn remote(&self) -> RemoteBuf {
        RemoteBuf { addr: self.buf.sge().addr, len: self.buf.len() as u64, rkey: self.rkey }
    }

    /// The lease's own key.
    pub fn rkey(&self) -> RKey {
        self.rkey
    }

    /// What the peer may do.
    pub fn rights(&self) -> Access {
        self.rights
    }

    /// Whether it is in force: until its `LeaseQp` is closed.
    pub fn is_bound(&self) -> bool {
        self.inner.is_bound(self.slot)
    }

    /// The leased bytes.
    #[allow(clippy::len_without_is_empty)] // nothing is never leased
    pub fn len(&self) -> usize {
        self.buf.len()
    }

    /// The first byte's address.
    pub fn as_ptr(&self) -> *const u8 {
        self.buf.as_ptr()
    }

    /// The scatter-gather element, for this host's own work requests; see [`Buf::sge`].
    pub fn sge(&self) -> Sge {
        self.buf.sge()
    }

    /// The bytes, while they are leased.
    ///
    /// # Safety
    /// While the result is borrowed, the peer writes none of them: it may not
    /// ([`rights`](Lease::rights)), or the protocol says so.
    pub unsafe fn bytes(&self) -> &[u8] {
        &self.buf
    }

    /// The bytes, to change them while they are leased.
    ///
    /// # Safety
    /// While the result is borrowed, the peer neither writes nor reads any of them.
    pub unsafe fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.buf
    }

    /// Ends the lease, waits until that is done, and gives the buffer back: from then on every access
    /// under its key is refused (if [that holds](Guarantees::REVOCATION)).
    ///
    /// This works whatever became of the peer, and of the queue pair: one that is in error cannot
    /// invalidate the window, which then is given back to the device instead. So is one that the peer has
    /// invalidated itself (SEND with invalidate), though devices put the queue pair in error then.
    ///
    /// # Errors
    /// [`RevokeError`], if neither was possible. The buffer is kept out of use for ever.
    pub fn revoke(self) -> Result<Buf<R>, RevokeError> {
        let (buf, inner, slot) = self.into_parts();
        match inner.end(slot) {
            Ok(()) => Ok(buf),
            Err(failure) => {
                let (addr, len) = (buf.as_ptr() as usize, buf.len());
                keep_out(buf);
                let (first, second) = match failure {
                    Failure::Undone(e) => (e, LeaseError::ForeignProcess),
                    Failure::Stuck(first, second) => (first, second),
                };
                let (invalidate, dealloc) = (Box::new(first), Box::new(second));
                Err(RevokeError { addr, len, invalidate, dealloc })
            }
        }
    }

    /// Ends this lease and leases `next` in its place, under a new key, in one post: half the cost of
    /// both apart. Gives this lease's buffer back beside the new lease.
    ///
    /// # Errors
    /// [`ExchangeError`], with both buffers; this lease has ended then too.
    pub fn exchange(
        self,
        next: Buf<R>,
        terms: impl Into<Terms>,
    ) -> Result<(Buf<R>, Self), ExchangeError<R>> {
        let terms = terms.into();
        let inner = self.inner.clone();
        let target = terms
            .check(&inner)
            .and_then(|()| inner.own_process())
            .and_then(|()| inner.through().target(&next, terms.rights));
        let (target, open) = match target.and_then(|t| Ok((t, inner.enter()?))) {
            Ok(both) => both,
            Err(error) => {
                let ended = self.revoke().ok();
                return Err(ExchangeError { ended, next: Some(next), error: Box::new(error) });
            }
        };
        let (buf, _, slot) = self.into_parts();
        // Entered, so it has not been ended by closing.
        let rebound = match inner.take_out(slot) {
            Ok(Some(window)) => inner.rebind(window, &target, terms.rights),
            Ok(None) => Err(Failure::Undone(LeaseError::Closed)),
            Err(failure) => Err(failure),
        };
        let answer = match rebound {
            Ok(window) => {
                let (rkey, slot) = (window.rkey(), inner.put_in(window));
                let (inner, rights) = (inner.clone(), terms.rights);
                Ok((buf, Lease { buf: ManuallyDrop::new(next), inner, slot, rkey, rights }))
            }
            Err(Failure::Undone(error)) => {
                Err(ExchangeError { ended: Some(buf), next: Some(next), error: Box::new(error) })
            }
            Err(Failure::Stuck(error, _)) => {
                // Which of the two the window is bound to is not known.
                keep_out(buf);
                keep_out(next);
                Err(ExchangeError { ended: None, next: None, error: Box::new(error) })
            }
        };
        drop(open);
        answer
    }

    fn into_parts(self) -> (Buf<R>, Arc<Inner>, u32) {
        let mut this = ManuallyDrop::new(self);
        let slot = this.slot;
        // SAFETY: `this` is never dropped nor used again, so each field is moved out of once.
        unsafe { (ManuallyDrop::take(&mut this.buf), std::ptr::read(&this.inner), slot) }
    }
}

impl<R: OneDevice> Drop for Lease<R> {
    fn drop(&mut self) {
        // SAFETY: taken once, by the drop itself; `self.buf` is not used again.
        let buf = unsafe { ManuallyDrop::take(&mut self.buf) };
        if self.inner.is_foreign() {
            // The parent's, lease and buffer; this process's copy is left alone.
            std::mem::forget(buf);
        } else if self.inner.routed() {
            self.inner.end_later(self.slot, buf.reached());
        } else if self.inner.end(self.slot).is_err() {
            keep_out(buf);
        }
    }
}

impl<R: OneDevice> fmt::Debug for Lease<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lease")
            .field("remote", &self.remote())
            .field("rights", &self.rights)
            .finish_non_exhaustive()
    }
}
