"""torch's registry of works: from a tensor to those who write it, for ``wait_tensor``.

Functional collectives put their works there, and all others do inside of ``allow_inflight_collective_as_graph_input_ctx()``.
Whoever has waited for a work takes it out. torch's own works do that in C++, where one of Python cannot reach.
"""

import threading
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d

#: Whether works are put there that are not of functional collectives.
is_on = c10d._allow_inflight_collective_as_graph_input
#: How many are there. Asked in each wait.
size = c10d._get_work_registry_size

#: Threads that take a work out just now, and the works that came with it.
_found: dict[int, list[Any]] = {}


def note(work: Any, tensors: list) -> None:
    """Puts a work there: for process groups before torch 2.14, whose methods are called past torch's own."""
    for tensor in _dense(tensors):
        c10d._register_work(tensor, work)


def forget(work: Any, tensors: list) -> None:
    """Takes a work out.

    torch can only give all works of a tensor, and does so by waiting for them. That is answered by `is_found`, and those
    that are not meant are put back.
    """
    thread = threading.get_ident()
    for tensor in _dense(tensors):
        found = _found[thread] = []
        try:
            torch.ops._c10d_functional.wait_tensor(tensor)
        finally:
            del _found[thread]
        for other in found:
            if other is not work:
                c10d._register_work(tensor, other)


def is_found(work: Any) -> bool:
    """Whether it is not waited for really, but taken out by this thread."""
    found = _found.get(threading.get_ident())
    if found is not None:
        found.append(work)
    return found is not None


def _dense(tensors: list) -> list[torch.Tensor]:
    """Those that the registry can know: it names them by their storages."""
    return [tensor for tensor in tensors if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided]
