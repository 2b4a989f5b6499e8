//! The memory that contenders of one case share: one pool, plain or coloured. Contenders that need
//! buffers but have no memory of their own (floors, queues) borrow theirs from the plain pool, so that
//! all of these touch the same kind of pages.

use std::cell::OnceCell;

use pinpool::{Access, Buf, Device, PageSize, Pages, Pool};

/// Built as far as it is asked for.
pub(crate) struct Bed {
    capacity: usize,
    arenas: usize,
    plain: OnceCell<Pool>,
    coloured: OnceCell<Pool>,
}

impl Bed {
    /// For a pool of `capacity` bytes in that many arenas; 0 leaves the number to the pool.
    pub(crate) fn new(capacity: usize, arenas: usize) -> Self {
        Self { capacity, arenas, plain: OnceCell::new(), coloured: OnceCell::new() }
    }

    pub(crate) fn capacity(&self) -> usize {
        self.capacity
    }

    fn build(&self, colouring: bool) -> Result<Pool, String> {
        let mut builder = Pool::builder()
            .device(Device::soft())
            .access(Access::LOCAL_WRITE | Access::REMOTE_READ | Access::REMOTE_WRITE)
            .capacity(self.capacity)
            .pages(Pages::Prefer(PageSize::Huge2M))
            .colouring(colouring);
        if let Some(each) = self.capacity.checked_div(self.arenas) {
            builder = builder.arena_size(each.next_power_of_two());
        }
        builder.build().map_err(|e| e.to_string())
    }

    pub(crate) fn pool(&self, colouring: bool) -> Result<Pool, String> {
        let cell = if colouring { &self.coloured } else { &self.plain };
        if let Some(pool) = cell.get() {
            return Ok(pool.clone());
        }
        let pool = self.build(colouring)?;
        Ok(cell.get_or_init(|| pool).clone())
    }

    /// The page sizes that the arenas got.
    pub(crate) fn page_sizes(&self) -> impl Iterator<Item = usize> {
        let pools = [&self.plain, &self.coloured].into_iter().filter_map(OnceCell::get);
        pools.flat_map(|pool| pool.arenas().into_iter().map(|arena| arena.page_size))
    }
}

/// Buffers for a contender that only passes addresses on.
pub(crate) struct Borrowed {
    bufs: Vec<Buf>,
}

impl Borrowed {
    pub(crate) fn new(pool: &Pool, n: usize, bytes: usize) -> Result<Self, String> {
        let bufs = (0..n).map(|_| pool.alloc(bytes)).collect::<Result<_, _>>();
        Ok(Self { bufs: bufs.map_err(|e| e.to_string())? })
    }

    pub(crate) fn addrs(&mut self) -> impl ExactSizeIterator<Item = *mut u8> {
        self.bufs.iter_mut().map(Buf::as_mut_ptr)
    }
}
