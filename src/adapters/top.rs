//! A pool's map for other processes of the same user: a Unix socket that answers each connection with the map at that
//! moment, as text or as JSON, and with nothing else. Manages the socket and its thread; the map is `pool/map.rs`'s.
//!
//! A connection sends one line, `text` or `json`, and reads to the end. Whoever sends something else, too much, or
//! nothing for a second, is hung up on.

use std::{
    fmt, fs,
    io::{self, ErrorKind, Read, Write},
    os::unix::{
        fs::{FileTypeExt, MetadataExt},
        net::{UnixListener, UnixStream},
    },
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use serde_json::{Value, json};

use crate::{
    contained::contained,
    pool::{Pool, PoolMap},
    stats::{Books, CacheStats},
    sys::{limits, private_socket, signals},
};

/// How long one connection may take.
const PATIENCE: Duration = Duration::from_secs(1);
/// The longest line that is read.
const LINE: usize = 16;

/// Serves the map of a pool on a Unix socket, until it is dropped. Made by [`Pool::serve_map`].
#[must_use = "dropping it ends the serving"]
pub struct TopServer {
    listener: Arc<UnixListener>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
    path: PathBuf,
    /// Of the file, to remove no other.
    file: Option<(u64, u64)>,
    process: u32,
}

impl<R: 'static> Pool<R> {
    /// Serves [`map`](Pool::map) on a Unix socket at a path, for `pinpool top PATH`, on a thread of its own. The
    /// socket has the rights 0600, so that the process's user alone can connect (and root); it can be looked
    /// through, and nothing can be changed. Each look costs what `map` costs.
    ///
    /// A socket of a process that is no more is replaced. The server counts as a handle of the pool; dropping it
    /// ends the thread and removes the socket.
    ///
    /// ```no_run
    /// # use pinpool::{Device, Pool};
    /// # let pool = Pool::builder().device(Device::soft()).capacity(1 << 20).build()?;
    /// let _top = pool.serve_map("/run/user/1000/pool.sock")?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// `AddrInUse` if something is at that path and answers, or is no socket; what the system says, of that kind and
    /// with the path, if there can be no socket or no thread.
    pub fn serve_map(&self, path: impl AsRef<Path>) -> io::Result<TopServer> {
        let path = path.as_ref();
        let listener = Arc::new(listen(path).map_err(|e| at(path, &e))?);
        let mut server = TopServer {
            listener: listener.clone(),
            stop: Arc::new(AtomicBool::new(false)),
            thread: None,
            path: path.to_owned(),
            file: fs::symlink_metadata(path).ok().map(|m| (m.dev(), m.ino())),
            process: limits::process_id(),
        };
        let (pool, stop) = (self.clone(), server.stop.clone());
        let builder = thread::Builder::new().name("pinpool-top".to_owned());
        server.thread = Some(builder.spawn(move || serve(&listener, &pool, &stop))?);
        Ok(server)
    }
}

/// A private socket at the path, in place of one that nobody serves any more.
fn listen(path: &Path) -> io::Result<UnixListener> {
    match private_socket::listen(path) {
        Err(e) if e.kind() == ErrorKind::AddrInUse && is_dead(path) => {
            fs::remove_file(path)?;
            private_socket::listen(path)
        }
        done => done,
    }
}

/// The same error, with what was to be and where.
fn at(path: &Path, error: &io::Error) -> io::Error {
    let why = match error.kind() {
        ErrorKind::AddrInUse
            if fs::symlink_metadata(path).is_ok_and(|m| !m.file_type().is_socket()) =>
        {
            "something that is no socket is there: choose another path".to_owned()
        }
        ErrorKind::AddrInUse => {
            "a socket is there that is served already: choose another path".to_owned()
        }
        ErrorKind::NotFound => format!("its directory does not exist: {error}"),
        _ => error.to_string(),
    };
    io::Error::new(error.kind(), format!("no map can be served at {}: {why}", path.display()))
}

fn is_dead(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok_and(|m| m.file_type().is_socket())
        && UnixStream::connect(path).is_err_and(|e| e.kind() == ErrorKind::ConnectionRefused)
}

fn serve<R>(listener: &UnixListener, pool: &Pool<R>, stop: &AtomicBool) {
    signals::block_all();
    while !stop.load(Relaxed) {
        match listener.accept() {
            Ok((stream, _)) => {
                // Whatever a client does is its own affair.
                contained(|| answer(stream, pool));
            }
            Err(_) if stop.load(Relaxed) => return,
            // Out of descriptors, say: later there may be some again.
            Err(_) => thread::sleep(Duration::from_millis(50)),
        }
    }
}

fn answer<R>(mut stream: UnixStream, pool: &Pool<R>) -> io::Result<()> {
    let deadline = Instant::now() + PATIENCE;
    let line = read_line(&mut stream, deadline)?;
    let text = match line.as_slice() {
        b"text" => pool.map().to_string(),
        b"json" => format!("{:#}\n", pool.map().to_json()),
        _ => return Ok(()),
    };
    let deadline = Instant::now() + PATIENCE;
    let mut left = text.as_bytes();
    while !left.is_empty() {
        stream.set_write_timeout(Some(remaining(deadline)?))?;
        let n = stream.write(left)?;
        left = left.get(n.max(1)..).unwrap_or_default();
    }
    Ok(())
}

fn read_line(stream: &mut UnixStream, deadline: Instant) -> io::Result<Vec<u8>> {
    let mut line = Vec::with_capacity(LINE);
    let mut byte = [0];
    while line.len() < LINE {
        stream.set_read_timeout(Some(remaining(deadline)?))?;
        match stream.read(&mut byte)? {
            0 => break,
            _ if byte[0] == b'\n' => return Ok(line),
            _ => line.push(byte[0]),
        }
    }
    Err(ErrorKind::InvalidData.into())
}

/// What is left of the time; never zero, which would be for ever.
fn remaining(deadline: Instant) -> io::Result<Duration> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(ErrorKind::TimedOut.into()) } else { Ok(left) }
}

impl TopServer {
    /// Where the socket is.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for TopServer {
    fn drop(&mut self) {
        // A forked child has a copy of this, and neither the thread nor a claim to the socket.
        if limits::process_id() != self.process {
            return;
        }
        self.stop.store(true, Relaxed);
        private_socket::stop(&self.listener);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        let now = fs::symlink_metadata(&self.path).ok().map(|m| (m.dev(), m.ino()));
        if now.is_some() && now == self.file {
            let _ = fs::remove_file(&self.path);
        }
    }
}

impl fmt::Debug for TopServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TopServer").field("path", &self.path).finish_non_exhaustive()
    }
}

impl PoolMap {
    /// The map as one JSON object; bytes are numbers, times are microseconds, and addresses text.
    pub fn to_json(&self) -> Value {
        let s = &self.stats;
        let caches = |c: &CacheStats| json!({ "hits_at_least": c.hits, "misses": c.misses, "from_depot": c.from_depot });
        let books = |b: &Books| {
            json!({
                "capacity": b.capacity, "live": b.live, "cached": b.cached, "free": b.free,
                "unused": b.unused, "live_buffers": b.live_buffers, "high_water": b.high_water,
                "largest_free": b.largest_free,
            })
        };
        let arena = |a: &crate::ArenaMap| {
            json!({
                "class": a.class, "address": format!("{:#x}", a.info.addr.as_ptr() as usize),
                "len": a.info.len, "page_size": a.info.page_size, "node": a.info.node,
                "regions": a.regions, "out": a.out, "free": a.free, "unused": a.unused,
                "cells": a.cells,
            })
        };
        let class = |c: &crate::ClassStats| {
            json!({
                "block": c.block, "capacity": c.capacity, "live": c.live, "cached": c.cached,
                "free": c.free, "unused": c.unused, "live_buffers": c.live_buffers,
                "high_water": c.high_water, "caches": caches(&c.caches), "waits": c.waits,
                "wait_us": micros(c.wait_time),
            })
        };
        let access_class = |a: &crate::AccessStats| {
            json!({
                "name": a.name, "access": a.access.to_string(), "arenas": a.arenas,
                "waiting": a.waiting, "all": books(&a.all), "unreserved": books(&a.unreserved),
            })
        };
        let share = |s: &crate::ShareStats| {
            json!({
                "name": s.name, "class": s.class, "reserve": books(&s.reserve),
                "ran_dry": s.ran_dry, "refused": s.refused, "waiting": s.waiting,
                "waits": s.waits, "wait_us": micros(s.wait_time),
            })
        };
        let pages = |p: &crate::PageStats| json!({ "page_size": p.page_size, "arenas": p.arenas, "bytes": p.bytes });
        json!({
            "process": self.process,
            "capacity": s.capacity, "max_capacity": s.max_capacity, "live": s.live,
            "cached": s.cached, "free": s.free, "unused": s.unused,
            "live_buffers": s.live_buffers, "in_flight": s.in_flight,
            "high_water": s.high_water, "largest_free": s.largest_free,
            "fragmentation": s.fragmentation(), "caches": caches(&s.caches),
            "hits_exact": s.hits_exact, "waiting": s.waiting, "waits": s.waits,
            "wait_us": micros(s.wait_time), "longest_wait_us": micros(s.longest_wait),
            "refused": s.refused, "growths": s.growths, "shrinks": s.shrinks,
            "growth_failures": s.growth_failures, "growth_us": micros(s.growth_time),
            "regions": s.regions, "register_calls": s.register_calls,
            "register_us": micros(s.register_time), "pinned": s.pinned, "locked": s.locked,
            "memlock_limit": s.memlock_limit, "table_bytes": s.table_bytes,
            "pages": s.pages.iter().map(pages).collect::<Vec<_>>(),
            "arenas": self.arenas.iter().map(arena).collect::<Vec<_>>(),
            "access_classes": s.access_classes.iter().map(access_class).collect::<Vec<_>>(),
            "shares": s.shares.iter().map(share).collect::<Vec<_>>(),
            "classes": s.classes.iter().map(class).collect::<Vec<_>>(),
        })
    }
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}
