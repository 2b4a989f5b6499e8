//! Access classes: handles for them, and finding them and shares by name.

use std::{fmt, time::Duration};

use super::{AllocFuture, Core, Pool, share::Share};
use crate::{
    access::Access,
    arena::ArenaInfo,
    batch::Batch,
    buf::Buf,
    error::{AllocError, LookupError},
    local::LocalPool,
    reach::{Any, OneDevice, Rails, Reach},
};

/// An access class of a pool, to allocate from: [`Pool::alloc_in`], or the methods here. Clones are handles
/// of the same class.
///
/// `R` says who can reach its buffers: with [`Local`](crate::reach::Local) there is no rkey and no method
/// that could give one, with [`Remote`](crate::reach::Remote) there always is one.
///
/// Counts as a handle of its pool: the pool lives until this is dropped, too. See
/// [`Builder::class`](crate::Builder::class).
///
/// ```compile_fail
/// # use pinpool::{Access, Device, Pool, reach::Local};
/// # let pool = Pool::builder().device(Device::soft()).capacity(1 << 20).build().unwrap();
/// let private = pool.class::<Local>("default").unwrap();
/// private.alloc(64).unwrap().remote(); // a peer has no business here
/// ```
pub struct Class<R = Any> {
    /// A handle whose heap is this class's.
    heap: Pool<R>,
    /// The address of the core of the pool's default class: which pool this is of.
    root: usize,
}

impl<R> Class<R> {
    /// Allocates a buffer of `len` bytes; see [`Pool::alloc`].
    ///
    /// # Errors
    /// As [`Pool::alloc`], of this class's arenas.
    #[inline]
    #[track_caller]
    pub fn alloc(&self, len: usize) -> Result<Buf<R>, AllocError> {
        self.heap.alloc(len)
    }

    /// Allocates a buffer of `len` zero bytes.
    ///
    /// # Errors
    /// As [`alloc`](Class::alloc).
    #[track_caller]
    pub fn alloc_zeroed(&self, len: usize) -> Result<Buf<R>, AllocError> {
        self.heap.alloc_zeroed(len)
    }

    /// Allocates a buffer for a layout; see [`Pool::alloc_layout`].
    ///
    /// # Errors
    /// As [`Pool::alloc_layout`].
    #[track_caller]
    pub fn alloc_layout(&self, layout: std::alloc::Layout) -> Result<Buf<R>, AllocError> {
        self.heap.alloc_layout(layout)
    }

    /// Adds up to `n` buffers of `len` bytes to a batch; see [`Pool::alloc_many`].
    ///
    /// # Errors
    /// As [`Pool::alloc_many`].
    #[track_caller]
    pub fn alloc_many(
        &self,
        batch: &mut Batch<R>,
        len: usize,
        n: usize,
    ) -> Result<usize, AllocError> {
        self.heap.alloc_many(batch, len, n)
    }

    /// Allocates a buffer of `len` bytes, waiting up to `timeout` until there is one; see
    /// [`Pool::alloc_wait`].
    ///
    /// # Errors
    /// As [`Pool::alloc_wait`].
    #[track_caller]
    pub fn alloc_wait(&self, len: usize, timeout: Duration) -> Result<Buf<R>, AllocError> {
        self.heap.alloc_wait(len, timeout)
    }

    /// Allocates a buffer of `len` bytes as a future; see [`Pool::alloc_async`].
    ///
    /// # Errors
    /// As [`Pool::alloc_async`].
    #[track_caller]
    pub fn alloc_async(&self, len: usize) -> AllocFuture<'_, R> {
        self.heap.alloc_async(len)
    }

    /// Makes a handle for this thread that allocates from this class; see [`Pool::local`].
    pub fn local(&self) -> LocalPool<R> {
        self.heap.local()
    }

    /// The pool as a handle whose allocations come from this class: for whatever takes a pool.
    pub fn pool(&self) -> &Pool<R> {
        &self.heap
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.heap.core().name
    }

    /// The rights that its arenas were registered with.
    pub fn access(&self) -> Access {
        self.heap.access()
    }

    /// Bytes of its arenas, shares included.
    pub fn capacity(&self) -> usize {
        let core = self.heap.core();
        core.slabs.capacity() + core.reserved
    }
}

impl<R: Reach> Class<R> {
    /// A share of this class; see [`Pool::share`].
    ///
    /// # Errors
    /// [`LookupError::NoShare`], with the names that this class has.
    pub fn share(&self, name: &str) -> Result<Share<R>, LookupError> {
        let own = self.heap.core();
        self.heap.find_share(name, |class| std::ptr::eq(class, own))
    }
}

impl<R: OneDevice> Class<R> {
    /// Its arenas that there are now, by address.
    pub fn arenas(&self) -> Vec<ArenaInfo> {
        self.heap.core().infos()
    }
}

impl<R> Clone for Class<R> {
    fn clone(&self) -> Self {
        Self { heap: self.heap.clone(), root: self.root }
    }
}

impl<R> fmt::Debug for Class<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Class")
            .field("name", &self.name())
            .field("access", &self.access())
            .field("capacity", &self.capacity())
            .finish_non_exhaustive()
    }
}

impl<R> Pool<R> {
    /// Allocates a buffer of `len` bytes from an access class; see [`alloc`](Pool::alloc), which costs the
    /// same.
    ///
    /// # Errors
    /// As [`alloc`](Pool::alloc), of that class's arenas; [`AllocError::OtherPool`] if the class is one of
    /// another pool.
    #[inline]
    #[track_caller]
    pub fn alloc_in<C>(&self, class: &Class<C>, len: usize) -> Result<Buf<C>, AllocError> {
        if class.root != self.inner.core.as_ptr() as usize && !self.has(class) {
            return Err(AllocError::OtherPool);
        }
        class.heap.alloc(len)
    }

    /// Whether a class is one of this pool, whose handle may be one for another class.
    #[cold]
    #[inline(never)]
    fn has<C>(&self, class: &Class<C>) -> bool {
        std::ptr::eq(&*self.core().family, &*class.heap.core().family)
    }
}

impl<R: OneDevice> Pool<R> {
    /// An access class by its name, as one whose buffers `C` can reach: the one that `access` and `capacity`
    /// of the builder described is `"default"`.
    ///
    /// # Errors
    /// [`LookupError`]: no such class, with the names there are; or one that has a remote right where
    /// [`Local`](crate::reach::Local) is asked for, or none where [`Remote`](crate::reach::Remote) is.
    pub fn class<C: OneDevice>(&self, name: &str) -> Result<Class<C>, LookupError> {
        self.find_class(name)
    }
}

impl Pool<Rails> {
    /// An access class by its name; the one that `access` and `capacity` of the builder described is
    /// `"default"`.
    ///
    /// # Errors
    /// [`LookupError::NoClass`], with the names there are.
    pub fn class(&self, name: &str) -> Result<Class<Rails>, LookupError> {
        self.find_class(name)
    }
}

impl<R: Reach> Pool<R> {
    /// A share by its name, of whichever access class.
    ///
    /// # Errors
    /// [`LookupError`]: no such share, with the names there are; or one of an access class that this
    /// handle's `R` rules out.
    pub fn share(&self, name: &str) -> Result<Share<R>, LookupError> {
        self.find_share(name, |_| true)
    }

    fn find_class<C: Reach>(&self, name: &str) -> Result<Class<C>, LookupError> {
        let classes = || self.heaps().classes().map(|(class, _)| class);
        let core =
            classes().find(|core| core.name == name).ok_or_else(|| LookupError::NoClass {
                asked: name.to_owned(),
                present: classes().map(|core| core.name.clone()).collect(),
            })?;
        core.permits::<C>(&core.name)?;
        let root = classes().next().map_or(0, |core| std::ptr::from_ref(core) as usize);
        Ok(Class { heap: self.handle(core.reference()), root })
    }

    /// A share of one of some classes.
    fn find_share(&self, name: &str, of: impl Fn(&Core) -> bool) -> Result<Share<R>, LookupError> {
        let shares = || {
            let all = self.heaps().classes().filter(|(class, _)| of(class));
            all.flat_map(|(class, shares)| shares.map(move |share| (class, share)))
        };
        let found = shares().find(|(_, share)| share.name == name);
        let (class, share) = found.ok_or_else(|| LookupError::NoShare {
            asked: name.to_owned(),
            present: shares().map(|(_, share)| share.name.clone()).collect(),
        })?;
        share.permits::<R>(&class.name)?;
        Ok(Share::new(self.handle(share.reference())))
    }
}

impl Core {
    /// Whether its buffers are what `R` says.
    fn permits<R: Reach>(&self, class: &str) -> Result<(), LookupError> {
        let (class, access) = (class.to_owned(), self.access);
        match R::REMOTE {
            Some(true) if !self.remote => Err(LookupError::NotRemote { class, access }),
            Some(false) if self.remote => Err(LookupError::NotLocal { class, access }),
            _ => Ok(()),
        }
    }
}
