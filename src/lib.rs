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
//! A [`Pool`] is built from a [`Device`] through a [`Builder`]. [`Buf`] is the handle of one buffer.
//! Anything that registers memory can take the device's place: see [`device::Registrar`]. [`doctor()`] looks a
//! machine over for a pool without building it.
//!
//! # Features
//! `rdma-sys` (default) and `rdma-mummy-sys` bring verbs devices, by two bindings; without either there
//! is the software device alone. `fault` adds a registrar that fails on demand, `loopback` connected
//! queue pairs on one device, `cli` the `pinpool` program.

// Layers, lowest first: each file uses only its own or lower ones.

// Layer 0: words, errors, arithmetic, the switch to loom.
#[cfg(not(loom))]
mod access;
#[cfg(not(loom))]
mod config;
#[cfg(not(loom))]
mod error;
#[cfg(not(loom))]
mod problem;
#[cfg(not(loom))]
pub mod reach;
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
mod page_map;
#[cfg(not(loom))]
mod slab;

// Layer 4: free blocks.
#[cfg(not(loom))]
mod depot;
mod gate;
#[cfg(not(loom))]
mod magazine;
mod stack;
#[cfg(not(loom))]
mod stats;
#[cfg(not(loom))]
mod thread;

// Layer 5: the pool.
#[cfg(not(loom))]
mod batch;
#[cfg(not(loom))]
mod buf;
#[cfg(not(loom))]
mod local;
#[cfg(not(loom))]
mod pool;

// Layer 6: the faces, and what looks a machine over.
#[cfg(not(loom))]
mod adapters;
#[cfg(not(loom))]
mod doctor;

// Beside the layers: queue pairs to move bytes with.
#[cfg(all(not(loom), feature = "loopback", any(feature = "rdma-sys", feature = "rdma-mummy-sys")))]
pub mod loopback;

#[cfg(all(not(loom), feature = "capi"))]
pub use crate::adapters::capi;
#[cfg(not(loom))]
pub use crate::{
    access::{Access, Keys, LKey, RKey, RemoteBuf, Sge},
    arena::{ArenaInfo, leaked_bytes},
    batch::Batch,
    buf::{Buf, CapacityError},
    config::{Builder, Event, Numa, PageSize, Pages, Progress, Stage},
    device::Device,
    doctor::{
        CgroupReport, DeviceReport, DoctorOptions, HugepageReport, MemlockReport, NodeReport,
        PoolReport, Report, doctor,
    },
    error::{
        AllocError, BuildError, Bytes, CloseError, DeviceError, Exhausted, FreeError, RegisterError,
    },
    local::LocalPool,
    pool::Pool,
    problem::Problem,
    stats::{ClassStats, Stats},
};

/// The examples of the README, compiled and run.
#[cfg(all(doctest, not(loom)))]
#[doc = include_str!("../README.md")]
struct Readme;
