//! All-reduce of sparse tensors, by key.
//!
//! A rank has sorted keys and a row of values for each ([`Sparse`]). Each rank owns a range of the keys, gets its part of all
//! ranks, merges it, and all gather the merged parts. So no rank holds the inputs of all. docs/algorithms.md has the
//! exchanges and the bytes.
//!
//! | file | what it does |
//! |---|---|
//! | `ranges` | cuts the keys into ranges that give all ranks as much to do; says where dense is cheaper |
//! | `merge` | merges sorted keys |
//! | `run` | the exchanges, which are a chain ([`chain`](super::chain)) |

#[cfg(any(test, fuzzing))]
mod fuzz;
mod merge;
pub(super) mod ranges;
mod run;

use std::fmt;
use std::io::ErrorKind;
use std::sync::{Arc, OnceLock};

use tensorwire_device::{Deadline, DeviceId, Dtype, Mark, Queue, ReduceOp};

use super::Collectives;
use super::call::{Call, Until};
use super::cancel::driver_failed;
use super::operation::Operation;
use super::tensor::Tensor;
use super::work::Work;
use crate::error::{Error, Result};
use crate::shm::kind::Kind;

#[cfg(any(test, fuzzing))]
pub use self::fuzz::fuzz;

/// A sparse tensor: sorted keys, and a row of values for each.
///
/// A key is an index into the sparse dimensions, counted as if these were one, the last dimension fastest. Keys are int64,
/// ascend, and none is there twice. `rows` has one row for each key; what it has beside its first dimension are the dense
/// dimensions. Cloning it clones no element.
///
/// Rows may lie in memory of a GPU, and their keys there too, or on the host. The host merges the keys; rows stay on the GPU.
#[derive(Debug, Clone)]
pub struct Sparse {
    keys: Tensor,
    rows: Tensor,
    shape: Vec<u64>,
}

impl Sparse {
    /// A sparse tensor whose sparse dimensions have this shape. The keys are looked at when it is used.
    pub fn new(keys: Tensor, rows: Tensor, shape: &[u64]) -> Result<Self> {
        if keys.dtype() != Dtype::I64 || keys.layout().shape().len() != 1 {
            return Err(Error::misuse(format!(
                "keys of a sparse tensor are int64 in one dimension, not {} in {}",
                keys.dtype(),
                keys.layout().shape().len()
            )));
        }
        if rows.layout().shape().first() != Some(&keys.len()) {
            return Err(Error::misuse(format!(
                "{} keys with rows of shape {:?}: each key has one row",
                keys.len(),
                rows.layout().shape()
            )));
        }
        if !keys.layout().is_contiguous() || !rows.layout().is_contiguous() {
            return Err(Error::misuse("keys and rows of a sparse tensor lie in memory without gaps"));
        }
        Ok(Self { keys, rows, shape: shape.to_vec() })
    }

    /// The keys.
    pub fn keys(&self) -> &Tensor {
        &self.keys
    }

    /// The values: one row for each key.
    pub fn rows(&self) -> &Tensor {
        &self.rows
    }

    /// The sparse dimensions.
    pub fn shape(&self) -> &[u64] {
        &self.shape
    }

    /// How many keys it has.
    pub fn len(&self) -> usize {
        self.keys.len()
    }

    /// Whether it has no keys.
    pub fn is_empty(&self) -> bool {
        self.keys.is_empty()
    }

    /// Elements of a row.
    pub fn width(&self) -> usize {
        self.rows.layout().shape().iter().skip(1).product()
    }

    /// Bytes of a row.
    fn row(&self) -> usize {
        self.width() * self.rows.dtype().size()
    }

    /// Bytes of its keys and rows.
    pub(crate) fn bytes(&self) -> usize {
        self.keys.byte_len() + self.rows.byte_len()
    }

    /// Elements of the dense tensor.
    pub(crate) fn elements(&self) -> u64 {
        self.size().unwrap_or(u64::MAX).saturating_mul(self.width() as u64)
    }

    /// The GPU on which the rows lie.
    fn gpu(&self) -> Result<Option<DeviceId>> {
        let mut place = Operation::new(Kind::Keys, self.rows.dtype());
        place.locate(std::slice::from_ref(&self.rows))?;
        if self.keys.span().region().host_addr().is_none() {
            place.locate(std::slice::from_ref(&self.keys))?;
        }
        Ok(place.gpu().cloned())
    }

    /// How many keys there could be; nothing where that is too many to count.
    fn size(&self) -> Option<u64> {
        let size = self.shape.iter().try_fold(1u64, |size, &dim| size.checked_mul(dim))?;
        i64::try_from(size).ok()?;
        Some(size)
    }
}

/// An empty list with room for so many; an error where memory is short. Lists of keys are large.
fn with_room_for<T>(count: usize) -> Result<Vec<T>> {
    let mut list = Vec::new();
    let short = |_| Error::io(format!("taking memory for {count} keys"), ErrorKind::OutOfMemory);
    list.try_reserve_exact(count).map_err(short)?;
    Ok(list)
}

/// An all-reduce of a sparse tensor that has not begun.
#[must_use = "a call does nothing until it is waited for or started"]
pub struct SparseCall<'a> {
    group: &'a Arc<Collectives>,
    tensor: Sparse,
    op: ReduceOp,
    dense: Option<bool>,
    rows: Option<Rows>,
    prepare: Option<Prepare>,
    after: Option<Mark>,
    refused: Option<Error>,
    until: Until,
}

/// Gives memory for the rows of a result, by their number.
type Rows = Arc<dyn Fn(usize) -> Result<Tensor> + Send + Sync>;

/// Readies what a caller makes of a result, before its rows are there, and gives what finishes it behind the last exchange.
type Prepare = Arc<dyn Fn(&Sparse) -> Result<Finish> + Send + Sync>;
type Finish = Box<dyn FnOnce() -> Result<()>>;

/// What one rank brings to an all-reduce, and where the result goes.
pub(crate) struct SparseJob {
    tensor: Sparse,
    /// The GPU on which the rows lie.
    gpu: Option<DeviceId>,
    /// Forced.
    dense: Option<bool>,
    rows: Option<Rows>,
    prepare: Option<Prepare>,
    /// What must be done before the tensor is looked at.
    after: Option<Mark>,
    /// Why this rank cannot take part.
    refused: Option<Error>,
    result: Arc<OnceLock<Sparse>>,
}

impl fmt::Debug for SparseJob {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SparseJob({:?}, gpu {:?}, dense {:?})", self.tensor, self.gpu, self.dense)
    }
}

impl<'a> SparseCall<'a> {
    pub(crate) fn new(group: &'a Arc<Collectives>, tensor: &Sparse, op: ReduceOp) -> Self {
        let tensor = tensor.clone();
        Self {
            group,
            tensor,
            op,
            dense: None,
            rows: None,
            prepare: None,
            after: None,
            refused: None,
            until: Until::Group,
        }
    }

    /// Sets when the operation must be over at the latest. Otherwise the group's time-out counts.
    pub fn deadline(self, deadline: Deadline) -> Self {
        Self { until: Until::Call(deadline), ..self }
    }

    /// The same for a wrapper that keeps the time-out of the group itself: errors say that it was the group's.
    #[doc(hidden)]
    pub fn deadline_of_group(self, deadline: Deadline) -> Self {
        Self { until: Until::GroupAt(deadline), ..self }
    }

    /// Takes a dense all_reduce, or none, instead of what moves fewer bytes. All ranks must ask for the same.
    pub fn dense(mut self, dense: bool) -> Self {
        self.dense = Some(dense);
        self
    }

    /// Has the rows of the result lie in memory of the caller's: a tensor without gaps, on the device of the rows, of the same
    /// type and shape but for the number of rows, which is given. Asked for once the number is known, on the thread that runs
    /// the operation. An error of it ends the operation on all ranks.
    pub fn rows_in(mut self, memory: impl Fn(usize) -> Result<Tensor> + Send + Sync + 'static) -> Self {
        self.rows = Some(Arc::new(memory));
        self
    }

    /// Calls this before the last exchange, with the result, whose rows are not there yet. Who makes something of a result takes
    /// the memory for it here: an error ends the operation on all ranks. What it gives is called behind the last exchange,
    /// where an error is this rank's alone. Both run on the thread that runs the operation.
    #[doc(hidden)]
    pub fn prepared(
        mut self,
        prepare: impl Fn(&Sparse) -> Result<Box<dyn FnOnce() -> Result<()>>> + Send + Sync + 'static,
    ) -> Self {
        self.prepare = Some(Arc::new(prepare));
        self
    }

    /// Has the operation begin behind everything that is on `queue` now. How many keys there are is data, so the thread that
    /// runs the operation waits for it. Tensors of a GPU that no such queue was named for are ready when this is called.
    pub fn after(mut self, queue: &mut dyn Queue) -> Result<Self> {
        // Where the tensor is no good, the call itself says so.
        let gpu = self.tensor.gpu().ok().flatten();
        let failed =
            |error: tensorwire_device::Error| driver_failed(&self.group.ranks, gpu.as_ref(), error.into());
        self.after = Some(queue.mark().map_err(failed)?);
        Ok(self)
    }

    /// Ends the operation on all ranks, because this one cannot go on. The tensor needs no rows for that.
    #[doc(hidden)]
    pub fn refused(mut self, why: Option<Error>) -> Self {
        self.refused = why;
        self
    }

    /// Runs the operation on this thread, behind operations that were started before, and gives the result.
    pub fn wait(self) -> Result<Sparse> {
        let (call, result) = self.ready();
        call.wait()?;
        take(&result)
    }

    /// Starts the operation and returns at once. Operations of a group run in the order in which they are started.
    pub fn start(self) -> Result<SparseWork> {
        let (call, result) = self.ready();
        Ok(SparseWork { work: call.start()?, result })
    }

    /// The call, and where its result will be. The input goes with the operation, whoever keeps the result.
    fn ready(self) -> (Call<'a>, Arc<OnceLock<Sparse>>) {
        let Self { group, tensor, op, dense, rows, prepare, after, refused, until } = self;
        let result = Arc::new(OnceLock::new());
        let there = result.clone();
        let call = Call::new(group, || {
            let dtype = tensor.rows.dtype();
            let mut operation = Operation::new(Kind::Keys, dtype);
            operation.op = op;
            op.check(dtype)?;
            let gpu = tensor.gpu()?;
            operation.set_chained(Arc::new(SparseJob {
                tensor,
                gpu,
                dense,
                rows,
                prepare,
                after,
                refused,
                result: there,
            }));
            Ok(operation)
        });
        (until.of(call), result)
    }
}

impl fmt::Debug for SparseCall<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SparseCall({} keys, {})", self.tensor.len(), self.op)
    }
}

fn take(result: &OnceLock<Sparse>) -> Result<Sparse> {
    result.get().cloned().ok_or_else(|| Error::bug("an all_reduce_sparse without a result"))
}

/// An all-reduce of a sparse tensor in flight. Clones stand for the same operation, which goes on if all are dropped.
#[derive(Debug, Clone)]
#[must_use = "the work has the result"]
pub struct SparseWork {
    work: Work,
    result: Arc<OnceLock<Sparse>>,
}

impl SparseWork {
    /// Waits until the operation is over and gives its result.
    pub fn wait(&self) -> Result<Sparse> {
        self.work.wait()?;
        take(&self.result)
    }

    /// Waits until the operation is over or the deadline has passed. The operation goes on then.
    pub fn wait_by(&self, deadline: Deadline) -> Result<Sparse> {
        self.work.wait_by(deadline)?;
        take(&self.result)
    }

    /// The result, once the operation is over.
    pub fn result(&self) -> Option<Result<Sparse>> {
        self.work.result().map(|ended| ended.and_then(|()| take(&self.result)))
    }

    /// The operation without its result.
    pub fn work(&self) -> &Work {
        &self.work
    }
}
