//! The two sides of the registration bench: the pool, and a buffer that is registered for each use.
//! Both lie on memory that was mapped and faulted in by the same code, on the same page size, and go
//! through the same device and PD with the same rights; all that differs is when they register.

use std::time::{Duration, Instant};

use pinpool::{
    Access, AllocError, ArenaInfo, BuildError, Device, PageSize, Pages, Pool, RKey, RegisterError,
    RemoteBuf, Sge,
};

use crate::bench::{
    contest::opaque::keep,
    device::{AppMemory, Counting},
    peer::{End, Peer},
};

/// The rights of both sides: what lets the data be checked from afar.
pub(crate) const ACCESS: Access =
    Access::LOCAL_WRITE.union(Access::REMOTE_WRITE).union(Access::REMOTE_READ);

/// A buffer, mapped and faulted in, that is registered anew for each use.
pub(crate) struct PerCall {
    registrar: Counting,
    memory: AppMemory,
}

impl PerCall {
    fn new(device: &Device, len: usize, pages: Pages) -> Result<Self, BuildError> {
        Ok(Self { registrar: Counting::new(device), memory: AppMemory::new(len, pages, ACCESS)? })
    }

    /// What the memory is made of, and how long that took.
    pub(crate) fn arena(&self) -> &ArenaInfo {
        self.memory.arena()
    }

    /// The counts of what went to the device.
    pub(crate) fn counts(&self) -> &Counting {
        &self.registrar
    }

    /// Registers the first `len` bytes and deregisters them, timed together.
    pub(crate) fn time(&mut self, len: usize) -> Result<Duration, RegisterError> {
        let start = Instant::now();
        // SAFETY: deregistered in the next step.
        let made = unsafe { self.memory.register(&self.registrar, 0, len) }?;
        // SAFETY: made just now, deregistered once.
        let done = unsafe { self.memory.deregister(&self.registrar, made.handle) };
        let time = start.elapsed();
        done.map(|()| time)
    }

    /// Registers the first `len` bytes for the time of `body`.
    fn with_registered<R>(
        &mut self,
        len: usize,
        body: impl FnOnce(&mut End<'_>) -> Result<R, String>,
    ) -> Result<R, String> {
        // SAFETY: deregistered below.
        let made = unsafe { self.memory.register(&self.registrar, 0, len) };
        let made = made.map_err(|e| e.to_string())?;
        let bytes = &mut self.memory.bytes_mut()[..len];
        let addr = bytes.as_ptr() as u64;
        let local = Sge { addr, length: len as u32, lkey: made.lkey };
        let remote = RemoteBuf { addr, len: len as u64, rkey: made.rkey };
        // SAFETY: exactly these bytes were registered, until after `body`.
        let result = body(&mut unsafe { End::new("per-call", bytes, local, remote) });
        // SAFETY: made above, deregistered once; the peer's calls are over.
        let done = unsafe { self.memory.deregister(&self.registrar, made.handle) };
        result.and_then(|r| done.map(|()| r).map_err(|e| e.to_string()))
    }
}

/// Both sides on one device.
pub(crate) struct Sides {
    pub(crate) pool: Pool,
    pub(crate) per_call: PerCall,
    pub(crate) pool_counts: Counting,
}

impl Sides {
    /// Builds both on pages of one size, for buffers of up to `largest` bytes. Preferred hugepages are
    /// used if there are enough for both sides.
    pub(crate) fn build(device: &Device, largest: usize, pages: Pages) -> Result<Self, BuildError> {
        let Pages::Prefer(size) = pages else { return Self::on(device, largest, pages) };
        match Self::on(device, largest, Pages::Require(size)) {
            Err(
                BuildError::Back { .. }
                | BuildError::PageSizeAbsent { .. }
                | BuildError::Preflight { .. },
            ) => Self::on(device, largest, Pages::Base),
            other => other,
        }
    }

    fn on(device: &Device, largest: usize, pages: Pages) -> Result<Self, BuildError> {
        let huge = PageSize::Huge2M.bytes();
        let per_call = PerCall::new(device, largest.max(huge), pages)?;
        let pool_counts = Counting::new(device);
        let pool = Pool::builder()
            .device(Device::custom(pool_counts.clone()))
            .access(ACCESS)
            .capacity((2 * largest).max(huge))
            .pages(pages)
            .build()?;
        Ok(Self { pool, per_call, pool_counts })
    }

    /// Takes a buffer of the pool and gives it back, `pairs` times, timed together. Each time the
    /// address and both keys are had.
    pub(crate) fn time_pool(&self, len: usize, pairs: u32) -> Result<Duration, AllocError> {
        let start = Instant::now();
        for _ in 0..pairs {
            let buf = self.pool.alloc(len)?;
            let keys = buf.keys();
            let rkey = keys.rkey.map_or(0, RKey::get);
            keep(buf.as_ptr(), keys.lkey.get(), rkey);
        }
        Ok(start.elapsed())
    }

    /// Moves `len` bytes by RDMA between a pool buffer and the registered per-call buffer, both ways,
    /// and compares.
    pub(crate) fn verify(&mut self, peer: &mut Peer, len: usize) -> Result<(), String> {
        let mut buf = self.pool.alloc(len).map_err(|e| e.to_string())?;
        let local = buf.sge();
        let remote = buf.remote().ok_or("the pool's buffer has no rkey")?;
        self.per_call.with_registered(len, |per_call| {
            // SAFETY: both are the buffer's own names, from its pool, which lives in `self`.
            let mut pool = unsafe { End::new("pool", &mut buf, local, remote) };
            peer.verify(&mut pool, per_call)
        })
    }
}
