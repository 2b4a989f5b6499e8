//! Errors: one enum an operation, each with the numbers needed to act.

use std::{fmt, io};

use crate::{
    access::Access,
    problem::{self, Problem},
};

/// A byte count that prints exactly and, where it helps, also in binary units.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Bytes(pub u64);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [(u32, &str); 4] = [(40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")];
        if self.0 == u64::MAX {
            return f.write_str("unlimited");
        }
        for (shift, name) in UNITS {
            let unit = 1u64 << shift;
            if self.0 >= unit {
                return if self.0.is_multiple_of(unit) {
                    write!(f, "{} {name}", self.0 >> shift)
                } else {
                    write!(f, "{} bytes ({:.1} {name})", self.0, self.0 as f64 / unit as f64)
                };
            }
        }
        write!(f, "{} bytes", self.0)
    }
}

impl fmt::Debug for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Why a device could not be opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// No verbs device at all.
    #[error(
        "this machine has no RDMA device; load a driver, add a soft one \
         (`rdma link add rxe0 type rxe netdev <netdev>`), or ask for Device::soft() by name"
    )]
    NoDevice,
    /// No verbs device of that name.
    #[error("there is no RDMA device {asked:?}; present: {}", list(present))]
    NotFound {
        /// The name asked for.
        asked: String,
        /// The names that exist.
        present: Vec<String>,
    },
    /// A call into libibverbs failed.
    #[error("{call} failed on {device}: {source}")]
    Verbs {
        /// The call, as the manual names it.
        call: &'static str,
        /// The device's name.
        device: String,
        /// Its errno.
        source: io::Error,
    },
    /// A null pointer where a handle was expected.
    #[error("{0} is null")]
    Null(&'static str),
}

fn list(names: &[String]) -> String {
    if names.is_empty() { "none".into() } else { names.join(", ") }
}

/// Why a range could not be registered or deregistered.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RegisterError {
    /// The device refused to register.
    #[error("{call} of {len} with {access} on {device} failed: {source}", len = Bytes(*len as u64))]
    Register {
        /// The call, as the manual names it.
        call: &'static str,
        /// The device's name.
        device: String,
        /// Bytes asked.
        len: usize,
        /// Rights asked.
        access: Access,
        /// The device's errno.
        source: io::Error,
    },
    /// The device refused to deregister; the range counts as still registered.
    #[error("{call} on {device} failed: {source}")]
    Deregister {
        /// The call, as the manual names it.
        call: &'static str,
        /// The device's name.
        device: String,
        /// The device's errno.
        source: io::Error,
    },
}

impl RegisterError {
    /// The errno that the device gave, if it gave one.
    pub fn raw_os_error(&self) -> Option<i32> {
        match self {
            Self::Register { source, .. } | Self::Deregister { source, .. } => {
                source.raw_os_error()
            }
        }
    }
}

/// Why a pool could not be built. Whatever had been done by then is undone.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BuildError {
    /// The builder was given no device.
    #[error(
        "no device: call Builder::device with Device::open, Device::first or, for software, Device::soft"
    )]
    NoDevice,
    /// Capacity zero.
    #[error("capacity is 0: a pool needs at least one page of memory")]
    ZeroCapacity,
    /// More than the address space holds.
    #[error("capacity {} does not fit the address space; the most is {}", Bytes(*asked as u64), Bytes(*max as u64))]
    CapacityTooLarge {
        /// Bytes asked.
        asked: usize,
        /// The most that can be asked.
        max: usize,
    },
    /// The arena size is not usable.
    #[error("arena size {} {problem}", Bytes(*asked as u64))]
    ArenaSize {
        /// Bytes asked.
        asked: usize,
        /// What is wrong with it, with the bound.
        problem: String,
    },
    /// These rights cannot be registered together.
    #[error("access {access}: {reason}")]
    Access {
        /// Rights asked.
        access: Access,
        /// Why not.
        reason: &'static str,
    },
    /// The device's regions are too small.
    #[error(
        "one page of {} is larger than the largest memory region of {device} (max_mr_size {})",
        Bytes(*page_size as u64), Bytes(*max_mr_size)
    )]
    MrTooSmall {
        /// The device's name.
        device: String,
        /// Bytes of a page.
        page_size: usize,
        /// The device's limit.
        max_mr_size: u64,
    },
    /// The device holds too few regions.
    #[error(
        "{arenas} arenas of {} need {arenas} memory regions, {device} holds {max_mr} in all (max_mr); \
         ask for larger arenas",
        Bytes(*arena_size as u64)
    )]
    TooManyArenas {
        /// The device's name.
        device: String,
        /// Arenas that the capacity comes to.
        arenas: usize,
        /// Bytes of one.
        arena_size: usize,
        /// The device's limit.
        max_mr: u64,
    },
    /// The process may not pin so much.
    #[error(
        "pinning {} more exceeds the locked-memory limit: {} of it is in use, RLIMIT_MEMLOCK is {} soft, {} hard, \
         and the process lacks CAP_IPC_LOCK in the initial user namespace. Raise it: `ulimit -l unlimited`, \
         `LimitMEMLOCK=infinity` in a systemd unit, or a memlock line in /etc/security/limits.conf",
        Bytes(*asked), Bytes(*pinned), Bytes(*soft), Bytes(*hard)
    )]
    Memlock {
        /// Bytes that this pool would pin.
        asked: u64,
        /// Bytes that the process has pinned or locked already.
        pinned: u64,
        /// The soft limit; `u64::MAX` is unlimited.
        soft: u64,
        /// The hard limit.
        hard: u64,
        /// The device's errno, if it was the device that refused.
        errno: Option<i32>,
    },
    /// The system has no pages of that size at all.
    #[error("this system has no pages of {}; it has {}", Bytes(*asked as u64), sizes(offered))]
    PageSizeAbsent {
        /// Bytes of the page asked for.
        asked: usize,
        /// Bytes of those that exist.
        offered: Vec<usize>,
    },
    /// The machine is not set up for this pool: everything that is wrong, before a page was mapped.
    /// [`Memlock`](BuildError::Memlock), [`TooManyArenas`](BuildError::TooManyArenas),
    /// [`MrTooSmall`](BuildError::MrTooSmall), [`ArenaSize`](BuildError::ArenaSize) and
    /// [`PageSizeAbsent`](BuildError::PageSizeAbsent) stand for themselves when they are all that is.
    #[error("{}", problem::list(.0))]
    Preflight(Vec<Problem>),
    /// No address range for the pool.
    #[error("reserving {} of address space failed: {source}", Bytes(*len as u64))]
    Reserve {
        /// Bytes asked.
        len: usize,
        /// The system's errno.
        source: io::Error,
    },
    /// The NUMA node asked for cannot hold the pool, or one of its arenas.
    #[error(
        "NUMA node {node} cannot give {} in pages of {}: {problem}; {}",
        Bytes(*needed), Bytes(*page_size as u64), node_hint(*node, *page_size, *free)
    )]
    Node {
        /// The node.
        node: u32,
        /// What is wrong.
        problem: String,
        /// Bytes that were to come from it.
        needed: u64,
        /// Bytes of a page.
        page_size: usize,
        /// Bytes that are free there in pages of that size, where the system says.
        free: Option<u64>,
    },
    /// No memory for an arena.
    #[error(
        "backing arena {arena} of {arenas} ({}) with pages of {} failed when {step}: {source}{}",
        Bytes(*len as u64), Bytes(*page_size as u64), page_hint(*len, *page_size, *free_pages)
    )]
    Back {
        /// Which arena, from 0.
        arena: usize,
        /// How many there were to be.
        arenas: usize,
        /// Bytes of it.
        len: usize,
        /// Bytes of a page.
        page_size: usize,
        /// Hugepages of that size that were free when it failed.
        free_pages: Option<u64>,
        /// `"mapping"`, `"binding to nodes"` or `"faulting in"`.
        step: &'static str,
        /// The system's errno.
        source: io::Error,
    },
    /// The device refused an arena.
    #[error("registering arena {arena} of {arenas} failed: {source}")]
    Register {
        /// Which arena, from 0.
        arena: usize,
        /// How many there were to be.
        arenas: usize,
        /// The device's refusal, errno kept.
        source: RegisterError,
    },
}

fn sizes(sizes: &[usize]) -> String {
    let all: Vec<_> = sizes.iter().map(|&s| Bytes(s as u64).to_string()).collect();
    all.join(", ")
}

fn node_hint(node: u32, page: usize, free: Option<u64>) -> String {
    let Some(free) = free else { return "what is free there is not known".to_owned() };
    if page <= 64 << 10 {
        return format!("{} are free there", Bytes(free));
    }
    let dir = format!("/sys/devices/system/node/node{node}/hugepages/hugepages-{}kB", page >> 10);
    let pages = free / page as u64;
    format!("{pages} such pages are free there. Reserve more (`echo N > {dir}/nr_hugepages`)")
}

fn page_hint(len: usize, page: usize, free: Option<u64>) -> String {
    let Some(free) = free else { return String::new() };
    let need = len.div_ceil(page);
    let dir = format!("/sys/kernel/mm/hugepages/hugepages-{}kB", page >> 10);
    format!(
        "; it needs {need} hugepages, {free} were free. Reserve more (`echo N > {dir}/nr_hugepages`) \
         or ask for Pages::Prefer"
    )
}

impl BuildError {
    /// The errno behind this error, where the system or the device gave one.
    pub fn raw_os_error(&self) -> Option<i32> {
        match self {
            Self::Reserve { source, .. } | Self::Back { source, .. } => source.raw_os_error(),
            Self::Register { source, .. } => source.raw_os_error(),
            Self::Memlock { errno, .. } => *errno,
            _ => None,
        }
    }
}

/// Why a buffer could not be had.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AllocError {
    /// No buffer of any pool like this one can be that large.
    #[error("{} is more than one arena holds: the most is {}", Bytes(*asked as u64), Bytes(*max as u64))]
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

/// The books at the moment when a pool had nothing left.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Exhausted {
    /// Bytes asked.
    pub asked: usize,
    /// Bytes of the block that it would have taken.
    pub block: usize,
    /// Bytes of the pool.
    pub capacity: usize,
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
             longest free run {}, {} requests wait. Free buffers or raise the capacity",
            b(self.asked),
            b(self.block),
            b(self.live),
            b(self.capacity),
            self.live_buffers,
            b(self.not_live),
            b(self.largest_free),
            self.waiting
        )
    }
}

impl std::error::Error for Exhausted {}

/// Why a raw pointer was not taken back. Nothing was changed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
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
    /// No raw buffer is out at that address: freed already, or still owned by a `Buf`.
    #[error("{addr:#x} is not out as a raw buffer: freed twice, or still owned by a handle")]
    NotOut {
        /// The pointer.
        addr: usize,
    },
}

/// Why a token was not taken back. Nothing was changed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
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

/// Why a closed pool could not be torn down at once.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CloseError {
    /// Other handles of the pool exist; the last of them closes it.
    #[error("{0} other handles of this pool exist")]
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
