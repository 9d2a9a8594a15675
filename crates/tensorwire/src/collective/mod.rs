//! Collectives: operations that all ranks of a group call together, and messages between two.
//!
//! Every rank calls the same operations in the same order. A call does nothing until it is waited for or started:
//!
//! ```no_run
//! # use tensorwire::{Dtype, Group, ReduceOp, Tensor};
//! # fn main() -> tensorwire::Result<()> {
//! let group = Group::from_env()?;
//! let tensor = Tensor::flat(group.alloc(4096)?, Dtype::F32)?;
//! group.all_reduce(&tensor, ReduceOp::Sum).wait()?;
//! let work = group.broadcast(&tensor, 0).start()?;
//! work.wait()?;
//! # Ok(())
//! # }
//! ```
//!
//! How an operation goes: `operation` is what one rank asks for, `plan` the steps that follow from it (pure data),
//! `exec` runs them, `stop` is what happens when it cannot, `lane` keeps the order, `tuning` chooses the path.

mod buffer;
mod call;
mod exec;
mod explain;
pub(crate) mod header;
#[cfg(feature = "hooks")]
pub mod hooks;
pub(crate) mod kind;
pub(crate) mod lane;
mod offer;
mod operation;
pub(crate) mod p2p;
mod plan;
mod stop;
mod tensor;
mod tuning;
pub(crate) mod work;

pub use call::Call;
pub use explain::explain;
pub use kind::{Kind, Path};
pub use p2p::RecvAny;
pub use tensor::Tensor;
pub use work::Work;
