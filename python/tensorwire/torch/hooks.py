"""Communication hooks for DistributedDataParallel."""

import weakref
from typing import Any

import torch
from torch import Tensor, distributed
from torch.futures import Future

from tensorwire.torch import errors, memory


class SharedGradients:
    """The state of `shared_memory_hook`: a place in shared memory for each bucket of gradients."""

    def __init__(self, process_group: distributed.ProcessGroup | None = None) -> None:
        self.process_group = process_group
        self._places: dict[int, tuple[int, Tensor]] = {}

    def place(self, index: int, bucket: Tensor) -> Tensor:
        """The place for a bucket. It is made once, and again when DDP has arranged its buckets anew."""
        address = bucket.data_ptr()
        known = self._places.get(index)
        if known is not None and known[0] == address:
            place = known[1]
            if place.shape == bucket.shape and place.dtype == bucket.dtype:
                return place
        place = memory.empty(bucket.shape, dtype=bucket.dtype)
        self._places[index] = (address, place)
        return place


def shared_memory_hook(state: Any, bucket: distributed.GradBucket) -> Future[Tensor]:
    """Averages gradients in shared memory, where each byte is copied only once.

    ``model.register_comm_hook(SharedGradients(), shared_memory_hook)``; the state may also be a process group, or None
    for the default one.
    """
    group = state.process_group if isinstance(state, SharedGradients) else state
    group = distributed.group.WORLD if group is None else group
    if not isinstance(state, SharedGradients):
        state = _states.setdefault(group, SharedGradients())
    gradients = bucket.buffer()
    if gradients.layout is not torch.strided:
        raise errors.unsupported("shared_memory_hook with sparse gradients; leave those models to DDP's own all-reduce")
    place = state.place(bucket.index(), gradients)
    place.copy_(gradients)
    work = distributed.all_reduce(place, distributed.ReduceOp.AVG, group=group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


#: The states of those who gave none of their own.
_states: weakref.WeakKeyDictionary[distributed.ProcessGroup, SharedGradients] = weakref.WeakKeyDictionary()
