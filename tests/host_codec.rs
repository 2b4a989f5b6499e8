//! Length-delimited messages over tokio. Proves: messages of every length arrive whole and in order, however the
//! stream cuts them up; each lies in the pool where the socket's bytes were read to, which the stream itself
//! confirms; what is kept keeps its buffer, and only that; limits, truncated streams, exhaustion, cancellation.
#![cfg(all(feature = "codec", feature = "fault"))]
#![allow(clippy::unwrap_used)]

mod common;

use std::{
    io,
    pin::Pin,
    sync::{Arc, Mutex},
    task::{Context, Poll},
};

use common::{Rng, soft};
use pinpool::{
    Part, Pool,
    codec::{FrameError, FrameReader, FrameWriter},
    reach,
};
use static_assertions::{assert_impl_all, assert_not_impl_any};
use tokio::io::{AsyncRead, AsyncWriteExt, ReadBuf, duplex};

fn block_on<T>(f: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(f)
}

/// Gives the bytes of a script in pieces of random length, now and then nothing yet; notes where they went.
struct Scripted {
    bytes: Vec<u8>,
    at: usize,
    most: usize,
    rng: Rng,
    /// Position in the stream, address, length.
    put: Arc<Mutex<Vec<(usize, usize, usize)>>>,
}

impl AsyncRead for Scripted {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.rng.below(3) == 0 {
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        assert!(into.remaining() > 0, "a read of nothing would look like the end");
        let most = self.most;
        let n = (1 + self.rng.below(most)).min(into.remaining()).min(self.bytes.len() - self.at);
        let at = self.at;
        into.put_slice(&self.bytes[at..at + n]);
        let addr = into.filled().as_ptr() as usize + into.filled().len() - n;
        self.put.lock().unwrap().push((at, addr, n));
        self.at += n;
        Poll::Ready(Ok(()))
    }
}

fn script(messages: &[Vec<u8>]) -> Vec<u8> {
    messages.iter().flat_map(|m| [&(m.len() as u32).to_be_bytes()[..], m].concat()).collect()
}

fn messages(rng: &mut Rng, n: usize, max: usize) -> Vec<Vec<u8>> {
    (0..n)
        .map(|i| {
            let len = match i % 4 {
                0 => 0,
                1 => rng.below(20).min(max),
                2 => rng.below(max + 1),
                _ => max,
            };
            (0..len).map(|j| (j as u8) ^ i as u8).collect()
        })
        .collect()
}

#[test]
fn every_message_lies_where_it_was_read_to() {
    for (seed, most) in [(1, 1), (2, 7), (3, 1_000), (4, 100_000), (5, 1 << 30)] {
        for (max, batch) in
            [(0, 64), (1, 1), (100, 1), (100, 1_000), (3_000, 64 << 10), (70_000, 10)]
        {
            let mut rng = Rng(seed);
            let n = if most < 10 { 20 } else { 200 };
            let sent = messages(&mut rng, n, max);
            let put = Arc::new(Mutex::new(Vec::new()));
            let stream = Scripted { bytes: script(&sent), at: 0, most, rng, put: put.clone() };
            let pool = soft(64 << 20).build().unwrap();
            let mut reader = FrameReader::new(stream, &pool, max).batch(batch);
            block_on(async {
                let mut kept: Vec<Part> = Vec::new();
                let mut position = 0;
                for message in &sent {
                    let got = reader.next().await.unwrap().unwrap();
                    assert_eq!(&got[..], &message[..]);
                    position += 4;
                    if !got.is_empty() {
                        assert!(pool.sge_of(&got).is_some());
                        // Each of its bytes is where the stream put that byte.
                        let put = put.lock().unwrap();
                        let where_to = |p: usize| {
                            let i = put.partition_point(|&(at, _, _)| at <= p) - 1;
                            put[i].1 + (p - put[i].0)
                        };
                        let first = got.as_ptr() as usize;
                        for i in [0, got.len() / 2, got.len() - 1] {
                            assert_eq!(where_to(position + i), first + i, "nothing was copied");
                        }
                    }
                    position += message.len();
                    kept.push(got);
                    if kept.len() > 10 {
                        kept.remove(0);
                    }
                }
                assert!(reader.next().await.unwrap().is_none());
                assert!(reader.next().await.unwrap().is_none(), "the end stays the end");
                drop(kept);
            });
            drop(reader);
            pool.check();
            assert_eq!(pool.stats().live_buffers, 0);
        }
    }
}

#[test]
fn what_is_kept_keeps_its_buffer_and_only_that() {
    block_on(async {
        let pool = soft(4 << 20).build().unwrap();
        let (a, b) = duplex(1 << 20);
        let mut writer = FrameWriter::new(a, 1024);
        let mut reader = FrameReader::new(b, &pool, 1024).batch(8192);
        let mut kept = None;
        for i in 0..1_000u32 {
            writer.send(&[i as u8; 1000]).await.unwrap();
            let message = reader.next().await.unwrap().unwrap();
            if i == 3 {
                kept = Some(message);
            }
            // The reader's, the kept message's.
            assert!(pool.stats().live_buffers <= 2);
        }
        assert!(kept.unwrap().iter().all(|&b| b == 3));
        assert_eq!(pool.stats().live_buffers, 1);
    });
}

#[test]
fn a_message_too_long_is_refused_on_both_sides() {
    block_on(async {
        let pool = soft(1 << 20).build().unwrap();
        let (mut a, b) = duplex(1024);
        let mut short = FrameWriter::new(&mut a, 10);
        let error = short.send(&[0; 11]).await.unwrap_err();
        assert!(matches!(error, FrameError::TooLong { len: 11, max: 10 }), "{error}");
        a.write_all(&u32::MAX.to_be_bytes()).await.unwrap();
        let mut reader = FrameReader::new(b, &pool, 10).batch(64);
        let error = reader.next().await.unwrap_err();
        assert!(matches!(error, FrameError::TooLong { len, max: 10 } if len == u32::MAX as usize));
    });
}

#[test]
fn a_stream_that_ends_early_says_how_early() {
    block_on(async {
        let pool = soft(1 << 20).build().unwrap();
        for (cut, missing) in [(1, 3), (3, 1), (4, 10), (13, 1)] {
            let (mut a, b) = duplex(1024);
            let mut whole = 10u32.to_be_bytes().to_vec();
            whole.extend([7; 10]);
            a.write_all(&whole[..cut]).await.unwrap();
            drop(a);
            let mut reader = FrameReader::new(b, &pool, 10);
            let error = reader.next().await.unwrap_err();
            assert!(
                matches!(error, FrameError::Truncated { missing: m } if m == missing),
                "{error}"
            );
        }
    });
}

#[test]
fn a_pool_that_is_out_loses_no_message() {
    block_on(async {
        let pool = soft(64 << 10).build().unwrap();
        let (mut a, b) = duplex(1024);
        let mut writer = FrameWriter::new(&mut a, 100);
        writer.send(b"first").await.unwrap();
        let mut reader = FrameReader::new(b, &pool, 100).batch(1000);
        let all: Vec<_> = std::iter::from_fn(|| pool.alloc(1024).ok()).collect();
        assert!(matches!(reader.next().await, Err(FrameError::Alloc(_))));
        drop(all);
        assert_eq!(&reader.next().await.unwrap().unwrap()[..], b"first");
    });
}

#[test]
fn a_future_that_is_dropped_loses_nothing() {
    block_on(async {
        let pool = soft(1 << 20).build().unwrap();
        let (mut a, b) = duplex(1024);
        let mut reader = FrameReader::new(b, &pool, 100);
        let whole = script(&[b"hello".to_vec(), b"world".to_vec()]);
        for byte in whole.chunks(1) {
            // Polled once, and dropped.
            tokio::select! {
                biased;
                got = reader.next() => { got.unwrap(); panic!("not yet") }
                () = std::future::ready(()) => {}
            }
            a.write_all(byte).await.unwrap();
            if byte == b"d" {
                break;
            }
            if byte == b"o" && reader_has(&mut reader, b"hello").await {
                continue;
            }
        }
        assert_eq!(&reader.next().await.unwrap().unwrap()[..], b"world");
        let _: &tokio::io::DuplexStream = reader.stream();
        let _ = reader.into_stream();
        assert_eq!(pool.stats().live_buffers, 0);
    });

    async fn reader_has(reader: &mut FrameReader<tokio::io::DuplexStream>, message: &[u8]) -> bool {
        tokio::select! {
            biased;
            got = reader.next() => { assert_eq!(&got.unwrap().unwrap()[..], message); true }
            () = std::future::ready(()) => false,
        }
    }
}

assert_impl_all!(FrameReader<tokio::net::TcpStream>: Send, Sync, Unpin);
assert_impl_all!(FrameReader<tokio::net::TcpStream, reach::Remote>: Send, Sync);
assert_impl_all!(FrameWriter<tokio::net::TcpStream>: Send, Sync);
assert_impl_all!(FrameError: Send, Sync, std::error::Error);
assert_not_impl_any!(FrameReader<std::rc::Rc<u8>>: Send, Sync);
assert_not_impl_any!(FrameWriter<*mut u8>: Send, Sync);

/// A reader's future can be spawned.
#[allow(dead_code)]
fn spawnable(pool: &Pool, stream: tokio::net::TcpStream) {
    let mut reader = FrameReader::new(stream, pool, 100);
    let future = async move { drop(reader.next().await) };
    fn is_send<T: Send>(_: T) {}
    is_send(future);
}
