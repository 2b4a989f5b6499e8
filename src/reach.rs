//! Who can reach a buffer, as a type: what a handle may offer without asking anything at run time.
//!
//! A handle of a pool and its buffers carry one of these as a parameter ([`Any`] unless said). It takes no
//! space and costs nothing.

use std::fmt;

mod sealed {
    pub trait Sealed {}
}

/// Who can reach a buffer. Implemented by the types of this module alone.
pub trait Reach: sealed::Sealed + Send + Sync + fmt::Debug + Copy + 'static {
    #[doc(hidden)]
    const ONE_DEVICE: bool;
}

/// Buffers of pools on one device, so that there is one lkey which cannot be the wrong one.
pub trait OneDevice: Reach {}

macro_rules! reach {
    ($(#[$doc:meta])* $name:ident, $one:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
        #[non_exhaustive]
        pub struct $name;

        impl sealed::Sealed for $name {}

        impl Reach for $name {
            const ONE_DEVICE: bool = $one;
        }
    };
}

reach!(
    /// One device; whether peers can reach the buffer is known at run time
    /// ([`Buf::remote`](crate::Buf::remote) is an `Option`).
    Any,
    true
);
reach!(
    /// One device, this host alone: there is no rkey, and no method that could give one.
    ///
    /// ```compile_fail
    /// fn f(buf: pinpool::Buf<pinpool::reach::Local>) { buf.remote(); }
    /// ```
    Local,
    true
);
reach!(
    /// One device, and peers too: [`Buf::remote`](crate::Buf::remote) always has an rkey.
    Remote,
    true
);
reach!(
    /// Several devices: every key must be asked for by device, since no default could be right.
    ///
    /// ```compile_fail
    /// fn f(buf: pinpool::Buf<pinpool::reach::Rails>) { buf.lkey(); }
    /// ```
    Rails,
    false
);

impl OneDevice for Any {}
impl OneDevice for Local {}
impl OneDevice for Remote {}
