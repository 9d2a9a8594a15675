//! The Python module tensorwire._native: one class per file, errors in `error.rs`.

mod callbacks;
mod command;
mod context;
mod error;
mod file_store;
mod gpu;
mod group;
mod interrupt;
mod keep;
mod last_words;
mod lease;
mod log;
mod member;
mod memory;
mod memory_store;
mod op;
mod pipe;
mod prefix_store;
mod rpc;
mod store;
mod symmetric;
mod tcp_server;
mod tcp_store;
mod tensor;
mod timeout;
mod torch;
mod work;

/// What the package `tensorwire` is made of.
#[pyo3::pymodule]
mod _native {
    use pyo3::prelude::*;

    #[pymodule_export]
    use crate::command::main;
    #[pymodule_export]
    use crate::context::is_strict;
    #[pymodule_export]
    use crate::file_store::FileStore;
    #[pymodule_export]
    use crate::gpu::_own_stream;
    #[pymodule_export]
    use crate::group::Group;
    #[pymodule_export]
    use crate::last_words::last_words;
    #[pymodule_export]
    use crate::lease::{Lease, Token, collect, lease_stats, open, open_event, open_file, outstanding, share};
    #[pymodule_export]
    use crate::member::Member;
    #[pymodule_export]
    use crate::memory::{Memory, alloc, is_shared, pooled};
    #[pymodule_export]
    use crate::memory_store::MemoryStore;
    #[pymodule_export]
    use crate::pipe::{Incoming, Listener, Pipe, Receiving};
    #[pymodule_export]
    use crate::prefix_store::PrefixStore;
    #[pymodule_export]
    use crate::rpc::{Call, Rpc};
    #[pymodule_export]
    use crate::store::Store;
    #[pymodule_export]
    use crate::symmetric::{Symmetric, rendezvous};
    #[pymodule_export]
    use crate::tcp_server::TcpServer;
    #[pymodule_export]
    use crate::tcp_store::TcpStore;
    #[pymodule_export]
    use crate::torch::calls::Calls;
    #[pymodule_export]
    use crate::torch::in_flight::operation_on;
    #[pymodule_export]
    use crate::work::Work;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        crate::log::start();
        // Forks are counted from here on, and not from some moment at which another thread may fork.
        let _ = tensorwire::device::fork::Birth::now();
        if let Err(error) = crate::context::find_ucx(module.py()) {
            // Whoever wants UCX hears that it is not there.
            error.write_unraisable(module.py(), None);
        }
        let close = wrap_pyfunction!(crate::callbacks::_close_callbacks, module)?;
        module.py().import("atexit")?.call_method1("register", (close,))?;
        module.add("_CHANNELS", tensorwire::symmetric::CHANNELS)?;
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}
