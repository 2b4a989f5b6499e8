//! A registration cache, as communication libraries have one: it remembers which ranges are registered,
//! so that a buffer which is used again need not be registered again, and lets go of the range that was
//! used least recently when it holds as many as it may.
//!
//! Written for the bench, and honest about what such a cache cannot do; these are its faults, and a
//! caller has to live with them:
//! - It does not learn when memory is unmapped. A range that is unmapped and mapped anew still has its
//!   entry, whose keys lead to the old pages: data goes astray without an error. Libraries hook `munmap`
//!   and its like against that, and miss what they do not see. Here nobody unmaps.
//! - A miss registers, and usually deregisters, while the message waits.
//! - What it holds stays pinned after the application has freed it.
//! - Ranges that overlap without one holding the other are registered twice.
//! - It registers whole pages: neighbours on a page come under the same key.
//! - It has no lock. Threads that shared it would need one on each look-up; the bench has one thread.
//! - An entry in use is kept only by having been used a moment ago, so that with fewer entries than
//!   buffers in use at a time it would deregister one of those.

use std::collections::BTreeMap;

use pinpool::{LKey, RKey, RegisterError, device::MrHandle};

use crate::bench::device::{AppMemory, Counting};

/// One registered range.
struct Entry {
    len: usize,
    handle: MrHandle,
    lkey: LKey,
    rkey: RKey,
    /// Its place in `by_use`.
    used: u64,
}

/// The ranges of one piece of memory that are registered.
pub(super) struct RegCache {
    registrar: Counting,
    most: usize,
    by_offset: BTreeMap<usize, Entry>,
    /// When it was used → offset, so that the least recent comes first.
    by_use: BTreeMap<u64, usize>,
    clock: u64,
    /// Look-ups that found a registered range, and all look-ups.
    pub(super) hits: u64,
    pub(super) look_ups: u64,
}

/// The fewest entries: both ends of one message.
pub(super) const FEWEST: usize = 2;

impl RegCache {
    /// An empty cache of so many ranges.
    pub(super) fn new(registrar: Counting, most: usize) -> Self {
        Self {
            registrar,
            most: most.max(FEWEST),
            by_offset: BTreeMap::new(),
            by_use: BTreeMap::new(),
            clock: 0,
            hits: 0,
            look_ups: 0,
        }
    }

    /// The keys of a range of `memory`, which is registered now if it was not yet.
    pub(super) fn keys(
        &mut self,
        memory: &mut AppMemory,
        offset: usize,
        len: usize,
    ) -> Result<(LKey, RKey), RegisterError> {
        self.clock += 1;
        self.look_ups += 1;
        let clock = self.clock;
        let near = self.by_offset.range_mut(..=offset).next_back();
        if let Some((start, entry)) = near.filter(|(s, e)| offset + len <= *s + e.len) {
            self.hits += 1;
            self.by_use.remove(&entry.used);
            self.by_use.insert(clock, *start);
            entry.used = clock;
            return Ok((entry.lkey, entry.rkey));
        }
        while self.by_offset.len() >= self.most {
            self.evict(memory)?;
        }
        // A shorter range that starts there would lose its place.
        if self.by_offset.contains_key(&offset) {
            self.remove(memory, offset)?;
        }
        // SAFETY: `clear`, which the owner calls before the memory goes, or `evict` deregisters it.
        let made = unsafe { memory.register(&self.registrar, offset, len) }?;
        let (lkey, rkey) = (made.lkey, made.rkey);
        let entry = Entry { len, handle: made.handle, lkey, rkey, used: clock };
        self.by_offset.insert(offset, entry);
        self.by_use.insert(clock, offset);
        Ok((lkey, rkey))
    }

    fn evict(&mut self, memory: &mut AppMemory) -> Result<(), RegisterError> {
        match self.by_use.first_key_value() {
            Some((_, &offset)) => self.remove(memory, offset),
            None => Ok(()),
        }
    }

    fn remove(&mut self, memory: &mut AppMemory, offset: usize) -> Result<(), RegisterError> {
        let Some(entry) = self.by_offset.remove(&offset) else { return Ok(()) };
        self.by_use.remove(&entry.used);
        // SAFETY: registered by `keys`, and out of the map, so that it is deregistered once.
        unsafe { memory.deregister(&self.registrar, entry.handle) }
    }

    /// Lets go of all; goes on after a failure, and gives the first.
    pub(super) fn clear(&mut self, memory: &mut AppMemory) -> Result<(), RegisterError> {
        let mut first = Ok(());
        while let Some((&offset, _)) = self.by_offset.first_key_value() {
            first = first.and(self.remove(memory, offset));
        }
        first
    }
}

#[cfg(test)]
mod tests {
    use pinpool::{Access, Device, Pages};

    use super::*;

    #[test]
    fn it_keeps_what_was_used_last_and_counts_its_hits() {
        let device = Device::soft();
        let registrar = Counting::new(&device);
        let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
        let mut memory = AppMemory::new(8 << 12, Pages::Base, access).expect("memory");
        let mut cache = RegCache::new(registrar.clone(), 2);
        let mut keys = |cache: &mut RegCache, page: usize, pages: usize| {
            cache.keys(&mut memory, page << 12, pages << 12).expect("registered")
        };
        let first = keys(&mut cache, 0, 1);
        let second = keys(&mut cache, 1, 2);
        assert_eq!(keys(&mut cache, 0, 1), first);
        // A part of a registered range is a hit.
        assert_eq!(keys(&mut cache, 2, 1), second);
        assert_eq!((cache.hits, cache.look_ups, registrar.live()), (2, 4, 2));
        // The first was used least recently, and goes.
        keys(&mut cache, 5, 1);
        assert_eq!((registrar.live(), registrar.register_calls()), (2, 3));
        assert_eq!(keys(&mut cache, 1, 2), second);
        assert_ne!(keys(&mut cache, 0, 1), first);
        // A longer one from the same place takes its place.
        keys(&mut cache, 0, 3);
        assert_eq!(device.as_soft().map(|s| s.regions()), Some(registrar.live() as usize));
        assert!(registrar.live() <= 2);
        cache.clear(&mut memory).expect("clear");
        assert_eq!(registrar.live(), 0);
    }
}
