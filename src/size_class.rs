//! Size classes: pure arithmetic from a length to a class and back. No tables, no state.
//!
//! Classes step by 64 bytes up to 1 KiB and by an eighth of the power of two above, so that from
//! 1 KiB up a block is at most 12.5 % larger than what was asked:
//!
//! ```text
//! class   0    1  …   15     16    17  …    23    24 …   175
//! size   64  128    1024   1152  1280     2048  2304    1 GiB
//! ```
//!
//! A length is read as a floating-point number with three bits of mantissa: exponent and mantissa
//! side by side are the class's code, which the hot path uses as it is; the class is the code less the
//! first class's.

use std::alloc::Layout;

/// Every block is a multiple of this and aligned to it: a cache line, so that two threads never
/// share one through two buffers.
pub(crate) const MIN_BLOCK: usize = 64;
/// Steps between two powers of two.
const STEPS_SHIFT: u32 = 3;
/// log2 of the smallest step.
const MIN_SHIFT: u32 = MIN_BLOCK.trailing_zeros();
/// Below this the steps are linear.
const LINEAR_TOP: usize = 1 << (MIN_SHIFT + STEPS_SHIFT);

/// The largest block that magazines carry. Longer buffers are spans cut to the page.
pub(crate) const MAX_BLOCK: usize = 1 << 30;
/// How many classes there are.
pub(crate) const CLASSES: usize = class_of(MAX_BLOCK) + 1;
/// Stands for "longer than any class": a span of its own.
pub(crate) const SPAN_CLASS: usize = CLASSES;

/// The largest block that shares a slab with others; above it a block is a span of whole pages.
pub(crate) const MAX_SLAB_BLOCK: usize = 32 << 10;
/// Bytes of a page-map granule. Slabs and spans are runs of whole granules.
pub(crate) const PAGE: usize = 4096;
/// log2 of [`PAGE`].
pub(crate) const PAGE_SHIFT: u32 = PAGE.trailing_zeros();
/// Blocks of one slab at most: what its bitmaps hold.
pub(crate) const MAX_SLAB_BLOCKS: usize = 256;

/// The first class's code.
pub(crate) const FIRST_CODE: usize = (LINEAR_TOP.trailing_zeros() as usize) << STEPS_SHIFT;

/// The code of the smallest class whose blocks hold `len` bytes. `len` must be in `1..=MAX_BLOCK`; beyond it the
/// answer is out of range, never undefined.
#[inline(always)]
pub(crate) const fn code_of(len: usize) -> usize {
    let x = len.wrapping_sub(1);
    // The position of the top bit, spelt with an xor, so that it compiles to a single `bsr` where there is no
    // `lzcnt`. The mantissa's three bits are shifted in beforehand, so that one number shifts and counts.
    let top = (x | LINEAR_TOP).leading_zeros() ^ (usize::BITS - 1);
    ((top as usize) << STEPS_SHIFT) + (x << STEPS_SHIFT >> top)
}

/// The same as a number from 0 up.
#[inline(always)]
pub(crate) const fn class_of(len: usize) -> usize {
    code_of(len) - FIRST_CODE
}

/// The block size of a class.
#[inline]
pub(crate) const fn size_of(class: usize) -> usize {
    let steps = 1 << STEPS_SHIFT;
    if class < 2 * steps {
        (class + 1) << MIN_SHIFT
    } else {
        let shift = (class >> STEPS_SHIFT) as u32 - 1 + MIN_SHIFT;
        ((class & (steps - 1)) + steps + 1) << shift
    }
}

/// The alignment that every block of a class has: its size's lowest set bit, but no more than a page,
/// for that is how slabs are aligned.
#[inline]
pub(crate) const fn align_of(size: usize) -> usize {
    let bit = 1 << size.trailing_zeros();
    if bit > PAGE { PAGE } else { bit }
}

/// The smallest class for `len` bytes aligned to `align` (a power of two up to [`PAGE`]), or
/// `SPAN_CLASS` if none is large enough.
pub(crate) const fn class_of_aligned(len: usize, align: usize) -> usize {
    let want = if len > align { len } else { align };
    if want > MAX_BLOCK {
        return SPAN_CLASS;
    }
    let mut class = class_of(want);
    while align_of(size_of(class)) < align {
        class += 1;
    }
    class
}

/// The alignment that has to be seen to for a layout: 1 where every block has it.
pub(crate) const fn align_asked(layout: Layout) -> usize {
    if layout.align() <= MIN_BLOCK { 1 } else { layout.align() }
}

/// From one block's start to the next in slabs of a class, where blocks of whole pages are `pad` bytes apart, which
/// spreads their starts over the processor's cache sets.
pub(crate) const fn stride_of(class: usize, pad: usize) -> usize {
    let size = size_of(class);
    if size.is_multiple_of(PAGE) && size <= MAX_SLAB_BLOCK { size + pad } else { size }
}

/// How a class's slabs are cut.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct SlabShape {
    /// Pages of one slab.
    pub(crate) pages: u32,
    /// Blocks in it.
    pub(crate) blocks: u32,
    /// From one block's start to the next.
    pub(crate) stride: u32,
}

/// Bytes of a slab that is neither bounded by its bitmaps nor by a small pool.
const SLAB: usize = 64 << 10;

/// The slab shape for blocks of `stride` bytes in a pool of `capacity`: as near to 64 KiB as the bitmaps
/// allow, at least eight blocks, and then grown until at most 1/32 of the slab is left over at its end.
/// In pools below 4 MiB a slab starts from 1/64 of the pool and one block, lest a few slabs take it all.
///
/// Blocks above [`MAX_SLAB_BLOCK`] are spans: one block, whole pages.
pub(crate) const fn slab_shape(stride: usize, capacity: usize) -> SlabShape {
    if stride > MAX_SLAB_BLOCK + MIN_BLOCK {
        return SlabShape { pages: stride.div_ceil(PAGE) as u32, blocks: 1, stride: stride as u32 };
    }
    let small_pool = capacity < 64 * SLAB;
    let mut bytes = if small_pool { capacity / 64 } else { SLAB };
    if bytes > MAX_SLAB_BLOCKS * stride {
        bytes = MAX_SLAB_BLOCKS * stride;
    }
    let least = if small_pool { stride } else { 8 * stride };
    if bytes < least {
        bytes = least;
    }
    let mut pages = bytes.div_ceil(PAGE);
    while (pages * PAGE) % stride > pages * PAGE / 32 {
        pages += 1;
    }
    let fit = pages * PAGE / stride;
    let blocks = if fit > MAX_SLAB_BLOCKS { MAX_SLAB_BLOCKS } else { fit };
    SlabShape { pages: pages as u32, blocks: blocks as u32, stride: stride as u32 }
}

const _: () = assert!(CLASSES == 176);
const _: () = assert!(size_of(CLASSES - 1) == MAX_BLOCK);
const _: () = assert!(MAX_SLAB_BLOCK.is_multiple_of(PAGE));

#[cfg(test)]
mod tests {
    //! Proves, over every length: the class fits, is the smallest that fits, wastes at most an eighth
    //! from 1 KiB up, and is aligned as promised.
    use super::*;

    #[test]
    fn every_length_gets_the_smallest_class_that_holds_it() {
        const EVERY: usize = 4 << 20;
        let mut class = 0;
        for len in 1..=EVERY {
            if len > size_of(class) {
                class += 1;
            }
            assert_eq!(class_of(len), class, "len {len}");
        }
        // Above that the steps are half a megabyte and more: look at both sides of each.
        for class in class..CLASSES {
            assert_eq!(class_of(size_of(class)), class);
            assert_eq!(class_of(size_of(class - 1) + 1), class);
        }
    }

    #[test]
    fn waste_is_at_most_an_eighth_from_1_kib_up() {
        for class in class_of(1024)..CLASSES {
            let worst = if class == 0 { 1 } else { size_of(class - 1) + 1 };
            let waste = size_of(class) - worst.max(1024);
            assert!(waste * 8 <= size_of(class), "class {class}: {waste} of {}", size_of(class));
        }
    }

    #[test]
    fn blocks_are_line_aligned_and_page_multiples_page_aligned() {
        for class in 0..CLASSES {
            let size = size_of(class);
            assert_eq!(size % MIN_BLOCK, 0);
            assert!(align_of(size) >= MIN_BLOCK);
            if size.is_multiple_of(PAGE) {
                assert_eq!(align_of(size), PAGE);
            }
        }
    }

    #[test]
    fn aligned_classes_hold_and_align() {
        for align in [1, 64, 128, 512, 1024, 4096] {
            for len in (0..=4 << 20).step_by(61) {
                let class = class_of_aligned(len, align);
                assert!(size_of(class) >= len && align_of(size_of(class)) >= align.min(PAGE));
            }
            assert_eq!(class_of_aligned(MAX_BLOCK + 1, align), SPAN_CLASS);
        }
    }

    fn bytes_of(s: SlabShape) -> usize {
        s.pages as usize * PAGE
    }

    #[test]
    fn slabs_waste_little_and_fit_their_bitmaps() {
        for class in 0..CLASSES {
            for stride in [size_of(class), size_of(class) + MIN_BLOCK] {
                let s = slab_shape(stride, 1 << 30);
                let bytes = s.pages as usize * PAGE;
                let used = s.blocks as usize * stride;
                assert!(used <= bytes && s.blocks as usize <= MAX_SLAB_BLOCKS);
                if s.blocks > 1 {
                    assert!(s.blocks >= 8);
                    assert!((bytes - used) * 16 <= bytes, "stride {stride}: {s:?}");
                } else {
                    assert!(bytes - used < PAGE);
                }
                let small = slab_shape(stride, 1 << 20);
                let bytes = small.pages as usize * PAGE;
                assert!(small.blocks >= 1 && bytes <= (16 << 10).max(bytes_of(s)));
                assert!(small.blocks as usize * stride <= bytes);
            }
        }
    }
}
