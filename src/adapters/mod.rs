//! The faces: what lets code that speaks another language, or another crate's traits, use a pool.

#[cfg(feature = "capi")]
pub mod capi;
