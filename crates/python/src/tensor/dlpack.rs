//! Whatever speaks DLPack: a struct of a fixed layout behind a capsule.

use std::ffi::{CStr, c_int, c_void};
use std::mem::MaybeUninit;

use pyo3::exceptions::{PyException, PyMemoryError, PyTypeError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyCapsuleMethods, PyDict};
use tensorwire::{Dtype, Error};

use super::{Facts, Foreign, misuse};
use crate::error::exception;

const PLAIN: &CStr = c"dltensor";
const VERSIONED: &CStr = c"dltensor_versioned";
const USED_PLAIN: &CStr = c"used_dltensor";
const USED_VERSIONED: &CStr = c"used_dltensor_versioned";

/// The name of the capsule with the functions in C.
const EXCHANGE: &CStr = c"dlpack_exchange_api";

/// Devices whose memory the host can touch like its own.
const CPU: i32 = 1;
const PINNED: i32 = 3;
/// A GPU of CUDA.
const CUDA: i32 = 2;

/// Flag of a versioned tensor.
const READ_ONLY: u64 = 1;

#[repr(C)]
pub(crate) struct DlTensor {
    data: *mut c_void,
    device_type: i32,
    device_id: i32,
    ndim: i32,
    code: u8,
    bits: u8,
    lanes: u16,
    shape: *const i64,
    strides: *const i64,
    byte_offset: u64,
}

#[repr(C)]
struct Plain {
    tensor: DlTensor,
    manager: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Self)>,
}

#[repr(C)]
struct Versioned {
    major: u32,
    minor: u32,
    manager: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Self)>,
    flags: u64,
    tensor: DlTensor,
}

/// DLPack's functions in C, which the type of a library's tensors may have in an attribute.
#[repr(C)]
struct Exchange {
    major: u32,
    minor: u32,
    older: *const c_void,
    allocate: *const c_void,
    export: *const c_void,
    import: *const c_void,
    view: Option<View>,
    stream: *const c_void,
}

/// Fills in what a tensor of the type that it comes from is, without a copy or an owner. 0 if it can.
pub(crate) type View = unsafe extern "C" fn(*mut ffi::PyObject, *mut DlTensor) -> c_int;

/// The tensor behind a capsule, which is ours to delete.
enum Managed {
    Plain(*mut Plain),
    Versioned(*mut Versioned),
}

// SAFETY: the struct is only read, and DLPack allows its deleter to be called on any thread.
unsafe impl Send for Managed {}
// SAFETY: as above.
unsafe impl Sync for Managed {}

impl Drop for Managed {
    fn drop(&mut self) {
        // Deleters of Python libraries take the interpreter's lock themselves; one that is not there any more needs no
        // memory back.
        Python::try_attach(|_| match *self {
            // SAFETY: the pointer came from a capsule that was renamed, so its deleter is ours to call, once.
            Self::Plain(managed) => unsafe {
                if let Some(deleter) = (*managed).deleter {
                    deleter(managed);
                }
            },
            // SAFETY: as above.
            Self::Versioned(managed) => unsafe {
                if let Some(deleter) = (*managed).deleter {
                    deleter(managed);
                }
            },
        });
    }
}

impl Managed {
    fn tensor(&self) -> &DlTensor {
        match *self {
            // SAFETY: the struct lives until the deleter is called, which Drop does.
            Self::Plain(managed) => unsafe { &(*managed).tensor },
            // SAFETY: as above.
            Self::Versioned(managed) => unsafe { &(*managed).tensor },
        }
    }

    fn writable(&self) -> bool {
        match *self {
            // Older libraries cannot say.
            Self::Plain(_) => true,
            // SAFETY: as above.
            Self::Versioned(managed) => unsafe { (*managed).flags & READ_ONLY == 0 },
        }
    }
}

/// The tensor, if it speaks DLPack; `why` is set where it speaks it but cannot export this one.
pub(super) fn tensor(value: &Bound<'_, PyAny>, why: &mut Option<String>) -> PyResult<Option<Foreign>> {
    let py = value.py();
    let Ok(export) = value.getattr("__dlpack__") else { return Ok(None) };
    if let Ok(device) = value.call_method0("__dlpack_device__") {
        let (kind, index): (i32, i32) = device.extract()?;
        on_host(py, kind, index)?;
    }
    let capsule = match ask(&export) {
        Ok(capsule) => capsule,
        Err(error)
            if error.is_instance_of::<PyMemoryError>(py) || !error.is_instance_of::<PyException>(py) =>
        {
            return Err(error);
        }
        // Arrays of types that a library cannot export may still be reached in another way.
        Err(error) => {
            *why = Some(error.to_string());
            return Ok(None);
        }
    };
    let Ok(capsule) = capsule.cast_into::<PyCapsule>() else {
        return Err(misuse(py, "__dlpack__() gave no capsule".into()));
    };
    let managed = take(&capsule)?;
    let found = foreign(py, managed)?;
    Ok(Some(found))
}

/// Asks for a capsule of the newer kind, and those that know no newer one for theirs.
fn ask<'py>(export: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    let py = export.py();
    let versioned = PyDict::new(py);
    versioned.set_item("max_version", (1, 0))?;
    match export.call((), Some(&versioned)) {
        Err(error) if error.is_instance_of::<PyTypeError>(py) => export.call0(),
        answer => answer,
    }
}

/// The function of a type that views its tensors, if it has one.
pub(crate) fn view(kind: &Bound<'_, PyAny>) -> Option<View> {
    let capsule = kind.getattr("__dlpack_c_exchange_api__").ok()?.cast_into::<PyCapsule>().ok()?;
    let table = capsule.pointer_checked(Some(EXCHANGE)).ok()?.cast::<Exchange>();
    // SAFETY: a capsule of this name holds such a table, which lives as long as the process.
    let table = unsafe { table.as_ref() };
    // Other versions look different.
    (table.major == 1).then_some(table.view).flatten()
}

/// What a tensor without gaps says about itself.
pub(crate) struct Dense {
    pub(crate) address: usize,
    pub(crate) dtype: Dtype,
    pub(crate) count: usize,
    /// The number of its GPU; None on the host.
    pub(crate) gpu: Option<usize>,
}

/// The tensor, if its elements lie on the host or on a GPU one after the other and are of a known type.
///
/// # Safety
/// `view` was found at the type of the value.
pub(crate) unsafe fn dense(value: &Bound<'_, PyAny>, view: View) -> Option<Dense> {
    let mut found = MaybeUninit::<DlTensor>::uninit();
    // SAFETY: an object of the type that the function is for, and room for what it says.
    if unsafe { view(value.as_ptr(), found.as_mut_ptr()) } != 0 {
        // It has raised an exception. Whoever looks at the tensor in another way finds out why.
        drop(PyErr::take(value.py()));
        return None;
    }
    // SAFETY: the function has filled it in, for as long as the interpreter is held.
    let found = unsafe { found.assume_init() };
    let gpu = match found.device_type {
        CPU => None,
        CUDA => Some(usize::try_from(found.device_id).ok()?),
        _ => return None,
    };
    if found.shape.is_null() && found.ndim > 0 {
        return None;
    }
    let dtype = dtype(found.code, found.bits, found.lanes)?;
    let mut count = 1usize;
    for index in (0..usize::try_from(found.ndim).ok()?).rev() {
        // SAFETY: shape and strides are lists of ndim numbers; without strides there are no gaps.
        let (size, stride) = unsafe {
            (*found.shape.add(index), (!found.strides.is_null()).then(|| *found.strides.add(index)))
        };
        let size = usize::try_from(size).ok()?;
        if size != 1 && stride.is_some_and(|stride| usize::try_from(stride) != Ok(count)) {
            return None;
        }
        count = count.checked_mul(size)?;
    }
    let address = (found.data as usize).wrapping_add(found.byte_offset as usize);
    Some(Dense { address, dtype, count, gpu })
}

fn on_host(py: Python<'_>, kind: i32, index: i32) -> PyResult<()> {
    if kind == CPU || kind == PINNED {
        return Ok(());
    }
    let what = format!("a tensor on DLPack device ({kind}, {index})");
    let error = Error::Unsupported { what, need: "a tensor on the CPU".into(), have: "a device".into() };
    Err(exception(py, &error))
}

/// Takes over what a capsule holds; it is renamed, so that it does not delete it as well.
fn take(capsule: &Bound<'_, PyCapsule>) -> PyResult<Managed> {
    let py = capsule.py();
    let has = |name: &CStr| {
        // SAFETY: a capsule, and a name that is a C string.
        unsafe { ffi::PyCapsule_IsValid(capsule.as_ptr(), name.as_ptr()) != 0 }
    };
    let (name, used) = match () {
        () if has(VERSIONED) => (VERSIONED, USED_VERSIONED),
        () if has(PLAIN) => (PLAIN, USED_PLAIN),
        () => {
            return Err(misuse(
                py,
                "__dlpack__() gave a capsule of another kind, or one that is used up".into(),
            ));
        }
    };
    let pointer = capsule.pointer_checked(Some(name))?.as_ptr();
    // SAFETY: a capsule, and a name that lives for ever.
    if unsafe { ffi::PyCapsule_SetName(capsule.as_ptr(), used.as_ptr()) } != 0 {
        return Err(PyErr::fetch(py));
    }
    if name == PLAIN {
        return Ok(Managed::Plain(pointer.cast()));
    }
    let managed = Managed::Versioned(pointer.cast());
    // SAFETY: every version begins with its number, and ends with a deleter at the same place.
    let major = unsafe { (*pointer.cast::<Versioned>()).major };
    if major > 1 {
        return Err(misuse(py, format!("DLPack version {major} is not known here; up to 1 is")));
    }
    Ok(managed)
}

fn foreign(py: Python<'_>, managed: Managed) -> PyResult<Foreign> {
    let tensor = managed.tensor();
    let (code, bits, lanes) = (tensor.code, tensor.bits, tensor.lanes);
    let Some(dtype) = dtype(code, bits, lanes) else {
        let text =
            format!("DLPack elements of code {code}, {bits} bits and {lanes} lanes are not known here");
        return Err(misuse(py, text));
    };
    on_host(py, tensor.device_type, tensor.device_id)?;
    let Ok(ndim) = usize::try_from(tensor.ndim) else {
        return Err(misuse(py, format!("a DLPack tensor of {} dimensions", tensor.ndim)));
    };
    let read = |list: *const i64| -> Vec<i64> {
        // SAFETY: DLPack's shape and strides are lists of ndim numbers, which live as long as the struct.
        (0..ndim).map(|index| unsafe { list.add(index).read() }).collect()
    };
    if ndim > 0 && tensor.shape.is_null() {
        return Err(misuse(py, "a DLPack tensor without a shape".into()));
    }
    let shape: Option<Vec<usize>> = read(tensor.shape).into_iter().map(|size| size.try_into().ok()).collect();
    let Some(shape) = shape else {
        return Err(misuse(py, "a DLPack tensor with a negative size".into()));
    };
    let strides: Option<Vec<isize>> = (ndim > 0 && !tensor.strides.is_null())
        .then(|| read(tensor.strides).into_iter().map(|stride| stride as isize).collect());
    let address = (tensor.data as usize).wrapping_add(tensor.byte_offset as usize);
    let facts = Facts { address, dtype, shape: &shape, strides: strides.as_deref(), gpu: None };
    let writable = managed.writable();
    // SAFETY: a DLPack tensor on the CPU has its elements where it says until its deleter is called, which `keep` does
    // when it is dropped.
    let found = unsafe { Foreign::new(facts, Box::new(managed), writable) };
    found.map_err(|error| exception(py, &error))
}

fn dtype(code: u8, bits: u8, lanes: u16) -> Option<Dtype> {
    if lanes != 1 {
        return None;
    }
    Some(match (code, bits) {
        (0, 8) => Dtype::I8,
        (0, 16) => Dtype::I16,
        (0, 32) => Dtype::I32,
        (0, 64) => Dtype::I64,
        (1, 8) => Dtype::U8,
        (1, 16) => Dtype::U16,
        (1, 32) => Dtype::U32,
        (1, 64) => Dtype::U64,
        (2, 16) => Dtype::F16,
        (2, 32) => Dtype::F32,
        (2, 64) => Dtype::F64,
        (4, 16) => Dtype::Bf16,
        (5, 32) => Dtype::Complex32,
        (5, 64) => Dtype::Complex64,
        (5, 128) => Dtype::Complex128,
        (6, 8) => Dtype::Bool,
        (10, 8) => Dtype::F8E4M3Fn,
        (11, 8) => Dtype::F8E4M3Fnuz,
        (12, 8) => Dtype::F8E5M2,
        (13, 8) => Dtype::F8E5M2Fnuz,
        (14, 8) => Dtype::F8E8M0Fnu,
        _ => return None,
    })
}
