//! Waiting for a buffer: blocking with a time-out, or as a future, from whatever has lines to wait in. That is a
//! pool's heap here, and a share in `share_wait.rs`; the line itself is `line.rs`'s.

use std::{
    alloc::Layout,
    fmt,
    panic::Location,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, Wake, Waker},
    thread,
    time::{Duration, Instant},
};

use super::{
    Core, Pool, PoolRef,
    line::{Block, Turn},
};
use crate::{
    buf::Buf,
    error::AllocError,
    guard::Caller,
    magazine::Place,
    reach::Any,
    size_class::{self, MAX_BLOCK},
    thread::slot_at,
};

/// What is asked for, and by whom.
#[derive(Clone, Copy)]
pub(super) struct Request {
    pub(super) len: usize,
    pub(super) align: usize,
    pub(super) caller: Caller,
}

impl Request {
    #[inline]
    #[track_caller]
    pub(super) fn of_len(len: usize) -> Self {
        Self { len, align: 1, caller: Location::caller() }
    }

    #[track_caller]
    pub(super) fn of_layout(layout: Layout) -> Self {
        let align = size_class::align_asked(layout);
        Self { len: layout.size(), align, caller: Location::caller() }
    }
}

/// What buffers are waited for from: a heap, or a share, which has two.
pub(super) trait Source {
    type Reach;
    /// A place in each line that the request stands in.
    type Turn;

    /// The heap that is asked first, whose books explain a refusal.
    fn core(&self) -> &Core;

    /// Takes a buffer without waiting, but behind those who wait.
    fn find(&self, request: Request) -> Option<Buf<Self::Reach>>;

    /// Gets in line.
    fn enter(&self, request: Request, waker: &Waker) -> Self::Turn;

    /// The buffer that was assigned by now: the turn is then over, and ended for the books.
    fn poll(
        &self,
        turn: &mut Self::Turn,
        request: Request,
        waker: &Waker,
    ) -> Option<Buf<Self::Reach>>;

    /// Ends a turn, for the books: how long it stood.
    fn end(&self, turn: &Self::Turn) -> Duration;

    /// Leaves the line, after the end: with the buffer that was assigned by now, or with how many were ahead.
    fn leave(&self, turn: Self::Turn, request: Request) -> Result<Buf<Self::Reach>, usize>;

    /// Leaves the line, after the end, and gives on what was assigned.
    fn quit(&self, turn: Self::Turn);
}

/// Tries without waiting. An error is final: no wait can bring what was asked for.
fn try_first<S: Source>(source: &S, request: Request) -> Result<Option<Buf<S::Reach>>, AllocError> {
    let (core, Request { len, align, .. }) = (source.core(), request);
    if core.foreign() || core.out_of_range(len, align).is_some() {
        return Err(core.refusal(len, align));
    }
    Ok(source.find(request))
}

struct Unpark(thread::Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// Waits on this thread.
#[cold]
#[inline(never)]
pub(super) fn wait<S: Source>(
    source: &S,
    request: Request,
    timeout: Duration,
) -> Result<Buf<S::Reach>, AllocError> {
    // None is later than any clock here goes.
    let deadline = Instant::now().checked_add(timeout);
    if let Some(buf) = try_first(source, request)? {
        return Ok(buf);
    }
    let waker = Waker::from(Arc::new(Unpark(thread::current())));
    let mut turn = source.enter(request, &waker);
    loop {
        if let Some(buf) = source.poll(&mut turn, request, &waker) {
            return Ok(buf);
        }
        let left = deadline.map(|d| d.saturating_duration_since(Instant::now()));
        match left {
            None => thread::park(),
            Some(Duration::ZERO) => break,
            Some(left) => thread::park_timeout(left),
        }
    }
    let waited = source.end(&turn);
    source.leave(turn, request).map_err(|ahead| {
        let core = source.core();
        let class = core.class_for(request.len, request.align);
        AllocError::TimedOut { waited, ahead, books: core.refuse(request.len, class) }
    })
}

/// A request that is polled for; what the futures are made of.
pub(super) struct Waiting<'a, S: Source> {
    source: &'a S,
    request: Request,
    /// Its place in line, once it has one.
    turn: Option<S::Turn>,
}

impl<'a, S: Source> Waiting<'a, S> {
    #[inline]
    pub(super) fn new(source: &'a S, request: Request) -> Self {
        Self { source, request, turn: None }
    }

    pub(super) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<Buf<S::Reach>, AllocError>> {
        let Self { source, request, .. } = *self;
        let core = source.core();
        let turn = match &mut self.turn {
            // In a forked child the line is a copy that nobody serves.
            Some(_) if core.foreign() => {
                return Poll::Ready(Err(core.refusal(request.len, request.align)));
            }
            Some(turn) => turn,
            none => match try_first(source, request) {
                Ok(Some(buf)) => return Poll::Ready(Ok(buf)),
                Ok(None) => none.insert(source.enter(request, cx.waker())),
                Err(e) => return Poll::Ready(Err(e)),
            },
        };
        let Some(buf) = source.poll(turn, request, cx.waker()) else { return Poll::Pending };
        self.turn = None;
        Poll::Ready(Ok(buf))
    }

    pub(super) fn show(&self, name: &str, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct(name)
            .field("len", &self.request.len)
            .field("in_line", &self.turn.is_some())
            .finish_non_exhaustive()
    }
}

impl<S: Source> Drop for Waiting<'_, S> {
    fn drop(&mut self) {
        if let Some(turn) = self.turn.take()
            && !self.source.core().foreign()
        {
            self.source.end(&turn);
            self.source.quit(turn);
        }
    }
}

/// The handle of a block of a heap that was assigned to who waited for it.
pub(super) fn handed_out<R>(home: PoolRef, block: Block, request: Request) -> Buf<R> {
    // SAFETY: a heap that the caller waited in, and so has a handle of.
    unsafe { home.core.as_ref() }.hand_out(block, request.len, request.caller);
    made(home, block, request.len)
}

/// The handle of a block that is out already.
pub(super) fn made<R>(home: PoolRef, (entry, class): Block, len: usize) -> Buf<R> {
    Buf::new(home, entry, len, Place::of(class))
}

impl<R> Source for Pool<R> {
    type Reach = R;
    type Turn = Turn;

    fn core(&self) -> &Core {
        self.core()
    }

    fn find(&self, Request { len, align, caller }: Request) -> Option<Buf<R>> {
        if align == 1
            && let Some(buf) = self.alloc_cached(len)
        {
            return Some(buf);
        }
        let core = self.core();
        if core.waiters.any() {
            return None;
        }
        core.alloc_slow_by(len, align, caller).map(|block| made(self.inner, block, len))
    }

    fn enter(&self, request: Request, waker: &Waker) -> Turn {
        let core = self.core();
        core.enter_line(core.need(request.len, request.align), waker.clone())
    }

    fn poll(&self, turn: &mut Turn, request: Request, waker: &Waker) -> Option<Buf<R>> {
        let block = self.core().waiters.poll(turn.ticket, waker)?;
        self.core().end(turn);
        Some(handed_out(self.inner, block, request))
    }

    fn end(&self, turn: &Turn) -> Duration {
        self.core().end(turn)
    }

    fn leave(&self, turn: Turn, request: Request) -> Result<Buf<R>, usize> {
        self.core().leave_line(&turn).map(|block| handed_out(self.inner, block, request))
    }

    fn quit(&self, turn: Turn) {
        self.core().quit(&turn);
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
            None => wait(self, Request::of_len(len), timeout),
        }
    }

    /// As [`alloc_wait`](Pool::alloc_wait), for a layout: of its size, at a multiple of its alignment.
    ///
    /// # Errors
    /// As [`alloc_wait`](Pool::alloc_wait), and [`AllocError::Alignment`] if it is larger than an arena.
    #[track_caller]
    pub fn alloc_layout_wait(
        &self,
        layout: Layout,
        timeout: Duration,
    ) -> Result<Buf<R>, AllocError> {
        wait(self, Request::of_layout(layout), timeout)
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
        AllocFuture(Waiting::new(self, Request::of_len(len)))
    }

    /// As [`alloc_async`](Pool::alloc_async), for a layout.
    #[track_caller]
    pub fn alloc_layout_async(&self, layout: Layout) -> AllocFuture<'_, R> {
        AllocFuture(Waiting::new(self, Request::of_layout(layout)))
    }

    /// From this thread's cache alone. It has nothing while others wait.
    #[inline]
    fn alloc_cached(&self, len: usize) -> Option<Buf<R>> {
        if len.wrapping_sub(1) >= MAX_BLOCK {
            return None;
        }
        let place = Place::of_len(len);
        // SAFETY: this thread's own slot, which lives as long as the thread.
        let entry = unsafe { &*slot_at(self.inner.slot_offset) }.pop(place)?;
        Some(Buf::new(self.inner, entry, len, place))
    }
}

/// A buffer to come: see [`Pool::alloc_async`].
#[must_use = "futures do nothing unless polled"]
pub struct AllocFuture<'a, R = Any>(Waiting<'a, Pool<R>>);

impl<R> Future for AllocFuture<'_, R> {
    type Output = Result<Buf<R>, AllocError>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.get_mut().0.poll(cx)
    }
}

impl<R> fmt::Debug for AllocFuture<'_, R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.show("AllocFuture", f)
    }
}
