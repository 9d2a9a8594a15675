//! Devices, shareable memory, queues and flags: what tensorwire stands on.
//!
//! A [`Region`] is physical memory that can leave its process as a [`Handle`]; a [`Span`] is a part of one.
//! A [`Queue`] does work on spans in order: copy, reduce, signal, wait. A [`Flag`] is a counter in shared
//! memory that one side advances and another waits for. The host has all three (memfd, memcpy, futex), so it
//! is a real transport and not a mock of a GPU.
//!
//! Every `unsafe` of the project lives in this crate, each with the invariant it relies on.

#[cfg(not(loom))]
pub mod cuda;
pub mod flag;
pub mod gpu;
pub mod handle;
pub mod host;
pub mod meeting;
pub mod multicast;

#[cfg(not(loom))]
mod awaited;
mod deadline;
mod device;
mod dtype;
mod element;
mod error;
mod layout;
mod op;
mod rows;
mod span;

// For tensorwire's own crates: what is in these changes without notice.
#[doc(hidden)]
pub mod clock;
#[doc(hidden)]
pub mod exit;
#[doc(hidden)]
pub mod fd;
#[doc(hidden)]
pub mod fork;
#[doc(hidden)]
pub mod handshake;
#[doc(hidden)]
pub mod latch;
#[doc(hidden)]
pub mod nvml;
#[cfg(not(loom))]
#[doc(hidden)]
pub mod pool;
#[doc(hidden)]
pub mod secret;
#[cfg(feature = "thread-gpus")]
#[doc(hidden)]
pub mod steps;
#[doc(hidden)]
pub mod subregion;
#[doc(hidden)]
pub mod sync;
#[cfg(all(feature = "thread-gpus", not(loom)))]
#[doc(hidden)]
pub mod threads;
#[cfg(not(loom))]
#[doc(hidden)]
pub mod ucx;
#[doc(hidden)]
pub mod words;

pub use deadline::Deadline;
pub use device::{Caching, Device, DeviceId, Mark, Point, Queue, Region, RegionPlace};
pub use dtype::Dtype;
pub use element::Element;
pub use error::{Error, Result};
pub use fd::Fd;
pub use flag::{Abort, Bell, Flag};
pub use handle::Handle;
pub use layout::Layout;
pub use op::ReduceOp;
pub use rows::RowPlan;
pub use secret::{Id, Secret};
pub use span::{Span, View};
