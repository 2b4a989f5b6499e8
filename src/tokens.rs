//! Tokens: a buffer's block written down in 64 bits, for `wr_id`, and found again. Manages the side tables
//! and what the bits mean; who may redeem is `record.rs`'s, what a buffer is the upper layer's.
//!
//! ```text
//! bit   63   62…54   53…48   47    46…16   15…0
//!        0    tag    plane   far   page    generation
//! ```
//!
//! *tag*: the pool's, different from that of all others alive (up to 510). *page*: the one that the block
//! starts in, *plane*: how far into it, in units of 64 bytes. *far*: which table has its record. *generation*:
//! the flight's ([`Record`]). The top bit stays the user's.
//!
//! **Where records are.** The *near* table has eight bytes a page, for blocks that start at a page's start:
//! one at most does. All others, and flights that need more room or a flag, have theirs in the *far* table:
//! 64 planes of eight bytes a page, made for 2 MiB of arena when the first is needed there. Planes lie one
//! after the other, so memory is touched for offsets that occur alone: eight bytes a block. Both lie outside
//! the arenas (P2), and are never reset: a generation outlives slabs, and arenas that go and come back. A forked child
//! finds the near table empty, and does not look into the far one: its parent's flights are not its own.

use std::{
    alloc::{self, Layout},
    io,
    ptr::{self, NonNull},
    sync::atomic::{
        AtomicPtr, AtomicU64,
        Ordering::{AcqRel, Acquire, Relaxed, Release},
    },
    time::Duration,
};

use crate::{
    error::TokenError,
    magazine::Place,
    page_map::PageMap,
    record::{Cargo, Record},
    size_class::{MIN_BLOCK, PAGE, PAGE_SHIFT, SPAN_CLASS},
    sync::unlikely,
    sys::{
        fork,
        table::{self, Zeroable, ZeroedTable},
        tick::{self, Epoch},
    },
};

// SAFETY: a struct of atomics only, and zero is a valid value of each.
unsafe impl Zeroable for Record {}
// SAFETY: zero is null.
unsafe impl Zeroable for AtomicPtr<Part> {}

const PAGE_AT: u32 = 16;
const FAR_AT: u32 = 47;
const PLANE_AT: u32 = 48;
const TAG_AT: u32 = 54;
const TAG_BITS: u32 = 9;
/// What is above the generation, of a token of page 0 in the near table.
const PAGES: u64 = 1 << (FAR_AT - PAGE_AT);
const PLANES: usize = PAGE / MIN_BLOCK;
const _: () = assert!(PLANES == 1 << (TAG_AT - PLANE_AT) && TAG_AT + TAG_BITS == 63);

/// Lengths from here on do not fit a record; the next page's record in the far table has them.
const LONG: usize = u16::MAX as usize;
/// In a record's place: the flight belongs to a `Posted`.
const POSTED: u32 = 1 << 15;
const _: () = assert!(Place::of(SPAN_CLASS).code() < POSTED, "a place leaves the flag's bit free");

/// Pages that one part of the far table stands for: 2 MiB.
const PART: usize = 512;

/// A part of the far table: 2 MiB of arena.
struct Part {
    /// Which planes were ever used, so that no other is looked at.
    used: AtomicU64,
    records: Box<[Record]>,
}

impl Part {
    fn new() -> Self {
        const LAYOUT: Layout = match Layout::array::<Record>(PLANES * PART) {
            Ok(layout) => layout,
            Err(_) => panic!("a part fits the address space"),
        };
        // SAFETY: the layout is not of size zero.
        let Some(first) = NonNull::new(unsafe { alloc::alloc_zeroed(LAYOUT) }.cast::<Record>())
        else {
            // As every box does when the heap is at its end.
            alloc::handle_alloc_error(LAYOUT)
        };
        let records = NonNull::slice_from_raw_parts(first, PLANES * PART);
        // SAFETY: made just now by the global allocator with the layout of this very slice; zero is a valid
        // record (`Zeroable`).
        let records = unsafe { Box::from_raw(records.as_ptr()) };
        Self { used: AtomicU64::new(0), records }
    }

    fn record(&self, page: usize, plane: usize) -> &Record {
        &self.records[plane * PART + page % PART]
    }
}

/// The tables of one pool.
#[repr(C)]
pub(crate) struct Tokens {
    base: usize,
    /// The tag where a token has it.
    tag_bits: u64,
    /// The same without the generation's bits.
    tagged: u64,
    /// How many pages tokens can name.
    pages: u64,
    near: ZeroedTable<Record>,
    /// By 2 MiB; null where no record was ever needed.
    far: ZeroedTable<AtomicPtr<Part>>,
    /// The same parts, to own them. Boxed, since `far` knows their addresses.
    parts: boxcar::Vec<Box<Part>>,
    epoch: Epoch,
    /// The fork generation that made it.
    process: u32,
    tag: Tag,
}

/// A block that is back.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Landed {
    pub(crate) ptr: NonNull<u8>,
    pub(crate) page: usize,
    pub(crate) len: usize,
    pub(crate) place: Place,
}

// SAFETY: says where a block is and gives no access to it; who may use it is decided as if it were a bare address.
unsafe impl Send for Landed {}

/// A [`Landed`] in two words, so that the slow path answers in registers: the offset from the base, which has
/// 46 bits, with the place's code above; and the length.
#[derive(Clone, Copy)]
struct Words(usize, usize);

impl Words {
    /// No block's length.
    const NONE: Self = Self(0, usize::MAX);
    const PLACE_SHIFT: u32 = 48;

    fn offset(self) -> usize {
        self.0 & ((1 << Self::PLACE_SHIFT) - 1)
    }

    fn place(self) -> Place {
        // SAFETY: the upper bits were a place's code.
        unsafe { Place::from_code((self.0 >> Self::PLACE_SHIFT) as u32) }
    }
}

/// What a flight is for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    /// A bare token: whoever has it may redeem it.
    Bare,
    /// A posted work request's: only its completion, reported to the pool, ends it.
    Posted,
}

/// A flight that is under way.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Flight {
    pub(crate) token: u64,
    pub(crate) addr: usize,
    pub(crate) len: usize,
    pub(crate) age: Duration,
}

impl Tokens {
    /// Makes tables for all pages that `map` has room for.
    pub(crate) fn new(map: &PageMap) -> io::Result<Self> {
        let pages = map.len() >> PAGE_SHIFT;
        let tag = Tag::take();
        Ok(Self {
            base: map.base(),
            tag_bits: u64::from(tag.0) << TAG_AT,
            tagged: u64::from(tag.0) << (TAG_AT - PAGE_AT),
            pages: (pages as u64).min(PAGES),
            near: ZeroedTable::new(pages)?.zero_in_children(),
            far: ZeroedTable::new(pages.div_ceil(PART))?,
            parts: boxcar::Vec::new(),
            epoch: Epoch::now(),
            process: fork::generation(),
            tag,
        })
    }

    /// Whether a number has this heap's tag, as its tokens do.
    pub(crate) fn has_tag_of(&self, token: u64) -> bool {
        token >> TAG_AT == u64::from(self.tag.0)
    }

    /// Writes a block down. The caller owns the block, of this pool, and gives it up.
    #[inline(always)]
    pub(crate) fn take_off(&self, ptr: NonNull<u8>, len: usize, place: Place) -> u64 {
        let offset = ptr.as_ptr() as usize - self.base;
        if !offset.is_multiple_of(PAGE) || len >= LONG {
            unlikely();
            return self.take_off_far(offset, len, place, Kind::Bare);
        }
        let page = offset >> PAGE_SHIFT;
        debug_assert!(page < self.near.len());
        // SAFETY: the block lies in the pool, so its page is one of those that the table was made for.
        let record = unsafe { self.near.get_unchecked(page) };
        let cargo = Cargo::new(place.code() as u16, len as u16, tick::stamp());
        let generation = record.take_off(cargo);
        // The page's number, moved to its place from where the offset has it.
        let page = (offset as u64) << (PAGE_AT - PAGE_SHIFT);
        (page + self.tag_bits) | u64::from(generation)
    }

    /// As [`take_off`](Tokens::take_off), for a work request that a `Posted` waits for.
    pub(crate) fn post(&self, ptr: NonNull<u8>, len: usize, place: Place) -> u64 {
        self.take_off_far(ptr.as_ptr() as usize - self.base, len, place, Kind::Posted)
    }

    #[cold]
    #[inline(never)]
    fn take_off_far(&self, offset: usize, len: usize, place: Place, kind: Kind) -> u64 {
        let (page, plane) = (offset >> PAGE_SHIFT, offset % PAGE / MIN_BLOCK);
        if len >= LONG {
            // A block this long starts at a page's start and has the next page to itself.
            let cargo = Cargo { load: len as u32, stamp: (len as u64 >> 32) as u16 };
            self.far_record(page + 1, 0).set_cargo(cargo);
        }
        let flag = if kind == Kind::Posted { POSTED as u16 } else { 0 };
        let place = place.code() as u16 | flag;
        let cargo = Cargo::new(place, len.min(LONG) as u16, tick::stamp());
        let generation = self.far_record(page, plane).take_off(cargo);
        self.far_token(page, plane, generation)
    }

    fn far_token(&self, page: usize, plane: usize, generation: u32) -> u64 {
        (page as u64 + self.tagged) << PAGE_AT
            | 1 << FAR_AT
            | (plane as u64) << PLANE_AT
            | u64::from(generation)
    }

    /// The page of a token with a record in the near table; `None` for any other token or number.
    #[inline(always)]
    fn near_page(&self, token: u64) -> Option<usize> {
        let page = (token >> PAGE_AT).wrapping_sub(self.tagged);
        (page < self.pages).then_some(page as usize)
    }

    /// Finds a token's block again, if it is a bare one; the caller then owns the block. Any number may be
    /// passed. For why there was none, see [`refusal`](Tokens::refusal).
    #[inline(always)]
    pub(crate) fn land(&self, token: u64) -> Option<Landed> {
        if let Some(page) = self.near_page(token) {
            // SAFETY: below `pages`, which the table has at least.
            let record = unsafe { self.near.get_unchecked(page) };
            if record.land(token as u32) {
                let cargo = record.load();
                // SAFETY: the place was a place's code when it took off.
                let place = unsafe { Place::from_code(cargo.place()) };
                let ptr = self.block_at(page << PAGE_SHIFT);
                return Some(Landed { ptr, page, len: cargo.len(), place });
            }
        }
        self.landed(self.land_far(token, Kind::Bare))
    }

    /// As [`land`](Tokens::land), for a token of a posted work request.
    pub(crate) fn land_posted(&self, token: u64) -> Option<Landed> {
        self.landed(self.land_far(token, Kind::Posted))
    }

    #[inline(always)]
    fn landed(&self, words: Words) -> Option<Landed> {
        if words.1 == Words::NONE.1 {
            return None;
        }
        let (offset, place) = (words.offset(), words.place());
        let ptr = self.block_at(offset);
        Some(Landed { ptr, page: offset >> PAGE_SHIFT, len: words.1, place })
    }

    #[cold]
    #[inline(never)]
    fn land_far(&self, token: u64, kind: Kind) -> Words {
        // In a forked child no flight of the parent's is to be had: the near table has none there.
        if fork::generation() != self.process {
            return Words::NONE;
        }
        let landed = self.judge(token, kind).ok().filter(|(record, _)| record.land(token as u32));
        landed.map_or(Words::NONE, |(_, words)| words)
    }

    /// Why [`land`](Tokens::land) gave nothing.
    #[cold]
    pub(crate) fn refusal(&self, token: u64) -> TokenError {
        self.judge(token, Kind::Bare).err().unwrap_or(TokenError::NotInFlight { token })
    }

    /// The record of a token in flight, and what landing it would give.
    fn judge(&self, token: u64, kind: Kind) -> Result<(&Record, Words), TokenError> {
        let stale = TokenError::NotInFlight { token };
        let (record, page, plane) = self.find(token)?;
        let Some((record, (generation, cargo))) = record.and_then(|r| Some((r, r.in_flight()?)))
        else {
            return Err(stale);
        };
        let posted = cargo.place() & POSTED != 0;
        if generation != token as u32 & 0xffff || (kind == Kind::Posted && !posted) {
            return Err(stale);
        }
        if kind == Kind::Bare && posted {
            return Err(TokenError::Posted { token });
        }
        let offset = (page << PAGE_SHIFT) + plane * MIN_BLOCK;
        let place = (cargo.place() & !POSTED) as usize;
        // The length before landing: afterwards the records are the next owner's.
        let len = self.len_of(page, cargo);
        Ok((record, Words(offset | place << Words::PLACE_SHIFT, len)))
    }

    /// Where the record of a token is, were it one of this pool; there may be none yet.
    fn find(&self, token: u64) -> Result<(Option<&Record>, usize, usize), TokenError> {
        if let Some(page) = self.near_page(token) {
            return Ok((self.near.get(page), page, 0));
        }
        let tag = (token >> TAG_AT) as u32;
        if tag != u32::from(self.tag.0) {
            return Err(TokenError::OtherPool { token });
        }
        let page = ((token >> PAGE_AT) & (PAGES - 1)) as usize;
        let plane = (token >> PLANE_AT) as usize % PLANES;
        if token >> FAR_AT & 1 == 0 || page as u64 >= self.pages {
            return Err(TokenError::Invalid { token });
        }
        Ok((self.part(page).map(|part| part.record(page, plane)), page, plane))
    }

    fn len_of(&self, page: usize, cargo: Cargo) -> usize {
        if cargo.len() < LONG {
            return cargo.len();
        }
        let Cargo { load, stamp } = self.far_record(page + 1, 0).cargo();
        (u64::from(load) | u64::from(stamp) << 32) as usize
    }

    /// The first byte of the block at an offset from the base.
    #[inline(always)]
    fn block_at(&self, offset: usize) -> NonNull<u8> {
        debug_assert!(offset >> PAGE_SHIFT < self.near.len());
        // SAFETY: all callers pass the offset of a block that is out, whose address is not null.
        unsafe { NonNull::new_unchecked((self.base + offset) as *mut u8) }
    }

    /// The part of the far table that a page is in, if it was made.
    fn part(&self, page: usize) -> Option<&Part> {
        // Pairs with the store in `make_part`.
        let part = self.far[page / PART].load(Acquire);
        // SAFETY: null, or a box that `parts` owns until the end of `self`, and that nobody changes.
        unsafe { part.as_ref() }
    }

    #[cold]
    fn make_part(&self, page: usize) -> &Part {
        let part = Box::new(Part::new());
        let made = (&raw const *part).cast_mut();
        // Release pairs with the load in `part`. Acquire: another thread may have been faster.
        match self.far[page / PART].compare_exchange(ptr::null_mut(), made, AcqRel, Acquire) {
            Ok(_) => {
                self.parts.push(part);
                // SAFETY: owned by `parts` from now on, as in `part`.
                unsafe { &*made }
            }
            // SAFETY: as in `part`.
            Err(theirs) => unsafe { &*theirs },
        }
    }

    /// The record in the far table, made if need be.
    fn far_record(&self, page: usize, plane: usize) -> &Record {
        let part = self.part(page).unwrap_or_else(|| self.make_part(page));
        if part.used.load(Relaxed) >> plane & 1 == 0 {
            // Relaxed: a look at flights that misses one which just takes off is as good as an earlier look.
            part.used.fetch_or(1 << plane, Relaxed);
        }
        part.record(page, plane)
    }

    /// Hands every flight under way that starts on the given pages to `sink`. Others may take off or land
    /// meanwhile.
    pub(crate) fn each_flight(&self, first: u32, pages: u32, sink: &mut impl FnMut(Flight)) {
        let ages = self.epoch.ages();
        let mut show = |page: usize, plane: usize, record: &Record, token: &dyn Fn(u32) -> u64| {
            if let Some((generation, cargo)) = record.in_flight() {
                sink(Flight {
                    token: token(generation),
                    addr: self.base + (page << PAGE_SHIFT) + plane * MIN_BLOCK,
                    len: self.len_of(page, cargo),
                    age: ages.of(cargo.stamp),
                });
            }
        };
        let (first, end) = (first as usize, first as usize + pages as usize);
        for (i, record) in self.near[first..end].iter().enumerate() {
            let page = first + i;
            let token = |g: u32| (page as u64 + self.tagged) << PAGE_AT | u64::from(g);
            show(page, 0, record, &token);
        }
        for page in first..end {
            let Some(part) = self.part(page) else { continue };
            let mut planes = part.used.load(Relaxed);
            while planes != 0 {
                let plane = planes.trailing_zeros() as usize;
                planes &= planes - 1;
                let token = |g: u32| self.far_token(page, plane, g);
                show(page, plane, part.record(page, plane), &token);
            }
        }
    }

    /// Bytes of the tables that are in memory.
    pub(crate) fn table_bytes(&self) -> usize {
        let far = self.parts.iter().map(|(_, part)| table::resident_bytes(&part.records));
        self.near.resident_bytes() + self.far.resident_bytes() + far.sum::<usize>()
    }
}

/// What tells pools' tokens apart.
#[derive(Debug)]
struct Tag(u16);

/// Pools beyond the tags share this one, and then do not know each other's tokens.
const SHARED: u16 = (1 << TAG_BITS) - 1;
/// No pool has this one.
const NO_POOLS: u16 = SHARED - 1;
/// The upper 16 bits of numbers that no pool's token ever is.
pub(crate) const NO_TOKENS: u16 = NO_POOLS << (TAG_AT - 48);

static TAGS: [AtomicU64; (1 << TAG_BITS) / 64] =
    [const { AtomicU64::new(0) }; (1 << TAG_BITS) / 64];

impl Tag {
    /// Takes a tag that no living pool has, and that was not given back a moment ago.
    fn take() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        for _ in 0..NO_POOLS {
            let tag = (NEXT.fetch_add(1, Relaxed) % u64::from(NO_POOLS)) as u16;
            let bit = 1 << (tag % 64);
            if TAGS[usize::from(tag / 64)].fetch_or(bit, Relaxed) & bit == 0 {
                return Self(tag);
            }
        }
        Self(SHARED)
    }
}

impl Drop for Tag {
    fn drop(&mut self) {
        // Nothing is published through a tag; Release only keeps it after the pool's other stores.
        TAGS[usize::from(self.0 / 64)].fetch_and(!(1 << (self.0 % 64)), Release);
    }
}
