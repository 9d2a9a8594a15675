//! tensorwire moves tensors between processes, GPUs and machines.
//!
//! Ranks find each other through a [`store`] and form a [`Group`]. The methods of a group are calls: collectives,
//! messages and barriers. A call does nothing until you wait for it or start it.
//!
//! Below that, everything is shareable memory (see [`device`]) and three verbs. A rank puts bytes into memory that
//! a peer has mapped, signals a counter beside them, and waits for counters of its own.
#![forbid(unsafe_code)]

pub mod collective;
pub mod config;
pub mod context;
mod devices;
pub mod error;
pub mod group;
pub mod interrupt;
pub mod lease;
mod ranks;
mod share;
mod shm;
pub mod status;
pub mod store;
pub mod topology;
mod watch;
#[doc(hidden)]
pub mod wire;

pub use collective::{RecvAny, Tensor, Work};
pub use config::Config;
pub use context::Context;
pub use error::{Error, PeerFault, PeerFaultKind, Result};
pub use group::{Group, GroupBuilder, Member};
pub use lease::{Lease, Loan, Terms, Token};
pub use tensorwire_device as device;
pub use tensorwire_device::{Deadline, DeviceId, Dtype, Element, ReduceOp, Span};
