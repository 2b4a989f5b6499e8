//! What was asked for, and the plan that it becomes: sizes, rights and devices, checked once and never changed.

use super::{
    Candidates, EventHook, Fixed, Growth, Memory, Numa, Pages, Range, SharePlan, Start, Watch,
};
use crate::{
    access::Access,
    device::{Device, DeviceInfo},
    error::{BuildError, Bytes},
    preflight::{self, Demand, Findings},
    problem::{self, Problem},
    sys::{
        limits::{self, Facts},
        mapping_faults::StepHook,
        mmap,
    },
};

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

    pub(super) fn check_access(&self) -> Result<(), BuildError> {
        match self.access.conflict() {
            Some(reason) => Err(BuildError::Access { access: self.access, reason }),
            None => Ok(()),
        }
    }

    /// Lays the classes of one pool out and judges them together, so that limits hold against their sum.
    pub(super) fn examine_all(
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
pub(super) fn apart(arena: usize, count: usize) -> usize {
    let twice = arena.saturating_mul(2);
    if count > 1 && twice.saturating_mul(count) <= MOST_RESERVED { twice } else { arena }
}

/// The device whose regions are shortest: it has its say in how long arenas are.
pub(super) fn shortest(infos: &[DeviceInfo]) -> Result<&DeviceInfo, BuildError> {
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
pub(super) const MAX: usize = 1 << 46;
/// The most arenas that are believed to be meant; each costs two entries in a list here.
pub(super) const MAX_ARENAS: usize = 1 << 20;

/// How many devices one pool can be on.
pub(crate) const MOST_DEVICES: usize = 16;

/// The most address space of a pool that grows: pages are numbered in 31 bits.
pub(super) const MOST_RESERVED: usize = 1 << 42;

/// Bytes: of what is there at first, of what may come on top, and of a page.
#[derive(Clone, Copy)]
pub(super) struct Sizes {
    pub(super) capacity: usize,
    pub(super) more: usize,
    pub(super) page: usize,
}

/// Decides the power of two that arenas are long.
pub(super) fn arena_stride(
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
