//! Waiting through a share: in the line of its reserve and in that of its class's unreserved memory at once, for
//! whichever has a buffer first. Each line keeps its own order (`line.rs`); a block that the other assigned
//! meanwhile goes to the next there.

use std::{
    fmt,
    pin::Pin,
    task::{Context, Poll, Waker},
    time::Duration,
};

use super::{
    Core, Share,
    line::Turn,
    wait::{Request, Source, Waiting, handed_out, made, wait},
};
use crate::{buf::Buf, error::AllocError, reach::Any};

/// A place in one line or both: none in that of a heap which can never serve the request, for there it would
/// be waited for by all that come later.
pub(super) struct Turns {
    reserve: Option<Turn>,
    unreserved: Option<Turn>,
}

impl<R> Share<R> {
    /// The heap of the unreserved memory.
    fn class(&self) -> &Core {
        self.core().class().unwrap_or(self.core())
    }

    /// The two heaps, and the places in their lines.
    fn places<'a>(&'a self, turns: &'a mut Turns) -> [(&'a Core, &'a mut Option<Turn>); 2] {
        [(self.core(), &mut turns.reserve), (self.class(), &mut turns.unreserved)]
    }
}

impl<R> Source for Share<R> {
    type Reach = R;
    type Turn = Turns;

    fn core(&self) -> &Core {
        self.core()
    }

    fn find(&self, Request { len, align, caller }: Request) -> Option<Buf<R>> {
        [self.core(), self.class()].into_iter().filter(|heap| !heap.waiters.any()).find_map(
            |heap| {
                let block = heap.reference().find_by(len, align, caller)?;
                Some(made(heap.reference(), block, len))
            },
        )
    }

    fn enter(&self, Request { len, align, .. }: Request, waker: &Waker) -> Turns {
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
    fn poll(&self, turns: &mut Turns, request: Request, waker: &Waker) -> Option<Buf<R>> {
        let assigned = |(i, (heap, turn)): (usize, (&Core, &mut Option<Turn>))| {
            let block = heap.waiters.poll(turn.as_ref()?.ticket, waker)?;
            Some((i, heap.reference(), block))
        };
        let (from, home, block) = self.places(turns).into_iter().enumerate().find_map(assigned)?;
        self.end(turns);
        // Before anything else: the other line's block is not this request's to lose.
        let buf = handed_out(home, block, request);
        for (i, (heap, turn)) in self.places(turns).into_iter().enumerate() {
            if let Some(turn) = turn.take()
                && i != from
            {
                heap.quit(&turn);
            }
        }
        Some(buf)
    }

    /// Of the line that the request was counted in.
    fn end(&self, turns: &Turns) -> Duration {
        match (&turns.reserve, &turns.unreserved) {
            (Some(turn), _) => self.core().end(turn),
            (None, Some(turn)) => self.class().end(turn),
            (None, None) => Duration::ZERO,
        }
    }

    /// Gives both places up; ahead are those in the shorter of the lines.
    fn leave(&self, mut turns: Turns, request: Request) -> Result<Buf<R>, usize> {
        let mut left = Err(usize::MAX);
        for (heap, turn) in self.places(&mut turns) {
            let Some(turn) = turn.take() else { continue };
            match &mut left {
                // One is enough.
                Ok(_) => heap.quit(&turn),
                Err(ahead) => match heap.leave_line(&turn) {
                    Ok(block) => left = Ok((heap.reference(), block)),
                    Err(n) => *ahead = n.min(*ahead),
                },
            }
        }
        left.map(|(home, block)| handed_out(home, block, request))
    }

    fn quit(&self, mut turns: Turns) {
        for (heap, turn) in self.places(&mut turns) {
            if let Some(turn) = turn.take() {
                heap.quit(&turn);
            }
        }
    }
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
        wait(self, Request::of_len(len), timeout)
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
        wait(self, Request::of_layout(layout), timeout)
    }

    /// Allocates a buffer of `len` bytes as a future, on any runtime; see
    /// [`Pool::alloc_async`](crate::Pool::alloc_async).
    ///
    /// # Errors
    /// As [`alloc_wait`](Share::alloc_wait), but it never times out: drop it for that.
    #[track_caller]
    pub fn alloc_async(&self, len: usize) -> ShareFuture<'_, R> {
        ShareFuture(Waiting::new(self, Request::of_len(len)))
    }

    /// As [`alloc_async`](Share::alloc_async), for a layout.
    #[track_caller]
    pub fn alloc_layout_async(&self, layout: std::alloc::Layout) -> ShareFuture<'_, R> {
        ShareFuture(Waiting::new(self, Request::of_layout(layout)))
    }
}

/// A buffer to come: see [`Share::alloc_async`].
#[must_use = "futures do nothing unless polled"]
pub struct ShareFuture<'a, R = Any>(Waiting<'a, Share<R>>);

impl<R> Future for ShareFuture<'_, R> {
    type Output = Result<Buf<R>, AllocError>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.get_mut().0.poll(cx)
    }
}

impl<R> fmt::Debug for ShareFuture<'_, R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.show("ShareFuture", f)
    }
}
