//! Rare events for `tracing`, each with its numbers as fields. All of them come from the pool's own [`Event`]s,
//! so that there is one place where they arise; nothing is traced unless the user asks.

use ::tracing::{debug, error, info, warn};

use crate::config::Event;

/// Traces a rare event under the target `pinpool`: hand it to [`Builder::on_event`](crate::Builder::on_event),
/// alone or out of a function of your own. Failures that lose memory are errors, those that the pool lives with
/// are warnings; `shrank` and `taken_down` are for debugging, and the rest is information.
///
/// ```
/// # use pinpool::{Device, Pages, Pool};
/// let builder = Pool::builder().device(Device::soft()).capacity(1 << 20).pages(Pages::Base);
/// let pool = builder
///     .on_event(|event| {
///         let _span = tracing::info_span!("pool", name = "main").entered();
///         pinpool::trace_event(event);
///     })
///     .build()?;
/// # Ok::<(), pinpool::BuildError>(())
/// ```
pub fn trace_event(event: &Event<'_>) {
    const TARGET: &str = "pinpool";
    let kind = event.name();
    match *event {
        Event::DeregisterFailed { addr, len, error } => {
            error!(target: TARGET, kind, addr, len, %error, "a device would not deregister an arena: its memory is lost");
        }
        Event::UnmapFailed { addr, len, error } => {
            error!(target: TARGET, kind, addr, len, %error, "the system would not unmap memory: it is lost");
        }
        Event::HugepagesMissing { arena, len, page_size, free_pages } => {
            warn!(target: TARGET, kind, arena, len, page_size, free_pages, "no hugepages for an arena: it is on base pages");
        }
        Event::GrowthFailed { len, capacity, max_capacity, failures, retry_after, error } => {
            warn!(target: TARGET, kind, len, capacity, max_capacity, failures, ?retry_after, %error, "the pool could not grow");
        }
        Event::Built { arenas, capacity, took } => {
            info!(target: TARGET, kind, arenas, capacity, ?took, "the pool was built");
        }
        Event::BuildFailed { error } => {
            error!(target: TARGET, kind, %error, "the pool could not be built");
        }
        Event::Grew { len, capacity, took } => {
            info!(target: TARGET, kind, len, capacity, ?took, "the pool grew");
        }
        Event::Shrank { len, capacity } => {
            debug!(target: TARGET, kind, len, capacity, "the pool gave an arena back");
        }
        Event::Exhausted { books, refused } => {
            warn!(target: TARGET, kind, refused, asked = books.asked, live = books.live, capacity = books.capacity,
                max_capacity = books.max_capacity, largest_free = books.largest_free, waiting = books.waiting,
                "allocs were refused");
        }
        Event::WrittenAfterFree(damage) => {
            error!(target: TARGET, kind, %damage, "somebody wrote to memory that nobody had");
        }
        Event::WrittenBeyondEnd(damage) => {
            error!(target: TARGET, kind, %damage, "somebody wrote beyond the end of a buffer");
        }
        Event::StillOut(out) => {
            warn!(target: TARGET, kind, buffers = out.buffers, bytes = out.bytes, in_flight = out.in_flight, %out,
                "the last handle goes while buffers are out");
        }
        Event::TakenDown { arenas, bytes } => {
            debug!(target: TARGET, kind, arenas, bytes, "the arenas were taken down");
        }
    }
}
