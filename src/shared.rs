//! What a process holds of a pool that another one built: the same memory, mapped and registered once more,
//! under keys of its own. No allocator: which bytes are whose is for the two processes to settle.

use std::{fmt, ptr::NonNull};

use crate::{
    access::{Access, Keys, RemoteBuf, Sge},
    arena::{ArenaInfo, Arenas, Leftover},
    config::{Builder, PoolExport},
    error::{BuildError, CloseError},
    page_map::PageMap,
    size_class::PAGE,
    sys::limits,
};

impl Builder {
    /// Maps the memory of a pool that another process built, and registers it with this builder's device and
    /// rights. Takes neither capacity nor arena size, node or backing: the pool's builder decided those.
    ///
    /// The memory stays as long as any process has it mapped; the pool may end before. Dropping what this
    /// gives ends this process's registration and mapping alone.
    ///
    /// # Errors
    /// [`BuildError::Export`] when the files are not what the layout says; else as [`build`](Builder::build).
    pub fn join(self, share: PoolExport) -> Result<SharedArenas, BuildError> {
        let plan = self.plan_on(Some(share))?;
        let (access, stride) = (plan.access, plan.stride);
        let arenas = Arenas::build(plan)?;
        let tables = |source| BuildError::Reserve { len: arenas.reserved() / PAGE * 4, source };
        let base = arenas.base().as_ptr() as usize;
        let map = PageMap::new(base, arenas.reserved(), stride.trailing_zeros());
        let map = map.map_err(tables)?;
        for standing in arenas.standing() {
            if let Some(&(_, keys)) = standing.keys.first() {
                map.publish(standing.offset, standing.len, keys);
            }
        }
        Ok(SharedArenas {
            map,
            infos: arenas.infos(0),
            arenas: Some(arenas),
            access,
            stride,
            process: limits::process_id(),
        })
    }
}

/// The memory of another process's pool, mapped and registered here; see [`Builder::join`].
///
/// Places are told by offset, counted from the start of the pool's range, which is the same in all processes:
/// [`Pool::offset_of`](crate::Pool::offset_of) there, [`ptr_at`](SharedArenas::ptr_at) here. Pointers are
/// bare: whoever uses one settles with the pool's process whose turn it is, as with a device.
///
/// A forked child can look at it, and must not use the keys, which are its parent's; dropping it there
/// changes nothing.
pub struct SharedArenas {
    map: PageMap,
    infos: Vec<ArenaInfo>,
    /// Taken when it is closed.
    arenas: Option<Arenas>,
    access: Access,
    stride: usize,
    process: u32,
}

impl SharedArenas {
    /// The arenas as they are mapped and registered here.
    pub fn arenas(&self) -> &[ArenaInfo] {
        &self.infos
    }

    /// The rights that they were registered with here.
    pub fn access(&self) -> Access {
        self.access
    }

    /// Where in this process the byte at `offset` is; `None` if `len` bytes from there are not all in one
    /// arena.
    pub fn ptr_at(&self, offset: usize, len: usize) -> Option<NonNull<u8>> {
        let base = self.map.base();
        let end = offset.checked_add(len)?;
        let inside = |a: &&ArenaInfo| {
            let start = a.addr.as_ptr() as usize - base;
            start <= offset && offset < start + a.len && end <= start + a.len
        };
        self.infos.iter().find(inside)?;
        NonNull::new((base + offset) as *mut u8)
    }

    /// The offset of the byte that `ptr` points to, if it is in one of these arenas. Any pointer may be asked
    /// for, and none is followed.
    pub fn offset_of<T: ?Sized>(&self, ptr: *const T) -> Option<usize> {
        let addr = ptr.cast::<u8>() as usize;
        self.map.keys_of(addr).map(|_| addr - self.map.base())
    }

    /// The keys, here, of the region that holds `ptr`; as [`Pool::keys_of`](crate::Pool::keys_of).
    pub fn keys_of<T: ?Sized>(&self, ptr: *const T) -> Option<Keys> {
        let keys = self.map.keys_of(ptr.cast::<u8>() as usize)?;
        Some(Keys { lkey: keys.lkey(), rkey: self.access.is_remote().then_some(keys.rkey()) })
    }

    /// The scatter-gather element, for this process's own work requests, of `len` bytes at `offset`; `None`
    /// if they are not all in one arena.
    pub fn sge_at(&self, offset: usize, len: u32) -> Option<Sge> {
        let ptr = self.ptr_at(offset, len as usize)?;
        let lkey = self.keys_of(ptr.as_ptr())?.lkey;
        Some(Sge { addr: self.wire_addr(ptr), length: len, lkey })
    }

    /// What a peer needs to reach `len` bytes at `offset` through this process's device; `None` if they are
    /// not all in one arena, or the rights asked for let peers do nothing.
    pub fn remote_at(&self, offset: usize, len: usize) -> Option<RemoteBuf> {
        let ptr = self.ptr_at(offset, len)?;
        let rkey = self.keys_of(ptr.as_ptr())?.rkey?;
        Some(RemoteBuf { addr: self.wire_addr(ptr), len: len as u64, rkey })
    }

    fn wire_addr(&self, ptr: NonNull<u8>) -> u64 {
        let addr = ptr.as_ptr() as usize;
        if self.access.contains(Access::ZERO_BASED) {
            ((addr - self.map.base()) & (self.stride - 1)) as u64
        } else {
            addr as u64
        }
    }

    /// Deregisters and unmaps here, and says how that went, which dropping cannot.
    ///
    /// # Errors
    /// [`CloseError::Deregister`] if the device would not let go; [`CloseError::ForeignProcess`] in a forked
    /// child, where nothing is done.
    pub fn close(mut self) -> Result<(), CloseError> {
        let this = limits::process_id();
        if this != self.process {
            return Err(CloseError::ForeignProcess { owner: self.process, this });
        }
        match self.arenas.take().map(|mut arenas| arenas.take_down()) {
            Some(Leftover { arenas, bytes, first: Some(first) }) => {
                Err(CloseError::Deregister { arenas, bytes, first })
            }
            _ => Ok(()),
        }
    }
}

impl Drop for SharedArenas {
    fn drop(&mut self) {
        if limits::process_id() != self.process {
            // The registrations are the parent's.
            std::mem::forget(self.arenas.take());
        }
    }
}

impl fmt::Debug for SharedArenas {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SharedArenas")
            .field("access", &self.access)
            .field("arenas", &self.infos)
            .finish_non_exhaustive()
    }
}
