//! Collectives: operations that all ranks of a group call together.

pub(crate) mod p2p;
mod tensor;
mod work;

pub use p2p::RecvAny;
pub use tensor::Tensor;
pub use work::Work;
