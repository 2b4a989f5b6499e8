//! From an address to its arena's keys, and from a page to its slab: one subtraction, one compare, one
//! shift, one load. Readers take no lock and may pass any pointer.

use std::{io, ptr::NonNull};

use crate::{
    access::PackedKeys,
    published::Published,
    size_class::PAGE_SHIFT,
    sync::atomic::{AtomicU32, Ordering::Relaxed},
    sys::table::ZeroedTable,
};

/// What a page belongs to, packed into one word: 0 for nothing, a slab's number, or, on the first and
/// the last page of a free run only, the run's length with the top bit set. Other pages of a free run
/// keep what they last held; a reader checks a slab number against the slab's own bounds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct PageEntry(u32);

const FREE: u32 = 1 << 31;

impl PageEntry {
    pub(crate) const fn slab(id: u32) -> Self {
        Self(id)
    }

    pub(crate) const fn free_run(pages: u32) -> Self {
        Self(pages | FREE)
    }

    pub(crate) const fn as_slab(self) -> Option<u32> {
        if self.0 == 0 || self.0 & FREE != 0 { None } else { Some(self.0) }
    }

    pub(crate) const fn as_free_run(self) -> Option<u32> {
        if self.0 & FREE != 0 { Some(self.0 & !FREE) } else { None }
    }
}

/// The two maps of one pool.
pub(crate) struct PageMap {
    base: usize,
    len: usize,
    stride_shift: u32,
    /// The same in pages.
    page_stride_shift: u32,
    /// By slot.
    arenas: Box<[Published]>,
    pages: ZeroedTable<AtomicU32>,
}

impl PageMap {
    /// Makes empty maps for `len` bytes of address range at `base`, both whole pages, arenas
    /// `1 << stride_shift` apart.
    pub(crate) fn new(base: usize, len: usize, stride_shift: u32) -> io::Result<Self> {
        Ok(Self {
            base,
            len,
            stride_shift,
            page_stride_shift: stride_shift - PAGE_SHIFT,
            arenas: (0..len.div_ceil(1 << stride_shift)).map(|_| Published::new()).collect(),
            pages: ZeroedTable::new(len >> PAGE_SHIFT)?,
        })
    }

    pub(crate) fn base(&self) -> usize {
        self.base
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Pages from one arena's start to the next.
    pub(crate) fn stride_pages(&self) -> u32 {
        1 << (self.stride_shift - PAGE_SHIFT)
    }

    /// Brings the entries of an arena's pages into memory.
    pub(crate) fn populate(&self, offset: usize, len: usize) {
        self.pages.populate(offset >> PAGE_SHIFT, len >> PAGE_SHIFT);
    }

    /// Makes an arena visible to look-ups.
    pub(crate) fn publish(&self, offset: usize, len: usize, keys: PackedKeys) {
        self.arenas[offset >> self.stride_shift].publish(keys.word(), len as u64);
    }

    /// Makes an arena, of which no block is out nor ever will be, invisible again.
    pub(crate) fn unpublish(&self, offset: usize) {
        self.arenas[offset >> self.stride_shift].unpublish();
    }

    /// The keys of the region that holds `addr`, if one does.
    #[inline]
    pub(crate) fn keys_of(&self, addr: usize) -> Option<PackedKeys> {
        let offset = addr.wrapping_sub(self.base);
        if offset >= self.len {
            return None;
        }
        let inside = offset & ((1 << self.stride_shift) - 1);
        let keys = self.arenas.get(offset >> self.stride_shift)?.keys_at(inside as u64)?;
        Some(PackedKeys::from_word(keys))
    }

    /// The slot of the arena that an address lies in, if one does.
    #[inline]
    pub(crate) fn slot_of(&self, addr: usize) -> Option<usize> {
        self.keys_of(addr).map(|_| (addr - self.base) >> self.stride_shift)
    }

    /// The slot that an address of the pool's range lies in.
    #[inline]
    pub(crate) fn slot_at(&self, addr: usize) -> usize {
        addr.wrapping_sub(self.base) >> self.stride_shift
    }

    /// Whether two addresses in the pool's range are in one arena's part of it.
    pub(crate) fn same_arena(&self, a: usize, b: usize) -> bool {
        (a.wrapping_sub(self.base) >> self.stride_shift)
            == (b.wrapping_sub(self.base) >> self.stride_shift)
    }

    /// The keys of the region that holds a block.
    #[inline(always)]
    pub(crate) fn keys_at(&self, block: NonNull<u8>) -> PackedKeys {
        // SAFETY: a block lies in a published arena.
        unsafe { self.keys_at_offset((block.as_ptr() as usize).wrapping_sub(self.base)) }
    }

    /// The same, for the block this far from the base.
    ///
    /// # Safety
    /// A block that is out starts there.
    #[inline(always)]
    pub(crate) unsafe fn keys_at_offset(&self, offset: usize) -> PackedKeys {
        debug_assert!(offset < self.len);
        // SAFETY: the offset is in a published arena (contract), and so below `len`, and there is an entry for
        // every arena's worth of that.
        let entry = unsafe { self.arenas.get_unchecked(offset >> self.stride_shift) };
        PackedKeys::from_word(entry.keys())
    }

    /// The keys of the region that a page lies in.
    ///
    /// # Safety
    /// The page is one of a block that is out, so its arena is published.
    #[inline(always)]
    pub(crate) unsafe fn keys_of_page(&self, page: usize) -> PackedKeys {
        let arena = page >> self.page_stride_shift;
        debug_assert!(arena < self.arenas.len());
        // SAFETY: the page lies in an arena (contract), and the table has an entry for each.
        let entry = unsafe { self.arenas.get_unchecked(arena) };
        // The block came from the slabs, whose lock orders it after the arena's publication.
        PackedKeys::from_word(entry.keys())
    }

    /// Which page of the pool an address lies in, if it lies in the pool's range.
    #[inline]
    pub(crate) fn page_of(&self, addr: usize) -> Option<u32> {
        let offset = addr.wrapping_sub(self.base);
        (offset < self.len).then_some((offset >> PAGE_SHIFT) as u32)
    }

    #[inline]
    pub(crate) fn addr_of(&self, page: u32) -> usize {
        self.base + ((page as usize) << PAGE_SHIFT)
    }

    /// What a page belongs to. Lock-free readers may see an entry that is just being replaced.
    #[inline]
    pub(crate) fn get(&self, page: u32) -> PageEntry {
        PageEntry(self.pages[page as usize].load(Relaxed))
    }

    /// Writes an entry; only under the slabs' lock.
    #[inline]
    pub(crate) fn set(&self, page: u32, entry: PageEntry) {
        self.pages[page as usize].store(entry.0, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::access::{LKey, RKey};

    #[test]
    fn look_ups_know_exactly_the_published_bytes() {
        let base = 1 << 40;
        let m = PageMap::new(base, 4 << 20, 21).expect("map");
        let keys = PackedKeys::new(LKey::new(1), RKey::new(2));
        assert_eq!(m.keys_of(base), None, "before it is published");
        m.publish(2 << 20, 1 << 20, keys);
        let (first, end) = (base + (2 << 20), base + (3 << 20));
        assert_eq!(m.keys_of(first), Some(keys));
        assert_eq!(m.keys_of(end - 1), Some(keys));
        assert_eq!((m.slot_of(first), m.slot_of(end)), (Some(1), None));
        for foreign in [0, 1, base - 1, base, first - 1, end, base + (4 << 20), usize::MAX] {
            assert_eq!(m.keys_of(foreign), None, "{foreign:#x}");
        }
        m.unpublish(2 << 20);
        assert_eq!(m.keys_of(first), None, "after it went");
    }

    #[test]
    fn entries_tell_slabs_from_runs() {
        assert_eq!(PageEntry::slab(7).as_slab(), Some(7));
        assert_eq!(PageEntry::slab(7).as_free_run(), None);
        assert_eq!(PageEntry::free_run(7).as_free_run(), Some(7));
        assert_eq!(PageEntry::free_run(7).as_slab(), None);
        assert_eq!(PageEntry(0).as_slab(), None);
    }
}
