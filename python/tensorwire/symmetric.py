"""Symmetric memory: each rank of a group brings as much memory as the others, and all reach the memory of all.

::

    from tensorwire import symmetric

    mine = symmetric.empty(1024)                   # a NumPy array; with device="cuda:0" a torch tensor
    handle = symmetric.rendezvous(mine, group)     # all ranks of the group call it
    handle.buffer(neighbour)[:] = 7                # straight into the neighbour's memory
    handle.put_signal(neighbour)
"""

from __future__ import annotations

import os
import sys
from math import prod

from tensorwire import _native, default_group
from tensorwire._native import _CHANNELS as CHANNELS
from tensorwire.closing import Closing
from tensorwire.errors import MisuseError, UnsupportedError
from tensorwire.lease import bytes_on_gpu
from tensorwire.numpy import array_over, numpy_type, sizes_of

TYPE_CHECKING = False  # typing's would cost an import that takes longer than all of ours
if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import timedelta
    from typing import Any

    from tensorwire._native import Group, Memory, Work

__all__ = [
    "CHANNELS",
    "Handle",
    "NotReached",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "empty",
    "mem_pool",
    "reduce_scatter",
    "rendezvous",
]

#: Memory pools of torch, by GPU, and what they allocate with.
_pools: dict[int, Any] = {}
_allocator: Any = None
# What was the parent's in a forked child. It is kept, never used and never given back.
_inherited: list[Any] = []


def empty(shape: int | Sequence[int], dtype: Any = None, device: Any = "cpu", *, name: str | None = None) -> Any:
    """A tensor in memory that other ranks can map, with whatever is in it.

    It is a torch tensor if the device is a GPU (``"cuda"``, ``"cuda:1"``), or if the dtype or the device is an object of
    torch's; otherwise a NumPy array. Small tensors share one allocation of the system.

    With a ``name``, this process gets the same memory each time it asks for this name on this device, and it never goes
    away. Another number of bytes is refused. Two users of one name have the same memory: what one writes, the other sees.
    """
    sizes, number = sizes_of(shape), _gpu(device)
    if number is None and _torch_of_type(dtype) is None and isinstance(device, str):
        numpy, kind = numpy_type("float32" if dtype is None else dtype, "tensorwire.symmetric.empty()")
        memory = _take(prod(sizes) * kind.itemsize, None, name)
        return array_over(numpy, memory, sizes, kind)
    torch = _torch()
    kind = torch.get_default_dtype() if dtype is None else _torch_type(torch, dtype)
    if number is not None:
        torch.cuda.init()
    memory = _take(prod(sizes) * kind.itemsize, number, name)
    return _as_torch(torch, memory, sizes, kind, 0)


def rendezvous(tensor: Any, group: Any = None, *, timeout: timedelta | float | None = None) -> Handle:
    """Has all ranks of a group reach each other's memory: each calls it with a tensor of as many bytes.

    The tensor lies in memory that others can map: of ``empty`` here, of ``tensorwire.empty`` or ``tensorwire.torch.empty``, or
    of ``mem_pool``. It has no gaps. The group is one of tensorwire, or a process group of torch whose backend is tensorwire;
    None means the default group. No rank waits longer than ``timeout`` (that of the group, unless given). If one rank
    cannot take part, all get an error.
    """
    return Handle(tensor, group_of(group), timeout)


class Handle(Closing):
    """The memory of all ranks, pads beside it, and signals between the ranks. rendezvous() gives it.

    Tensors that it has made keep their memory mapped, whatever becomes of the handle. They say nothing to the rank whose
    memory it is: before a rank lets go of its memory, all should be done with it (``barrier``).
    """

    def __init__(self, tensor: Any, group: Group, timeout: timedelta | float | None = None) -> None:
        #: Of which kind the tensors are that it gives: torch, or None for NumPy.
        self._torch = torch = _torch_of(tensor)
        if torch is not None:
            address, is_dense = tensor.data_ptr(), tensor.is_contiguous()
        elif hasattr(tensor, "__array_interface__"):
            address, is_dense = tensor.__array_interface__["data"][0], tensor.flags.c_contiguous
        else:
            raise MisuseError(f"symmetric memory is a NumPy array or a torch tensor, not a {type(tensor).__name__}")
        if not is_dense:
            raise MisuseError("symmetric memory is one piece: give a tensor without gaps, such as a row or all of it")
        self._shape, self._dtype = tuple(tensor.shape), tensor.dtype
        self._native = _native.rendezvous(group, address, tensor.nbytes, timeout)
        #: This rank, how many there are, and the bytes that each has brought.
        self.rank, self.world, self.size = self._native.rank, self._native.world, self._native.nbytes

    def buffer(
        self, rank: int, shape: int | Sequence[int] | None = None, dtype: Any = None, offset: int = 0
    ) -> Any:
        """The memory of a rank as a tensor: shape and dtype are those of this rank's tensor unless given.

        ``offset`` counts elements from the begin of the memory that the rank brought. The tensor is where the memory is.
        """
        memory, far = self._native.buffer(rank)
        return self._tensor(memory, far, shape, dtype, offset)

    def pad(self, rank: int) -> Any:
        """The pad of a rank: uint32 words beside its memory, CHANNELS for each rank, which are zero at first.

        They are for kernels that you write. Nothing here uses them: put_signal and the others have words of their own.
        """
        memory, far = self._native.pad(rank)
        return self._tensor(memory, far, memory.nbytes // 4, "uint32", 0)

    @property
    def buffer_addresses(self) -> Any:
        """The addresses of the memory of all ranks as a tensor of int64, on the device of this rank's memory.

        0 where that device does not reach a rank's memory.
        """
        return self._tensor(self._native.buffer_addresses(), False, self.world, "int64", 0)

    @property
    def pad_addresses(self) -> Any:
        """The same of the pads."""
        return self._tensor(self._native.pad_addresses(), False, self.world, "int64", 0)

    @property
    def buffer_ptrs(self) -> list[int]:
        """The addresses of the memory of all ranks, as this process knows them; 0 where it does not reach one."""
        return self._native.buffer_ptrs

    @property
    def pad_ptrs(self) -> list[int]:
        """The same of the pads."""
        return self._native.pad_ptrs

    @property
    def offsets(self) -> list[int]:
        """Where the memory of each rank begins in the allocation that it is a part of, in bytes.

        It may be another place on each rank. ``buffer_ptrs`` and ``buffer()`` have counted it in.
        """
        return self._native.offsets

    def put_signal(self, to: int, channel: int = 0, timeout: timedelta | float | None = None) -> None:
        """Sends a signal to a rank. What was written before it is seen by whoever has waited for it.

        If this rank's memory is on a GPU, torch's current stream sends it, behind what it has to do, and this returns at once.
        Signals are counted for each pair of ranks and channel: none is lost, and each wait_signal takes one.
        """
        self._native.put_signal(to, channel, timeout)

    def wait_signal(self, source: int, channel: int = 0, timeout: timedelta | float | None = None) -> None:
        """Waits for a signal of a rank. If this rank's memory is on a GPU, torch's current stream waits for it.

        A stream that waits in vain is let go after the time-out, and from then on every call of this handle raises that.
        """
        self._native.wait_signal(source, channel, timeout)

    def barrier(self, channel: int = 0, timeout: timedelta | float | None = None) -> None:
        """Waits until all ranks have come here: a signal to each other rank, and one from each."""
        self._native.barrier(channel, timeout)

    # Work of all ranks together: kernels that wait for each other while they run. Nobody meets on the host, so that a graph of
    # CUDA can record it. On the host, this thread does it.

    def all_reduce(self, tensor: Any, op: Any = "sum", **how: Any) -> None:
        """Reduces a part of the memory of all ranks, in place: each rank reduces its share and writes it to all (two-shot).

        ``tensor`` lies in the memory that this rank has brought, at the same place on all ranks. torch's current stream does it,
        and so does each replay of a graph that is being recorded (``with torch.cuda.graph(graph)``); the graph keeps the handle.
        The kernels of all ranks must run at once: a GPU for each rank, or MPS. Otherwise this raises UnsupportedError with
        the reason; ``symmetric.all_reduce`` is the way to go then.

        Every operation here takes ``channel`` (work that is under way at the same time needs a channel for each stream, of 0 to 3)
        and ``timeout``. If a rank does not come in time, the work ends on all ranks, what is behind it in tensorwire's
        own work writes nothing, and every later call of this handle raises the error; so does ``check()``.
        """
        self._native.all_reduce(tensor, op, **how)

    def one_shot(self, output: Any, input: Any, op: Any = "sum", **how: Any) -> None:
        """The same, but each rank reduces all of ``input`` by itself into ``output``, which is anywhere else: for small sizes."""
        self._native.one_shot(output, input, op, **how)

    def reduce_scatter(self, output: Any, input: Any, op: Any = "sum", **how: Any) -> None:
        """``output`` gets this rank's part of the reduction of ``input``, which lies in the memory of the handle.

        With ``engines=True`` the copy engines of the GPU fetch the parts, and its processors are free for other kernels
        meanwhile. Engines pull into this rank's own memory only. They cannot be told that a rank did not come: then they copy
        what is there.
        """
        self._native.reduce_scatter(output, input, op, **how)

    def all_gather(self, output: Any, input: Any = None, **how: Any) -> None:
        """``output`` gets the inputs of all ranks, one after the other. ``engines=True`` as above.

        ``input`` lies in the memory of the handle, at the same place on all ranks. Without it, ``output`` lies there, and this
        rank's part of it is the input.
        """
        self._native.all_gather(output, input, **how)

    def all_to_all(self, output: Any, input: Any, **how: Any) -> None:
        """``output`` gets from each rank the part of ``input`` that is meant for this one. ``engines=True`` as above."""
        self._native.all_to_all(output, input, **how)

    def broadcast(self, tensor: Any, root: int, **how: Any) -> None:
        """A part of the memory of all ranks gets what rank ``root`` has there. ``engines=True`` as above."""
        self._native.broadcast(tensor, root, **how)

    def check(self) -> None:
        """Raises the error of what streams, or replays of graphs, had to do with this handle, if something went wrong."""
        self._native.check()

    def access(self, rank: int) -> bool | NotReached:
        """True if this rank reaches the memory of another, or else the reason, which is false as a condition."""
        reason = self._native.why_not(rank)
        return True if reason is None else NotReached(reason)

    def explain(self) -> str:
        """Where the memory of each rank is and how this rank reaches it, or why not."""
        return self._native.explain()

    def close(self) -> None:
        """Gives the handle back. Tensors that it has made stay. Closing it again does nothing."""
        self._native.close()

    def __repr__(self) -> str:
        return f"<tensorwire.symmetric.Handle of {self.size} bytes, rank {self.rank} of {self.world}>"

    def _tensor(self, memory: Memory, far: bool, shape: Any, dtype: Any, offset: int) -> Any:
        sizes = self._shape if shape is None else sizes_of(shape)
        torch = self._torch or _torch_of_type(dtype) if memory.gpu is None else _torch()
        if torch is None:
            numpy, kind = numpy_type(self._dtype if dtype is None else dtype, "a tensor of symmetric memory")
            _check(sizes, kind.itemsize, offset, memory.nbytes)
            return array_over(numpy, memory, sizes, kind, offset * kind.itemsize)
        kind = _torch_type(torch, self._dtype if dtype is None else dtype)
        _check(sizes, kind.itemsize, offset, memory.nbytes)
        return _as_torch(torch, memory, sizes, kind, offset, far)


class NotReached(str):
    """Why the memory of a rank is not reached. It is false as a condition."""

    __slots__ = ()

    def __bool__(self) -> bool:
        return False


# Operations. Those of the group, on memory of which this rank knows that it needs no copy.


def all_reduce(tensor: Any, op: Any = "sum", group: Any = None, **how: Any) -> Work:
    """Reduces a tensor in symmetric memory over all ranks, in place: ``Group.all_reduce``."""
    return group_of(group).all_reduce(_shared("all_reduce", tensor), op, **how)


def reduce_scatter(output: Any, input: Any, op: Any = "sum", group: Any = None, **how: Any) -> Work:
    """Each rank gets its part of the reduction of ``input``: ``Group.reduce_scatter_from``. ``output`` may be that part."""
    shared = _shared("reduce_scatter", output), _shared("reduce_scatter", input)
    return group_of(group).reduce_scatter_from(*shared, op, **how)


def all_gather(output: Any, input: Any, group: Any = None, **how: Any) -> Work:
    """Each rank gets the inputs of all, one after the other: ``Group.all_gather_into``. ``input`` may be its own part of
    ``output``."""
    return group_of(group).all_gather_into(_shared("all_gather", output), _shared("all_gather", input), **how)


def all_to_all(output: Any, input: Any, group: Any = None, **how: Any) -> Work:
    """Each rank gets from each the part that is meant for it: ``Group.all_to_all_into``."""
    return group_of(group).all_to_all_into(_shared("all_to_all", output), _shared("all_to_all", input), **how)


def broadcast(tensor: Any, root: int, group: Any = None, **how: Any) -> Work:
    """Each rank gets what rank ``root`` has: ``Group.broadcast``."""
    return group_of(group).broadcast(_shared("broadcast", tensor), root, **how)


def mem_pool(device: Any = "cuda") -> Any:
    """A ``torch.cuda.MemPool`` whose memory other ranks can map: the one of this process for this GPU.

    What is allocated in ``with torch.cuda.use_mem_pool(pool)`` can be given to rendezvous(), and collectives need no copy of
    it. torch divides segments of at least 2 MiB among the tensors.
    """
    number = _gpu(device)
    if number is None:
        raise MisuseError(f"device={device!r}: memory pools of torch are on GPUs; on the CPU there is empty()")
    torch, pool = _torch(), _pools.get(number)
    if pool is None:
        global _allocator
        if _allocator is None:
            names = "tensorwire_symmetric_alloc", "tensorwire_symmetric_free"
            _allocator = torch.cuda.memory.CUDAPluggableAllocator(_native.__file__, *names)
        with torch.cuda.device(number):
            pool = _pools[number] = torch.cuda.MemPool(_allocator.allocator())
    return pool


def group_of(group: Any) -> Group:
    """The group of tensorwire that is meant: it itself, that of a process group of torch, or the default one."""
    if isinstance(group, _native.Group):
        return group
    distributed: Any = sys.modules.get("torch.distributed")
    is_torch = distributed is not None and distributed.is_available() and distributed.is_initialized()
    if group is None:
        if default_group._group is not None or not is_torch:
            return default_group.group()
        group = distributed.group.WORLD
    operations = getattr(group, "operations", None)
    if operations is None and is_torch:
        import torch

        try:
            operations = getattr(group._get_backend(torch.device("cpu")), "operations", None)
        except (AttributeError, RuntimeError):
            operations = None
    if operations is None:
        raise MisuseError(
            f"{group!r} is no group of tensorwire: give a tensorwire.Group, a process group of torch whose backend is "
            "tensorwire, or None for the default one"
        )
    ours: Group = operations.group
    return ours


# Helpers.


def _take(nbytes: int, gpu: int | None, name: str | None) -> Memory:
    # At least one byte, so that a tensor without elements has an address, too.
    nbytes = max(nbytes, 1)
    return _native.pooled(nbytes, gpu, name)


def _gpu(device: Any) -> int | None:
    """The number of a GPU; None for the CPU."""
    kind, _, number = str(device).partition(":")
    if kind == "cpu":
        return None
    if kind != "cuda" or number and not number.isdecimal():
        raise MisuseError(f"device={device!r}: symmetric memory is on 'cpu', 'cuda' or 'cuda:N'")
    return int(number) if number else _torch().cuda.current_device()


def _torch() -> Any:
    try:
        import torch
    except ImportError as error:
        raise UnsupportedError("tensors on a GPU are not available here: needs torch, has none") from error
    return torch


def _torch_of(tensor: Any) -> Any:
    """torch, if it is a tensor of torch's."""
    torch = sys.modules.get("torch")
    return torch if torch is not None and isinstance(tensor, torch.Tensor) else None


def _torch_of_type(dtype: Any) -> Any:
    """torch, if it is a dtype of torch's."""
    torch = sys.modules.get("torch")
    return torch if torch is not None and isinstance(dtype, torch.dtype) else None


def _torch_type(torch: Any, dtype: Any) -> Any:
    """torch's type of one of torch's or of NumPy's, or of a name."""
    kind = dtype if isinstance(dtype, torch.dtype) else getattr(torch, str(dtype), None)
    if not isinstance(kind, torch.dtype):
        raise MisuseError(f"torch has no dtype {dtype!r}")
    return kind


def _as_torch(torch: Any, memory: Memory, sizes: Any, kind: Any, offset: int, far: bool = False) -> Any:
    """A tensor over memory, which it keeps."""
    count = prod(sizes)
    if count == 0:
        device = "cpu" if memory.gpu is None else f"cuda:{memory.gpu}"
        return torch.empty(sizes, dtype=kind, device=device)
    flat = torch.frombuffer(memory, dtype=torch.uint8) if memory.gpu is None else bytes_on_gpu(torch, memory, far)
    start = offset * kind.itemsize
    return flat[start : start + count * kind.itemsize].view(kind).view(sizes)


def _check(sizes: tuple[int, ...], item: int, offset: int, nbytes: int) -> None:
    if offset < 0 or (offset + prod(sizes)) * item > nbytes:
        raise MisuseError(
            f"a tensor of shape {sizes} at element {offset} ends at byte {(offset + prod(sizes)) * item} of {nbytes}"
        )


def _shared(operation: str, tensor: Any) -> Any:
    """The tensor, if other ranks can map its memory."""
    if _torch_of(tensor) is not None:
        address = tensor.data_ptr()
    else:
        address = getattr(tensor, "__array_interface__", {"data": (0,)})["data"][0]
    # One without elements has no memory.
    if not _native.is_shared(address) and getattr(tensor, "nbytes", 1) != 0:
        raise MisuseError(
            f"{operation} here takes tensors in symmetric memory, and this {type(tensor).__name__} is not; "
            f"the method of the group takes any"
        )
    return tensor


def _forked() -> None:
    """In a forked child: the memory is the parent's."""
    global _pools
    _inherited.append(_pools)
    _pools = {}


os.register_at_fork(after_in_child=_forked)
