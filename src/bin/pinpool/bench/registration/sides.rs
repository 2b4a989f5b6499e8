//! The two sides of the registration bench: the pool, and a buffer that is registered for each use.
//! Both lie on memory that was mapped and faulted in by the same code, on the same page size, and go
//! through the same device and PD with the same rights; all that differs is when they register.

use std::{
    hint::black_box,
    mem,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use pinpool::{
    Access, AllocError, ArenaInfo, BuildError, Device, LKey, PageSize, Pages, Pool, RKey,
    RegisterError, RemoteBuf, Sge,
    device::{DeviceInfo, MrHandle, MrRequest, Registrar, Registration},
};

use super::peer::{End, Peer};

/// The rights of both sides: what lets the data be checked from afar.
pub(crate) const ACCESS: Access =
    Access::LOCAL_WRITE.union(Access::REMOTE_WRITE).union(Access::REMOTE_READ);

/// Buffers are whole multiples of this.
pub(crate) const GRANULE: usize = 4 << 10;

/// Counts what reaches a device. Clones share the counts.
#[derive(Clone)]
pub(crate) struct Counting {
    device: Device,
    counts: Arc<Counts>,
}

#[derive(Default)]
struct Counts {
    registers: AtomicU64,
    live: AtomicU64,
}

impl Counting {
    /// Wraps a verbs or software device.
    pub(crate) fn new(device: &Device) -> Self {
        Self { device: device.clone(), counts: Arc::default() }
    }

    /// How many register calls there were, refused ones included.
    pub(crate) fn register_calls(&self) -> u64 {
        self.counts.registers.load(Relaxed)
    }

    /// How many regions made through this are registered now.
    pub(crate) fn live(&self) -> u64 {
        self.counts.live.load(Relaxed)
    }

    fn inner(&self) -> &dyn Registrar {
        #[cfg(any(feature = "rdma-sys", feature = "rdma-mummy-sys"))]
        if let Some(verbs) = self.device.as_verbs() {
            return verbs;
        }
        match self.device.as_soft() {
            Some(soft) => soft,
            None => unreachable!("`DeviceArgs::open` gives a verbs or a software device"),
        }
    }
}

// SAFETY: every call reaches the wrapped registrar unchanged, so its guarantees hold here.
unsafe impl Registrar for Counting {
    fn info(&self) -> DeviceInfo {
        self.device.info()
    }

    unsafe fn register(&self, request: &MrRequest) -> Result<Registration, RegisterError> {
        self.counts.registers.fetch_add(1, Relaxed);
        // SAFETY: the caller's guarantees, passed on.
        let done = unsafe { self.inner().register(request) };
        self.counts.live.fetch_add(u64::from(done.is_ok()), Relaxed);
        done
    }

    unsafe fn deregister(&self, handle: MrHandle) -> Result<(), RegisterError> {
        // SAFETY: the caller's guarantees, passed on.
        let done = unsafe { self.inner().deregister(handle) };
        self.counts.live.fetch_sub(u64::from(done.is_ok()), Relaxed);
        done
    }
}

/// Registers nothing: behind it, a pool is a way to map memory as pools do.
struct Unregistered;

// SAFETY: no device ever learns of a range, so none touches it (1, 2), nor does anything here (3). The
// keys name nothing (4) and are never used: the only buffer is `PerCall`'s, which goes by its own.
unsafe impl Registrar for Unregistered {
    fn info(&self) -> DeviceInfo {
        DeviceInfo::new("none", "none")
    }

    unsafe fn register(&self, request: &MrRequest) -> Result<Registration, RegisterError> {
        Ok(Registration {
            handle: MrHandle(0),
            lkey: LKey::new(0),
            rkey: RKey::new(0),
            access: request.access,
        })
    }

    unsafe fn deregister(&self, _: MrHandle) -> Result<(), RegisterError> {
        Ok(())
    }
}

/// A buffer, mapped and faulted in, that is registered anew for each use.
pub(crate) struct PerCall {
    registrar: Counting,
    /// Always there, but while it is dropped.
    memory: Option<pinpool::Buf>,
    arena: ArenaInfo,
    /// A range that the device did not let go of.
    stuck: bool,
}

impl PerCall {
    fn new(device: &Device, len: usize, pages: Pages) -> Result<Self, BuildError> {
        let pool = Pool::builder()
            .device(Device::custom(Unregistered))
            .access(ACCESS)
            .capacity(len)
            .pages(pages)
            .build()?;
        let arena = pool.arenas()[0];
        let memory = pool.alloc(len).ok();
        Ok(Self { registrar: Counting::new(device), memory, arena, stuck: false })
    }

    /// What the memory is made of, and how long that took.
    pub(crate) fn arena(&self) -> &ArenaInfo {
        &self.arena
    }

    /// The counts of what went to the device.
    pub(crate) fn counts(&self) -> &Counting {
        &self.registrar
    }

    /// The first `len` bytes as a request. They are whole base pages; where they are no whole number
    /// of hugepages, the request does not call itself one.
    fn request(&self, len: usize) -> MrRequest {
        let page_size = match self.arena.page_size {
            huge if len.is_multiple_of(huge) => huge,
            _ => GRANULE,
        };
        MrRequest { addr: self.arena.addr, len, page_size, access: ACCESS }
    }

    /// Registers the first `len` bytes and deregisters them, timed together.
    pub(crate) fn time(&mut self, len: usize) -> Result<Duration, RegisterError> {
        let request = self.request(len);
        let start = Instant::now();
        // SAFETY: the range is the buffer's own, which outlives the registration: should deregistering
        // fail, `drop` keeps it mapped for ever.
        let made = unsafe { self.registrar.register(&request) }?;
        // SAFETY: made just now, deregistered once.
        let done = unsafe { self.registrar.deregister(made.handle) };
        let time = start.elapsed();
        self.stuck |= done.is_err();
        done.map(|()| time)
    }

    /// Registers the first `len` bytes for the time of `body`.
    fn with_registered<R>(
        &mut self,
        len: usize,
        body: impl FnOnce(&mut End<'_>) -> Result<R, String>,
    ) -> Result<R, String> {
        let request = self.request(len);
        let Some(memory) = &mut self.memory else { return Err("no memory".to_owned()) };
        memory.set_len(len).map_err(|e| e.to_string())?;
        let addr = memory.as_ptr() as u64;
        // SAFETY: as in `time`.
        let made = unsafe { self.registrar.register(&request) }.map_err(|e| e.to_string())?;
        let local = Sge { addr, length: len as u32, lkey: made.lkey };
        let remote = RemoteBuf { addr, len: len as u64, rkey: made.rkey };
        // SAFETY: `request` covers exactly these bytes, registered until after `body`.
        let result = body(&mut unsafe { End::new("per-call", memory, local, remote) });
        // SAFETY: made above, deregistered once; the peer's calls are over.
        let done = unsafe { self.registrar.deregister(made.handle) };
        self.stuck |= done.is_err();
        result.and_then(|r| done.map(|()| r).map_err(|e| e.to_string()))
    }
}

impl Drop for PerCall {
    fn drop(&mut self) {
        if self.stuck {
            // A device may still write to it, so it must not be unmapped.
            mem::forget(self.memory.take());
        }
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
            // In two words, so that looking at them costs no more than it must.
            black_box(buf.as_ptr());
            black_box(u64::from(keys.lkey.get()) | u64::from(rkey) << 32);
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
