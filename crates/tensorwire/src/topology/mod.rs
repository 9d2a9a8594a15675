//! What the machine is made of: GPUs, NICs, processors, and how near they are to each other.
//!
//! The model ([`Machine`]) is plain data that can be saved and read again; every rule is a function of it:
//! [`Machine::link`] for the way between two GPUs, [`nearest`](nearest()) for the NIC of a GPU. [`gather`](gather())
//! fills it from sysfs and from whoever can be asked about GPUs ([`Probe`](crate::device::gpu::Probe)).

mod gather;
mod link;
mod model;
mod nearest;
mod pci;
pub mod sysfs;

pub use gather::{Source, gather};
pub use link::Link;
pub use model::{Gid, Gpu, Machine, Nic, Node, Rdma};
pub use nearest::{Affinity, nearest};
pub use pci::PciPath;
