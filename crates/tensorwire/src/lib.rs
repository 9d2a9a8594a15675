//! tensorwire moves tensors between processes, GPUs and machines.
#![forbid(unsafe_code)]

pub mod config;
pub mod error;
pub mod store;

pub use config::Config;
pub use error::{Error, PeerFault, PeerFaultKind, Result};
pub use tensorwire_device as device;
pub use tensorwire_device::Deadline;
