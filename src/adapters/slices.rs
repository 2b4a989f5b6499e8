//! From bytes to what a work request needs: any slice that lies in a pool, whichever face it came through.

use std::ptr::NonNull;

use crate::{
    access::{Keys, RemoteBuf, Sge},
    pool::{Core, Pool},
    reach::OneDevice,
};

/// The address on the wire and the keys of a slice, if all of it lies in one arena of the pool.
pub(super) fn locate(core: &Core, bytes: &[u8]) -> Option<(u64, Keys)> {
    let map = core.slabs.map();
    let first = bytes.as_ptr() as usize;
    let keys = map.keys_of(first)?;
    let last = first + bytes.len().saturating_sub(1);
    if !map.same_arena(first, last) || map.keys_of(last) != Some(keys) {
        return None;
    }
    let addr = core.wire_addr(NonNull::new(bytes.as_ptr().cast_mut())?);
    Some((addr, Keys { lkey: keys.lkey(), rkey: core.remote.then_some(keys.rkey()) }))
}

pub(super) fn sge(core: &Core, bytes: &[u8]) -> Option<Sge> {
    let (addr, keys) = locate(core, bytes)?;
    Some(Sge { addr, length: u32::try_from(bytes.len()).ok()?, lkey: keys.lkey })
}

pub(super) fn remote(core: &Core, bytes: &[u8]) -> Option<RemoteBuf> {
    let (addr, keys) = locate(core, bytes)?;
    Some(RemoteBuf { addr, len: bytes.len() as u64, rkey: keys.rkey? })
}

impl<R: OneDevice> Pool<R> {
    /// The scatter-gather element for bytes that lie in this pool, whoever owns them: a `Vec` made in it, a
    /// `Bytes` made of a buffer. `None` if they do not lie wholly inside one arena, or are longer than the
    /// 32 bits of an element's length.
    pub fn sge_of(&self, bytes: &[u8]) -> Option<Sge> {
        sge(self.core(), bytes)
    }

    /// What a peer needs to reach bytes that lie in this pool; `None` as for [`sge_of`](Pool::sge_of), or
    /// if the pool's access class lets a peer do nothing.
    pub fn remote_of(&self, bytes: &[u8]) -> Option<RemoteBuf> {
        remote(self.core(), bytes)
    }
}
