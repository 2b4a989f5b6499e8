//! Waiting for a buffer: blocking with a time-out, or as a future. The order is `waiters.rs`'s; here it meets
//! the pool: what is waited for, where blocks come from, and emptying the caches.

use std::{
    fmt,
    panic::Location,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, Wake, Waker},
    thread,
    time::{Duration, Instant},
};

use super::{Core, Pool};
use crate::{
    buf::Buf,
    error::AllocError,
    guard::Caller,
    magazine::Place,
    reach::Any,
    size_class::{self, CLASSES, MAX_BLOCK, MIN_BLOCK, PAGE, SPAN_CLASS},
    slab::{Entry, Given},
    stats::WaitCounts,
    thread::gate_at,
    waiters::Passed,
};

/// What a request needs; of two that are equal one can be served when the other can.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Need {
    pub(super) len: usize,
    pub(super) align: usize,
    /// The class to take from, or a span's.
    pub(super) class: usize,
    /// The smallest whose blocks hold it in any case.
    fit: usize,
}

/// A block and its class.
pub(crate) type Block = (Entry, usize);

/// What waiting has come to, over a pool's life: how often a request got in line, how long those that have left it
/// stood there, by class. Whole from the start, for it is written under a lock.
pub(super) struct Waited(Box<[WaitCounts; CLASSES + 1]>);

impl Waited {
    pub(super) fn new() -> Self {
        Self(Box::new([WaitCounts::default(); CLASSES + 1]))
    }

    fn at(&mut self, class: usize) -> &mut WaitCounts {
        &mut self.0[class]
    }

    pub(super) fn counts(&self) -> [WaitCounts; CLASSES + 1] {
        *self.0
    }
}

impl Core {
    pub(super) fn need(&self, len: usize, align: usize) -> Need {
        let fit = size_class::class_of_aligned(len.max(1), align.min(PAGE));
        Need { len, align, class: self.class_for(len, align), fit }
    }

    /// Takes from the slabs, which have all that is free while somebody waits.
    pub(super) fn take_now(&self, need: &Need) -> Option<Block> {
        let mut got = None;
        if need.class < CLASSES {
            self.slabs.take(need.class, 1, |entry| got = Some((entry, need.class)));
        }
        // Where no slab can be cut any more, single pages may be left, or larger blocks.
        got.or_else(|| self.slabs.take_span(need.len, need.align).map(|e| (e, SPAN_CLASS)))
            .or_else(|| self.slabs.take_larger(need.fit, need.align))
    }

    /// Lets those who wait have what has come free: to be called, without any of the pool's locks, whenever
    /// blocks have come to the slabs or memory to the pool.
    pub(crate) fn wake_waiters(&self) {
        if self.waiters.any() {
            self.waiters.serve(|need| self.take_now(need));
        }
    }

    /// An alloc that does not wait, while others do: it may pass them a bounded number of times.
    #[cold]
    pub(super) fn alloc_passing(&self, need: &Need) -> Passed<Block> {
        self.waiters.pass(need, |need| self.take_now(need))
    }

    /// Gets in line, and everybody served who can be, this request too.
    pub(super) fn enter_line(&self, need: Need, waker: Waker) -> Turn {
        self.waited.lock().at(need.class).times += 1;
        self.stand_in_line(need, waker)
    }

    /// The same without counting it.
    pub(super) fn stand_in_line(&self, need: Need, waker: Waker) -> Turn {
        let (since, class) = (Instant::now(), need.class);
        let entered = self.waiters.enter(need, waker);
        if let Some(round) = entered.unsettled {
            self.call_back();
            self.waiters.settle(round);
        }
        self.wake_waiters();
        if self.waiters.any() {
            self.grower.refused(need.len);
        }
        Turn { ticket: entered.ticket, since, class }
    }

    /// Ends a turn: for the books.
    pub(super) fn end(&self, turn: &Turn) -> Duration {
        let stood = turn.since.elapsed();
        let mut waited = self.waited.lock();
        let counts = waited.at(turn.class);
        counts.time += stood;
        counts.longest = counts.longest.max(stood);
        stood
    }

    /// Leaves the line: with the block, if one was assigned by now, or with how many were ahead.
    pub(super) fn leave_line(&self, turn: &Turn) -> Result<Block, usize> {
        let left = self.waiters.leave(turn.ticket);
        // Those behind may have waited for this one alone.
        self.wake_waiters();
        left
    }

    /// Leaves the line and gives on what was assigned.
    pub(super) fn abandon(&self, turn: &Turn) {
        self.end(turn);
        self.quit(turn);
    }

    /// The same for a turn that was not counted.
    pub(super) fn quit(&self, turn: &Turn) {
        if let Ok((entry, _)) = self.leave_line(turn) {
            self.stir();
            // The caller has a handle, so this is not the last block of a pool that ends.
            let given = self.slabs.give(std::iter::once(entry.ptr));
            debug_assert_eq!(given, Given::More);
            self.wake_waiters();
        }
    }
}

/// A place in the line.
pub(super) struct Turn {
    pub(super) ticket: u64,
    since: Instant,
    class: usize,
}

pub(super) struct Unpark(pub(super) thread::Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

impl<R> Pool<R> {
    /// Allocates a buffer of `len` bytes, waiting up to `timeout` until there is one. Blocks the thread; see
    /// [`alloc_async`](Pool::alloc_async) for a future.
    ///
    /// **Order.** First come, first served, whoever frees on whichever thread. While the first in line cannot
    /// use what is free, those behind it may have it, and so may [`alloc`](Pool::alloc), which does not wait;
    /// but no request is passed by more than 64 that came later, and from then on what comes free is kept for
    /// it, and `alloc` is refused, until it is served or gives up. So large requests are not starved by small
    /// ones, nor the other way round. A request that can be served at once passes nobody.
    ///
    /// Who waits for a buffer while holding others may wait for itself, as with any lock: set a time-out.
    ///
    /// While anybody waits, threads' caches are out of use, and every alloc and free of the pool takes a lock;
    /// otherwise waiting costs an alloc or free nothing.
    ///
    /// # Errors
    /// [`AllocError::TimedOut`] with the books; at once, [`AllocError::TooLarge`] for what no wait can bring,
    /// and [`AllocError::ForeignProcess`] in a forked child.
    #[inline]
    #[track_caller]
    pub fn alloc_wait(&self, len: usize, timeout: Duration) -> Result<Buf<R>, AllocError> {
        match self.alloc_cached(len) {
            Some(buf) => Ok(buf),
            None => self.wait(len, 1, timeout, Location::caller()),
        }
    }

    /// As [`alloc_wait`](Pool::alloc_wait), for a layout: of its size, at a multiple of its alignment.
    ///
    /// # Errors
    /// As [`alloc_wait`](Pool::alloc_wait), and [`AllocError::Alignment`] if it is larger than an arena.
    #[track_caller]
    pub fn alloc_layout_wait(
        &self,
        layout: std::alloc::Layout,
        timeout: Duration,
    ) -> Result<Buf<R>, AllocError> {
        let align = if layout.align() <= MIN_BLOCK { 1 } else { layout.align() };
        self.wait(layout.size(), align, timeout, Location::caller())
    }

    /// Allocates a buffer of `len` bytes as a future, on any runtime: it resolves when there is one. In the
    /// same order as [`alloc_wait`](Pool::alloc_wait), in which it takes its place when it is first polled.
    ///
    /// Dropping the future gives its place up; a buffer that was assigned to it meanwhile goes to the next.
    ///
    /// ```
    /// # let pool = pinpool::Pool::builder().device(pinpool::Device::soft()).capacity(1 << 20).build()?;
    /// async fn reply(pool: &pinpool::Pool) -> Result<(), pinpool::AllocError> {
    ///     let mut buf = pool.alloc_async(4096).await?;
    ///     buf[0] = 1;
    ///     Ok(())
    /// }
    /// # let mut f = std::pin::pin!(reply(&pool));
    /// # let mut cx = std::task::Context::from_waker(std::task::Waker::noop());
    /// # assert!(f.as_mut().poll(&mut cx).is_ready());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As [`alloc_wait`](Pool::alloc_wait), but it never times out: drop it for that.
    #[inline]
    #[track_caller]
    pub fn alloc_async(&self, len: usize) -> AllocFuture<'_, R> {
        AllocFuture { pool: self, len, align: 1, turn: None, caller: Location::caller() }
    }

    /// As [`alloc_async`](Pool::alloc_async), for a layout.
    #[track_caller]
    pub fn alloc_layout_async(&self, layout: std::alloc::Layout) -> AllocFuture<'_, R> {
        let align = if layout.align() <= MIN_BLOCK { 1 } else { layout.align() };
        let caller = Location::caller();
        AllocFuture { pool: self, len: layout.size(), align, turn: None, caller }
    }

    /// From this thread's cache alone. It has nothing while others wait.
    #[inline]
    fn alloc_cached(&self, len: usize) -> Option<Buf<R>> {
        if len.wrapping_sub(1) >= MAX_BLOCK {
            return None;
        }
        let place = Place::of(size_class::class_of(len));
        // SAFETY: this thread's own gate, which lives as long as the thread.
        let entry = unsafe { &*gate_at(self.inner.slot_offset) }.pop(place)?;
        Some(Buf::new(self.inner, entry, len, place))
    }

    fn buf(&self, block: Block, len: usize, caller: Caller) -> Buf<R> {
        self.core().hand_out(block, len, caller);
        self.made(block, len)
    }

    fn made(&self, (entry, class): Block, len: usize) -> Buf<R> {
        Buf::new(self.inner, entry, len, Place::of(class))
    }

    /// Tries without waiting, but behind those who wait. An error is final.
    fn try_first(
        &self,
        len: usize,
        align: usize,
        caller: Caller,
    ) -> Result<Option<Buf<R>>, AllocError> {
        let core = self.core();
        if core.foreign() || core.out_of_range(len, align).is_some() {
            return Err(core.refusal(len, align));
        }
        if core.waiters.any() {
            return Ok(None);
        }
        Ok(core.alloc_slow_by(len, align, caller).map(|block| self.made(block, len)))
    }

    #[cold]
    #[inline(never)]
    fn wait(
        &self,
        len: usize,
        align: usize,
        timeout: Duration,
        caller: Caller,
    ) -> Result<Buf<R>, AllocError> {
        // None is later than any clock here goes.
        let deadline = Instant::now().checked_add(timeout);
        if let Some(buf) = self.try_first(len, align, caller)? {
            return Ok(buf);
        }
        let core = self.core();
        let waker = Waker::from(Arc::new(Unpark(thread::current())));
        let turn = core.enter_line(core.need(len, align), waker.clone());
        loop {
            if let Some(block) = core.waiters.poll(turn.ticket, &waker) {
                core.end(&turn);
                return Ok(self.buf(block, len, caller));
            }
            let left = deadline.map(|d| d.saturating_duration_since(Instant::now()));
            match left {
                None => thread::park(),
                Some(Duration::ZERO) => break,
                Some(left) => thread::park_timeout(left),
            }
        }
        let waited = core.end(&turn);
        match core.leave_line(&turn) {
            Ok(block) => Ok(self.buf(block, len, caller)),
            Err(ahead) => {
                let class = core.class_for(len, align);
                Err(AllocError::TimedOut { waited, ahead, books: core.refuse(len, class) })
            }
        }
    }
}

/// A buffer to come: see [`Pool::alloc_async`].
#[must_use = "futures do nothing unless polled"]
pub struct AllocFuture<'a, R = Any> {
    pool: &'a Pool<R>,
    len: usize,
    align: usize,
    /// Its place in the line, once it has one.
    turn: Option<Turn>,
    caller: Caller,
}

impl<R> Future for AllocFuture<'_, R> {
    type Output = Result<Buf<R>, AllocError>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.get_mut();
        let Self { pool, len, align, caller, .. } = *this;
        let core = pool.core();
        let turn = match &mut this.turn {
            // In a forked child the line is a copy that nobody serves.
            Some(_) if core.foreign() => return Poll::Ready(Err(core.refusal(len, align))),
            Some(turn) => turn,
            none => {
                if align == 1
                    && let Some(buf) = pool.alloc_cached(len)
                {
                    return Poll::Ready(Ok(buf));
                }
                match pool.try_first(len, align, caller) {
                    Ok(Some(buf)) => return Poll::Ready(Ok(buf)),
                    Ok(None) => {}
                    Err(e) => return Poll::Ready(Err(e)),
                }
                none.insert(core.enter_line(core.need(len, align), cx.waker().clone()))
            }
        };
        let Some(block) = core.waiters.poll(turn.ticket, cx.waker()) else { return Poll::Pending };
        core.end(turn);
        this.turn = None;
        Poll::Ready(Ok(pool.buf(block, len, caller)))
    }
}

impl<R> Drop for AllocFuture<'_, R> {
    fn drop(&mut self) {
        let core = self.pool.core();
        if let Some(turn) = self.turn.take()
            && !core.foreign()
        {
            core.abandon(&turn);
        }
    }
}

impl<R> fmt::Debug for AllocFuture<'_, R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AllocFuture")
            .field("len", &self.len)
            .field("in_line", &self.turn.is_some())
            .finish_non_exhaustive()
    }
}
