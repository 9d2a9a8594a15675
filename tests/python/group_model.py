"""What the operations of a group must give, in plain NumPy."""

import numpy as np

INTEGERS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
FLOATS = ["float16", "float32", "float64"]
COMPLEX = ["complex64", "complex128"]
DTYPES = ["bool", *INTEGERS, *FLOATS, *COMPLEX]

OPS = ["sum", "product", "min", "max", "avg", "band", "bor", "bxor", ("premul_sum", 0.5)]


def allowed(op, dtype):
    """Whether the op has a meaning for the type."""
    kind = np.dtype(dtype).kind
    if op in ("sum", "product"):
        return True
    if op in ("min", "max"):
        return kind != "c"
    if op in ("band", "bor", "bxor"):
        return kind in "bui"
    return kind in "fc"  # avg and premul_sum


def values(dtype, shape, seed):
    """Values whose sums and products over a few ranks are exact in every type, or wrap."""
    rng = np.random.default_rng(seed)
    kind = np.dtype(dtype).kind
    if kind == "b":
        return rng.integers(0, 2, shape).astype(bool)
    if kind in "ui":
        info = np.iinfo(dtype)
        return rng.integers(info.min, info.max, shape, dtype=dtype, endpoint=True)
    small = rng.integers(-4, 5, shape).astype(dtype)
    if kind == "c":
        small = small + (1j * rng.integers(-4, 5, shape)).astype(dtype)
    return small


def reduced(op, parts):
    """The reduction of the arrays of all ranks."""
    parts = list(parts)
    dtype = parts[0].dtype
    boolean = dtype.kind == "b"
    with np.errstate(over="ignore"):
        if op == "sum":
            return np.logical_or.reduce(parts) if boolean else np.add.reduce(parts, dtype=dtype)
        if op == "product":
            return np.logical_and.reduce(parts) if boolean else np.multiply.reduce(parts, dtype=dtype)
        if op == "avg":
            wide = wider(dtype)
            return (np.add.reduce([part.astype(wide) for part in parts]) / len(parts)).astype(dtype)
        if isinstance(op, tuple):
            wide = wider(dtype)
            return np.add.reduce([part.astype(wide) * op[1] for part in parts]).astype(dtype)
    ufunc = {
        "min": np.minimum,
        "max": np.maximum,
        "band": np.bitwise_and,
        "bor": np.bitwise_or,
        "bxor": np.bitwise_xor,
    }[op]
    return ufunc.reduce(parts)


def wider(dtype):
    return np.complex128 if dtype.kind == "c" else np.float64


def same(got, expected, what=""):
    """Equal bit for bit, but for averages, whose last bit is free here."""
    got, expected = np.asarray(got), np.asarray(expected)
    if expected.dtype.kind in "fc":
        np.testing.assert_allclose(got, expected, rtol=2 * np.finfo(expected.dtype).eps, atol=0, err_msg=what)
    else:
        np.testing.assert_array_equal(got, expected, err_msg=what)
