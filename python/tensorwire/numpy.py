"""NumPy arrays in shared memory. NumPy is imported when it is needed, and only then."""

from __future__ import annotations

from math import prod
from operator import index

from tensorwire._native import alloc
from tensorwire.errors import MisuseError, UnsupportedError

TYPE_CHECKING = False  # typing's would cost an import that takes longer than all of ours
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from numpy.typing import DTypeLike, NDArray

    from tensorwire._native import Memory

__all__ = ["empty"]


def empty(shape: int | Sequence[int], dtype: DTypeLike = "float32") -> NDArray[Any]:
    """A NumPy array of zeros in shared memory; collectives on it, or on a slice of it, copy each byte only once.

    ``dtype`` is what ``numpy.dtype`` takes: a name, a type, or the dtype object of an extension (``ml_dtypes.bfloat16``).
    """
    numpy, kind = numpy_type(dtype, "tensorwire.empty()")
    sizes = sizes_of(shape)
    # At least one byte, so that an array without elements has an address in shared memory, too.
    memory = alloc(max(prod(sizes) * kind.itemsize, 1))
    return array_over(numpy, memory, sizes, kind)


def numpy_type(dtype: object, what: str) -> tuple[Any, Any]:
    """NumPy, and the dtype that is meant, of elements that shared memory can hold. ``what`` needs them."""
    try:
        import numpy
    except ImportError as error:
        raise UnsupportedError(
            f"{what} is not available here: needs NumPy (pip install numpy), has none; "
            "tensorwire.alloc(nbytes) gives the same memory without NumPy"
        ) from error
    try:
        kind = numpy.dtype(dtype)  # type: ignore[call-overload]
    except TypeError as error:
        hint = f"; give the dtype object of ml_dtypes instead: ml_dtypes.{dtype}" if is_small_float(dtype) else ""
        raise MisuseError(f"NumPy has no dtype {dtype!r}{hint}") from error
    if kind.hasobject:
        raise MisuseError(f"an array of {kind} holds references to Python objects, which other processes cannot follow")
    return numpy, kind


def array_over(numpy: Any, memory: Memory, sizes: tuple[int, ...], kind: Any, start: int = 0) -> NDArray[Any]:
    """An array over memory of the host, which it keeps."""
    array: NDArray[Any] = numpy.ndarray(sizes, kind, memoryview(memory), start)
    return array


def sizes_of(shape: int | Sequence[int]) -> tuple[int, ...]:
    try:
        sizes = tuple(map(index, shape)) if hasattr(shape, "__iter__") else (index(shape),)
    except TypeError as error:
        raise MisuseError(f"a shape is a number or a sequence of numbers, not {shape!r}") from error
    if any(size < 0 for size in sizes):
        raise MisuseError(f"a shape has no negative sizes: {shape!r}")
    return sizes


def is_small_float(dtype: object) -> bool:
    """Whether it is the name of a type that NumPy has only with ml_dtypes."""
    return isinstance(dtype, str) and dtype.startswith(("bfloat", "float8", "float6", "float4"))
