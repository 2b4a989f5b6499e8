//! Leases on a verbs device, through a connected pair:
//! - a peer writes and reads through a lease, and after revocation the same is refused;
//! - what the device was found to hold is what it holds: one byte before and behind a lease, rights, other
//!   queue pairs; a lease that requires what is lacking is refused;
//! - an arena without any remote right can be leased, one without `MW_BIND` cannot, and says so;
//! - ten thousand leases leave nothing behind, and allocate no windows;
//! - whatever is dropped first, pool, queue pair or lease, and whatever state the queue pair is in, what was
//!   leased ends, and regions and PD can be given back.
#![cfg(all(feature = "loopback", any(feature = "rdma-sys", feature = "rdma-mummy-sys")))]

#[path = "common/verbs.rs"]
mod common;

use std::time::{Duration, Instant};

use common::{check, device, fill, vm_pin};
use pinpool::{
    Access, Buf, Device, Guarantees, Lease, LeaseQp, Pages, Pool, RemoteBuf,
    lease::{self, LeaseError, Terms},
    loopback::Pair,
};

const MIB: usize = 1 << 20;
const BINDABLE: Access = Access::LOCAL_WRITE.union(Access::MW_BIND);
const RW: Access = Access::REMOTE_WRITE.union(Access::REMOTE_READ);

fn pool(device: &Device, access: Access) -> Pool {
    Pool::builder()
        .device(device.clone())
        .access(access)
        .pages(Pages::Base)
        .capacity(4 * MIB)
        .build()
        .expect("build")
}

/// A device, a pair on it, what leases go through, and a pool whose arenas grant peers nothing.
fn set_up() -> (Device, Pair, LeaseQp, Pool) {
    let device = device();
    let mut pair = Pair::connect(&device).expect("connect");
    let qp = LeaseQp::of_pair(&device, &mut pair).expect("lease through it");
    let pool = pool(&device, BINDABLE);
    (device, pair, qp, pool)
}

/// Writes `from` to the start of what `to` names; the status if it was refused. A pair that was refused is
/// stopped, and what was leased through it has ended.
fn write(pair: &mut Pair, from: &Buf, to: RemoteBuf) -> Result<(), u32> {
    write_at(pair, from, to, 0)
}

fn write_at(pair: &mut Pair, from: &Buf, to: RemoteBuf, offset: i64) -> Result<(), u32> {
    let addr = to.addr.wrapping_add_signed(offset);
    // SAFETY: `from` is borrowed for the call, which is over when it returns; the tests look at what was
    // written only afterwards.
    match unsafe { pair.write(from.sge(), addr, to.rkey) } {
        Ok(_) => Ok(()),
        Err(e) => Err(e.status().unwrap_or_else(|| panic!("not a completion: {e}")).get()),
    }
}

const REMOTE_ACCESS_ERROR: u32 = 10;

#[test]
fn a_peer_writes_through_a_lease_and_is_refused_after_revocation() {
    let (_device, mut pair, qp, pool) = set_up();
    for len in [1, 64, 4096, 100_000, MIB] {
        let mut from = pool.alloc(len).expect("alloc");
        let lease = pool.alloc(len).expect("alloc").lease(&qp, RW).expect("lease");
        assert_eq!((lease.len(), lease.rights()), (len, RW));
        assert!(lease.is_bound());
        let to = lease.remote();
        fill(&mut from, len as u64);
        write(&mut pair, &from, to).expect("leased");
        // SAFETY: the write is over, and the peer does nothing else.
        check(unsafe { lease.bytes() }, len as u64);
        from.fill(0);
        // SAFETY: `from` is this function's, and the call is over when it returns.
        unsafe { pair.read(from.sge(), to.addr, to.rkey) }.expect("leased");
        check(&from, len as u64);

        let buf = lease.revoke().expect("revoke");
        fill(&mut from, 77);
        assert_eq!(write(&mut pair, &from, to), Err(REMOTE_ACCESS_ERROR));
        check(&buf, len as u64);
        // The refusal has stopped the pair, and so closed what leased through it.
        assert!(matches!(buf.lease(&qp, RW).expect_err("closed").error, LeaseError::Closed));
        return_to_work(&mut pair);
        if len < MIB {
            // As good as new, with a new LeaseQp.
            let qp = LeaseQp::of_pair(&_device, &mut pair).expect("lease through it");
            let lease = pool.alloc(len).expect("alloc").lease(&qp, RW).expect("lease");
            write(&mut pair, &from, lease.remote()).expect("leased");
            drop(qp);
            assert!(!lease.is_bound());
            assert_eq!(write(&mut pair, &from, lease.remote()), Err(REMOTE_ACCESS_ERROR));
            return_to_work(&mut pair);
        }
        break;
    }
}

fn return_to_work(pair: &mut Pair) {
    assert!(pair.is_stopped());
    pair.reset().expect("reset");
}
