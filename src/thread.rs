//! What a thread keeps: its row, which has a slot for each heap of each pool and leads to the thread's magazines
//! there, and the list of what to give back when it ends.
//!
//! The row is plain thread-local memory without a destructor, so it can be used at any time, during the
//! destruction of other thread-locals too; after the thread has given everything back it just leads to nobody's.
//! The list has a destructor, and is only met on slow paths.

use std::{
    cell::RefCell,
    sync::{
        Arc, Weak,
        atomic::{
            AtomicU64,
            Ordering::{Acquire, Relaxed, Release},
        },
    },
};

use crate::{
    magazine::{self, Closed, Local, ThreadSlot},
    pool::Core,
    reentry,
    sync::in_register,
    sys::fork,
};

/// How many heaps (pools' classes and shares) at a time can have magazines in threads. Further ones work,
/// through the slabs' lock. Each slot costs 8 bytes of every thread.
pub(crate) const SLOTS: usize = 256;

thread_local! {
    // One more than there are slots: it leads to closed magazines always, and stands for "no slot".
    static ROW: [ThreadSlot; SLOTS + 1] = const { [const { ThreadSlot::new() }; SLOTS + 1] };
    static ATTACHED: RefCell<Attached> =
        const { RefCell::new(Attached { locals: Vec::new(), apart: None }) };
}

struct Attached {
    locals: Vec<(u64, Arc<Local>, Weak<Core>)>,
    /// Where the last slot leads once it was used: pops and pushes mark the gates that they find closed, too, and
    /// threads had better not do that in the same lines.
    apart: Option<Box<Closed>>,
}

impl Drop for Attached {
    fn drop(&mut self) {
        ROW.with(|row| row[SLOTS].cut_off());
        for (_, local, core) in self.locals.drain(..) {
            // A core that is gone was closed, and has detached this thread then.
            if let Some(core) = core.upgrade() {
                core.detach(&local);
            }
            // SAFETY: this thread's own, of which it is outside.
            unsafe { local.let_go() };
        }
    }
}

/// A heap's place in every thread's row.
#[derive(Debug)]
pub(crate) struct Slot(usize);

/// One bit a slot.
static TAKEN: [AtomicU64; WORDS] = [const { AtomicU64::new(0) }; WORDS];
const BITS: usize = u64::BITS as usize;
const WORDS: usize = SLOTS / BITS;
const _: () = assert!(SLOTS == WORDS * BITS);

impl Slot {
    /// Takes a free place, or the one without magazines if all are taken.
    pub(crate) fn take() -> Self {
        let free = |taken: u64| (taken != u64::MAX).then(|| taken | 1 << taken.trailing_ones());
        let place = TAKEN.iter().enumerate().find_map(|(i, word)| {
            // Pairs with the release as a slot comes free: what its last heap has written into threads' rows comes first.
            let before = word.fetch_update(Acquire, Relaxed, free).ok()?;
            Some(i * BITS + before.trailing_ones() as usize)
        });
        Self(place.unwrap_or(SLOTS))
    }

    /// The place without magazines: every alloc and free takes the slow path.
    pub(crate) fn none() -> Self {
        Self(SLOTS)
    }

    pub(crate) fn has_place(&self) -> bool {
        self.0 < SLOTS
    }

    /// Where the slot lies in the row, in bytes.
    pub(crate) fn offset(&self) -> u32 {
        (self.0 * size_of::<ThreadSlot>()) as u32
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        if self.has_place() {
            TAKEN[self.0 / BITS].fetch_and(!(1 << (self.0 % BITS)), Release);
        }
    }
}

/// This thread's slot at an offset that [`Slot::offset`] gave, its address in a register, to be used in a loop.
#[inline(always)]
pub(crate) fn slot_at(offset: u32) -> *const ThreadSlot {
    in_register(slot_once(offset))
}

/// The same for a single use, which needs no address.
#[inline(always)]
pub(crate) fn slot_once(offset: u32) -> *const ThreadSlot {
    // `with` on a thread-local without destructor always works.
    // SAFETY: `offset` is a slot's, so the result is inside the row.
    ROW.with(|row| unsafe { row.as_ptr().byte_add(offset as usize) })
}

/// Runs `f` on this thread's magazines for `core`, made if need be. `None` when the thread is past giving
/// things back, or when this is called from inside itself (through a global allocator, say).
pub(crate) fn with_local<R>(core: &Core, f: impl FnOnce(&Local) -> R) -> Option<R> {
    if !core.has_place() {
        stand_apart();
        return None;
    }
    let _own = reentry::enter();
    let run = |attached: &RefCell<Attached>| {
        // Borrowed until `f` is done: that is what keeps a call from inside out.
        let mut attached = attached.try_borrow_mut().ok()?;
        let at = match attached.locals.iter().position(|(id, _, _)| *id == core.id) {
            Some(at) => at,
            None => attach(core, &mut attached.locals)?,
        };
        Some(f(&attached.locals[at].1))
    };
    ATTACHED.try_with(run).ok().flatten()
}

/// Lets the last slot lead to closed magazines of this thread alone.
fn stand_apart() {
    ROW.with(|row| {
        let slot = &row[SLOTS];
        if !slot.leads_to(magazine::nobodys()) {
            return;
        }
        let _own = reentry::enter();
        // At the thread's end, and when called from inside this, it stays as it is.
        let _ = ATTACHED.try_with(|attached| {
            if let Ok(mut attached) = attached.try_borrow_mut() {
                slot.lead_to(attached.apart.get_or_insert_with(|| Box::new(Closed::new())).get());
            }
        });
    });
}

#[cold]
fn attach(core: &Core, attached: &mut Vec<(u64, Arc<Local>, Weak<Core>)>) -> Option<usize> {
    fork::on_child(clear_row);
    // SAFETY: the slot is this thread's, and lives until the thread has ended, before which `Attached` is
    // dropped and detaches.
    let local = unsafe { Local::new(slot_at(core.slot_offset), core.gated) };
    let shared = core.attach(&local)?;
    // Forget pools that are gone: their places may be others' by now.
    attached.retain(|(_, local, core)| {
        let there = core.strong_count() > 0;
        if !there {
            // SAFETY: this thread's own, of which it is outside.
            unsafe { local.let_go() };
        }
        there
    });
    // SAFETY: this thread's own, just attached. Wherever it is dropped, `let_go` was called.
    unsafe { local.lead() };
    attached.push((core.id, local, shared));
    Some(attached.len() - 1)
}

/// In a forked child, on its only thread: leads all slots to nobody's, so that every use of a pool takes the slow
/// path, which refuses it. Only stores to this thread's own memory; safe in a fork handler.
fn clear_row() {
    ROW.with(|row| row.iter().for_each(ThreadSlot::cut_off));
}
