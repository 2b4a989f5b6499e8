//! What of a builder bears on watching buffers: guards against misuse, and tracking who has what. Off unless
//! asked for, in every build.

use super::Builder;
use crate::reach::Reach;

/// What a pool guards its memory with; each guard is off unless switched on. Works in release builds.
///
/// A pool with any guard does without the threads' caches: every alloc and free takes the slabs' lock, some
/// hundred nanoseconds where a plain pair takes a few. What the guards add to that grows with the block; `pinpool
/// bench guards` measures it. A pool without pays nothing.
///
/// What is found is told through [`Builder::on_event`] and counted in
/// [`Stats::guards`](crate::Stats::guards); it is never an error or a panic. The hook is called by whoever meets the
/// damage, inside its alloc or free; behind a global allocator that is whatever allocates, and a hook does best to
/// note and return.
///
/// ```
/// use pinpool::{Device, Event, Guards, Pool};
///
/// let pool = Pool::builder()
///     .device(Device::soft())
///     .capacity(1 << 20)
///     .guards(Guards::new().poison(true).canary(true).quarantine(256 << 10))
///     .on_event(|event| match event {
///         Event::WrittenAfterFree(damage) => eprintln!("late write: {damage}"),
///         Event::WrittenBeyondEnd(damage) => eprintln!("overrun: {damage}"),
///         _ => {}
///     })
///     .build()?;
/// drop(pool.alloc(4096)?);
/// assert_eq!(pool.stats().guards.written_after_free, 0);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[must_use = "guards do nothing before `Builder::guards` has them"]
pub struct Guards {
    pub(crate) poison: bool,
    pub(crate) canary: bool,
    pub(crate) quarantine: usize,
    pub(crate) zero_on_free: bool,
}

impl Guards {
    /// What free memory holds under [`poison`](Guards::poison).
    pub const POISON: u8 = 0xdf;
    /// What lies behind a buffer's end under [`canary`](Guards::canary).
    pub const CANARY: u8 = 0xca;

    /// No guard.
    pub const fn new() -> Self {
        Self { poison: false, canary: false, quarantine: 0, zero_on_free: false }
    }

    /// Fills memory with [`POISON`](Guards::POISON) while nobody has it, and looks whether it still does when it is
    /// handed out: whoever wrote in between, a device included, is reported with address, first damaged offset,
    /// age and last owner. The damaged bytes are filled again, and the block is handed out: to keep it back would
    /// take memory from the pool for every stray write. Who writes late once may do so again;
    /// [`quarantine`](Guards::quarantine) gives it time, and a [lease](crate::Lease) takes its right away.
    ///
    /// All of a pool's memory is filled when the pool is built, adopted memory too, on the caller's thread alone (a
    /// second for some GiB), and an arena when it comes.
    /// What was given back is looked at once more when the last handle goes, and by
    /// [`Pool::check_free`](crate::Pool::check_free).
    ///
    /// *Cost:* writing each block once at its free, reading it once at its alloc; about 200 bytes of heap for each
    /// buffer that is out or was. *Not seen:* reads; writes of the very byte; a write that comes after the block
    /// has its next owner.
    pub const fn poison(mut self, on: bool) -> Self {
        self.poison = on;
        self
    }

    /// Puts [`CANARY`](Guards::CANARY) bytes behind the length that was asked for, up to 4 KiB of them, as far as
    /// the block goes, and looks for them at the free: who wrote beyond the end, a device included, is reported.
    /// [`Buf::capacity`](crate::Buf::capacity) is then the length that was asked for (at least 1).
    ///
    /// A length that leaves less than 8 bytes of its block takes the next larger block of the same alignment, as
    /// long as the pool has one at hand: 4 KiB take 8 KiB, 64 KiB take 72 KiB, and a pool may so be exhausted with
    /// half as many buffers of 4 KiB. Give it the memory, or ask for 8 bytes less than a block. When there is no
    /// larger block, and for who waits for a buffer, a block goes out with as much of a canary as it has room for,
    /// or none.
    ///
    /// *Cost:* that memory; writing and reading the canary. *Not seen:* writes before the first byte, unless they
    /// meet another buffer's canary or poison; writes beyond the canary; writes of the very byte.
    pub const fn canary(mut self, on: bool) -> Self {
        self.canary = on;
        self
    }

    /// Keeps what is freed from being handed out again until `bytes` more were freed, first in, first out; in
    /// each access class and share by itself. 0 is none. It gives way, oldest first, when an alloc would
    /// otherwise be refused or wait, when a growing pool shrinks, and to [`Pool::trim`](crate::Pool::trim). Its
    /// blocks count as cached in the books ([`Stats::cached`](crate::Stats::cached)).
    ///
    /// *Cost:* that memory is not warm when it comes back. *Not seen:* by itself it sees nothing; it gives the
    /// poison time, and late writers an ownerless block to hit.
    pub const fn quarantine(mut self, bytes: usize) -> Self {
        self.quarantine = bytes;
        self
    }

    /// Erases what is freed before anybody else can have it, so that no tenant reads what another left; every
    /// buffer starts as zeros. With [`poison`](Guards::poison) it is erased by the poison, and zeroed when it is
    /// handed out.
    ///
    /// *Cost:* writing each block once at its free; twice with poison. *Not covered:* a peer that still has the
    /// arena's rkey reads what it likes, whoever has the buffer: a pool and a device for each tenant, or
    /// [leases](crate::Lease), keep that out.
    pub const fn zero_on_free(mut self, on: bool) -> Self {
        self.zero_on_free = on;
        self
    }
}

/// Which allocations a pool remembers, to say who has what: see [`Builder::track`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[must_use = "nothing is tracked before `Builder::track` has it"]
pub struct Track {
    /// 0 is none.
    pub(crate) every: u32,
    pub(crate) backtraces: bool,
}

impl Track {
    /// All of them.
    pub const fn all() -> Self {
        Self::every(1)
    }

    /// One of `n`; 0 is none.
    pub const fn every(n: u32) -> Self {
        Self { every: n, backtraces: false }
    }

    /// Takes the whole stack down for each that is tracked, not the calling line alone: for pools whose buffers
    /// one wrapper for all asks for. Some microseconds and kilobytes each; shown with names if the program has
    /// them. Done in any case where the calling line is not known: for C and for collections. Never for a global
    /// allocator, which is also called while a backtrace is being printed; of what it serves only the thread is known.
    pub const fn backtraces(mut self, on: bool) -> Self {
        self.backtraces = on;
        self
    }
}

/// Both, as the pool has them.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Watch {
    pub(crate) guards: Guards,
    pub(crate) track: Track,
}

impl Watch {
    /// Whether there is anything to do at an alloc or a free.
    pub(crate) fn any(self) -> bool {
        self.guards != Guards::default() || self.track.every > 0
    }

    /// Whether it must be known who has a block.
    pub(crate) fn records(self) -> bool {
        self.guards.poison || self.guards.canary || self.track.every > 0
    }
}

impl<R: Reach> Builder<R> {
    /// Sets what the pool's memory, of all classes and shares, is guarded with; nothing unless set.
    pub fn guards(mut self, guards: Guards) -> Self {
        self.watch.guards = guards;
        self
    }

    /// Sets which allocations are remembered with the place in the program that asked for them, the thread and
    /// the time, for [`Pool::outstanding`](crate::Pool::outstanding) and for what is told of damage and of
    /// buffers that are still out when the last handle goes; none unless set.
    ///
    /// *Cost:* as with [`Guards`] the threads' caches are not used; then about 100 ns and 150 bytes for each that
    /// is tracked.
    pub fn track(mut self, track: Track) -> Self {
        self.watch.track = track;
        self
    }
}
