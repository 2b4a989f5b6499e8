//! What of a builder bears on how its arenas come up: where their pages lie, which rights are asked for if
//! the device has them, on how many threads, and who hears of it.

use parking_lot::Mutex;

use super::Builder;
use crate::{access::Access, error::BuildError, reach::Reach};

/// The NUMA node that the pages of a pool come from, whichever thread faults them in.
///
/// [`ArenaInfo::node`](crate::ArenaInfo::node) tells what was got.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub enum Numa {
    /// The device's node where the system knows one, and others when that has too few pages. A device
    /// without a node (soft ones) has no preference.
    #[default]
    OfDevice,
    /// This node, or an error that names it with what is free there. That it is one that this process may
    /// use (by its cpuset, and by a memory policy that binds it) is checked too.
    Node(u32),
    /// All nodes that this process may use, page by page in turns. With [`Pages::Require`](crate::Pages) a
    /// node that lacks its share of hugepages is an error that names it; else other nodes serve for it.
    Interleave,
    /// Wherever the process's own policy has them.
    Any,
}

/// What a pool is doing while it is built.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Stage {
    /// Bringing pages into memory.
    FaultIn,
    /// Registering arenas.
    Register,
}

/// How far the build of a pool is. The stages overlap: an arena is registered as soon as all of it is
/// in memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Progress {
    /// Which stage went on.
    pub stage: Stage,
    /// Bytes that it is through with. Falls only where an arena begins anew on smaller pages.
    pub bytes_done: u64,
    /// Bytes that it has to do in all: the pool's capacity.
    pub bytes_total: u64,
}

type ProgressHook = Box<dyn FnMut(Progress) + Send>;

/// As the user asked.
#[derive(Default)]
pub(super) struct Wishes {
    pub(super) numa: Numa,
    optional: Access,
    threads: Option<usize>,
    progress: Option<ProgressHook>,
}

/// As it will be done.
pub(crate) struct Start {
    pub(crate) placement: Placement,
    /// Rights to ask for beside the required ones, and to do without.
    pub(crate) optional: Access,
    pub(crate) threads: usize,
    pub(crate) progress: Option<Mutex<ProgressHook>>,
}

/// Where pages shall come from.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) enum Placement {
    #[default]
    Anywhere,
    Near(u32),
    On(u32),
    Interleave(Vec<u32>),
}

/// More threads than this gain nothing: they zero memory, whose bandwidth a few use up.
const MOST_THREADS: usize = 16;
/// Bytes that are worth a thread.
const PER_THREAD: usize = 64 << 20;

impl<R: Reach> Builder<R> {
    /// Sets the NUMA node of all arenas; [`Numa::OfDevice`] unless set.
    pub fn numa(mut self, numa: Numa) -> Self {
        self.start.numa = numa;
        self
    }

    /// Sets rights to ask for if the device has them: [`Access::RELAXED_ORDERING`] and
    /// [`Access::HUGETLB`] (that one where an arena is on hugepages).
    ///
    /// A device that refuses them with EINVAL or EOPNOTSUPP is asked once more without.
    /// [`ArenaInfo::access`](crate::ArenaInfo::access) tells with which rights each arena was registered.
    /// Rights that must be granted belong to [`access`](Builder::access).
    pub fn optional_access(mut self, access: Access) -> Self {
        self.start.optional = access;
        self
    }

    /// Sets how many threads fault pages in and register, the caller's included; 0 counts as 1. Unless
    /// set: one for each processor that this process may use, at most 16, and one for each 64 MiB of
    /// capacity. They end before [`build`](Builder::build) returns.
    pub fn start_threads(mut self, threads: usize) -> Self {
        self.start.threads = Some(threads);
        self
    }

    /// Sets a function that is told how far the build is, each time some MiB are done. It is called on
    /// the threads that build, one call at a time; it must not panic.
    pub fn on_progress(mut self, hook: impl FnMut(Progress) + Send + 'static) -> Self {
        self.start.progress = Some(Box::new(hook));
        self
    }
}

impl Wishes {
    /// Whether pages are to lie on nodes of the user's choice.
    pub(super) fn place(&self) -> bool {
        matches!(self.numa, Numa::Node(_) | Numa::Interleave)
    }

    /// Checks what can be checked before the first page is mapped.
    pub(super) fn plan(
        self,
        placement: Placement,
        required: Access,
        capacity: usize,
    ) -> Result<Start, BuildError> {
        if !(Access::RELAXED_ORDERING | Access::HUGETLB).contains(self.optional) {
            return Err(BuildError::Access {
                access: self.optional,
                reason: "only RELAXED_ORDERING and HUGETLB can be optional; ask for others with Builder::access",
            });
        }
        let processors = || std::thread::available_parallelism().map_or(1, usize::from);
        let threads = self
            .threads
            .unwrap_or_else(|| processors().min(MOST_THREADS).min(capacity.div_ceil(PER_THREAD)));
        Ok(Start {
            placement,
            optional: self.optional.difference(required),
            threads: threads.clamp(1, 1024),
            progress: self.progress.map(Mutex::new),
        })
    }
}
