//! The handle that a user holds: one block, owned, with its keys.

mod rails;

use std::{
    fmt,
    marker::PhantomData,
    mem::ManuallyDrop,
    ops::{Deref, DerefMut},
    ptr::NonNull,
    slice,
};

use crate::{
    access::{Keys, LKey, PackedKeys, RemoteBuf, Sge},
    magazine::Place,
    pool::{Core, PoolRef},
    reach::{Any, Local, OneDevice, Reach, Remote},
    slab::Entry,
    thread,
};

/// An owned buffer in registered memory. Dropping it gives it back to its pool, from any thread, also
/// after the pool's last handle is gone.
///
/// It dereferences to its bytes. They are zero or what an earlier owner left there; see
/// [`Pool::alloc_zeroed`](crate::Pool::alloc_zeroed). The bytes never move (P9).
///
/// **What the device may do.** Handing a key to a peer, or posting a work request, lets the device read
/// or write these bytes behind the compiler's back. While it may, do not hold references into them: post
/// from `&mut` code that keeps the buffer but not the slice, and look again after the completion. And
/// keep the buffer until then: dropping it while a work request is in flight lets its next owner's bytes
/// be sent or overwritten.
// In this order, so that what is looked at soon and what is not take turns: the compiler moves neighbours that are not
// looked at as one, and a load of two words that were stored one by one waits until both are in the cache.
#[repr(C)]
pub struct Buf<R = Any> {
    ptr: NonNull<u8>,
    len: usize,
    keys: PackedKeys,
    core: NonNull<Core>,
    home: Home,
    _owns: PhantomData<([u8; 0], R)>,
}

/// Where a block goes back to: its class's code in the low half, its pool's slot in the high half.
///
/// One word, for the reason that the keys are: a handle that is moved through memory would otherwise be
/// stored in two halves and loaded as a whole.
#[derive(Clone, Copy)]
struct Home(u64);

impl Home {
    #[inline(always)]
    const fn new(place: Place, slot_offset: u32) -> Self {
        Self(place.code() as u64 | (slot_offset as u64) << 32)
    }

    #[inline(always)]
    const fn place(self) -> Place {
        // SAFETY: the low half was a place's code.
        unsafe { Place::from_code(self.0 as u32) }
    }

    #[inline(always)]
    const fn slot_offset(self) -> u32 {
        (self.0 >> 32) as u32
    }
}

// SAFETY: a buffer is the only owner of its block, and giving it back works on any thread (each uses its
// own magazines, or the slabs' lock).
unsafe impl<R> Send for Buf<R> {}
// SAFETY: `&Buf` only reads its fields and its bytes.
unsafe impl<R> Sync for Buf<R> {}

// A panic while a buffer is borrowed leaves at worst half-written bytes, as in a `Vec<u8>`.
impl<R> std::panic::UnwindSafe for Buf<R> {}
impl<R> std::panic::RefUnwindSafe for Buf<R> {}

impl<R> Buf<R> {
    /// Makes the handle of a block that was just taken from `core`.
    #[inline(always)]
    pub(crate) fn new(pool: PoolRef, entry: Entry, len: usize, place: Place) -> Self {
        let PoolRef { core, slot_offset } = pool;
        let (Entry { ptr, keys }, home) = (entry, Home::new(place, slot_offset));
        Self { ptr, len, keys, home, core, _owns: PhantomData }
    }

    #[inline(always)]
    fn entry(&self) -> Entry {
        Entry { ptr: self.ptr, keys: self.keys }
    }

    #[inline(always)]
    fn core(&self) -> &Core {
        // SAFETY: a core lives while any of its buffers does (`Core`'s contract), and this is one.
        unsafe { self.core.as_ref() }
    }

    /// The keys on the one device, or on the first of several.
    #[inline]
    fn keys_here(&self) -> Keys {
        let keys = self.keys;
        Keys { lkey: keys.lkey(), rkey: self.core().remote.then_some(keys.rkey()) }
    }

    /// How many bytes were asked for (or kept by [`truncate`](Buf::truncate)).
    #[inline]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether [`len`](Buf::len) is 0.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// How many bytes the block has; [`set_len`](Buf::set_len) can use them all. With a
    /// [canary](crate::Guards::canary), how many were asked for.
    pub fn capacity(&self) -> usize {
        self.core().usable_len(self.ptr, self.home.place().class())
    }

    /// Sets the length, up to the capacity. The address stays (P9); bytes beyond the old length are
    /// what an earlier owner left.
    ///
    /// # Errors
    /// [`CapacityError`] if the block is shorter; the length is then unchanged. There is no growing
    /// beyond it: memory that moved would leave its keys behind. Allocate a longer buffer and copy.
    pub fn set_len(&mut self, len: usize) -> Result<(), CapacityError> {
        let capacity = self.capacity();
        if len > capacity {
            return Err(CapacityError { asked: len, capacity });
        }
        self.len = len;
        Ok(())
    }

    /// Shortens to `len` bytes; does nothing if it is not longer than that.
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
    }

    /// Sets the length to 0. What is then written by [`std::io::Write`] starts at the first byte.
    pub fn clear(&mut self) {
        self.len = 0;
    }

    /// The first byte's address. It stays the same as long as this buffer lives.
    #[inline]
    pub fn as_ptr(&self) -> *const u8 {
        self.ptr.as_ptr()
    }

    /// The first byte's address, for writing.
    #[inline]
    pub fn as_mut_ptr(&mut self) -> *mut u8 {
        self.ptr.as_ptr()
    }

    /// Gives up the handle and keeps the block, as a bare address. [`Pool::from_raw`] or
    /// [`Pool::free_raw`] takes it back, once; without either it leaks, and keeps its arenas alive.
    ///
    /// [`Pool::from_raw`]: crate::Pool::from_raw
    /// [`Pool::free_raw`]: crate::Pool::free_raw
    #[inline]
    pub fn into_raw(self) -> NonNull<u8> {
        let this = ManuallyDrop::new(self);
        this.core().outs.set(this.ptr, this.home.place());
        this.ptr
    }

    /// Gives up the handle for a token, to ride in a work request's `wr_id`. [`Pool::from_token`] takes it
    /// back, once, with the same length; until then the block is out and nobody gets it, whatever is
    /// dropped meanwhile, the pool's handles included. A token that is lost leaks its block, and keeps its
    /// arenas alive; [`Pool::in_flight`] shows it.
    ///
    /// The token's top bit is 0 and stays so: it is the caller's to use.
    ///
    /// ```
    /// # let pool = pinpool::Pool::builder().device(pinpool::Device::soft()).capacity(1 << 20).build()?;
    /// let buf = pool.alloc(4096)?;
    /// let sge = buf.sge();
    /// let wr_id = buf.into_token();
    /// // post a work request with this sge and wr_id; at its completion:
    /// let buf = pool.from_token(wr_id)?;
    /// assert_eq!(buf.sge(), sge);
    /// assert!(pool.from_token(wr_id).is_err(), "once");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// [`Pool::from_token`]: crate::Pool::from_token
    /// [`Pool::in_flight`]: crate::Pool::in_flight
    #[inline]
    pub fn into_token(self) -> u64 {
        let this = ManuallyDrop::new(self);
        this.core().tokens.take_off(this.ptr, this.len, this.home.place())
    }

    /// The heap that it goes back to.
    pub(crate) fn home(&self) -> PoolRef {
        PoolRef { core: self.core, slot_offset: self.home.slot_offset() }
    }

    /// The block and class, without giving it back.
    #[inline]
    pub(crate) fn into_parts(self) -> (Entry, Place) {
        let this = ManuallyDrop::new(self);
        (this.entry(), this.home.place())
    }
}

impl<R: OneDevice> Buf<R> {
    /// The lkey: for this host's own work requests.
    #[inline]
    pub fn lkey(&self) -> LKey {
        self.keys.lkey()
    }

    /// Both keys.
    #[inline]
    pub fn keys(&self) -> Keys {
        self.keys_here()
    }

    /// The scatter-gather element for the whole length.
    ///
    /// An element's length field has 32 bits; for a longer buffer this one is cut to `u32::MAX` bytes,
    /// so use [`sge_range`](Buf::sge_range) there.
    #[inline]
    pub fn sge(&self) -> Sge {
        Sge {
            addr: self.core().wire_addr(self.ptr),
            length: u32::try_from(self.len).unwrap_or(u32::MAX),
            lkey: self.lkey(),
        }
    }

    /// The scatter-gather element for `len` bytes from `offset`; `None` if they are not all inside.
    pub fn sge_range(&self, offset: usize, len: u32) -> Option<Sge> {
        let end = offset.checked_add(len as usize)?;
        let addr = self.core().wire_addr(self.ptr) + offset as u64;
        (end <= self.len).then_some(Sge { addr, length: len, lkey: self.lkey() })
    }
}

impl Buf {
    /// What a peer needs to reach these bytes; `None` if the pool's access class lets it do nothing.
    ///
    /// The right that the rkey conveys is over the whole arena, not over this buffer alone.
    #[inline]
    pub fn remote(&self) -> Option<RemoteBuf> {
        let rkey = self.keys().rkey?;
        Some(RemoteBuf { addr: self.core().wire_addr(self.ptr), len: self.len as u64, rkey })
    }
}

impl Buf<Remote> {
    /// What a peer needs to reach these bytes.
    ///
    /// The right that the rkey conveys is over the whole arena, not over this buffer alone.
    #[inline]
    pub fn remote(&self) -> RemoteBuf {
        let (addr, rkey) = (self.core().wire_addr(self.ptr), self.keys.rkey());
        RemoteBuf { addr, len: self.len as u64, rkey }
    }
}

impl<R> Buf<R> {
    /// The same buffer under another reach, which the caller knows to be true of it.
    pub(crate) fn reached<S>(self) -> Buf<S> {
        let this = ManuallyDrop::new(self);
        let Self { ptr, len, keys, home, core, .. } = *this;
        Buf { ptr, len, keys, home, core, _owns: PhantomData }
    }
}

impl From<Buf<Local>> for Buf {
    /// Forgets that no peer can reach it; `remote()` then says so.
    fn from(buf: Buf<Local>) -> Self {
        buf.reached()
    }
}

impl From<Buf<Remote>> for Buf {
    /// Forgets that peers can reach it; `remote()` then says so.
    fn from(buf: Buf<Remote>) -> Self {
        buf.reached()
    }
}

impl<R> Drop for Buf<R> {
    #[inline]
    fn drop(&mut self) {
        // SAFETY: `slot_at` gives this thread's own slot, which lives as long as the thread.
        let slot = unsafe { &*thread::slot_at(self.home.slot_offset()) };
        if !slot.push(self.home.place(), self.entry()) {
            // SAFETY: not pushed, so this buffer is still live, and its core with it.
            unsafe { Core::free_slow(self.core, self.entry(), self.home.place()) };
        }
    }
}

impl<R> Deref for Buf<R> {
    type Target = [u8];

    #[inline]
    fn deref(&self) -> &[u8] {
        // SAFETY: the block is mapped while this buffer lives (P4), is at least `len` bytes long, was
        // zeroed when it was mapped and so is initialised, and is this buffer's alone.
        unsafe { slice::from_raw_parts(self.ptr.as_ptr(), self.len) }
    }
}

impl<R> DerefMut for Buf<R> {
    #[inline]
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`; `&mut self` makes it exclusive.
        unsafe { slice::from_raw_parts_mut(self.ptr.as_ptr(), self.len) }
    }
}

impl<R> AsRef<[u8]> for Buf<R> {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl<R> AsMut<[u8]> for Buf<R> {
    fn as_mut(&mut self) -> &mut [u8] {
        self
    }
}

impl<R: Reach> fmt::Debug for Buf<R> {
    /// Shows where the buffer is and its keys, never what is in it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut f = f.debug_struct("Buf");
        f.field("addr", &self.ptr);
        f.field("len", &self.len);
        f.field("capacity", &self.capacity());
        if R::ONE_DEVICE {
            f.field("keys", &self.keys_here());
        }
        f.finish()
    }
}

/// A length beyond a buffer's block.
#[derive(Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{asked} bytes do not fit a buffer of {capacity}; registered memory cannot grow in place")]
#[non_exhaustive]
pub struct CapacityError {
    /// Bytes asked.
    pub asked: usize,
    /// Bytes of the block.
    pub capacity: usize,
}

crate::error::message_in_debug!(CapacityError);
