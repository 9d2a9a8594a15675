//! GPUs for tests, on machines without one. Their memory is host memory, and their hardware queues are threads.
//!
//! They behave as real GPUs do where it hurts. The streams of a process share few hardware queues, and a wait at the head of
//! one holds all streams on it. A signal wakes nobody. Work is done later than its call returns. Nothing hears of a wait
//! that ends by its deadline but its abort word. And the bytes are the host's, because its kernels do the work.
//!
//! A test installs them in its process, before anybody asks for GPUs:
//!
//! ```ignore
//! threads::install(Settings { gpus: 2, queues: 1, ..Settings::default() })?;
//! ```
//!
//! A test that starts processes gives them the same settings in a variable:
//!
//! ```ignore
//! command.env(threads::VARIABLE, Settings::default().to_string());
//! ```
//!
//! From then on [`gpu::driver`](crate::gpu::driver) gives these GPUs. [`gpu`] gives one as what it is: to let calls fail, to
//! choose the numbers of allocations, and to count. A [`hook`] is called before each command.
//!
//! All of it is there only with the feature `thread-gpus`, which only tests turn on.

mod channel;
mod clock;
mod device;
pub mod hook;
mod memory;
mod probe;
mod queue;
mod settings;
mod waits;

pub use device::{Call, Gpu, Usage, out_of_memory, uuid};
pub use probe::{Driver, driver, gpu, install};
pub use settings::{Settings, VARIABLE};
