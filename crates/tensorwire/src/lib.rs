//! tensorwire moves tensors between processes, GPUs and machines.
//!
//! Ranks find each other through a [`store`] and form a [`Group`]. The methods of a group are calls: collectives,
//! messages and barriers. A call does nothing until you wait for it or start it.
//!
//! Below that, everything is shareable memory (see [`device`]) and three verbs. A rank puts bytes into memory that
//! a peer has mapped, signals a counter beside them, and waits for counters of its own.
//!
//! | You want | Look at |
//! |---|---|
//! | ranks that compute together | [`Group`], [`GroupBuilder`] |
//! | data for them | [`Tensor`], [`Group::tensor`], [`Group::alloc`] |
//! | an operation in flight | [`Work`], and `start` of [`Call`](collective::Call) and [`Message`](group::Message) |
//! | a limit for a wait | [`Deadline`] |
//! | to know what went wrong | [`Error`], [`Error::ranks`] |
//! | messages between two processes, without a group | [`pipe`] |
//! | to lend memory to another process | [`Context::grant`], [`Lease`], [`Token`], [`Loan`] |
//! | what a process has once | [`Context`], [`Config`] |
//!
//! `docs/rust.md` in the repository goes on from here: how to depend on the crate, launchers, works in flight, errors,
//! and results without a copy.
//!
//! # Groups
//!
//! A launcher starts one process for each rank, and the program says `Group::from_env()`. Here the group has one rank
//! and needs no launcher:
//!
//! ```
//! use std::sync::Arc;
//! use tensorwire::store::MemoryStore;
//! use tensorwire::{Group, ReduceOp};
//!
//! fn main() -> tensorwire::Result<()> {
//!     let group = Group::builder().from_store(Arc::new(MemoryStore::new()), 0, 1)?;
//!     let numbers = group.tensor(&[1.0f32, 2.0, 3.0])?;
//!     group.all_reduce(&numbers, ReduceOp::Sum).wait()?; // in place
//!     assert_eq!(numbers.to_vec::<f32>()?, [1.0, 2.0, 3.0]); // times the number of ranks
//!     group.barrier().wait()
//! }
//! ```
//!
//! # Messages
//!
//! Ranks may be threads of one process, as in this program:
//!
//! ```
//! use std::sync::Arc;
//! use std::thread;
//! use tensorwire::store::MemoryStore;
//! use tensorwire::{Group, Result};
//!
//! fn rank(group: &Group) -> Result<()> {
//!     let message = group.tensor(&[0i64; 3])?;
//!     if group.rank() == 0 {
//!         message.write(&[1i64, 2, 3])?;
//!         group.send(&message, 1).tag(7).wait()
//!     } else {
//!         group.recv(&message, 0).tag(7).wait()?;
//!         assert_eq!(message.to_vec::<i64>()?, [1, 2, 3]);
//!         Ok(())
//!     }
//! }
//!
//! fn main() -> Result<()> {
//!     let store = Arc::new(MemoryStore::new());
//!     let other = store.clone();
//!     let one = thread::spawn(move || rank(&Group::builder().from_store(other, 1, 2)?));
//!     rank(&Group::builder().from_store(store, 0, 2)?)?;
//!     one.join().expect("rank 1 does not panic")
//! }
//! ```
//!
//! # A lease
//!
//! A process lends memory. The token travels to another process of the same user, by any medium. Here both sides are
//! contexts of one process:
//!
//! ```
//! use std::time::Duration;
//! use tensorwire::{Context, Deadline, Terms, Token};
//!
//! fn main() -> tensorwire::Result<()> {
//!     let deadline = Deadline::after(Duration::from_secs(60));
//!     let lender = Context::from_env()?;
//!     let memory = lender.alloc(4096)?;
//!     memory.write(0, b"hello")?;
//!     let lease = lender.grant(&memory, &Terms::default())?;
//!     let sent: Vec<u8> = lease.token().to_bytes();
//!
//!     let holder = Context::from_env()?; // another process
//!     let loan = holder.redeem(&Token::from_bytes(&sent)?, deadline)?; // the same memory, not a copy
//!     loan.span().write(0, b"HELLO")?;
//!     drop(loan);
//!
//!     lease.wait(deadline)?; // until nobody holds the memory any more
//!     assert_eq!(&memory.to_vec()?[..5], b"HELLO");
//!     Ok(())
//! }
//! ```
//!
//! # Deadlines
//!
//! Every wait ends. The group has a time-out, and a call may have a deadline of its own. The error says who was missing:
//!
//! ```
//! use std::sync::Arc;
//! use std::thread;
//! use std::time::Duration;
//! use tensorwire::store::MemoryStore;
//! use tensorwire::{Deadline, Group, Result};
//!
//! fn main() -> Result<()> {
//!     let store = Arc::new(MemoryStore::new());
//!     let other = store.clone();
//!     let silent = thread::spawn(move || {
//!         let group = Group::builder().from_store(other, 1, 2)?;
//!         group.barrier().wait() // sends nothing before
//!     });
//!     let group = Group::builder().timeout(Duration::from_secs(60)).from_store(store, 0, 2)?;
//!     let message = group.tensor(&[0u8; 16])?;
//!     let soon = Deadline::after(Duration::from_millis(20));
//!     let error = group.recv(&message, 1).deadline(soon).wait().expect_err("nobody sends it");
//!     assert!(error.is_timeout() && error.ranks() == [1], "{error}");
//!     group.barrier().wait()?; // the group goes on
//!     silent.join().expect("rank 1 does not panic")
//! }
//! ```
//!
//! # Contexts
//!
//! A [`Context`] is what a process has once: its devices, its shared memory, one watcher thread, its configuration. A
//! group makes one for itself if you give it none. Give it one if a process has several groups, lends memory, or is not
//! configured by its environment:
//!
//! ```
//! use std::sync::Arc;
//! use std::time::Duration;
//! use tensorwire::store::MemoryStore;
//! use tensorwire::{Config, Context, Dtype, Group, ReduceOp, Tensor};
//!
//! fn main() -> tensorwire::Result<()> {
//!     let mut config = Config::default(); // Config::from_env() reads TENSORWIRE_*
//!     config.timeout = Duration::from_secs(60);
//!     let context = Context::new(config)?;
//!     let store = Arc::new(MemoryStore::new());
//!     let both = |name: &str| Group::builder().context(&context).name(name).from_store(store.clone(), 0, 1);
//!     let (data, model) = (both("data")?, both("model")?);
//!
//!     // Memory of the context is shared memory for every group.
//!     let numbers = Tensor::flat(context.alloc(1024)?, Dtype::F32)?;
//!     data.all_reduce(&numbers, ReduceOp::Avg).wait()?;
//!     model.broadcast(&numbers, 0).wait()
//! }
//! ```
#![forbid(unsafe_code)]

pub mod collective;
pub mod config;
pub mod context;
mod devices;
pub mod error;
pub mod group;
pub mod interrupt;
pub mod lease;
mod link;
pub mod pipe;
mod ranks;
mod share;
mod shm;
pub mod status;
pub mod store;
pub mod symmetric;
pub mod topology;
mod watch;
#[doc(hidden)]
pub mod wire;

pub use collective::{RecvAny, Sparse, SparseWork, Tensor, Work};
pub use config::Config;
pub use context::Context;
pub use error::{Error, PeerFault, PeerFaultKind, Result};
pub use group::{Group, GroupBuilder, Member};
pub use lease::{Lease, Loan, Terms, Token};
pub use link::ucx::{about as ucx_library, look_in as look_for_ucx_in};
pub use pipe::Pipe;
pub use symmetric::Symmetric;
pub use tensorwire_device as device;
pub use tensorwire_device::{Deadline, DeviceId, Dtype, Element, ReduceOp, Span};

/// The programs of docs/rust.md, as tests.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/rust.md")]
mod guide {}

/// The programs of docs/pipes.md, as tests.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/pipes.md")]
mod pipes {}
