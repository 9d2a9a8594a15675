//! Small work must not allocate: what a collective of a few bytes costs is mostly calls like these.

#![cfg(not(loom))]
#![allow(clippy::unwrap_used)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::hint::black_box;

use tensorwire_device::host::Host;
use tensorwire_device::{Caching, Device, Dtype, ReduceOp, View};

/// The system's allocator, which counts for each thread.
struct Counting;

thread_local! {
    static COUNT: Cell<usize> = const { Cell::new(0) };
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

// SAFETY: all is left to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // A thread that ends has no count any more.
        let _ = COUNT.try_with(|count| count.set(count.get() + 1));
        // SAFETY: the caller's promises are the same.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, start: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(start, layout) }
    }
}

fn allocations(work: impl FnOnce()) -> usize {
    let before = COUNT.get();
    work();
    COUNT.get() - before
}

#[test]
fn reductions_and_copies_do_not_allocate() {
    assert!(allocations(|| drop(black_box(Box::new(1)))) > 0, "allocations are not counted");
    const LEN: usize = 8192;
    let region = Host.alloc(130 * LEN).unwrap();
    let mut queue = Host.queue().unwrap();
    for (inputs, outputs) in [(1, 1), (2, 1), (8, 1), (8, 8), (64, 64)] {
        let cachings = [Caching::Keep, Caching::Bypass, Caching::Give, Caching::Give];
        for (len, caching) in [8, LEN].into_iter().flat_map(|len| cachings.map(|caching| (len, caching))) {
            let view = |index: usize| View::new(&region, index * LEN..index * LEN + len).unwrap();
            let from: Vec<_> = (0..inputs).map(view).collect();
            let into: Vec<_> = (64..64 + outputs).map(view).collect();
            let count = allocations(|| {
                queue.reduce(ReduceOp::Sum, Dtype::F32, &from, &into, caching).unwrap();
                queue.reduce(ReduceOp::Avg, Dtype::Bf16, &from, &from[..1], caching).unwrap();
                queue.copy(into[0], from[0], caching).unwrap();
            });
            assert_eq!(count, 0, "{inputs} inputs, {outputs} outputs, {len} bytes, {caching:?}");
        }
    }
}
