//! A bounded ring between one sender and one receiver, and the floor of the handoff: the same messages
//! through it, with nothing allocated.

use std::{
    cell::UnsafeCell,
    mem::MaybeUninit,
    sync::atomic::{
        AtomicBool, AtomicUsize,
        Ordering::{Acquire, Release},
    },
};

use crossbeam_utils::CachePadded;
use pinpool::{Buf, Pool};

use super::{
    bed::{Bed, Borrowed},
    contender::{Contender, Handle},
    opaque::keep,
    spec::{Case, RING, Spec},
};

/// A side that had to wait goes on when it can pass so many messages at once.
const AT_ONCE: usize = RING / 4;
/// Pauses of the processor between two looks.
const PAUSES: usize = 32;

/// Each side's counter lies on lines of its own, and each side keeps a copy of the other's.
pub(crate) struct Ring<T> {
    places: Box<[UnsafeCell<MaybeUninit<T>>]>,
    sent: CachePadded<AtomicUsize>,
    received: CachePadded<AtomicUsize>,
    closed: CachePadded<AtomicBool>,
}

// SAFETY: a place is touched by the sender until `sent` passes it, then by the receiver until `received`
// does, in turn; there is one of each, since `split` borrows the ring exclusively.
unsafe impl<T: Send> Sync for Ring<T> {}

pub(crate) struct Sender<'a, T> {
    ring: &'a Ring<T>,
    sent: usize,
    received: usize,
}

pub(crate) struct Receiver<'a, T> {
    ring: &'a Ring<T>,
    sent: usize,
    received: usize,
}

impl<T> Ring<T> {
    pub(crate) fn new() -> Self {
        Self {
            places: (0..RING).map(|_| UnsafeCell::new(MaybeUninit::uninit())).collect(),
            sent: CachePadded::new(AtomicUsize::new(0)),
            received: CachePadded::new(AtomicUsize::new(0)),
            closed: CachePadded::new(AtomicBool::new(false)),
        }
    }

    pub(crate) fn split(&mut self) -> (Sender<'_, T>, Receiver<'_, T>) {
        let (sent, received) = (*self.sent.get_mut(), *self.received.get_mut());
        let ring = &*self;
        (Sender { ring, sent, received }, Receiver { ring, sent, received })
    }

    /// Waits until `passable` messages are [`AT_ONCE`], or, once the other side is gone, any; false if
    /// there are none then.
    ///
    /// A receiver at the sender's heels would take each line away from it while it is written, and what
    /// is timed would be that. Work comes by the batch where completion queues are polled, too.
    #[cold]
    fn wait(&self, mut passable: impl FnMut() -> usize) -> bool {
        let mut spins = 0u32;
        loop {
            // The flag is read first: what the other side did before it closed is then seen.
            let closed = self.closed.load(Acquire);
            let n = passable();
            if n >= AT_ONCE || closed {
                return n > 0;
            }
            spins += 1;
            if spins < 1_000 {
                (0..PAUSES).for_each(|_| std::hint::spin_loop());
            } else {
                std::thread::yield_now();
            }
        }
    }
}

impl<T> Sender<'_, T> {
    /// Waits for room, then makes a message in its place and sends it; false if the receiver is gone.
    #[inline(always)]
    pub(crate) fn send(&mut self, message: impl FnOnce() -> T) -> bool {
        if self.sent - self.received == RING {
            let (ring, sent) = (self.ring, self.sent);
            let room = || {
                self.received = ring.received.load(Acquire);
                RING - (sent - self.received)
            };
            if !ring.wait(room) {
                return false;
            }
        }
        // SAFETY: fewer than RING messages lie between the counters, so the receiver is done with this
        // place (acquired above) and will not look at it before the store below.
        unsafe { (*self.ring.places[self.sent % RING].get()).write(message()) };
        self.sent += 1;
        self.ring.sent.store(self.sent, Release);
        true
    }
}

impl<T> Receiver<'_, T> {
    /// Receives, waiting for a message; `None` if none is left and the sender is gone.
    #[inline(always)]
    pub(crate) fn receive(&mut self) -> Option<T> {
        if self.sent == self.received {
            let (ring, received) = (self.ring, self.received);
            let arrived = || {
                self.sent = ring.sent.load(Acquire);
                self.sent - received
            };
            if !ring.wait(arrived) {
                return None;
            }
        }
        let place = self.ring.places[self.received % RING].get();
        // SAFETY: `received < sent` (acquired above), so the sender has written this place, and will not
        // touch it before the store below; each message is read once.
        let message = unsafe { (*place).assume_init_read() };
        self.received += 1;
        self.ring.received.store(self.received, Release);
        Some(message)
    }
}

impl<T> Drop for Sender<'_, T> {
    fn drop(&mut self) {
        self.ring.closed.store(true, Release);
    }
}

impl<T> Drop for Receiver<'_, T> {
    fn drop(&mut self) {
        while self.sent != self.received {
            self.receive();
        }
        self.ring.closed.store(true, Release);
    }
}

/// The ring alone, with buffers that go round in order.
pub(crate) struct Bare;

/// More than the ring holds: one is filled while the receiver looks at another.
const BUFFERS: usize = RING + 2;

impl Contender for Bare {
    const NAME: &'static str = "ring";
    type Shared = (Pool, usize);
    type Handle = BareHandle;

    fn runs(spec: &Spec) -> bool {
        spec.case == Case::Handoff
    }

    fn shared(bed: &Bed, spec: &Spec) -> Result<Self::Shared, String> {
        Ok((bed.pool(false)?, spec.bytes))
    }
}

/// As long as the pool's handle of a buffer, so that the ring moves the same bytes.
pub(crate) struct Message([*mut u8; size_of::<Buf>() / size_of::<*mut u8>()]);

// SAFETY: an address and padding.
unsafe impl Send for Message {}

pub(crate) struct BareHandle {
    _borrowed: Borrowed,
    addrs: Vec<*mut u8>,
    next: usize,
}

impl Handle for BareHandle {
    type Shared = (Pool, usize);
    type Held = Message;

    fn new((pool, bytes): &Self::Shared) -> Result<Self, String> {
        let mut borrowed = Borrowed::new(pool, BUFFERS, *bytes)?;
        let addrs = borrowed.addrs().collect();
        Ok(Self { _borrowed: borrowed, addrs, next: 0 })
    }

    /// The buffer that was sent `BUFFERS` messages ago. There is room in the ring, so the receiver has
    /// taken a message sent after it, and is done with this one.
    #[inline(always)]
    fn take(&mut self, _: usize) -> Option<Message> {
        let addr = self.addrs[self.next];
        self.next += 1;
        if self.next == BUFFERS {
            self.next = 0;
        }
        Some(Message([addr; _]))
    }

    #[inline(always)]
    fn put(&mut self, _: Message, _: usize) {}

    #[inline(always)]
    fn addr(held: &Message) -> *mut u8 {
        held.0[0]
    }

    #[inline(always)]
    fn show(held: &Message) {
        keep(held.0[0], 0, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_messages_arrive_in_order() {
        let mut ring = Ring::new();
        let (mut sender, mut receiver) = ring.split();
        std::thread::scope(|s| {
            s.spawn(move || (0..5_000).for_each(|i| assert!(sender.send(|| Box::new(i)))));
            (0..5_000).for_each(|i| assert_eq!(receiver.receive().as_deref(), Some(&i)));
            assert!(receiver.receive().is_none(), "closed and empty");
        });
    }

    #[test]
    fn a_sender_without_receiver_is_told() {
        let mut ring = Ring::new();
        let (mut sender, receiver) = ring.split();
        drop(receiver);
        let sent = (0..2 * RING).take_while(|_| sender.send(|| ())).count();
        assert_eq!(sent, RING);
    }
}
