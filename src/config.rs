//! The builder: what a pool shall be, said piece by piece. What that is checked into is `plan`'s. No system call is
//! made here beyond reading limits.

mod event;
mod export;
mod growth;
mod heaps;
mod memory;
mod plan;
mod start;
mod watch;

use std::{fmt, marker::PhantomData, sync::Arc};

use crate::{
    access::Access,
    device::Device,
    error::BuildError,
    pool::Pool,
    problem::{self, Problem},
    reach::{Any, Rails, Reach},
    size_class::MIN_BLOCK,
    sys::{
        limits::{self, Facts},
        mapping_faults::StepHook,
        mmap,
    },
};

pub use self::{
    event::Event,
    export::{ArenaLayout, ExportLayout, PoolExport},
    heaps::Reserve,
    memory::Backing,
    start::{Numa, Progress, Stage},
    watch::{Guards, Track},
};
pub(crate) use self::{
    event::{EventHook, tell, tell_built},
    growth::Growth,
    heaps::{Range, SharePlan},
    memory::{Fixed, Memory},
    plan::{Asked, DEFAULT_CLASS, Layout, MOST_DEVICES, Plan, memlock_refusal, refuse_device},
    start::{Placement, Start},
    watch::Watch,
};

/// A size of hugepage.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum PageSize {
    /// 2 MiB.
    Huge2M,
    /// 1 GiB.
    Huge1G,
}

impl PageSize {
    /// Bytes of one page.
    pub const fn bytes(self) -> usize {
        match self {
            Self::Huge2M => 2 << 20,
            Self::Huge1G => 1 << 30,
        }
    }
}

/// The pages that arenas are made of.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Pages {
    /// This size, or an error that says how many were free.
    Require(PageSize),
    /// This size arena by arena, base pages for those that cannot have it.
    /// [`ArenaInfo::page_size`](crate::ArenaInfo::page_size) tells what was got.
    Prefer(PageSize),
    /// The system's base pages.
    Base,
}

/// The page sizes to try, best first, and what is wrong with the one asked for.
type Candidates = (Vec<usize>, Option<Problem>);

impl Pages {
    fn candidates(self) -> Candidates {
        let offered = limits::page_sizes();
        let base = mmap::base_page();
        match self {
            Self::Base => (vec![base], None),
            Self::Prefer(size) if offered.contains(&size.bytes()) => {
                (vec![size.bytes(), base], None)
            }
            Self::Prefer(size) => {
                (vec![base], Some(Problem::PageSizeAbsent { asked: size.bytes(), offered }))
            }
            Self::Require(size) => {
                let asked = size.bytes();
                let there = offered.contains(&asked);
                (vec![asked], (!there).then_some(Problem::PageSizeAbsent { asked, offered }))
            }
        }
    }
}

/// Gathers what a pool shall be; [`build`](Builder::build) checks it all and makes it.
///
/// ```
/// use pinpool::{Access, Device, Pages, PageSize, Pool};
///
/// let pool = Pool::builder()
///     .device(Device::soft())
///     .access(Access::LOCAL_WRITE | Access::REMOTE_READ)
///     .capacity(1 << 20)
///     .pages(Pages::Prefer(PageSize::Huge2M))
///     .build()?;
/// let mut buf = pool.alloc(4096)?;
/// buf[..5].copy_from_slice(b"hello");
/// assert!(buf.remote().is_some());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[must_use = "nothing is built before `build`"]
pub struct Builder<R = Any> {
    devices: Vec<Device>,
    access: Access,
    capacity: usize,
    arena_size: Option<usize>,
    pages: Pages,
    colouring: bool,
    count_hits: bool,
    hook: Option<EventHook>,
    heaps: heaps::Wishes,
    start: start::Wishes,
    memory: memory::Wishes,
    growth: growth::Wishes,
    watch: Watch,
    _reach: PhantomData<R>,
    mapping: StepHook,
}

impl Default for Builder {
    fn default() -> Self {
        Self {
            devices: Vec::new(),
            access: Access::LOCAL_WRITE,
            capacity: 0,
            arena_size: None,
            pages: Pages::Prefer(PageSize::Huge2M),
            colouring: false,
            count_hits: false,
            hook: None,
            heaps: heaps::Wishes::default(),
            start: start::Wishes::default(),
            memory: memory::Wishes::default(),
            growth: growth::Wishes::default(),
            watch: Watch::default(),
            _reach: PhantomData,
            mapping: StepHook::default(),
        }
    }
}

impl<R> fmt::Debug for Builder<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Builder")
            .field("devices", &self.devices)
            .field("access", &self.access)
            .field("capacity", &self.capacity)
            .field("max_capacity", &self.growth.max_capacity)
            .field("arena_size", &self.arena_size)
            .field("pages", &self.pages)
            .field("colouring", &self.colouring)
            .finish_non_exhaustive()
    }
}

impl Builder {
    /// Sets the device whose PD all arenas are registered under. Must be set.
    pub fn device(mut self, device: Device) -> Self {
        self.devices = vec![device];
        self
    }

    /// Sets several devices: every arena is registered on each, and every key must be asked for by device
    /// ([`Buf::keys_on`](crate::Buf::keys_on)). At most 16; more and fewer can be had while the pool serves
    /// ([`Pool::add_device`](crate::Pool::add_device)).
    ///
    /// ```
    /// use pinpool::{Device, Pool};
    ///
    /// let (a, b) = (Device::soft(), Device::soft());
    /// let pool = Pool::builder().devices([a.clone(), b.clone()]).capacity(1 << 20).build()?;
    /// let buf = pool.alloc(4096)?;
    /// let (on_a, on_b) = (buf.sge_on(&a)?, buf.sge_on(&b)?);
    /// assert_eq!(on_a.addr, on_b.addr);
    /// assert!(buf.sge_on(&Device::soft()).is_err(), "an unknown device");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn devices(self, devices: impl IntoIterator<Item = Device>) -> Builder<Rails> {
        Builder {
            devices: devices.into_iter().collect(),
            access: self.access,
            capacity: self.capacity,
            arena_size: self.arena_size,
            pages: self.pages,
            colouring: self.colouring,
            count_hits: self.count_hits,
            hook: self.hook,
            heaps: self.heaps,
            start: self.start,
            memory: self.memory,
            growth: self.growth,
            watch: self.watch,
            _reach: PhantomData,
            mapping: self.mapping,
        }
    }
}

impl<R: Reach> Builder<R> {
    /// Sets the rights of all arenas (of the default [class](Builder::class)); [`Access::LOCAL_WRITE`]
    /// unless set. Exactly these reach the device, none is added.
    pub fn access(mut self, access: Access) -> Self {
        self.access = access;
        self
    }

    /// Sets how many bytes are mapped and registered by [`build`](Builder::build). Must be set.
    ///
    /// Rounded up to whole pages of the size that [`pages`](Builder::pages) asks for, and that is 2 MiB unless
    /// set, whether or not such pages are free: a capacity of 1 byte makes a pool of 2 MiB.
    /// [`Pages::Base`] rounds to base pages (4 KiB on x86-64). `Pool::capacity` tells what came of it.
    pub fn capacity(mut self, bytes: usize) -> Self {
        self.capacity = bytes;
        self
    }

    /// Sets the bytes of one arena, and so of one memory region: a power of two, at least a page (2 MiB
    /// unless [`pages`](Builder::pages) asks for others). It bounds the longest buffer. Unless set: one arena up to 1 GiB of capacity, above that at most eight (more only where
    /// the device's `max_mr_size` forces it).
    pub fn arena_size(mut self, bytes: usize) -> Self {
        self.arena_size = Some(bytes);
        self
    }

    /// Sets the pages; [`Pages::Prefer`] of 2 MiB unless set.
    pub fn pages(mut self, pages: Pages) -> Self {
        self.pages = pages;
        self
    }

    /// Spreads the starts of page-sized blocks over the processor's cache sets, at the cost of 64 bytes
    /// a block and of their page alignment. For users who touch only the first bytes of many buffers
    /// (headers); those otherwise all compete for one set.
    pub fn colouring(mut self, on: bool) -> Self {
        self.colouring = on;
        self
    }

    /// Counts every alloc that a thread's cache serves, so that [`CacheStats::hits`](crate::CacheStats::hits) is
    /// exact. Each alloc and each free then takes a lock of its own thread's, which makes a pair several times as
    /// slow: for finding out about a load, not for running it. Off, it costs nothing.
    pub fn count_hits(mut self, on: bool) -> Self {
        self.count_hits = on;
        self
    }

    /// Sets a function that is told of rare events. It is called with no lock held, on whatever thread
    /// met the event. A panic in it is caught and ignored.
    pub fn on_event(mut self, hook: impl Fn(&Event<'_>) + Send + Sync + 'static) -> Self {
        self.hook = Some(Arc::new(hook));
        self
    }

    /// Has mapping fail on demand, to test recovery with.
    #[cfg(feature = "fault")]
    pub fn faulty_mapping(mut self, mapping: &crate::device::FaultyMapping) -> Self {
        self.mapping = StepHook::new(mapping.clone());
        self
    }

    /// Maps, faults in and registers all arenas, and makes the pool.
    ///
    /// # Errors
    /// [`BuildError`], with the numbers; nothing then stays mapped or registered.
    pub fn build(self) -> Result<Pool<R>, BuildError> {
        let hook = self.hook.clone();
        tell_built(hook.as_ref(), || Pool::from_plans(self.plan()?))
    }

    /// Checks everything that can be known before the first page is mapped. One plan for each access class.
    fn plan(self) -> Result<Vec<Plan>, BuildError> {
        self.plan_on(None)
    }

    /// The same with the default class in memory that is there already, if `share` or the builder names some.
    pub(crate) fn plan_on(mut self, share: Option<PoolExport>) -> Result<Vec<Plan>, BuildError> {
        let infos: Vec<_> = self.devices.iter().map(Device::info).collect();
        if infos.is_empty() {
            return Err(BuildError::NoDevice);
        }
        if infos.len() > MOST_DEVICES {
            return Err(BuildError::TooManyDevices { asked: infos.len(), max: MOST_DEVICES });
        }
        for (i, device) in self.devices.iter().enumerate() {
            if self.devices[..i].iter().any(|d| d.is(device)) {
                return Err(BuildError::DuplicateDevice { device: infos[i].name.clone() });
            }
        }
        let facts = Facts::gather();
        let (names, asked): (Vec<_>, Vec<_>) =
            self.heaps.classes(self.asked())?.into_iter().unzip();
        let given = match self.memory_given(share, &infos)? {
            Some(given) => Some(given.examine(&asked[0], &infos, &facts)?),
            None => None,
        };
        let (backing, pages) = self.planned_backing()?;
        let mapped = &asked[given.iter().len()..];
        let (layouts, mut found) = Asked::examine_all(mapped, &infos, &facts, pages)?;
        let mut parts = Vec::with_capacity(asked.len());
        let mapped_to = std::mem::take(&mut found.placement);
        if let Some((layout, own, memory, fixed)) = given {
            found = if layouts.is_empty() {
                own
            } else {
                let arenas = [&layout].into_iter().chain(&layouts).flat_map(|l| l.arenas.clone());
                found.with(own, &infos, &arenas.collect::<Vec<_>>(), layout.arena, &facts)
            };
            parts.push((layout, memory, fixed, Placement::Anywhere));
        }
        parts.extend(layouts.into_iter().map(|layout| {
            (layout, Memory::Mapped(backing.clone()), Vec::new(), mapped_to.clone())
        }));
        let total = parts.iter().map(|(layout, ..)| layout.capacity).sum();
        let start = self.start.plan(total)?;
        if let Some(e) = problem::all(found.problems) {
            return Err(e);
        }
        let pad = if self.colouring { MIN_BLOCK } else { 0 };
        let (mut plans, mut before) = (Vec::new(), 0);
        for ((name, asked), (layout, memory, fixed, placement)) in
            names.into_iter().zip(asked).zip(parts)
        {
            let Layout { capacity, stride, arenas, more, page_sizes, .. } = layout;
            let slot = |i: usize| fixed.get(i).map_or(i, |f: &Fixed| f.slot);
            let cut = self.heaps.lay_out(&name, |i| slot(i) * stride, &arenas, pad)?;
            let unreserved = cut.ranges.iter().map(|&(_, len)| len).sum();
            plans.push(Plan {
                name,
                devices: self.devices.clone(),
                infos: infos.clone(),
                access: asked.access,
                capacity,
                stride,
                arenas,
                page_sizes,
                pad,
                count_hits: self.count_hits,
                hook: self.hook.clone(),
                start: start.for_class(asked.access, placement, before),
                memory,
                fixed,
                growth: self.growth.plan(capacity, unreserved, more)?,
                ranges: cut.ranges,
                shares: cut.shares,
                watch: self.watch,
                mapping: self.mapping.clone(),
            });
            // One class grows.
            self.growth = growth::Wishes::default();
            before += capacity;
        }
        Ok(plans)
    }

    fn asked(&self) -> Asked {
        let Self { access, capacity, arena_size, pages, .. } = *self;
        let (max_capacity, numa) = (self.growth.max_capacity, self.start.numa);
        Asked { access, capacity, max_capacity, arena_size, pages, numa }
    }
}
