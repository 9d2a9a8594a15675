"""Tensors in shared memory: collectives copy each byte of them only once."""

import math
from typing import Any

import torch
from torch import Tensor

from tensorwire._native import alloc


def empty(*size: Any, dtype: torch.dtype | None = None, requires_grad: bool = False) -> Tensor:
    """A tensor in shared memory, like torch.empty. (The memory is zeroed.)"""
    shape = torch.Size(size[0] if len(size) == 1 and not isinstance(size[0], int) else size)
    dtype = torch.get_default_dtype() if dtype is None else dtype
    return _flat(math.prod(shape), dtype).view(shape).requires_grad_(requires_grad)


def empty_like(tensor: Tensor, *, dtype: torch.dtype | None = None, requires_grad: bool = False) -> Tensor:
    """A tensor in shared memory like another: shape, type and, where that has no gaps, strides; as torch.empty_like."""
    like = torch.empty_like(tensor, dtype=dtype, device="meta")
    flat = _flat(like.numel(), like.dtype)
    return flat.as_strided(like.shape, like.stride()).requires_grad_(requires_grad)


def zeros(*size: Any, dtype: torch.dtype | None = None, requires_grad: bool = False) -> Tensor:
    """A tensor of zeros in shared memory."""
    return empty(*size, dtype=dtype, requires_grad=requires_grad)


def full(size: Any, value: Any, *, dtype: torch.dtype | None = None, requires_grad: bool = False) -> Tensor:
    """A tensor in shared memory that holds one value, like torch.full."""
    dtype = torch.tensor(value).dtype if dtype is None else dtype
    return empty(size, dtype=dtype).fill_(value).requires_grad_(requires_grad)


def _flat(count: int, dtype: torch.dtype) -> Tensor:
    if count == 0:
        return torch.empty(0, dtype=dtype)
    memory = alloc(count * dtype.itemsize)
    # The tensor keeps the memory. Not every type may stand in frombuffer, but bytes may become every type.
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype)
