//! Every kind of store does what the conformance suite asks.

#![allow(clippy::unwrap_used, clippy::panic)] // clippy.toml allows them in tests, but not in what tests call
#[macro_use]
mod store_conformance;

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use store_conformance::Open;
use tensorwire::store::{FileStore, MemoryStore, PrefixStore, Store, TcpServer, TcpStore};

const TIMEOUT: Duration = Duration::from_secs(60);

type Case<'a> = &'a dyn Fn(Open<'_>);

fn with_memory(case: Case<'_>) {
    let store = MemoryStore::new();
    case(&|| store.clone_store().unwrap());
}

fn with_tcp(case: Case<'_>) {
    let server = TcpServer::bind("127.0.0.1:0").unwrap();
    let port = server.local_addr().port();
    case(&|| Arc::new(TcpStore::connect("127.0.0.1", port, TIMEOUT).unwrap()));
}

/// Our client as it is with a server of torch.
fn with_tcp_as_torch(case: Case<'_>) {
    let server = TcpServer::bind_all(0).unwrap();
    let port = server.local_addr().port();
    case(&|| Arc::new(TcpStore::connect_as_torch("localhost", port, TIMEOUT).unwrap()));
}

fn with_file(case: Case<'_>) {
    let folder = Folder::new();
    case(&|| {
        let store = FileStore::open(folder.0.join("store")).unwrap();
        store.set_timeout(TIMEOUT);
        Arc::new(store)
    });
}

/// A folder of its own for each test, gone with it.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Self {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let name =
            format!("tensorwire-store-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let folder = std::env::temp_dir().join(name);
        std::fs::create_dir(&folder).unwrap();
        Self(folder)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Nested prefixes over another kind, whose other keys must not be seen.
fn with_prefix_over(below: fn(Case<'_>), case: Case<'_>) {
    below(&|open| {
        let outside = open();
        outside.set("outside", b"1").unwrap();
        outside.set("a/bc", b"1").unwrap();
        outside.set("a/bx/key", b"1").unwrap();
        case(&|| Arc::new(PrefixStore::new("b", Arc::new(PrefixStore::new("a", open())))));
        assert_eq!(outside.get("outside").unwrap(), b"1");
    });
}

fn with_prefix_over_memory(case: Case<'_>) {
    with_prefix_over(with_memory, case);
}

fn with_prefix_over_tcp(case: Case<'_>) {
    with_prefix_over(with_tcp, case);
}

fn with_prefix_over_file(case: Case<'_>) {
    with_prefix_over(with_file, case);
}

conformance!(memory, with_memory);
conformance!(tcp, with_tcp);
conformance!(tcp_as_torch, with_tcp_as_torch);
conformance!(prefix_over_memory, with_prefix_over_memory);
conformance!(prefix_over_tcp, with_prefix_over_tcp);
conformance!(file, with_file);
conformance!(prefix_over_file, with_prefix_over_file);
