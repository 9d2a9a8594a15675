"""All-reduce of sparse tensors of torch: COO, CSR and CSC."""

import contextlib
import functools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

# Not the exceptions of the backend: they are torch's only for programs that use it.
from tensorwire import errors
from tensorwire._native import Group, Memory, Work
from tensorwire.sparse import Parts, deadline, flatten, told, unflatten
from tensorwire.torch.own_stream import hand_over, on_own_stream, wait


def all_reduce(group: Group, tensors: list[Tensor], op: Any, timeout: Any = None, async_op: bool = False) -> "Reduction":
    """Reduces sparse tensors of all ranks, in place. Several of one rank are added up first."""
    end = deadline(group, timeout)
    keys, rows, shape, dims, make, memory = told(group, lambda: _on_its_own(_together(tensors, op, end), tensors[0]))
    device, is_inference = tensors[0].device, tensors[0].is_inference()
    # The stream of this call: another thread may put the result into the tensors.
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def make_all(keys: Memory, rows: Memory) -> tuple[list[Tensor], Callable[[], None]]:
        first, finish = make(keys, rows)
        with _on_other_thread(device, is_inference):
            # Two tensors do not share their values.
            results = [first, *(_alike(first) if first.layout is torch.sparse_coo else first for _ in tensors[1:])]
            for tensor, result in zip(tensors, results, strict=True):
                _make_room(tensor, result)

        def finish_all() -> None:
            if finish is not None:
                finish()
            with _on_other_thread(device, is_inference):
                for result in results[1:]:
                    if result is not first:
                        result._values().copy_(first._values())

        return results, finish_all

    work = group._all_reduce_sparse(
        keys, rows, shape, dims, op, make_all, memory=memory, timeout=timeout, async_op=async_op
    )

    def put(results: list[Tensor]) -> None:
        with _on_other_thread(device, is_inference):
            for tensor, result in zip(tensors, results, strict=True):
                _put(tensor, result)
        if stream is not None:
            for tensor in tensors:
                hand_over(tensor, stream)

    reduction = Reduction(work, put)
    if not async_op:
        reduction.wait()
    return reduction


@contextlib.contextmanager
def _on_other_thread(device: torch.device, is_inference: bool) -> Iterator[None]:
    """This may be another thread than the caller's: it has its own modes and its own stream."""
    with torch.inference_mode(is_inference), torch.no_grad(), on_own_stream(device):
        yield


class Reduction:
    """A reduction in flight (a work.Flight). Whoever first sees that it is over puts the result into the tensors."""

    source = None

    def __init__(self, work: Work, put: Callable[[Any], None]) -> None:
        self.name = work.name
        self.duration: float | None = None
        #: None once the result is in its place: a work keeps the memory of what it has reduced.
        self._work: Work | None = work
        self._put: Callable[[Any], None] | None = put
        self._error: BaseException | None = None
        #: The same thread may come again: from a signal handler, or when something is collected.
        self._lock = threading.RLock()
        # Also if nobody ever asks.
        work.on_done(lambda _: self._end(work))

    def wait(self, timeout: Any = None) -> None:
        work = self._work
        if work is not None:
            work.wait(timeout)
            self._end(work)
        if self._error is not None:
            raise self._error

    def done(self) -> bool:
        work = self._work
        if work is None:
            return True
        if not work.done():
            return False
        self._end(work)
        return True

    def error(self) -> BaseException | None:
        return self._error if self.done() else None

    def on_done(self, callback: Callable[[Any], None]) -> None:
        work = self._work
        if work is None:
            callback(self)
            return

        def over(_: Work) -> None:
            self._end(work)
            callback(self)

        work.on_done(over)

    _on_over = on_done
    _on_queued = on_done
    gpu = None

    def _has_failed(self) -> bool:
        return self.error() is not None

    def withdraw(self) -> bool:
        """It goes on."""
        return False

    def _end(self, work: Work) -> None:
        """Puts the result into the tensors of a work that is over, once."""
        with self._lock:
            put, self._put = self._put, None
            if put is None:
                return
            try:
                put(work.result())
            except BaseException as error:
                self._error = error
            self.duration = work.duration
            self._work = None


def parts(tensor: Tensor, end: float = math.inf) -> Parts:
    """A sparse tensor as a native operation takes it. Nothing is copied of a COO tensor of one sparse dimension that is
    coalesced and on the CPU.

    Rows of a GPU stay there. Their keys go through memory of the host, which merges them: how many come is data, which a stream
    cannot know. `end` is when that must be over at the latest.
    """
    _check(tensor)
    device, is_inference = tensor.device, tensor.is_inference()
    tensor = tensor.detach()
    layout, index_dtype = tensor.layout, torch.int64
    if layout is torch.sparse_coo:
        shape, indices, rows = tensor.shape[: tensor.sparse_dim()], tensor._indices(), tensor._values()
        # Without a sparse dimension there is one key.
        keys = flatten(indices, shape) if shape else indices.new_zeros(len(rows))
        is_sorted = tensor.is_coalesced()
    else:
        by_row, shape, rows = layout is torch.sparse_csr, tensor.shape[:2], tensor.values()
        starts = tensor.crow_indices() if by_row else tensor.ccol_indices()
        minor, index_dtype = tensor.col_indices() if by_row else tensor.row_indices(), starts.dtype
        lines, minor = torch.repeat_interleave(starts.long().diff()), minor.long()
        keys = flatten([lines, minor] if by_row else [minor, lines], shape)
        # torch does not check that columns ascend.
        is_sorted = by_row and bool((keys[1:] > keys[:-1]).all())
    rows = rows.resolve_conj().resolve_neg().contiguous()
    if not is_sorted:
        keys, rows = _coalesced(keys, rows, math.prod(shape))
    dtype, dims, size, keys = rows.dtype, rows.shape[1:], tensor.shape, keys.contiguous()

    def made(keys: Tensor, rows: Tensor) -> tuple[Tensor, Callable[[], None] | None]:
        if layout is torch.sparse_coo:
            return _coo(keys, rows, shape, size), None
        result, finish = _compressed(keys, rows, size, layout is torch.sparse_csr, index_dtype)
        if finish is None:
            return result, None

        def finish_later() -> None:
            with _on_other_thread(device, is_inference):
                finish()

        return result, finish_later

    def make(keys_memory: Memory, rows_memory: Memory) -> tuple[Tensor, Callable[[], None] | None]:
        with _on_other_thread(device, is_inference):
            keys = _tensor(keys_memory, torch.int64, [keys_memory.nbytes // 8])
            return made(keys, _tensor(rows_memory, dtype, [len(keys), *dims]))

    if not tensor.is_cuda:
        return Parts(keys, rows, shape, dims, make)

    stream = torch.cuda.current_stream(device)
    #: The keys and the rows of the result, once it is known how many they are.
    there: list[Tensor] = []

    def memory(count: int) -> Tensor:
        # One allocation for both: torch takes 20 MiB from the GPU for a few.
        split = -(-count * math.prod(dims) * dtype.itemsize // 8) * 8
        with _on_other_thread(device, is_inference):
            both = torch.empty([split + 8 * count], dtype=torch.uint8, device=device)
            rows = both[: count * math.prod(dims) * dtype.itemsize].view(dtype).view([count, *dims])
            # `data`: who changes one of them has not changed the other.
            there[:] = both[split:].view(torch.int64).data, rows.data
        return there[1]

    def make_there(keys_memory: Memory, _: Memory) -> tuple[Tensor, Callable[[], None] | None]:
        keys, rows = there
        with _on_other_thread(device, is_inference):
            result, finish = made(keys.copy_(_tensor(keys_memory, torch.int64, [len(keys)])), rows)
        hand_over(result, stream)
        return result, finish

    return Parts(_on_host(keys, end), rows, shape, dims, make_there, memory)


def _on_host(keys: Tensor, end: float) -> Tensor:
    """A copy in pinned memory of the host, when all that this stream has to do is done."""
    if not len(keys):
        return keys.cpu()
    copy = torch.empty(keys.shape, dtype=keys.dtype, device="cpu", pin_memory=True).copy_(keys, non_blocking=True)
    wait(torch.cuda.current_stream(keys.device), end, "all_reduce of a sparse tensor")
    return copy


def _check(tensor: Tensor) -> None:
    """Refuses what cannot be done, before anything is changed."""
    if tensor.layout not in (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc):
        raise _unsupported(
            f"all_reduce of a tensor of layout {tensor.layout}: only strided tensors and sparse ones in COO, CSR and CSC are "
            "supported; convert it with to_dense() or to_sparse()"
        )
    if not tensor.is_cpu and not tensor.is_cuda:
        raise _unsupported(f"all_reduce of a sparse tensor on {tensor.device}; move it to the CPU")
    if tensor.is_cuda and _is_captured(tensor.device):
        raise _unsupported(
            "all_reduce of a sparse tensor while torch.cuda.graph captures the stream: how many elements the result has is known "
            "only when the call is over; call it before or behind the graph"
        )
    if tensor.layout is not torch.sparse_coo and tensor.values().dim() - tensor.dense_dim() != 1:
        raise _unsupported(
            f"all_reduce of a tensor of layout {tensor.layout} with batch dimensions; convert it with to_sparse_coo()"
        )


def _is_captured(device: torch.device) -> bool:
    with torch.cuda.device(device):
        return bool(torch.cuda.is_current_stream_capturing())


def _together(tensors: list[Tensor], op: Any, end: float) -> Parts:
    """The sum of several tensors."""
    first, *others = (parts(tensor, end) for tensor in tensors)
    if not others:
        return first
    like = tensors[0]
    if any((tensor.layout, tensor.shape, tensor.dtype) != (like.layout, like.shape, like.dtype) for tensor in tensors) or any(
        other.shape != first.shape for other in others
    ):
        raise errors.raised["MisuseError"]("all_reduce of several sparse tensors of different shapes or types")
    if op not in ("sum", "avg"):
        raise _unsupported(f"all_reduce of several sparse tensors of one rank with {op}: only sum and avg are supported")
    keys, rows = (torch.cat(lists) for lists in zip(*((one.keys, one.rows) for one in (first, *others)), strict=True))
    keys, rows = _coalesced(keys.to(rows.device), rows, math.prod(first.shape))
    return first._replace(keys=_on_host(keys, end) if keys.is_cuda else keys, rows=rows)


def _coalesced(keys: Tensor, rows: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Sorted, and with the sum of those whose keys are the same."""
    shape = torch.Size([size])
    try:
        whole = _coo(keys, rows, shape, shape + rows.shape[1:], is_coalesced=False).coalesce()
        return whole._indices()[0], whole._values()
    except NotImplementedError:
        # torch has no sum of such elements; but they can be moved. If an index is there twice, the operation refuses it, so
        # that all ranks hear of it.
        keys, order = keys.sort(stable=True)
        return keys, _bytes(rows)[order].view(rows.dtype).view(rows.shape)


def _coo(keys: Tensor, rows: Tensor, shape: Sequence[int], size: torch.Size, is_coalesced: bool = True) -> Tensor:
    if len(shape) == 1:
        whole = keys.view(1, -1)
    else:
        whole = torch.stack(unflatten(keys, shape)) if shape else keys.new_empty(0, len(keys))
    # Not on torch's default device.
    return torch.sparse_coo_tensor(
        whole, rows, size, device=rows.device, check_invariants=False, is_coalesced=is_coalesced
    )


def _compressed(
    keys: Tensor, rows: Tensor, size: torch.Size, by_row: bool, dtype: torch.dtype
) -> tuple[Tensor, Callable[[], None] | None]:
    """The tensor, and what finishes it when the rows are there."""
    lines, minor = unflatten(keys, size[:2])
    finish = None
    if not by_row:
        minor, order = minor.sort(stable=True)
        lines, minor, sorted_rows = minor, lines[order], torch.empty_like(rows)
        finish = functools.partial(torch.index_select, _bytes(rows), 0, order, out=_bytes(sorted_rows))
        rows = sorted_rows
    starts = keys.new_zeros(size[0 if by_row else 1] + 1)
    torch.cumsum(torch.bincount(lines, minlength=len(starts) - 1), 0, out=starts[1:])
    made = torch.sparse_csr_tensor if by_row else torch.sparse_csc_tensor
    return made(starts.to(dtype), minor.to(dtype), rows, size, device=rows.device, check_invariants=False), finish


def _bytes(rows: Tensor) -> Tensor:
    """The bytes of each row: torch cannot do everything with elements of every type."""
    return rows.view(len(rows), math.prod(rows.shape[1:])).view(torch.uint8)


def _alike(tensor: Tensor) -> Tensor:
    """A COO tensor with the same indices, and memory for values."""
    indices, values = tensor._indices().clone(), torch.empty_like(tensor._values())
    return torch.sparse_coo_tensor(
        indices, values, tensor.shape, device=values.device, check_invariants=False, is_coalesced=True
    )


def _on_its_own(parts: Parts, tensor: Tensor) -> Parts:
    """The storage of a tensor's rows cannot grow while an operation uses it."""
    if tensor.is_cuda or tensor.layout is torch.sparse_coo or parts.rows.data_ptr() != tensor.detach().values().data_ptr():
        return parts
    return parts._replace(rows=parts.rows.clone())


def _make_room(tensor: Tensor, result: Tensor) -> None:
    """Takes the memory that a tensor needs to become the result. It stays as it is."""
    if tensor.layout is torch.sparse_coo:
        return
    for part, like in zip(_members(tensor.detach()), _members(result), strict=True):
        storage, need = part.untyped_storage(), (part.storage_offset() + like.numel()) * part.itemsize
        if part.shape != like.shape and storage.nbytes() < need:
            storage.resize_(need)


def _members(tensor: Tensor) -> list[Tensor]:
    """What a CSR or CSC tensor is made of."""
    if tensor.layout is torch.sparse_csr:
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]


def _put(tensor: Tensor, result: Tensor) -> None:
    """Has a tensor be the result, in place. All memory is there."""
    if tensor.layout is torch.sparse_coo:
        tensor.data = result  # copies nothing
        if not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)
    else:
        tensor.resize_as_sparse_(result).copy_(result)


def _tensor(memory: Memory, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """A tensor in this memory, which it keeps."""
    if not memory.nbytes:
        return torch.empty(shape, dtype=dtype, device="cpu")
    # Not every type may stand in frombuffer, but bytes may become every type.
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)


def _unsupported(text: str) -> errors.TensorwireError:
    return errors.raised["UnsupportedError"](text)
