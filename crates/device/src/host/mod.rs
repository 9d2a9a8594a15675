//! The memory of this host: memfd regions, a queue on the caller's thread, reduce kernels.

pub mod reduce;
