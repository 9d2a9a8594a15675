//! Operations at the edges of what slots and lines hold, and ranks that are late in them.

#![allow(clippy::unwrap_used)]

mod ranks;

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use tensorwire::collective::{Path, hooks};
use tensorwire::{Deadline, Dtype, Error, ReduceOp, Span, Tensor};

fn ints(values: &[i32]) -> Tensor {
    let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    let span = Span::whole(tensorwire::device::host::private(bytes.len()).unwrap());
    span.write(0, &bytes).unwrap();
    Tensor::flat(span, Dtype::I32).unwrap()
}

fn values(tensor: &Tensor) -> Vec<i32> {
    let bytes = tensor.span().to_vec().unwrap();
    bytes.chunks_exact(4).map(|word| i32::from_le_bytes(word.try_into().unwrap())).collect()
}

/// Rank 1 stops in operation 1 before it reads, while rank 0 finishes it, gives operation 2 up, and begins operation 3, whose
/// bytes go where those of operation 1 were.
#[test]
fn a_late_rank_reads_what_was_meant_for_it() {
    static GOES_ON: AtomicBool = AtomicBool::new(false);
    hooks::set(|point| {
        // Steps of the exchange: wait, publish, signal, keep, wait, take.
        let stops = point.place == 1 && point.number == 1 && point.step == 6;
        let start = Instant::now();
        while stops && !GOES_ON.load(Ordering::Acquire) && start.elapsed() < ranks::LONG {
            std::thread::sleep(Duration::from_millis(1));
        }
    });
    ranks::as_threads(2, |group| {
        let gather = |number: i32| {
            let input = ints(&[10 * number + group.rank() as i32; 1000]);
            let output = ints(&[0; 2000]);
            (output, input)
        };
        let expected = |number: i32| [[10 * number; 1000], [10 * number + 1; 1000]].concat();
        let all: Vec<_> = (1..=3).map(gather).collect();
        let call = |index: usize| group.all_gather_into(&all[index].0, &all[index].1);
        if group.rank() == 0 {
            call(0).wait().unwrap();
            let error = call(1).deadline(Deadline::after(Duration::from_millis(50))).wait().unwrap_err();
            assert!(matches!(error, Error::TimedOut { .. }), "{error}");
            let work = call(2).start().unwrap();
            // Time enough to write the slot, if it did not wait.
            std::thread::sleep(Duration::from_millis(200));
            GOES_ON.store(true, Ordering::Release);
            work.wait().unwrap();
        } else {
            call(0).wait().unwrap();
            assert!(values(&all[0].0) == expected(1), "operation 1 has given bytes of operation 3");
            let error = call(1).wait().unwrap_err();
            assert!(matches!(error, Error::TimedOut { .. }), "{error}");
            call(2).wait().unwrap();
        }
        assert!(values(&all[2].0) == expected(3));
    });
    hooks::clear();
}

/// Each is small; together they do not fit into a slot.
#[test]
fn many_small_tensors_together() {
    ranks::as_threads(2, |group| {
        let mine = |index: i32| 1000 * group.rank() as i32 + index + 1;
        let tensors: Vec<Tensor> = (0..100).map(|index| ints(&[mine(index); 8000])).collect();
        group.all_reduce_multi(&tensors, ReduceOp::Sum).wait().unwrap();
        for tensor in &tensors {
            assert!(values(tensor) == [100 * 101 + 1000 * 100; 8000]);
        }
    });
}

/// Each part would fit into a line, but not one for each rank.
#[test]
fn an_inline_path_that_is_too_narrow() {
    ranks::as_threads(3, |group| {
        let (output, input) = (ints(&[0; 4]), ints(&[1; 12]));
        let call = group.reduce_scatter_from(&output, &input, ReduceOp::Sum).via(Path::Inline);
        let error = call.wait().unwrap_err();
        assert!(matches!(error, Error::Misuse(_)), "{error}");
        group.all_to_all_into(&ints(&[0; 6]), &ints(&[1; 6])).via(Path::Inline).wait().unwrap();
    });
}
