//! Finds out what a device's memory windows hold, by trying: binds one on a queue pair that is connected
//! to another of the same device, and has the other end do what must be refused. Leaves the words for what
//! is found to `device::window`.

use crate::device::{Device, Guarantees, LeaseSupport};

impl Device {
    /// Finds out what leases on this device can be relied on for; see [`Guarantees`]. The software device
    /// is known; a verbs device is tried, once a process, which moves a few bytes from one of its ports to itself,
    /// registers three pages for as long, and may take some tenths of a second.
    ///
    /// ```
    /// use pinpool::{Device, Guarantees};
    ///
    /// let support = Device::soft().lease_support();
    /// assert!(support.held.contains(Guarantees::REVOCATION | Guarantees::RANGE));
    /// println!("{support}");
    /// ```
    pub fn lease_support(&self) -> LeaseSupport {
        if self.as_soft().is_some() {
            // Its peers come through no queue pair.
            return LeaseSupport {
                windows: true,
                held: Guarantees::all() - Guarantees::QUEUE_PAIR,
                lacking: Guarantees::QUEUE_PAIR,
                why: None,
            };
        }
        #[cfg(any(feature = "rdma-sys", feature = "rdma-mummy-sys"))]
        if let Some(verbs) = self.as_verbs() {
            return trial::once(self, verbs);
        }
        LeaseSupport::none(
            "its registrar has no windows; lease through the device that it wraps, if that is one",
        )
    }
}

#[cfg(any(feature = "rdma-sys", feature = "rdma-mummy-sys"))]
mod trial {
    use std::{
        alloc::{self, Layout},
        collections::BTreeMap,
        ptr::NonNull,
        thread,
        time::{Duration, Instant},
    };

    use parking_lot::Mutex;

    use super::{Device, Guarantees, LeaseSupport};
    use crate::{
        access::{Access, RKey, Sge},
        device::VerbsDevice,
        loopback::{Completion, Operation, Pair, Request, Status},
        sys::{
            verbs::Mr,
            window::{QpPtr, Step, Window},
        },
    };

    const PAGE: usize = 4096;
    /// The window lies inside the second of three pages, and ends where nothing else does.
    const WINDOW: (usize, usize) = (PAGE + 64, 1000);
    /// Whatever is seen has to have happened in this time; a device answers itself in microseconds.
    const PATIENCE: Duration = Duration::from_secs(5);

    /// What was found, by the devices' names.
    static KNOWN: Mutex<BTreeMap<String, LeaseSupport>> = Mutex::new(BTreeMap::new());

    /// Tries, unless that was done on this device. What could not be tried is tried again.
    pub(super) fn once(device: &Device, verbs: &VerbsDevice) -> LeaseSupport {
        // Held meanwhile, so that threads do not try at the same time.
        let mut known = KNOWN.lock();
        let name = device.info().name;
        if let Some(support) = known.get(&name) {
            return support.clone();
        }
        let support = run(device, verbs);
        if !support.windows || support.untried().is_empty() {
            known.insert(name, support.clone());
        }
        support
    }

    fn run(device: &Device, verbs: &VerbsDevice) -> LeaseSupport {
        let found = Trial::new(device, verbs).and_then(|mut trial| trial.all());
        match found {
            Ok(support) => support,
            Err(Obstacle::NoWindows(why)) => LeaseSupport::none(why),
            Err(Obstacle::Untried(why)) => LeaseSupport {
                windows: true,
                held: Guarantees::empty(),
                lacking: Guarantees::empty(),
                why: Some(format!("not tried: {why}")),
            },
        }
    }

    enum Obstacle {
        NoWindows(String),
        Untried(String),
    }

    fn untried(e: impl ToString) -> Obstacle {
        Obstacle::Untried(e.to_string())
    }

    /// A few registered pages.
    struct Memory {
        mr: Mr,
        at: NonNull<u8>,
    }

    const LAYOUT: Layout = match Layout::from_size_align(3 * PAGE, PAGE) {
        Ok(layout) => layout,
        Err(_) => panic!("a page is a power of two"),
    };

    impl Memory {
        fn new(verbs: &VerbsDevice) -> Result<Self, Obstacle> {
            // SAFETY: the layout's size is not 0.
            let at = NonNull::new(unsafe { alloc::alloc_zeroed(LAYOUT) });
            let at = at.ok_or_else(|| untried("no memory"))?;
            // All rights, so that what is refused is refused by the window.
            let access =
                Access::LOCAL_WRITE | Access::REMOTE_READ | Access::REMOTE_WRITE | Access::MW_BIND;
            // SAFETY: allocated above, and freed by `drop` only, after it was deregistered.
            let mr = unsafe { Mr::register(verbs.shared_pd(), at, LAYOUT.size(), access) };
            match mr {
                Ok(mr) => Ok(Self { mr, at }),
                Err(e) => {
                    // SAFETY: allocated above with this layout, and not registered.
                    unsafe { alloc::dealloc(at.as_ptr(), LAYOUT) };
                    let invalid = e.source.raw_os_error() == Some(libc::EINVAL);
                    let why = format!("registering with MW_BIND: {e}");
                    Err(if invalid { Obstacle::NoWindows(why) } else { untried(why) })
                }
            }
        }

        fn addr(&self, offset: usize) -> u64 {
            self.at.as_ptr() as u64 + offset as u64
        }

        /// The byte there, which the device may just have written.
        fn byte(&self, offset: usize) -> u8 {
            assert!(offset < LAYOUT.size());
            // SAFETY: inside the allocation (asserted), whose bytes are initialised; volatile, since the
            // device writes them.
            unsafe { self.at.as_ptr().add(offset).read_volatile() }
        }

        fn set(&mut self, offset: usize, byte: u8) {
            assert!(offset < LAYOUT.size());
            // SAFETY: as in `byte`.
            unsafe { self.at.as_ptr().add(offset).write_volatile(byte) }
        }
    }

    impl Drop for Memory {
        fn drop(&mut self) {
            // Else the pages stay: the device may still use them.
            if self.mr.deregister().is_ok() {
                // SAFETY: allocated with this layout; the device has let go of it.
                unsafe { alloc::dealloc(self.at.as_ptr(), LAYOUT) };
            }
        }
    }

    struct Trial {
        // Dropped in this order: what may be bound to the memory is unbound by each attempt itself.
        pair: Pair,
        other: Pair,
        memory: Memory,
        device: Device,
    }

    /// What the peer does through a window.
    #[derive(Clone, Copy)]
    enum Deed {
        Write,
        Read,
    }

    impl Trial {
        fn new(device: &Device, verbs: &VerbsDevice) -> Result<Self, Obstacle> {
            let window = Window::new(verbs.shared_pd());
            let mut window =
                window.map_err(|e| Obstacle::NoWindows(format!("none can be allocated: {e}")))?;
            window.dealloc().map_err(untried)?;
            let mut pair = Pair::connect(device).map_err(untried)?;
            let mut other = Pair::connect(device).map_err(untried)?;
            pair.set_timeout(PATIENCE);
            other.set_timeout(PATIENCE);
            Ok(Self { pair, other, memory: Memory::new(verbs)?, device: device.clone() })
        }

        fn all(&mut self) -> Result<LeaseSupport, Obstacle> {
            let (start, len) = WINDOW;
            let write = Access::REMOTE_WRITE;
            // First that anything works at all.
            if self.refused(write, Deed::Write, start, false, false)?
                || self.refused(Access::REMOTE_READ, Deed::Read, start + len - 1, false, false)?
            {
                return Err(Obstacle::NoWindows("a peer is refused what was leased to it".into()));
            }
            let before = self.refused(write, Deed::Write, start - 1, false, false)?;
            let behind = self.refused(write, Deed::Write, start + len, false, false)?;
            let read = self.refused(write, Deed::Read, start, false, false)?;
            let written = self.refused(Access::REMOTE_READ, Deed::Write, start, false, false)?;
            let revoked = self.refused(write, Deed::Write, start, true, false)?;
            let elsewhere = self.refused(write, Deed::Write, start, false, true)?;
            let mut held = Guarantees::empty();
            held.set(Guarantees::REVOCATION, revoked);
            held.set(Guarantees::RANGE, before && behind);
            held.set(Guarantees::RIGHTS, read && written);
            held.set(Guarantees::QUEUE_PAIR, elsewhere);
            // Not to be seen in any one trial.
            held.set(Guarantees::DRAINED, self.device.info().transport != "rxe");
            let lacking = Guarantees::all() - held;
            Ok(LeaseSupport { windows: true, held, lacking, why: None })
        }

        /// Leases the window with `rights` and has the peer do one deed of one byte at `offset`, after
        /// invalidating it if `revoked`, through a queue pair that it was not bound through if `elsewhere`.
        /// Says whether it was refused, and nothing was written.
        fn refused(
            &mut self,
            rights: Access,
            deed: Deed,
            offset: usize,
            revoked: bool,
            elsewhere: bool,
        ) -> Result<bool, Obstacle> {
            const MARK: u8 = 0xa5;
            let verbs = self.device.as_verbs().ok_or_else(|| untried("no verbs device"))?;
            // A refusal leaves queue pairs in error.
            self.pair.reset().map_err(untried)?;
            self.other.reset().map_err(untried)?;
            let qp = self.pair.responder().ok_or_else(|| untried("no queue pair"))?;
            self.memory.set(offset, 0);
            self.memory.set(0, MARK);
            let region = self.memory.mr.ptr().ok_or_else(|| untried("not registered"))?;
            let mut window = Window::new(verbs.shared_pd()).map_err(untried)?;
            let (addr, len) = (self.memory.addr(WINDOW.0), WINDOW.1 as u64);
            let bind = Step::Bind { window: &mut window, region, addr, len, rights };
            // SAFETY: the pair keeps the queue pair, both are of the device's PD, the region is registered
            // for it, and the window is new.
            unsafe { posted(qp, bind) }.map_err(|e| match e {
                // The device does not do what it says.
                Some(status) => Obstacle::NoWindows(format!("binding ended in status {status}")),
                None => untried("binding does not complete"),
            })?;
            let rkey = window.rkey();
            if revoked {
                // SAFETY: as above; it was bound just now.
                let done = unsafe { posted(qp, Step::Invalidate(rkey)) };
                done.map_err(|_| untried("invalidating does not complete"))?;
            }
            let outcome = self.attempt(deed, offset, rkey, elsewhere);
            // Whatever became of the queue pair.
            window.dealloc().map_err(untried)?;
            let status = outcome?;
            let written = matches!(deed, Deed::Write) && self.memory.byte(offset) == MARK;
            Ok(status != Status::SUCCESS && !written)
        }

        /// One byte, from or to the first of the pages; says how it ended.
        fn attempt(
            &mut self,
            deed: Deed,
            offset: usize,
            rkey: RKey,
            elsewhere: bool,
        ) -> Result<Status, Obstacle> {
            let pair = if elsewhere { &mut self.other } else { &mut self.pair };
            let remote_addr = self.memory.addr(offset);
            let operation = match deed {
                Deed::Write => Operation::Write { remote_addr, rkey },
                Deed::Read => Operation::Read { remote_addr, rkey },
            };
            let local = match deed {
                Deed::Write => self.memory.addr(0),
                Deed::Read => self.memory.addr(8),
            };
            let sge = Sge { addr: local, length: 1, lkey: self.memory.mr.lkey() };
            // SAFETY: the memory is the trial's own, and registered until after the pairs are gone; it is
            // looked at by volatile reads alone.
            unsafe { pair.post(&Request { wr_id: 1, operation, sge, signaled: true }) }
                .map_err(untried)?;
            let deadline = Instant::now() + PATIENCE;
            let mut one = [Completion::default()];
            while pair.poll(&mut one).map_err(untried)? == 0 {
                if Instant::now() > deadline {
                    return Err(untried("the peer's request does not complete"));
                }
                thread::yield_now();
            }
            Ok(one[0].status)
        }
    }

    /// Posts a step and waits for it. The error has the status, if it ended.
    ///
    /// # Safety
    /// As for [`QpPtr::post`], and nobody else polls the queue pair's send completions.
    unsafe fn posted(qp: QpPtr, step: Step<'_>) -> Result<(), Option<u32>> {
        // SAFETY: passed on.
        unsafe { qp.post(1, &mut [step], true) }.map_err(|_| None)?;
        // SAFETY: the queue pair exists (passed on).
        let cq = unsafe { qp.send_cq() }.ok_or(None)?;
        let deadline = Instant::now() + PATIENCE;
        let mut status = None;
        while status.is_none() {
            // SAFETY: it exists as long as its queue pair.
            unsafe { cq.poll(|a| status = Some(a.status)) }.map_err(|_| None)?;
            if Instant::now() > deadline {
                return Err(None);
            }
            thread::yield_now();
        }
        if status == Some(0) { Ok(()) } else { Err(status) }
    }
}
