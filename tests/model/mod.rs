//! One script of actions against the pool (of two access classes and a share) and against a naive account of it, checked after each step:
//! no overlap, alignment, contents, keys, books (P5). The model test and the fuzzer both feed it.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used)]

use std::{
    alloc::Layout,
    collections::{BTreeMap, HashSet},
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    thread,
    time::Duration,
};

use pinpool::{
    Access, AllocError, Batch, Books, Buf, Class, Device, Event, FreeError, Guards, Pages, Pool,
    Reserve, Share, Track,
};

/// Where to allocate from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Heap {
    Default,
    Class,
    Share,
}

/// What can be done to a pool.
#[derive(Clone, Copy, Debug)]
pub enum Action {
    Alloc {
        len: usize,
    },
    AllocAligned {
        len: usize,
        align: usize,
    },
    /// From the other class, or through the share.
    AllocFrom {
        heap: Heap,
        len: usize,
        align: usize,
    },
    AllocMany {
        len: usize,
        n: usize,
    },
    Free {
        which: usize,
    },
    /// On a thread of its own, which then ends.
    FreeElsewhere {
        which: usize,
    },
    /// Changes which lengths later allocations ask for.
    ResizeMix {
        shift: u32,
    },
    /// A thread allocates, frees half, hands the rest over and ends.
    ThreadExit {
        len: usize,
        n: usize,
    },
    /// Out as a bare pointer and back, with wrong pointers tried in between.
    Raw {
        which: usize,
    },
    /// Out as a token and back, perhaps after others, with wrong tokens tried in between.
    Token {
        which: usize,
    },
    /// Waits for a length without patience: as good as an alloc while nobody else waits.
    Wait {
        len: usize,
    },
    Trim,
    /// Drops the last handle with buffers out, checks them, and starts anew.
    DropPool,
}

impl Action {
    /// Every word is an action, so that random words and a fuzzer's bytes both make scripts.
    pub fn from_word(word: u64) -> Self {
        let (kind, a, b) = (word & 0xff, (word >> 8) & 0xff_ffff, (word >> 32) as usize);
        let a = a as usize;
        match kind {
            0..=47 => Self::Alloc { len: a },
            48..=79 => {
                let heap = if b & 1 == 0 { Heap::Class } else { Heap::Share };
                // One in eight is aligned.
                let align = if b & 14 == 0 { 1 << ((b >> 4) % 18) } else { 1 };
                Self::AllocFrom { heap, len: a, align }
            }
            80..=95 => Self::AllocAligned { len: a, align: 1 << (b % 18) },
            96..=111 => Self::AllocMany { len: a, n: b % 40 },
            112..=179 => Self::Free { which: b },
            180..=189 => Self::FreeElsewhere { which: b },
            190..=209 => Self::ResizeMix { shift: (b % 22) as u32 },
            210..=217 => Self::ThreadExit { len: a, n: b % 12 },
            218..=229 => Self::Raw { which: b },
            230..=241 => Self::Token { which: b },
            242..=245 => Self::Wait { len: a },
            246..=253 => Self::Trim,
            _ => Self::DropPool,
        }
    }
}

struct Held {
    buf: Buf,
    seed: u8,
}

/// The pool and the naive account.
pub struct Model {
    pool: Pool,
    class: Class,
    share: Share,
    device: Device,
    held: Vec<Held>,
    /// Start → end of every block that is out.
    ranges: BTreeMap<usize, usize>,
    /// Every token that this pool has given.
    tokens: HashSet<u64>,
    /// Lengths are below 1 << shift.
    shift: u32,
    seed: u8,
    shape: Shape,
}

/// What pools have told that they should not have.
static TOLD: AtomicU64 = AtomicU64::new(0);

/// What pools a script runs on.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Shape {
    pub colouring: bool,
    pub guards: Guards,
    pub track: u32,
}

impl Shape {
    /// Every word is one: without guards, or with any of them.
    pub fn from_word(word: u8) -> Self {
        let bit = |n: u32| word >> n & 1 == 1;
        let quarantine = [0, 4096, 100_000, usize::MAX][usize::from(word >> 3 & 3)];
        let guards =
            Guards::new().poison(bit(1)).canary(bit(2)).quarantine(quarantine).zero_on_free(bit(5));
        Self { colouring: bit(0), guards, track: u32::from(word >> 6) }
    }

    fn canary(&self) -> bool {
        self.guards == self.guards.canary(true)
    }

    /// What a buffer holds at first, if that is known.
    fn fresh(&self) -> Option<u8> {
        let (poison, zero) = (self.guards.poison(true), self.guards.zero_on_free(true));
        match (self.guards == poison, self.guards == zero) {
            (_, true) => Some(0),
            (true, _) => Some(Guards::POISON),
            _ => None,
        }
    }
}

/// Three arenas: two of the default class, one of the other. The share has a part of the second.
pub const CAPACITY: usize = 3 << 20;
const ARENA: usize = 1 << 20;
const RESERVE: Reserve = Reserve::bytes(200_000);

impl Model {
    pub fn new(shape: Shape) -> Self {
        let device = Device::soft();
        let pool = Self::build(&device, shape);
        let (class, share) = Self::handles(&pool);
        Self {
            pool,
            class,
            share,
            device,
            held: vec![],
            ranges: BTreeMap::new(),
            tokens: HashSet::new(),
            shift: 14,
            seed: 0,
            shape,
        }
    }

    fn build(device: &Device, shape: Shape) -> Pool {
        Pool::builder()
            .device(device.clone())
            .access(Access::LOCAL_WRITE | Access::REMOTE_READ)
            .capacity(CAPACITY - ARENA)
            .class("other", Access::LOCAL_WRITE, ARENA)
            .share("part", RESERVE)
            .arena_size(ARENA)
            .pages(Pages::Base)
            .colouring(shape.colouring)
            .guards(shape.guards)
            .track(Track::every(shape.track))
            .on_event(|event| match event {
                Event::StillOut(_)
                | Event::Built { .. }
                | Event::Exhausted { .. }
                | Event::TakenDown { .. } => {}
                // A panic of the hook's would be caught.
                _ => _ = TOLD.fetch_add(1, Relaxed),
            })
            .build()
            .unwrap()
    }

    fn handles(pool: &Pool) -> (Class, Share) {
        (pool.class("other").unwrap(), pool.share("part").unwrap())
    }

    pub fn run(words: impl IntoIterator<Item = u64>, shape: Shape) {
        let mut model = Self::new(shape);
        for word in words {
            model.step(Action::from_word(word));
        }
        model.finish();
    }

    fn len(&self, raw: usize) -> usize {
        raw & ((1 << self.shift) - 1)
    }

    pub fn step(&mut self, action: Action) {
        match action {
            Action::Alloc { len } => {
                let len = self.len(len);
                let got = self.pool.alloc(len);
                self.took(got, len, 1, Heap::Default);
            }
            Action::AllocFrom { heap, len, align } => {
                let len = self.len(len);
                let layout = Layout::from_size_align(len, align).unwrap();
                let got = match heap {
                    Heap::Default => self.pool.alloc_layout(layout),
                    Heap::Class if align == 1 => self.pool.alloc_in(&self.class, len),
                    Heap::Class => self.class.alloc_layout(layout),
                    Heap::Share => self.share.alloc_layout(layout),
                };
                self.took(got, len, align, heap);
            }
            Action::AllocAligned { len, align } => {
                let len = self.len(len);
                let got = self.pool.alloc_layout(Layout::from_size_align(len, align).unwrap());
                self.took(got, len, align, Heap::Default);
            }
            Action::AllocMany { len, n } => {
                let len = self.len(len);
                let mut batch = Batch::with_capacity(n);
                match self.pool.alloc_many(&mut batch, len, n) {
                    Ok(got) => {
                        assert!(got <= n && batch.len() == got);
                        assert!(batch.sges().all(|s| s.length as usize == len));
                        // Every other one goes back by the batch.
                        for _ in 0..got / 2 {
                            let buf = batch.pop().unwrap();
                            self.took(Ok(buf), len, 1, Heap::Default);
                        }
                    }
                    Err(e) => self.refused(&e, len, 1, Heap::Default),
                }
                drop(batch);
            }
            Action::Free { which } => {
                if let Some(held) = self.pick(which) {
                    drop(held.buf);
                }
            }
            Action::FreeElsewhere { which } => {
                if let Some(held) = self.pick(which) {
                    thread::spawn(move || drop(held.buf)).join().unwrap();
                }
            }
            Action::ResizeMix { shift } => self.shift = shift,
            Action::ThreadExit { len, n } => {
                let (pool, len) = (self.pool.clone(), self.len(len));
                let got = thread::spawn(move || {
                    let mut bufs: Vec<_> = (0..n).map_while(|_| pool.alloc(len).ok()).collect();
                    bufs.truncate(bufs.len() / 2);
                    bufs
                })
                .join()
                .unwrap();
                for buf in got {
                    self.took(Ok(buf), len, 1, Heap::Default);
                }
            }
            Action::Raw { which } => self.raw(which),
            Action::Token { which } => self.token(which),
            Action::Wait { len } => {
                let len = self.len(len);
                let got = self.pool.alloc_wait(len, Duration::ZERO).map_err(|e| match e {
                    AllocError::TimedOut { ahead: 0, books, .. } => AllocError::Exhausted(books),
                    other => other,
                });
                self.took(got, len, 1, Heap::Default);
            }
            Action::Trim => {
                self.pool.trim();
                assert_eq!(self.pool.stats().cached, 0);
            }
            Action::DropPool => {
                let next = Self::build(&self.device, self.shape);
                let other = self.class.arenas()[0].addr.as_ptr() as usize;
                (self.class, self.share) = Self::handles(&next);
                drop(std::mem::replace(&mut self.pool, next));
                let soft = self.device.as_soft().unwrap();
                // Each class's arenas stay for its own buffers alone.
                let of_other = |start: &&usize| (other..other + ARENA).contains(*start);
                let in_other = self.ranges.keys().filter(of_other).count();
                let old = if in_other > 0 { 1 } else { 0 }
                    + if in_other < self.held.len() { 2 } else { 0 };
                assert_eq!(soft.regions(), CAPACITY / ARENA + old);
                for held in &self.held {
                    Self::check_contents(held);
                }
                self.held.clear();
                self.ranges.clear();
                assert_eq!(soft.regions(), CAPACITY / ARENA, "the last buffer tore it down");
            }
        }
        self.check();
    }

    fn took(&mut self, got: Result<Buf, AllocError>, len: usize, align: usize, heap: Heap) {
        let mut buf = match got {
            Ok(buf) => buf,
            Err(e) => return self.refused(&e, len, align, heap),
        };
        assert_eq!(buf.len(), len);
        let (start, cap) = (buf.as_ptr() as usize, buf.capacity());
        assert!(cap >= len.max(1));
        assert_eq!(start % align.max(64), 0);
        assert!(self.shape.colouring || cap % 4096 != 0 || start % 4096 == 0);
        assert!(!self.shape.canary() || cap == len.max(1));
        if let Some(fresh) = self.shape.fresh() {
            assert!(buf.iter().all(|&b| b == fresh));
        }
        let before = self.ranges.range(..start + cap).next_back();
        assert!(before.is_none_or(|(_, &end)| end <= start), "overlaps a live buffer");
        let arena = self.pool.arenas().into_iter().find(|a| {
            let first = a.addr.as_ptr() as usize;
            first <= start && start + cap <= first + a.len
        });
        let arena = arena.expect("inside one region (P3)");
        let of_class = self.class.arenas()[0].addr == arena.addr;
        assert_eq!(of_class, heap == Heap::Class);
        assert_eq!(buf.remote().is_none(), of_class, "only the default class has a remote right");
        let keys = arena.keys;
        assert_eq!(buf.keys(), keys);
        assert_eq!(self.pool.keys_of(buf.as_ptr()), Some(keys));
        self.seed = self.seed.wrapping_add(29);
        let seed = self.seed;
        for (i, b) in buf.iter_mut().enumerate() {
            *b = (i as u8).wrapping_mul(31) ^ seed;
        }
        self.ranges.insert(start, start + cap);
        self.held.push(Held { buf, seed });
    }

    /// A refusal must be true: so little is free that no block of that length can be there.
    fn refused(&self, error: &AllocError, len: usize, align: usize, heap: Heap) {
        match error {
            AllocError::TooLarge { asked, max } => assert!(*asked == len && len > *max),
            AllocError::Exhausted(e) => {
                let books = self.books(heap);
                let sum = |of: fn(&Books) -> usize| books.iter().map(of).sum::<usize>();
                assert_eq!(
                    (e.asked, e.live, e.live_buffers, e.capacity),
                    (len, sum(|b| b.live), sum(|b| b.live_buffers), sum(|b| b.capacity))
                );
                // A run this long holds an aligned start with enough behind it, wherever it lies.
                let slack = align.saturating_sub(4096);
                assert!(e.largest_free < len.max(1).next_multiple_of(4096) + slack);
                assert!(len > 0 || e.not_live < e.capacity);
            }
            other => panic!("{other}"),
        }
    }

    /// What an allocation may draw on.
    fn books(&self, heap: Heap) -> Vec<Books> {
        let stats = self.pool.stats();
        let classes = &stats.access_classes;
        match heap {
            Heap::Default => vec![classes[0].unreserved],
            Heap::Class => vec![classes[1].unreserved],
            Heap::Share => vec![classes[0].unreserved, stats.shares[0].reserve],
        }
    }

    fn pick(&mut self, which: usize) -> Option<Held> {
        if self.held.is_empty() {
            return None;
        }
        let held = self.held.swap_remove(which % self.held.len());
        Self::check_contents(&held);
        self.ranges.remove(&(held.buf.as_ptr() as usize));
        Some(held)
    }

    fn check_contents(held: &Held) {
        let ok =
            held.buf.iter().enumerate().all(|(i, &b)| b == (i as u8).wrapping_mul(31) ^ held.seed);
        assert!(ok, "somebody wrote into a live buffer");
    }

    fn raw(&mut self, which: usize) {
        let Some(held) = self.pick(which) else { return };
        let (cap, len) = (held.buf.capacity(), held.buf.len());
        let raw = held.buf.into_raw().as_ptr();
        // SAFETY: this is the only copy of the pointer; wrong ones must be refused.
        let back = unsafe {
            let inside = raw.wrapping_add(1 + which % (cap.max(2) - 1));
            assert!(self.pool.free_raw(inside).is_err());
            assert!(self.pool.free_raw(raw.wrapping_sub(4 * CAPACITY)).is_err());
            assert_eq!(self.pool.free_raw(std::ptr::null_mut()), Err(FreeError::Null));
            self.pool.from_raw(raw).unwrap()
        };
        assert_eq!((back.as_ptr(), back.len()), (raw.cast_const(), cap));
        let mut back = back;
        back.truncate(len);
        self.ranges.insert(raw as usize, raw as usize + cap);
        self.held.push(Held { buf: back, seed: held.seed });
        // SAFETY: the call must refuse, for a handle owns it again.
        assert!(matches!(unsafe { self.pool.free_raw(raw) }, Err(FreeError::NotOut { .. })));
    }

    fn token(&mut self, which: usize) {
        let Some(held) = self.pick(which) else { return };
        let (start, len, cap) = (held.buf.as_ptr(), held.buf.len(), held.buf.capacity());
        let token = held.buf.into_token();
        assert!(!self.tokens.contains(&token), "a token that was used is back");
        self.tokens.insert(token);
        for wrong in [token ^ 1 << (which % 63), which as u64, token.wrapping_add(2), u64::MAX] {
            assert!(self.pool.from_any_token(wrong).is_err());
        }
        let in_flight = self.pool.in_flight();
        assert_eq!((in_flight.len(), in_flight[0].token, in_flight[0].len), (1, token, len));
        let back = self.pool.from_any_token(token).unwrap();
        assert_eq!((back.as_ptr(), back.len(), back.capacity()), (start, len, cap));
        assert!(self.pool.from_any_token(token).is_err());
        self.ranges.insert(start as usize, start as usize + cap);
        self.held.push(Held { buf: back, seed: held.seed });
    }

    fn check(&self) {
        self.pool.check();
        let stats = self.pool.stats();
        assert_eq!(stats.capacity, CAPACITY);
        assert_eq!(stats.live_buffers, self.held.len());
        let live = self.ranges.iter().map(|(a, b)| b - a).sum::<usize>();
        // Under a canary nobody knows how long the block is.
        assert!(stats.live == live || self.shape.canary() && stats.live > live);
        assert_eq!((self.pool.check_free(), TOLD.load(Relaxed)), (0, 0));
        let report = self.pool.outstanding();
        assert_eq!((report.buffers, report.bytes), (stats.live_buffers, stats.live));
        let tracked: usize = report.sites.iter().map(|s| s.buffers).sum();
        assert!(self.shape.track != 1 || tracked == self.held.len());
    }

    pub fn finish(mut self) {
        for held in self.held.drain(..) {
            Self::check_contents(&held);
        }
        self.pool.trim();
        for heap in [Heap::Class, Heap::Share] {
            for books in self.books(heap) {
                let whole = books.capacity.min(ARENA);
                assert_eq!(books.largest_free, whole, "all merged again");
            }
        }
        drop((self.class, self.share));
        self.pool.close().unwrap();
        assert_eq!(self.device.as_soft().unwrap().regions(), 0);
        assert_eq!(TOLD.load(Relaxed), 0);
    }
}
