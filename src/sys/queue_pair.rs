//! Completion queues and reliable-connected queue pairs, as owners, with posting and polling. Leaves
//! connecting two of them, waiting, and what an error means to `loopback.rs`.
#![allow(clippy::disallowed_methods)]

use std::{
    ffi::c_int,
    fmt, mem,
    ptr::{self, NonNull},
    sync::Arc,
};

use super::{
    verbs::{CallError, Context, Pd, Port, check, check_ptr, ffi, status_name},
    window::QpPtr,
};
use crate::access::{Access, RKey, Sge};

/// How a work request ended: `enum ibv_wc_status`, by number.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Status(u32);

impl Status {
    /// 0: done.
    pub const SUCCESS: Self = Self(ffi::ibv_wc_status::IBV_WC_SUCCESS);
    /// 1: a message longer than its receive buffer, or than the device sends.
    pub const LOC_LEN_ERR: Self = Self(ffi::ibv_wc_status::IBV_WC_LOC_LEN_ERR);
    /// 2: the local queue pair could not carry it out.
    pub const LOC_QP_OP_ERR: Self = Self(ffi::ibv_wc_status::IBV_WC_LOC_QP_OP_ERR);
    /// 4: the local SGE lies outside its memory region, or the region lacks the right.
    pub const LOC_PROT_ERR: Self = Self(ffi::ibv_wc_status::IBV_WC_LOC_PROT_ERR);
    /// 5: given up because the queue pair was in error already.
    pub const WR_FLUSH_ERR: Self = Self(ffi::ibv_wc_status::IBV_WC_WR_FLUSH_ERR);
    /// 9: the peer found the request malformed.
    pub const REM_INV_REQ_ERR: Self = Self(ffi::ibv_wc_status::IBV_WC_REM_INV_REQ_ERR);
    /// 10: the peer refused: wrong rkey, range, or right.
    pub const REM_ACCESS_ERR: Self = Self(ffi::ibv_wc_status::IBV_WC_REM_ACCESS_ERR);
    /// 11: the peer could not carry it out.
    pub const REM_OP_ERR: Self = Self(ffi::ibv_wc_status::IBV_WC_REM_OP_ERR);
    /// 12: the peer did not answer.
    pub const RETRY_EXC_ERR: Self = Self(ffi::ibv_wc_status::IBV_WC_RETRY_EXC_ERR);
    /// 13: the peer had no receive posted.
    pub const RNR_RETRY_EXC_ERR: Self = Self(ffi::ibv_wc_status::IBV_WC_RNR_RETRY_EXC_ERR);

    /// The number, as in `enum ibv_wc_status`.
    pub const fn get(self) -> u32 {
        self.0
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.0, status_name(self.0).unwrap_or("unknown"))
    }
}

impl fmt::Debug for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// What a completion queue reports of one work request.
///
/// The default, a success of nothing, is there to fill an array for polling with.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
#[non_exhaustive]
pub struct Completion {
    /// The number that was posted with the work request.
    pub wr_id: u64,
    /// How it ended.
    pub status: Status,
    /// Bytes that a receive was given, or that a read or atomic brought; meaningful on success only,
    /// and not for sends and writes.
    pub byte_len: u32,
    /// The device's own code for an error.
    pub vendor_err: u32,
}

/// What a work request on the send queue does with its SGE.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Operation {
    /// Sends it to the receive that the peer posted first.
    Send,
    /// Writes it to the peer's memory.
    Write {
        /// Where to.
        remote_addr: u64,
        /// The peer's key for it.
        rkey: RKey,
    },
    /// Fills it from the peer's memory.
    Read {
        /// Where from.
        remote_addr: u64,
        /// The peer's key for it.
        rkey: RKey,
    },
    /// Replaces eight bytes of the peer's memory, if they equal `compare`, by `swap`; their former
    /// value goes into the SGE. In the host's byte order.
    CompareSwap {
        /// The eight bytes, aligned to eight.
        remote_addr: u64,
        /// The peer's key for them.
        rkey: RKey,
        /// What they must be.
        compare: u64,
        /// What they become.
        swap: u64,
    },
    /// Adds to eight bytes of the peer's memory; their former value goes into the SGE. In the host's
    /// byte order.
    FetchAdd {
        /// The eight bytes, aligned to eight.
        remote_addr: u64,
        /// The peer's key for them.
        rkey: RKey,
        /// What to add, wrapping.
        add: u64,
    },
}

impl Operation {
    /// Its name, as the verbs manual has it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Send => "SEND",
            Self::Write { .. } => "RDMA WRITE",
            Self::Read { .. } => "RDMA READ",
            Self::CompareSwap { .. } => "COMPARE AND SWAP",
            Self::FetchAdd { .. } => "FETCH AND ADD",
        }
    }
}

/// One work request for the send queue.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Request {
    /// Comes back in the completion.
    pub wr_id: u64,
    /// What to do.
    pub operation: Operation,
    /// The local memory.
    pub sge: Sge,
    /// Whether a completion is wanted if it succeeds; one that fails always reports. A queue whose
    /// requests are all unsignaled fills up for good, so ask for one at least every
    /// [`Pair::depth`](crate::loopback::Pair::depth).
    pub signaled: bool,
}

/// A completion queue. Destroyed when dropped.
pub(crate) struct CompletionQueue {
    raw: NonNull<ffi::ibv_cq>,
    context: Arc<Context>,
}

// SAFETY: a handle for thread-safe calls, not tied to the thread that made it (see `Context`).
unsafe impl Send for CompletionQueue {}
// SAFETY: as above.
unsafe impl Sync for CompletionQueue {}

/// How many completions one call takes off a queue at most.
const POLL: usize = 16;

impl CompletionQueue {
    /// Makes one that holds at least `entries`.
    pub(crate) fn new(context: &Arc<Context>, entries: u32) -> Result<Self, CallError> {
        let entries = c_int::try_from(entries).unwrap_or(c_int::MAX);
        // SAFETY: the context is open and `Self` keeps it so. No channel and no user context are passed
        // (null is allowed for both); vector 0 exists on every device.
        let raw = unsafe {
            ffi::ibv_create_cq(context.as_ptr(), entries, ptr::null_mut(), ptr::null_mut(), 0)
        };
        Ok(Self { raw: check_ptr("ibv_create_cq", raw)?, context: context.clone() })
    }

    /// Takes completions off the queue, oldest first, as far as `out` has room; says how many.
    pub(crate) fn poll(&self, out: &mut [Completion]) -> Result<usize, CallError> {
        // SAFETY: `ibv_wc` is integers and a union of integers; zero is a valid value of each.
        let mut wc: [ffi::ibv_wc; POLL] = unsafe { mem::zeroed() };
        let room = out.len().min(POLL);
        // SAFETY: the queue exists as long as `self`, and `wc` has room for `room` <= POLL entries.
        let n = unsafe { ffi::ibv_poll_cq(self.raw.as_ptr(), room as c_int, wc.as_mut_ptr()) };
        let n = usize::try_from(n).map_err(|_| CallError {
            call: "ibv_poll_cq",
            source: std::io::Error::from_raw_os_error(n.saturating_abs()),
        })?;
        for (out, wc) in out.iter_mut().zip(&wc[..n]) {
            *out = Completion {
                wr_id: wc.wr_id,
                status: Status(wc.status),
                byte_len: wc.byte_len,
                vendor_err: wc.vendor_err,
            };
        }
        Ok(n)
    }
}

impl Drop for CompletionQueue {
    fn drop(&mut self) {
        if self.context.is_in_owner() {
            // SAFETY: made by ibv_create_cq and destroyed here only. Queue pairs hold an Arc of it, so
            // none uses it any more; were one left, the call fails with EBUSY and changes nothing.
            unsafe { ffi::ibv_destroy_cq(self.raw.as_ptr()) };
        }
    }
}

/// The queues' sizes and limits of one queue pair.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Caps {
    /// Work requests in each queue.
    pub(crate) depth: u32,
    /// Reads and atomics under way.
    pub(crate) rd_atomic: u8,
    /// What peers may do through it, at most.
    pub(crate) access: Access,
}

/// Where the other end is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Peer {
    pub(crate) qp_num: u32,
    pub(crate) lid: u16,
    /// Its GID, and the index in the local table of the one to send from.
    pub(crate) gid: Option<([u8; 16], u8)>,
}

/// A reliable-connected queue pair. Destroyed when dropped; from then on it touches no memory.
pub(crate) struct QueuePair {
    raw: NonNull<ffi::ibv_qp>,
    sends: Arc<CompletionQueue>,
    receives: Arc<CompletionQueue>,
    caps: Caps,
    pd: Arc<Pd>,
}

// SAFETY: a handle for thread-safe calls, not tied to the thread that made it (see `Context`).
unsafe impl Send for QueuePair {}
// SAFETY: as above.
unsafe impl Sync for QueuePair {}

// The address handle's bytes in `ibv_qp_attr`, and how long a peer may take to answer: 4.096 us << 16
// = 268 ms, seven times over, which leaves room for emulated machines.
const ACK_TIMEOUT: u8 = 16;
const RETRIES: u8 = 7;
/// 7 means for ever: a send may wait until its receive is posted.
const RNR_RETRIES: u8 = 7;
/// 12 is 0.64 ms: how long a sender waits before it tries a peer again that had no receive posted.
const MIN_RNR_TIMER: u8 = 12;
const HOP_LIMIT: u8 = 64;
/// Packet numbers have 24 bits.
const PSN_MASK: u32 = 0xff_ffff;

impl QueuePair {
    /// Makes one, with a completion queue for its sends and one, perhaps the same, for its receives.
    pub(crate) fn new(
        pd: &Arc<Pd>,
        sends: &Arc<CompletionQueue>,
        receives: &Arc<CompletionQueue>,
        caps: Caps,
    ) -> Result<Self, CallError> {
        // SAFETY: `ibv_qp_init_attr` is integers and pointers, for which zero and null are valid.
        let mut attr: ffi::ibv_qp_init_attr = unsafe { mem::zeroed() };
        attr.send_cq = sends.raw.as_ptr();
        attr.recv_cq = receives.raw.as_ptr();
        attr.qp_type = ffi::ibv_qp_type::IBV_QPT_RC;
        attr.cap.max_send_wr = caps.depth;
        attr.cap.max_recv_wr = caps.depth;
        attr.cap.max_send_sge = 1;
        attr.cap.max_recv_sge = 1;
        // SAFETY: the PD and the completion queues exist, and `Self` keeps them; `attr` is valid for the
        // call, which writes the real sizes back to it.
        let raw = unsafe { ffi::ibv_create_qp(pd.as_ptr(), &mut attr) };
        let raw = check_ptr("ibv_create_qp", raw)?;
        let (sends, receives) = (sends.clone(), receives.clone());
        Ok(Self { raw, sends, receives, caps, pd: pd.clone() })
    }

    /// Where it is. It exists as long as `self`.
    pub(crate) fn ptr(&self) -> QpPtr {
        QpPtr::new(self.raw)
    }

    pub(crate) fn number(&self) -> u32 {
        // SAFETY: the queue pair exists as long as `self`; its number never changes.
        unsafe { (*self.raw.as_ptr()).qp_num }
    }

    pub(crate) fn sends(&self) -> &CompletionQueue {
        &self.sends
    }

    pub(crate) fn receives(&self) -> &CompletionQueue {
        &self.receives
    }

    /// Connects a new queue pair to its peer: RESET, INIT, RTR, RTS. The other end has to do the same
    /// before anything is posted.
    pub(crate) fn connect(&self, port: &Port, peer: &Peer) -> Result<(), CallError> {
        use ffi::ibv_qp_attr_mask as m;

        let mut attr = zeroed_attr();
        attr.qp_state = ffi::ibv_qp_state::IBV_QPS_INIT;
        attr.port_num = port.number;
        attr.qp_access_flags = self.caps.access.bits();
        self.modify(
            &mut attr,
            m::IBV_QP_STATE | m::IBV_QP_PKEY_INDEX | m::IBV_QP_PORT | m::IBV_QP_ACCESS_FLAGS,
        )?;

        let mut attr = zeroed_attr();
        attr.qp_state = ffi::ibv_qp_state::IBV_QPS_RTR;
        attr.path_mtu = port.mtu;
        attr.dest_qp_num = peer.qp_num;
        attr.rq_psn = peer.qp_num & PSN_MASK;
        attr.max_dest_rd_atomic = self.caps.rd_atomic;
        attr.min_rnr_timer = MIN_RNR_TIMER;
        attr.ah_attr.port_num = port.number;
        attr.ah_attr.dlid = peer.lid;
        if let Some((gid, index)) = peer.gid {
            attr.ah_attr.is_global = 1;
            attr.ah_attr.grh.dgid = ffi::ibv_gid { raw: gid };
            attr.ah_attr.grh.sgid_index = index;
            attr.ah_attr.grh.hop_limit = HOP_LIMIT;
        }
        self.modify(
            &mut attr,
            m::IBV_QP_STATE
                | m::IBV_QP_AV
                | m::IBV_QP_PATH_MTU
                | m::IBV_QP_DEST_QPN
                | m::IBV_QP_RQ_PSN
                | m::IBV_QP_MAX_DEST_RD_ATOMIC
                | m::IBV_QP_MIN_RNR_TIMER,
        )?;

        let mut attr = zeroed_attr();
        attr.qp_state = ffi::ibv_qp_state::IBV_QPS_RTS;
        attr.sq_psn = self.number() & PSN_MASK;
        attr.timeout = ACK_TIMEOUT;
        attr.retry_cnt = RETRIES;
        attr.rnr_retry = RNR_RETRIES;
        attr.max_rd_atomic = self.caps.rd_atomic;
        self.modify(
            &mut attr,
            m::IBV_QP_STATE
                | m::IBV_QP_TIMEOUT
                | m::IBV_QP_RETRY_CNT
                | m::IBV_QP_RNR_RETRY
                | m::IBV_QP_SQ_PSN
                | m::IBV_QP_MAX_QP_RD_ATOMIC,
        )
    }

    fn modify(
        &self,
        attr: &mut ffi::ibv_qp_attr,
        mask: ffi::ibv_qp_attr_mask,
    ) -> Result<(), CallError> {
        // SAFETY: the queue pair exists as long as `self`; `attr` is valid for the call, and all fields
        // that `mask` names are set (the others are zero).
        let r = unsafe { ffi::ibv_modify_qp(self.raw.as_ptr(), attr, mask.0 as c_int) };
        check("ibv_modify_qp", r)
    }

    /// Posts to the send queue.
    ///
    /// # Safety
    /// Until its completion has been polled, or the queue pair is destroyed:
    /// 1. the memory that `request.sge` names stays mapped and is not freed;
    /// 2. if the operation writes to the SGE (read, atomics), nobody else uses that memory; if it
    ///    reads, nobody writes it;
    /// 3. whoever owns the remote memory has agreed to the operation.
    pub(crate) unsafe fn post_send(&self, request: &Request) -> Result<(), CallError> {
        use ffi::ibv_wr_opcode as op;

        // SAFETY: `ibv_send_wr` is integers, pointers and unions of such, for which zero is valid.
        let mut wr: ffi::ibv_send_wr = unsafe { mem::zeroed() };
        wr.wr_id = request.wr_id;
        wr.sg_list = (&raw const request.sge).cast_mut().cast();
        wr.num_sge = 1;
        if request.signaled {
            wr.send_flags = ffi::ibv_send_flags::IBV_SEND_SIGNALED.0;
        }
        let rdma = |remote_addr, rkey: RKey| ffi::wr_t {
            rdma: ffi::rdma_t { remote_addr, rkey: rkey.get() },
        };
        let atomic = |remote_addr, rkey: RKey, compare_add, swap| ffi::wr_t {
            atomic: ffi::atomic_t { remote_addr, compare_add, swap, rkey: rkey.get() },
        };
        wr.opcode = match request.operation {
            Operation::Send => op::IBV_WR_SEND,
            Operation::Write { remote_addr, rkey } => {
                wr.wr = rdma(remote_addr, rkey);
                op::IBV_WR_RDMA_WRITE
            }
            Operation::Read { remote_addr, rkey } => {
                wr.wr = rdma(remote_addr, rkey);
                op::IBV_WR_RDMA_READ
            }
            Operation::CompareSwap { remote_addr, rkey, compare, swap } => {
                wr.wr = atomic(remote_addr, rkey, compare, swap);
                op::IBV_WR_ATOMIC_CMP_AND_SWP
            }
            Operation::FetchAdd { remote_addr, rkey, add } => {
                wr.wr = atomic(remote_addr, rkey, add, 0);
                op::IBV_WR_ATOMIC_FETCH_AND_ADD
            }
        };
        let mut bad = ptr::null_mut();
        // SAFETY: the queue pair exists as long as `self`. `wr` is one request (`next` is null) whose
        // `sg_list` points at one element laid out as `ibv_sge` (asserted in `verbs.rs`), which the
        // call copies and does not write. What the device then does with the memory is the caller's
        // promise.
        check("ibv_post_send", unsafe { ffi::ibv_post_send(self.raw.as_ptr(), &mut wr, &mut bad) })
    }

    /// Posts to the receive queue.
    ///
    /// # Safety
    /// Until its completion has been polled, or the queue pair is destroyed, the memory that `sge`
    /// names stays mapped and is not freed, and nobody else uses it.
    pub(crate) unsafe fn post_recv(&self, wr_id: u64, sge: Sge) -> Result<(), CallError> {
        let mut wr = ffi::ibv_recv_wr {
            wr_id,
            next: ptr::null_mut(),
            sg_list: (&raw const sge).cast_mut().cast(),
            num_sge: 1,
        };
        let mut bad = ptr::null_mut();
        // SAFETY: as in `post_send`.
        check("ibv_post_recv", unsafe { ffi::ibv_post_recv(self.raw.as_ptr(), &mut wr, &mut bad) })
    }
}

fn zeroed_attr() -> ffi::ibv_qp_attr {
    // SAFETY: `ibv_qp_attr` is integers, and a union of integers; zero is a valid value of each.
    unsafe { mem::zeroed() }
}

impl Drop for QueuePair {
    fn drop(&mut self) {
        if self.pd.context().is_in_owner() {
            // SAFETY: made by ibv_create_qp and destroyed here only; its PD and completion queues are
            // still there, since `self` holds them.
            unsafe { ffi::ibv_destroy_qp(self.raw.as_ptr()) };
        }
    }
}
