//! Why a buffer could not be had, with the books of that moment.

use std::fmt;

use super::Bytes;

/// Why a buffer could not be had.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AllocError {
    /// No buffer of any pool like this one can be that large.
    #[error("{} is more than any buffer here can have: the most is {}", Bytes(*asked as u64), Bytes(*max as u64))]
    TooLarge {
        /// Bytes asked.
        asked: usize,
        /// The longest buffer.
        max: usize,
    },
    /// An alignment that is not a power of two or larger than an arena.
    #[error("alignment {asked} is not a power of two up to {max}")]
    Alignment {
        /// Bytes asked.
        asked: usize,
        /// The largest alignment.
        max: usize,
    },
    /// Nothing free that is large enough, in any thread's cache either.
    #[error("{0}")]
    Exhausted(Box<Exhausted>),
    /// Nothing large enough came free in time.
    #[error("waited {waited:?} for memory, {ahead} requests were ahead at the end: {books}")]
    TimedOut {
        /// How long it waited.
        waited: std::time::Duration,
        /// How many requests that came earlier still waited.
        ahead: usize,
        /// The books when it gave up.
        books: Box<Exhausted>,
    },
    /// A batch holds buffers of another length or pool: free or pop them first.
    #[error(
        "the batch holds {held} buffers of {len} bytes; it can take others only when it is empty"
    )]
    BatchInUse {
        /// How many it holds.
        held: usize,
        /// Their length.
        len: usize,
    },
    /// What is left of the pool is of other blocks than the batch holds: take it with `Pool::alloc`, or
    /// into an empty batch.
    #[error(
        "the pool has only blocks of another class left for {len} bytes; the batch holds {held} of one class"
    )]
    BatchMixed {
        /// How many the batch holds.
        held: usize,
        /// Bytes asked.
        len: usize,
    },
    /// The access class is one of another pool.
    #[error("the access class is one of another pool: ask this pool for it, with Pool::class")]
    OtherPool,
    /// The pool belongs to the process that built it, and this is a forked child of that.
    #[error(
        "this pool was built by process {owner}, this is process {this}: a forked child cannot use registered memory"
    )]
    ForeignProcess {
        /// The process that built the pool.
        owner: u32,
        /// The caller's.
        this: u32,
    },
}

message_in_debug!(AllocError);

/// The books at the moment when a pool had nothing left.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Exhausted {
    /// Bytes asked.
    pub asked: usize,
    /// Bytes of the block that it would have taken.
    pub block: usize,
    /// Bytes that this allocation may be served from: what no share has reserved of its access class, and
    /// for a share its own reserve.
    pub capacity: usize,
    /// Bytes of the same access class that are reserved for others.
    pub reserved: usize,
    /// Bytes that it may grow to.
    pub max_capacity: usize,
    /// Bytes of blocks that are out in buffers.
    pub live: usize,
    /// How many buffers that is.
    pub live_buffers: usize,
    /// Bytes that no buffer has; no run of them is long enough.
    pub not_live: usize,
    /// The longest free run, in bytes.
    pub largest_free: usize,
    /// How many requests wait for memory; what is free may be kept for them.
    pub waiting: usize,
}

impl fmt::Display for Exhausted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let b = |n: usize| Bytes(n as u64);
        write!(
            f,
            "pool exhausted: {} asked (a block of {}), {} of {} are out in {} buffers, {} are not, \
             longest free run {}, {} requests wait",
            b(self.asked),
            b(self.block),
            b(self.live),
            b(self.capacity),
            self.live_buffers,
            b(self.not_live),
            b(self.largest_free),
            self.waiting
        )?;
        if self.reserved > 0 {
            write!(f, "; {} more are reserved for other shares", b(self.reserved))?;
        }
        f.write_str(". ")?;
        if self.capacity < self.max_capacity {
            let max = b(self.max_capacity);
            return write!(
                f,
                "The pool may grow to {max} and may do so now: try again later, or raise the low watermark"
            );
        }
        f.write_str("Free buffers or raise the capacity")
    }
}

impl std::error::Error for Exhausted {}
