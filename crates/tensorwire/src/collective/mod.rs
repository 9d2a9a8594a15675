//! Collectives: operations that all ranks of a group call together.

pub(crate) mod kind;
#[allow(dead_code)]
mod plan;
mod tensor;
mod work;

pub use kind::{Kind, Path};
pub use tensor::Tensor;
pub use work::Work;
