//! The rare things that an operator should hear of, and how a hook is told them. What happens when is the business of
//! whoever tells it.

use std::{
    fmt,
    sync::Arc,
    time::{Duration, Instant},
};

use crate::{
    contained::contained,
    damage::Damage,
    error::{BuildError, Bytes, Exhausted, RegisterError},
    outstanding::Outstanding,
    pool::Pool,
};

/// Something rare that an operator should hear of.
#[derive(Debug)]
#[non_exhaustive]
pub enum Event<'a> {
    /// A device would not deregister an arena; its memory stays mapped for ever.
    DeregisterFailed {
        /// The arena's first byte.
        addr: usize,
        /// Bytes that leak.
        len: usize,
        /// The refusal.
        error: &'a RegisterError,
    },
    /// The system would not unmap what a pool had; it stays mapped for ever, without memory where the
    /// system lets go of that.
    UnmapFailed {
        /// First byte.
        addr: usize,
        /// Bytes that stay.
        len: usize,
        /// The refusal.
        error: &'a std::io::Error,
    },
    /// Hugepages were preferred and could not be had; the arena is on base pages.
    HugepagesMissing {
        /// Which arena, from 0.
        arena: usize,
        /// Bytes of it.
        len: usize,
        /// Bytes of the page that was preferred.
        page_size: usize,
        /// How many of that size were free.
        free_pages: Option<u64>,
    },
    /// The pool could not grow. It serves on with what it has, and tries again when more is needed.
    GrowthFailed {
        /// Bytes of the arena that was to come.
        len: usize,
        /// Bytes that the pool has.
        capacity: usize,
        /// Bytes that it may grow to.
        max_capacity: usize,
        /// How often in a row this failed.
        failures: u32,
        /// For how long it will not be tried again.
        retry_after: Duration,
        /// Why, with the numbers.
        error: &'a BuildError,
    },
    /// Somebody wrote to memory that nobody had ([`Guards::poison`](crate::Guards::poison)).
    WrittenAfterFree(&'a Damage),
    /// Somebody wrote beyond the end of a buffer ([`Guards::canary`](crate::Guards::canary)).
    WrittenBeyondEnd(&'a Damage),
    /// The last handle of a pool goes while buffers of it are out, in handles, as tokens or as bare addresses: the
    /// last of them to come back takes the pool down; those that never do have leaked, with their arenas.
    /// [`Builder::track`](crate::Builder::track) has it say whose they are.
    StillOut(&'a Outstanding),
    /// A pool was built.
    Built {
        /// How many arenas it has, over all access classes.
        arenas: usize,
        /// Bytes of them.
        capacity: usize,
        /// How long building took.
        took: Duration,
    },
    /// A pool could not be built; nothing is left of it.
    BuildFailed {
        /// Why, with the numbers; `build` returns it, too.
        error: &'a BuildError,
    },
    /// The pool grew by an arena.
    Grew {
        /// Bytes of the arena.
        len: usize,
        /// Bytes that the pool has with it.
        capacity: usize,
        /// How long mapping, faulting in and registering took.
        took: Duration,
    },
    /// The pool gave an arena back that was not needed any more.
    Shrank {
        /// Bytes of the arena.
        len: usize,
        /// Bytes that the pool has without it.
        capacity: usize,
    },
    /// Allocs were refused for want of memory, or waited in vain. Told at most once a second for each access class
    /// or share, on the thread that was refused.
    Exhausted {
        /// The books at the last of these refusals.
        books: &'a Exhausted,
        /// How many there were since this was last told.
        refused: u64,
    },
    /// The arenas of an access class were taken down, after the last handle and buffer.
    TakenDown {
        /// How many there were.
        arenas: usize,
        /// Bytes of them.
        bytes: usize,
    },
}

impl Event<'_> {
    /// Its kind in one word, as a label of metrics.
    pub fn name(&self) -> &'static str {
        match self {
            Self::DeregisterFailed { .. } => "deregister_failed",
            Self::UnmapFailed { .. } => "unmap_failed",
            Self::HugepagesMissing { .. } => "hugepages_missing",
            Self::GrowthFailed { .. } => "growth_failed",
            Self::Built { .. } => "built",
            Self::BuildFailed { .. } => "build_failed",
            Self::Grew { .. } => "grew",
            Self::Shrank { .. } => "shrank",
            Self::Exhausted { .. } => "exhausted",
            Self::TakenDown { .. } => "taken_down",
            Self::WrittenAfterFree(_) => "written_after_free",
            Self::WrittenBeyondEnd(_) => "written_beyond_end",
            Self::StillOut(_) => "still_out",
        }
    }
}

/// One line for a log, with the numbers; two or more where an error or a report in it has as many.
impl fmt::Display for Event<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes = |n: usize| Bytes(n as u64);
        match *self {
            Self::DeregisterFailed { addr, len, error } => {
                write!(
                    f,
                    "{} at {addr:#x} stay registered and mapped for ever: {error}",
                    bytes(len)
                )
            }
            Self::UnmapFailed { addr, len, error } => {
                write!(f, "{} at {addr:#x} stay mapped for ever: {error}", bytes(len))
            }
            Self::HugepagesMissing { arena, len, page_size, free_pages } => {
                let page = bytes(page_size);
                write!(
                    f,
                    "arena {arena} of {} is on base pages, for want of hugepages of {page}",
                    bytes(len)
                )?;
                free_pages.map_or(Ok(()), |free| write!(f, ": {free} were free"))
            }
            Self::GrowthFailed { len, capacity, max_capacity, failures, retry_after, error } => {
                let (len, capacity, max) = (bytes(len), bytes(capacity), bytes(max_capacity));
                write!(
                    f,
                    "the pool of {capacity} (at most {max}) could not grow by {len}, {failures} times in a row; "
                )?;
                write!(f, "next try after {retry_after:?}: {error}")
            }
            Self::WrittenAfterFree(damage) => write!(f, "written after free: {damage}"),
            Self::WrittenBeyondEnd(damage) => write!(f, "written beyond the end: {damage}"),
            Self::StillOut(out) => write!(f, "the last handle goes while buffers are out: {out}"),
            Self::Built { arenas, capacity, took } => {
                write!(
                    f,
                    "the pool was built: {} in {arenas} arenas, in {took:.1?}",
                    bytes(capacity)
                )
            }
            Self::BuildFailed { error } => write!(f, "the pool could not be built: {error}"),
            Self::Grew { len, capacity, took } => {
                write!(f, "the pool grew by {} to {}, in {took:.1?}", bytes(len), bytes(capacity))
            }
            Self::Shrank { len, capacity } => {
                write!(f, "the pool gave {} back and has {}", bytes(len), bytes(capacity))
            }
            Self::Exhausted { books, refused } => {
                write!(f, "{refused} refused since this was last told: {books}")
            }
            Self::TakenDown { arenas, bytes: n } => {
                write!(f, "{arenas} arenas were taken down: {}", bytes(n))
            }
        }
    }
}

pub(crate) type EventHook = Arc<dyn Fn(&Event<'_>) + Send + Sync>;

/// Tells the hook, if there is one. It may be called from `Drop`, which never panics (P4).
pub(crate) fn tell(hook: Option<&EventHook>, event: &Event<'_>) {
    if let Some(hook) = hook {
        contained(|| hook(event));
    }
}

/// Builds, and tells how that went.
pub(crate) fn tell_built<R>(
    hook: Option<&EventHook>,
    build: impl FnOnce() -> Result<Pool<R>, BuildError>,
) -> Result<Pool<R>, BuildError> {
    let start = Instant::now();
    let built = build();
    match &built {
        Ok(pool) => {
            let (arenas, capacity) = pool.size();
            tell(hook, &Event::Built { arenas, capacity, took: start.elapsed() });
        }
        Err(error) => tell(hook, &Event::BuildFailed { error }),
    }
    built
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// A hook that prints what it is told prints numbers and reasons, not the names of fields.
    #[test]
    fn an_event_prints_as_a_line_with_its_numbers() {
        let error = BuildError::Thread { source: std::io::Error::from_raw_os_error(11) };
        let event = Event::GrowthFailed {
            len: 1 << 20,
            capacity: 4 << 20,
            max_capacity: 8 << 20,
            failures: 3,
            retry_after: Duration::from_secs(2),
            error: &error,
        };
        let line = event.to_string();
        for part in ["1 MiB", "4 MiB", "8 MiB", "3 times", "2s", &error.to_string()] {
            assert!(line.contains(part), "{part:?} in {line:?}");
        }
        let missing = Event::HugepagesMissing {
            arena: 1,
            len: 4 << 20,
            page_size: 2 << 20,
            free_pages: Some(0),
        };
        let line = missing.to_string();
        assert_eq!(
            line,
            "arena 1 of 4 MiB is on base pages, for want of hugepages of 2 MiB: 0 were free"
        );
    }
}
