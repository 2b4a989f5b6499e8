//! Cases from the field that need a device and no process of their own: which rights reach it (B09).
#![cfg(all(feature = "loopback", any(feature = "rdma-sys", feature = "rdma-mummy-sys")))]

#[path = "common/verbs.rs"]
mod common;

use common::{check, device, fill};
use pinpool::{
    Access, BuildError, Pages, Pool,
    loopback::{Pair, Status},
};

fn build(device: &pinpool::Device, access: Access) -> Result<Pool, BuildError> {
    Pool::builder()
        .device(device.clone())
        .access(access)
        .pages(Pages::Base)
        .capacity(1 << 20)
        .build()
}

#[test]
fn b09_writing_for_peers_without_local_write_is_refused_with_a_reason() {
    let device = device();
    for asked in [Access::REMOTE_WRITE, Access::REMOTE_ATOMIC, Access::REMOTE] {
        let e = build(&device, asked).expect_err("refused");
        assert!(matches!(e, BuildError::Access { access, .. } if access == asked), "{e:?}");
        assert!(e.to_string().contains("needs LOCAL_WRITE"), "{e}");
        let granted = build(&device, asked | Access::LOCAL_WRITE).expect("with local write");
        assert_eq!(granted.arenas()[0].access, asked | Access::LOCAL_WRITE, "effective rights");
    }
}

#[test]
fn b09_remote_read_alone_gains_no_write_right() {
    let device = device();
    let mut pair = Pair::connect(&device).expect("connect");
    let pool = build(&device, Access::REMOTE_READ).expect("build");
    assert_eq!(pool.arenas()[0].access, Access::REMOTE_READ, "effective rights");
    let everything = build(&device, Access::LOCAL_WRITE | Access::REMOTE).expect("build");
    let mut target = pool.alloc(64).expect("alloc");
    let mut other = everything.alloc(64).expect("alloc");
    fill(&mut target, 1);
    let at = target.remote().expect("peers may read");
    let from = other.remote().expect("a remote right");
    // SAFETY: both buffers are this test's, and nothing else uses them until it returns.
    unsafe { pair.read(other.sge(), at.addr, at.rkey) }.expect("peers read");
    check(&other, 1);
    other.fill(0);
    // SAFETY: as above.
    let e = unsafe { pair.write(other.sge(), at.addr, at.rkey) }.expect_err("peers do not write");
    assert_eq!(e.status(), Some(Status::REM_ACCESS_ERR), "{e}");
    pair.reset().expect("reset");
    // SAFETY: as above.
    let e = unsafe { pair.read(target.sge(), from.addr, from.rkey) }.expect_err("nor the device");
    assert_eq!(e.status(), Some(Status::LOC_PROT_ERR), "{e}");
    pair.reset().expect("reset");
    // SAFETY: as above.
    let e = unsafe { pair.send_recv(other.sge(), target.sge()) }.expect_err("nor for a receive");
    assert!(e.status().is_some(), "{e}");
    check(&target, 1);
}
