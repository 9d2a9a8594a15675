//! Operations that are large enough to go straight between tensors, and do not: each reason is recorded, explained, and an
//! error in strict mode.

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout)]

mod ranks;

use std::sync::Arc;

use ranks::{LONG, Rank, Ranks, as_processes, as_threads, on_threads};
use tensorwire::collective::{Detour, Path};
use tensorwire::device::threads::{self, Call, Settings, install, uuid};
use tensorwire::store::{MemoryStore, Store};
use tensorwire::{Config, Context, DeviceId, Dtype, Error, Group, ReduceOp, Result, Span, Sparse, Tensor};

const SUM: ReduceOp = ReduceOp::Sum;
/// Elements: enough for the direct path.
const MANY: usize = 5000;

fn shared(group: &Group) -> Tensor {
    group.tensor(&[1f32; MANY]).unwrap()
}

fn private() -> Tensor {
    Tensor::private(&[1f32; MANY]).unwrap()
}

/// Every second element of shared memory.
fn gaps(group: &Group) -> Tensor {
    Tensor::strided(group.alloc(MANY * 8).unwrap(), Dtype::F32, &[MANY], &[2]).unwrap()
}

/// The reasons that tensors on the host have.
fn detours() -> impl Iterator<Item = Detour> {
    [Detour::Private, Detour::Gaps, Detour::Scattered, Detour::Other].into_iter()
}

/// Runs an operation for which this rank has the given reason not to be reached; rank 0 has none for `Other`.
fn operation(group: &Group, why: Detour) -> Result<()> {
    match why {
        Detour::Private => group.all_reduce(&private(), SUM).wait(),
        Detour::Gaps => group.all_reduce(&gaps(group), SUM).wait(),
        Detour::Scattered => group.all_reduce_multi(&[shared(group), shared(group)], SUM).wait(),
        _ if group.rank() == 0 => group.all_reduce(&shared(group), SUM).wait(),
        _ => group.all_reduce(&private(), SUM).wait(),
    }
}

/// What rank 0 records and explains.
fn recorded(group: &Group) {
    group.all_reduce(&shared(group), SUM).wait().unwrap();
    assert!(!group.explain().contains("not direct"), "{}", group.explain());
    for why in detours() {
        operation(group, why).unwrap();
        let told = if group.rank() != 0 && why == Detour::Other { Detour::Private } else { why };
        let text = group.explain();
        assert!(text.contains(&format!("not direct: {}", told.reason())), "{why}: {text}");
    }
    // Small operations take the way that fits their size: that is no detour.
    group.all_reduce(&Tensor::private(&[1f32]).unwrap(), SUM).wait().unwrap();
    assert_eq!(group.explain().matches("not direct").count(), if group.rank() == 0 { 4 } else { 3 });
    group.barrier().wait().unwrap();
}

#[test]
fn recorded_by_threads() {
    as_threads(2, recorded);
}

#[test]
fn recorded_by_processes() {
    as_processes("recorded_by_processes", 2, recorded);
}

fn groups(strict: bool, body: impl Fn(&Group) + Sync) {
    let store = Arc::new(MemoryStore::new()) as Arc<dyn Store>;
    on_threads(2, |rank| {
        let mut config = Config::default();
        config.strict = strict;
        let context = Context::new(config).unwrap();
        let builder = Group::builder().context(&context).timeout(LONG);
        body(&builder.from_store(store.clone(), rank, 2).unwrap());
    });
}

/// Every rank gets an error, which says whose memory it is and why it cannot be reached.
fn refused(error: &Error, why: Detour) {
    let told = if why == Detour::Other { Detour::Private } else { why };
    let text = error.to_string();
    assert!(text.contains("the direct path for all_reduce") && text.contains(told.reason()), "{text}");
    assert!(text.contains("rank "), "{text}");
}

#[test]
fn strict_mode_refuses() {
    groups(true, |group| {
        for why in detours() {
            let error = operation(group, why).unwrap_err();
            refused(&error, why);
            assert!(error.to_string().contains("TENSORWIRE_STRICT is set"), "{error}");
        }
        // What goes straight, and what is small, is as ever.
        group.all_reduce(&shared(group), SUM).wait().unwrap();
        group.all_reduce(&Tensor::private(&[1f32]).unwrap(), SUM).wait().unwrap();
        // The memory of a slice is ours to choose: the caller is not blamed for it.
        let mut slice = [1f32; MANY];
        group.all_reduce_slice(&mut slice, SUM).unwrap();
        assert_eq!(slice, [2f32; MANY]);
        // So are the exchanges of a sparse tensor, dense or not.
        let keys: Vec<i64> = (0..MANY as i64).collect();
        let sparse = Sparse::new(Tensor::private(&keys).unwrap(), private(), &[MANY as u64]).unwrap();
        for dense in [true, false] {
            let result = group.all_reduce_sparse(&sparse, SUM).dense(dense).wait().unwrap();
            assert_eq!(result.rows().to_vec::<f32>().unwrap(), [2f32; MANY]);
        }
        // Who asks for another path has chosen it.
        group.all_reduce(&private(), SUM).via(Path::Staged).wait().unwrap();
    });
}

/// Runs a body as two processes whose GPU is a thread, with strict mode and without it.
fn with_gpus(test: &str, body: fn(&Group)) {
    if let Some(rank) = Rank::of_this_process() {
        install(Settings::default()).unwrap();
        return body(&rank.group());
    }
    for strict in ["0", "1"] {
        let Ranks { ranks, server: _server } = Ranks::start_with(test, 2, |_, mut command| {
            command.env("TENSORWIRE_STRICT", strict);
            command
        });
        ranks.into_iter().for_each(|rank| rank.expect_success());
    }
}

/// An all-reduce of ones is recorded with the reason that this rank has, or in strict mode refused with that of `whose`.
fn takes_a_detour(group: &Group, tensor: &Tensor, told: Detour, whose: usize, why: Detour) {
    let result = group.all_reduce(tensor, SUM).wait();
    if group.context().config().strict {
        let error = result.unwrap_err();
        refused(&error, why);
        let text = error.to_string();
        assert!(
            text.contains("TENSORWIRE_STRICT is set") && text.contains(&format!("rank {whose} ")),
            "{text}"
        );
    } else {
        result.unwrap();
        let text = group.explain();
        assert!(text.contains(&format!("not direct: {}", told.reason())), "{text}");
        assert_eq!(tensor.to_vec::<f32>().unwrap(), [2f32; MANY]);
    }
}

/// Rank 0 has its tensor on a GPU, and rank 1 on the host.
#[test]
fn tensors_on_gpus_and_on_the_host() {
    with_gpus("tensors_on_gpus_and_on_the_host", |group| {
        let tensor = if group.rank() == 0 { on_gpu(group) } else { shared(group) };
        takes_a_detour(group, &tensor, Detour::Mixed, 1 - group.rank(), Detour::Mixed);
        let error = group.all_reduce(&tensor, SUM).via(Path::Direct).wait().unwrap_err();
        assert!(error.to_string().contains(Detour::Mixed.reason()), "{error}");
        group.barrier().wait().unwrap();
    });
}

/// Rank 1 has its tensor in memory of another allocator, of which the driver says that it cannot be shared.
#[test]
fn memory_of_a_gpu_that_cannot_be_shared() {
    with_gpus("memory_of_a_gpu_that_cannot_be_shared", |group| {
        let gpu = threads::gpu(0).unwrap();
        let memory = gpu.joined(&[MANY * 4]).unwrap();
        let tensor = || {
            let region = gpu.adopt_part(&memory, 0..MANY * 4).unwrap();
            let tensor = Tensor::flat(Span::whole(region), Dtype::F32).unwrap();
            tensor.write(&[1f32; MANY]).unwrap();
            tensor
        };
        if group.rank() == 1 {
            let error = tensorwire::device::Error::Unsupported {
                what: "sharing memory of a test".into(),
                need: "memory that can be exported".into(),
                have: "memory of a pool".into(),
            };
            gpu.fail(Call::Place, usize::MAX, error);
        }
        let told = if group.rank() == 1 { Detour::Unshareable } else { Detour::Other };
        takes_a_detour(group, &tensor(), told, 1, Detour::Unshareable);
        gpu.heal(Call::Place);
        let tensor = tensor();
        group.all_reduce(&tensor, SUM).via(Path::Direct).wait().unwrap();
        assert_eq!(tensor.to_vec::<f32>().unwrap(), [2f32; MANY]);
        group.barrier().wait().unwrap();
    });
}

fn on_gpu(group: &Group) -> Tensor {
    let region = group.context().pool(&DeviceId::Gpu(uuid(0))).unwrap().alloc(MANY * 4).unwrap();
    let tensor = Tensor::flat(Span::whole(region).slice(0..MANY * 4).unwrap(), Dtype::F32).unwrap();
    tensor.write(&[1f32; MANY]).unwrap();
    tensor
}

/// The reason is that of the tensor which is needed, not of another one.
#[test]
fn the_reason_is_that_of_the_right_tensor() {
    groups(true, |group| {
        let output = Tensor::strided(group.alloc(MANY * 16).unwrap(), Dtype::F32, &[2 * MANY], &[2]).unwrap();
        let error = group.all_gather_into(&output, &private()).wait().unwrap_err();
        assert!(error.to_string().contains(Detour::Private.reason()), "{error}");
    });
}

#[test]
fn the_direct_path_refuses_when_it_was_asked_for() {
    groups(false, |group| {
        let error = group.all_reduce(&private(), SUM).via(Path::Direct).wait().unwrap_err();
        refused(&error, Detour::Private);
        assert!(error.to_string().contains("it was asked for"), "{error}");
        group.all_reduce(&shared(group), SUM).via(Path::Direct).wait().unwrap();
    });
}
