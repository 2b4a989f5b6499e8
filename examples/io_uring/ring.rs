//! A ring whose fixed buffers are a pool's arenas: registered with the kernel once, when the pool is built,
//! and named from then on by index, which is what stands where a NIC has its lkey.
//!
//! The ring's table of buffers has one slot for each arena. Whoever reads or writes passes the address that
//! a buffer has, and its lkey as the slot.

use std::{
    fs::File,
    io,
    os::fd::AsRawFd,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use io_uring::{IoUring, cqueue, opcode, squeue, types::Fd};
use pinpool::{
    Access, Buf, Device, LKey, RKey, RegisterError,
    device::{DeviceInfo, MrHandle, MrRequest, Pinning, Registrar, Registration},
};

/// The longest range that the kernel takes as one buffer.
const LONGEST: u64 = 1 << 30;

/// A ring, for reading and writing files through buffers of the pools on its [`device`](Ring::device).
pub(crate) struct Ring(Arc<Shared>);

struct Shared {
    state: Mutex<State>,
    slots: u16,
}

struct State {
    ring: IoUring,
    free: Vec<u16>,
}

/// Marks the completion that says that nothing uses a slot's old buffer any more.
const RELEASED: u64 = 1 << 63;

impl Ring {
    /// Makes a ring that can hold `slots` arenas.
    ///
    /// # Errors
    /// ENOSYS where the kernel has no io_uring, EPERM where it is turned off (`kernel.io_uring_disabled`) or
    /// barred by a sandbox, EINVAL before Linux 5.19, which has no empty tables.
    pub(crate) fn new(slots: u16) -> io::Result<Self> {
        let ring = IoUring::new(8)?;
        ring.submitter().register_buffers_sparse(slots.into())?;
        let state = Mutex::new(State { ring, free: (0..slots).rev().collect() });
        Ok(Self(Arc::new(Shared { state, slots })))
    }

    /// The ring as a device to build pools on.
    pub(crate) fn device(&self) -> Device {
        Device::custom(RingRegistrar(self.0.clone()))
    }

    /// Writes all of `buf` to a file at `offset`; says how many bytes were taken.
    ///
    /// # Errors
    /// The kernel's; EFAULT if the buffer is of no pool on this ring.
    pub(crate) fn write(&self, file: &File, buf: &Buf, offset: u64) -> io::Result<usize> {
        let (sge, fd) = (buf.sge(), Fd(file.as_raw_fd()));
        let from = sge.addr as *const u8;
        let entry = opcode::WriteFixed::new(fd, from, sge.length, slot(sge.lkey)).offset(offset);
        // SAFETY: `buf` is borrowed until the call returns, and the kernel is through with it by then.
        unsafe { self.0.lock().run(entry.build()) }
    }

    /// Fills `buf` from a file at `offset`; says how many bytes there were.
    ///
    /// # Errors
    /// As [`write`](Ring::write).
    pub(crate) fn read(&self, file: &File, buf: &mut Buf, offset: u64) -> io::Result<usize> {
        let (sge, fd) = (buf.sge(), Fd(file.as_raw_fd()));
        let into = sge.addr as *mut u8;
        let entry = opcode::ReadFixed::new(fd, into, sge.length, slot(sge.lkey)).offset(offset);
        // SAFETY: as in `write`, and the borrow is exclusive.
        unsafe { self.0.lock().run(entry.build()) }
    }
}

/// The slot that an lkey stands for; one that no table has for keys of other devices.
fn slot(lkey: LKey) -> u16 {
    u16::try_from(lkey.get()).unwrap_or(u16::MAX)
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Submits one request and waits for its completion.
    ///
    /// # Safety
    /// Its memory may be used as the request says until the call returns.
    unsafe fn run(&mut self, entry: squeue::Entry) -> io::Result<usize> {
        // SAFETY: the caller vouches for the memory; one request at a time is on its way, so there is room.
        unsafe { self.ring.submission().push(&entry) }.map_err(io::Error::other)?;
        match self.wait(0)?.result() {
            e if e < 0 => Err(io::Error::from_raw_os_error(-e)),
            n => Ok(n as usize),
        }
    }

    /// Waits for the completion with this mark.
    fn wait(&mut self, mark: u64) -> io::Result<cqueue::Entry> {
        loop {
            match self.ring.submit_and_wait(1) {
                Err(e) if e.kind() != io::ErrorKind::Interrupted => return Err(e),
                _ => {}
            }
            if let Some(entry) = self.ring.completion().find(|e| e.user_data() == mark) {
                return Ok(entry);
            }
        }
    }

    /// Puts a range into a slot, or nothing.
    ///
    /// # Safety
    /// The range stays mapped as long as it is in the slot.
    unsafe fn fill(&mut self, slot: u16, range: libc::iovec, mark: u64) -> io::Result<()> {
        let submitter = self.ring.submitter();
        // SAFETY: what the caller vouches for.
        unsafe { submitter.register_buffers_update(slot.into(), &[range], Some(&[mark])) }
    }
}

/// The ring as what registers a pool's arenas.
struct RingRegistrar(Arc<Shared>);

// SAFETY: the contract's numbers.
// 1. `deregister` says Ok only after the kernel has posted that nothing uses the slot's buffer any more.
// 2. An update that fails leaves the slot as it was: empty.
// 3. Registering pins pages and changes nothing about them.
// 4. The lkey is the slot, through which the kernel reads and writes the range for this process, as
//    LOCAL_WRITE alone says; every other set of rights is refused. The rkey names nothing, and is never shown.
unsafe impl Registrar for RingRegistrar {
    fn info(&self) -> DeviceInfo {
        let mut info = DeviceInfo::new("io_uring", "io_uring");
        info.max_mr_size = LONGEST;
        info.max_mr = self.0.slots.into();
        info.pinning = Pinning::Pinned;
        info
    }

    unsafe fn register(&self, request: &MrRequest) -> Result<Registration, RegisterError> {
        let &MrRequest { addr, len, access, .. } = request;
        let refuse = |source| RegisterError::Register {
            call: "io_uring_register(IORING_REGISTER_BUFFERS_UPDATE)",
            device: "io_uring".to_owned(),
            len,
            access,
            source,
        };
        if access != Access::LOCAL_WRITE {
            return Err(refuse(io::Error::from_raw_os_error(libc::EINVAL)));
        }
        let mut state = self.0.lock();
        let full = || refuse(io::Error::from_raw_os_error(libc::ENOSPC));
        let slot = state.free.pop().ok_or_else(full)?;
        let range = libc::iovec { iov_base: addr.as_ptr().cast(), iov_len: len };
        // SAFETY: the range stays mapped until it is deregistered (contract of `register`).
        if let Err(e) = unsafe { state.fill(slot, range, RELEASED | u64::from(slot)) } {
            state.free.push(slot);
            return Err(refuse(e));
        }
        let lkey = LKey::new(slot.into());
        Ok(Registration { handle: MrHandle(slot.into()), lkey, rkey: RKey::new(0), access })
    }

    unsafe fn deregister(&self, handle: MrHandle) -> Result<(), RegisterError> {
        let refuse = |source| RegisterError::Deregister {
            call: "io_uring_register(IORING_REGISTER_BUFFERS_UPDATE)",
            device: "io_uring".to_owned(),
            source,
        };
        let slot = handle.0 as u16;
        let mut state = self.0.lock();
        let nothing = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
        // SAFETY: an empty range.
        unsafe { state.fill(slot, nothing, 0) }.map_err(refuse)?;
        state.wait(RELEASED | u64::from(slot)).map_err(refuse)?;
        state.free.push(slot);
        Ok(())
    }
}
