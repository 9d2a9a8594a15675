"""What the backend does: one function for each operation of torch.distributed.

How torch's versions call them is in table.py; here they get lists of tensors and torch's options.
"""

import collections
import datetime
import itertools
import os
from typing import Any

import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch._C._distributed_c10d import Store

from tensorwire._native import Calls, Group
from tensorwire.torch import errors, monitored, profile, sparse
from tensorwire.torch.work import Flight, Together, Work

#: The reduction that torch's options name, as the methods of a group take it.
_reduction = Calls.reduction


class Message:
    """The options of send and recv, which have none in torch."""

    asyncOp = True
    timeout = datetime.timedelta(milliseconds=-1)


class Operations:
    """The operations of one group of torch.distributed."""

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        timeout: datetime.timedelta,
        name: str,
        within: tuple["Operations", list[int]] | None = None,
    ) -> None:
        parent = None if within is None else (within[0].group, within[1])
        self.group = Group.from_store(store, rank, size, name=name, timeout=timeout, within=parent)
        self.store = store
        self.rank = rank
        self.size = size
        self.timeout = timeout
        self.name = name
        #: What torch's flight recorder calls the group; set by torch after it was made.
        self.torch_name = name
        #: When each of the last operations was called, and its flight: for torch's flight recorder, if it has one.
        self.recent: collections.deque[tuple[int, Flight]] | None = _recent()
        self.calls = Calls(self.group, work=Work, profiled=profile.enabled, span=profile.span, recent=self.recent)
        #: Calls a method of the group as torch's options say. An attribute: it is looked up in every call.
        self._run = self.calls.run
        self._barriers = itertools.count()
        _known.append(self)

    # Collectives

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Work | None:
        if len(tensors) == 1:
            return self._run("broadcast", self.group.broadcast, (tensors[0], opts.rootRank), tensors, tensors, opts)
        return self._run("broadcast", self.group.broadcast_coalesced, (tensors, opts.rootRank), tensors, tensors, opts)

    def allreduce(self, tensors: list[Tensor], opts: Any) -> Work | None:
        work = self.calls.all_reduce(tensors, opts)
        return self.allreduce_sparse(tensors, opts) if work is NotImplemented else work

    def allreduce_sparse(self, tensors: list[Tensor], opts: Any) -> Work | None:
        """The ranks' tensors may have different numbers of elements."""
        if tensors and tensors[0].layout is torch.strided:
            return self.allreduce(tensors[:1], opts)
        call = (self.group, tensors, _reduction(opts))
        return self._run("all_reduce", sparse.all_reduce, call, tensors, tensors, opts)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any) -> Work | None:
        call = (tensors, _reduction(opts))
        return self._run("all_reduce_coalesced", self.group.all_reduce_coalesced, call, tensors, tensors, opts)

    def reduce(self, tensors: list[Tensor], opts: Any) -> Work | None:
        tensor = _one(tensors, "reduce")
        call = (tensor, opts.rootRank, _reduction(opts))
        return self._run("reduce", self.group.reduce, call, tensors, tensors, opts)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> Work | None:
        into, source = _one(outputs, "all_gather"), _one(inputs, "all_gather")
        return self._run("all_gather", self.group.all_gather, (into, _plain(source)), inputs, into, opts)

    def allgather_coalesced(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> Work | None:
        """outputs[r][i] becomes inputs[i] of rank r."""
        if any(len(row) != len(inputs) for row in outputs):
            lengths = [len(row) for row in outputs]
            raise errors.misuse(
                f"all_gather_coalesced of {len(inputs)} tensors into lists of {lengths}: each list takes all of them"
            )
        calls = [([row[i] for row in outputs], _plain(tensor)) for i, tensor in enumerate(inputs)]
        flat = [tensor for row in outputs for tensor in row]
        return self._run_all("all_gather_coalesced", self.group.all_gather, calls, inputs, flat, opts)

    def all_gather_single(self, output: Tensor, source: Tensor, opts: Any) -> Work | None:
        call = (output, _plain(source))
        return self._run("_all_gather_base", self.group.all_gather_into, call, [source], [output], opts)

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any) -> Work | None:
        call = (outputs, [_plain(tensor) for tensor in inputs])
        title = "all_gather_into_tensor_coalesced"
        return self._run(title, self.group.all_gather_coalesced, call, inputs, outputs, opts)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> Work | None:
        source = _one(inputs, "gather")
        into = outputs[0] if outputs else []
        return self._run("gather", self.group.gather, (into, _plain(source), opts.rootRank), inputs, into, opts)

    def gather_single(self, output: Tensor | None, source: Tensor, opts: Any) -> Work | None:
        root = opts.rootRank == self.rank
        into = self._parts(output, "gather_single") if root and output is not None else []
        call = (into, _plain(source), opts.rootRank)
        return self._run("gather", self.group.gather, call, [source], [output] if root else [], opts)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> Work | None:
        into = _one(outputs, "scatter")
        parts = [_plain(tensor) for tensor in inputs[0]] if inputs else []
        return self._run("scatter", self.group.scatter, (into, parts, opts.rootRank), parts, outputs, opts)

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> Work | None:
        into, parts = _one(outputs, "reduce_scatter"), _one(inputs, "reduce_scatter")
        call = (into, [_plain(tensor) for tensor in parts], _reduction(opts))
        return self._run("reduce_scatter", self.group.reduce_scatter, call, parts, outputs, opts)

    def reduce_scatter_single(self, output: Tensor, source: Tensor, opts: Any) -> Work | None:
        call = (output, _plain(source), _reduction(opts))
        return self._run("_reduce_scatter_base", self.group.reduce_scatter_from, call, [source], [output], opts)

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any) -> Work | None:
        call = (outputs, [_plain(tensor) for tensor in inputs], _reduction(opts))
        title = "reduce_scatter_tensor_coalesced"
        return self._run(title, self.group.reduce_scatter_coalesced, call, inputs, outputs, opts)

    def all_to_all_single(
        self, output: Tensor, source: Tensor, output_splits: list[int], input_splits: list[int], opts: Any
    ) -> Work | None:
        """Splits are lengths in the first dimension; none means equal parts."""
        plain = _plain(source)
        into = self._parts(output, "all_to_all_single", output_splits)
        parts = self._parts(plain, "all_to_all_single", input_splits)
        return self._run("all_to_all", self.group.all_to_all, (into, parts), [source], [output], opts)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any) -> Work | None:
        call = (outputs, [_plain(tensor) for tensor in inputs])
        return self._run("all_to_all", self.group.all_to_all, call, inputs, outputs, opts)

    def barrier(self, opts: Any) -> Work | None:
        # Of these GPUs, what the current streams have to do now is done before.
        numbers = getattr(opts, "device_ids", None)
        if numbers:
            return self._run("barrier", self.group._barrier_behind, (list(numbers),), [], [], opts)
        return self._run("barrier", self.group.barrier, (), [], [], opts)

    # Messages

    def send(self, tensors: list[Tensor], to: int, tag: int) -> Work | None:
        tensor = _one(tensors, "send")
        return self._run("send", self.group.send, (_plain(tensor), to, tag), tensors, tensors, Message)

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> Work | None:
        tensor = _one(tensors, "recv")
        return self._run("recv", self.group.recv, (tensor, source, tag), tensors, tensors, Message, source)

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> Work | None:
        tensor = _one(tensors, "recv")
        return self._run("recvAnySource", self.group.recv_any, (tensor, tag), tensors, tensors, Message)

    # Coalescing: what is called in between is started at once, and the end gives one work for all of it

    def end_coalescing(self) -> Work:
        flights = self.calls.take_coalesced()
        if flights is None:
            raise errors.misuse("end of coalescing without a start on this thread")
        work = Work(Together("coalesced", flights), [], self.calls.issued)
        work.timed = self.calls.timed
        return work

    # The rest

    def monitored_barrier(self, timeout: datetime.timedelta | None, wait_all_ranks: bool) -> None:
        """A barrier through the store that says who has not come."""
        timeout = self.group.timeout if timeout is None or timeout < datetime.timedelta() else timeout
        number = next(self._barriers)
        monitored.barrier(self.store, self.error, number, self.rank, self.size, timeout, wait_all_ranks)

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        self.group.set_timeout(timeout)
        self.timeout = timeout

    def abort(self) -> None:
        """Ends everything, on all ranks."""
        self.group.abort(f"rank {self.rank} called abort on its process group")

    def shutdown(self) -> None:
        """This rank leaves. Raises what nothing has raised yet: a mismatch of its last collectives, or how a queued one failed."""
        self.group.close()

    def error(self) -> BaseException | None:
        """How the group has failed, if it has."""
        try:
            self.group.check()
        except errors.errors.MisuseError:
            return None  # Closed: that is no failure.
        except errors.errors.TensorwireError as error:
            return error
        return None

    def _run_all(
        self, title: str, method: Any, calls: list[tuple], inputs: list, outputs: list, opts: Any
    ) -> Work | None:
        """Several calls of a native method as one operation."""

        def all_of_them(timeout: Any = None, async_op: bool = False) -> Flight:
            return Together(title, [method(*call, timeout=timeout, async_op=async_op) for call in calls])

        return self._run(title, all_of_them, (), inputs, outputs, opts)

    def _parts(self, tensor: Tensor, what: str, splits: list[int] | None = None) -> list[Tensor]:
        """A tensor cut along its first dimension, one part for each rank."""
        if splits:
            if len(splits) != self.size:
                raise errors.misuse(
                    f"Number of tensor splits not equal to group size: {what} with {len(splits)} split sizes, and each of "
                    f"{self.size} ranks needs one"
                )
            have = tensor.shape[0] if tensor.dim() else 1
            if min(splits) < 0:
                raise errors.misuse(f"Split sizes must be non-negative: {what} with {list(splits)}")
            if sum(splits) != have:
                raise errors.misuse(
                    f"Split sizes doesn't match total dim 0 size: {what} with {list(splits)}, and the tensor's first dimension "
                    f"is {have}"
                )
            return list(tensor.split(list(splits)))
        if tensor.dim() and tensor.shape[0] % self.size == 0:
            return list(tensor.unflatten(0, (self.size, tensor.shape[0] // self.size)).unbind())
        if tensor.numel() % self.size == 0 and tensor.is_contiguous():
            return list(tensor.view(self.size, tensor.numel() // self.size).unbind())
        raise errors.misuse(
            f"Tensor's dim 0 does not divide equally across group size: {what} of a tensor of shape {list(tensor.shape)}, "
            f"which cannot be cut into equal parts for {self.size} ranks"
        )


#: Every group of this process that may still be asked for its flights.
_known: collections.deque[Operations] = collections.deque(maxlen=32)


def known() -> list[Operations]:
    """The groups of this process, oldest first."""
    return list(_known)


def _one(tensors: list, what: str) -> Any:
    if len(tensors) != 1:
        raise errors.misuse(f"{what} takes one tensor of each rank, not {len(tensors)}")
    return tensors[0]


def _plain(tensor: Tensor) -> Tensor:
    """An input whose memory holds its values: conjugated and negated views are copied."""
    if tensor.layout is torch.strided and (tensor.is_conj() or tensor.is_neg()):
        return tensor.resolve_conj().resolve_neg()
    return tensor


def _recent() -> collections.deque | None:
    """Room for as many as torch's own recorder keeps; None where it keeps none, and before 2.14, where it has none of ours."""
    if "backend" not in (c10d._dump_fr_trace.__doc__ or ""):
        return None
    for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"):
        value = os.environ.get(name)
        if value:
            size = max(int(value), 0) if value.isdigit() else 0
            return collections.deque(maxlen=size) if size else None
    return collections.deque(maxlen=2000)
