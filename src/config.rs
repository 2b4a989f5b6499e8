//! The builder and what it turns into: a [`Plan`], checked once and never changed. No system call is
//! made here beyond reading limits.

mod export;
mod growth;
mod heaps;
mod memory;
mod start;
mod watch;

use std::{
    fmt,
    marker::PhantomData,
    sync::Arc,
    time::{Duration, Instant},
};

use crate::{
    access::Access,
    damage::Damage,
    device::{Device, DeviceInfo},
    error::{BuildError, Bytes},
    outstanding::Outstanding,
    pool::Pool,
    preflight::{self, Demand, Findings},
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
    export::{ArenaLayout, ExportLayout, PoolExport},
    heaps::Reserve,
    memory::Backing,
    start::{Numa, Progress, Stage},
    watch::{Guards, Track},
};
pub(crate) use self::{
    growth::Growth,
    heaps::{Range, SharePlan},
    memory::{Fixed, Memory},
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

/// Something rare that an operator should hear of.
#[derive(Debug)]
#[non_exhaustive]
pub enum Event<'a> {
    /// A device would not deregister an arena; its memory stays mapped for ever.
    DeregisterFailed {
        /// The arena's first byte.
        addr: usize,
        /// Bytes that leak.
        len: usize,
        /// The refusal.
        error: &'a crate::error::RegisterError,
    },
    /// The system would not unmap what a pool had; it stays mapped for ever, without memory where the
    /// system lets go of that.
    UnmapFailed {
        /// First byte.
        addr: usize,
        /// Bytes that stay.
        len: usize,
        /// The refusal.
        error: &'a std::io::Error,
    },
    /// Hugepages were preferred and could not be had; the arena is on base pages.
    HugepagesMissing {
        /// Which arena, from 0.
        arena: usize,
        /// Bytes of it.
        len: usize,
        /// Bytes of the page that was preferred.
        page_size: usize,
        /// How many of that size were free.
        free_pages: Option<u64>,
    },
    /// The pool could not grow. It serves on with what it has, and tries again when more is needed.
    GrowthFailed {
        /// Bytes of the arena that was to come.
        len: usize,
        /// Bytes that the pool has.
        capacity: usize,
        /// Bytes that it may grow to.
        max_capacity: usize,
        /// How often in a row this failed.
        failures: u32,
        /// For how long it will not be tried again.
        retry_after: Duration,
        /// Why, with the numbers.
        error: &'a BuildError,
    },
    /// Somebody wrote to memory that nobody had ([`Guards::poison`]).
    WrittenAfterFree(&'a Damage),
    /// Somebody wrote beyond the end of a buffer ([`Guards::canary`]).
    WrittenBeyondEnd(&'a Damage),
    /// The last handle of a pool goes while buffers of it are out, in handles, as tokens or as bare addresses: the
    /// last of them to come back takes the pool down; those that never do have leaked, with their arenas.
    /// [`Builder::track`] has it say whose they are.
    StillOut(&'a Outstanding),
    /// A pool was built.
    Built {
        /// How many arenas it has, over all access classes.
        arenas: usize,
        /// Bytes of them.
        capacity: usize,
        /// How long building took.
        took: Duration,
    },
    /// A pool could not be built; nothing is left of it.
    BuildFailed {
        /// Why, with the numbers; `build` returns it, too.
        error: &'a BuildError,
    },
    /// The pool grew by an arena.
    Grew {
        /// Bytes of the arena.
        len: usize,
        /// Bytes that the pool has with it.
        capacity: usize,
        /// How long mapping, faulting in and registering took.
        took: Duration,
    },
    /// The pool gave an arena back that was not needed any more.
    Shrank {
        /// Bytes of the arena.
        len: usize,
        /// Bytes that the pool has without it.
        capacity: usize,
    },
    /// Allocs were refused for want of memory, or waited in vain. Told at most once a second for each access class
    /// or share, on the thread that was refused.
    Exhausted {
        /// The books at the last of these refusals.
        books: &'a crate::error::Exhausted,
        /// How many there were since this was last told.
        refused: u64,
    },
    /// The arenas of an access class were taken down, after the last handle and buffer.
    TakenDown {
        /// How many there were.
        arenas: usize,
        /// Bytes of them.
        bytes: usize,
    },
}

impl Event<'_> {
    /// Its kind in one word, as a label of metrics.
    pub fn name(&self) -> &'static str {
        match self {
            Self::DeregisterFailed { .. } => "deregister_failed",
            Self::UnmapFailed { .. } => "unmap_failed",
            Self::HugepagesMissing { .. } => "hugepages_missing",
            Self::GrowthFailed { .. } => "growth_failed",
            Self::Built { .. } => "built",
            Self::BuildFailed { .. } => "build_failed",
            Self::Grew { .. } => "grew",
            Self::Shrank { .. } => "shrank",
            Self::Exhausted { .. } => "exhausted",
            Self::TakenDown { .. } => "taken_down",
            Self::WrittenAfterFree(_) => "written_after_free",
            Self::WrittenBeyondEnd(_) => "written_beyond_end",
            Self::StillOut(_) => "still_out",
        }
    }
}

pub(crate) type EventHook = Arc<dyn Fn(&Event<'_>) + Send + Sync>;

/// Tells the hook, if there is one. It may be called from `Drop`, which never panics (P4).
pub(crate) fn tell(hook: Option<&EventHook>, event: &Event<'_>) {
    if let Some(hook) = hook {
        let call = std::panic::AssertUnwindSafe(|| hook(event));
        let _ = std::panic::catch_unwind(call);
    }
}

/// Builds, and tells how that went.
pub(crate) fn tell_built<R>(
    hook: Option<&EventHook>,
    build: impl FnOnce() -> Result<Pool<R>, BuildError>,
) -> Result<Pool<R>, BuildError> {
    let start = Instant::now();
    let built = build();
    match &built {
        Ok(pool) => {
            let (arenas, capacity) = pool.size();
            tell(hook, &Event::Built { arenas, capacity, took: start.elapsed() });
        }
        Err(error) => tell(hook, &Event::BuildFailed { error }),
    }
    built
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

/// The name of the class that every pool has.
pub(crate) const DEFAULT_CLASS: &str = "default";

/// What a builder is asked for, apart from the device.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Asked {
    pub(crate) access: Access,
    pub(crate) capacity: usize,
    pub(crate) max_capacity: Option<usize>,
    pub(crate) arena_size: Option<usize>,
    pub(crate) pages: Pages,
    pub(crate) numa: Numa,
}

/// How a capacity is laid out.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Layout {
    pub(crate) capacity: usize,
    /// Bytes of an arena, the last ones apart.
    pub(crate) arena: usize,
    /// From one arena's start to the next.
    pub(crate) stride: usize,
    pub(crate) arenas: Vec<usize>,
    /// The arenas that can come on top.
    pub(crate) more: Vec<usize>,
    pub(crate) page_sizes: Vec<usize>,
}

impl Asked {
    /// Lays it out and judges that. Mistakes in what was asked are errors at once; what device and system
    /// do not permit is gathered.
    pub(crate) fn examine(
        &self,
        infos: &[DeviceInfo],
        facts: &Facts,
    ) -> Result<(Layout, Findings), BuildError> {
        let all = std::slice::from_ref(self);
        let (mut layouts, found) = Self::examine_all(all, infos, facts, self.pages.candidates())?;
        Ok((layouts.swap_remove(0), found))
    }

    fn check_access(&self) -> Result<(), BuildError> {
        match self.access.conflict() {
            Some(reason) => Err(BuildError::Access { access: self.access, reason }),
            None => Ok(()),
        }
    }

    /// Lays the classes of one pool out and judges them together, so that limits hold against their sum.
    fn examine_all(
        all: &[Self],
        infos: &[DeviceInfo],
        facts: &Facts,
        (page_sizes, absent): Candidates,
    ) -> Result<(Vec<Layout>, Findings), BuildError> {
        let Some(&Self { pages, numa, .. }) = all.first() else {
            return Ok((Vec::new(), Findings::default()));
        };
        let (mut first, mut notes) = (Vec::new(), Vec::new());
        match pages {
            Pages::Require(_) => first.extend(absent),
            _ => notes.extend(absent),
        }
        let mut layouts = Vec::with_capacity(all.len());
        for asked in all {
            let (layout, wrong) = asked.lay_out(infos, &page_sizes)?;
            layouts.push(layout);
            // What is wrong with the wish for all classes is said once.
            if let Some(wrong) = wrong
                && !first.contains(&wrong)
            {
                first.push(wrong);
            }
        }
        let arenas: Vec<_> = layouts.iter().flat_map(|l| l.arenas.iter().copied()).collect();
        let more: Vec<_> = layouts.iter().flat_map(|l| l.more.iter().copied()).collect();
        let stride = layouts.iter().map(|l| l.arena).max().unwrap_or_default();
        let judge = |arenas: &[usize]| {
            let base_page = mmap::base_page();
            let page_sizes = &page_sizes[..];
            let there = false;
            let demand = Demand { infos, arenas, stride, page_sizes, base_page, numa, there };
            preflight::judge(&demand, facts)
        };
        let mut found = judge(&arenas);
        if !more.is_empty() {
            // What the maximum lacks is no reason not to begin.
            let most = judge(&[&arenas[..], &more].concat());
            let known = |p: &Problem| {
                let same = |q: &&Problem| std::mem::discriminant(*q) == std::mem::discriminant(p);
                found.problems.iter().chain(&found.notes).find(same).is_some()
            };
            let news: Vec<_> =
                most.problems.into_iter().chain(most.notes).filter(|p| !known(p)).collect();
            found.notes.extend(news);
        }
        found.problems.splice(0..0, first);
        found.notes.splice(0..0, notes);
        Ok((layouts, found))
    }

    /// Lays one class out, and says what is wrong with the arena size that was asked for.
    fn lay_out(
        &self,
        infos: &[DeviceInfo],
        page_sizes: &[usize],
    ) -> Result<(Layout, Option<Problem>), BuildError> {
        let info = shortest(infos)?;
        self.check_access()?;
        if self.capacity == 0 {
            return Err(BuildError::ZeroCapacity);
        }
        if self.capacity > MAX {
            return Err(BuildError::CapacityTooLarge { asked: self.capacity, max: MAX });
        }
        let page = page_sizes[0];
        let capacity = self.capacity.next_multiple_of(page);
        let max_capacity = self.max_capacity.unwrap_or(capacity);
        if self.max_capacity.is_some_and(|m| m < self.capacity) {
            return Err(BuildError::MaxCapacity { asked: max_capacity, capacity: self.capacity });
        }
        // What is to come on top, in whole pages.
        let more = max_capacity.saturating_sub(capacity) / page * page;
        let sizes = Sizes { capacity, more, page };
        let mut wrong = None;
        let arena = arena_stride(self.arena_size, sizes, info).unwrap_or_else(|p| {
            wrong = Some(p);
            // The rest is judged as if the size had been left open.
            arena_stride(None, sizes, info).unwrap_or_else(|_| capacity.next_power_of_two())
        });
        let count = capacity.div_ceil(arena) + more.div_ceil(arena);
        if count.saturating_mul(arena) > MOST_RESERVED && more > 0 {
            return Err(BuildError::CapacityTooLarge { asked: max_capacity, max: MOST_RESERVED });
        }
        if count > MAX_ARENAS {
            let problem =
                format!("makes {count} arenas of this capacity; the most is {MAX_ARENAS}");
            return Err(BuildError::ArenaSize { asked: arena, problem });
        }
        let cut = |bytes: usize| {
            let mut arenas = vec![arena; bytes / arena];
            arenas.extend(Some(bytes % arena).filter(|&rest| rest > 0));
            arenas
        };
        let (arenas, more, page_sizes) = (cut(capacity), cut(more), page_sizes.to_vec());
        let stride = apart(arena, count);
        Ok((Layout { capacity, arena, stride, arenas, more, page_sizes }, wrong))
    }
}

/// From one arena's start to the next: twice its length, so that what runs out of one meets pages without access
/// before it meets the next. Address space is all that it costs; a range that would be too long goes without.
fn apart(arena: usize, count: usize) -> usize {
    let twice = arena.saturating_mul(2);
    if count > 1 && twice.saturating_mul(count) <= MOST_RESERVED { twice } else { arena }
}

/// The device whose regions are shortest: it has its say in how long arenas are.
fn shortest(infos: &[DeviceInfo]) -> Result<&DeviceInfo, BuildError> {
    infos.iter().min_by_key(|i| i.max_mr_size).ok_or(BuildError::NoDevice)
}

/// What is wrong with registering arenas of a pool on one device more, beside what it is on already.
pub(crate) fn refuse_device(
    info: &DeviceInfo,
    arenas: &[usize],
    stride: usize,
) -> Option<BuildError> {
    let longest = arenas.iter().copied().max().unwrap_or(0);
    let mut problems = Vec::new();
    if longest as u64 > info.max_mr_size {
        let problem = format!(
            "is more than one memory region of {} may cover (max_mr_size {})",
            info.name,
            Bytes(info.max_mr_size)
        );
        problems.push(Problem::ArenaSize { asked: longest, problem });
    }
    problems.extend(preflight::device(info, arenas, stride, &limits::memlock()));
    problem::all(problems)
}

/// The most that is believed to be meant: half of what 47 bits of user addresses hold.
const MAX: usize = 1 << 46;
/// The most arenas that are believed to be meant; each costs two entries in a list here.
const MAX_ARENAS: usize = 1 << 20;

/// How many devices one pool can be on.
pub(crate) const MOST_DEVICES: usize = 16;

/// The most address space of a pool that grows: pages are numbered in 31 bits.
const MOST_RESERVED: usize = 1 << 42;

/// Bytes: of what is there at first, of what may come on top, and of a page.
#[derive(Clone, Copy)]
struct Sizes {
    capacity: usize,
    more: usize,
    page: usize,
}

/// Decides the power of two that arenas are long.
fn arena_stride(
    asked: Option<usize>,
    Sizes { capacity, more, page }: Sizes,
    info: &DeviceInfo,
) -> Result<usize, Problem> {
    let max = usize::try_from(info.max_mr_size).unwrap_or(usize::MAX);
    if max < page {
        return Err(Problem::MrTooSmall {
            device: info.name.clone(),
            page_size: page,
            max_mr_size: info.max_mr_size,
        });
    }
    let whole = capacity.next_power_of_two();
    let Some(asked) = asked else {
        let few = (capacity / 8).next_power_of_two().max(1 << 30);
        let fits = 1 << max.ilog2();
        return Ok(few.min(whole).min(fits).max(page));
    };
    let bad = |problem| Err(Problem::ArenaSize { asked, problem });
    let bytes = |n: usize| Bytes(n as u64);
    if !asked.is_power_of_two() {
        return bad("is not a power of two".to_owned());
    }
    if asked > MAX {
        return bad(format!("does not fit the address space; the most is {}", bytes(MAX)));
    }
    if asked < page {
        let base = mmap::base_page();
        let smaller = match asked >= base {
            true => format!(", or `Pages::Base`, whose pages are of {}", bytes(base)),
            false => String::new(),
        };
        return bad(format!(
            "is smaller than one page of {}: ask for at least that{smaller}",
            bytes(page)
        ));
    }
    if asked > max {
        return bad(format!(
            "is more than one memory region of {} may cover (max_mr_size {})",
            info.name,
            Bytes(info.max_mr_size)
        ));
    }
    // A larger stride than there are bytes would only waste address space.
    Ok(asked.min(whole.max(more.checked_next_power_of_two().unwrap_or(MAX))).max(page))
}

/// The error to give if pinning `bytes` more exceeds the limit; `None` when the numbers permit it.
/// `errno` is what the device said, when it has been asked.
pub(crate) fn memlock_refusal(
    info: &DeviceInfo,
    bytes: usize,
    errno: Option<i32>,
) -> Option<BuildError> {
    match preflight::memlock(info, bytes as u64, &limits::memlock())?.into() {
        BuildError::Memlock { asked, pinned, soft, hard, .. } => {
            Some(BuildError::Memlock { asked, pinned, soft, hard, errno })
        }
        other => Some(other),
    }
}

/// One access class as it is to be built; immutable.
pub(crate) struct Plan {
    pub(crate) name: String,
    /// At least one; and what each is.
    pub(crate) devices: Vec<Device>,
    pub(crate) infos: Vec<DeviceInfo>,
    pub(crate) access: Access,
    /// Bytes, whole pages.
    pub(crate) capacity: usize,
    /// From one arena's start to the next: a power of two.
    pub(crate) stride: usize,
    /// Each arena's length.
    pub(crate) arenas: Vec<usize>,
    /// Page sizes to try for each arena, best first.
    pub(crate) page_sizes: Vec<usize>,
    /// Bytes between the blocks of page-multiple slab classes (colouring).
    pub(crate) pad: usize,
    /// No thread uses its magazines without its lock, under which they are counted.
    pub(crate) count_hits: bool,
    pub(crate) hook: Option<EventHook>,
    pub(crate) start: Start,
    pub(crate) memory: Memory,
    /// Where each arena lies and what it is made of, if others decided that; else empty.
    pub(crate) fixed: Vec<Fixed>,
    pub(crate) growth: Growth,
    /// What no share has reserved.
    pub(crate) ranges: Vec<Range>,
    pub(crate) shares: Vec<SharePlan>,
    /// What buffers are watched with.
    pub(crate) watch: Watch,
    /// Asked before each step of mapping.
    pub(crate) mapping: StepHook,
}

impl Plan {
    /// How many arenas there can be at a time.
    pub(crate) fn slots(&self) -> usize {
        let fixed = self.fixed.iter().map(|f| f.slot + 1).max();
        fixed.unwrap_or(self.arenas.len() + self.growth.more.len())
    }

    /// The slot of one of the arenas that the pool begins with.
    pub(crate) fn slot_of(&self, arena: usize) -> usize {
        self.fixed.get(arena).map_or(arena, |f| f.slot)
    }

    /// Bytes of the arena of a slot.
    pub(crate) fn len_of(&self, slot: usize) -> usize {
        if !self.fixed.is_empty() {
            let arena = self.fixed.iter().position(|f| f.slot == slot);
            return arena.and_then(|i| self.arenas.get(i)).copied().unwrap_or(0);
        }
        let more = || self.growth.more.get(slot - self.arenas.len());
        self.arenas.get(slot).or_else(more).copied().unwrap_or(0)
    }

    /// The optional rights to ask for where an arena is on such pages.
    pub(crate) fn optional(&self, page_size: usize) -> Access {
        let mut optional = self.start.optional;
        if page_size <= mmap::base_page() {
            optional.remove(Access::HUGETLB);
        }
        optional
    }

    pub(crate) fn max_capacity(&self) -> usize {
        self.capacity + self.growth.more.iter().sum::<usize>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn info(max_mr_size: u64) -> DeviceInfo {
        let mut i = DeviceInfo::new("d", "t");
        i.max_mr_size = max_mr_size;
        i
    }

    #[test]
    fn default_arenas_are_few_and_fit_the_device() {
        let sizes = |capacity| Sizes { capacity, more: 0, page: 4096 };
        let stride = |cap, max| arena_stride(None, sizes(cap), &info(max)).expect("stride");
        assert_eq!(stride(6 << 20, u64::MAX), 8 << 20);
        assert_eq!(stride(1 << 30, u64::MAX), 1 << 30);
        assert_eq!(stride(4 << 30, u64::MAX), 1 << 30);
        assert_eq!(stride(512 << 30, u64::MAX), 64 << 30);
        assert_eq!(stride(64 << 20, 5 << 20), 4 << 20);
        assert_eq!(stride(4096, u64::MAX), 4096);
    }

    #[test]
    fn what_the_maximum_lacks_is_a_note() {
        let asked = |capacity, max_capacity| Asked {
            access: Access::LOCAL_WRITE,
            capacity,
            max_capacity,
            arena_size: None,
            pages: Pages::Base,
            numa: Numa::Any,
        };
        let mut facts = Facts::gather();
        (facts.memory.total, facts.memory.available) = (Some(1 << 30), Some(1 << 29));
        facts.cgroups.clear();
        let infos = [info(u64::MAX)];
        let examine = |a: Asked| a.examine(&infos, &facts).expect("it makes sense");
        let (layout, found) = examine(asked(100 << 20, Some(1 << 32)));
        assert!(found.problems.is_empty(), "{found:?}");
        assert!(matches!(found.notes[..], [Problem::Memory { asked, .. }] if asked == 1 << 32));
        assert_eq!((layout.arena, layout.stride), (128 << 20, 256 << 20));
        assert_eq!(layout.arenas, [100 << 20]);
        assert_eq!(layout.more.iter().sum::<usize>(), (1 << 32) - (100 << 20));
        assert!(layout.more[..31].iter().all(|&len| len == 128 << 20));
        let (layout, found) = examine(asked(100 << 20, None));
        assert!(found.notes.is_empty() && layout.more.is_empty());
        let (_, found) = examine(asked(1 << 32, Some(1 << 33)));
        assert_eq!((found.problems.len(), found.notes.len()), (1, 0), "said once");
    }

    #[test]
    fn an_arena_below_a_page_is_answered_with_the_pages_to_ask_for() {
        let sizes = |page| Sizes { capacity: 64 << 20, more: 0, page };
        let refusal = |asked, page| {
            let e = arena_stride(Some(asked), sizes(page), &info(u64::MAX)).expect_err("small");
            e.to_string()
        };
        let base = mmap::base_page();
        let text = refusal(base, 2 << 20);
        for part in [
            "is smaller than one page of 2 MiB: ",
            "`Pages::Base`",
            &Bytes(base as u64).to_string(),
        ] {
            assert!(text.contains(part), "{part:?} in {text}");
        }
        assert!(!refusal(base / 2, base).contains("Pages::Base"), "that would not help");
        let text = refusal(1 << 50, base);
        assert!(text.contains("the most is 64 TiB"), "{text}");
        let e = arena_stride(Some(8 << 20), sizes(base), &info(4 << 20)).expect_err("large");
        assert!(e.to_string().contains("(max_mr_size 4 MiB)"), "{e}");
    }

    #[test]
    fn limits_hold_against_the_sum_of_all_classes() {
        let mut facts = Facts::gather();
        facts.memlock =
            limits::Memlock { soft: 8 << 20, hard: 8 << 20, pinned: 0, locked: 0, exempt: false };
        let mut info = info(u64::MAX);
        info.pinning = crate::device::Pinning::Pinned;
        let class = |access| Asked {
            access,
            capacity: 5 << 20,
            max_capacity: None,
            arena_size: None,
            pages: Pages::Base,
            numa: Numa::Any,
        };
        let two = [class(Access::LOCAL_WRITE), class(Access::REMOTE_READ)];
        let infos = [info];
        let (_, one) = two[0].examine(&infos, &facts).expect("laid out");
        assert_eq!(one.problems, [], "one fits");
        let pages = Pages::Base.candidates();
        let (layouts, both) = Asked::examine_all(&two, &infos, &facts, pages).expect("laid out");
        assert_eq!(layouts.len(), 2);
        let [Problem::Memlock { asked, .. }] = both.problems[..] else { panic!("{both:?}") };
        assert_eq!(asked, 10 << 20);
        // As when the first lies in memory that is there already.
        let (own, other) = (one.clone(), one);
        let all = other.with(own, &infos, &[5 << 20, 5 << 20], 8 << 20, &facts);
        let [Problem::Memlock { asked, .. }] = all.problems[..] else { panic!("{all:?}") };
        assert_eq!(asked, 10 << 20);
    }

    #[test]
    fn asked_arenas_are_refused_not_cut() {
        let sizes = Sizes { capacity: 64 << 20, more: 0, page: 4096 };
        let stride = |asked| arena_stride(Some(asked), sizes, &info(4 << 20));
        assert_eq!(stride(4 << 20).expect("fits"), 4 << 20);
        for bad in [0, 2048, 3 << 20, 8 << 20] {
            assert!(matches!(stride(bad), Err(Problem::ArenaSize { .. })), "{bad}");
        }
    }
}
