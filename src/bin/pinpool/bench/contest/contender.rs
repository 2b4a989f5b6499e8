//! What a contender is: a way to get buffers and give them back. The cases are written once, over these
//! traits, and compiled for each contender apart, so that whatever can be inlined is.

use super::{bed::Bed, spec::Spec};

/// One allocator, or one way through it.
pub(crate) trait Contender: 'static {
    const NAME: &'static str;
    /// What all threads share.
    type Shared: Sync + 'static;
    type Handle: Handle<Shared = Self::Shared>;

    /// Whether it can run a case at all.
    fn runs(spec: &Spec) -> bool;
    fn shared(bed: &Bed, spec: &Spec) -> Result<Self::Shared, String>;
}

/// What one thread uses. Made, used and dropped on that thread.
pub(crate) trait Handle: Sized {
    type Shared;
    /// A buffer that is out.
    type Held: Send;

    fn new(shared: &Self::Shared) -> Result<Self, String>;

    /// Called before each timed loop.
    #[inline(always)]
    fn begin(&mut self) {}

    fn take(&mut self, bytes: usize) -> Option<Self::Held>;
    /// `bytes` is what was asked for: some allocators free faster when told.
    fn put(&mut self, held: Self::Held, bytes: usize);

    /// The first byte's address.
    fn addr(held: &Self::Held) -> *mut u8;
    /// Hands address, and keys if there are any, to [`keep`](super::opaque::keep).
    fn show(held: &Self::Held);

    /// Whether what comes with the buffer is right.
    fn check(_shared: &Self::Shared, _held: &Self::Held, _bytes: usize) -> Result<(), String> {
        Ok(())
    }

    /// How long the block is that holds the buffer, where that is known.
    fn block_bytes(_held: &Self::Held) -> Option<usize> {
        None
    }
}

/// Takes a buffer out and touches its first byte.
#[inline(always)]
pub(crate) fn out<H: Handle>(handle: &mut H, bytes: usize) -> H::Held {
    let Some(held) = handle.take(bytes) else { dry() };
    // SAFETY: the buffer is ours and at least one byte long.
    unsafe { H::addr(&held).write(1) };
    // After the write: whoever is shown the address might read it, so that it must be there.
    H::show(&held);
    held
}

#[cold]
#[inline(never)]
fn dry() -> ! {
    panic!("no memory left; the machine has too little for this case")
}

/// A block that a contender without handles gives out.
pub(crate) struct Raw(pub(crate) *mut u8);

// SAFETY: an address; whoever holds it owns the block.
unsafe impl Send for Raw {}
