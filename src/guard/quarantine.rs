//! Quarantine: blocks that were freed and are not to be had yet, first in, first out. Manages the order and the
//! counts; what gives way when, and that nobody misses a block on its way, is the pool's business.

use std::{collections::VecDeque, ptr::NonNull};

use crate::size_class::{CLASSES, SPAN_CLASS};

/// A block that waits.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Waiting {
    pub(crate) ptr: NonNull<u8>,
    pub(crate) class: usize,
    pub(crate) bytes: usize,
}

// SAFETY: an address of a block that whoever has this owns, on whichever thread.
unsafe impl Send for Waiting {}

pub(crate) struct Quarantine {
    /// How many bytes must be freed after a block before it goes.
    limit: usize,
    bytes: usize,
    blocks: VecDeque<Waiting>,
    /// By class; the last is spans.
    counts: [usize; CLASSES + 1],
    span_bytes: usize,
    closed: bool,
}

impl Quarantine {
    pub(crate) fn new(limit: usize) -> Self {
        Self {
            limit,
            bytes: 0,
            blocks: VecDeque::new(),
            counts: [0; CLASSES + 1],
            span_bytes: 0,
            closed: false,
        }
    }

    /// Whether it takes blocks in.
    pub(crate) fn open(&self) -> bool {
        self.limit > 0 && !self.closed
    }

    /// Takes nothing in from now on.
    pub(crate) fn close(&mut self) {
        self.closed = true;
    }

    pub(crate) fn push(&mut self, block: Waiting) {
        self.bytes += block.bytes;
        self.counts[block.class] += 1;
        if block.class == SPAN_CLASS {
            self.span_bytes += block.bytes;
        }
        self.blocks.push_back(block);
    }

    /// The oldest, if so many bytes as are asked for were freed after it.
    pub(crate) fn pop_due(&mut self) -> Option<Waiting> {
        let oldest = self.blocks.front()?;
        if self.bytes - oldest.bytes < self.limit { None } else { self.pop() }
    }

    /// The oldest.
    pub(crate) fn pop(&mut self) -> Option<Waiting> {
        let block = self.blocks.pop_front()?;
        self.bytes -= block.bytes;
        self.counts[block.class] -= 1;
        if block.class == SPAN_CLASS {
            self.span_bytes -= block.bytes;
        }
        Some(block)
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    pub(crate) fn span_bytes(&self) -> usize {
        self.span_bytes
    }

    pub(crate) fn counts(&self) -> &[usize; CLASSES + 1] {
        &self.counts
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_goes_once_so_many_bytes_were_freed_after_it() {
        let block = |n: usize, bytes| Waiting {
            ptr: NonNull::new((n << 12) as *mut u8).expect("not null"),
            class: if bytes > 1 << 20 { SPAN_CLASS } else { 3 },
            bytes,
        };
        let mut q = Quarantine::new(1000);
        assert!(q.open() && !Quarantine::new(0).open());
        for n in 1..=10 {
            q.push(block(n, 100));
            assert!(
                q.pop_due().is_none(),
                "{n}: only {} were freed after the first",
                (n - 1) * 100
            );
        }
        q.push(block(11, 100));
        assert_eq!(q.pop_due().map(|b| b.ptr), Some(block(1, 0).ptr));
        assert!(q.pop_due().is_none());
        // One that is longer than all of it sends everything before it, and stays.
        q.push(block(12, 2 << 20));
        let mut gone = 0;
        while let Some(b) = q.pop_due() {
            (gone, _) = (gone + 1, assert_eq!(b.bytes, 100));
        }
        assert_eq!((gone, q.bytes(), q.span_bytes()), (10, 2 << 20, 2 << 20));
        assert_eq!((q.counts()[3], q.counts()[SPAN_CLASS]), (0, 1));
        assert!(q.pop().is_some() && q.pop().is_none());
        assert_eq!((q.bytes(), q.span_bytes()), (0, 0));
    }
}
