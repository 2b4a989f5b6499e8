//! Why a pool could not be built.

use std::io;

use super::{AdoptError, Bytes, ExportError, RegisterError};
use crate::{
    access::Access,
    problem::{self, Problem},
};

/// Why a pool could not be built. Whatever had been done by then is undone.
#[derive(thiserror::Error)]
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
    #[error("{}", Problem::ArenaSize { asked: *asked, problem: problem.clone() }.what())]
    ArenaSize {
        /// Bytes asked.
        asked: usize,
        /// What is wrong with it, with the bound.
        problem: String,
    },
    /// An access class cannot be as it was asked for.
    #[error("access class {name:?}: {problem}")]
    Class {
        /// Its name.
        name: String,
        /// What is wrong.
        problem: &'static str,
    },
    /// A share cannot be as it was asked for.
    #[error(
        "share {name:?} of access class {class:?}: {problem}{}",
        if *asked == 0 { String::new() } else {
            format!(" ({} asked, {} not reserved yet)", Bytes(*asked as u64), Bytes(*free as u64))
        }
    )]
    Share {
        /// Its name.
        name: String,
        /// Its class.
        class: String,
        /// Bytes that it comes to; 0 where that is not known.
        asked: usize,
        /// Bytes of the class that shares before it have left.
        free: usize,
        /// What is wrong.
        problem: &'static str,
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
    #[error("{}", Problem::MrTooSmall {
        device: device.clone(), page_size: *page_size, max_mr_size: *max_mr_size
    }.what())]
    MrTooSmall {
        /// The device's name.
        device: String,
        /// Bytes of a page.
        page_size: usize,
        /// The device's limit.
        max_mr_size: u64,
    },
    /// The device holds too few regions.
    #[error("{}", Problem::TooManyArenas {
        device: device.clone(), arenas: *arenas, arena_size: *arena_size, max_mr: *max_mr
    })]
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
    #[error("{}", Problem::Memlock { asked: *asked, pinned: *pinned, soft: *soft, hard: *hard })]
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
    #[error("{}", Problem::PageSizeAbsent { asked: *asked, offered: offered.clone() }.what())]
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

message_in_debug!(BuildError);

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
    /// The same with an arena of one class numbered as one of the whole pool.
    pub(crate) fn numbered(mut self, before: usize, of: usize) -> Self {
        if let Self::Back { arena, arenas, .. } | Self::Register { arena, arenas, .. } = &mut self {
            *arena += before;
            *arenas = of;
        }
        self
    }

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
