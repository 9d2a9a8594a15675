//! Tensors of others: torch's (see `torch/tensor.rs`), and all that speak the buffer protocol or DLPack. None of them is imported or linked.

mod buffer;
pub(crate) mod dlpack;
mod interface;
mod many;
mod unknown;

use std::any::Any;
use std::ops::Deref;

use pyo3::prelude::*;
use tensorwire::device::cuda::Gpu;
use tensorwire::device::host::Host;
use tensorwire::device::{Device, Layout};
use tensorwire::{Dtype, Error, ReduceOp, Result, Span, Tensor};

pub(crate) use self::many::Many;
use crate::error::exception;
use crate::{memory, torch};

/// A tensor of somebody else.
#[derive(Debug)]
pub(crate) struct Foreign {
    pub(crate) tensor: Tensor,
    writable: bool,
    /// Whether it lies in shared memory of ours, which the tensor holds whatever becomes of the object that it came from.
    pub(crate) is_shared: bool,
    /// The name of an element type that we can only move: its bytes stand for it.
    opaque: Option<String>,
    /// Where it is a tensor of torch's that lies in memory of torch: see `torch/in_flight.rs`.
    pub(crate) torch: Option<Lies>,
    /// Where it lies in memory of a GPU.
    pub(crate) gpu: Option<Gpu>,
}

/// A tensor of torch's, and where its first element lies.
#[derive(Debug)]
pub(crate) struct Lies {
    pub(crate) tensor: Py<PyAny>,
    pub(crate) address: usize,
}

/// What a tensor says about itself. Strides are in elements.
pub(crate) struct Facts<'a> {
    pub(crate) address: usize,
    pub(crate) dtype: Dtype,
    pub(crate) shape: &'a [usize],
    /// None where there are no gaps, last dimension fastest.
    pub(crate) strides: Option<&'a [isize]>,
    /// None for memory of the host.
    pub(crate) gpu: Option<Gpu>,
}

/// A tensor that is only read, as an argument.
pub(crate) type Input = Foreign;

/// A tensor that is written, as an argument.
#[derive(Debug)]
pub(crate) struct Output(Foreign);

impl<'py> FromPyObject<'_, 'py> for Foreign {
    type Error = PyErr;

    fn extract(value: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        input(&value)
    }
}

impl<'py> FromPyObject<'_, 'py> for Output {
    type Error = PyErr;

    fn extract(value: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        written_if(true, &value).map(Self)
    }
}

impl Deref for Output {
    type Target = Foreign;

    fn deref(&self) -> &Foreign {
        &self.0
    }
}

impl AsRef<Foreign> for Output {
    fn as_ref(&self) -> &Foreign {
        &self.0
    }
}

impl AsRef<Self> for Foreign {
    fn as_ref(&self) -> &Self {
        self
    }
}

/// A tensor that is only read, or written if `written`.
pub(crate) fn written_if(written: bool, value: &Bound<'_, PyAny>) -> PyResult<Foreign> {
    let found = input(value)?;
    if written && !found.writable {
        let kind = value.get_type().fully_qualified_name()?;
        let text = format!(
            "the result cannot be written to this {kind}: its memory is read-only; give a writable copy"
        );
        return Err(misuse(value.py(), text));
    }
    Ok(found)
}

/// The tensors of a list of inputs or outputs.
pub(crate) fn each<T: AsRef<Foreign>>(list: &[T]) -> impl Iterator<Item = &Foreign> + Clone {
    list.iter().map(AsRef::as_ref)
}

/// The same, as the library has them.
pub(crate) fn bare<T: AsRef<Foreign>>(list: &[T]) -> Vec<Tensor> {
    each(list).map(|foreign| foreign.tensor.clone()).collect()
}

/// Looks at an object in all ways that we know.
fn input(value: &Bound<'_, PyAny>) -> PyResult<Foreign> {
    if let Some(found) = torch::tensor::tensor(value)? {
        return Ok(found);
    }
    if let Some(found) = buffer::tensor(value)? {
        return Ok(found);
    }
    let mut why = None;
    if let Some(found) = dlpack::tensor(value, &mut why)? {
        return Ok(found);
    }
    if let Some(found) = interface::tensor(value)? {
        return Ok(found);
    }
    let kind = value.get_type().fully_qualified_name()?;
    let text = match why {
        Some(why) => format!("a {kind} that DLPack cannot give: {why}"),
        None => format!("a {kind} is not a tensor: it has neither the buffer protocol nor DLPack"),
    };
    Err(misuse(value.py(), text))
}

impl Foreign {
    /// Refuses a reduction of elements that can only be moved.
    pub(crate) fn check(&self, py: Python<'_>, op: ReduceOp) -> PyResult<()> {
        match &self.opaque {
            None => Ok(()),
            Some(name) => {
                Err(misuse(py, format!("{op} of {name} has no meaning: such elements can only be moved")))
            }
        }
    }

    /// The tensor at an address, which lives as long as `keep` does.
    ///
    /// # Safety
    /// The elements that the facts describe are memory of the GPU that they name or of this host, valid for reads, and for writes if `writable`,
    /// until `keep` is dropped, and no Rust reference to them exists.
    pub(crate) unsafe fn new(
        facts: Facts<'_>,
        keep: Box<dyn Any + Send + Sync>,
        writable: bool,
    ) -> Result<Self> {
        let Facts { address, dtype, shape, strides, gpu } = facts;
        let count = shape.iter().try_fold(1usize, |count, &size| count.checked_mul(size));
        let bytes = count.and_then(|count| count.checked_mul(dtype.size()));
        let Some(bytes) = bytes else {
            return Err(Error::misuse(format!("a tensor of shape {shape:?} is larger than any memory")));
        };
        let plain = strides.filter(|_| bytes > 0).and_then(|strides| gaps(shape, strides));
        let Some((shape, strides)) = plain else {
            // SAFETY: as promised to this function; there are no gaps.
            let (span, is_shared) = unsafe { span(address, bytes, gpu.as_ref(), keep) }?;
            return Ok(Self { gpu, ..Self::over(Tensor::flat(span, dtype)?, writable, is_shared) });
        };
        let Some((below, len)) = extent(&shape, &strides, dtype.size()) else {
            let text =
                format!("a tensor of shape {shape:?} and strides {strides:?} is larger than any memory");
            return Err(Error::misuse(text));
        };
        let layout = Layout::with_origin(&shape, &strides, dtype.size(), below)?;
        // SAFETY: as promised to this function.
        let (span, is_shared) = unsafe { span(address.wrapping_sub(below), len, gpu.as_ref(), keep) }?;
        Ok(Self { gpu, ..Self::over(Tensor::new(span, dtype, layout)?, writable, is_shared) })
    }

    fn over(tensor: Tensor, writable: bool, is_shared: bool) -> Self {
        Self { tensor, writable, is_shared, opaque: None, torch: None, gpu: None }
    }

    /// The same, of elements that are only moved.
    pub(crate) fn opaque(mut self, name: String) -> Self {
        self.opaque = Some(name);
        self
    }
}

/// The memory at an address, and whether it is shared memory of ours.
///
/// # Safety
/// As for [`Foreign::new`].
unsafe fn span(
    address: usize,
    len: usize,
    gpu: Option<&Gpu>,
    keep: Box<dyn Any + Send + Sync>,
) -> Result<(Span, bool)> {
    if let Some(span) = memory::find(address, len) {
        return Ok((span, true));
    }
    let device: &dyn Device = gpu.map_or(&Host, |gpu| gpu);
    // SAFETY: as promised to this function.
    Ok((Span::whole(unsafe { device.adopt(address, len, keep) }?), false))
}

/// How many bytes lie below the first element, and how many there are from the lowest to behind the highest one.
fn extent(shape: &[usize], strides: &[isize], item: usize) -> Option<(usize, usize)> {
    let (mut below, mut above) = (0usize, item);
    for (&size, &stride) in shape.iter().zip(strides) {
        let reach = (size.saturating_sub(1)).checked_mul(stride.unsigned_abs())?.checked_mul(item)?;
        let side = if stride < 0 { &mut below } else { &mut above };
        *side = side.checked_add(reach)?;
    }
    Some((below, below.checked_add(above)?))
}

/// Shape and strides with as few dimensions as possible; nothing where there are no gaps.
fn gaps(shape: &[usize], strides: &[isize]) -> Option<(Vec<usize>, Vec<isize>)> {
    let mut sizes: Vec<usize> = Vec::with_capacity(shape.len());
    let mut steps: Vec<isize> = Vec::with_capacity(shape.len());
    for (&size, &stride) in shape.iter().zip(strides).filter(|(size, _)| **size != 1) {
        match (sizes.last_mut(), steps.last_mut()) {
            (Some(last), Some(step)) if *step == stride.wrapping_mul(size as isize) => {
                *last *= size;
                *step = stride;
            }
            _ => {
                sizes.push(size);
                steps.push(stride);
            }
        }
    }
    let dense = match steps[..] {
        [] => true,
        [step] => step == 1,
        _ => false,
    };
    (!dense).then_some((sizes, steps))
}

pub(crate) fn misuse(py: Python<'_>, text: String) -> PyErr {
    exception(py, &Error::misuse(text))
}
