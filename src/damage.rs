//! What is told of bytes that somebody wrote who should not have: where they are, how long after, and whose
//! buffer it was. Who finds them is `guard`'s business.

use std::{backtrace::Backtrace, fmt, panic::Location, sync::Arc, time::Duration};

/// Where a buffer was asked for.
#[derive(Clone, Debug)]
pub struct Site {
    pub(crate) location: &'static Location<'static>,
    pub(crate) backtrace: Option<Arc<Backtrace>>,
}

impl Site {
    /// The call that asked for it, as the compiler knows it: one of this crate's own for what C or a
    /// collection asked for, which so have a backtrace, and for what a global allocator serves, which has none.
    pub fn location(&self) -> &'static Location<'static> {
        self.location
    }

    /// The whole stack of calls, if [`Track::backtraces`](crate::Track::backtraces) asked for it, or the location
    /// says nothing.
    pub fn backtrace(&self) -> Option<&Backtrace> {
        self.backtrace.as_deref()
    }
}

/// A thread that had a buffer or gave one back.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Owner {
    /// The thread's name, if it had one.
    pub thread: Option<Arc<str>>,
    /// Its number with the system, as `ps -L` shows it.
    pub tid: u32,
    /// Where it asked for the buffer, if that was tracked.
    pub site: Option<Site>,
}

impl fmt::Display for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.thread {
            Some(name) => write!(f, "thread {name:?} ({})", self.tid)?,
            None => write!(f, "thread {}", self.tid)?,
        }
        match &self.site {
            Some(site) => write!(f, ", asked for at {}", site.location),
            None => Ok(()),
        }
    }
}

/// Bytes that were written by somebody who should not have: by whom is not known, for a device leaves no trace.
/// Told through [`Event::WrittenAfterFree`](crate::Event::WrittenAfterFree) and
/// [`Event::WrittenBeyondEnd`](crate::Event::WrittenBeyondEnd).
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Damage {
    /// First byte of the buffer.
    pub addr: usize,
    /// Bytes of the buffer, as it was asked for; of the block, if no buffer was ever there.
    pub len: usize,
    /// From the first byte of the buffer to the first that is damaged.
    pub offset: usize,
    /// From the first damaged byte to the last, both included.
    pub extent: usize,
    /// What was found from the first damaged byte on, as far as the damage goes; at most 16 bytes.
    pub found: Vec<u8>,
    /// How long ago the buffer was given back (written after free), or asked for (written beyond its end), when
    /// the damage was found. `None` if no buffer was ever there.
    pub age: Option<Duration>,
    /// Who asked for it, the last time.
    pub owner: Option<Owner>,
    /// Who gave it back: without a site.
    pub freed_by: Option<Owner>,
}

impl fmt::Display for Damage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { addr, len, offset, extent, .. } = self;
        write!(f, "{extent} bytes at offset {offset} of the buffer of {len} at {addr:#x}")?;
        if let Some(age) = self.age {
            write!(f, ", {age:?} old")?;
        }
        match &self.owner {
            Some(owner) => write!(f, "; last owner: {owner}")?,
            None => write!(f, "; nobody had it yet")?,
        }
        if let Some(by) = &self.freed_by {
            write!(f, "; given back by {by}")?;
        }
        write!(f, "; found:")?;
        self.found.iter().try_for_each(|b| write!(f, " {b:02x}"))
    }
}
