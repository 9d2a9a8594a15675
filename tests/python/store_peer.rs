//! The other side of test_store_torch.py: a server for torch's clients, and a client that puts torch's
//! servers through the conformance suite of stores.
//!
//!     store_peer serve                       prints its port and serves until its input ends
//!     store_peer exercise HOST PORT [SKIP]   runs every case whose name does not contain SKIP
//!     store_peer file PATH                   the same for a file, together with what torch left in it

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout)] // a test in all but name
#[path = "../../crates/tensorwire/tests/store_conformance/mod.rs"]
mod store_conformance;

use std::io::Read;
use std::sync::Arc;
use std::time::Duration;

use store_conformance::{CASES, Open};
use tensorwire::store::{FileStore, PrefixStore, Store, TcpServer, TcpStore};

const TIMEOUT: Duration = Duration::from_secs(60);

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    match args.as_slice() {
        ["serve"] => {
            let server = TcpServer::bind_all(0).unwrap();
            println!("{}", server.local_addr().port());
            std::io::stdin().read_to_end(&mut Vec::new()).unwrap();
        }
        ["exercise", host, port, skip @ ..] => {
            let port = port.parse().unwrap();
            let open = || -> Arc<dyn Store> { Arc::new(TcpStore::connect(host, port, TIMEOUT).unwrap()) };
            exercise(&open, skip);
        }
        ["file", path] => {
            exercise(&|| Arc::new(FileStore::open(*path).unwrap()), &[]);
            let store = FileStore::open(*path).unwrap();
            assert_eq!(store.get("from torch").unwrap(), b"1");
            assert!(!store.check(&["gone"]).unwrap());
            assert_eq!(store.add("count", 1).unwrap(), 6);
            store.set("file/from us", b"to torch").unwrap();
        }
        other => panic!("{other:?}: serve, exercise or file"),
    }
}

/// Runs the cases, each under a prefix of its own.
fn exercise(open: Open<'_>, skip: &[&str]) {
    for (name, case) in CASES {
        if skip.iter().any(|skip| name.contains(skip)) {
            continue;
        }
        case(&|| Arc::new(PrefixStore::new(*name, open())));
        println!("{name} ok");
    }
}
