//! Posted work as a future: a buffer that is the device's until the completion is reported, whatever becomes
//! of the code that waits for it. Knows nothing of queue pairs: posting and polling are the caller's.

use std::{
    collections::HashMap,
    fmt, mem,
    pin::Pin,
    task::{Context, Poll, Waker},
};

use parking_lot::Mutex;

use super::{Core, Pool};
use crate::{
    access::Sge,
    buf::Buf,
    error::TokenError,
    reach::{Any, OneDevice},
    tokens::Landed,
};

/// How a work request ended, as its completion says.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Outcome {
    /// `ibv_wc_status`: 0 is success.
    pub status: u32,
    /// Bytes that a receive, read or atomic brought (`byte_len`).
    pub bytes: u32,
}

/// Why a buffer was not posted.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PostError<E> {
    /// The buffer is another pool's.
    #[error("the buffer belongs to another pool")]
    OtherPool,
    /// The caller's own call refused; nothing was posted.
    #[error("posting failed: {0}")]
    Refused(E),
}

enum Post {
    /// Its future may be waiting.
    Flying(Option<Waker>),
    /// Its future is gone: the buffer goes back when it completes.
    Forsaken,
    /// Complete, and in flight no more; its future has not taken the buffer yet.
    Landed(Outcome, Landed),
}

/// The posted work of one pool, by token.
#[derive(Default)]
pub(super) struct Posts(Mutex<HashMap<u64, Post>>);

/// A buffer whose work request is under way. Resolves, as a future on any runtime, to the buffer and how the
/// request ended, once [`Pool::complete`] has reported that.
///
/// Dropping it cancels the waiting, not the work request: the buffer goes back to the pool when the
/// completion is reported, and if that never happens it leaks, and [`Pool::in_flight`] shows it. So a future
/// that owns it may be dropped at any time.
///
/// It holds a handle of the pool.
#[must_use = "dropping it gives the buffer back as soon as the work request completes"]
pub struct Posted<R = Any> {
    pool: Pool<R>,
    token: u64,
    taken: bool,
}

impl<R> Unpin for Posted<R> {}

impl<R> Posted<R> {
    /// The token, which the completion must bring.
    pub fn token(&self) -> u64 {
        self.token
    }

    /// The buffer, if the completion has been reported; else itself again.
    ///
    /// # Errors
    /// Itself, while the work request is under way.
    pub fn try_take(mut self) -> Result<(Buf<R>, Outcome), Self> {
        match self.take(None) {
            Some(done) => Ok(done),
            None => Err(self),
        }
    }

    /// Takes the buffer if it is there; else leaves `waker` to be woken.
    fn take(&mut self, waker: Option<&Waker>) -> Option<(Buf<R>, Outcome)> {
        if self.taken || self.pool.core().foreign() {
            return None;
        }
        // Foreign code, so not under the lock.
        let mut waker = waker.cloned();
        let mut posts = self.pool.core().posts.0.lock();
        let (outcome, block) = match posts.get_mut(&self.token) {
            Some(Post::Landed(outcome, block)) => (*outcome, *block),
            Some(Post::Flying(old)) => {
                if waker.is_some() {
                    mem::swap(old, &mut waker);
                }
                drop(posts);
                drop(waker);
                return None;
            }
            Some(Post::Forsaken) | None => return None,
        };
        posts.remove(&self.token);
        drop(posts);
        self.taken = true;
        Some((self.pool.core().buf_of(&block), outcome))
    }
}

impl<R> Future for Posted<R> {
    type Output = (Buf<R>, Outcome);

    /// # Panics
    /// Never. Polled again after it resolved, it stays pending.
    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.get_mut().take(Some(cx.waker())).map_or(Poll::Pending, Poll::Ready)
    }
}

impl<R> Drop for Posted<R> {
    fn drop(&mut self) {
        if self.taken || self.pool.core().foreign() {
            return;
        }
        let mut posts = self.pool.core().posts.0.lock();
        let before = match posts.get_mut(&self.token) {
            Some(post @ Post::Flying(_)) => Some(mem::replace(post, Post::Forsaken)),
            Some(Post::Landed(..)) => posts.remove(&self.token),
            Some(Post::Forsaken) | None => None,
        };
        drop(posts);
        if let Some(Post::Landed(_, block)) = before {
            drop(self.pool.core().buf_of::<R>(&block));
        }
    }
}

impl<R> fmt::Debug for Posted<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Posted").field("token", &self.token).finish_non_exhaustive()
    }
}

impl<R: OneDevice> Pool<R> {
    /// Posts a work request that uses the buffer: `post` is given the token to put into `wr_id` and the
    /// element for the buffer's whole length, and is to post exactly one signaled work request with them.
    ///
    /// The completion must be reported by [`complete`](Pool::complete), also when it comes before `post` has
    /// returned. If `post` panics, the work request counts as posted.
    ///
    /// ```
    /// # let pool = pinpool::Pool::builder().device(pinpool::Device::soft()).capacity(1 << 20).build()?;
    /// # use pinpool::Outcome;
    /// let mut wr_id = 0;
    /// let posted = pool.post(pool.alloc(4096)?, |token, sge| {
    ///     wr_id = token; // ibv_post_send here, with this wr_id and sge
    ///     Ok::<(), std::io::Error>(())
    /// }).map_err(|(_buf, e)| e)?;
    /// // wherever the completion queue is polled:
    /// pool.complete(wr_id, Outcome { status: 0, bytes: 0 })?;
    /// // in async code: posted.await
    /// let (buf, outcome) = posted.try_take().expect("complete");
    /// assert_eq!((buf.len(), outcome.status), (4096, 0));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// The buffer, with [`PostError::Refused`] if `post` returned an error, which says that nothing was
    /// posted, or with [`PostError::OtherPool`].
    pub fn post<E>(
        &self,
        buf: Buf<R>,
        post: impl FnOnce(u64, Sge) -> Result<(), E>,
    ) -> Result<Posted<R>, (Buf<R>, PostError<E>)> {
        let home = buf.home();
        // SAFETY: a buffer of it is here.
        let core = unsafe { home.core.as_ref() };
        if !std::ptr::eq(&*core.family, &*self.core().family) {
            return Err((buf, PostError::OtherPool));
        }
        // A handle of the buffer's heap, which may be another class's or a share's.
        let heap: Self = self.handle(home);
        let (sge, len) = (buf.sge(), buf.len());
        let (entry, place) = buf.into_parts();
        let token = core.tokens.post(entry.ptr, len, place);
        core.posts.0.lock().insert(token, Post::Flying(None));
        // From here on a panic leaves it to the completion.
        let mut posted = Posted { pool: heap, token, taken: false };
        let Err(e) = post(token, sge) else { return Ok(posted) };
        posted.taken = true;
        let before = core.posts.0.lock().remove(&token);
        let block = match before {
            // `post` reported a completion, against its contract.
            Some(Post::Landed(_, block)) => Some(block),
            _ => core.tokens.land_posted(token),
        };
        match block {
            Some(block) => Err((core.buf_of(&block), PostError::Refused(e))),
            // There is no other way to take it: tokens of posted work are not redeemed.
            None => Ok(posted),
        }
    }
}

impl<R> Pool<R> {
    /// Reports that the work request of a token is over: hands the buffer to the [`Posted`] that waits for
    /// it, or, where that was dropped and for tokens of [`Buf::into_token`], gives it back to the pool.
    ///
    /// # Errors
    /// [`TokenError`], as [`from_token`](Pool::from_token); nothing is then changed.
    pub fn complete(&self, token: u64, outcome: Outcome) -> Result<(), TokenError> {
        let core = self.heap_of(token);
        if let Some(foreign) = core.token_of_the_parent() {
            return Err(foreign);
        }
        let mut posts = core.posts.0.lock();
        match posts.get_mut(&token) {
            Some(post @ Post::Flying(_)) => {
                // Nobody else lands it: whoever has the token comes through here.
                let block =
                    core.tokens.land_posted(token).ok_or(TokenError::NotInFlight { token })?;
                let before = mem::replace(post, Post::Landed(outcome, block));
                drop(posts);
                if let Post::Flying(Some(waker)) = before {
                    waker.wake();
                }
                Ok(())
            }
            Some(Post::Forsaken) => {
                posts.remove(&token);
                drop(posts);
                drop(core.tokens.land_posted(token).map(|block| core.buf_of::<Any>(&block)));
                Ok(())
            }
            Some(Post::Landed(..)) => Err(TokenError::NotInFlight { token }),
            None => {
                drop(posts);
                self.land_any::<Any>(token).map(drop)
            }
        }
    }
}

impl Core {
    /// The buffer of a token that has landed.
    fn buf_of<R>(&self, landed: &Landed) -> Buf<R> {
        Buf::new(self.reference(), self.landed(landed), landed.len, landed.place)
    }
}
