//! `include/pinpool.h` is what the source says it is.
//!
//! - The header in the repository is the one that cbindgen makes from `src/adapters/capi` today.
//! - With `PINPOOL_WRITE_HEADER=1` it is written anew instead.
#![cfg(feature = "capi")]
#![allow(clippy::unwrap_used)]

use std::{env, fs, path::Path};

#[test]
fn the_header_is_current() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let config = cbindgen::Config::from_file(root.join("cbindgen.toml")).unwrap();
    let mut builder = cbindgen::Builder::new().with_config(config);
    for file in ["fail", "options", "pool", "buffer", "share", "token", "watch", "report"] {
        builder = builder.with_src(root.join(format!("src/adapters/capi/{file}.rs")));
    }
    let mut made = Vec::new();
    builder.generate().unwrap().write(&mut made);
    // What Rust's documentation calls safety is to C what a call requires.
    let made = String::from_utf8(made).unwrap().replace(" # Safety\n", " Requires:\n");
    let path = root.join("include/pinpool.h");
    if env::var_os("PINPOOL_WRITE_HEADER").is_some() {
        fs::write(&path, &made).unwrap();
    }
    let there = fs::read_to_string(&path).unwrap_or_default();
    assert!(
        there == made,
        "include/pinpool.h is not what the source says; write it anew with \
         PINPOOL_WRITE_HEADER=1 cargo test --features capi --test host_header"
    );
}
