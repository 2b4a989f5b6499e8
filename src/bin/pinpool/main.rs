//! The `pinpool` command line.
fn main() {}
