//! Queue pairs made with the binding alone, as a framework of its own makes them.

use std::{
    ffi::c_void,
    mem, ptr,
    time::{Duration, Instant},
};

#[cfg(feature = "rdma-mummy-sys")]
use rdma_mummy_sys as ffi;
#[cfg(not(feature = "rdma-mummy-sys"))]
use rdma_sys as ffi;

use pinpool::{Access, Device, RKey, Sge};

/// A reliable-connected queue pair with a completion queue of its own.
pub(crate) struct RawQp {
    qp: *mut ffi::ibv_qp,
    cq: *mut ffi::ibv_cq,
    gid: [u8; 16],
    gid_index: u8,
    // Keeps PD and context.
    _device: Device,
}

// SAFETY: handles for thread-safe calls.
unsafe impl Send for RawQp {}
// SAFETY: as above.
unsafe impl Sync for RawQp {}

const PORT: u8 = 1;

impl RawQp {
    pub(crate) fn new(device: &Device) -> Self {
        let verbs = device.as_verbs().expect("a verbs device");
        let (pd, context) = (verbs.pd().cast(), verbs.context().cast());
        let (gid_index, gid) = (0..16)
            .filter_map(|i| {
                let mut gid = ffi::ibv_gid { raw: [0; 16] };
                // SAFETY: the context is open, `gid` is writable; both members are 16 bytes.
                let (r, raw) = unsafe { (ffi::ibv_query_gid(context, PORT, i, &mut gid), gid.raw) };
                let v4 = std::net::Ipv6Addr::from(raw).to_ipv4_mapped().is_some();
                (r == 0 && v4).then_some((i as u8, raw))
            })
            .next()
            .expect("a GID that stands for an IPv4 address");
        // SAFETY: the device keeps the context open and the PD allocated.
        unsafe {
            let cq = ffi::ibv_create_cq(context, 256, ptr::null_mut(), ptr::null_mut(), 0);
            assert!(!cq.is_null());
            let mut attr: ffi::ibv_qp_init_attr = mem::zeroed();
            attr.send_cq = cq;
            attr.recv_cq = cq;
            attr.qp_type = ffi::ibv_qp_type::IBV_QPT_RC;
            attr.cap.max_send_wr = 64;
            attr.cap.max_recv_wr = 64;
            attr.cap.max_send_sge = 1;
            attr.cap.max_recv_sge = 1;
            let qp = ffi::ibv_create_qp(pd, &mut attr);
            assert!(!qp.is_null());
            Self { qp, cq, gid, gid_index, _device: device.clone() }
        }
    }

    pub(crate) fn as_raw(&self) -> *mut c_void {
        self.qp.cast()
    }

    pub(crate) fn number(&self) -> u32 {
        // SAFETY: it exists as long as `self`.
        unsafe { (*self.qp).qp_num }
    }

    /// Connects to a queue pair of the same port; that has to do the same.
    pub(crate) fn connect(&self, peer: u32) {
        use ffi::ibv_qp_attr_mask as m;
        let access =
            Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ | Access::MW_BIND;
        let modify = |attr: &mut ffi::ibv_qp_attr, mask: ffi::ibv_qp_attr_mask| {
            // SAFETY: it exists, and the fields that the mask names are set.
            let r = unsafe { ffi::ibv_modify_qp(self.qp, attr, mask.0 as i32) };
            assert_eq!(r, 0, "ibv_modify_qp");
        };
        // SAFETY: integers, for which zero is valid.
        let zeroed = || unsafe { mem::zeroed::<ffi::ibv_qp_attr>() };
        let mut attr = zeroed();
        attr.qp_state = ffi::ibv_qp_state::IBV_QPS_INIT;
        attr.port_num = PORT;
        attr.qp_access_flags = access.bits();
        let mask = m::IBV_QP_STATE | m::IBV_QP_PKEY_INDEX | m::IBV_QP_PORT | m::IBV_QP_ACCESS_FLAGS;
        modify(&mut attr, mask);
        let mut attr = zeroed();
        attr.qp_state = ffi::ibv_qp_state::IBV_QPS_RTR;
        attr.path_mtu = 3; // 1024
        attr.dest_qp_num = peer;
        attr.max_dest_rd_atomic = 1;
        attr.min_rnr_timer = 12;
        attr.ah_attr.port_num = PORT;
        attr.ah_attr.is_global = 1;
        attr.ah_attr.grh.dgid = ffi::ibv_gid { raw: self.gid };
        attr.ah_attr.grh.sgid_index = self.gid_index;
        attr.ah_attr.grh.hop_limit = 64;
        let mask = m::IBV_QP_STATE
            | m::IBV_QP_AV
            | m::IBV_QP_PATH_MTU
            | m::IBV_QP_DEST_QPN
            | m::IBV_QP_RQ_PSN
            | m::IBV_QP_MAX_DEST_RD_ATOMIC
            | m::IBV_QP_MIN_RNR_TIMER;
        modify(&mut attr, mask);
        let mut attr = zeroed();
        attr.qp_state = ffi::ibv_qp_state::IBV_QPS_RTS;
        attr.timeout = 14;
        attr.retry_cnt = 7;
        attr.rnr_retry = 7;
        attr.max_rd_atomic = 1;
        let mask = m::IBV_QP_STATE
            | m::IBV_QP_TIMEOUT
            | m::IBV_QP_RETRY_CNT
            | m::IBV_QP_RNR_RETRY
            | m::IBV_QP_SQ_PSN
            | m::IBV_QP_MAX_QP_RD_ATOMIC;
        modify(&mut attr, mask);
    }

    /// Posts an RDMA WRITE that reports.
    ///
    /// # Safety
    /// The memory that `sge` names stays until it has completed, or this is dropped.
    pub(crate) unsafe fn write(&self, wr_id: u64, sge: Sge, remote_addr: u64, rkey: RKey) {
        // SAFETY: integers, pointers and unions of such, for which zero is valid.
        let mut wr: ffi::ibv_send_wr = unsafe { mem::zeroed() };
        wr.wr_id = wr_id;
        wr.sg_list = (&raw const sge).cast_mut().cast();
        wr.num_sge = 1;
        wr.opcode = ffi::ibv_wr_opcode::IBV_WR_RDMA_WRITE;
        wr.send_flags = ffi::ibv_send_flags::IBV_SEND_SIGNALED.0;
        wr.wr = ffi::wr_t { rdma: ffi::rdma_t { remote_addr, rkey: rkey.get() } };
        let mut bad = ptr::null_mut();
        // SAFETY: it exists; one request, with one element, both read by the call alone.
        assert_eq!(unsafe { ffi::ibv_post_send(self.qp, &mut wr, &mut bad) }, 0, "ibv_post_send");
    }

    /// The next completion, if one is there: number, status, vendor code.
    pub(crate) fn poll(&self) -> Option<(u64, u32, u32)> {
        // SAFETY: integers, for which zero is valid.
        let mut wc: ffi::ibv_wc = unsafe { mem::zeroed() };
        // SAFETY: it exists, and `wc` has room for one.
        match unsafe { ffi::ibv_poll_cq(self.cq, 1, &mut wc) } {
            0 => None,
            1 => Some((wc.wr_id, wc.status, wc.vendor_err)),
            n => panic!("ibv_poll_cq: {n}"),
        }
    }

    /// Waits for the next completion.
    pub(crate) fn next(&self) -> (u64, u32, u32) {
        let start = Instant::now();
        loop {
            if let Some(come) = self.poll() {
                return come;
            }
            assert!(start.elapsed() < Duration::from_secs(30), "no completion");
            std::thread::yield_now();
        }
    }

    /// The number in an `ibv_wc *`.
    ///
    /// # Safety
    /// It is one.
    pub(crate) unsafe fn number_in(wc: *const c_void) -> u64 {
        // SAFETY: passed on.
        unsafe { (*wc.cast::<ffi::ibv_wc>()).wr_id }
    }
}

impl Drop for RawQp {
    fn drop(&mut self) {
        // SAFETY: made by `new`, and destroyed here only, the queue pair first.
        unsafe {
            assert_eq!(ffi::ibv_destroy_qp(self.qp), 0);
            assert_eq!(ffi::ibv_destroy_cq(self.cq), 0);
        }
    }
}
