//! Every kind of store does what the conformance suite asks.

mod store_conformance;

use std::sync::Arc;
use std::time::Duration;

use store_conformance::Open;
use tensorwire::store::{MemoryStore, PrefixStore, Store, TcpServer, TcpStore};

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

conformance!(memory, with_memory);
conformance!(tcp, with_tcp);
conformance!(tcp_as_torch, with_tcp_as_torch);
conformance!(prefix_over_memory, with_prefix_over_memory);
conformance!(prefix_over_tcp, with_prefix_over_tcp);
