"""torch's words for calls that are wrong. Programs and tests look for them; ours, which say more, come behind them."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from tensorwire import errors as ours
from tensorwire.torch import errors

ROOTED = ("broadcast", "reduce", "gather", "gather_single", "scatter")


def told(error: Exception, name: str, rank: int, size: int, args: Sequence[Any]) -> Exception:
    """The error of a wrong call with torch's words for it before its own, where torch has any. The arguments are those of
    `Operations`."""
    try:
        words = _words(name, rank, size, args)
    except Exception:  # Stranger arguments than torch has words for.
        return error
    if not words:
        return error
    if not isinstance(error, ours.MisuseError):
        return errors.misuse(f"{words}: {error}")
    error.args = (f"{words}: {error.args[0]}", *error.args[1:])
    return error


def _words(name: str, rank: int, size: int, args: Sequence[Any]) -> str | None:
    root = getattr(args[-1], "rootRank", 0) if name in ROOTED else 0
    if not 0 <= root < size:
        return f"invalid root rank: {root}"
    if name in ("send", "recv", "recv_anysource"):
        return None if len(args[0]) == 1 else f"{name.removesuffix('_anysource')} takes a single tensor"
    if name == "reduce" and len(args[0]) != 1:
        return "requires a single-element tensor list"
    if name in ("allreduce", "broadcast"):
        return _other(args[0][0], args[0])
    if name == "all_gather_single" and args[0].numel() != size * args[1].numel():
        return "output tensor size must be equal to world_size times input tensor size"
    if name == "reduce_scatter_single" and args[1].numel() != size * args[0].numel():
        return "input tensor must be the same size as output size times world size"
    # Beside a tensor for this rank there is a list with one for each.
    if name in ("allgather", "gather"):
        return _lists(name, size, root == rank, args[1], args[0], "input", "output")
    if name in ("scatter", "reduce_scatter"):
        return _lists(name, size, root == rank, args[0], args[1], "output", "input")
    if name == "alltoall":
        for what, tensors in (("input", args[1]), ("output", args[0])):
            if len(tensors) != size:
                return f"{what} tensor list size {len(tensors)} does not match world size {size}"
    return None


def _lists(
    name: str, size: int, is_root: bool, own: list, parts: list, one: str, many: str
) -> str | None:
    if len(own) != 1:
        return f"requires a single-element {one} tensor list"
    listed = parts[0] if len(parts) == 1 else None
    if name in ("gather", "scatter"):
        if not is_root:
            return f"requires empty {many} on non-root" if listed else None
        if listed is None or len(listed) != size:
            return f"requires a single-element {many} list containing a list with {size} tensors"
    elif listed is None:
        return f"requires a single-element {many} tensor list"
    elif len(listed) != size:
        if name == "reduce_scatter":
            return "invalid input tensor list size, must be world size"
        return f"invalid output tensor list at index 0 (expected length {size}, got {len(listed)})"
    return _other(own[0], listed)


def _other(first: Tensor, tensors: list) -> str | None:
    """That one of them has another type or size than the first."""
    for index, tensor in enumerate(tensors):
        if tensor.dtype != first.dtype:
            return f"invalid tensor type at index {index} (expected {first.dtype}, got {tensor.dtype})"
        if tensor.numel() != first.numel():
            return f"invalid tensor size at index {index} (expected {_shape(first)}, got {_shape(tensor)})"
    return None


def _shape(tensor: Tensor) -> str:
    return f"({', '.join(map(str, tensor.shape))})"
