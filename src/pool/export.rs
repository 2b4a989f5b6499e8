//! A pool's memory for other processes: its files, and where a byte is in terms that all of them know.

use super::Pool;
use crate::{
    arena::ArenaFile,
    config::{ArenaLayout, ExportLayout, PoolExport},
    error::ExportError,
    sys::limits,
};

impl<R> Pool<R> {
    /// Gives what another process needs to map and register this pool's memory as well
    /// ([`Builder::join`](crate::Builder::join)). The pool must have been built with a
    /// [`Backing`](crate::Backing) that can be shared.
    ///
    /// What it gives is the arenas of this moment: when the pool has grown, share it again. Waits for growth
    /// that is under way.
    ///
    /// A process that has it can read and write all of the pool's memory, at any time and until its end: take
    /// what comes from there as you take what comes from a peer with an rkey. It has no part in the allocator,
    /// whose tables are not in that memory (P2), and it cannot shorten it. What no seal forbids as long as it
    /// may write is to punch holes (`MADV_REMOVE`): device and processors then see different pages, and
    /// on hugepages the next access is a SIGBUS if none is free. So share with processes that may fail, not
    /// with ones that mean harm.
    ///
    /// # Errors
    /// [`ExportError::Private`] unless the pool's memory can be shared; [`ExportError::ForeignProcess`] in a
    /// forked child; [`ExportError::System`] when this process may not have so many files open.
    pub fn export(&self) -> Result<PoolExport, ExportError> {
        let core = self.core();
        if core.foreign() {
            let this = limits::process_id();
            return Err(ExportError::ForeignProcess { owner: core.process, this });
        }
        let found = match &*core.arenas.lock() {
            Some(arenas) => arenas.files(),
            None => Ok(Vec::new()),
        };
        let found = found.map_err(|source| ExportError::System { call: "dup", source })?;
        if found.is_empty() {
            return Err(ExportError::Private);
        }
        let (mut layout, mut files, mut paths) = (Vec::new(), Vec::new(), Vec::new());
        for ArenaFile { offset, len, page_size, file, path } in found {
            layout.push(ArenaLayout { offset, len, page_size });
            files.push(file);
            paths.extend(path);
        }
        let map = core.slabs.map();
        let stride = (map.stride_pages() as usize) << crate::size_class::PAGE_SHIFT;
        Ok(PoolExport::new(ExportLayout::new(stride, layout)?, files).with_paths(paths))
    }

    /// How far from the start of the pool's range `ptr` points, if it points into one of the arenas: the same
    /// place for every process that shares the memory
    /// ([`SharedArenas::ptr_at`](crate::SharedArenas::ptr_at)). Any pointer may be asked for, and none is
    /// followed. Takes no lock.
    pub fn offset_of<T: ?Sized>(&self, ptr: *const T) -> Option<usize> {
        let map = self.core().slabs.map();
        let addr = ptr.cast::<u8>() as usize;
        map.keys_of(addr).map(|_| addr - map.base())
    }
}
