//! Collectives: operations that all ranks of a group call together.

mod tensor;
mod work;

pub use tensor::Tensor;
pub use work::Work;
