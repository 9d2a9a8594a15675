//! Reduce kernels.
