//! What the heaps of one pool have together: the handles' count, their list, and who an address belongs to.
//! Brings all classes up or none, and closes them in an order that leaves nobody without what it stands on.

use std::{
    ptr::NonNull,
    sync::{Arc, OnceLock, Weak, atomic::AtomicUsize},
};

use super::Core;
use crate::{
    arena::Leftover,
    config::{Event, EventHook, Plan},
    error::BuildError,
};

/// Lives as long as any of its heaps' cores.
pub(crate) struct Family {
    /// Of the pool, its classes and its shares.
    pub(super) handles: AtomicUsize,
    /// Set once, before the first handle is given out.
    members: OnceLock<Members>,
}

struct Members {
    /// Classes, the default one first.
    classes: Box<[Member]>,
}

/// A class's heap, and the shares of its arenas.
struct Member {
    core: NonNull<Core>,
    /// To the same, for who has no handle.
    weak: Weak<Core>,
    shares: Box<[NonNull<Core>]>,
}

// SAFETY: the pointers lead to cores, all of whose shared parts are atomic or locked; they are followed only
// while a handle lives (`heaps`).
unsafe impl Send for Members {}
// SAFETY: as above.
unsafe impl Sync for Members {}

/// The right to follow the family's pointers: its cores live, since a handle does.
#[derive(Clone, Copy)]
pub(super) struct Heaps<'a>(&'a [Member]);

/// How closing went.
pub(super) struct Closed {
    /// What the device would not let go of; `None` when buffers are out, or in a child of the owner.
    pub(super) left: Option<Leftover>,
    /// All heaps, kept for their books.
    pub(super) cores: Vec<Arc<Core>>,
}

impl Family {
    /// Brings up all classes and their shares, or none. Gives the default class's core, with one handle
    /// counted.
    pub(super) fn build(plans: Vec<Plan>, rails: bool) -> Result<NonNull<Core>, BuildError> {
        let family = Arc::new(Self { handles: AtomicUsize::new(1), members: OnceLock::new() });
        let arenas: usize = plans.iter().map(|p| p.arenas.len()).sum();
        let mut up: Vec<Vec<Arc<Core>>> = Vec::with_capacity(plans.len());
        let mut before = 0;
        for mut plan in plans {
            let own = plan.arenas.len();
            plan.hook = plan.hook.map(|hook| numbered(hook, before));
            match Core::build(plan, rails, &family) {
                Ok(cores) => up.push(cores),
                Err(e) => {
                    // The class that came last goes first.
                    while up.pop().is_some() {}
                    return Err(e.numbered(before, arenas));
                }
            }
            before += own;
        }
        let member = |cores: Vec<Arc<Core>>| {
            let weak = cores.first().map(|core| core.own.clone())?;
            let mut cores = cores.into_iter().map(Core::settle);
            cores.next().map(|core| Member { core, weak, shares: cores.collect() })
        };
        let classes: Box<[Member]> = up.into_iter().filter_map(member).collect();
        // Every builder plans the default class.
        let default = classes[0].core;
        let _ = family.members.set(Members { classes });
        // SAFETY: one handle is counted, and is given out below.
        for (class, _) in unsafe { family.heaps() }.classes() {
            class.arm_first();
            if class.grower.can_grow()
                && let Err(source) = class.grower.start(&class.own)
            {
                // SAFETY: the one handle that is counted is given out to nobody.
                unsafe { Self::close(default) };
                return Err(BuildError::Thread { source });
            }
        }
        Ok(default)
    }

    /// The classes that are there yet, for who has no handle.
    pub(super) fn classes(&self) -> Vec<Arc<Core>> {
        let members = self.members.get().map_or(&[][..], |m| &m.classes);
        members.iter().filter_map(|m| m.weak.upgrade()).collect()
    }

    /// All heaps.
    ///
    /// # Safety
    /// The caller has a handle for as long as it uses what this gives, or is closing the pool.
    pub(super) unsafe fn heaps(&self) -> Heaps<'_> {
        Heaps(self.members.get().map_or(&[], |m| &m.classes))
    }

    /// Takes all caches away for good, and lets go of every heap that no buffer is out of.
    ///
    /// # Safety
    /// Once, by the owner of the last handle. `core` is any of the pool's.
    pub(super) unsafe fn close(core: NonNull<Core>) -> Closed {
        // SAFETY: nothing has been let go of before the heaps are drained below.
        let heaps = unsafe { core.as_ref().family.heaps() };
        // SAFETY: as above. From here on they are kept, whoever returns a last block.
        let keep = |c: &Core| unsafe { Core::keep(c.reference().core) };
        let cores: Vec<_> = heaps.iter().map(keep).collect();
        if cores.iter().any(|c| c.foreign_process()) {
            // The registrations are the parent's; whatever this process has is its copy.
            return Closed { left: None, cores };
        }
        cores.iter().for_each(|c| c.close_caches());
        super::leaks::tell_still_out(&cores);
        let (mut sum, mut all) = (Leftover::default(), true);
        for core in &cores {
            match core.close() {
                Some(left) => sum.add(left),
                None => all = false,
            }
        }
        Closed { left: all.then_some(sum), cores }
    }
}

impl<'a> Heaps<'a> {
    /// Each class, then its shares.
    pub(super) fn iter(self) -> impl Iterator<Item = &'a Core> {
        self.0.iter().flat_map(|m| std::iter::once(&m.core).chain(&m.shares)).map(follow)
    }

    /// Each class with its shares.
    pub(super) fn classes(
        self,
    ) -> impl Iterator<Item = (&'a Core, impl Iterator<Item = &'a Core>)> {
        self.0.iter().map(|m| (follow(&m.core), m.shares.iter().map(follow)))
    }

    /// The class whose address range an address is in.
    pub(super) fn class_at(self, addr: usize) -> Option<&'a Core> {
        let inside = |core: &&Core| core.slabs.map().page_of(addr).is_some();
        self.0.iter().map(|m| follow(&m.core)).find(inside)
    }

    /// The heap that a block at this address is of.
    pub(super) fn heap_at(self, addr: usize) -> Option<&'a Core> {
        let (class, mut shares) =
            self.classes().find(|(class, _)| class.slabs.map().page_of(addr).is_some())?;
        Some(shares.find(|s| s.beyond.as_ref().is_some_and(|b| b.holds(addr))).unwrap_or(class))
    }
}

fn follow(core: &NonNull<Core>) -> &Core {
    // SAFETY: whoever made the `Heaps` promised that the cores live while they are used.
    unsafe { core.as_ref() }
}

/// A hook that hears of arenas by their numbers in the whole pool.
fn numbered(hook: EventHook, before: usize) -> EventHook {
    if before == 0 {
        return hook;
    }
    Arc::new(move |event| match *event {
        Event::HugepagesMissing { arena, len, page_size, free_pages } => {
            hook(&Event::HugepagesMissing { arena: before + arena, len, page_size, free_pages });
        }
        _ => hook(event),
    })
}
