//! Length-delimited messages over tokio, read into the pool and handed out from where they were read.
//!
//! On the wire a message is its length, four bytes, most significant first, and its bytes.
//!
//! **Never copied.** The reader's buffers come from the pool; a message is a [`Part`] of the buffer that the
//! socket's bytes were read into. A message must not straddle two buffers then, so reading stops where one
//! could begin that would not fit any more:
//!
//! ```text
//!            start      filled
//! ┌─────────┬──────────┬─────────────────┬───────────────────────────┐
//! │ given   │ read, not│ read into next  │ read into only to complete│
//! │ out     │ given out│                 │ a message that began left │
//! └─────────┴──────────┴─────────────────┴───────────────────────────┘
//! 0                                      batch       batch + 4 + max
//! ```
//!
//! What of a message's length alone was read when a buffer is full (up to three bytes) is completed there,
//! for it lies left of the last part; so nothing at all moves.

use std::{
    fmt,
    future::poll_fn,
    io::{self, IoSlice},
    mem::MaybeUninit,
    pin::Pin,
    task::{Context, Poll, ready},
};

use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt, ReadBuf};

use super::part::Part;
use crate::{
    error::AllocError,
    pool::Pool,
    reach::{Any, Reach},
};

/// Bytes of the length before each message.
const HEADER: usize = 4;
/// Bytes that are read at once, if there are as many.
const BATCH: usize = 64 << 10;

/// Why a message could not be read or written.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum FrameError {
    /// The connection failed.
    #[error("the connection failed: {0}")]
    Io(#[from] io::Error),
    /// The peer closed the connection in the middle of a message.
    #[error("the connection ended {missing} bytes before the end of a message")]
    Truncated {
        /// Bytes that had yet to come, of the length or of the message.
        missing: usize,
    },
    /// The message is longer than was agreed.
    #[error("a message of {len} bytes; at most {max} were agreed")]
    TooLong {
        /// Its length.
        len: usize,
        /// The longest allowed.
        max: usize,
    },
    /// The pool has no buffer to read into. Once there is one, the call can be made again.
    #[error(transparent)]
    Alloc(#[from] AllocError),
}

crate::error::message_in_debug!(FrameError);

/// Reads messages into a pool.
///
/// Its buffers are `max_message` and a [`batch`](FrameReader::batch) long, so choose a maximum near to what messages really have. A
/// buffer goes back to the pool when all messages in it were dropped and the reader is past it: a message
/// that is kept keeps its buffer.
///
/// ```
/// # tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(async {
/// # let pool = pinpool::Pool::builder().device(pinpool::Device::soft()).capacity(1 << 20).build()?;
/// use pinpool::codec::{FrameReader, FrameWriter};
///
/// let (client, server) = tokio::io::duplex(4096);
/// let mut writer = FrameWriter::new(client, 1024);
/// writer.send(b"hello").await?;
/// drop(writer);
///
/// let mut reader = FrameReader::new(server, &pool, 1024);
/// let message = reader.next().await?.expect("there is one");
/// assert_eq!(&message[..], b"hello");
/// assert!(pool.keys_of(message.as_ptr()).is_some()); // and can be sent on as it lies
/// assert!(reader.next().await?.is_none());
/// # Ok::<(), Box<dyn std::error::Error>>(()) })?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct FrameReader<S, R = Any> {
    stream: S,
    pool: Pool<R>,
    max: usize,
    /// What was read and not given out yet, and the room behind it: length is what was read.
    buf: Option<Part<R>>,
    /// How far into `buf` reading goes before it is known what comes: nothing may begin beyond.
    batch: usize,
    /// What that is in a fresh buffer.
    batch_size: usize,
    ended: bool,
}

impl<S, R> FrameReader<S, R> {
    /// Makes a reader of messages of up to `max_message` bytes, at most `u32::MAX`.
    pub fn new(stream: S, pool: &Pool<R>, max_message: usize) -> Self {
        let max = max_message.min(u32::MAX as usize);
        Self {
            stream,
            pool: pool.clone(),
            max,
            buf: None,
            batch: 0,
            batch_size: BATCH,
            ended: false,
        }
    }

    /// How much is read at once, in bytes: 64 KiB unless set, at least one.
    pub fn batch(mut self, bytes: usize) -> Self {
        self.batch_size = bytes.max(1);
        self
    }

    /// The stream.
    pub fn stream(&self) -> &S {
        &self.stream
    }

    /// The stream, for writing to it, say. Reading from it loses messages.
    pub fn stream_mut(&mut self) -> &mut S {
        &mut self.stream
    }

    /// Gives the stream back. What had been read beyond the last message is lost.
    pub fn into_stream(self) -> S {
        self.stream
    }

    /// Takes the next message off what was read; how many more bytes are needed otherwise.
    fn cut(&mut self) -> Result<Result<Part<R>, usize>, FrameError> {
        let Some(buf) = &mut self.buf else { return Ok(Err(HEADER)) };
        let Some(header) = buf.first_chunk::<HEADER>() else {
            return Ok(Err(HEADER - buf.len()));
        };
        let len = u32::from_be_bytes(*header) as usize;
        if len > self.max {
            return Err(FrameError::TooLong { len, max: self.max });
        }
        let whole = HEADER + len;
        if buf.len() < whole {
            return Ok(Err(whole - buf.len()));
        }
        buf.take_off(HEADER);
        self.batch = self.batch.saturating_sub(whole);
        // There are as many: they were read.
        Ok(buf.split_to(len).map_err(|_| 0))
    }

    /// Makes room to read at least `needed` bytes of what comes next.
    fn make_room(&mut self, needed: usize) -> Result<&mut Part<R>, FrameError> {
        let fits = |b: &Part<R>| !b.is_empty() || self.batch > 0 && b.capacity() >= needed;
        if !self.buf.as_ref().is_some_and(fits) {
            // Nothing read and not given out is in it, so nothing is lost.
            self.buf = None;
            let mut part =
                Part::from(self.pool.alloc(self.batch_size.saturating_add(HEADER + self.max))?);
            part.clear();
            self.batch = self.batch_size;
            return Ok(self.buf.insert(part));
        }
        // Looked at just now.
        self.buf.as_mut().ok_or(FrameError::Truncated { missing: needed })
    }
}

impl<S: AsyncRead + Unpin, R> FrameReader<S, R> {
    /// The next message; `None` once the peer has closed the connection between two of them.
    ///
    /// Nothing is lost when the future is dropped before it is ready.
    ///
    /// # Errors
    /// [`FrameError::Io`], [`Truncated`](FrameError::Truncated), [`TooLong`](FrameError::TooLong) (the stream
    /// is of no use then), [`Alloc`](FrameError::Alloc).
    pub async fn next(&mut self) -> Result<Option<Part<R>>, FrameError> {
        poll_fn(|cx| self.poll_next(cx)).await
    }

    /// The same, for hand-written futures.
    ///
    /// # Errors
    /// As [`next`](FrameReader::next).
    pub fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Result<Option<Part<R>>, FrameError>> {
        loop {
            let needed = match self.cut()? {
                Ok(message) => return Poll::Ready(Ok(Some(message))),
                Err(needed) => needed,
            };
            if self.ended {
                let begun = self.buf.as_ref().is_some_and(|b| !b.is_empty());
                let end =
                    if begun { Err(FrameError::Truncated { missing: needed }) } else { Ok(None) };
                return Poll::Ready(end);
            }
            let n = ready!(self.poll_fill(cx, needed))?;
            self.ended = n == 0;
        }
    }

    /// Reads once: `needed` bytes if that is more than is left of the batch, else what is left of it.
    fn poll_fill(
        &mut self,
        cx: &mut Context<'_>,
        needed: usize,
    ) -> Poll<Result<usize, FrameError>> {
        self.make_room(needed)?;
        let Self { stream, buf: Some(buf), batch, .. } = self else {
            return Poll::Ready(Ok(0));
        };
        let len = buf.len();
        let (first, room) = buf.spare();
        let want = batch.saturating_sub(len).max(needed).min(room);
        // SAFETY: `want` of the bytes beyond the part's length are its own, and exclusively borrowed with
        // it; uninitialised is all that `ReadBuf` is told of them.
        let spare = unsafe {
            std::slice::from_raw_parts_mut(first.as_ptr().cast::<MaybeUninit<u8>>(), want)
        };
        let mut into = ReadBuf::uninit(spare);
        ready!(Pin::new(stream).poll_read(cx, &mut into))?;
        let n = into.filled().len();
        // Inside the capacity, so this cannot fail.
        _ = buf.set_len(len + n);
        Poll::Ready(Ok(n))
    }
}

impl<S: fmt::Debug, R: Reach> fmt::Debug for FrameReader<S, R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FrameReader")
            .field("stream", &self.stream)
            .field("max", &self.max)
            .field("buf", &self.buf)
            .finish_non_exhaustive()
    }
}

/// Writes messages, from wherever their bytes are, without copying them.
#[derive(Debug)]
pub struct FrameWriter<S> {
    stream: S,
    max: usize,
}

impl<S> FrameWriter<S> {
    /// Makes a writer of messages of up to `max_message` bytes, at most `u32::MAX`.
    pub fn new(stream: S, max_message: usize) -> Self {
        Self { stream, max: max_message.min(u32::MAX as usize) }
    }

    /// The stream.
    pub fn stream_mut(&mut self) -> &mut S {
        &mut self.stream
    }

    /// Gives the stream back.
    pub fn into_stream(self) -> S {
        self.stream
    }
}

impl<S: AsyncWrite + Unpin> FrameWriter<S> {
    /// Writes one message, and flushes. If the future is dropped before it is ready, part of the message may
    /// have been written, and the stream is of no use any more.
    ///
    /// # Errors
    /// [`FrameError::TooLong`], with nothing written; [`FrameError::Io`].
    pub async fn send(&mut self, message: &[u8]) -> Result<(), FrameError> {
        if message.len() > self.max {
            return Err(FrameError::TooLong { len: message.len(), max: self.max });
        }
        let header = (message.len() as u32).to_be_bytes();
        let mut written = 0;
        while written < HEADER {
            let slices = [IoSlice::new(&header[written..]), IoSlice::new(message)];
            match self.stream.write_vectored(&slices).await? {
                0 => return Err(io::Error::from(io::ErrorKind::WriteZero).into()),
                n => written += n,
            }
        }
        self.stream.write_all(&message[written - HEADER..]).await?;
        self.stream.flush().await?;
        Ok(())
    }
}
