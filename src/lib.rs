#![cfg_attr(feature = "nightly", feature(allocator_api))]
#![cfg_attr(docsrs, feature(doc_cfg))]
//! A pinned-memory pool allocator for RDMA.
//!
//! An RDMA device touches only memory that was registered, and registering is slow: it pins every page
//! and builds the device's translation table. This crate does it once, at start-up, for a few large
//! hugepage-backed *arenas* under one protection domain, and from then on hands out buffers that carry
//! `(addr, lkey, rkey)`, in a few nanoseconds and without a system call.
//!
//! ```
//! use pinpool::{Access, Device, Pool};
//!
//! let pool = Pool::builder()
//!     .device(Device::soft()) // Device::first()? or Device::open("mlx5_0")? on a machine with RDMA
//!     .access(Access::LOCAL_WRITE | Access::REMOTE_READ)
//!     .capacity(4 << 20) // registered here, once
//!     .build()?;
//!
//! let mut buf = pool.alloc(4096)?;
//! buf[..5].copy_from_slice(b"hello");
//! let sge = buf.sge(); // for this host's work requests: addr, length, lkey
//! let remote = buf.remote(); // for a peer: addr, len, rkey, since REMOTE_READ was asked for
//! assert_eq!(Some(buf.keys()), pool.keys_of(buf.as_ptr()));
//! # assert!(remote.is_some() && sge.length == 4096);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! A [`Pool`] is built from a [`Device`] through a [`Builder`]. [`Buf`] is the handle of one buffer. A pool can
//! have several access classes ([`Class`]) and named reservations ([`Share`]).
//! Anything that registers memory can take the device's place: see [`device::Registrar`]. [`doctor()`] looks a
//! machine over for a pool without building it.
//!
//! # Features
//! `rdma-sys` (default) and `rdma-mummy-sys` bring verbs devices, by two bindings; without either there
//! is the software device alone. `fault` adds registering and mapping that fail on demand, `loopback` connected
//! queue pairs on one device, `cli` the `pinpool` program.
//!
//! For code that knows nothing of RDMA: `allocator-api2` (or `nightly`) makes a pool the allocator of
//! collections, `global` brings a global allocator that serves from a pool, `bytes` and `codec` hand buffers out
//! as `bytes::Bytes` and read messages into them over tokio, `bytemuck` views them as plain old data.
//!
//! For operators: `metrics` gives a pool's numbers to the facade of that name (and so to Prometheus), `tracing`
//! traces rare events, `top` serves a map of a pool on a socket for `pinpool top`.

// Layers, lowest first: each file uses only its own or lower ones.

// Layer 0: words, errors, arithmetic, the switch to loom.
#[cfg(not(loom))]
mod access;
mod bell;
#[cfg(not(loom))]
mod config;
mod contained;
#[cfg(not(loom))]
mod damage;
#[cfg(not(loom))]
mod error;
mod lock;
#[cfg(not(loom))]
mod outstanding;
#[cfg(not(loom))]
mod problem;
#[cfg(not(loom))]
pub mod reach;
#[cfg(not(loom))]
mod reentry;
#[cfg(not(loom))]
mod size_class;
mod sync;

// Layer 1: the operating system and libibverbs.
#[cfg(not(loom))]
mod sys;

// Layer 2: devices, and judging a plan by what they and the system permit.
#[cfg(not(loom))]
pub mod device;
#[cfg(not(loom))]
mod preflight;

// Layer 3: memory.
#[cfg(not(loom))]
mod arena;
#[cfg(not(loom))]
mod ordered;
#[cfg(not(loom))]
mod page_map;
mod published;
#[cfg(not(loom))]
mod slab;

// Layer 4: free blocks.
#[cfg(not(loom))]
mod depot;
mod drought;
mod gate;
#[cfg(not(loom))]
mod guard;
#[cfg(not(loom))]
mod magazine;
mod mark;
#[cfg(not(loom))]
mod outs;
mod record;
mod stack;
#[cfg(not(loom))]
mod stats;
#[cfg(not(loom))]
mod thread;
#[cfg(not(loom))]
mod tokens;
mod waiters;

// Layer 5: the pool.
#[cfg(not(loom))]
mod batch;
#[cfg(not(loom))]
mod buf;
#[cfg(not(loom))]
mod local;
#[cfg(not(loom))]
mod pool;
#[cfg(not(loom))]
mod sg_list;
#[cfg(not(loom))]
mod shared;

// Layer 6: the faces, what looks a machine over, and rights over single buffers.
#[cfg(not(loom))]
mod adapters;
#[cfg(not(loom))]
mod doctor;
#[cfg(not(loom))]
pub mod lease;

// Beside the layers: queue pairs to move bytes with.
#[cfg(all(not(loom), feature = "loopback", any(feature = "rdma-sys", feature = "rdma-mummy-sys")))]
pub mod loopback;
// Without the feature it probes devices for what their windows hold, and no more.
#[cfg(all(
    not(loom),
    not(feature = "loopback"),
    any(feature = "rdma-sys", feature = "rdma-mummy-sys")
))]
#[allow(dead_code, unused_imports, unreachable_pub)]
mod loopback;

#[cfg(not(loom))]
pub use crate::adapters::Part;
#[cfg(all(not(loom), feature = "top"))]
pub use crate::adapters::TopServer;
#[cfg(all(not(loom), feature = "capi"))]
pub use crate::adapters::capi;
#[cfg(all(not(loom), feature = "codec"))]
pub use crate::adapters::codec;
#[cfg(all(not(loom), feature = "metrics"))]
pub use crate::adapters::count_event;
#[cfg(all(not(loom), feature = "tracing"))]
pub use crate::adapters::trace_event;
#[cfg(all(not(loom), feature = "global"))]
pub use crate::adapters::{AttachError, PinnedAlloc};
#[cfg(all(not(loom), feature = "bytemuck"))]
pub use crate::adapters::{PodError, Typed};
#[cfg(all(feature = "fault", not(loom)))]
#[doc(hidden)]
pub use crate::lock::locks_held;
#[cfg(not(loom))]
pub use crate::{
    access::{Access, Keys, LKey, RKey, RemoteBuf, Sge},
    arena::{ArenaInfo, leaked_bytes},
    batch::Batch,
    buf::{Buf, CapacityError},
    config::{
        ArenaLayout, Backing, Builder, Event, ExportLayout, Guards, Numa, PageSize, Pages,
        PoolExport, Progress, Reserve, Stage, Track,
    },
    damage::{Damage, Owner, Site},
    device::{Device, Guarantees, LeaseSupport},
    doctor::{
        CgroupReport, DeviceReport, DoctorOptions, HugepageReport, MemlockReport, NodeReport,
        PoolReport, Report, doctor,
    },
    error::{
        AdoptError, AllocError, BuildError, Bytes, CloseError, DeviceChangeError, DeviceError,
        Exhausted, ExportError, FreeError, LookupError, RegisterError, TokenError, UnknownDevice,
    },
    lease::{Lease, LeaseQp},
    local::LocalPool,
    outstanding::{OutSite, Outstanding},
    pool::{
        AllocFuture, ArenaMap, Class, DeviceChange, InFlight, Outcome, Pool, PoolMap, PostError,
        Posted, Share, ShareFuture,
    },
    problem::Problem,
    sg_list::{SgList, SgListError},
    shared::SharedArenas,
    stats::{
        AccessStats, ArenaStats, Books, CacheStats, ClassStats, GuardStats, PageStats, ShareStats,
        Stats,
    },
};

// Examples of README and book; some open verbs devices.
#[cfg(all(doctest, not(loom), any(feature = "rdma-sys", feature = "rdma-mummy-sys")))]
mod book;
