//! The faces that code which knows nothing of RDMA sees: allocators, `bytes`, `std::io`, framing. Each is a
//! thin layer over the pool; none adds anything to the paths that do not use it.

#[cfg(any(feature = "allocator-api2", feature = "nightly"))]
mod allocator;
#[cfg(feature = "bytes")]
mod bytes;
#[cfg(feature = "capi")]
pub mod capi;
#[cfg(feature = "codec")]
pub mod codec;
#[cfg(feature = "global")]
mod global;
mod io;
#[cfg(feature = "metrics")]
mod metrics;
mod part;
#[cfg(feature = "bytemuck")]
mod pod;
mod slices;
#[cfg(feature = "top")]
mod top;
#[cfg(feature = "tracing")]
mod trace;

#[cfg(feature = "global")]
pub use global::{AttachError, PinnedAlloc};
#[cfg(feature = "metrics")]
pub use metrics::count_event;
pub use part::Part;
#[cfg(feature = "bytemuck")]
pub use pod::{PodError, Typed};
#[cfg(feature = "top")]
pub use top::TopServer;
#[cfg(feature = "tracing")]
pub use trace::trace_event;
