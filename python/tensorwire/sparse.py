"""Sparse tensors of NumPy, SciPy and torch: what ``Group.all_reduce_sparse`` is made of. None of the three is imported before
it is needed.

A native operation takes sorted keys and a row of values for each. A key is the index of an element, as if all sparse
dimensions were one.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
import time
from array import array
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

from tensorwire import errors
from tensorwire.numpy import sizes_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tensorwire._native import Group, Memory

__all__ = ["Parts", "all_reduce", "flatten", "told", "unflatten"]

#: Keys without a shape may be any number below this one.
ANY = (2**63 - 1,)


class Parts(NamedTuple):
    """A sparse tensor as a native operation takes it, and how the result becomes such a tensor again."""

    #: Sorted int64, none twice.
    keys: Any
    rows: Any
    #: The sparse dimensions.
    shape: Sequence[int]
    #: Those of a row.
    dims: Sequence[int]
    #: Makes a new tensor of the memory of keys and of rows, before the rows are there: it takes all memory that is needed. Gives
    #: the tensor, and what finishes it when the rows are there, if that is needed.
    make: Callable[[Memory, Memory], tuple[Any, Callable[[], None] | None]]
    #: Gives the tensor that becomes the rows of the result, by their number; rows of the host need none.
    memory: Callable[[int], Any] | None = None


def all_reduce(
    group: Group, tensor: Any, op: Any = "sum", *, timeout: timedelta | float | None = None, async_op: bool = False
) -> Any:
    """Reduces a sparse tensor over all ranks; see ``Group.all_reduce_sparse``."""
    end = deadline(group, timeout)
    keys, rows, shape, dims, make, memory = told(group, lambda: _parts(tensor, end))
    work = group._all_reduce_sparse(
        keys, rows, shape, dims, op, make, memory=memory, timeout=timeout, async_op=async_op
    )
    return work if async_op else work.result()


def told(group: Group, look: Callable[[], Parts]) -> Parts:
    """What a tensor is made of. If this rank cannot tell, because memory is short, its stream is late or the tensor is none that
    can be reduced, all ranks hear so: they would wait in vain for one that does not come."""
    try:
        return look()
    except Exception as error:
        text = f"preparing a sparse tensor: {error}"
        is_short = isinstance(error, MemoryError) or "allocate memory" in text or "out of memory" in text
        with contextlib.suppress(Exception):
            # Nobody looks at what it would have been.
            group._all_reduce_sparse(array("q"), array("f"), ANY, (), refused=(text, is_short))
        raise


def flatten(indices: Sequence[Any], shape: Sequence[int]) -> Any:
    """The keys of elements, whose index in each dimension is given as an int64 array of NumPy or torch.

    An element that lies outside gets a key that no tensor has. The operation refuses it then, and all ranks hear of it.
    """
    keys, *others = indices
    if not others:
        return keys
    outside = (keys < 0) | (keys >= shape[0])
    for index, size in zip(others, shape[1:], strict=True):
        keys = keys * size + index
        outside |= (index < 0) | (index >= size)
    keys[outside] = -1
    return keys


def unflatten(keys: Any, shape: Sequence[int]) -> list[Any]:
    """The index of each key in each dimension."""
    indices = []
    for size in reversed(shape[1:]):
        rest = keys // max(size, 1)
        indices.append(keys - rest * size)
        keys = rest
    return [keys, *reversed(indices)]


def deadline(group: Group, timeout: timedelta | float | None) -> float:
    """When a call must be over at the latest, as a time of the monotonic clock."""
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if seconds is None or seconds < 0:
        seconds = group.timeout.total_seconds()
    return time.monotonic() + seconds


def _parts(tensor: Any, end: float) -> Parts:
    # Who has such a tensor has imported its library.
    scipy, torch = sys.modules.get("scipy.sparse"), sys.modules.get("torch")
    if scipy is not None and scipy.issparse(tensor):
        return _of_scipy(tensor)
    if torch is not None and isinstance(tensor, torch.Tensor):
        parts: Parts = importlib.import_module("tensorwire.torch.sparse").parts(tensor, end)
        return parts
    if isinstance(tensor, tuple | list) and len(tensor) in (2, 3):
        return _of_arrays(*tensor)
    raise _misuse(
        f"a {type(tensor).__module__}.{type(tensor).__qualname__} is no sparse tensor: give a COO, CSR or CSC array of SciPy, "
        "such a tensor of torch, or NumPy arrays as (keys, rows, shape)"
    )


def _of_arrays(keys: Any, rows: Any, shape: int | Sequence[int] | None = None) -> Parts:
    import numpy

    keys, rows = numpy.asarray(keys), numpy.asarray(rows)
    if keys.ndim != 1 or keys.dtype.kind not in "iu":
        raise _misuse(f"keys are integers in one dimension, not {keys.dtype} in {keys.ndim}")
    if rows.ndim == 0 or len(rows) != len(keys):
        raise _misuse(f"{len(keys)} keys with rows of shape {rows.shape}: each key has one row")
    sizes = ANY if shape is None else sizes_of(shape)
    if any(size >= 2**63 for size in sizes):
        raise _misuse(f"a sparse tensor of shape {shape!r} has more keys than 2^63")
    keys, rows = _coalesced(keys.astype("int64", copy=False), rows)
    dtype, dims = rows.dtype, rows.shape[1:]

    def make(keys_memory: Memory, rows_memory: Memory) -> tuple[Any, None]:
        keys = _array(keys_memory, numpy.dtype("int64"), [keys_memory.nbytes // 8])
        result = keys, _array(rows_memory, dtype, [len(keys), *dims])
        return result if shape is None else (*result, shape), None

    return Parts(keys, rows, sizes, dims, make)


def _of_scipy(tensor: Any) -> Parts:
    import numpy

    form, shape, kind, dtype = tensor.format, tensor.shape, type(tensor), tensor.dtype
    if form == "coo":
        # Matrices of old versions have no `coords`.
        indices, data = getattr(tensor, "coords", None) or (tensor.row, tensor.col), tensor.data
    elif form in ("csr", "csc"):
        count = int(tensor.indptr[-1])  # there may be room for more
        minor, data = tensor.indices[:count], tensor.data[:count]
        lines = numpy.repeat(numpy.arange(len(tensor.indptr) - 1), numpy.diff(tensor.indptr))
        indices = (minor,) if len(shape) == 1 else (lines, minor) if form == "csr" else (minor, lines)
    else:
        raise _misuse(f"a {kind.__name__} of SciPy cannot be reduced: only COO, CSR and CSC can; convert it with tocsr()")
    keys = flatten([index.astype("int64", copy=False) for index in indices], shape)
    keys, rows = _coalesced(keys, data)

    def make(keys_memory: Memory, rows_memory: Memory) -> tuple[Any, Callable[[], None] | None]:
        keys = _array(keys_memory, numpy.dtype("int64"), [keys_memory.nbytes // 8])
        rows = _array(rows_memory, dtype, [len(keys)])
        indices, finish = unflatten(keys, shape), None
        if form == "coo":
            result = kind((rows, tuple(indices)), shape=shape)
        else:
            if form == "csc":
                order = numpy.argsort(indices[1], kind="stable")
                indices, sorted_rows = [indices[1][order], indices[0][order]], numpy.empty_like(rows)
                # The other modes take memory. The order is one.
                finish = functools.partial(numpy.take, rows, order, out=sorted_rows, mode="clip")
                rows = sorted_rows
            lines = indices[0] if len(shape) == 2 else numpy.zeros_like(keys)
            count = 1 if len(shape) == 1 else shape[0] if form == "csr" else shape[1]
            starts = numpy.zeros(count + 1, "int64")
            numpy.cumsum(numpy.bincount(lines, minlength=count), out=starts[1:])
            result = kind((rows, indices[-1], starts), shape=shape)
        result.has_canonical_format = True
        return result, finish

    return Parts(keys, rows, shape, (), make)


def _coalesced(keys: NDArray[Any], rows: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Sorted, without gaps in memory, and with the sum of those whose keys are the same."""
    import numpy

    keys, rows = numpy.ascontiguousarray(keys), numpy.ascontiguousarray(rows)
    if (keys[1:] > keys[:-1]).all():
        return keys, rows
    order = numpy.argsort(keys, kind="stable")
    keys, rows = keys[order], rows[order]
    starts = numpy.flatnonzero(numpy.concatenate(([True], keys[1:] != keys[:-1])))
    if len(starts) == len(keys):
        return keys, rows
    return keys[starts], numpy.add.reduceat(rows, starts, axis=0, dtype=rows.dtype)


def _array(memory: Memory, dtype: Any, shape: Sequence[int]) -> NDArray[Any]:
    """An array in this memory, which it keeps."""
    import numpy

    return numpy.ndarray(shape, dtype, buffer=memoryview(memory)) if memory.nbytes else numpy.empty(shape, dtype)


def _misuse(text: str) -> errors.TensorwireError:
    return errors.raised["MisuseError"](text)
