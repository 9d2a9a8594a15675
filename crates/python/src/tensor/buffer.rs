//! Whatever speaks Python's buffer protocol.

use pyo3::buffer::PyUntypedBuffer;
use pyo3::prelude::*;
use tensorwire::Dtype;

use super::{Facts, Foreign, misuse};
use crate::error::exception;

/// The tensor, if it is a buffer of elements that we know.
pub(super) fn tensor(value: &Bound<'_, PyAny>) -> PyResult<Option<Foreign>> {
    let py = value.py();
    let Ok(buffer) = PyUntypedBuffer::get(value) else { return Ok(None) };
    if buffer.suboffsets().is_some_and(|offsets| offsets.iter().any(|offset| *offset >= 0)) {
        return Err(misuse(py, "a buffer of pointers to rows is not a tensor; copy it into an array".into()));
    }
    let format = buffer.format().to_string_lossy().into_owned();
    let Some(dtype) = dtype(&format, buffer.item_size()) else {
        return Err(misuse(py, format!("a buffer of format {format:?} is not a tensor of elements we know")));
    };
    let size = dtype.size() as isize;
    let shape = buffer.shape().to_vec();
    let strides = buffer.strides();
    if strides.iter().any(|stride| stride % size != 0) {
        let text = format!("strides of {strides:?} bytes are not whole elements of {size} bytes");
        return Err(misuse(py, text));
    }
    let strides: Vec<isize> = strides.iter().map(|stride| stride / size).collect();
    let facts = Facts { address: buffer.buf_ptr() as usize, dtype, shape: &shape, strides: Some(&strides) };
    let writable = !buffer.readonly();
    // SAFETY: the exporter keeps the elements where the buffer says until the buffer is released, which `keep` does
    // when it is dropped.
    let found = unsafe { Foreign::new(facts, Box::new(buffer), writable) };
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
