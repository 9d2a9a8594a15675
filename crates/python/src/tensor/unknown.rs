//! Elements that we do not know: which they are, in the words of whoever made them, and what to do about it.

use pyo3::prelude::*;

use super::misuse;

/// The error for a buffer of this format, or for an array that has none.
pub(super) fn refused(value: &Bound<'_, PyAny>, format: Option<&str>) -> PyErr {
    // NumPy's name is the one that its users know: its formats are those of the `struct` module.
    let dtype = value.getattr("dtype").and_then(|dtype| Ok(dtype.str()?.to_string())).ok();
    let kind =
        value.get_type().fully_qualified_name().map_or_else(|_| "buffer".into(), |kind| kind.to_string());
    let what = match (&dtype, format) {
        (Some(dtype), Some(format)) => {
            format!("the elements of this {kind} have the dtype {dtype} (buffer format {format:?})")
        }
        (Some(dtype), None) => format!("the elements of this {kind} have the dtype {dtype}"),
        (None, format) => {
            format!("the elements of this {kind} have the buffer format {:?}", format.unwrap_or_default())
        }
    };
    let fix = match &dtype {
        Some(dtype) => array_fix(value, dtype),
        None => "memoryview(x).cast(\"B\") gives the same memory as bytes, which can be moved".into(),
    };
    misuse(value.py(), format!("{what}, which tensorwire does not know; {fix}"))
}

/// What to do with an array `x` of NumPy's.
fn array_fix(value: &Bound<'_, PyAny>, dtype: &str) -> String {
    let fact =
        |name: &str| -> PyResult<String> { Ok(value.getattr("dtype")?.getattr(name)?.str()?.to_string()) };
    let kind = fact("kind").unwrap_or_default();
    let swapped = fact("isnative").is_ok_and(|native| native == "False");
    match kind.as_str() {
        // Plain numbers, but in the other byte order. A record says so of its fields.
        "i" | "u" | "f" | "c" if swapped => {
            "x.astype(x.dtype.newbyteorder(\"=\")) has them in the byte order of this machine".into()
        }
        "f" => "x.astype(\"float64\") has them as doubles".into(),
        "c" => "x.astype(\"complex128\") has them as pairs of doubles".into(),
        "M" | "m" => "x.view(\"int64\") gives the same memory as integers".into(),
        "O" | "T" => format!(
            "elements of {dtype} are pointers, which mean nothing to another process: send \
             numpy.frombuffer(pickle.dumps(x), \"uint8\")"
        ),
        _ => "x.view(\"uint8\") gives the same memory as bytes, which can be moved".into(),
    }
}
