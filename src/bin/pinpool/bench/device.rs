//! What benches that need a device share: the registrar behind it, counted, and memory that it knows
//! nothing of.

use std::{
    mem,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use clap::ValueEnum;
use pinpool::{
    Access, ArenaInfo, Buf, BuildError, Device, LKey, PageSize, Pages, Pool, RKey, RegisterError,
    device::{DeviceInfo, MrHandle, MrRequest, Registrar, Registration},
};

use crate::cli::{Failure, parse_bytes, show_bytes};

/// Buffers are whole multiples of this.
pub(crate) const GRANULE: usize = 4 << 10;

/// Reads a size from the command line, in whole granules up to `largest`.
pub(crate) fn parse_granules(text: &str, largest: usize) -> Result<usize, String> {
    let size = parse_bytes(text)?;
    if !(GRANULE..=largest).contains(&size) || !size.is_multiple_of(GRANULE) {
        let (least, most) = (show_bytes(GRANULE), show_bytes(largest));
        return Err(format!("sizes go from {least} to {most}, in whole {least}"));
    }
    Ok(size)
}

/// The sizes that were asked for, smallest first, each once.
pub(crate) fn in_order(sizes: &[usize]) -> Vec<usize> {
    let mut sizes = sizes.to_vec();
    sizes.sort_unstable();
    sizes.dedup();
    sizes
}

/// The pages that a bench asks for.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum PageChoice {
    /// The system's base pages, none of them transparently huge
    Base,
    /// 2 MiB hugepages, or an error
    #[value(name = "2M")]
    Huge2M,
    /// 2 MiB hugepages if enough are free for both sides, else base pages
    Prefer,
}

impl PageChoice {
    /// As the pool's builder takes it.
    pub(crate) fn pages(self) -> Pages {
        match self {
            Self::Base => Pages::Base,
            Self::Huge2M => Pages::Require(PageSize::Huge2M),
            Self::Prefer => Pages::Prefer(PageSize::Huge2M),
        }
    }
}

/// Has this process live without transparent hugepages until it is dropped: else pages might be huge all
/// the same, on one side or both.
pub(crate) struct NoThp {
    before: bool,
}

impl NoThp {
    /// Turns them off.
    pub(crate) fn new() -> Result<Self, Failure> {
        let before = nix::sys::prctl::get_thp_disable().unwrap_or(false);
        nix::sys::prctl::set_thp_disable(true)
            .map_err(|e| Failure::Failed(format!("turning transparent hugepages off: {e}")))?;
        Ok(Self { before })
    }

    /// Turns them off if pages are to be small.
    pub(crate) fn for_pages(pages: Pages) -> Result<Option<Self>, Failure> {
        (pages == Pages::Base).then(Self::new).transpose()
    }
}

impl Drop for NoThp {
    fn drop(&mut self) {
        // A process that could turn them off may turn them on.
        let _ = nix::sys::prctl::set_thp_disable(self.before);
    }
}

/// The registrar of a verbs or software device; no command opens another kind.
pub(crate) fn registrar(device: &Device) -> &dyn Registrar {
    #[cfg(any(feature = "rdma-sys", feature = "rdma-mummy-sys"))]
    if let Some(verbs) = device.as_verbs() {
        return verbs;
    }
    match device.as_soft() {
        Some(soft) => soft,
        None => unreachable!("`DeviceArgs::open` gives a verbs or a software device"),
    }
}

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
}

// SAFETY: every call reaches the wrapped registrar unchanged, so its guarantees hold here.
unsafe impl Registrar for Counting {
    fn info(&self) -> DeviceInfo {
        self.device.info()
    }

    unsafe fn register(&self, request: &MrRequest) -> Result<Registration, RegisterError> {
        self.counts.registers.fetch_add(1, Relaxed);
        // SAFETY: the caller's guarantees, passed on.
        let done = unsafe { registrar(&self.device).register(request) };
        self.counts.live.fetch_add(u64::from(done.is_ok()), Relaxed);
        done
    }

    unsafe fn deregister(&self, handle: MrHandle) -> Result<(), RegisterError> {
        // SAFETY: the caller's guarantees, passed on.
        let done = unsafe { registrar(&self.device).deregister(handle) };
        self.counts.live.fetch_sub(u64::from(done.is_ok()), Relaxed);
        done
    }
}

/// Registers nothing: behind it, a pool is a way to map memory as pools do.
struct Unregistered;

// SAFETY: no device ever learns of a range, so none touches it (1, 2), nor does anything here (3). The
// keys name nothing (4) and are never used: whoever has such a buffer goes by keys of its own.
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

/// Memory of an application: mapped and faulted in as a pool's is, in one piece, and known to no device
/// until somebody registers a part of it.
pub(crate) struct AppMemory {
    /// Always there but while it is dropped.
    buf: Option<Buf>,
    arena: ArenaInfo,
    access: Access,
    /// A device may still reach a part of it.
    stuck: bool,
}

impl AppMemory {
    /// Maps `len` bytes, to be registered with these rights.
    pub(crate) fn new(len: usize, pages: Pages, access: Access) -> Result<Self, BuildError> {
        let pool = Pool::builder()
            .device(Device::custom(Unregistered))
            .access(access)
            .capacity(len)
            .arena_size(len.next_power_of_two())
            .pages(pages)
            .build()?;
        let arena = pool.arenas()[0];
        // The pool holds it and nothing else, so it is there.
        Ok(Self { buf: pool.alloc(len).ok(), arena, access, stuck: false })
    }

    /// What it is made of, and how long that took.
    pub(crate) fn arena(&self) -> &ArenaInfo {
        &self.arena
    }

    /// All of it.
    pub(crate) fn bytes(&self) -> &[u8] {
        self.buf.as_deref().unwrap_or_default()
    }

    /// All of it, to be written.
    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        self.buf.as_deref_mut().unwrap_or_default()
    }

    /// A part as a request, whole base pages. Where they are no whole hugepages, it does not call itself
    /// so.
    pub(crate) fn request(&self, offset: usize, len: usize) -> MrRequest {
        let page_size = match self.arena.page_size {
            huge if len.is_multiple_of(huge) && offset.is_multiple_of(huge) => huge,
            _ => GRANULE,
        };
        assert!(offset + len <= self.bytes().len(), "a part of this memory");
        let addr = self.arena.addr.map_addr(|addr| addr.saturating_add(offset));
        MrRequest { addr, len, page_size, access: self.access }
    }

    /// Registers a part.
    ///
    /// # Safety
    /// The registration is given to [`deregister`](AppMemory::deregister) before this is dropped.
    pub(crate) unsafe fn register(
        &self,
        registrar: &dyn Registrar,
        offset: usize,
        len: usize,
    ) -> Result<Registration, RegisterError> {
        // SAFETY: `request` cuts the range out of this mapping, which outlives the registration
        // (contract), or, should deregistering fail, is kept for ever by `drop`.
        unsafe { registrar.register(&self.request(offset, len)) }
    }

    /// Deregisters what [`register`](AppMemory::register) made.
    ///
    /// # Safety
    /// `handle` is of a registration that this made with this registrar and that was not deregistered.
    pub(crate) unsafe fn deregister(
        &mut self,
        registrar: &dyn Registrar,
        handle: MrHandle,
    ) -> Result<(), RegisterError> {
        // SAFETY: the caller's guarantee.
        let done = unsafe { registrar.deregister(handle) };
        self.stuck |= done.is_err();
        done
    }
}

impl Drop for AppMemory {
    fn drop(&mut self) {
        if self.stuck {
            // A device may still write to it, so it must not be unmapped.
            mem::forget(self.buf.take());
        }
    }
}

/// The time that one part of building a pool took, over all arenas.
pub(crate) fn build_time(arenas: &[ArenaInfo], part: impl Fn(&ArenaInfo) -> Duration) -> Duration {
    arenas.iter().map(part).sum()
}

/// Says which pages, and why they may be huge all the same.
pub(crate) fn show_pages(page_size: usize, thp: Option<&String>) -> String {
    let mut text = format!("{} on all sides", show_bytes(page_size));
    // Base pages may be huge behind the scenes, for all sides alike.
    if let Some(thp) = thp.filter(|_| page_size < PageSize::Huge2M.bytes()) {
        text.push_str(&format!("; transparent hugepages: {thp}"));
    }
    text
}
