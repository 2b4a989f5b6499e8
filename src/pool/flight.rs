//! Buffers in flight: tokens back into buffers, and the list of those that are not back.

use std::{ptr::NonNull, time::Duration};

use super::{Core, Pool};
use crate::{
    buf::Buf,
    error::TokenError,
    reach::Reach,
    slab::Entry,
    sys::limits,
    tokens::{Flight, Landed},
};

/// A buffer that is out as a token.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct InFlight {
    /// The token. Take the buffer back with it only if no work request of it can be under way any more, for
    /// instance since its queue pair is gone.
    pub token: u64,
    /// The buffer's first byte.
    pub addr: NonNull<u8>,
    /// The buffer's length.
    pub len: usize,
    /// How long it has been so, at least: up to a few seconds more.
    pub age: Duration,
}

// SAFETY: the address is information; nothing is read or written through it here.
unsafe impl Send for InFlight {}
// SAFETY: as above.
unsafe impl Sync for InFlight {}

impl Core {
    /// The block of a token that has landed.
    #[inline(always)]
    pub(super) fn landed(&self, landed: &Landed) -> Entry {
        // SAFETY: the page of a block that was in flight and is now the caller's.
        let keys = unsafe { self.slabs.map().keys_of_page(landed.page) };
        Entry { ptr: landed.ptr, keys }
    }

    /// Why no token is taken here, if this is a forked child.
    pub(super) fn token_of_the_parent(&self) -> Option<TokenError> {
        let foreign =
            || TokenError::ForeignProcess { owner: self.process, this: limits::process_id() };
        self.foreign().then(foreign)
    }

    pub(super) fn each_flight(&self, mut sink: impl FnMut(Flight)) {
        if self.foreign() {
            // The slabs' lock may be held by a thread that this process does not have.
            return;
        }
        for (first, pages) in self.slabs.runs_in_use() {
            self.tokens.each_flight(first, pages, &mut sink);
        }
    }
}

impl<R> Pool<R> {
    /// Takes back the buffer that [`Buf::into_token`] gave up, with the length that it had. For the
    /// completion of the work request that carried the token.
    ///
    /// The buffer must be of this handle's access class, and not of a share's reserve: for a pool that has
    /// several classes or shares, see [`from_any_token`](Pool::from_any_token).
    ///
    /// Any number may be passed, and is checked: a block's generation is counted up at each flight, so that a
    /// token that was used is refused, with certainty until its block has been in flight 32,768 times again;
    /// of several calls with one token, exactly one succeeds. Tokens of another pool are refused with
    /// certainty as long as no more than 510 pools are alive (each class and each share of a pool counts as
    /// one). A number that happens to be the token of a buffer in flight cannot be told from it.
    ///
    /// In a forked child all are refused: flights are the parent's.
    ///
    /// # Errors
    /// [`TokenError`]; nothing is then changed.
    #[allow(clippy::wrong_self_convention)] // The pool is not the token's target but its source.
    #[inline]
    pub fn from_token(&self, token: u64) -> Result<Buf<R>, TokenError> {
        match self.core().tokens.land(token) {
            Some(landed) => {
                Ok(Buf::new(self.inner, self.core().landed(&landed), landed.len, landed.place))
            }
            None => Err(self.token_refusal(token)),
        }
    }

    #[cold]
    fn token_refusal(&self, token: u64) -> TokenError {
        let core = self.heap_of(token);
        if let Some(foreign) = core.token_of_the_parent() {
            return foreign;
        }
        if std::ptr::eq(core, self.core()) {
            core.tokens.refusal(token)
        } else {
            TokenError::OtherHeap { token }
        }
    }

    /// The heap whose tag a number has; this handle's, if none has.
    pub(super) fn heap_of(&self, token: u64) -> &Core {
        self.heaps().iter().find(|core| core.tokens.has_tag_of(token)).unwrap_or(self.core())
    }

    pub(super) fn land_any<S: Reach>(&self, token: u64) -> Result<Buf<S>, TokenError> {
        let core = self.heap_of(token);
        if S::REMOTE.is_some_and(|remote| remote != core.remote) {
            return Err(TokenError::OtherReach { token, remote: core.remote });
        }
        match core.tokens.land(token) {
            Some(landed) => {
                Ok(Buf::new(core.reference(), core.landed(&landed), landed.len, landed.place))
            }
            None => Err(core.token_of_the_parent().unwrap_or_else(|| core.tokens.refusal(token))),
        }
    }

    /// The buffers that are out as tokens, longest first: what was posted and has not completed, and what was
    /// lost. Takes the slabs' lock, and looks at every page in use; in a forked child the list is empty.
    ///
    /// Ages come from the processor's counter, in steps of one or two seconds, and wrap after a day or more.
    pub fn in_flight(&self) -> Vec<InFlight> {
        let mut list = Vec::new();
        for core in self.heaps().iter() {
            core.each_flight(|Flight { token, addr, len, age }| {
                let addr = NonNull::new(addr as *mut u8);
                list.extend(addr.map(|addr| InFlight { token, addr, len, age }));
            });
        }
        list.sort_by(|a, b| b.age.cmp(&a.age).then(a.addr.cmp(&b.addr)));
        list
    }
}

impl<R: Reach> Pool<R> {
    /// As [`from_token`](Pool::from_token), for a buffer of whichever access class or share of this pool. Looks
    /// for it among them, a few instructions each.
    ///
    /// # Errors
    /// [`TokenError`], also for a class that this handle's `R` rules out; nothing is then changed.
    #[allow(clippy::wrong_self_convention)] // As above.
    pub fn from_any_token(&self, token: u64) -> Result<Buf<R>, TokenError> {
        self.land_any(token)
    }
}
