//! What look-ups read while arenas and devices come and go: an arena's keys behind its length, and the keys
//! of each arena on each of several devices. Readers take no lock and never wait; writers are one at a
//! time, by a lock of the caller's. Where the words lie and what they are keys of is the callers' business.

use crate::sync::atomic::{
    AtomicU64, AtomicUsize,
    Ordering::{Acquire, Relaxed, Release},
    fence,
};

/// One arena as look-ups see it. There or not there; the keys of a place may differ from one time there to
/// the next.
#[derive(Debug)]
pub(crate) struct Published {
    keys: AtomicU64,
    /// Registered bytes; 0 while it is not there. Stored after `keys`, read before.
    len: AtomicU64,
}

impl Published {
    pub(crate) fn new() -> Self {
        Self { keys: AtomicU64::new(0), len: AtomicU64::new(0) }
    }

    /// Makes it visible.
    pub(crate) fn publish(&self, keys: u64, len: u64) {
        self.keys.store(keys, Relaxed);
        // Pairs with the load in `keys_at`: whoever sees the length sees the keys.
        self.len.store(len, Release);
    }

    /// Takes it away: who looks from now on finds nothing. A look that began before may still end with the
    /// keys, as if it had ended before.
    pub(crate) fn unpublish(&self) {
        // Relaxed: nothing is handed over by it. Whoever learns by any other way that it is gone has that
        // way order this store before its own load.
        self.len.store(0, Relaxed);
    }

    /// The keys, for who knows that it is there: it holds a block of the arena, which was taken after the
    /// arena was published and handed on since.
    #[inline(always)]
    pub(crate) fn keys(&self) -> u64 {
        self.keys.load(Relaxed)
    }

    /// The keys, if it is there and reaches beyond `offset`.
    #[inline]
    pub(crate) fn keys_at(&self, offset: u64) -> Option<u64> {
        // Pairs with the store in `publish`.
        if offset >= self.len.load(Acquire) {
            return None;
        }
        // If it went and came again meanwhile, these are the later keys: valid by then, for `publish` comes
        // after registration.
        Some(self.keys.load(Relaxed))
    }
}

/// How many devices a pool can have at a time.
pub(crate) const RAILS: usize = 16;

/// The keys of every arena on every device of a pool: a row a slot, a column a *rail*, which is a device's
/// place here. Rails are used again, by other devices.
///
/// | `ids[rail]` | the rail's keys |
/// |---|---|
/// | 0 | being written, or of no meaning |
/// | a device | that device's, in all rows whose arena is there |
#[derive(Debug)]
pub(crate) struct RailTable {
    ids: [AtomicUsize; RAILS],
    keys: Box<[AtomicU64]>,
}

/// A rail as it was found, and whose it was.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rail {
    index: usize,
    id: usize,
}

impl RailTable {
    pub(crate) fn new(slots: usize) -> Self {
        Self {
            ids: std::array::from_fn(|_| AtomicUsize::new(0)),
            keys: (0..slots * RAILS).map(|_| AtomicU64::new(0)).collect(),
        }
    }

    /// Writes the keys of one arena on a rail: before the rail is opened, or before the arena's first block
    /// is given out, and before it is published.
    pub(crate) fn set(&self, slot: usize, rail: usize, keys: u64) {
        self.keys[slot * RAILS + rail].store(keys, Relaxed);
    }

    /// Makes a device known, all of whose keys have been set.
    pub(crate) fn open(&self, rail: usize, id: usize) {
        // Pairs with the load in `find`: whoever finds the device sees its keys.
        self.ids[rail].store(id, Release);
    }

    /// Makes a device unknown, so that its rail can be another's.
    pub(crate) fn close(&self, rail: usize) {
        self.ids[rail].store(0, Relaxed);
        // Pairs with the fence in `get`: whoever reads a key that is stored after this sees the rail closed.
        fence(Release);
    }

    /// The rail of a device (never 0).
    #[inline]
    pub(crate) fn find(&self, id: usize) -> Option<Rail> {
        // Pairs with the store in `open`.
        let index = self.ids.iter().position(|i| i.load(Acquire) == id)?;
        Some(Rail { index, id })
    }

    /// An arena's keys; `None` if the rail is not that device's any more.
    #[inline]
    pub(crate) fn get(&self, slot: usize, rail: Rail) -> Option<u64> {
        let keys = self.keys.get(slot * RAILS + rail.index)?.load(Relaxed);
        // Pairs with the fence in `close`.
        fence(Acquire);
        (self.ids[rail.index].load(Relaxed) == rail.id).then_some(keys)
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use loom::{
        sync::{Arc, Mutex, atomic::AtomicBool},
        thread,
    };

    use super::*;

    const OLD: u64 = 11;
    const NEW: u64 = 22;

    /// An arena goes and comes again under other keys while somebody looks: the answer is none, or keys
    /// that are or were valid; and who knows that it came again gets the new ones.
    #[test]
    fn loom_look_ups_while_an_arena_goes_and_comes_again() {
        loom::model(|| {
            let p = Arc::new(Published::new());
            // Which keys the device knows. Loom has every look checked against it.
            let valid = Arc::new(Mutex::new(vec![OLD]));
            let back = Arc::new(AtomicBool::new(false));
            p.publish(OLD, 100);
            let (q, v, b) = (p.clone(), valid.clone(), back.clone());
            let grower = thread::spawn(move || {
                q.unpublish();
                v.lock().unwrap().push(NEW);
                q.publish(NEW, 100);
                b.store(true, Release);
            });
            let knows = back.load(Acquire);
            match p.keys_at(99) {
                Some(keys) => {
                    assert!(valid.lock().unwrap().contains(&keys), "{keys} before it was valid");
                    assert!(!knows || keys == NEW, "old keys after it came again");
                }
                None => assert!(!knows),
            }
            assert_eq!(p.keys_at(100), None);
            grower.join().unwrap();
            assert_eq!(p.keys_at(0), Some(NEW));
        });
    }

    /// A device is removed and another gets its rail while somebody asks for the first one's keys: the
    /// answer is its own keys or none, never the other's.
    #[test]
    fn loom_a_rail_is_never_taken_for_another_device() {
        loom::model(|| {
            let t = Arc::new(RailTable::new(1));
            t.set(0, 3, OLD);
            t.open(3, 1);
            let u = t.clone();
            let changer = thread::spawn(move || {
                u.close(3);
                u.set(0, 3, NEW);
                u.open(3, 2);
            });
            if let Some(rail) = t.find(1)
                && let Some(keys) = t.get(0, rail)
            {
                assert_eq!(keys, OLD);
            }
            if let Some(rail) = t.find(2) {
                assert_eq!(t.get(0, rail), Some(NEW));
            }
            changer.join().unwrap();
        });
    }

    /// The last free of an arena, against the grower that would take the arena out, and an alloc that
    /// would have it: whole means whole. The books are under the lock, the look-up is not.
    #[test]
    fn loom_an_arena_goes_only_after_its_last_free() {
        loom::model(|| {
            struct Arena {
                entry: Published,
                // Blocks out, and whether the run is with the slabs: both under the slabs' lock.
                slabs: Mutex<(usize, bool)>,
                registered: loom::cell::UnsafeCell<bool>,
            }
            let a = Arc::new(Arena {
                entry: Published::new(),
                slabs: Mutex::new((1, true)),
                registered: loom::cell::UnsafeCell::new(true),
            });
            a.entry.publish(OLD, 100);
            let b = a.clone();
            let grower = thread::spawn(move || {
                let mut slabs = b.slabs.lock().unwrap();
                if slabs.0 > 0 {
                    return false;
                }
                slabs.1 = false;
                drop(slabs);
                b.entry.unpublish();
                // SAFETY: no block is out, and none can be had any more: nobody else looks (which is what
                // is being proved: loom panics on a concurrent access).
                b.registered.with_mut(|r| unsafe { *r = false });
                true
            });
            let c = a.clone();
            let other = thread::spawn(move || {
                let mut slabs = c.slabs.lock().unwrap();
                if !slabs.1 {
                    return;
                }
                slabs.0 += 1;
                drop(slabs);
                // Whoever has a block finds its keys, and the arena registered.
                assert_eq!(c.entry.keys_at(0), Some(OLD));
                // SAFETY: a block is out.
                c.registered.with(|r| unsafe { assert!(*r) });
                c.slabs.lock().unwrap().0 -= 1;
            });
            // The owner of the block that is out uses it, and frees it.
            assert_eq!(a.entry.keys_at(0), Some(OLD));
            // SAFETY: a block is out.
            a.registered.with(|r| unsafe { assert!(*r) });
            a.slabs.lock().unwrap().0 -= 1;
            let gone = grower.join().unwrap();
            other.join().unwrap();
            assert_eq!(a.entry.keys_at(0).is_none(), gone);
        });
    }
}
