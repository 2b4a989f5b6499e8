//! Errors: one enum an operation, each with the numbers needed to act.

mod memory;

use std::{fmt, io};

pub use self::memory::{AdoptError, ExportError};
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
    /// The pool would be larger than it may become.
    #[error(
        "max_capacity {} is less than the capacity of {} that it begins with",
        Bytes(*asked as u64), Bytes(*capacity as u64)
    )]
    MaxCapacity {
        /// Bytes that it may become.
        asked: usize,
        /// Bytes that it begins with.
        capacity: usize,
    },
    /// More is to be left than there can be.
    #[error(
        "low_watermark {} is not below the {} that the pool can have at most",
        Bytes(*asked as u64), Bytes(*max_capacity as u64)
    )]
    Watermark {
        /// Bytes that were to be left.
        asked: usize,
        /// Bytes that there can be.
        max_capacity: usize,
    },
    /// One device twice.
    #[error("device {device} is given twice; every arena is registered once on each device")]
    DuplicateDevice {
        /// Its name.
        device: String,
    },
    /// More devices than a pool can have.
    #[error("{asked} devices are more than the {max} that one pool can be on")]
    TooManyDevices {
        /// How many were given.
        asked: usize,
        /// How many can be.
        max: usize,
    },
    /// The thread that grows the pool could not be started.
    #[error("the thread that is to grow the pool could not be started: {source}")]
    Thread {
        /// The system's errno.
        source: io::Error,
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
    /// [`MrTooSmall`](BuildError::MrTooSmall), [`ArenaSize`](BuildError::ArenaSize),
    /// [`Node`](BuildError::Node) and [`PageSizeAbsent`](BuildError::PageSizeAbsent) stand for themselves when they are all that is.
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
    #[error("{}. {fix}", problem::node_words(*node, problem, *needed, *page_size, *free))]
    Node {
        /// The node.
        node: u32,
        /// What is wrong.
        problem: String,
        /// What to do about it.
        fix: String,
        /// Bytes that were to come from it.
        needed: u64,
        /// Bytes of a page.
        page_size: usize,
        /// Bytes that are free there in pages of that size, where the system says.
        free: Option<u64>,
        /// The system's errno, if it was the system that refused.
        errno: Option<i32>,
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
    /// A mapping that was to be adopted is refused.
    #[error("the mapping cannot be adopted: {0}")]
    Adopt(#[source] AdoptError),
    /// Memory cannot be shared, or joined.
    #[error("{0}")]
    Export(#[source] ExportError),
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
            Self::Reserve { source, .. } | Self::Back { source, .. } | Self::Thread { source } => {
                source.raw_os_error()
            }
            Self::Register { source, .. } => source.raw_os_error(),
            Self::Memlock { errno, .. } | Self::Node { errno, .. } => *errno,
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
             longest free run {}, {} requests wait. ",
            b(self.asked),
            b(self.block),
            b(self.live),
            b(self.capacity),
            self.live_buffers,
            b(self.not_live),
            b(self.largest_free),
            self.waiting
        )?;
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

/// A device that a pool is not on.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "the pool is not on this device ({device}); it is on: {}. A device is known by its handle: one opened \
     again, by the same name, is another",
    list(known)
)]
#[non_exhaustive]
pub struct UnknownDevice {
    /// The name of the device asked about.
    pub device: String,
    /// The names of the devices that the pool is on.
    pub known: Vec<String>,
}

/// Why a device was not added to a pool, or not wholly removed from it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceChangeError {
    /// The pool is on that device already, or it is just being added.
    #[error("the pool is on {device} already")]
    Known {
        /// Its name.
        device: String,
    },
    /// The pool is not on that device.
    #[error("{0}")]
    Unknown(UnknownDevice),
    /// It is the only one.
    #[error("{device} is the only device that the pool is on; add another first, or drop the pool")]
    Last {
        /// Its name.
        device: String,
    },
    /// The pool is on as many as it can be.
    #[error("the pool is on {max} devices already, the most there can be")]
    TooMany {
        /// How many.
        max: usize,
    },
    /// Device or limits do not permit it, or the device refused an arena. What had been registered on it is
    /// deregistered.
    #[error("{0}")]
    Refused(Box<BuildError>),
    /// The device would not let go of arenas. It is unknown to the pool all the same; the arenas' memory
    /// stays mapped for ever.
    #[error("{device} would not deregister {arenas} arenas ({}), which stay mapped; first: {first}", Bytes(*bytes as u64))]
    Deregister {
        /// Its name.
        device: String,
        /// How many arenas.
        arenas: usize,
        /// Bytes of them.
        bytes: usize,
        /// The first refusal.
        first: RegisterError,
    },
    /// The pool came to its end before. Nothing stays registered.
    #[error("the pool was torn down before the change was made")]
    Closed,
    /// This is a forked child of the process that built the pool.
    #[error("this pool was built by process {owner}, this is process {this}")]
    ForeignProcess {
        /// The process that built the pool.
        owner: u32,
        /// The caller's.
        this: u32,
    },
}
