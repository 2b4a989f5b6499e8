//! The report of what of a pool is out, by who asked for it. Who gathers it is the pool's business.

use std::{fmt, time::Duration};

use crate::{
    damage::{Owner, Site},
    error::Bytes,
};

/// What of a pool is out at one moment: [`Pool::outstanding`](crate::Pool::outstanding), and what
/// [`Event::StillOut`](crate::Event::StillOut) tells.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Outstanding {
    /// How many buffers are out.
    pub buffers: usize,
    /// Bytes of their blocks.
    pub bytes: usize,
    /// How many of them are out as tokens, in flight or lost.
    pub in_flight: usize,
    /// One of how many allocations was tracked ([`Builder::track`](crate::Builder::track)); 0 if none was, and
    /// `sites` is then empty.
    pub every: u32,
    /// The tracked ones by where they were asked for, most bytes first.
    pub sites: Vec<OutSite>,
}

/// What is out of one place in the program.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct OutSite {
    /// The place.
    pub site: Site,
    /// How many buffers that were tracked are out.
    pub buffers: usize,
    /// Bytes of their blocks.
    pub bytes: usize,
    /// How long the oldest of them has been out.
    pub oldest: Duration,
    /// The thread that asked for that one.
    pub owner: Owner,
}

impl fmt::Display for Outstanding {
    /// A line for the sum, and one for each place; backtraces after that, if there are any.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { buffers, bytes, in_flight, every, sites } = self;
        write!(f, "{buffers} buffers out, {}", Bytes(*bytes as u64))?;
        if *in_flight > 0 {
            write!(f, ", {in_flight} of them in flight")?;
        }
        match every {
            0 => write!(f, " (not tracked: Builder::track tells whose)")?,
            1 => {}
            n => write!(f, " (one of {n} is tracked)")?,
        }
        for OutSite { site, buffers, bytes, oldest, owner } in sites {
            let (bytes, at) = (Bytes(*bytes as u64), site.location());
            write!(f, "\n  {buffers} x, {bytes}, oldest {oldest:.1?} by ")?;
            match &owner.thread {
                Some(name) => write!(f, "{name:?} ({})", owner.tid)?,
                None => write!(f, "thread {}", owner.tid)?,
            }
            write!(f, ": {at}")?;
            if let Some(backtrace) = site.backtrace() {
                for line in backtrace.to_string().lines() {
                    write!(f, "\n      {line}")?;
                }
            }
        }
        Ok(())
    }
}
