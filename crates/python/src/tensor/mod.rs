//! Tensors of others: torch's (see `torch/tensor.rs`), and all that speak the buffer protocol or DLPack. None of them is imported or linked.

mod buffer;
pub(crate) mod dlpack;
mod interface;

use std::any::Any;

use pyo3::prelude::*;
use tensorwire::device::host::Host;
use tensorwire::device::{Device, Layout};
use tensorwire::{Dtype, Error, ReduceOp, Result, Span, Tensor};

use crate::error::exception;
use crate::{memory, torch};

/// A tensor of somebody else.
#[derive(Debug, Clone)]
pub(crate) struct Foreign {
    pub(crate) tensor: Tensor,
    writable: bool,
    /// The name of an element type that we can only move: its bytes stand for it.
    opaque: Option<String>,
}

/// What a tensor says about itself. Strides are in elements.
pub(crate) struct Facts<'a> {
    pub(crate) address: usize,
    pub(crate) dtype: Dtype,
    pub(crate) shape: &'a [usize],
    /// None where there are no gaps, last dimension fastest.
    pub(crate) strides: Option<&'a [isize]>,
}

/// A tensor that is only read.
pub(crate) fn input(value: &Bound<'_, PyAny>) -> PyResult<Foreign> {
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

/// A tensor that is written.
pub(crate) fn output(value: &Bound<'_, PyAny>) -> PyResult<Foreign> {
    let found = input(value)?;
    if !found.writable {
        let kind = value.get_type().fully_qualified_name()?;
        let text = format!(
            "the result cannot be written to this {kind}: its memory is read-only; give a writable copy"
        );
        return Err(misuse(value.py(), text));
    }
    Ok(found)
}

/// Several tensors that are only read.
pub(crate) fn inputs(values: &[Bound<'_, PyAny>]) -> PyResult<Vec<Foreign>> {
    values.iter().map(input).collect()
}

/// Several tensors that are written.
pub(crate) fn outputs(values: &[Bound<'_, PyAny>]) -> PyResult<Vec<Foreign>> {
    values.iter().map(output).collect()
}

/// The tensors themselves.
pub(crate) fn bare(list: &[Foreign]) -> Vec<Tensor> {
    list.iter().map(|foreign| foreign.tensor.clone()).collect()
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
    /// The elements that the facts describe are memory of this host, valid for reads, and for writes if `writable`,
    /// until `keep` is dropped, and no Rust reference to them exists.
    pub(crate) unsafe fn new(facts: Facts<'_>, keep: Box<dyn Any + Send + Sync>, writable: bool) -> Result<Self> {
        let Facts { address, dtype, shape, strides } = facts;
        let count = shape.iter().try_fold(1usize, |count, &size| count.checked_mul(size));
        let bytes = count.and_then(|count| count.checked_mul(dtype.size()));
        let Some(bytes) = bytes else {
            return Err(Error::misuse(format!("a tensor of shape {shape:?} is larger than any memory")));
        };
        let plain = strides.filter(|_| bytes > 0).and_then(|strides| gaps(shape, strides));
        let Some((shape, strides)) = plain else {
            // SAFETY: as promised to this function; there are no gaps.
            let span = unsafe { span(address, bytes, keep) }?;
            return Ok(Self { tensor: Tensor::flat(span, dtype)?, writable, opaque: None });
        };
        let Some((below, len)) = extent(&shape, &strides, dtype.size()) else {
            let text =
                format!("a tensor of shape {shape:?} and strides {strides:?} is larger than any memory");
            return Err(Error::misuse(text));
        };
        let layout = Layout::with_origin(&shape, &strides, dtype.size(), below)?;
        // SAFETY: as promised to this function.
        let span = unsafe { span(address.wrapping_sub(below), len, keep) }?;
        Ok(Self { tensor: Tensor::new(span, dtype, layout)?, writable, opaque: None })
    }

    /// The same, of elements that are only moved.
    pub(crate) fn opaque(mut self, name: String) -> Self {
        self.opaque = Some(name);
        self
    }
}

/// The memory at an address: shared memory of ours, or that of somebody else.
///
/// # Safety
/// As for [`Foreign::new`].
unsafe fn span(address: usize, len: usize, keep: Box<dyn Any + Send + Sync>) -> Result<Span> {
    if let Some(span) = memory::find(address, len) {
        return Ok(span);
    }
    // SAFETY: as promised to this function.
    Ok(Span::whole(unsafe { Host.adopt(address, len, keep) }?))
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
