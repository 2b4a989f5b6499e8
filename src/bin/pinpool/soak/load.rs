//! The load of `pinpool soak`: threads that allocate and free by every front there is, write what they have and
//! check it before they give it back. Manages what one step does; when it begins and ends is `mod.rs`'s.

use std::{
    alloc::Layout,
    pin::pin,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    task::{Context, Poll, Waker},
    thread,
    time::Duration,
};

use pinpool::{AllocError, Batch, Buf, Class, LocalPool, Pool, Share};

/// The longest buffer that is asked for.
const LONGEST: usize = 1 << 20;
/// How many buffers pass between threads at most.
const PASSED: usize = 256;

/// Splitmix64: the same for the same seed.
pub(super) struct Numbers(u64);

impl Numbers {
    pub(super) fn new(seed: u64) -> Self {
        Self(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub(super) fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    /// Of every magnitude alike, so short ones mostly.
    fn len(&mut self) -> usize {
        let most = 64usize << self.below(15);
        1 + self.below(most.min(LONGEST))
    }
}

/// What all threads of one generation share.
pub(super) struct Shared {
    pub(super) stop: AtomicBool,
    /// Nothing is held for long, so that the pool can shrink.
    pub(super) ease: AtomicBool,
    /// Steps that were taken, allocs that gave a buffer, and such that were refused for want of memory.
    pub(super) steps: AtomicU64,
    pub(super) allocs: AtomicU64,
    pub(super) refused: AtomicU64,
    /// What must never be.
    pub(super) wrong: Mutex<Vec<String>>,
    /// Buffers on their way from one thread to another.
    passed: Mutex<Vec<Held>>,
}

impl Shared {
    pub(super) fn new() -> Arc<Self> {
        Arc::new(Self {
            stop: AtomicBool::new(false),
            ease: AtomicBool::new(false),
            steps: AtomicU64::new(0),
            allocs: AtomicU64::new(0),
            refused: AtomicU64::new(0),
            wrong: Mutex::new(Vec::new()),
            passed: Mutex::new(Vec::new()),
        })
    }

    /// Notes what must never be; the first few of it.
    pub(super) fn wrong(&self, what: String) {
        let mut wrong = self.wrong.lock().unwrap_or_else(PoisonError::into_inner);
        if wrong.len() < 16 {
            wrong.push(what);
        }
    }

    /// Leaves a buffer to whoever comes next, and takes one that was left.
    fn pass(&self, held: Held, rng: &mut Numbers) -> Option<Held> {
        let mut passed = self.passed.lock().unwrap_or_else(PoisonError::into_inner);
        passed.push(held);
        let at = rng.below(passed.len());
        (passed.len() > PASSED / 2 || rng.below(2) == 0).then(|| passed.swap_remove(at))
    }

    /// Frees what is under way.
    pub(super) fn clear(&self) {
        let passed =
            std::mem::take(&mut *self.passed.lock().unwrap_or_else(PoisonError::into_inner));
        passed.into_iter().for_each(|h| h.free(self));
    }
}

/// A buffer, and the number that says what is in it.
struct Held {
    buf: Buf,
    mark: u64,
}

impl Held {
    /// Writes the mark to the buffer's ends, and to all of it if it is short.
    fn new(mut buf: Buf, mark: u64) -> Self {
        let len = buf.len();
        let bytes = mark.to_le_bytes();
        if len <= 512 {
            buf.iter_mut().zip(bytes.iter().cycle()).for_each(|(b, m)| *b = *m);
        } else {
            buf[..8].copy_from_slice(&bytes);
            buf[len / 2..len / 2 + 8].copy_from_slice(&bytes);
            buf[len - 8..].copy_from_slice(&bytes);
        }
        Self { buf, mark }
    }

    fn intact(&self) -> bool {
        let (buf, len, bytes) = (&self.buf, self.buf.len(), self.mark.to_le_bytes());
        if len <= 512 {
            return buf.iter().zip(bytes.iter().cycle()).all(|(b, m)| b == m);
        }
        [0, len / 2, len - 8].iter().all(|&at| buf[at..at + 8] == bytes)
    }

    fn free(self, shared: &Shared) {
        if !self.intact() {
            let (ptr, len) = (self.buf.as_ptr(), self.buf.len());
            shared.wrong(format!("the {len} bytes at {ptr:?} are not what was written there"));
        }
    }
}

/// One thread of the load.
pub(super) struct Worker {
    pool: Pool,
    local: LocalPool,
    class: Class,
    shares: [Share; 2],
    batch: Batch,
    held: Vec<Held>,
    /// How many bytes it holds, and may.
    bytes: usize,
    most: usize,
    rng: Numbers,
    shared: Arc<Shared>,
}

impl Worker {
    /// `most` is how many bytes it may hold.
    pub(super) fn new(
        pool: &Pool,
        class: &Class,
        shares: [Share; 2],
        most: usize,
        seed: u64,
        shared: &Arc<Shared>,
    ) -> Self {
        Self {
            pool: pool.clone(),
            local: pool.local(),
            class: class.clone(),
            shares,
            batch: Batch::with_capacity(32),
            held: Vec::new(),
            bytes: 0,
            most,
            rng: Numbers::new(seed),
            shared: shared.clone(),
        }
    }

    /// Works until it is told to stop.
    pub(super) fn run(mut self) {
        while !self.shared.stop.load(Relaxed) {
            for _ in 0..64 {
                self.step();
            }
            self.shared.steps.fetch_add(64, Relaxed);
        }
        self.batch.free();
        let shared = self.shared.clone();
        self.held.drain(..).for_each(|h| h.free(&shared));
    }

    fn step(&mut self) {
        match self.rng.below(40) {
            0..18 => self.alloc(),
            18..30 => self.free(),
            30..33 => self.pass(),
            33 => self.fly(),
            34 => self.out_raw(),
            35 => self.fill_batch(),
            36 if self.rng.below(64) == 0 => self.pool.trim(),
            37 if self.rng.below(256) == 0 => drop(self.pool.stats()),
            38 if self.rng.below(64) == 0 => self.short_lived(),
            _ => self.look_up(),
        }
    }

    fn alloc(&mut self) {
        let ease = self.shared.ease.load(Relaxed);
        if self.bytes > if ease { 0 } else { self.most } {
            return self.free();
        }
        let len = self.rng.len();
        let timeout = Duration::from_micros(self.rng.below(2000) as u64);
        let share = &self.shares[self.rng.below(2)];
        let got = match self.rng.below(16) {
            0..6 => self.pool.alloc(len),
            6 | 7 => self.local.alloc(len),
            8 => self.pool.alloc_in(&self.class, len),
            9 => self.class.alloc(len),
            10 | 11 => share.alloc(len),
            12 => self.pool.alloc_layout(layout(len, &mut self.rng)),
            13 => self.pool.alloc_wait(len, timeout),
            14 => share.alloc_wait(len, timeout),
            _ => match self.poll(len) {
                Some(got) => got,
                None => return,
            },
        };
        self.take(got);
    }

    /// A future that is polled a few times, and given up if it has not resolved by then.
    fn poll(&mut self, len: usize) -> Option<Result<Buf, AllocError>> {
        let mut future = pin!(self.pool.alloc_async(len));
        let mut cx = Context::from_waker(Waker::noop());
        for _ in 0..4 {
            if let Poll::Ready(got) = future.as_mut().poll(&mut cx) {
                return Some(got);
            }
            thread::yield_now();
        }
        None
    }

    fn take(&mut self, got: Result<Buf, AllocError>) {
        match got {
            Ok(buf) => {
                if self.pool.keys_of(buf.as_ptr()) != Some(buf.keys()) {
                    self.shared.wrong(format!("{:?} has other keys than its arena", buf.as_ptr()));
                }
                self.bytes += buf.capacity();
                self.held.push(Held::new(buf, self.rng.next()));
                self.shared.allocs.fetch_add(1, Relaxed);
            }
            Err(
                AllocError::Exhausted(_)
                | AllocError::TimedOut { .. }
                | AllocError::TooLarge { .. },
            ) => {
                self.shared.refused.fetch_add(1, Relaxed);
            }
            Err(e) => self.shared.wrong(format!("an alloc was refused otherwise: {e}")),
        }
    }

    fn any(&mut self) -> Option<Held> {
        let n = self.held.len();
        let held = (n > 0).then(|| self.held.swap_remove(self.rng.below(n)))?;
        self.bytes -= held.buf.capacity();
        Some(held)
    }

    fn put(&mut self, held: Held) {
        self.bytes += held.buf.capacity();
        self.held.push(held);
    }

    fn free(&mut self) {
        if let Some(held) = self.any() {
            held.free(&self.shared);
        }
    }

    fn pass(&mut self) {
        let Some(held) = self.any() else { return };
        if self.shared.ease.load(Relaxed) {
            return held.free(&self.shared);
        }
        if let Some(other) = self.shared.pass(held, &mut self.rng) {
            other.free(&self.shared);
        }
    }

    /// Into a token and back; a token is good once.
    fn fly(&mut self) {
        let Some(Held { buf, mark }) = self.any() else { return };
        let token = buf.into_token();
        match self.pool.from_any_token(token) {
            Ok(buf) => self.put(Held { buf, mark }),
            Err(e) => self.shared.wrong(format!("a token was refused: {e}")),
        }
        if self.pool.from_any_token(token).is_ok() {
            self.shared.wrong(format!("the token {token:#x} was good twice"));
        }
    }

    /// Into a bare address and back; an address is good once.
    fn out_raw(&mut self) {
        let Some(Held { buf, mark }) = self.any() else { return };
        let (len, ptr) = (buf.len(), buf.into_raw());
        // SAFETY: this thread gave it up just now, and nobody else knows it.
        match unsafe { self.pool.from_raw(ptr.as_ptr()) } {
            Ok(mut buf) => match buf.set_len(len) {
                Ok(()) => self.put(Held { buf, mark }),
                Err(e) => self.shared.wrong(format!("a block lost its length: {e}")),
            },
            Err(e) => self.shared.wrong(format!("an address was refused: {e}")),
        }
        // SAFETY: nothing is out raw there: this thread has the buffer.
        if unsafe { self.pool.free_raw(ptr.as_ptr()) }.is_ok() {
            self.shared.wrong(format!("{ptr:?} was good twice"));
        }
    }

    fn fill_batch(&mut self) {
        let len = self.rng.len().min(16 << 10);
        self.batch.free();
        match self.pool.alloc_many(&mut self.batch, len, 32) {
            Ok(_) => {
                if self.rng.below(2) == 0
                    && let Some(buf) = self.batch.pop()
                {
                    self.take(Ok(buf));
                }
                self.batch.free();
            }
            Err(AllocError::Exhausted(_) | AllocError::BatchMixed { .. }) => {}
            Err(e) => self.shared.wrong(format!("a batch was refused otherwise: {e}")),
        }
    }

    /// A thread of its own that leaves what it has to others.
    fn short_lived(&mut self) {
        let (pool, shared) = (self.pool.clone(), self.shared.clone());
        let seed = self.rng.next();
        let thread = thread::spawn(move || {
            let mut rng = Numbers::new(seed);
            for _ in 0..20 {
                let Ok(buf) = pool.alloc(rng.len().min(8192)) else { continue };
                let held = Held::new(buf, rng.next());
                if let Some(other) = shared.pass(held, &mut rng) {
                    other.free(&shared);
                }
            }
        });
        if thread.join().is_err() {
            self.shared.wrong("a thread panicked".to_owned());
        }
    }

    fn look_up(&mut self) {
        let Some(at) = self.held.len().checked_sub(1) else { return };
        let held = &self.held[self.rng.below(at + 1)];
        if !held.intact() {
            self.shared.wrong(format!("{:?} was written over", held.buf.as_ptr()));
        }
    }
}

fn layout(len: usize, rng: &mut Numbers) -> Layout {
    Layout::from_size_align(len, 1 << rng.below(17)).unwrap_or(Layout::new::<u64>())
}
