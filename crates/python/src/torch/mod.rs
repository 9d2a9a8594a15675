//! What we know of torch: its tensors, its stores, and how it calls operations. torch is neither imported nor linked here.

mod allocator;
pub(crate) mod calls;
pub(crate) mod in_flight;
pub(crate) mod store;
pub(crate) mod tensor;
