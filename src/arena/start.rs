//! Bringing the arenas of a plan up, on several threads: map → bind → fault in → register.
//!
//! Mapping costs next to nothing and decides what a later arena can have, so all arenas are mapped first,
//! in order, by the caller. Then every thread takes the next piece of work from one queue: a chunk of
//! whole pages to fault in, or an arena to register, which is queued, before all chunks, by whoever
//! faulted its last chunk in. The first error ends the work: nothing more is taken from the queue, what
//! is under way is waited for, and what came of it is undone with the rest, by dropping the [`Arenas`] or,
//! where those stand already, by letting go of the one.

use std::{
    collections::VecDeque,
    io,
    sync::atomic::{AtomicBool, Ordering::Relaxed},
    thread,
    time::{Duration, Instant},
};

use parking_lot::{Condvar, Mutex};

use super::{Arena, Arenas, Calls, Rail, Region, Told};
use crate::{
    access::Access,
    config::{Placement, Plan, Progress, Stage, memlock_refusal},
    device::{DeviceInfo, MrRequest, Registration},
    error::{BuildError, RegisterError},
    problem,
    sys::{
        mmap::{self, Reservation},
        numa::{self, Mode, NodeSet},
    },
};

/// Bytes that a thread faults in at a time, if pages are not larger: long against a system call, and
/// short against a whole arena, so that threads end together and a register call, which may need the
/// address space to itself, does not wait long.
const CHUNK: usize = 4 << 20;

/// How an arena comes up beside a pool at work: on the caller's thread alone, and no event told but by the
/// caller.
pub(super) struct Quietly<'a> {
    /// Looked at between two pieces of work.
    pub(super) stop: &'a AtomicBool,
    pub(super) told: &'a mut Vec<Told>,
}

/// Brings the arenas of some slots up, or as many as stood when the first error came, or when it was told to
/// stop. Beside a pool at work, nothing is left of those that then are not in the list; else that goes with
/// the reservation.
pub(super) fn run(
    arenas: &mut Arenas,
    slots: &[usize],
    quietly: Option<Quietly<'_>>,
) -> Result<(), BuildError> {
    let Arenas { list, reservation, rails, plan, calls } = arenas;
    let (stop, told) = quietly.map_or((None, None), |q| (Some(q.stop), Some(q.told)));
    let threads = if stop.is_some() { 1 } else { plan.start.threads };
    let start = Start {
        plan,
        slots,
        reservation,
        rails: rails.iter().enumerate().filter_map(|(i, r)| Some((i, r.as_ref()?))).collect(),
        stop,
        told: told.map(Mutex::new),
        state: Mutex::new(State {
            tasks: VecDeque::new(),
            coming: Vec::with_capacity(slots.len()),
            list,
            calls,
            faulted_in: 0,
            registered: 0,
            regions: 0,
            error: None,
            panicked: false,
        }),
        changed: Condvar::new(),
    };
    let mut failed = None;
    for index in 0..slots.len() {
        let mut state = start.state.lock();
        let (coming, tried) = match start.map(&state, index, 0, None) {
            Ok(mapped) => mapped,
            Err(e) => {
                failed = Some(e);
                break;
            }
        };
        state.coming.push(coming);
        start.queue_chunks(&mut state, index);
        drop(state);
        start.tell_missing(index, tried);
    }
    if failed.is_none() {
        start.work_on(threads);
    }
    let State { coming, list, error, .. } = start.state.into_inner();
    for (&slot, coming) in slots.iter().zip(&coming).filter(|_| stop.is_some()) {
        if coming.mapped && list.iter().all(|a| a.slot != slot) {
            // SAFETY: mapped here, in no register call that succeeded, and nobody else was told of it.
            unsafe { reservation.unback(slot * plan.stride, plan.len_of(slot)) };
        }
    }
    list.sort_unstable_by_key(|a| a.slot);
    failed.or(error).map_or(Ok(()), Err)
}

struct Start<'a> {
    plan: &'a Plan,
    /// The slots to fill. What is called an index here is a place in this list.
    slots: &'a [usize],
    reservation: &'a Reservation,
    /// The devices, each with its rail.
    rails: Vec<(usize, &'a Rail)>,
    stop: Option<&'a AtomicBool>,
    /// Where events go that may not be told here.
    told: Option<Mutex<&'a mut Vec<Told>>>,
    state: Mutex<State<'a>>,
    changed: Condvar,
}

struct State<'a> {
    tasks: VecDeque<Task>,
    /// One for each arena that was mapped.
    coming: Vec<Coming>,
    /// Those that are registered, on one device at least.
    list: &'a mut Vec<Arena>,
    calls: &'a mut Calls,
    faulted_in: u64,
    registered: u64,
    /// Memory regions that were made here.
    regions: usize,
    error: Option<BuildError>,
    panicked: bool,
}

#[derive(Clone, Copy)]
enum Task {
    FaultIn { index: usize, offset: usize, len: usize, page: usize },
    Register { index: usize, rail: usize },
}

/// An arena on its way.
struct Coming {
    mapped: bool,
    /// Its place in the plan's page sizes.
    candidate: usize,
    /// Chunks that are queued or under way.
    left: usize,
    /// Bytes in memory.
    faulted_in: u64,
    failed: Option<io::Error>,
    map_time: Duration,
    fault_in_time: Duration,
}

/// Why a page size was not to be had for an arena.
struct Tried {
    page_size: usize,
    free_pages: Option<u64>,
    step: &'static str,
    /// `None` when it was not tried, since the node lacks the pages.
    source: Option<io::Error>,
}

impl Start<'_> {
    fn work_on(&self, threads: usize) {
        let pieces = self.state.lock().tasks.len();
        if threads.min(pieces) <= 1 {
            return self.work();
        }
        thread::scope(|scope| {
            let helpers: Vec<_> = (1..threads.min(pieces))
                // With fewer threads than wished it takes longer, and that is all.
                .map_while(|_| thread::Builder::new().spawn_scoped(scope, || self.work()).ok())
                .collect();
            self.work();
            for helper in helpers {
                if let Err(panic) = helper.join() {
                    std::panic::resume_unwind(panic);
                }
            }
        });
    }

    /// What each thread does, until all arenas stand or one cannot.
    fn work(&self) {
        let _wake = WakeOthersOnPanic(self);
        let mut state = self.state.lock();
        let all = self.slots.len() * self.rails.len();
        let stopped = || self.stop.is_some_and(|s| s.load(Relaxed));
        while state.error.is_none() && !state.panicked && state.regions < all && !stopped() {
            let Some(task) = state.tasks.pop_front() else {
                // Others are at work, and what comes of it may be more work.
                self.changed.wait(&mut state);
                continue;
            };
            drop(state);
            match task {
                Task::FaultIn { index, offset, len, page } => {
                    self.fault_in(index, offset, len, page);
                }
                Task::Register { index, rail } => self.register(index, rail),
            }
            state = self.state.lock();
        }
    }

    fn place(&self, index: usize) -> (usize, usize) {
        let slot = self.slots[index];
        (slot * self.plan.stride, self.plan.len_of(slot))
    }

    /// Maps an arena with the best page size to be had, from the `candidate`-th. Says what a better one
    /// lacked, too.
    fn map(
        &self,
        state: &State<'_>,
        index: usize,
        candidate: usize,
        mut tried: Option<Tried>,
    ) -> Result<(Coming, Option<Tried>), BuildError> {
        let sizes = &self.plan.page_sizes;
        let fixed = self.plan.fixed.get(index).map(|f| f.page_size);
        for (candidate, &page_size) in sizes.iter().enumerate().skip(candidate) {
            if fixed.is_some_and(|p| p != page_size) {
                continue;
            }
            let start = Instant::now();
            match self.map_pages(state, index, page_size) {
                Ok(()) => {
                    let coming = Coming {
                        mapped: true,
                        candidate,
                        left: 0,
                        faulted_in: 0,
                        failed: None,
                        map_time: start.elapsed(),
                        fault_in_time: Duration::ZERO,
                    };
                    return Ok((coming, tried));
                }
                Err((step, source)) => {
                    let free_pages = self.free_pages(page_size);
                    tried = Some(Tried { page_size, free_pages, step, source });
                }
            }
        }
        Err(self.not_backed(index, tried))
    }

    /// Maps with one page size and binds.
    fn map_pages(
        &self,
        state: &State<'_>,
        index: usize,
        page: usize,
    ) -> Result<(), (&'static str, Option<io::Error>)> {
        let (offset, len) = self.place(index);
        // Bound to a node without memory, a fault would have the kernel kill processes.
        if let Placement::On(node) = self.plan.start.placement
            && let Some(free) = numa::free_on(node, page)
            && free < state.promised(self.plan, self.slots, page) + len as u64
        {
            return Err(("mapping", None));
        }
        // SAFETY: the arena's range belongs to it alone and nobody knows of it yet; offset and length are
        // multiples of the largest candidate page.
        unsafe { self.reservation.map_pages(offset, len, page) }
            .map_err(|e| ("mapping", Some(e)))?;
        self.bind(offset, len, page).map_err(|e| {
            // SAFETY: mapped just now; nobody was told of it.
            unsafe { self.reservation.unback(offset, len) };
            ("binding to nodes", Some(e))
        })
    }

    fn bind(&self, offset: usize, len: usize, page: usize) -> io::Result<()> {
        let (nodes, mode) = match &self.plan.start.placement {
            Placement::Anywhere => return Ok(()),
            Placement::Near(node) => (NodeSet::of([*node]), Mode::Preferred),
            Placement::On(node) => (NodeSet::of([*node]), Mode::Bind),
            Placement::Interleave(nodes) => (NodeSet::of(nodes.iter().copied()), Mode::Interleave),
        };
        match self.reservation.bind(offset, len, page, &nodes, mode) {
            // A wish; and sandboxes bar the call where there may be nothing to choose.
            Err(_) if mode == Mode::Preferred || numa::nodes().len() == 1 => Ok(()),
            done => done,
        }
    }

    /// Free hugepages of a size where this pool may have them.
    fn free_pages(&self, page: usize) -> Option<u64> {
        if page <= mmap::base_page() {
            return None;
        }
        let anywhere = numa::unpromised_hugepages(page)?;
        let Placement::On(node) = self.plan.start.placement else { return Some(anywhere) };
        numa::free_on(node, page).map(|bytes| anywhere.min(bytes / page as u64))
    }

    /// An arena as errors and events have it: which, of how many, how long.
    fn named(&self, index: usize) -> (usize, usize, usize) {
        let first = self.plan.arenas.len();
        let arenas = if self.stop.is_some() { self.plan.slots() } else { first };
        (self.slots[index], arenas, self.place(index).1)
    }

    fn not_backed(&self, index: usize, tried: Option<Tried>) -> BuildError {
        let (index, arenas, len) = self.named(index);
        let unsupported = || io::ErrorKind::Unsupported.into();
        let Some(Tried { page_size, free_pages, step, source }) = tried else {
            let (step, source) = ("mapping", unsupported());
            return BuildError::Back {
                arena: index,
                arenas,
                len,
                page_size: 0,
                free_pages: None,
                step,
                source,
            };
        };
        if let Placement::On(node) = self.plan.start.placement {
            let free = numa::free_on(node, page_size);
            let errno = source.as_ref().and_then(io::Error::raw_os_error);
            let problem = match source {
                None => format!("arena {index} of {arenas} does not fit"),
                Some(e) => format!("{step} arena {index} of {arenas} failed: {e}"),
            };
            let has = numa::hugepages_on(node, page_size);
            let lacking = (len as u64).saturating_sub(free.unwrap_or(0)) / page_size as u64;
            let fix = problem::node_fix(node, page_size, has.map(|(all, _)| all), lacking);
            let needed = len as u64;
            return BuildError::Node { node, problem, fix, needed, page_size, free, errno };
        }
        let source = source.unwrap_or_else(unsupported);
        BuildError::Back { arena: index, arenas, len, page_size, free_pages, step, source }
    }

    fn queue_chunks(&self, state: &mut State<'_>, index: usize) {
        let (start, len) = self.place(index);
        let coming = &mut state.coming[index];
        let page = self.plan.page_sizes[coming.candidate];
        let chunk = CHUNK.max(page);
        for offset in (0..len).step_by(chunk) {
            let len = chunk.min(len - offset);
            state.tasks.push_back(Task::FaultIn { index, offset: start + offset, len, page });
            coming.left += 1;
        }
        self.changed.notify_all();
    }

    fn fault_in(&self, index: usize, offset: usize, len: usize, page: usize) {
        let start = Instant::now();
        let done = self.reservation.fault_in(offset, len, page);
        let took = start.elapsed();
        let ok = done.is_ok();
        let mut missing = None;
        let mut state = self.state.lock();
        let State { tasks, coming, faulted_in, .. } = &mut *state;
        let coming = &mut coming[index];
        coming.left -= 1;
        coming.fault_in_time += took;
        match done {
            Ok(()) => {
                coming.faulted_in += len as u64;
                *faulted_in += len as u64;
            }
            Err(e) => {
                coming.failed.get_or_insert(e);
                let queued = tasks.len();
                tasks.retain(|t| !matches!(*t, Task::FaultIn { index: i, .. } if i == index));
                coming.left -= queued - tasks.len();
            }
        }
        if coming.left == 0 {
            match coming.failed.take() {
                None => {
                    for &(rail, _) in self.rails.iter().rev() {
                        tasks.push_front(Task::Register { index, rail });
                        self.changed.notify_one();
                    }
                }
                Some(e) => missing = self.start_anew(&mut state, index, e),
            }
        }
        drop(state);
        self.tell_missing(index, missing);
        if ok {
            self.tell(Stage::FaultIn);
        }
    }

    /// Backs an arena, whose pages could not all be faulted in, with the next page size.
    fn start_anew(&self, state: &mut State<'_>, index: usize, e: io::Error) -> Option<Tried> {
        let (offset, len) = self.place(index);
        let Coming { candidate, faulted_in, .. } = state.coming[index];
        let page_size = self.plan.page_sizes[candidate];
        let step = "faulting in";
        // SAFETY: no chunk of the arena is under way (`left` is 0), and nobody else was told of it.
        unsafe { self.reservation.unback(offset, len) };
        let free_pages = self.free_pages(page_size);
        state.faulted_in -= faulted_in;
        // What it had is no longer promised to it.
        state.coming[index].faulted_in = len as u64;
        state.coming[index].mapped = false;
        let tried = Tried { page_size, free_pages, step, source: Some(e) };
        match self.map(state, index, candidate + 1, Some(tried)) {
            Ok((coming, tried)) => {
                state.coming[index] = coming;
                self.queue_chunks(state, index);
                tried
            }
            Err(error) => {
                self.fail(state, error);
                None
            }
        }
    }

    fn tell_missing(&self, index: usize, tried: Option<Tried>) {
        if let Some(Tried { page_size, free_pages, .. }) = tried {
            let (arena, _, len) = self.named(index);
            let missing = Told::HugepagesMissing { arena, len, page_size, free_pages };
            match &self.told {
                Some(told) => told.lock().push(missing),
                None => missing.tell(self.plan.hook.as_ref()),
            }
        }
    }

    fn fail(&self, state: &mut State<'_>, error: BuildError) {
        state.error.get_or_insert(error);
        self.changed.notify_all();
    }

    fn register(&self, index: usize, rail: usize) {
        let (offset, len) = self.place(index);
        let Some(&(_, Rail { device, info })) = self.rails.iter().find(|r| r.0 == rail) else {
            return;
        };
        let (page_size, map_time, fault_in_time) = {
            let coming = &self.state.lock().coming[index];
            (self.plan.page_sizes[coming.candidate], coming.map_time, coming.fault_in_time)
        };
        let node = self.reservation.node_of(offset, len, page_size);
        let start = Instant::now();
        // SAFETY: `offset` is inside the reservation, by construction of its length.
        let addr = unsafe { self.reservation.base().add(offset) };
        let ask = |access| {
            self.state.lock().calls.count += 1;
            // SAFETY: the range is mapped and all of it faulted in (the last chunk queued this). It is
            // unmapped by `let_go`, after deregistration, or, if no call succeeds, by `run`.
            unsafe { device.registrar().register(&MrRequest { addr, len, page_size, access }) }
        };
        let (done, _) = with_or_without(self.plan.access, self.plan.optional(page_size), ask);
        let time = start.elapsed();
        let mut state = self.state.lock();
        state.calls.took(time);
        match done {
            Ok(registration) => {
                // Also after an error elsewhere: what is on the list is what is undone.
                let region = Region { rail, registration, time };
                let slot = self.slots[index];
                match state.list.iter_mut().find(|a| a.slot == slot) {
                    Some(arena) => arena.regions.push(region),
                    None => state.list.push(Arena {
                        slot,
                        len,
                        page_size,
                        node,
                        map_time,
                        fault_in_time,
                        regions: vec![region],
                        stuck: false,
                    }),
                }
                state.regions += 1;
                state.registered += len as u64;
                if state.regions == self.slots.len() * self.rails.len() {
                    self.changed.notify_all();
                }
                drop(state);
                self.tell(Stage::Register);
            }
            Err(source) => {
                let (slot, arenas, _) = self.named(index);
                let error = match source {
                    Some(source) => explain(info, slot, arenas, len, source),
                    None => super::panicked(slot, arenas, len),
                };
                self.fail(&mut state, error);
            }
        }
    }

    /// Tells how far a stage is. The numbers are read under the hook's lock, so that they come in order.
    fn tell(&self, stage: Stage) {
        let Some(hook) = &self.plan.start.progress else { return };
        let mut hook = hook.lock();
        let state = self.state.lock();
        let bytes_done = match stage {
            Stage::FaultIn => state.faulted_in,
            Stage::Register => state.registered,
        };
        drop(state);
        // Each byte is registered once on each device, and counts in parts.
        let bytes_done = match stage {
            Stage::FaultIn => bytes_done,
            Stage::Register => bytes_done / self.rails.len() as u64,
        };
        let (before, total) = (self.plan.start.bytes_before, self.plan.start.bytes_total);
        let bytes_done = bytes_done + before as u64;
        hook(Progress { stage, bytes_done, bytes_total: total as u64 });
    }
}

/// Asks for required and optional rights together; where the device does not know one of those, for the
/// required ones alone. Says how many calls that were. (`None` as an error is for callers that catch panics.)
pub(super) fn with_or_without(
    required: Access,
    optional: Access,
    mut ask: impl FnMut(Access) -> Result<Registration, RegisterError>,
) -> (Result<Registration, Option<RegisterError>>, u64) {
    match ask(required | optional) {
        Err(e)
            if !optional.is_empty()
                && matches!(e.raw_os_error(), Some(libc::EINVAL | libc::EOPNOTSUPP)) =>
        {
            (ask(required).map_err(Some), 2)
        }
        done => (done.map_err(Some), 1),
    }
}

/// Turns a refusal into the error that says most: ENOMEM is put down to the memlock limit only when the
/// numbers agree.
pub(super) fn explain(
    info: &DeviceInfo,
    arena: usize,
    arenas: usize,
    len: usize,
    source: RegisterError,
) -> BuildError {
    let errno = source.raw_os_error();
    if errno == Some(libc::ENOMEM)
        && let Some(e) = memlock_refusal(info, len, errno)
    {
        return e;
    }
    BuildError::Register { arena, arenas, source }
}

impl State<'_> {
    /// Bytes that arenas of a page size have yet to take.
    fn promised(&self, plan: &Plan, slots: &[usize], page: usize) -> u64 {
        let yet = |(&slot, c): (&usize, &Coming)| {
            let rest = plan.len_of(slot) as u64 - c.faulted_in;
            if plan.page_sizes[c.candidate] == page { rest } else { 0 }
        };
        slots.iter().zip(&self.coming).map(yet).sum()
    }
}

/// A registrar or a hook that panics takes its thread along; the others must not wait for it.
struct WakeOthersOnPanic<'a, 'b>(&'a Start<'b>);

impl Drop for WakeOthersOnPanic<'_, '_> {
    fn drop(&mut self) {
        if thread::panicking() {
            self.0.state.lock().panicked = true;
            self.0.changed.notify_all();
        }
    }
}
