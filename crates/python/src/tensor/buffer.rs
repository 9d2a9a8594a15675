//! Whatever speaks Python's buffer protocol.

use std::ffi::CStr;

use pyo3::exceptions::{PyException, PyMemoryError};
use pyo3::ffi;
use pyo3::prelude::*;
use tensorwire::Dtype;

use super::{Facts, Foreign, misuse, unknown};
use crate::error::exception;

/// What an exporter filled, until it is dropped.
struct View(Box<ffi::Py_buffer>);

// SAFETY: the view is only read, and released with the interpreter's lock.
unsafe impl Send for View {}
// SAFETY: as above.
unsafe impl Sync for View {}

impl Drop for View {
    fn drop(&mut self) {
        // Without an interpreter there is nobody to release it to.
        Python::try_attach(|_| {
            // SAFETY: it was filled by PyObject_GetBuffer and is released once.
            unsafe { ffi::PyBuffer_Release(&raw mut *self.0) }
        });
    }
}

impl View {
    /// Nothing where the object has no buffer, or cannot give one of its elements.
    fn get(value: &Bound<'_, PyAny>) -> PyResult<Option<Self>> {
        let py = value.py();
        // SAFETY: an object.
        if unsafe { ffi::PyObject_CheckBuffer(value.as_ptr()) } == 0 {
            return Ok(None);
        }
        // On the heap before it is filled: a view may point into itself.
        let mut raw = Box::new(ffi::Py_buffer::new());
        // SAFETY: an object and an empty view.
        if unsafe { ffi::PyObject_GetBuffer(value.as_ptr(), &raw mut *raw, ffi::PyBUF_FULL_RO) } == 0 {
            return Ok(Some(Self(raw)));
        }
        let error = PyErr::fetch(py);
        if error.is_instance_of::<PyMemoryError>(py) || !error.is_instance_of::<PyException>(py) {
            return Err(error);
        }
        Ok(None)
    }

    /// A list of as many numbers as there are dimensions. Exporters may leave it out, as ctypes does with strides.
    fn list(&self, list: *const ffi::Py_ssize_t) -> Option<Vec<isize>> {
        let ndim = usize::try_from(self.0.ndim).unwrap_or(0);
        // SAFETY: the exporter keeps lists of `ndim` numbers until the view is released.
        (!list.is_null()).then(|| (0..ndim).map(|index| unsafe { list.add(index).read() }).collect())
    }

    fn format(&self) -> String {
        if self.0.format.is_null() {
            return "B".into();
        }
        // SAFETY: a format is a C string, which lives until the view is released.
        unsafe { CStr::from_ptr(self.0.format) }.to_string_lossy().into_owned()
    }
}

/// The tensor, if it is a buffer of elements that we know.
pub(super) fn tensor(value: &Bound<'_, PyAny>) -> PyResult<Option<Foreign>> {
    let py = value.py();
    let Some(view) = View::get(value)? else { return Ok(None) };
    if view.list(view.0.suboffsets).is_some_and(|offsets| offsets.iter().any(|offset| *offset >= 0)) {
        return Err(misuse(py, "a buffer of pointers to rows is not a tensor; copy it into an array".into()));
    }
    let format = view.format();
    let item = usize::try_from(view.0.itemsize).unwrap_or(0);
    let Some(dtype) = dtype(&format, item) else {
        return Err(unknown::refused(value, Some(&format)));
    };
    let size = dtype.size() as isize;
    let shape = view.list(view.0.shape).unwrap_or_else(|| vec![view.0.len / size]);
    let shape: Option<Vec<usize>> = shape.into_iter().map(|size| size.try_into().ok()).collect();
    let Some(shape) = shape else { return Err(misuse(py, "a buffer with a negative size".into())) };
    let strides = view.list(view.0.strides);
    if strides.iter().flatten().any(|stride| stride % size != 0) {
        let text = format!("strides of {strides:?} bytes are not whole elements of {size} bytes");
        return Err(misuse(py, text));
    }
    let strides: Option<Vec<isize>> =
        strides.map(|strides| strides.iter().map(|stride| stride / size).collect());
    let facts =
        Facts { address: view.0.buf as usize, dtype, shape: &shape, strides: strides.as_deref(), gpu: None };
    let writable = view.0.readonly == 0;
    // SAFETY: the exporter keeps the elements where the view says until the view is released, which `keep` does when it
    // is dropped.
    let found = unsafe { Foreign::new(facts, Box::new(view), writable) };
    found.map(Some).map_err(|error| exception(py, &error))
}

/// The type of a format of the `struct` module.
fn dtype(format: &str, size: usize) -> Option<Dtype> {
    let little = cfg!(target_endian = "little");
    let code = match format.as_bytes() {
        [b'@' | b'=', code @ ..] => code,
        [b'<', code @ ..] if little || size == 1 => code,
        [b'>' | b'!', code @ ..] if !little || size == 1 => code,
        code => code,
    };
    Some(match (code, size) {
        (b"?", 1) => Dtype::Bool,
        (b"b", 1) => Dtype::I8,
        (b"B" | b"c", 1) => Dtype::U8,
        (b"h" | b"i" | b"l" | b"q" | b"n", 2) => Dtype::I16,
        (b"h" | b"i" | b"l" | b"q" | b"n", 4) => Dtype::I32,
        (b"h" | b"i" | b"l" | b"q" | b"n", 8) => Dtype::I64,
        (b"H" | b"I" | b"L" | b"Q" | b"N", 2) => Dtype::U16,
        (b"H" | b"I" | b"L" | b"Q" | b"N", 4) => Dtype::U32,
        (b"H" | b"I" | b"L" | b"Q" | b"N", 8) => Dtype::U64,
        (b"e", 2) => Dtype::F16,
        (b"f", 4) => Dtype::F32,
        (b"d", 8) => Dtype::F64,
        (b"Zf", 8) => Dtype::Complex64,
        (b"Zd", 16) => Dtype::Complex128,
        _ => return None,
    })
}
