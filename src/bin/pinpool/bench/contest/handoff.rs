//! One thread takes buffers and touches them, another receives them over a ring, looks, and gives them
//! back. Timed where they arrive.

use std::{
    sync::{
        Arc, Barrier,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
    thread,
};

use super::{
    contender::{Contender, Handle, out},
    cpu,
    measure::{Marks, Plan, Rep, Runner},
    opaque::{keep_addr, unknown},
    ring::{Receiver, Ring, Sender},
    spec::RING,
};

/// Messages before the clock starts: both sides' caches are then as they stay.
const WARM_UP: usize = 32 * RING;

pub(crate) struct Handoff<C: Contender> {
    shared: Arc<C::Shared>,
    bytes: usize,
    plan: Plan,
    per_slice: Option<usize>,
}

type Held<C> = <<C as Contender>::Handle as Handle>::Held;

impl<C: Contender> Handoff<C>
where
    C::Shared: Send,
{
    pub(crate) fn new(shared: Arc<C::Shared>, bytes: usize, plan: Plan) -> Self {
        Self { shared, bytes, plan, per_slice: None }
    }

    /// Runs both sides, each on a thread and a processor of its own.
    fn both<T: Send>(
        &self,
        send: impl FnOnce(C::Handle, Sender<'_, Held<C>>) + Send,
        receive: impl FnOnce(C::Handle, Receiver<'_, Held<C>>) -> T + Send,
    ) -> Result<T, String> {
        let mut ring = Ring::new();
        let (sender, receiver) = ring.split();
        let (ready, failed) = (Barrier::new(2), AtomicBool::new(false));
        // Neither side waits for another that could not start.
        let start = |processor| {
            cpu::pin(processor);
            let handle = C::Handle::new(&self.shared);
            failed.fetch_or(handle.is_err(), SeqCst);
            ready.wait();
            match failed.load(SeqCst) {
                false => handle,
                true => Err(handle.err().unwrap_or_else(|| "the other side failed".to_owned())),
            }
        };
        let start = &start;
        thread::scope(|s| {
            let sending = s.spawn(move || start(0).map(|handle| send(handle, sender)));
            let receiving = s.spawn(move || start(1).map(|handle| receive(handle, receiver)));
            let panicked = |_| "a thread panicked".to_owned();
            sending.join().map_err(panicked)??;
            receiving.join().map_err(panicked)?
        })
    }

    /// What one thread writes the other reads, in order.
    pub(crate) fn check(&self) -> Result<(), String> {
        let messages = 4 * RING as u64;
        let send = |mut handle: C::Handle, mut sender: Sender<'_, Held<C>>| {
            for i in 0..messages {
                let message = || {
                    let held = out(&mut handle, self.bytes);
                    // SAFETY: the buffer is ours; all contenders' are 8-byte aligned and longer.
                    unsafe { C::Handle::addr(&held).cast::<u64>().write(i) };
                    held
                };
                if !sender.send(message) {
                    return;
                }
            }
        };
        let receive = |mut handle: C::Handle, mut receiver: Receiver<'_, Held<C>>| {
            for i in 0..messages {
                let held = receiver.receive().ok_or("the sender stopped")?;
                // SAFETY: as above, and now it is ours.
                let found = unsafe { C::Handle::addr(&held).cast::<u64>().read() };
                handle.put(held, self.bytes);
                if found != i {
                    return Err(format!("message {i} arrived as {found}"));
                }
            }
            Ok(())
        };
        self.both(send, receive)?
    }

    fn run(&self, slices: usize, per_slice: usize) -> Result<Marks, String> {
        let messages = WARM_UP + slices * per_slice;
        let send = |handle: C::Handle, sender: Sender<'_, Held<C>>| {
            send_all::<C>(handle, sender, self.bytes, messages);
        };
        let receive = |handle: C::Handle, receiver: Receiver<'_, Held<C>>| {
            receive_all::<C>(handle, receiver, self.bytes, Marks::new(slices, per_slice), slices)
        };
        self.both(send, receive)?.ok_or_else(|| "the sender stopped".to_owned())
    }
}

#[inline(never)]
fn send_all<C: Contender>(
    mut handle: C::Handle,
    mut sender: Sender<'_, Held<C>>,
    bytes: usize,
    messages: usize,
) {
    handle.begin();
    for _ in 0..messages {
        if !sender.send(|| out(&mut handle, unknown(bytes))) {
            return;
        }
    }
}

#[inline(never)]
fn receive_all<C: Contender>(
    mut handle: C::Handle,
    mut receiver: Receiver<'_, Held<C>>,
    bytes: usize,
    mut marks: Marks,
    slices: usize,
) -> Option<Marks> {
    handle.begin();
    let mut receive = |n: usize| {
        for _ in 0..n {
            let held = receiver.receive()?;
            let addr = C::Handle::addr(&held);
            // SAFETY: the buffer is ours and at least one byte long.
            let byte = unsafe { addr.read() };
            keep_addr(addr.wrapping_add(usize::from(byte)));
            handle.put(held, unknown(bytes));
        }
        Some(())
    };
    receive(WARM_UP)?;
    marks.mark();
    for _ in 0..slices {
        receive(marks.per_slice())?;
        marks.mark();
    }
    Some(marks)
}

impl<C: Contender> Runner for Handoff<C>
where
    C::Shared: Send,
{
    fn rep(&mut self) -> Result<Vec<Rep>, String> {
        let per_slice = match self.per_slice {
            Some(n) => n,
            None => {
                let ns = self.run(64, 256)?.rep().centre;
                *self.per_slice.insert(((self.plan.slice_ns / ns) as usize).max(1))
            }
        };
        Ok(vec![self.run(self.plan.slices, per_slice)?.rep()])
    }
}
