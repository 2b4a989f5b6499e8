//! What is measured: the cases and their sizes.

/// A case, by the name that it has in the output.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Case {
    /// One buffer out, and back.
    Pair,
    /// 64 out, 64 back, the last first.
    BatchLifo,
    /// 64 out, 64 back in random order.
    BatchRandom,
    /// 1,024 out, 1,024 back, each operation timed.
    Burst,
    /// 1,024 live buffers of mixed sizes; a random one goes back, a new one comes.
    Churn,
    /// One thread takes, another gives back.
    Handoff,
    /// The keys of a random live pointer.
    KeysOf,
    /// How full the pool is at the first failure.
    Fill,
}

pub(crate) const CASES: [(Case, &str); 8] = [
    (Case::Pair, "pair"),
    (Case::BatchLifo, "batch-lifo"),
    (Case::BatchRandom, "batch-random"),
    (Case::Burst, "burst"),
    (Case::Churn, "churn"),
    (Case::Handoff, "handoff"),
    (Case::KeysOf, "keys-of"),
    (Case::Fill, "fill"),
];

impl Case {
    pub(crate) fn name(self) -> &'static str {
        CASES.iter().find(|(c, _)| *c == self).map_or("", |(_, name)| name)
    }

    /// What is measured apart from one another; most cases measure one thing.
    pub(crate) fn ops(self) -> &'static [Option<&'static str>] {
        if self == Self::Burst { &[Some("alloc"), Some("free")] } else { &[None] }
    }

    pub(crate) fn from_name(name: &str) -> Option<Self> {
        CASES.iter().find(|(_, n)| *n == name).map(|(c, _)| *c)
    }
}

/// One case with its numbers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Spec {
    pub(crate) case: Case,
    /// The size, or the smallest of mixed sizes.
    pub(crate) bytes: usize,
    /// The largest of mixed sizes; otherwise `bytes`.
    pub(crate) bytes_max: usize,
    pub(crate) threads: usize,
    /// Buffers out at a time.
    pub(crate) live: usize,
    /// Arenas of the pool; 0 for as many as it makes by itself.
    pub(crate) arenas: usize,
}

/// The buffers of one batch.
pub(crate) const BATCH: usize = 64;
/// The buffers of one burst.
pub(crate) const BURST: usize = 1024;
/// Live buffers in churn.
pub(crate) const CHURN: usize = 1024;
/// Places in the ring of the handoff.
pub(crate) const RING: usize = 1024;

impl Spec {
    fn of(case: Case, bytes: usize) -> Self {
        let live = match case {
            Case::Pair => 1,
            Case::BatchLifo | Case::BatchRandom => BATCH,
            Case::Burst => BURST,
            Case::Churn => CHURN,
            Case::Handoff => RING,
            Case::KeysOf | Case::Fill => 0,
        };
        let threads = if case == Case::Handoff { 2 } else { 1 };
        Self { case, bytes, bytes_max: bytes, threads, live, arenas: 0 }
    }

    /// What the pool needs, so that neither its size nor its limits per thread are in the way.
    pub(crate) fn capacity(&self, quick: bool) -> usize {
        match self.case {
            Case::KeysOf => 128 << 20,
            Case::Churn => 1 << 30,
            // The larger a pool, the less one hole that is too small for the longest buffer weighs.
            Case::Fill if quick => 256 << 20,
            Case::Fill => 2 << 30,
            _ => 256 << 20,
        }
    }

    pub(crate) fn is_mixed(&self) -> bool {
        self.bytes != self.bytes_max
    }
}

/// A group of cases, as the command line names it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Group {
    Alloc,
    Handoff,
    Churn,
    Threads,
}

impl Group {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Alloc => "alloc",
            Self::Handoff => "handoff",
            Self::Churn => "churn",
            Self::Threads => "threads",
        }
    }

    pub(crate) fn specs(self) -> Vec<Spec> {
        let each = |case, sizes: &[usize]| -> Vec<Spec> {
            sizes.iter().map(|&bytes| Spec::of(case, bytes)).collect()
        };
        const KIB: usize = 1 << 10;
        match self {
            Self::Alloc => [
                each(Case::Pair, &[256, 4 * KIB, 64 * KIB, 1024 * KIB]),
                each(Case::BatchLifo, &[4 * KIB, 64 * KIB]),
                each(Case::BatchRandom, &[4 * KIB, 64 * KIB]),
                each(Case::Burst, &[4 * KIB]),
                keys_of(),
                vec![Spec { bytes_max: 1024 * KIB, ..Spec::of(Case::Fill, 256) }],
            ]
            .concat(),
            Self::Handoff => each(Case::Handoff, &[4 * KIB]),
            Self::Churn => vec![Spec { bytes_max: 256 * KIB, ..Spec::of(Case::Churn, 256) }],
            Self::Threads => {
                [1, 2, 16].map(|threads| Spec { threads, ..Spec::of(Case::Pair, 4 * KIB) }).to_vec()
            }
        }
    }
}

/// Every number of arenas with every number of live buffers, each as long as all of them can be.
fn keys_of() -> Vec<Spec> {
    let mut specs = Vec::new();
    for arenas in [1, 8, 64] {
        for (live, bytes) in [(1, 1 << 20), (1_000, 125 << 10), (1_000_000, 128)] {
            specs.push(Spec { live, arenas, ..Spec::of(Case::KeysOf, bytes) });
        }
    }
    specs
}
