//! What one operation costs beside its memory: a world of one, and of two threads, 8 bytes.
#![allow(clippy::unwrap_used, clippy::print_stdout)]

use std::sync::Arc;
use std::time::Instant;

use tensorwire::store::{MemoryStore, Store};
use tensorwire::{Config, Context, Dtype, Group, ReduceOp, Tensor};

const ROUNDS: u32 = 200_000;

fn main() {
    for world in [1, 2] {
        let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
        std::thread::scope(|scope| {
            for rank in 0..world {
                let store = store.clone();
                scope.spawn(move || {
                    let context = Context::new(Config::default()).unwrap();
                    let group = Group::builder().context(&context).from_store(store, rank, world).unwrap();
                    measure(&group);
                });
            }
        });
    }
}

fn measure(group: &Group) {
    let tensor = Tensor::flat(group.alloc(8).unwrap(), Dtype::F32).unwrap();
    let print = |what: &str, start: Instant| {
        if group.rank() == 0 {
            let each = start.elapsed().as_nanos() as f64 / f64::from(ROUNDS);
            println!("{} ranks, {what}: {each:.0} ns", group.world());
        }
    };
    group.barrier().wait().unwrap();
    let start = Instant::now();
    for _ in 0..ROUNDS {
        group.barrier().wait().unwrap();
    }
    print("barrier", start);
    let start = Instant::now();
    for _ in 0..ROUNDS {
        group.all_reduce(&tensor, ReduceOp::Sum).wait().unwrap();
    }
    print("all_reduce of 8 bytes", start);
    let start = Instant::now();
    for _ in 0..ROUNDS {
        let _ = group.all_reduce(&tensor, ReduceOp::Sum);
    }
    print("making the call", start);
}
