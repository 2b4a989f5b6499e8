//! Two queue pairs on one verbs device, connected to each other: moves real bytes through registered
//! memory without a second machine. For probing a device, for tests and for measuring.
//!
//! One end, the requester, sends, writes, reads and runs atomics; the other, the responder, receives
//! and answers. Both lie in the device's own PD, so the keys of every pool on that [`Device`] work on
//! both sides. Calls of the first kind block, with a time-out; those that start with `post` and `poll`
//! are what they are made of, and do not.
//!
//! Knows nothing of pools and buffers: it takes [`Sge`]s and rkeys as they are. Since anybody can
//! write down an [`Sge`], whatever starts a transfer is `unsafe`.

mod error;
mod route;

use std::{
    collections::VecDeque,
    hint,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

pub use self::error::LoopbackError;
use self::route::Route;
pub use crate::sys::queue_pair::{Completion, Operation, Request, Status};
use crate::{
    access::{RKey, Sge},
    device::Device,
    sys::{
        queue_pair::{CompletionQueue, Peer, QueuePair},
        verbs::{CallError, Pd},
        window::QpPtr,
    },
};

/// One piece of a blocking write or read; every device sends messages of this size.
const PIECE: u32 = 1 << 20;
/// Pieces under way at once.
const WINDOW: u32 = 8;
/// Set in the `wr_id`s of blocking calls.
const OWN_ID: u64 = 1 << 63;

/// Two connected queue pairs.
///
/// After any error of a transfer the pair is *stopped*: both queue pairs are destroyed, so that
/// nothing which had been posted touches memory any more, and each call returns
/// [`LoopbackError::Stopped`] until [`reset`](Pair::reset). Dropping it does the same for good.
///
/// # Example
/// ```no_run
/// use pinpool::{Access, Device, Pool, loopback::Pair};
///
/// let device = Device::first()?;
/// let pool = Pool::builder()
///     .device(device.clone())
///     .access(Access::LOCAL_WRITE | Access::REMOTE_WRITE)
///     .capacity(2 << 20)
///     .build()?;
/// let mut from = pool.alloc(4096)?;
/// let to = pool.alloc(4096)?;
/// from.fill(7);
/// let remote = to.remote().expect("the class has a remote right");
/// // SAFETY: both buffers outlive the call, which borrows neither but returns only when it is over.
/// unsafe { Pair::connect(&device)?.write(from.sge(), remote.addr, remote.rkey)? };
/// assert!(to.iter().all(|&b| b == 7));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Pair {
    /// `None` while stopped.
    ends: Option<Ends>,
    route: Route,
    pd: Arc<Pd>,
    piece: u32,
    timeout: Duration,
    next_id: u64,
    /// Completions that a blocking call met and that were not its own.
    aside: [VecDeque<Completion>; 2],
    /// What has to be done before the queue pairs are destroyed.
    before_stop: Vec<Box<dyn FnOnce() + Send + Sync>>,
}

struct Ends {
    requester: QueuePair,
    responder: QueuePair,
}

#[derive(Clone, Copy)]
enum End {
    Requester,
    Responder,
}

impl Pair {
    /// Makes two reliable-connected queue pairs on the device's first active port, in the device's PD,
    /// and connects them to each other: by LID on InfiniBand, by GID on RoCE (a RoCE v2 one that stands
    /// for an IPv4 address if there is one).
    ///
    /// # Errors
    /// [`LoopbackError::NotVerbs`], [`NoActivePort`](LoopbackError::NoActivePort),
    /// [`NoGid`](LoopbackError::NoGid), or [`Verbs`](LoopbackError::Verbs) with the call and its errno.
    pub fn connect(device: &Device) -> Result<Self, LoopbackError> {
        let verbs = device
            .as_verbs()
            .ok_or_else(|| LoopbackError::NotVerbs { device: device.info().name })?;
        let route = Route::find(verbs)?;
        let mut pair = Self {
            ends: None,
            pd: verbs.shared_pd().clone(),
            piece: route.port.max_message.clamp(1, PIECE),
            route,
            timeout: Duration::from_secs(10),
            next_id: OWN_ID,
            aside: Default::default(),
            before_stop: Vec::new(),
        };
        pair.reset()?;
        Ok(pair)
    }

    /// Replaces both queue pairs by new ones. Completions that were not polled are lost; whatever was
    /// posted and had not completed never touches memory again.
    ///
    /// # Errors
    /// [`LoopbackError::Verbs`]; the pair is then stopped.
    pub fn reset(&mut self) -> Result<(), LoopbackError> {
        self.stop();
        self.aside = Default::default();
        let ends = self.new_ends().map_err(|e| self.verbs_error(e))?;
        self.ends = Some(ends);
        Ok(())
    }

    fn new_ends(&self) -> Result<Ends, CallError> {
        let caps = self.route.caps;
        let queue = || CompletionQueue::new(self.pd.context(), caps.depth).map(Arc::new);
        // The requester receives nothing. What the responder posts to its send queue is not this
        // pair's, and reports to a queue of its own.
        let (requests, answers, receives) = (queue()?, queue()?, queue()?);
        let ends = Ends {
            requester: QueuePair::new(&self.pd, &requests, &requests, caps)?,
            responder: QueuePair::new(&self.pd, &answers, &receives, caps)?,
        };
        let Route { port, gid, .. } = &self.route;
        let peer = |of: &QueuePair| Peer { qp_num: of.number(), lid: port.lid, gid: *gid };
        ends.responder.connect(port, &peer(&ends.requester))?;
        ends.requester.connect(port, &peer(&ends.responder))?;
        Ok(ends)
    }

    /// Sets how long a blocking call waits for the next completion. Ten seconds unless set: a device
    /// gives up on a peer that does not answer after some seconds, and an emulated one may be slow.
    pub fn set_timeout(&mut self, timeout: Duration) {
        self.timeout = timeout;
    }

    /// The work requests that each queue holds.
    pub fn depth(&self) -> usize {
        self.route.caps.depth as usize
    }

    /// The longest message that the device sends, in bytes; [`post`](Pair::post) takes no longer SGE.
    pub fn max_message(&self) -> u32 {
        self.route.port.max_message
    }

    /// The responder's queue pair, which exists until the pair is stopped or reset.
    pub(crate) fn responder(&self) -> Option<QpPtr> {
        self.ends.as_ref().map(|ends| ends.responder.ptr())
    }

    /// Has something done once, before the present queue pairs are destroyed.
    pub(crate) fn before_stop(&mut self, f: impl FnOnce() + Send + Sync + 'static) {
        self.before_stop.push(Box::new(f));
    }

    /// Whether an error has stopped it.
    pub fn is_stopped(&self) -> bool {
        self.ends.is_none()
    }

    /// Writes `local` to the responder's memory and waits. Any length: it goes in pieces of at most
    /// 1 MiB. The completion's `byte_len` is the whole length.
    ///
    /// # Errors
    /// [`LoopbackError::Completion`] when it is refused (some pieces before may have been written),
    /// [`TimedOut`](LoopbackError::TimedOut), [`Stopped`](LoopbackError::Stopped), or
    /// [`Verbs`](LoopbackError::Verbs).
    ///
    /// # Safety
    /// During the call, if the keys are valid: the memory that `local` names stays mapped and nobody
    /// writes it; the memory that `rkey` names stays mapped and nobody uses it. Once the call has
    /// returned, with whatever result, it touches neither.
    pub unsafe fn write(
        &mut self,
        local: Sge,
        remote_addr: u64,
        rkey: RKey,
    ) -> Result<Completion, LoopbackError> {
        let at = |offset| Operation::Write { remote_addr: remote_addr.wrapping_add(offset), rkey };
        // SAFETY: the pieces lie inside what the caller vouches for.
        unsafe { self.in_pieces(local, at) }
    }

    /// Fills `local` from the responder's memory and waits. Any length, as for
    /// [`write`](Pair::write).
    ///
    /// # Errors
    /// As for [`write`](Pair::write).
    ///
    /// # Safety
    /// During the call, if the keys are valid: the memory that `local` names stays mapped and nobody
    /// uses it; the memory that `rkey` names stays mapped and nobody writes it.
    pub unsafe fn read(
        &mut self,
        local: Sge,
        remote_addr: u64,
        rkey: RKey,
    ) -> Result<Completion, LoopbackError> {
        let at = |offset| Operation::Read { remote_addr: remote_addr.wrapping_add(offset), rkey };
        // SAFETY: the pieces lie inside what the caller vouches for.
        unsafe { self.in_pieces(local, at) }
    }

    /// Replaces eight bytes of the responder's memory by `swap` if they equal `compare`, and waits.
    /// `local`, eight bytes, then holds their former value, in the host's byte order.
    ///
    /// # Errors
    /// As for [`write`](Pair::write). An address that is not a multiple of eight is refused.
    ///
    /// # Safety
    /// As for [`read`](Pair::read), and nobody uses the remote eight bytes but through this device.
    pub unsafe fn compare_swap(
        &mut self,
        local: Sge,
        remote_addr: u64,
        rkey: RKey,
        compare: u64,
        swap: u64,
    ) -> Result<Completion, LoopbackError> {
        let operation = Operation::CompareSwap { remote_addr, rkey, compare, swap };
        // SAFETY: what is asked of the caller.
        unsafe { self.one(local, operation) }
    }

    /// Adds `add` to eight bytes of the responder's memory, wrapping, and waits. `local`, eight bytes,
    /// then holds their former value, in the host's byte order.
    ///
    /// # Errors
    /// As for [`compare_swap`](Pair::compare_swap).
    ///
    /// # Safety
    /// As for [`compare_swap`](Pair::compare_swap).
    pub unsafe fn fetch_add(
        &mut self,
        local: Sge,
        remote_addr: u64,
        rkey: RKey,
        add: u64,
    ) -> Result<Completion, LoopbackError> {
        let operation = Operation::FetchAdd { remote_addr, rkey, add };
        // SAFETY: what is asked of the caller.
        unsafe { self.one(local, operation) }
    }

    /// Sends `from` and receives it into `into`, as one message, and waits for both ends. Returns the
    /// receive's completion, whose `byte_len` is the message's length.
    ///
    /// # Errors
    /// As for [`write`](Pair::write). A message longer than `into` is refused.
    ///
    /// # Safety
    /// During the call, if the keys are valid: both stay mapped, nobody writes the memory that `from`
    /// names, and nobody uses that of `into`. No receive is posted already.
    pub unsafe fn send_recv(&mut self, from: Sge, into: Sge) -> Result<Completion, LoopbackError> {
        let id = self.own_id();
        // SAFETY: what is asked of the caller. The memory is used no longer than the call: either its
        // completion is waited for below, or the pair is stopped.
        unsafe { self.post_recv(id, into) }?;
        // SAFETY: what is asked of the caller.
        if let Err(e) = unsafe { self.one(from, Operation::Send) } {
            self.stop();
            return Err(e);
        }
        self.wait(End::Responder, Some(id), "RECV")
    }

    /// Sends `from` to the receive posted first, as one message, and waits until the responder has it.
    ///
    /// # Errors
    /// As for [`write`](Pair::write). Times out if no receive is posted.
    ///
    /// # Safety
    /// During the call, if the key is valid, the memory that `from` names stays mapped and nobody
    /// writes it.
    pub unsafe fn send(&mut self, from: Sge) -> Result<Completion, LoopbackError> {
        // SAFETY: what is asked of the caller.
        unsafe { self.one(from, Operation::Send) }
    }

    /// Waits for the next receive to complete.
    ///
    /// # Errors
    /// As for [`write`](Pair::write).
    pub fn recv(&mut self) -> Result<Completion, LoopbackError> {
        match self.aside[End::Responder as usize].pop_front() {
            Some(completion) => self.judge(completion, "RECV"),
            None => self.wait(End::Responder, None, "RECV"),
        }
    }

    /// Posts a request to the requester's send queue and returns at once.
    ///
    /// # Errors
    /// [`LoopbackError::Verbs`] (ENOMEM: the queue is full), [`Stopped`](LoopbackError::Stopped).
    /// Nothing was posted then.
    ///
    /// # Safety
    /// As for the blocking calls, but until its completion has been polled, or the pair is reset,
    /// stopped or dropped. Give it a `wr_id` below 2^63.
    pub unsafe fn post(&mut self, request: &Request) -> Result<(), LoopbackError> {
        let ends = self.ends.as_ref().ok_or(LoopbackError::Stopped)?;
        // SAFETY: the caller vouches for the memory until the completion or the end of the queue pair.
        unsafe { ends.requester.post_send(request) }.map_err(|e| self.verbs_error(e))
    }

    /// Posts a receive on the responder and returns at once.
    ///
    /// # Errors
    /// As for [`post`](Pair::post).
    ///
    /// # Safety
    /// If the key is valid, the memory that `into` names stays mapped and nobody uses it until its
    /// completion has been polled, or the pair is reset, stopped or dropped. Give it a `wr_id` below
    /// 2^63.
    pub unsafe fn post_recv(&mut self, wr_id: u64, into: Sge) -> Result<(), LoopbackError> {
        let ends = self.ends.as_ref().ok_or(LoopbackError::Stopped)?;
        // SAFETY: as in `post`.
        unsafe { ends.responder.post_recv(wr_id, into) }.map_err(|e| self.verbs_error(e))
    }

    /// Takes completions of posted requests, oldest first, as far as `out` has room; says how many.
    /// Does not wait, and leaves it to the caller to look at each status. After one that is not
    /// [`Status::SUCCESS`] the queue pair is in error and the rest follows as
    /// [`Status::WR_FLUSH_ERR`]; [`reset`](Pair::reset) is the way on.
    ///
    /// # Errors
    /// [`LoopbackError::Verbs`], [`Stopped`](LoopbackError::Stopped).
    pub fn poll(&mut self, out: &mut [Completion]) -> Result<usize, LoopbackError> {
        self.poll_end(End::Requester, out)
    }

    /// Takes completions of posted receives; otherwise as [`poll`](Pair::poll).
    ///
    /// # Errors
    /// As for [`poll`](Pair::poll).
    pub fn poll_recv(&mut self, out: &mut [Completion]) -> Result<usize, LoopbackError> {
        self.poll_end(End::Responder, out)
    }

    fn poll_end(&mut self, end: End, out: &mut [Completion]) -> Result<usize, LoopbackError> {
        let aside = &mut self.aside[end as usize];
        let n = aside.len().min(out.len());
        for (out, completion) in out.iter_mut().zip(aside.drain(..n)) {
            *out = completion;
        }
        Ok(n + self.poll_queue(end, &mut out[n..])?)
    }

    fn poll_queue(&self, end: End, out: &mut [Completion]) -> Result<usize, LoopbackError> {
        let ends = self.ends.as_ref().ok_or(LoopbackError::Stopped)?;
        let queue = match end {
            End::Requester => ends.requester.sends(),
            End::Responder => ends.responder.receives(),
        };
        queue.poll(out).map_err(|e| self.verbs_error(e))
    }

    /// Destroys both queue pairs, requester first, so that it sees no answer fail.
    fn stop(&mut self) {
        self.before_stop.drain(..).for_each(|f| f());
        if let Some(Ends { requester, responder }) = self.ends.take() {
            drop(requester);
            drop(responder);
        }
    }

    fn own_id(&mut self) -> u64 {
        self.next_id = self.next_id.wrapping_add(1) | OWN_ID;
        self.next_id
    }

    /// # Safety
    /// As for the blocking call that uses it.
    unsafe fn one(&mut self, sge: Sge, operation: Operation) -> Result<Completion, LoopbackError> {
        let wr_id = self.own_id();
        // SAFETY: the memory is used no longer than the call, as the caller expects: `wait` either has
        // the completion or stops the pair.
        unsafe { self.post(&Request { wr_id, operation, sge, signaled: true }) }?;
        self.wait(End::Requester, Some(wr_id), operation.name())
    }

    /// # Safety
    /// As for [`write`](Pair::write) and [`read`](Pair::read).
    unsafe fn in_pieces(
        &mut self,
        sge: Sge,
        at: impl Fn(u64) -> Operation,
    ) -> Result<Completion, LoopbackError> {
        let pieces = sge.length.div_ceil(self.piece).max(1);
        let first = self.own_id();
        let id = |i: u32| first + u64::from(i);
        self.next_id = id(pieces - 1);
        let name = at(0).name();
        let mut posted = 0;
        for done in 0..pieces {
            while posted < pieces && posted - done < WINDOW {
                let offset = posted * self.piece;
                let request = Request {
                    wr_id: id(posted),
                    operation: at(offset.into()),
                    sge: Sge {
                        addr: sge.addr.wrapping_add(offset.into()),
                        length: (sge.length - offset).min(self.piece),
                        lkey: sge.lkey,
                    },
                    signaled: true,
                };
                // SAFETY: a part of what the caller vouches for, and used no longer than the call: all
                // completions are waited for, or the pair is stopped.
                if let Err(e) = unsafe { self.post(&request) } {
                    self.stop();
                    return Err(e);
                }
                posted += 1;
            }
            self.wait(End::Requester, Some(id(done)), name)?;
        }
        let wr_id = id(pieces - 1);
        Ok(Completion { wr_id, byte_len: sge.length, ..Completion::default() })
    }

    /// Waits for the completion with this number, or for any. Stops the pair on every error.
    fn wait(
        &mut self,
        end: End,
        wr_id: Option<u64>,
        operation: &'static str,
    ) -> Result<Completion, LoopbackError> {
        let mut deadline = Instant::now() + self.timeout;
        let mut idle = 0u32;
        loop {
            let mut one = [Completion::default()];
            match self.poll_queue(end, &mut one) {
                Ok(0) => {}
                Ok(_) if wr_id.is_none_or(|id| id == one[0].wr_id) => {
                    return self.judge(one[0], operation);
                }
                Ok(_) => {
                    self.aside[end as usize].push_back(one[0]);
                    deadline = Instant::now() + self.timeout;
                    continue;
                }
                Err(e) => {
                    self.stop();
                    return Err(e);
                }
            }
            idle += 1;
            if idle.is_multiple_of(64) {
                if Instant::now() > deadline {
                    self.stop();
                    return Err(LoopbackError::TimedOut { operation, after: self.timeout });
                }
                // A soft device needs the processor to make progress.
                thread::yield_now();
            } else {
                hint::spin_loop();
            }
        }
    }

    fn judge(
        &mut self,
        completion: Completion,
        operation: &'static str,
    ) -> Result<Completion, LoopbackError> {
        let Completion { status, vendor_err, .. } = completion;
        if status == Status::SUCCESS {
            return Ok(completion);
        }
        self.stop();
        Err(LoopbackError::Completion { operation, status, vendor_err })
    }

    fn verbs_error(&self, e: CallError) -> LoopbackError {
        let device = self.pd.context().name().to_owned();
        LoopbackError::Verbs { call: e.call, device, source: e.source }
    }
}

impl Drop for Pair {
    fn drop(&mut self) {
        self.stop();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_software_device_has_no_queue_pairs() {
        let e = Pair::connect(&Device::soft()).err().expect("refused");
        assert!(matches!(e, LoopbackError::NotVerbs { .. }), "{e}");
    }
}
