//! Eight threads that allocate, write and check, while somebody else writes over whatever is not theirs: what the
//! software device and a real one are both put to.
#![allow(dead_code, unreachable_pub)]

use std::{
    sync::{
        Barrier, Mutex,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    thread,
};

use pinpool::{Buf, Pool};

pub const THREADS: usize = 8;

/// Numbers without a pattern; the same for the same seed.
pub struct Numbers(u64);

impl Numbers {
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub fn next(&mut self) -> u64 {
        // xorshift64*.
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    pub fn below(&mut self, n: usize) -> usize {
        (self.next() >> 11) as usize % n
    }

    /// Small lengths mostly, up to 64 KiB.
    fn len(&mut self) -> usize {
        let most = 64 << self.below(11);
        1 + self.below(most)
    }
}

/// Words that would do most harm where a link, a length or a count is looked for.
pub fn scribble(words: &mut [u8], pool: &Pool, rng: &mut Numbers) {
    let start = pool.arenas()[0].addr.as_ptr() as u64;
    for word in words.chunks_mut(8) {
        let value = match rng.below(4) {
            0 => 0,
            1 => u64::MAX,
            2 => start + rng.below(pool.capacity()) as u64 / 64 * 64,
            _ => rng.next(),
        };
        word.copy_from_slice(&value.to_ne_bytes()[..word.len()]);
    }
}

/// A buffer, and what was written to all of it.
struct Held {
    buf: Buf,
    seed: u64,
}

impl Held {
    fn new(mut buf: Buf, seed: u64) -> Self {
        let mut rng = Numbers::new(seed);
        for word in buf.chunks_mut(8) {
            word.copy_from_slice(&rng.next().to_ne_bytes()[..word.len()]);
        }
        Self { buf, seed }
    }

    fn check(&self, pool: &Pool) {
        let mut rng = Numbers::new(self.seed);
        for (i, word) in self.buf.chunks(8).enumerate() {
            let should = &rng.next().to_ne_bytes()[..word.len()];
            assert_eq!(
                word,
                should,
                "word {i} of {:?}, {} bytes",
                self.buf.as_ptr(),
                self.buf.len()
            );
        }
        assert_eq!(pool.keys_of(self.buf.as_ptr()), Some(self.buf.keys()), "its own keys (P3)");
    }
}

/// One step of a thread: an alloc, or a free by one of the ways there are.
fn step(pool: &Pool, rng: &mut Numbers, held: &mut Vec<Held>, passed: &Mutex<Vec<Held>>) {
    match rng.below(8) {
        0..4 if held.len() < 50 => {
            // A pool that is out of memory refuses, and that is all.
            let Ok(buf) = pool.alloc(rng.len()) else { return };
            held.push(Held::new(buf, rng.next()));
        }
        4 if !held.is_empty() => {
            // To another thread, which checks and frees it.
            let given = held.swap_remove(rng.below(held.len()));
            let mut passed = passed.lock().expect("no thread panics");
            passed.push(given);
            let at = rng.below(passed.len());
            let taken = passed.swap_remove(at);
            drop(passed);
            taken.check(pool);
        }
        5 if !held.is_empty() => {
            let Held { buf, seed } = held.swap_remove(rng.below(held.len()));
            let buf = pool.from_token(buf.into_token()).expect("its first return");
            held.push(Held { buf, seed });
        }
        6 if !held.is_empty() => {
            let Held { buf, seed } = held.swap_remove(rng.below(held.len()));
            let (len, ptr) = (buf.len(), buf.into_raw());
            // SAFETY: given up a line above, and known to nobody else.
            let mut buf = unsafe { pool.from_raw(ptr.as_ptr()) }.expect("it is out");
            buf.set_len(len).expect("it had that length");
            held.push(Held { buf, seed });
        }
        _ if !held.is_empty() => held.swap_remove(rng.below(held.len())).check(pool),
        _ => {}
    }
}

/// In rounds: the threads work, then all stand still, and `write` is told to write over each byte of the arenas that
/// is in no buffer (address in memory, length). After each round all buffers are apart and have their keys; as
/// they are freed, their contents are what was written. Returns how many bytes were written over.
pub fn in_rounds(
    pool: &Pool,
    rounds: usize,
    steps: usize,
    mut write: impl FnMut(usize, usize),
) -> usize {
    let (stand, go) = (Barrier::new(THREADS + 1), Barrier::new(THREADS + 1));
    let live: [Mutex<Vec<(usize, usize)>>; THREADS] = Default::default();
    let passed = Mutex::new(Vec::new());
    let mut written = 0;
    thread::scope(|scope| {
        for (t, live) in live.iter().enumerate() {
            let (stand, go, passed) = (&stand, &go, &passed);
            scope.spawn(move || {
                let mut rng = Numbers::new(t as u64 + 1);
                let mut held = Vec::new();
                for _ in 0..rounds {
                    (0..steps).for_each(|_| step(pool, &mut rng, &mut held, passed));
                    *live.lock().expect("no thread panics") = ranges(&held);
                    stand.wait();
                    // Main writes.
                    go.wait();
                }
                held.drain(..).for_each(|h| h.check(pool));
            });
        }
        for _ in 0..rounds {
            stand.wait();
            let mut out = ranges(&passed.lock().expect("no thread panics"));
            live.iter().for_each(|l| out.extend(l.lock().expect("no thread panics").iter()));
            out.sort_unstable();
            assert!(out.windows(2).all(|w| w[0].0 + w[0].1 <= w[1].0), "buffers overlap");
            let books = pool.stats();
            assert!(books.balanced(), "{books:#?}");
            assert_eq!(books.live_buffers, out.len());
            for arena in pool.arenas() {
                let mut at = arena.addr.as_ptr() as usize;
                let end = at + arena.len;
                let arena = at..end;
                for &(addr, len) in out.iter().filter(|o| arena.contains(&o.0)) {
                    if addr > at {
                        write(at, addr - at);
                        written += addr - at;
                    }
                    at = addr + len;
                }
                if end > at {
                    write(at, end - at);
                    written += end - at;
                }
            }
            go.wait();
        }
    });
    passed.into_inner().expect("no thread panics").iter().for_each(|h| h.check(pool));
    settled(pool);
    written
}

fn ranges(held: &[Held]) -> Vec<(usize, usize)> {
    held.iter().map(|h| (h.buf.as_ptr() as usize, h.buf.capacity())).collect()
}

/// `write` writes over all of the arenas again and again, live buffers included, while the threads allocate and
/// free by all ways, and look at addresses and keys, at no contents. Returns how often all of it was written.
pub fn at_any_time(pool: &Pool, steps: usize, mut write: impl FnMut(usize, usize)) -> usize {
    let done = AtomicBool::new(false);
    let out = Mutex::new(std::collections::BTreeMap::<usize, usize>::new());
    let mut times = 0;
    thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS)
            .map(|t| {
                let out = &out;
                scope.spawn(move || {
                    let mut rng = Numbers::new(t as u64 + 100);
                    let mut held: Vec<Buf> = Vec::new();
                    let took = |buf: &Buf| {
                        let (addr, len) = (buf.as_ptr() as usize, buf.capacity());
                        let mut out = out.lock().expect("no thread panics");
                        let before = out.range(..addr + len).next_back();
                        assert!(before.is_none_or(|(a, n)| a + n <= addr), "buffers overlap");
                        out.insert(addr, len);
                    };
                    let gives = |buf: Buf| {
                        assert_eq!(pool.keys_of(buf.as_ptr()), Some(buf.keys()));
                        let was =
                            out.lock().expect("no thread panics").remove(&(buf.as_ptr() as usize));
                        assert_eq!(was, Some(buf.capacity()), "the same buffer that was given out");
                    };
                    for _ in 0..steps {
                        match rng.below(6) {
                            0..3 => {
                                let Ok(buf) = pool.alloc(rng.len()) else { continue };
                                took(&buf);
                                held.push(buf);
                            }
                            3 if !held.is_empty() => {
                                let token = held.swap_remove(rng.below(held.len())).into_token();
                                held.push(pool.from_token(token).expect("its first return"));
                            }
                            _ if !held.is_empty() => gives(held.swap_remove(rng.below(held.len()))),
                            _ => {}
                        }
                    }
                    held.into_iter().for_each(gives);
                })
            })
            .collect();
        while !done.load(Relaxed) {
            for arena in pool.arenas() {
                write(arena.addr.as_ptr() as usize, arena.len);
            }
            times += 1;
            done.store(threads.iter().all(|t| t.is_finished()) && times >= 3, Relaxed);
        }
    });
    settled(pool);
    times
}

/// Nothing is out, the books balance, and all of it can be had again.
fn settled(pool: &Pool) {
    #[cfg(feature = "fault")]
    pool.check();
    let books = pool.stats();
    assert!(books.balanced(), "{books:#?}");
    assert_eq!((books.live, books.live_buffers, books.in_flight), (0, 0, 0));
    // Else a block of a larger class may serve, of a slab that is kept by what lies in caches.
    pool.trim();
    let all: Vec<_> = std::iter::from_fn(|| pool.alloc(4096).ok()).collect();
    assert_eq!(all.len() * 4096, pool.capacity(), "not a page was lost");
}
