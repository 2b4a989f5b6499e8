//! A pool, a buffer, its keys. `cargo run --example quickstart [DEVICE | --soft]`
#![allow(clippy::print_stdout)]

use pinpool::{Access, Device, Pool};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let device = match std::env::args().nth(1).as_deref() {
        None => Device::first()?,
        Some("--soft") => Device::soft(),
        Some(name) => Device::open(name)?,
    };
    let pool = Pool::builder()
        .device(device)
        .access(Access::LOCAL_WRITE | Access::REMOTE_READ)
        .capacity(64 << 20) // registered here, once
        .build()?;
    let mut buf = pool.alloc(4096)?;
    buf[..5].copy_from_slice(b"hello");
    println!("post {:?}, tell the peer {:?}", buf.sge(), buf.remote());
    assert_eq!(pool.keys_of(buf.as_ptr()), Some(buf.keys()));
    Ok(())
}
