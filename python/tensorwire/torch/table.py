"""The operations of torch.distributed, by the names that its versions give them.

torch 2.14 renamed some methods; the old names stay as aliases. From these rows backend.py makes the methods of all
classes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d

from tensorwire.torch.operations import Operations


@dataclass(frozen=True)
class Row:
    """One operation."""

    #: Its name since torch 2.14, which is also that of our function.
    name: str
    #: What is moved, by the names that torch's overloads use.
    data: tuple[tuple[str, ...], ...] = ()
    #: The class of its options, and how they are called one by one where there is an overload without that class.
    options: type | None = None
    loose: tuple[str, ...] = ()
    #: Its name before.
    old: str = ""
    #: Whether torch's dispatcher and its Backend know it.
    dispatched: bool = True

    @property
    def function(self) -> Callable:
        return getattr(Operations, self.name)


TENSORS = ("tensors", "tensor")
OUTPUTS = ("output_tensors", "outputTensors", "output_tensor", "output_lists", "output", "outputTensor", "outputs")
INPUTS = ("input_tensors", "inputTensors", "input_tensor", "input_list", "input", "inputTensor", "inputs")
BOTH = (OUTPUTS, INPUTS)
SPLITS = (("output_split_sizes", "outputSplitSizes"), ("input_split_sizes", "inputSplitSizes"))

TABLE = (
    Row("broadcast", (TENSORS,), c10d.BroadcastOptions, ("root", "timeout")),
    Row("allreduce", (TENSORS,), c10d.AllreduceOptions, ("op", "timeout")),
    Row("allreduce_sparse", (TENSORS,), c10d.AllreduceOptions, ("op", "timeout")),
    Row("allreduce_coalesced", (TENSORS,), c10d.AllreduceCoalescedOptions, ("op", "timeout")),
    Row("reduce", (TENSORS,), c10d.ReduceOptions, ("root", "op", "timeout")),
    Row("allgather", BOTH, c10d.AllgatherOptions, ("timeout",)),
    Row("allgather_coalesced", BOTH, c10d.AllgatherOptions, ("timeout",)),
    Row("all_gather_single", BOTH, c10d.AllgatherOptions, ("timeout",), old="_allgather_base"),
    Row(
        "all_gather_single_coalesced", BOTH, c10d.AllgatherOptions, ("timeout",), old="allgather_into_tensor_coalesced"
    ),
    Row("gather", BOTH, c10d.GatherOptions, ("root", "timeout")),
    Row("gather_single", BOTH, c10d.GatherOptions, ("root", "timeout"), old="gather_into_tensor", dispatched=False),
    Row("scatter", BOTH, c10d.ScatterOptions, ("root", "timeout")),
    Row("reduce_scatter", BOTH, c10d.ReduceScatterOptions, ("op", "timeout")),
    Row("reduce_scatter_single", BOTH, c10d.ReduceScatterOptions, ("op", "timeout"), old="_reduce_scatter_base"),
    Row(
        "reduce_scatter_single_coalesced",
        BOTH,
        c10d.ReduceScatterOptions,
        ("op", "timeout"),
        old="reduce_scatter_tensor_coalesced",
    ),
    Row("all_to_all_single", BOTH + SPLITS, c10d.AllToAllOptions, ("timeout",), old="alltoall_base"),
    Row("alltoall", BOTH, c10d.AllToAllOptions, ("timeout",)),
    Row("barrier", (), c10d.BarrierOptions, ("timeout",)),
    Row("send", (TENSORS, ("dstRank",), ("tag",))),
    Row("recv", (TENSORS, ("srcRank",), ("tag",))),
    Row("recv_anysource", (TENSORS, ("tag",))),
)


def arguments(row: Row, args: tuple, kwargs: dict) -> list:
    """What a caller gave, as our function takes it: torch's own overloads, for versions whose C++ does not do this."""
    given = list(args[: len(row.data)])
    for names in row.data[len(given) :]:
        name = next((name for name in names if name in kwargs), None)
        if name is None:
            raise TypeError(f"{row.name}() misses its argument {names[0]!r}")
        given.append(kwargs.pop(name))
    rest = args[len(row.data) :]
    lists = _lists(row, given)
    if row.options is None:
        return lists
    options = kwargs.pop("opts", None)
    if rest and (rest[0] is None or isinstance(rest[0], row.options)):
        options, rest = rest[0], rest[1:]
    loose = dict(zip(row.loose, rest, strict=False)) | kwargs
    return [*lists, _options(row, options, loose)]


def _lists(row: Row, given: list) -> list:
    """A single tensor where a list could be stands for a list of it."""
    if row.data[:1] == (TENSORS,) and isinstance(given[0], torch.Tensor):
        return [[given[0]], *given[1:]]
    # Overloads like allgather(list of outputs, input) and scatter(output, list of inputs).
    if row.name in ("allgather", "gather") and isinstance(given[1], torch.Tensor):
        return [[given[0]] if given[0] else [], [given[1]]]
    if row.name in ("scatter", "reduce_scatter") and isinstance(given[0], torch.Tensor):
        return [[given[0]], [given[1]] if given[1] else []]
    return given


def _options(row: Row, options: Any, loose: dict) -> Any:
    options = row.options() if options is None else options
    for name, value in loose.items():
        if name not in row.loose:
            raise TypeError(f"{row.name}() has no argument {name!r}")
        if value is None:
            continue
        field = {"op": "reduceOp", "root": "rootRank"}.get(name, name)
        setattr(options, field, value)
    return options


