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
pub mod deadline;
pub mod device;
pub mod dtype;
pub mod element;
pub mod error;
pub mod fd;
pub mod flag;
pub mod fork;
pub mod gpu;
pub mod handle;
pub mod handshake;
pub mod host;
pub mod latch;
pub mod layout;
pub mod nvml;
pub mod op;
pub mod part;
#[cfg(not(loom))]
pub mod pool;
pub mod secret;
pub mod span;
pub mod sync;
pub mod word;

pub use deadline::Deadline;
pub use device::{Caching, Device, DeviceId, Place, Queue, Region};
pub use dtype::Dtype;
pub use element::Element;
pub use error::{Error, Result};
pub use flag::{Abort, Bell, Flag};
pub use handle::Handle;
pub use layout::Layout;
pub use op::ReduceOp;
pub use secret::{Id, Secret};
pub use span::{Span, View};
