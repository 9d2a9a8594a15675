"""Communication hooks for DistributedDataParallel."""

import logging
import weakref
from typing import Any

import torch
from torch import Tensor, distributed
from torch.futures import Future

from tensorwire import _native
from tensorwire.torch import errors, memory


class SharedGradients:
    """The state of `shared_memory_hook`: a place in shared memory for each bucket of gradients."""

    def __init__(self, process_group: distributed.ProcessGroup | None = None) -> None:
        self.process_group = process_group
        self._places: dict[int, Tensor] = {}
        self._said: set[str] = set()

    def place(self, bucket: distributed.GradBucket) -> Tensor:
        """The gradients of a bucket, in shared memory.

        The bucket itself is moved there once, and again when DDP has arranged its buckets anew. That takes gradients
        that are views of the bucket (``gradient_as_bucket_view=True``); others stay where they are, because to copy
        them in every step costs more than it gains.
        """
        index, gradients = bucket.index(), bucket.buffer()
        if gradients.is_cuda:
            # Other ranks reach memory of a GPU where it is.
            return gradients
        place = self._places.get(index)
        if place is not None and place.data_ptr() == gradients.data_ptr():
            return gradients
        views = _views(bucket, gradients)
        if isinstance(views, str):
            self._say(f"gradients are not averaged in shared memory: {views}")
            return gradients
        if place is None or place.shape != gradients.shape or place.dtype != gradients.dtype:
            place = self._places[index] = memory.empty(gradients.shape, dtype=gradients.dtype)
        place.copy_(gradients)
        start, new = gradients.storage_offset(), place.untyped_storage()
        with torch.no_grad():
            for view in views:
                view.set_(new, view.storage_offset() - start, view.size(), view.stride())
            gradients.set_(new, 0, gradients.size(), gradients.stride())
        return gradients

    def _say(self, text: str) -> None:
        """Says once what is slower than it could be."""
        if _native.is_strict():
            raise errors.unsupported(f"shared_memory_hook: {text} (TENSORWIRE_STRICT=1 makes that an error)")
        if text not in self._said:
            self._said.add(text)
            logging.getLogger("tensorwire").warning("shared_memory_hook: %s", text)


def _views(bucket: distributed.GradBucket, gradients: Tensor) -> list[Tensor] | str:
    """The views of a bucket that DDP keeps; or why not all can be reached."""
    old = gradients.untyped_storage().data_ptr()
    views = []
    for parameter in bucket.parameters():
        view = parameter.grad
        if view is None:
            return "a parameter has no gradient in this step"
        if view.layout is not torch.strided or view.untyped_storage().data_ptr() != old:
            return "they are no views of DDP's buckets; give DistributedDataParallel gradient_as_bucket_view=True"
        views.append(view)
    return views


def shared_memory_hook(state: Any, bucket: distributed.GradBucket) -> Future[Tensor]:
    """Averages gradients in shared memory if they are views of DDP's buckets: each byte is copied only once there.

    ``model.register_comm_hook(SharedGradients(), shared_memory_hook)``; the state may also be a process group, or None
    for the default one. With ``gradient_as_bucket_view=True`` the gradients stay there, and nothing else is copied.
    """
    group = state.process_group if isinstance(state, SharedGradients) else state
    group = distributed.group.WORLD if group is None else group
    if not isinstance(state, SharedGradients):
        state = _states.setdefault(group, SharedGradients())
    if bucket.buffer().layout is not torch.strided:
        raise errors.unsupported("shared_memory_hook with sparse gradients; leave those models to DDP's own all-reduce")
    work = distributed.all_reduce(state.place(bucket), distributed.ReduceOp.AVG, group=group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


#: The states of those who gave none of their own.
_states: weakref.WeakKeyDictionary[distributed.ProcessGroup, SharedGradients] = weakref.WeakKeyDictionary()
