//! The two that are easy to write: one list for all threads, behind a lock or without one.

use parking_lot::Mutex;

use super::{
    bed::{Bed, Borrowed},
    contender::{Contender, Handle, Raw},
    opaque::keep,
    spec::{Case, Spec},
};

/// More buffers than are ever out, for each thread.
const SPARE: usize = 8;

fn borrow(bed: &Bed, spec: &Spec) -> Result<Borrowed, String> {
    let n = (spec.live + SPARE) * spec.threads;
    Borrowed::new(&bed.pool(false)?, n, spec.bytes)
}

fn runs(spec: &Spec) -> bool {
    !spec.is_mixed() && spec.case != Case::KeysOf
}

/// A list that all threads share.
pub(crate) trait List: Sized + Send + Sync + 'static {
    const NAME: &'static str;
    fn of(addrs: impl ExactSizeIterator<Item = *mut u8>) -> Self;
    fn pop(&self) -> Option<Raw>;
    fn push(&self, held: Raw);
}

/// Any list as a contender.
pub(crate) struct Queue<L>(std::marker::PhantomData<L>);

pub(crate) struct Lent<L> {
    // First, so that it goes first.
    list: L,
    _borrowed: Borrowed,
}

impl<L: List> Contender for Queue<L> {
    const NAME: &'static str = L::NAME;
    type Shared = std::sync::Arc<Lent<L>>;
    type Handle = QueueHandle<L>;

    fn runs(spec: &Spec) -> bool {
        runs(spec)
    }

    fn shared(bed: &Bed, spec: &Spec) -> Result<Self::Shared, String> {
        let mut borrowed = borrow(bed, spec)?;
        let list = L::of(borrowed.addrs());
        Ok(std::sync::Arc::new(Lent { list, _borrowed: borrowed }))
    }
}

pub(crate) struct QueueHandle<L>(std::sync::Arc<Lent<L>>);

impl<L: List> Handle for QueueHandle<L> {
    type Shared = std::sync::Arc<Lent<L>>;
    type Held = Raw;

    fn new(shared: &Self::Shared) -> Result<Self, String> {
        Ok(Self(shared.clone()))
    }

    #[inline(always)]
    fn take(&mut self, _: usize) -> Option<Raw> {
        self.0.list.pop()
    }

    #[inline(always)]
    fn put(&mut self, held: Raw, _: usize) {
        self.0.list.push(held);
    }

    #[inline(always)]
    fn addr(held: &Raw) -> *mut u8 {
        held.0
    }

    #[inline(always)]
    fn show(held: &Raw) {
        keep(held.0, 0, 0);
    }
}

/// A `Vec` behind a lock.
impl List for Mutex<Vec<Raw>> {
    const NAME: &'static str = "mutex-vec";

    fn of(addrs: impl ExactSizeIterator<Item = *mut u8>) -> Self {
        Mutex::new(addrs.map(Raw).collect())
    }

    #[inline(always)]
    fn pop(&self) -> Option<Raw> {
        self.lock().pop()
    }

    #[inline(always)]
    fn push(&self, held: Raw) {
        self.lock().push(held);
    }
}

/// A bounded queue without locks.
#[cfg(feature = "rivals")]
impl List for crossbeam_queue::ArrayQueue<Raw> {
    const NAME: &'static str = "array-queue";

    fn of(addrs: impl ExactSizeIterator<Item = *mut u8>) -> Self {
        let queue = Self::new(addrs.len());
        addrs.for_each(|addr| List::push(&queue, Raw(addr)));
        queue
    }

    #[inline(always)]
    fn pop(&self) -> Option<Raw> {
        crossbeam_queue::ArrayQueue::pop(self)
    }

    #[inline(always)]
    fn push(&self, held: Raw) {
        // It has room for all the buffers that there are.
        let full = crossbeam_queue::ArrayQueue::push(self, held).is_err();
        debug_assert!(!full);
    }
}
