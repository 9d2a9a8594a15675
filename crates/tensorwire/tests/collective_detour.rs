//! Operations that are large enough to go straight between tensors, and do not: each reason is recorded, explained, and an
//! error in strict mode.

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout)]

mod ranks;

use std::sync::Arc;

use ranks::{LONG, as_processes, as_threads, on_threads};
use tensorwire::collective::{Detour, Path};
use tensorwire::device::threads::{Settings, install, uuid};
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

/// Rank 0 has its tensor on a GPU, which is a thread, and rank 1 on the host.
#[test]
fn tensors_on_gpus_and_on_the_host() {
    as_processes("tensors_on_gpus_and_on_the_host", 2, |group| {
        install(Settings::default()).unwrap();
        let tensor = if group.rank() == 0 { on_gpu(group) } else { shared(group) };
        group.all_reduce(&tensor, SUM).wait().unwrap();
        assert_eq!(tensor.to_vec::<f32>().unwrap(), [2f32; MANY]);
        let text = group.explain();
        assert!(text.contains(&format!("not direct: {}", Detour::Mixed.reason())), "{text}");
        let error = group.all_reduce(&tensor, SUM).via(Path::Direct).wait().unwrap_err();
        assert!(error.to_string().contains(Detour::Mixed.reason()), "{error}");
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
