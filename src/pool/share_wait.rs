//! Waiting through a share: in the line of its reserve and in that of its class's unreserved memory at once, for
//! whichever has a buffer first. Each line keeps its own order (`wait.rs`); a block that the other assigned
//! meanwhile goes to the next there.

use std::{
    fmt,
    panic::Location,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, Waker},
    thread,
    time::{Duration, Instant},
};

use super::{
    Core, PoolRef, Share,
    wait::{Block, Turn, Unpark},
};
use crate::{
    buf::Buf, error::AllocError, guard::Caller, magazine::Place, reach::Any, size_class::MIN_BLOCK,
};

/// A place in one line or both: none in that of a heap which can never serve the request, for there it would
/// be waited for by all that come later.
struct Turns {
    reserve: Option<Turn>,
    unreserved: Option<Turn>,
}

impl<R> Share<R> {
    /// Allocates a buffer of `len` bytes, waiting up to `timeout` until there is one, in the reserve or in the
    /// unreserved memory; in the order of [`Pool::alloc_wait`](crate::Pool::alloc_wait), for each of the two
    /// among those who wait for it. Nobody outside of the share waits for its reserve.
    ///
    /// # Errors
    /// As [`Pool::alloc_wait`](crate::Pool::alloc_wait).
    #[track_caller]
    pub fn alloc_wait(&self, len: usize, timeout: Duration) -> Result<Buf<R>, AllocError> {
        self.wait(len, 1, timeout, Location::caller())
    }

    /// As [`alloc_wait`](Share::alloc_wait), for a layout: of its size, at a multiple of its alignment.
    ///
    /// # Errors
    /// As [`alloc_wait`](Share::alloc_wait), and [`AllocError::Alignment`].
    #[track_caller]
    pub fn alloc_layout_wait(
        &self,
        layout: std::alloc::Layout,
        timeout: Duration,
    ) -> Result<Buf<R>, AllocError> {
        let align = if layout.align() <= MIN_BLOCK { 1 } else { layout.align() };
        self.wait(layout.size(), align, timeout, Location::caller())
    }

    /// Allocates a buffer of `len` bytes as a future, on any runtime; see
    /// [`Pool::alloc_async`](crate::Pool::alloc_async).
    ///
    /// # Errors
    /// As [`alloc_wait`](Share::alloc_wait), but it never times out: drop it for that.
    #[track_caller]
    pub fn alloc_async(&self, len: usize) -> ShareFuture<'_, R> {
        ShareFuture { share: self, len, align: 1, turns: None, caller: Location::caller() }
    }

    /// As [`alloc_async`](Share::alloc_async), for a layout.
    #[track_caller]
    pub fn alloc_layout_async(&self, layout: std::alloc::Layout) -> ShareFuture<'_, R> {
        let align = if layout.align() <= MIN_BLOCK { 1 } else { layout.align() };
        let caller = Location::caller();
        ShareFuture { share: self, len: layout.size(), align, turns: None, caller }
    }

    /// The handle of a block that was waited for.
    fn buf(home: PoolRef, block: Block, len: usize, caller: Caller) -> Buf<R> {
        // SAFETY: a heap of this share's, which the caller has a handle of.
        unsafe { home.core.as_ref() }.hand_out(block, len, caller);
        Self::made(home, block, len)
    }

    fn made(home: PoolRef, (entry, class): Block, len: usize) -> Buf<R> {
        Buf::new(home, entry, len, Place::of(class))
    }

    /// The heap of the unreserved memory.
    fn class(&self) -> &Core {
        self.core().class().unwrap_or(self.core())
    }

    /// Tries without waiting, but behind those who wait. An error is final.
    fn try_first(
        &self,
        len: usize,
        align: usize,
        caller: Caller,
    ) -> Result<Option<Buf<R>>, AllocError> {
        let (core, class) = (self.core(), self.class());
        if core.foreign() || core.out_of_range(len, align).is_some() {
            return Err(core.refusal(len, align));
        }
        for heap in [core, class] {
            if !heap.waiters.any()
                && let Some(block) = heap.reference().find_by(len, align, caller)
            {
                return Ok(Some(Self::made(heap.reference(), block, len)));
            }
        }
        Ok(None)
    }

    fn enter(&self, len: usize, align: usize, waker: &Waker) -> Turns {
        let (core, class) = (self.core(), self.class());
        let can = |heap: &Core| {
            let max = heap.slabs.max_len();
            len <= max && align <= max
        };
        let reserve = can(core).then(|| core.enter_line(core.need(len, align), waker.clone()));
        let unreserved = can(class).then(|| {
            let need = class.need(len, align);
            match reserve {
                // Counted there.
                Some(_) => class.stand_in_line(need, waker.clone()),
                None => class.enter_line(need, waker.clone()),
            }
        });
        Turns { reserve, unreserved }
    }

    /// What one of the lines has assigned, having left the other.
    fn poll_turns(
        &self,
        turns: &mut Turns,
        waker: &Waker,
        len: usize,
        caller: Caller,
    ) -> Option<Buf<R>> {
        let (core, class) = (self.core(), self.class());
        for heap in [core, class] {
            let own = std::ptr::eq(heap, core);
            let turn = if own { &turns.reserve } else { &turns.unreserved };
            let block = turn.as_ref().and_then(|t| heap.waiters.poll(t.ticket, waker));
            let Some(block) = block else { continue };
            self.end(turns);
            // Before anything else: the other line's block is not this request's to lose.
            let buf = Self::buf(heap.reference(), block, len, caller);
            let other = if own { turns.unreserved.take() } else { turns.reserve.take() };
            if let Some(other) = other {
                let there = if own { class } else { core };
                there.quit(&other);
            }
            (turns.reserve, turns.unreserved) = (None, None);
            return Some(buf);
        }
        None
    }

    /// For the books, of the line that the request was counted in.
    fn end(&self, turns: &Turns) -> Duration {
        match (&turns.reserve, &turns.unreserved) {
            (Some(turn), _) => self.core().end(turn),
            (None, Some(turn)) => self.class().end(turn),
            (None, None) => Duration::ZERO,
        }
    }

    /// Gives both places up: with a block that was assigned by now, or with how many were ahead in the shorter
    /// of the lines.
    fn leave(&self, turns: &mut Turns) -> Result<(PoolRef, Block), usize> {
        let mut left = Err(usize::MAX);
        let places = [(self.core(), turns.reserve.take()), (self.class(), turns.unreserved.take())];
        for (heap, turn) in places {
            let Some(turn) = turn else { continue };
            match &mut left {
                // One is enough.
                Ok(_) => heap.quit(&turn),
                Err(ahead) => match heap.leave_line(&turn) {
                    Ok(block) => left = Ok((heap.reference(), block)),
                    Err(n) => *ahead = n.min(*ahead),
                },
            }
        }
        left
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
        let waker = Waker::from(Arc::new(Unpark(thread::current())));
        let mut turns = self.enter(len, align, &waker);
        loop {
            if let Some(buf) = self.poll_turns(&mut turns, &waker, len, caller) {
                return Ok(buf);
            }
            let left = deadline.map(|d| d.saturating_duration_since(Instant::now()));
            match left {
                None => thread::park(),
                Some(Duration::ZERO) => break,
                Some(left) => thread::park_timeout(left),
            }
        }
        let core = self.core();
        let waited = self.end(&turns);
        match self.leave(&mut turns) {
            Ok((home, block)) => Ok(Self::buf(home, block, len, caller)),
            Err(ahead) => {
                let class = core.class_for(len, align);
                Err(AllocError::TimedOut { waited, ahead, books: core.refuse(len, class) })
            }
        }
    }
}

/// A buffer to come: see [`Share::alloc_async`].
#[must_use = "futures do nothing unless polled"]
pub struct ShareFuture<'a, R = Any> {
    share: &'a Share<R>,
    len: usize,
    align: usize,
    /// Its places in the lines, once it has them.
    turns: Option<Turns>,
    caller: Caller,
}

impl<R> Future for ShareFuture<'_, R> {
    type Output = Result<Buf<R>, AllocError>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.get_mut();
        let Self { share, len, align, caller, .. } = *this;
        let core = share.core();
        let turns = match &mut this.turns {
            // In a forked child the lines are copies that nobody serves.
            Some(_) if core.foreign() => return Poll::Ready(Err(core.refusal(len, align))),
            Some(turns) => turns,
            none => {
                match share.try_first(len, align, caller) {
                    Ok(Some(buf)) => return Poll::Ready(Ok(buf)),
                    Ok(None) => {}
                    Err(e) => return Poll::Ready(Err(e)),
                }
                none.insert(share.enter(len, align, cx.waker()))
            }
        };
        let Some(buf) = share.poll_turns(turns, cx.waker(), len, caller) else {
            return Poll::Pending;
        };
        this.turns = None;
        Poll::Ready(Ok(buf))
    }
}

impl<R> Drop for ShareFuture<'_, R> {
    fn drop(&mut self) {
        if let Some(mut turns) = self.turns.take()
            && !self.share.core().foreign()
        {
            self.share.end(&turns);
            if let Ok((home, block)) = self.share.leave(&mut turns) {
                drop(Share::<R>::made(home, block, 0));
            }
        }
    }
}

impl<R> fmt::Debug for ShareFuture<'_, R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ShareFuture")
            .field("len", &self.len)
            .field("in_line", &self.turns.is_some())
            .finish_non_exhaustive()
    }
}
