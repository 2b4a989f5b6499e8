//! All contenders by name, and how to do something with one of them whose type only its name tells.

use parking_lot::Mutex;

use super::{
    contender::{Contender, Raw},
    floor::{OwnedVec, TlsVec},
    general::{General, System},
    pools::{Coloured, Local, Plain},
    queues::Queue,
    ring::Bare,
};
#[cfg(feature = "rivals")]
use super::{
    general::{Jemalloc, MiMalloc, SnMalloc},
    ruapc::Ruapc,
};

/// What contenders are to one another.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    /// What nothing can beat.
    Floor,
    /// This crate.
    Pool,
    /// A general allocator.
    General,
    /// Another pool or free list.
    Other,
}

/// The default jemalloc, tuned, in a process of its own; see `worker.rs`.
pub(crate) const TUNED: &str = "jemalloc-tuned";

/// In the order of the output. The flag: whether it needs the feature `rivals`.
pub(crate) const ALL: [(&str, Kind, bool); 14] = [
    ("floor-vec", Kind::Floor, false),
    ("floor-tls", Kind::Floor, false),
    ("ring", Kind::Floor, false),
    ("pool", Kind::Pool, false),
    ("pool-local", Kind::Pool, false),
    ("pool-coloured", Kind::Pool, false),
    ("system", Kind::General, false),
    ("mimalloc", Kind::General, true),
    ("jemalloc", Kind::General, true),
    (TUNED, Kind::General, true),
    ("snmalloc", Kind::General, true),
    ("ruapc-bufpool", Kind::Other, true),
    ("mutex-vec", Kind::Other, false),
    ("array-queue", Kind::Other, true),
];

pub(crate) fn kind(name: &str) -> Option<Kind> {
    ALL.iter().find(|(n, ..)| *n == name).map(|(_, kind, _)| *kind)
}

/// Something to do with a contender.
pub(crate) trait Visit {
    type Out;
    fn visit<C: Contender>(self) -> Self::Out
    where
        C::Shared: Send;
}

/// Does it with the contender of that name, if this program has it.
pub(crate) fn with<V: Visit>(name: &str, v: V) -> Option<V::Out> {
    macro_rules! find {
        ($($(#[$meta:meta])* $contender:ty),* $(,)?) => {
            $(
                $(#[$meta])*
                if name == <$contender>::NAME {
                    return Some(v.visit::<$contender>());
                }
            )*
        };
    }
    find!(
        OwnedVec,
        TlsVec,
        Bare,
        Plain,
        Local,
        Coloured,
        General<System>,
        Queue<Mutex<Vec<Raw>>>,
        #[cfg(feature = "rivals")]
        General<MiMalloc>,
        #[cfg(feature = "rivals")]
        General<Jemalloc>,
        #[cfg(feature = "rivals")]
        General<SnMalloc>,
        #[cfg(feature = "rivals")]
        Ruapc,
        #[cfg(feature = "rivals")]
        Queue<crossbeam_queue::ArrayQueue<Raw>>,
    );
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Name;

    impl Visit for Name {
        type Out = &'static str;
        fn visit<C: Contender>(self) -> &'static str {
            C::NAME
        }
    }

    #[test]
    fn every_name_leads_to_its_contender() {
        for (name, _, rival) in ALL {
            let there = name != TUNED && (!rival || cfg!(feature = "rivals"));
            assert_eq!(with(name, Name), there.then_some(name));
        }
    }
}
