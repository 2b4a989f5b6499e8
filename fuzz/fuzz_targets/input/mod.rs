//! What the targets make of their input: sizes, and one of those that there are.
#![allow(dead_code)]

use std::collections::HashMap;

use libfuzzer_sys::arbitrary::{self, Arbitrary};

/// Bytes: of a size that a machine has, or of one that none has; never one that would just take long.
#[derive(Arbitrary, Clone, Copy, Debug)]
pub enum Size {
    Small(u16),
    Pages(u8),
    Arenas(u8),
    Beyond(u64),
}

impl Size {
    pub fn bytes(self) -> usize {
        match self {
            Self::Small(n) => n.into(),
            Self::Pages(n) => usize::from(n) << 12,
            Self::Arenas(n) => usize::from(n % 8) << 20,
            Self::Beyond(n) => (n | 1 << 46) as usize,
        }
    }
}

/// The keys of a map, in an order that is the same in every run.
pub fn sorted<T: Ord + Copy, V>(map: &HashMap<T, V>) -> Vec<T> {
    let mut keys: Vec<_> = map.keys().copied().collect();
    keys.sort_unstable();
    keys
}

/// One of them, whatever the number.
pub fn pick<T: Copy>(list: &[T], i: u8) -> Option<T> {
    list.get(usize::from(i) % list.len().max(1)).copied()
}
