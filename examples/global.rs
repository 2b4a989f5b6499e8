//! An unchanged `Vec`, sent by RDMA: once a pool is attached, the process's own allocations are registered
//! memory.
//!
//! `cargo run --features global,loopback --example global [DEVICE | --soft]`

#![allow(clippy::print_stdout)]

use std::error::Error;

use pinpool::{Access, Device, PinnedAlloc, Pool, RemoteBuf, loopback::Pair};

#[global_allocator]
static ALLOC: PinnedAlloc = PinnedAlloc::new();

/// Code that knows nothing of registered memory.
fn squares(n: u64) -> Vec<u64> {
    (0..n).map(|i| i * i).collect()
}

fn as_bytes(v: &[u64]) -> &[u8] {
    // SAFETY: all bytes of integers are initialised, and a byte has no alignment.
    unsafe { std::slice::from_raw_parts(v.as_ptr().cast(), size_of_val(v)) }
}

/// Writes `from` into the peer's memory.
fn write(device: &Device, from: &[u64], to: RemoteBuf) -> Result<(), Box<dyn Error>> {
    let sge = ALLOC.sge_of(as_bytes(from)).ok_or("not in registered memory")?;
    println!("from {sge:?} to {to:?}");
    if let Some(soft) = device.as_soft() {
        // SAFETY: nobody looks at the peer's memory meanwhile.
        return Ok(unsafe { soft.write(to.rkey, to.addr, as_bytes(from)) }?);
    }
    let mut pair = Pair::connect(device)?;
    // SAFETY: nobody changes the one or looks at the other meanwhile.
    unsafe { pair.write(sge, to.addr, to.rkey)? };
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    let before = squares(100_000);
    let device = match std::env::args().nth(1).as_deref() {
        None => Device::first()?,
        Some("--soft") => Device::soft(),
        Some(name) => Device::open(name)?,
    };
    let pool = Pool::builder()
        .device(device.clone())
        .access(Access::LOCAL_WRITE | Access::REMOTE_WRITE)
        .capacity(64 << 20)
        .build()?;
    ALLOC.attach(&pool)?;
    assert!(ALLOC.keys_of(before.as_ptr()).is_none(), "what was there stays where it was");

    let mine = squares(100_000);
    let theirs = vec![0u64; 100_000];
    let to = ALLOC.remote_of(as_bytes(&theirs)).ok_or("not in registered memory")?;
    write(&device, &mine, to)?;
    // The device wrote behind the compiler's back: look anew.
    assert_eq!(std::hint::black_box(&theirs), &before);
    println!("{} bytes of a Vec arrived in another", size_of_val(&theirs[..]));
    Ok(())
}
