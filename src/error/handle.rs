//! What a handle of a pool refuses: looking up a class or share, and closing.

use super::{Bytes, RegisterError, list};
use crate::access::Access;

/// Why there is no such access class or share, or not as the type that was asked for.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LookupError {
    /// No access class of that name.
    #[error("this pool has no access class {asked:?}; it has {}", list(present))]
    NoClass {
        /// The name asked for.
        asked: String,
        /// The names that exist.
        present: Vec<String>,
    },
    /// No share of that name, in the pool or in the access class that was asked.
    #[error("there is no share {asked:?} here; there is {}", list(present))]
    NoShare {
        /// The name asked for.
        asked: String,
        /// The names that exist.
        present: Vec<String>,
    },
    /// The class has no remote right, and `Remote` was asked for.
    #[error("access class {class:?} has {access}: no peer can reach it, so it has no rkey to give")]
    NotRemote {
        /// The class.
        class: String,
        /// Its rights.
        access: Access,
    },
    /// The class has a remote right, and `Local` was asked for.
    #[error("access class {class:?} has {access}: peers can reach it, so it is not Local")]
    NotLocal {
        /// The class.
        class: String,
        /// Its rights.
        access: Access,
    },
}

message_in_debug!(LookupError);

/// Why a closed pool could not be torn down at once.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum CloseError {
    /// Other handles of the pool, its classes or its shares exist; the last of them closes it.
    #[error("{0} other handles of this pool, its classes or its shares exist")]
    Shared(usize),
    /// This is a forked child; only the process that built the pool can tear it down.
    #[error(
        "this pool was built by process {owner}, this is process {this}, which owns none of its registrations"
    )]
    ForeignProcess {
        /// The process that built the pool.
        owner: u32,
        /// The caller's.
        this: u32,
    },
    /// Buffers are still out; the last of them tears the pool down.
    #[error("{buffers} buffers ({}) are still out; the pool goes when the last is freed", Bytes(*bytes as u64))]
    Live {
        /// How many.
        buffers: usize,
        /// Bytes of their blocks.
        bytes: usize,
    },
    /// The device would not let go of an arena, which stays mapped for ever.
    #[error("{arenas} arenas ({}) could not be deregistered and stay mapped; first: {first}", Bytes(*bytes as u64))]
    Deregister {
        /// How many arenas.
        arenas: usize,
        /// Bytes that stay mapped.
        bytes: usize,
        /// The first refusal.
        first: RegisterError,
    },
}

message_in_debug!(CloseError);
