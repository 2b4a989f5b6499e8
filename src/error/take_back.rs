//! Why a raw pointer or a token was not taken back.

/// Why a raw pointer was not taken back. Nothing was changed.
#[derive(Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FreeError {
    /// Null.
    #[error("the pointer is null")]
    Null,
    /// Not of this pool.
    #[error("{addr:#x} lies outside this pool ({start:#x}..{end:#x})")]
    Foreign {
        /// The pointer.
        addr: usize,
        /// The pool's first byte.
        start: usize,
        /// One past its last.
        end: usize,
    },
    /// Inside a block, not at its start.
    #[error("{addr:#x} points {offset} bytes into a block of {block}; only its start can be freed")]
    Interior {
        /// The pointer.
        addr: usize,
        /// Bytes from the block's start.
        offset: usize,
        /// Bytes of the block.
        block: usize,
    },
    /// A buffer of an access class that the handle's type rules out. Free it through the pool, or take it
    /// back through that class.
    #[error("{addr:#x} lies in arenas that peers {}, the handle is for others", if *remote { "can reach" } else { "cannot reach" })]
    OtherReach {
        /// The pointer.
        addr: usize,
        /// Whether its class has a remote right.
        remote: bool,
    },
    /// No raw buffer is out at that address: freed already, in flight as a token, or still owned by a `Buf`.
    #[error(
        "{addr:#x} is not out as a raw buffer: freed twice, in flight as a token, or still owned by a handle"
    )]
    NotOut {
        /// The pointer.
        addr: usize,
    },
}

message_in_debug!(FreeError);

/// Why a token was not taken back. Nothing was changed.
#[derive(Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TokenError {
    /// Not of this pool.
    #[error("{token:#018x} is no token of this pool: it is another pool's, or made up")]
    OtherPool {
        /// The number.
        token: u64,
    },
    /// It names no block that this pool can have.
    #[error("{token:#018x} names no block of this pool: it is made up, or was damaged on its way")]
    Invalid {
        /// The number.
        token: u64,
    },
    /// Its flight is over: taken back already, or never begun.
    #[error("{token:#018x} is not in flight: taken back already, or made up")]
    NotInFlight {
        /// The number.
        token: u64,
    },
    /// Its buffer is of another access class than the handle, or of a share.
    #[error(
        "{token:#018x} is of another class or share of this pool: Pool::from_any_token takes it back"
    )]
    OtherHeap {
        /// The number.
        token: u64,
    },
    /// Its buffer is of an access class that the handle's type rules out. Take it back through the pool, or
    /// through that class.
    #[error("{token:#018x} is of a buffer that peers {}, the handle is for others", if *remote { "can reach" } else { "cannot reach" })]
    OtherReach {
        /// The number.
        token: u64,
        /// Whether its class has a remote right.
        remote: bool,
    },
    /// It belongs to a `Posted`: report its completion by `Pool::complete`.
    #[error(
        "{token:#018x} belongs to a posted work request; report its completion by Pool::complete"
    )]
    Posted {
        /// The number.
        token: u64,
    },
    /// The pool belongs to the process that built it, and this is a forked child of that.
    #[error("this pool was built by process {owner}, this is process {this}, which posted nothing")]
    ForeignProcess {
        /// The process that built the pool.
        owner: u32,
        /// The caller's.
        this: u32,
    },
}

message_in_debug!(TokenError);
