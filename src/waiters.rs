//! Who waits for memory, in which order they get it, and how they learn of it. Manages turns; what is waited for
//! and where it comes from are the caller's: a *need* is compared and handed back, a *block* is passed through.
//!
//! **Turns.** First come, first served. When the first in line cannot be served by what is free, those behind
//! it may be, and so may requests that do not wait at all; but nobody is passed by more than [`OVERTAKES`] of
//! them, and from then on all that comes free is kept until it is served or leaves. So a large request is not
//! starved by small ones, and small ones are not by a large one as long as memory comes back without them.
//!
//! **No wake-up is lost.** A waiter (1) stands in line, which is counted, (2) has everything that lies in
//! caches brought to the shared store, (3) tries, (4) sleeps. Whoever frees a block looks at the count: under
//! its own cache's lock before it puts the block there, or after it gave the block to the store, whose lock
//! orders it. If the look at the count came too early, the block lay in the cache before (2), or in the store
//! before (3), and the waiter finds it. If not, the one who frees gives the block to the store and serves
//! whose turn it is. A cache's lock, or the store's, stands between the two in each case, so the count needs
//! no ordering of its own.
//!
//! **A turn is not lost either.** Blocks are assigned under the queue's lock, by whoever brought them. A waiter
//! that leaves takes itself out under that lock: it was either served, and gives the block on, or is no longer
//! in line; in both cases it serves the others before it goes.

use std::{collections::VecDeque, task::Waker};

use crate::{
    contained::contained,
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
};

/// By how many requests that came later one that waits may be passed.
pub(crate) const OVERTAKES: u32 = 64;

pub(crate) struct Waiters<N, B> {
    /// How many stand in line. Written under the queue's lock.
    count: AtomicUsize,
    queue: Mutex<Queue<N, B>>,
}

struct Queue<N, B> {
    next: u64,
    line: VecDeque<Waiter<N>>,
    /// Blocks assigned and not fetched yet, by ticket.
    assigned: Vec<(u64, B)>,
    /// How often the line began anew.
    round: u64,
    /// Since this line began, the caches were emptied; they stay so while it stands.
    settled: bool,
}

struct Waiter<N> {
    ticket: u64,
    need: N,
    /// By how many later requests it was passed. Never less than those behind it.
    passed: u32,
    waker: Waker,
}

/// What a waiter is told when it gets in line.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Entered {
    pub(crate) ticket: u64,
    /// `Some` if it must empty the caches, and then say so by [`settle`](Waiters::settle).
    pub(crate) unsettled: Option<u64>,
}

/// What a request that does not wait is told while others do.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Passed<B> {
    Got(B),
    /// Nothing that it could have.
    Refused,
    /// As far as is known; the caches are just being emptied.
    Unsettled,
}

impl<N: PartialEq + Copy, B> Queue<N, B> {
    /// Serves all that can be, in order; their wakers, to be woken without the lock, go to `wake`.
    fn serve(&mut self, take: &mut impl FnMut(&N) -> Option<B>, wake: &mut Vec<Waker>) {
        let (mut at, mut refused) = (0, None);
        while at < self.line.len() && (at == 0 || self.may_pass()) {
            let need = self.line[at].need;
            // Of a row of equals that cannot be served the first tells for all.
            let block = if refused == Some(need) { None } else { take(&need) };
            match block {
                Some(block) => {
                    self.pass(at);
                    if let Some(served) = self.line.remove(at) {
                        self.assigned.push((served.ticket, block));
                        wake.push(served.waker);
                    }
                }
                None => {
                    refused = Some(need);
                    at += 1;
                }
            }
        }
    }

    /// Whether a later request may be served although the first in line is not.
    fn may_pass(&self) -> bool {
        self.line.front().is_none_or(|first| first.passed < OVERTAKES)
    }

    /// To be called whenever somebody left the line; says how many stand there.
    fn left(&mut self) -> usize {
        // With nobody there caches are in use again.
        self.settled &= !self.line.is_empty();
        self.line.len()
    }

    /// Notes that the first `n` were passed.
    fn pass(&mut self, n: usize) {
        self.line.iter_mut().take(n).for_each(|w| w.passed += 1);
    }

    fn fetch(&mut self, ticket: u64) -> Option<B> {
        let at = self.assigned.iter().position(|(t, _)| *t == ticket)?;
        Some(self.assigned.swap_remove(at).1)
    }
}

impl<N: PartialEq + Copy, B> Waiters<N, B> {
    pub(crate) fn new() -> Self {
        let (line, assigned) = (VecDeque::new(), Vec::new());
        let queue = Queue { next: 0, line, assigned, round: 0, settled: false };
        Self { count: AtomicUsize::new(0), queue: Mutex::new(queue) }
    }

    /// How many stand in line.
    #[inline]
    pub(crate) fn count(&self) -> usize {
        // Relaxed: see the top of the file.
        self.count.load(Relaxed)
    }

    /// Whether anybody does: then nothing may be put into caches.
    #[inline]
    pub(crate) fn any(&self) -> bool {
        self.count() > 0
    }

    /// Gets in line.
    pub(crate) fn enter(&self, need: N, waker: Waker) -> Entered {
        let mut queue = self.queue.lock();
        let ticket = queue.next;
        queue.next += 1;
        if queue.line.is_empty() {
            queue.round += 1;
        }
        queue.line.push_back(Waiter { ticket, need, passed: 0, waker });
        self.count.store(queue.line.len(), Relaxed);
        Entered { ticket, unsettled: (!queue.settled).then_some(queue.round) }
    }

    /// Says that the caches were emptied after `round` was told.
    pub(crate) fn settle(&self, round: u64) {
        let mut queue = self.queue.lock();
        queue.settled |= queue.round == round && !queue.line.is_empty();
    }

    /// Serves whose turn it is from the store that `take` takes from. To be called whenever a block came
    /// there, and nothing else is locked that `take` locks.
    pub(crate) fn serve(&self, mut take: impl FnMut(&N) -> Option<B>) {
        let mut wake = Vec::new();
        let mut queue = self.queue.lock();
        queue.serve(&mut take, &mut wake);
        self.count.store(queue.left(), Relaxed);
        drop(queue);
        wake_all(wake);
    }

    /// Tries to get a block without waiting, in fair dealing with those who wait.
    pub(crate) fn pass(&self, need: &N, mut take: impl FnMut(&N) -> Option<B>) -> Passed<B> {
        let mut wake = Vec::new();
        let mut queue = self.queue.lock();
        queue.serve(&mut take, &mut wake);
        self.count.store(queue.left(), Relaxed);
        let got = if queue.may_pass() { take(need) } else { None };
        let answer = match got {
            Some(block) => {
                queue.pass(usize::MAX);
                Passed::Got(block)
            }
            None if queue.settled => Passed::Refused,
            None => Passed::Unsettled,
        };
        drop(queue);
        wake_all(wake);
        answer
    }

    /// The block that was assigned to a ticket; without one, `waker` takes the place of the one before.
    pub(crate) fn poll(&self, ticket: u64, waker: &Waker) -> Option<B> {
        // Cloned and dropped outside the lock: both may be foreign code.
        let mut waker = waker.clone();
        let mut queue = self.queue.lock();
        let block = queue.fetch(ticket);
        if block.is_none()
            && let Some(w) = queue.line.iter_mut().find(|w| w.ticket == ticket)
        {
            std::mem::swap(&mut w.waker, &mut waker);
        }
        drop(queue);
        block
    }

    /// Gives up: the block that was assigned meanwhile, if one was, and else how many stood before it. The
    /// caller puts the block back, and in any case serves the others.
    pub(crate) fn leave(&self, ticket: u64) -> Result<B, usize> {
        let mut queue = self.queue.lock();
        if let Some(block) = queue.fetch(ticket) {
            return Ok(block);
        }
        let at = queue.line.iter().position(|w| w.ticket == ticket);
        let gone = at.and_then(|at| queue.line.remove(at));
        self.count.store(queue.left(), Relaxed);
        drop(queue);
        drop(gone);
        Err(at.unwrap_or(0))
    }
}

/// A waker may be anything; one that panics must not keep the others asleep, nor have a drop panic.
fn wake_all(wakers: Vec<Waker>) {
    for waker in wakers {
        contained(|| waker.wake());
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// A store of so many units; a need is how many at once.
    fn take(units: &std::cell::Cell<u32>) -> impl FnMut(&u32) -> Option<u32> {
        |&n| {
            units.set(units.get().checked_sub(n)?);
            Some(n)
        }
    }

    fn enter(w: &Waiters<u32, u32>, need: u32) -> u64 {
        w.enter(need, Waker::noop().clone()).ticket
    }

    fn fetch(w: &Waiters<u32, u32>, ticket: u64) -> Option<u32> {
        w.poll(ticket, Waker::noop())
    }

    #[test]
    fn equals_are_served_in_order() {
        let (w, units) = (Waiters::new(), std::cell::Cell::new(0));
        let tickets: Vec<_> = (0..4).map(|_| enter(&w, 1)).collect();
        for (i, &ticket) in tickets.iter().enumerate() {
            units.set(1);
            w.serve(take(&units));
            assert_eq!(units.get(), 0);
            assert!(tickets[i + 1..].iter().all(|&later| fetch(&w, later).is_none()));
            assert_eq!(fetch(&w, ticket), Some(1));
            assert_eq!(w.count(), 3 - i);
        }
    }

    #[test]
    fn a_large_one_is_passed_so_often_and_no_oftener() {
        let (w, units) = (Waiters::new(), std::cell::Cell::new(0));
        let large = enter(&w, 10);
        // Half of those that pass wait too, half do not.
        for i in 0..OVERTAKES {
            units.set(1);
            if i % 2 == 0 {
                let small = enter(&w, 1);
                w.serve(take(&units));
                assert_eq!(fetch(&w, small), Some(1));
            } else {
                assert_eq!(w.pass(&1, take(&units)), Passed::Got(1));
            }
        }
        // Now what comes free is kept for it.
        let small = enter(&w, 1);
        for n in 1..10 {
            units.set(n);
            w.serve(take(&units));
            assert_eq!(w.pass(&1, take(&units)), Passed::Unsettled);
            assert_eq!((fetch(&w, large), fetch(&w, small), units.get()), (None, None, n));
        }
        units.set(11);
        w.serve(take(&units));
        assert_eq!((fetch(&w, large), fetch(&w, small), units.get()), (Some(10), Some(1), 0));
    }

    #[test]
    fn who_leaves_lets_the_others_on() {
        let (w, units) = (Waiters::new(), std::cell::Cell::new(0));
        let large = enter(&w, 10);
        for _ in 0..OVERTAKES {
            units.set(1);
            assert_eq!(w.pass(&1, take(&units)), Passed::Got(1));
        }
        let (a, b) = (enter(&w, 1), enter(&w, 1));
        units.set(2);
        w.serve(take(&units));
        assert_eq!(fetch(&w, a), None, "kept for the first");
        assert_eq!(w.leave(large), Err(0));
        w.serve(take(&units));
        assert_eq!(w.leave(a), Ok(1), "it was served, and has to give it on");
        assert_eq!((fetch(&w, b), w.count()), (Some(1), 0));
    }

    #[test]
    fn only_the_round_that_was_settled_is() {
        let (w, units) = (Waiters::new(), std::cell::Cell::new(1));
        let first = w.enter(1, Waker::noop().clone());
        let round = first.unsettled.expect("the first empties the caches");
        assert!(
            w.enter(1, Waker::noop().clone()).unsettled.is_some(),
            "so does the second, till then"
        );
        w.settle(round);
        assert_eq!(w.enter(1, Waker::noop().clone()).unsettled, None);
        units.set(3);
        w.serve(take(&units));
        w.settle(round);
        let again = w.enter(1, Waker::noop().clone());
        assert!(again.unsettled.is_some_and(|r| r != round));
        w.settle(round);
        assert!(w.enter(1, Waker::noop().clone()).unsettled.is_some());
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    //! Every interleaving of one that waits and others that free through a cache with a gate, as the pool's
    //! threads do: the waiter is always woken. A lost wake-up would be a deadlock, which loom reports.
    use std::task::Wake;

    use loom::{
        sync::{Arc, Notify},
        thread,
    };

    use super::*;
    use crate::gate::model::Small;

    /// One thread's cache behind its gate, and the shared store; blocks are only counted.
    struct Pool {
        cache: Small,
        cache_lock: Mutex<()>,
        store: Mutex<u32>,
        waiters: Waiters<u32, u32>,
    }

    impl Pool {
        fn new(open: bool) -> Arc<Self> {
            let pool = Arc::new(Self {
                cache: Small::new(),
                cache_lock: Mutex::new(()),
                store: Mutex::new(0),
                waiters: Waiters::new(),
            });
            if open {
                pool.cache.load();
            }
            pool
        }

        fn take(&self, need: &u32) -> Option<u32> {
            let mut store = self.store.lock();
            *store = store.checked_sub(*need)?;
            Some(*need)
        }

        fn serve(&self) {
            self.waiters.serve(|need| self.take(need));
        }

        /// As a buffer's drop: through the gate, else under the cache's lock, else to the store.
        fn free(&self) {
            if self.cache.push(1) {
                return;
            }
            {
                let _lock = self.cache_lock.lock();
                self.cache.set_right();
                if !self.waiters.any() {
                    self.cache.load();
                    assert!(self.cache.push(1));
                    return;
                }
            }
            self.free_shared();
        }

        /// As a buffer's drop on a thread without a cache.
        fn free_shared(&self) {
            *self.store.lock() += 1;
            if self.waiters.any() {
                self.serve();
            }
        }

        fn call_back(&self) {
            let _lock = self.cache_lock.lock();
            let (n, _) = self.cache.steal();
            *self.store.lock() += n as u32;
        }

        fn enter(&self, notify: &std::sync::Arc<Bell>) -> u64 {
            let entered = self.waiters.enter(1, Waker::from(notify.clone()));
            if let Some(round) = entered.unsettled {
                self.call_back();
                self.waiters.settle(round);
            }
            self.serve();
            entered.ticket
        }

        fn wait(&self) {
            let bell = std::sync::Arc::new(Bell(Notify::new()));
            let ticket = self.enter(&bell);
            let waker = Waker::from(bell.clone());
            while self.waiters.poll(ticket, &waker).is_none() {
                bell.0.wait();
            }
        }
    }

    struct Bell(Notify);

    impl Wake for Bell {
        fn wake(self: std::sync::Arc<Self>) {
            self.0.notify();
        }
    }

    fn check(preemptions: usize, f: impl Fn() + Sync + Send + 'static) {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(preemptions);
        model.check(f);
    }

    #[test]
    fn loom_the_last_free_wakes_the_waiter() {
        for open in [false, true] {
            check(4, move || {
                let pool = Pool::new(open);
                let p = pool.clone();
                let owner = thread::spawn(move || p.free());
                pool.wait();
                owner.join().unwrap();
            });
        }
    }

    #[test]
    fn loom_a_free_without_a_cache_wakes_the_waiter() {
        check(4, || {
            let pool = Pool::new(true);
            let p = pool.clone();
            let other = thread::spawn(move || p.free_shared());
            pool.wait();
            other.join().unwrap();
        });
    }

    #[test]
    fn loom_two_waiters_pass_one_block_on() {
        check(2, || {
            let pool = Pool::new(true);
            let p = pool.clone();
            let other = thread::spawn(move || {
                p.wait();
                p.free_shared();
            });
            pool.free();
            pool.wait();
            pool.free_shared();
            other.join().unwrap();
            assert_eq!(pool.waiters.count(), 0);
        });
    }

    #[test]
    fn loom_a_waiter_that_leaves_passes_its_turn_on() {
        check(3, || {
            let pool = Pool::new(true);
            let p = pool.clone();
            // Gets in line and leaves, served or not.
            let fickle = thread::spawn(move || {
                let bell = std::sync::Arc::new(Bell(Notify::new()));
                let ticket = p.enter(&bell);
                match p.waiters.leave(ticket) {
                    Ok(_) => p.free_shared(),
                    Err(_) => p.serve(),
                }
            });
            pool.free();
            pool.wait();
            fickle.join().unwrap();
        });
    }
}
