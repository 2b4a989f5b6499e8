//! The C interface: what `include/pinpool.h` declares. The header is generated from these files.
//!
//! Every entry checks its pointers, answers with a code, and leaves a message for the calling thread. No
//! panic crosses into C. Nothing here decides anything: each function is one call of the pool's.
//!
//! *Handles outlive their pools.* The memory of a closed handle is kept for the rest of the process (some 100
//! bytes each), so that a call with it is answered with `PINPOOL_CLOSED` instead of reading freed memory.
#![allow(non_camel_case_types)]

mod buffer;
mod fail;
mod options;
mod pool;
mod report;
mod share;
mod token;
mod watch;

pub use self::{buffer::*, fail::*, options::*, pool::*, report::*, share::*, token::*, watch::*};
