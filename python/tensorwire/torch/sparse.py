"""All-reduce of sparse (COO) tensors: everyone gets the elements of all, and adds them up in the same order."""

import datetime
import time
from typing import Any

import torch
from torch import Tensor

from tensorwire._native import Group
from tensorwire.torch import errors

#: torch's limit.
MAX_DIMS = 64


def check(tensors: list[Tensor], op: Any) -> None:
    """Refuses what cannot be done, before anything is changed."""
    first = tensors[0]
    for tensor in tensors:
        if tensor.layout is not torch.sparse_coo:
            raise errors.unsupported(
                f"all_reduce of a tensor of layout {tensor.layout}: only strided and sparse COO tensors are supported; "
                "convert it with to_dense() or to_sparse()"
            )
        if not tensor.is_cpu:
            raise errors.unsupported(f"all_reduce of a sparse tensor on {tensor.device}; move it to the CPU")
        if tensor.shape != first.shape or tensor.dtype != first.dtype or tensor.sparse_dim() != first.sparse_dim():
            raise errors.misuse("all_reduce of several sparse tensors of different shapes or types")
    if op not in ("sum", "avg"):
        raise errors.unsupported(f"all_reduce of sparse tensors with {op}: only sum and avg are supported")
    if op == "avg" and not (first.dtype.is_floating_point or first.dtype.is_complex):
        raise errors.misuse(f"avg of {first.dtype}: an average of integers is not one of them")


def all_reduce(group: Group, tensors: list[Tensor], op: str, timeout: datetime.timedelta) -> None:
    """Reduces the tensors of all ranks, in place."""
    end = time.monotonic() + timeout.total_seconds()

    def left() -> float:
        return max(end - time.monotonic(), 0.0)

    own = tensors[0].detach()
    for other in tensors[1:]:
        own = own + other.detach()
    own = own.coalesce()

    records = torch.empty(group.world, 4 + MAX_DIMS, dtype=torch.int64)
    group.all_gather_into(records, _record(own), timeout=left())
    mine = records[group.rank].tolist()
    for rank, record in enumerate(records.tolist()):
        if record[1:] != mine[1:]:
            raise errors.mismatch(
                f"all_reduce of sparse tensors: rank {group.rank} has {_describe(mine)}, "
                f"rank {rank} has {_describe(record)}",
                rank,
            )

    counts = records[:, 0].tolist()
    indices = [torch.empty(own.sparse_dim(), count, dtype=torch.int64) for count in counts]
    values = [torch.empty(count, *own.shape[own.sparse_dim() :], dtype=own.dtype) for count in counts]
    group.all_gather(indices, own.indices().contiguous(), timeout=left())
    group.all_gather(values, own.values().contiguous().resolve_conj().resolve_neg(), timeout=left())

    total = torch.sparse_coo_tensor(
        torch.cat(indices, dim=1), torch.cat(values), own.shape, dtype=own.dtype, check_invariants=False
    ).coalesce()
    if op == "avg":
        total = total / group.world
    with torch.no_grad():
        for tensor in tensors:
            tensor.copy_(total)


def _record(tensor: Tensor) -> Tensor:
    """What all ranks must agree on, behind the number of elements."""
    kind = _TYPES.index(str(tensor.dtype))
    head = [tensor._nnz(), kind, tensor.sparse_dim(), tensor.dim()]
    return torch.tensor(head + list(tensor.shape) + [-1] * (MAX_DIMS - tensor.dim()), dtype=torch.int64)


def _describe(record: list[int]) -> str:
    _, kind, sparse, dims = record[:4]
    return f"{_TYPES[kind]} of shape {record[4 : 4 + dims]} with {sparse} sparse dimensions"


#: Sorted by name: the same on all ranks.
_TYPES = sorted({str(value) for value in vars(torch).values() if isinstance(value, torch.dtype)})
