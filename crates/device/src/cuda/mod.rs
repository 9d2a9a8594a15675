//! NVIDIA GPUs: VMM regions, queues that are streams, kernels.
//!
//! Needs the driver (libcuda) at run time and nothing at build time; without it every call here is `Unsupported` with
//! the reason, and the rest of the crate works.
//!
//! - `driver/`: the driver's calls, as `Result`s
//! - `gpu.rs`: one GPU, and what its regions and queues work with
//! - `context.rs`: its context, its kernels, and how the host reads and writes its memory
//! - `clock.rs`: the GPU's clock, compared with the host's
//! - `region.rs`: memory that can be shared, of our own, of other processes, and of other allocators
//! - `multicast.rs`: memory of several GPUs behind one address
//! - `queue.rs`: copy, reduce, signal and wait on a stream
//! - `point.rs`: marks in the work of a stream, which others follow
//! - `gates.rs`: where kernels pass on what they read of the abort words
//! - `waits.rs`: queued waits, and who ends them when nobody else does
//! - `registered.rs`: host memory that GPUs reach: flags, and what is copied from and to
//! - `probe.rs`: who reaches whom, by the driver's word and by trying
//! - `reaper.rs`: calls that must not be made while a stream waits, and what work is done with
//! - `kernels/`: the kernels, as they are built, and what they are called with

mod clock;
mod context;
mod driver;
mod ending;
mod gates;
mod gpu;
mod graph;
mod kernels;
mod multicast;
mod point;
mod probe;
mod queue;
mod reaper;
mod region;
mod registered;
#[cfg(test)]
mod tests;
mod waits;

pub use gpu::{Facts, Gpu, Primary, Usage, count, driver_version, facts};
pub use graph::Graph;
pub use kernels::OLDEST_DRIVER;
pub use probe::CudaProbe;
