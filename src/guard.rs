//! Guards of one heap: what is done to a block as it goes out and as it comes back, and what is told when
//! somebody wrote where nobody should. Knows blocks by address and length; which they are, and where they go
//! next, is the pool's business.
//!
//! | | as it goes out | as it comes back |
//! |---|---|---|
//! | poison | is it whole? else it is told and filled again | filled |
//! | canary | written behind the length | is it whole? |
//! | zero on free | zeroed, if it was poisoned | zeroed, unless it is poisoned |
//! | tracking | who has it is written down | and struck out |
//!
//! Whoever calls owns the block, so nobody else is at its bytes but devices, which are what is looked for. All
//! of an arena is filled when it comes, so that free memory is poisoned whoever had it, in whatever sizes.

mod ledger;
mod pattern;
mod quarantine;

use std::{
    backtrace::Backtrace,
    cell::RefCell,
    panic::Location,
    ptr::NonNull,
    sync::{
        Arc,
        atomic::{AtomicU32, AtomicU64, Ordering::Relaxed},
    },
    thread,
    time::Instant,
};

use self::ledger::{Freed, Ledger, Out, Piece};
pub(crate) use self::quarantine::{Quarantine, Waiting};
use crate::{
    config::{self, Event, EventHook, Guards, Watch},
    damage::{Damage, Owner, Site},
    lock::Mutex,
    reentry,
    sys::{fork, limits, shadow},
};

/// Where an alloc was called.
pub(crate) type Caller = &'static Location<'static>;

/// Canary bytes behind a buffer at most.
const MOST_CANARY: usize = 4096;
/// Canary bytes that a block should have room for.
pub(crate) const LEAST_CANARY: usize = 8;
/// What is told of one block at most: further damage is filled, and counted with the last that is told.
const MOST_TOLD: usize = 16;
/// Bytes of what was found that are told.
const SHOWN: usize = 16;

/// A block: its first byte and its length. Whoever makes one owns the block.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Extent {
    pub(crate) ptr: NonNull<u8>,
    pub(crate) len: usize,
}

impl Extent {
    fn addr(self) -> usize {
        self.ptr.as_ptr() as usize
    }

    /// A part of it.
    fn part(self, from: usize, len: usize) -> Self {
        debug_assert!(from + len <= self.len);
        // SAFETY: inside the block, by the callers' arithmetic, which the assertion shows.
        Self { ptr: unsafe { self.ptr.add(from) }, len }
    }

    fn fill(self, byte: u8) {
        // SAFETY: whoever made the extent owns the block, which lies in a mapped arena (P4).
        unsafe { pattern::fill(self.ptr, self.len, byte) };
    }

    fn damage(self, byte: u8) -> Option<(usize, usize)> {
        // SAFETY: as in `fill`; it was filled whole before.
        unsafe { pattern::damage(self.ptr, self.len, byte) }
    }

    /// The bytes from an offset to another, as far as they are shown.
    fn found(self, first: usize, last: usize) -> Vec<u8> {
        let n = (last + 1 - first).min(SHOWN);
        // SAFETY: inside the block, which is the maker's; copied, whatever a device makes of it meanwhile.
        let at = |i: usize| unsafe { self.ptr.add(first + i).as_ptr().read() };
        (0..n).map(at).collect()
    }
}

/// The guards of one heap.
pub(crate) struct Guard {
    watch: Watch,
    hook: Option<EventHook>,
    ledger: Mutex<Ledger>,
    pub(crate) quarantine: Mutex<Quarantine>,
    after_free: AtomicU64,
    beyond_end: AtomicU64,
    /// Allocations, to track one of so many.
    asked: AtomicU32,
}

impl Guard {
    pub(crate) fn new(watch: Watch, hook: Option<EventHook>) -> Self {
        Self {
            watch,
            hook,
            ledger: Mutex::new(Ledger::default()),
            quarantine: Mutex::new(Quarantine::new(watch.guards.quarantine)),
            after_free: AtomicU64::new(0),
            beyond_end: AtomicU64::new(0),
            asked: AtomicU32::new(0),
        }
    }

    pub(crate) fn guards(&self) -> Guards {
        self.watch.guards
    }

    /// One of how many allocations is tracked; 0 is none.
    pub(crate) fn tracked(&self) -> u32 {
        self.watch.track.every
    }

    /// How often somebody wrote after free, and beyond an end.
    pub(crate) fn found(&self) -> (u64, u64) {
        (self.after_free.load(Relaxed), self.beyond_end.load(Relaxed))
    }

    pub(crate) fn table_bytes(&self) -> usize {
        self.ledger.lock().table_bytes()
    }

    /// Makes an arena ready that nobody has had anything of. `fresh`: it holds zeros.
    pub(crate) fn prepare(&self, arena: Extent, fresh: bool) {
        if self.watch.guards.poison {
            arena.fill(Guards::POISON);
        } else if self.watch.guards.zero_on_free && !fresh {
            arena.fill(0);
        }
    }

    /// Forgets what was given back in a range. Whoever looks there now is waited for, and nobody will.
    pub(crate) fn forget(&self, addr: usize, len: usize) {
        let taken = self.ledger.lock().take(addr, len);
        let _own = reentry::enter();
        drop(taken);
    }

    /// Makes a block a buffer of `len` bytes. `stack`: whether the stack may be taken down. A global allocator's may
    /// not: it is also called by who holds the standard library's lock for that, while a backtrace is printed.
    pub(crate) fn goes_out(&self, block: Extent, len: usize, caller: Caller, stack: bool) {
        let Watch { guards, track } = self.watch;
        let own = reentry::enter();
        let mut told = Vec::new();
        // First, so that `check_free` passes the block by from here on.
        let pieces = match guards.poison {
            true => self.ledger.lock().take(block.addr(), block.len),
            false => Vec::new(),
        };
        shadow::show(block.ptr, block.len);
        if guards.poison {
            told = self.look(block, pieces);
            if guards.zero_on_free {
                block.fill(0);
            }
        }
        let len = len.clamp(1, block.len);
        let canary = if guards.canary { (block.len - len).min(MOST_CANARY) } else { 0 };
        block.part(len, canary).fill(Guards::CANARY);
        self.hide_behind(block, len);
        if self.watch.records() {
            let tracked =
                track.every > 0 && self.asked.fetch_add(1, Relaxed).is_multiple_of(track.every);
            let trace = || Arc::new(Backtrace::force_capture());
            let whole = stack && (track.backtraces || is_own(caller));
            let site = tracked.then(|| Site { location: caller, backtrace: whole.then(trace) });
            let owner = Owner { site, ..owner() };
            let out = Out { len, canary, block: block.len, since: Instant::now(), owner };
            self.ledger.lock().went_out(block.addr(), out);
        }
        drop(own);
        self.tell_late(told);
    }

    /// Makes a buffer a free block.
    pub(crate) fn comes_back(&self, block: Extent) {
        let guards = self.watch.guards;
        let own = reentry::enter();
        let mut told = None;
        shadow::show(block.ptr, block.len);
        let out = self.watch.records().then(|| self.ledger.lock().came_back(block.addr()));
        match out {
            // Nothing is known of it that could be held against what is there.
            Some(None) => return shadow::hide(block.ptr, block.len),
            Some(Some(out)) => {
                told = self.overrun(block, &out);
                if guards.poison {
                    block.fill(Guards::POISON);
                    // Before `check_free` can meet it.
                    shadow::hide(block.ptr, block.len);
                    let Out { len, owner, .. } = out;
                    let (addr, since) = (block.addr(), Instant::now());
                    let freed = Freed { addr, len, since, owner, by: self::owner() };
                    self.ledger.lock().freed(block.len, freed);
                }
            }
            None => {}
        }
        if !guards.poison {
            if guards.zero_on_free {
                block.fill(0);
            }
            shadow::hide(block.ptr, block.len);
        }
        drop(own);
        if let Some(damage) = told {
            self.beyond_end.fetch_add(1, Relaxed);
            config::tell(self.hook.as_ref(), &Event::WrittenBeyondEnd(&damage));
        }
    }

    /// Bytes that whoever has the buffer at an address may use, if they are fewer than the block has.
    pub(crate) fn usable(&self, ptr: NonNull<u8>) -> Option<usize> {
        if !self.watch.guards.canary {
            return None;
        }
        self.ledger.lock().get(ptr.as_ptr() as usize).map(|out| out.len)
    }

    /// Lets a buffer be used for `len` bytes, at most its block's; says how many they are.
    pub(crate) fn resize(&self, block: Extent, len: usize) -> usize {
        let own = reentry::enter();
        let (len, mut told) = (len.clamp(1, block.len), None);
        shadow::show(block.ptr, block.len);
        if self.watch.records() {
            let mut ledger = self.ledger.lock();
            if let Some(out) = ledger.get(block.addr()) {
                told = self.overrun(block, out);
                (out.len, out.canary) = (len, 0);
                if self.watch.guards.canary {
                    out.canary = (block.len - len).min(MOST_CANARY);
                    block.part(len, out.canary).fill(Guards::CANARY);
                }
            }
        }
        self.hide_behind(block, len);
        drop(own);
        if let Some(damage) = told {
            self.beyond_end.fetch_add(1, Relaxed);
            config::tell(self.hook.as_ref(), &Event::WrittenBeyondEnd(&damage));
        }
        if self.watch.guards.canary { len } else { block.len }
    }

    /// Looks at what was given back and is still free, and says in how many places it is damaged.
    pub(crate) fn check_free(&self) -> usize {
        if !self.watch.guards.poison {
            return 0;
        }
        let starts = self.ledger.lock().starts();
        let mut found = 0;
        for start in starts {
            let own = reentry::enter();
            let ledger = self.ledger.lock();
            // Whoever takes the block takes its piece out first, under this lock: so it is nobody's as long as
            // it is held.
            let Some(piece) = ledger.piece(start) else { continue };
            let Some(ptr) = NonNull::new(start as *mut u8) else { continue };
            let extent = Extent { ptr, len: piece.end - piece.start };
            shadow::show(extent.ptr, extent.len);
            let told = self.look(extent, vec![piece]);
            shadow::hide(extent.ptr, extent.len);
            drop(ledger);
            drop(own);
            found += told.len();
            self.tell_late(told);
        }
        found
    }

    /// What is out, and who has it.
    pub(crate) fn each_out(&self, mut sink: impl FnMut(usize, &Owner, Instant)) {
        let ledger = self.ledger.lock();
        ledger.out().for_each(|(_, out)| sink(out.block, &out.owner, out.since));
    }

    /// Under a canary nobody may touch what lies behind the length: tools see that at once.
    fn hide_behind(&self, block: Extent, len: usize) {
        if self.watch.guards.canary {
            let behind = block.part(len, block.len - len);
            shadow::hide(behind.ptr, behind.len);
        }
    }

    fn tell_late(&self, told: Vec<Damage>) {
        for damage in told {
            self.after_free.fetch_add(1, Relaxed);
            config::tell(self.hook.as_ref(), &Event::WrittenAfterFree(&damage));
        }
    }

    /// What of a poisoned block is damaged, filled again; `pieces` is what was freed there.
    fn look(&self, block: Extent, pieces: Vec<Piece>) -> Vec<Damage> {
        let mut told = Vec::new();
        let mut from = 0;
        while let Some((first, last)) = block.part(from, block.len - from).damage(Guards::POISON) {
            let (first, last) = (from + first, from + last);
            let at = block.addr() + first;
            let piece = pieces.iter().find(|p| (p.start..p.end).contains(&at));
            let next = pieces.iter().map(|p| p.start).filter(|&s| s > at).min();
            let end = piece.map_or(next.unwrap_or(block.addr() + block.len), |p| p.end);
            let mut end = end - block.addr();
            if told.len() + 1 == MOST_TOLD {
                end = block.len;
            }
            let here = block.part(first, end - first);
            let last = if last < end {
                last
            } else {
                first + here.damage(Guards::POISON).map_or(0, |(_, last)| last)
            };
            told.push(match piece {
                Some(Piece { freed, .. }) => Damage {
                    addr: freed.addr,
                    len: freed.len,
                    offset: at - freed.addr,
                    extent: last + 1 - first,
                    found: block.found(first, last),
                    age: Some(freed.since.elapsed()),
                    owner: Some(freed.owner.clone()),
                    freed_by: Some(freed.by.clone()),
                },
                None => Damage {
                    addr: block.addr(),
                    len: block.len,
                    offset: first,
                    extent: last + 1 - first,
                    found: block.found(first, last),
                    age: None,
                    owner: None,
                    freed_by: None,
                },
            });
            here.fill(Guards::POISON);
            from = end;
        }
        told
    }

    /// What of a buffer's canary is damaged.
    fn overrun(&self, block: Extent, out: &Out) -> Option<Damage> {
        let behind = block.part(out.len, out.canary);
        let (first, last) = behind.damage(Guards::CANARY)?;
        Some(Damage {
            addr: block.addr(),
            len: out.len,
            offset: out.len + first,
            extent: last + 1 - first,
            found: behind.found(first, last),
            age: Some(out.since.elapsed()),
            owner: Some(out.owner.clone()),
            freed_by: None,
        })
    }
}

/// Whether a call is one of this crate's own, and so says nothing about who asked.
fn is_own(caller: Caller) -> bool {
    const HERE: &str = file!();
    let own = caller.file().strip_prefix(HERE.trim_end_matches("guard.rs"));
    // The program is a user like others.
    own.is_some_and(|file| !file.starts_with("bin/"))
}

thread_local! {
    /// The thread, and the fork generation in which its number was asked for.
    static SELF: RefCell<Option<(u32, Owner)>> = const { RefCell::new(None) };
}

/// The calling thread. Its name is not to be had once its thread-locals go.
fn owner() -> Owner {
    let generation = fork::generation();
    let known = SELF.try_with(|own| {
        let mut own = own.try_borrow_mut().ok()?;
        if own.as_ref().is_none_or(|(then, _)| *then != generation) {
            let thread = thread::current().name().map(Arc::from);
            *own = Some((generation, Owner { thread, tid: limits::thread_id(), site: None }));
        }
        own.as_ref().map(|(_, owner)| owner.clone())
    });
    let nameless = || Owner { thread: None, tid: limits::thread_id(), site: None };
    known.ok().flatten().unwrap_or_else(nameless)
}
