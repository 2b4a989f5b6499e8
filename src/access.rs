//! Rights and keys: what a memory region permits, and the two numbers that stand for it.

use std::fmt;

bitflags::bitflags! {
    /// The rights that an arena is registered with, bit for bit those of `ibv_access_flags`.
    ///
    /// The device may always read local memory; every other right must be asked for. Ask for as few
    /// as the protocol needs: a remote right is a right over the whole arena, not over one buffer.
    #[derive(Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
    pub struct Access: u32 {
        /// The device writes this memory: receive buffers, targets of RDMA READ, atomic results.
        const LOCAL_WRITE = 1;
        /// Peers may write it. Only together with [`Access::LOCAL_WRITE`].
        const REMOTE_WRITE = 1 << 1;
        /// Peers may read it.
        const REMOTE_READ = 1 << 2;
        /// Peers may run atomics on it. Only together with [`Access::LOCAL_WRITE`].
        const REMOTE_ATOMIC = 1 << 3;
        /// Memory windows may be bound to it.
        const MW_BIND = 1 << 4;
        /// Addresses on the wire count from the start of the arena (it is registered with iova 0),
        /// so that peers never learn virtual addresses.
        const ZERO_BASED = 1 << 5;
        /// The memory is backed by hugepages throughout; lets some devices build smaller tables.
        const HUGETLB = 1 << 7;
        /// Writes may be seen out of order; faster on some hosts, for protocols that allow it.
        const RELAXED_ORDERING = 1 << 20;
    }
}

impl Access {
    /// The rights that give a peer anything at all.
    pub const REMOTE: Access =
        Access::REMOTE_READ.union(Access::REMOTE_WRITE).union(Access::REMOTE_ATOMIC);

    /// Whether a peer can do anything with this memory, and so whether an rkey exists.
    #[inline]
    pub const fn is_remote(self) -> bool {
        self.intersects(Access::REMOTE)
    }

    /// Says why this combination cannot be registered, or `None` when it can.
    ///
    /// The verbs manual requires local write wherever a peer may write; devices answer EINVAL
    /// without a word, so it is said here first.
    pub fn conflict(self) -> Option<&'static str> {
        let local_write = self.contains(Access::LOCAL_WRITE);
        if self.contains(Access::REMOTE_WRITE) && !local_write {
            Some(
                "REMOTE_WRITE needs LOCAL_WRITE: a device may not write for a peer what it may not write itself",
            )
        } else if self.contains(Access::REMOTE_ATOMIC) && !local_write {
            Some("REMOTE_ATOMIC needs LOCAL_WRITE: an atomic writes its target")
        } else {
            None
        }
    }
}

impl fmt::Debug for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_empty() {
            return f.write_str("LOCAL_READ");
        }
        bitflags::parser::to_writer(self, f)
    }
}

/// The key by which this host's own work requests name registered memory.
///
/// A type of its own, so that it cannot stand where an [`RKey`] belongs:
///
/// ```compile_fail
/// # use pinpool::{LKey, RKey};
/// fn send_to_peer(_: RKey) {}
/// fn f(lkey: LKey) { send_to_peer(lkey) }
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(transparent)]
pub struct LKey(u32);

/// The key by which a peer's work requests name this host's memory.
///
/// ```compile_fail
/// # use pinpool::{LKey, RKey};
/// fn post_locally(_: LKey) {}
/// fn f(rkey: RKey) { post_locally(rkey) }
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(transparent)]
pub struct RKey(u32);

macro_rules! key {
    ($t:ident) => {
        impl $t {
            /// Wraps the number that a device gave.
            #[inline]
            pub const fn new(raw: u32) -> Self {
                Self(raw)
            }

            /// The number, in host byte order, as verbs structures take it.
            #[inline]
            pub const fn get(self) -> u32 {
                self.0
            }
        }

        impl fmt::Debug for $t {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!(stringify!($t), "({:#x})"), self.0)
            }
        }
    };
}
key!(LKey);
key!(RKey);

/// Both keys of one memory region in one 64-bit word, lkey in the low half.
///
/// One word, because the hot path stores and loads them together: two 32-bit stores followed by one
/// 64-bit load defeat the processor's store forwarding.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(transparent)]
pub(crate) struct PackedKeys(u64);

impl PackedKeys {
    #[inline]
    pub(crate) const fn new(lkey: LKey, rkey: RKey) -> Self {
        Self(lkey.0 as u64 | (rkey.0 as u64) << 32)
    }

    #[inline]
    pub(crate) const fn from_word(word: u64) -> Self {
        Self(word)
    }

    #[inline]
    pub(crate) const fn word(self) -> u64 {
        self.0
    }

    #[inline]
    pub(crate) const fn lkey(self) -> LKey {
        LKey(self.0 as u32)
    }

    #[inline]
    pub(crate) const fn rkey(self) -> RKey {
        RKey((self.0 >> 32) as u32)
    }
}

/// The keys of the memory region that a pointer lies in.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Keys {
    /// For this host's own work requests.
    pub lkey: LKey,
    /// For peers; `None` where the access class grants them nothing, whatever number the device
    /// returned.
    pub rkey: Option<RKey>,
}

/// One scatter-gather element, laid out as `struct ibv_sge` is, so that a `*const Sge` may be passed
/// where verbs want a `*const ibv_sge`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(C)]
pub struct Sge {
    /// Virtual address, or offset into the arena when it is [`Access::ZERO_BASED`].
    pub addr: u64,
    /// Bytes.
    pub length: u32,
    /// The lkey.
    pub lkey: LKey,
}

/// What a peer needs to reach a buffer. Send it by any channel.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct RemoteBuf {
    /// Virtual address, or offset into the arena when it is [`Access::ZERO_BASED`].
    pub addr: u64,
    /// Bytes.
    pub len: u64,
    /// The rkey.
    pub rkey: RKey,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packed_keys_keep_both_halves() {
        let k = PackedKeys::new(LKey::new(0xffff_fffe), RKey::new(0x8000_0001));
        assert_eq!((k.lkey().get(), k.rkey().get()), (0xffff_fffe, 0x8000_0001));
        assert_eq!(PackedKeys::from_word(k.word()), k);
    }

    #[test]
    fn only_writes_for_peers_need_local_write() {
        for bits in 0..16 {
            let a = Access::from_bits_truncate(bits);
            let writes = a.intersects(Access::REMOTE_WRITE | Access::REMOTE_ATOMIC);
            assert_eq!(a.conflict().is_some(), writes && !a.contains(Access::LOCAL_WRITE), "{a}");
        }
    }
}
