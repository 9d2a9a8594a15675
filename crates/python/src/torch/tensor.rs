//! torch's tensors, by the methods they have.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyDict;
use tensorwire::device::cuda::Gpu;
use tensorwire::{Dtype, Error};

use crate::error::exception;
use crate::gpu;
use crate::keep::Keep;
use crate::tensor::dlpack::{self, Dense};
use crate::tensor::{Facts, Foreign, Lies, misuse};

/// The tensor, if it is one of torch's.
pub(crate) fn tensor(value: &Bound<'_, PyAny>) -> PyResult<Option<Foreign>> {
    let py = value.py();
    if let Some(found) = plain(value)? {
        return Ok(Some(found));
    }
    let Ok(is_cpu) = value.getattr(intern!(py, "is_cpu")) else { return Ok(None) };
    let gpu = if is_cpu.is_truthy()? { None } else { Some(gpu_of(value)?) };
    let kind = value.getattr(intern!(py, "dtype"))?;
    let known = dtype(&kind)?;
    let Ok(address) = value.call_method0(intern!(py, "data_ptr")) else { return Err(refused(value)) };
    let address: usize = address.extract()?;
    let dense = match value.call_method0(intern!(py, "is_contiguous")) {
        Ok(dense) => dense.is_truthy()?,
        Err(_) => return Err(refused(value)),
    };
    refuse_views(value, known)?;
    let count: usize = value.call_method0(intern!(py, "numel"))?.extract()?;
    let mut flat = [count];
    let (mut shape, mut strides) = (Vec::new(), Vec::new());
    if !dense {
        shape = value.getattr(intern!(py, "shape"))?.extract()?;
        strides = value.call_method0(intern!(py, "stride"))?.extract()?;
    }
    let opaque = known.is_none();
    let dtype = match known {
        Some(dtype) => dtype,
        None => {
            if value.getattr(intern!(py, "is_quantized")).and_then(|it| it.is_truthy()).unwrap_or(true) {
                return Err(refused(value));
            }
            let size: usize = value.call_method0(intern!(py, "element_size"))?.extract()?;
            flat[0] = count.saturating_mul(size);
            strides.iter_mut().for_each(|stride: &mut isize| *stride = stride.wrapping_mul(size as isize));
            if !dense {
                shape.push(size);
                strides.push(1);
            }
            Dtype::U8
        }
    };
    let facts = if dense {
        Facts { address, dtype, shape: &flat, strides: None, gpu }
    } else {
        Facts { address, dtype, shape: &shape, strides: Some(&strides), gpu }
    };
    let found = found(value, facts)?;
    Ok(Some(if opaque { found.opaque(kind.to_string()) } else { found }))
}

/// The tensor, if it is a dense one of a usual type: that takes one call, and each of torch's attributes and methods, of
/// which five are needed otherwise, takes as long.
pub(crate) fn plain(value: &Bound<'_, PyAny>) -> PyResult<Option<Foreign>> {
    // Not asked for here: the first tensor of torch's that comes the other way has it asked for.
    let Some(Torch { plain, view: Some(view), .. }) = TORCH.get(value.py()) else { return Ok(None) };
    // Subclasses may have no memory of their own.
    if !plain.contains(&(value.get_type_ptr() as usize)) {
        return Ok(None);
    }
    // SAFETY: the function is that of these types.
    let Some(Dense { address, dtype, count, gpu }) = (unsafe { dlpack::dense(value, *view) }) else {
        return Ok(None);
    };
    refuse_views(value, Some(dtype))?;
    let gpu = gpu.map(gpu::open).transpose().map_err(|error| exception(value.py(), &error))?;
    found(value, Facts { address, dtype, shape: &[count], strides: None, gpu }).map(Some)
}

/// The GPU that a tensor lives on.
fn gpu_of(value: &Bound<'_, PyAny>) -> PyResult<Gpu> {
    let py = value.py();
    if value.getattr(intern!(py, "is_cuda")).and_then(|it| it.is_truthy()).unwrap_or(false) {
        let ordinal: usize = value.call_method0(intern!(py, "get_device"))?.extract()?;
        return gpu::open(ordinal).map_err(|error| exception(py, &error));
    }
    let device = value.getattr(intern!(py, "device"))?;
    let what = format!("a torch tensor on device {device}");
    let need = "a tensor on the CPU or on a GPU of CUDA".into();
    Err(exception(py, &Error::Unsupported { what, need, have: device.to_string() }))
}

fn found(value: &Bound<'_, PyAny>, facts: Facts<'_>) -> PyResult<Foreign> {
    let py = value.py();
    if facts.gpu.is_some() {
        // Its storage: the tensor may get another one. Other memory for the storage (`resize_`) is given and taken in the
        // order of torch's streams, as the operation is.
        let storage = value.call_method0(intern!(py, "untyped_storage"))?;
        let keep = Box::new(Keep::new(storage.unbind()));
        // SAFETY: a strided tensor of CUDA has its elements where it says for as long as its storage lives, and torch's
        // allocator gives freed memory to what comes later on the same stream.
        return unsafe { Foreign::new(facts, keep, true) }.map_err(|error| exception(py, &error));
    }
    let (address, keep) = (facts.address, Box::new(value.clone().unbind()));
    // SAFETY: a strided tensor on the CPU has its elements where it says for as long as it lives, unless somebody gives it
    // another storage, or its storage other memory. Operations that are started hold the storage, and refuse the latter
    // where Python does it (see in_flight.rs); in all other cases that is left to the caller, as with torch's own.
    let found = unsafe { Foreign::new(facts, keep, true) };
    let mut found = found.map_err(|error| exception(value.py(), &error))?;
    if !found.is_shared {
        found.torch = Some(Lies { tensor: value.clone().unbind(), address });
    }
    Ok(found)
}

/// Refuses views that stand for other values than their memory has.
fn refuse_views(value: &Bound<'_, PyAny>, dtype: Option<Dtype>) -> PyResult<()> {
    let py = value.py();
    let complex = dtype.is_none_or(Dtype::is_complex);
    let says = |question| value.call_method0(question)?.is_truthy();
    if complex && says(intern!(py, "is_conj"))?
        || (complex || dtype.is_none_or(Dtype::is_float)) && says(intern!(py, "is_neg"))?
    {
        let text = "a conjugated or negated view: its memory holds other values; call resolve_conj() or resolve_neg() first";
        return Err(misuse(py, text.into()));
    }
    Ok(())
}

/// A tensor whose elements do not simply lie in memory.
fn refused(value: &Bound<'_, PyAny>) -> PyErr {
    let py = value.py();
    let text = |name: &str| value.getattr(name).map_or_else(|_| "?".into(), |it| it.to_string());
    let kind = value.get_type().name().map_or_else(|_| "tensor".into(), |name| name.to_string());
    misuse(
        py,
        format!(
            "a {kind} of layout {} and type {} cannot be moved: only dense (strided) tensors can; convert it with to_dense() or dequantize()",
            text("layout"),
            text("dtype")
        ),
    )
}

/// What we know about torch. It keeps these objects for ever, so their addresses name them.
struct Torch {
    dtypes: Vec<(usize, Dtype)>,
    /// The types of tensors that have memory of their own.
    plain: Vec<usize>,
    view: Option<dlpack::View>,
}

static TORCH: PyOnceLock<Torch> = PyOnceLock::new();

/// torch, if somebody has imported it.
fn torch(py: Python<'_>) -> PyResult<Option<&'static Torch>> {
    if let Some(known) = TORCH.get(py) {
        return Ok(Some(known));
    }
    let modules = py.import("sys")?.getattr("modules")?.cast_into::<PyDict>()?;
    let Some(torch) = modules.get_item("torch")?.filter(|torch| !torch.is_none()) else { return Ok(None) };
    // It may be on its way in.
    let (Ok(tensor), Ok(nn)) = (torch.getattr("Tensor"), torch.getattr("nn")) else { return Ok(None) };
    let Ok(parameter) = nn.getattr("Parameter") else { return Ok(None) };
    let dtypes = Dtype::ALL.into_iter().filter_map(|dtype| {
        let object = torch.getattr(dtype.name()).ok()?;
        Some((object.as_ptr() as usize, dtype))
    });
    let known = Torch {
        dtypes: dtypes.collect(),
        plain: vec![tensor.as_ptr() as usize, parameter.as_ptr() as usize],
        view: dlpack::view(&tensor),
    };
    Ok(Some(TORCH.get_or_init(py, || known)))
}

/// Our type for one of torch's; nothing for those that we can only move.
fn dtype(kind: &Bound<'_, PyAny>) -> PyResult<Option<Dtype>> {
    // Something that only looks like a tensor of torch's has none.
    let Some(torch) = torch(kind.py())? else { return Ok(None) };
    let address = kind.as_ptr() as usize;
    Ok(torch.dtypes.iter().find(|(other, _)| *other == address).map(|(_, dtype)| *dtype))
}
