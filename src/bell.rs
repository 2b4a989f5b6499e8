//! The bell: wakes one thread that sleeps until there is work. Ringing takes no lock, and no system call
//! unless the thread does sleep. What the work is, is not said: the thread looks.

use std::sync::OnceLock;
#[cfg(not(loom))]
use std::time::Duration;

use crate::sync::{
    atomic::{
        AtomicBool,
        Ordering::{AcqRel, Acquire},
    },
    thread::{self, Thread},
};

/// A flag, and whom to wake. The thread's own token (`park`, `unpark`) sees to it that no ringing falls
/// between its look at the flag and its sleep.
#[derive(Debug)]
pub(crate) struct Bell {
    rung: AtomicBool,
    sleeper: OnceLock<Thread>,
}

impl Bell {
    pub(crate) fn new() -> Self {
        Self { rung: AtomicBool::new(false), sleeper: OnceLock::new() }
    }

    /// Says who sleeps. Before that, ringing only sets the flag; whoever calls this rings once after it.
    pub(crate) fn attach(&self, sleeper: Thread) {
        let _ = self.sleeper.set(sleeper);
    }

    /// Has the sleeper look. What was done before is seen by it then (pairs with `wait`'s swap).
    pub(crate) fn ring(&self) {
        if !self.rung.swap(true, AcqRel)
            && let Some(sleeper) = self.sleeper.get()
        {
            sleeper.unpark();
        }
    }

    /// Sleeps until it was rung since the last call, or the time is over. Only on the thread attached.
    #[cfg(not(loom))]
    pub(crate) fn wait(&self, at_most: Option<Duration>) {
        let start = std::time::Instant::now();
        // Pairs with the swap in `ring`.
        while !self.rung.swap(false, Acquire) {
            match at_most {
                None => thread::park(),
                Some(time) => match time.checked_sub(start.elapsed()) {
                    Some(left) if !left.is_zero() => thread::park_timeout(left),
                    _ => return,
                },
            }
        }
    }

    #[cfg(loom)]
    pub(crate) fn wait(&self) {
        while !self.rung.swap(false, Acquire) {
            thread::park();
        }
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use loom::sync::{Arc, atomic::AtomicUsize};

    use super::*;
    use crate::sync::atomic::Ordering::Relaxed;

    /// Two ring after they have made work: the sleeper sees all of it, and never sleeps through any (loom
    /// would call that a deadlock).
    #[test]
    fn loom_no_ringing_is_slept_through() {
        loom::model(|| {
            let bell = Arc::new(Bell::new());
            let work = Arc::new(AtomicUsize::new(0));
            let (b, w) = (bell.clone(), work.clone());
            let sleeper = thread::spawn(move || {
                let mut seen = 0;
                while seen < 2 {
                    b.wait();
                    seen = w.load(Relaxed);
                }
            });
            bell.attach(sleeper.thread().clone());
            // As the pool does: whoever attaches rings, for others may have rung before.
            bell.ring();
            let (b, w) = (bell.clone(), work.clone());
            let other = thread::spawn(move || {
                w.fetch_add(1, Relaxed);
                b.ring();
            });
            work.fetch_add(1, Relaxed);
            bell.ring();
            other.join().unwrap();
            sleeper.join().unwrap();
        });
    }
}
