//! A pool on something other than a NIC: its arenas are the fixed buffers of an io_uring, registered once,
//! and files are written and read through its buffers by index.
//!
//! ```sh
//! cargo run --no-default-features --example io_uring
//! ```
#![allow(clippy::print_stdout)]

mod ring;

use std::{env, error::Error, fs::File};

use pinpool::{Pages, Pool};

fn main() -> Result<(), Box<dyn Error>> {
    let ring = ring::Ring::new(4)?;
    let pool = Pool::builder()
        .device(ring.device())
        .capacity(4 << 20)
        .arena_size(1 << 20)
        .pages(Pages::Base)
        .build()?;
    println!("{} arenas, {} register calls", pool.arenas().len(), pool.stats().register_calls);

    let path = env::temp_dir().join(format!("pinpool-io-uring-{}", std::process::id()));
    let file = File::options().read(true).write(true).create_new(true).open(&path)?;
    std::fs::remove_file(&path)?;

    let mut page = pool.alloc(4096)?;
    page.fill(b'x');
    let written = ring.write(&file, &page, 0)?;
    let mut back = pool.alloc(4096)?;
    let read = ring.read(&file, &mut back, 0)?;
    assert!(written == 4096 && read == 4096 && back[..] == page[..]);
    println!("wrote and read {read} bytes through fixed buffer {}", page.lkey().get());
    Ok(())
}
