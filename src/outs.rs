//! Blocks that are out as bare addresses: which are, and of what class. Manages where their marks lie; that of
//! several frees one succeeds is `mark.rs`'s, and what is wrong with an address that is not out the slabs tell.
//!
//! One mark for each place where a block may start, two bytes: zero, or what is needed to give the block
//! back. The *near* table has the marks of pages' starts; those inside pages are in parts of 64 KiB for 2 MiB
//! of arena each, made when the first is needed there. A mark is set only while its block is out, so none
//! outlives a slab.

use std::{
    alloc::{self, Layout},
    io,
    ptr::{self, NonNull},
    sync::atomic::{
        AtomicPtr,
        Ordering::{AcqRel, Acquire},
    },
};

use crate::{
    magazine::Place,
    mark::Mark,
    page_map::PageMap,
    size_class::{MIN_BLOCK, PAGE, PAGE_SHIFT},
    sync::unlikely,
    sys::table::{self, Zeroable, ZeroedTable},
};

// SAFETY: an atomic, of which zero is a valid value.
unsafe impl Zeroable for Mark {}

/// A pointer to the marks of a part's blocks inside pages; null before the first.
#[repr(transparent)]
struct Part(AtomicPtr<[Mark; MARKS]>);

// SAFETY: an atomic pointer; zero is null.
unsafe impl Zeroable for Part {}

const PLANES: usize = PAGE / MIN_BLOCK;
/// Pages of a part: 2 MiB.
const PART: usize = 512;
const MARKS: usize = PLANES * PART;

/// The marks of one pool.
pub(crate) struct Outs {
    base: usize,
    len: usize,
    near: ZeroedTable<Mark>,
    far: ZeroedTable<Part>,
    /// The same parts, to own them, and in a leak checker's reach. Boxed, since `far` knows their addresses.
    parts: boxcar::Vec<Box<[Mark; MARKS]>>,
}

impl Outs {
    /// Makes tables for all pages that `map` has room for.
    pub(crate) fn new(map: &PageMap) -> io::Result<Self> {
        let pages = map.len() >> PAGE_SHIFT;
        let (near, far) = (ZeroedTable::new(pages)?, ZeroedTable::new(pages.div_ceil(PART))?);
        // Whole pages, so that each offset below it has its mark.
        Ok(Self {
            base: map.base(),
            len: pages << PAGE_SHIFT,
            near,
            far,
            parts: boxcar::Vec::new(),
        })
    }

    /// Marks a block, which the caller owns, as out.
    #[inline(always)]
    pub(crate) fn set(&self, block: NonNull<u8>, place: Place) {
        if !self.set_at_hand(block, place) {
            self.set_first(block, place);
        }
    }

    /// The same; false, and nothing done, if its part is not there yet.
    #[inline(always)]
    pub(crate) fn set_at_hand(&self, block: NonNull<u8>, place: Place) -> bool {
        let offset = block.as_ptr() as usize - self.base;
        if !offset.is_multiple_of(PAGE) {
            let Some(part) = self.part(offset) else { return false };
            part[Self::in_part(offset)].set(place.code() as u16);
            return true;
        }
        debug_assert!(offset < self.len);
        // SAFETY: a block lies in the pool, so its page is one of those that the table was made for.
        unsafe { self.near.get_unchecked(offset >> PAGE_SHIFT) }.set(place.code() as u16);
        true
    }

    #[cold]
    #[inline(never)]
    fn set_first(&self, block: NonNull<u8>, place: Place) {
        let offset = block.as_ptr() as usize - self.base;
        self.make_part(offset)[Self::in_part(offset)].set(place.code() as u16);
    }

    /// Where the marks begin, and how far they go, in bytes.
    #[inline(always)]
    pub(crate) fn range(&self) -> (usize, usize) {
        (self.base, self.len)
    }

    /// Ends being out: exactly one of several callers with the address of a block that is out gets its place,
    /// and owns it. Any number may be passed.
    #[inline(always)]
    pub(crate) fn clear(&self, addr: usize) -> Option<Place> {
        let offset = addr.wrapping_sub(self.base);
        if offset >= self.len {
            unlikely();
            return None;
        }
        // SAFETY: it was looked whether it is.
        unsafe { self.clear_at(offset) }
    }

    /// The same for the address this far into the [`range`](Outs::range).
    ///
    /// # Safety
    /// It lies in there.
    #[inline(always)]
    pub(crate) unsafe fn clear_at(&self, offset: usize) -> Option<Place> {
        debug_assert!(offset < self.len);
        if !offset.is_multiple_of(PAGE) {
            return self.clear_far(offset);
        }
        // SAFETY: below `len` (contract), and there is a mark for each page of that.
        Self::place(unsafe { self.near.get_unchecked(offset >> PAGE_SHIFT) }.clear()?)
    }

    #[inline(always)]
    fn clear_far(&self, offset: usize) -> Option<Place> {
        if !offset.is_multiple_of(MIN_BLOCK) {
            return None;
        }
        Self::place(self.part(offset)?[Self::in_part(offset)].clear()?)
    }

    #[inline(always)]
    fn place(mark: u16) -> Option<Place> {
        // SAFETY: marks are places' codes.
        Some(unsafe { Place::from_code(mark.into()) })
    }

    /// By planes, so that memory is touched for the offsets that occur alone.
    #[inline(always)]
    fn in_part(offset: usize) -> usize {
        const PLANE: usize = (PLANES - 1) * PART;
        // One shift from where the offset has the block's number in its page to where the plane begins.
        ((offset << (PART / MIN_BLOCK).trailing_zeros()) & PLANE) + (offset >> PAGE_SHIFT) % PART
    }

    #[inline(always)]
    fn part(&self, offset: usize) -> Option<&[Mark; MARKS]> {
        debug_assert!(offset < self.len);
        // SAFETY: below `len` (a block's, or looked at), and there is a part for each page of that.
        let part = unsafe { self.far.get_unchecked((offset >> PAGE_SHIFT) / PART) };
        // Pairs with the store in `make_part`.
        let marks = part.0.load(Acquire);
        // SAFETY: null, or `MARKS` marks that stay until `self` goes.
        unsafe { marks.as_ref() }
    }

    /// The part that an offset is in, made if need be.
    fn make_part(&self, offset: usize) -> &[Mark; MARKS] {
        let layout = Layout::new::<[Mark; MARKS]>();
        // SAFETY: the layout is not of size zero.
        let made = unsafe { alloc::alloc_zeroed(layout) }.cast::<[Mark; MARKS]>();
        if made.is_null() {
            // As every box does when the heap is at its end.
            alloc::handle_alloc_error(layout)
        }
        // SAFETY: made just now by the global allocator with the layout of this very array; zero is a valid
        // mark (`Zeroable`).
        let part = unsafe { Box::from_raw(made) };
        let marks = (&raw const *part).cast_mut();
        let far = &self.far[(offset >> PAGE_SHIFT) / PART].0;
        // Release pairs with the loads in `part`. Acquire: another thread may have been faster.
        match far.compare_exchange(ptr::null_mut(), marks, AcqRel, Acquire) {
            Ok(_) => {
                self.parts.push(part);
                // SAFETY: owned by `parts` from now on, which gives none away before `self` goes.
                unsafe { &*marks }
            }
            // SAFETY: as in `part`.
            Err(theirs) => unsafe { &*theirs },
        }
    }

    /// Bytes of the tables that are in memory.
    pub(crate) fn table_bytes(&self) -> usize {
        let marks = self.parts.iter().map(|(_, part)| table::resident_bytes(&part[..]));
        self.near.resident_bytes() + self.far.resident_bytes() + marks.sum::<usize>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::size_class;

    const BASE: usize = 1 << 40;
    const LEN: usize = 5 << 20;

    #[test]
    fn each_address_has_a_mark_of_its_own() {
        let outs = Outs::new(&PageMap::new(BASE, LEN, 20).expect("map")).expect("tables");
        let block = |offset| NonNull::new((BASE + offset) as *mut u8).expect("not null");
        // Page starts, and blocks inside pages, on both sides of the parts' ends.
        let offsets: Vec<_> = [0, 2 << 20, 4 << 20, LEN - PAGE]
            .into_iter()
            .flat_map(|at| [at, at + 64, at + PAGE - 64])
            .chain([(2 << 20) - 64, PAGE])
            .collect();
        let class = |i: usize| i % size_class::CLASSES;
        for (i, &offset) in offsets.iter().enumerate() {
            assert!(outs.clear(BASE + offset).is_none(), "{offset:#x} before");
            outs.set(block(offset), Place::of(class(i)));
        }
        for wrong in
            [0, 1, BASE - 1, BASE - 64, BASE + 1, BASE + 65, BASE + 128, BASE + LEN, usize::MAX]
        {
            assert!(outs.clear(wrong).is_none(), "{wrong:#x}");
        }
        for (i, &offset) in offsets.iter().enumerate() {
            let place = outs.clear(BASE + offset).map(Place::class);
            assert_eq!(place, Some(class(i)), "{offset:#x}");
            assert!(outs.clear(BASE + offset).is_none(), "{offset:#x} twice");
        }
    }
}
