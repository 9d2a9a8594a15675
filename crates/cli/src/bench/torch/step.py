"""A step of DDP for `tensorwire bench ddp`: forward and backward of a plain model, with less and with all of DDP."""

import functools

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

BATCH = 4


def plain(size):
    """Linear layers of about this many bytes, the same on all ranks, and their width."""
    torch.manual_seed(0)
    width = 1024 if size >= 16 << 20 else 128
    layer = 4 * width * (width + 1)
    layers = [torch.nn.Linear(width, width) for _ in range(max(2, round(size / layer)))]
    return torch.nn.Sequential(*(module for one in layers for module in (one, torch.nn.ReLU()))), width


def nothing(_state, bucket):
    """A hook that communicates nothing: what is left is what DDP does itself."""
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


class Model:
    """A model in DDP, with its input."""

    def __init__(self, size, bucket_view, state=None, hook=None):
        module, width = plain(size)
        self.ddp = DistributedDataParallel(module, gradient_as_bucket_view=bucket_view)
        if hook:
            self.ddp.register_comm_hook(state, hook)
        torch.manual_seed(1 + dist.get_rank())
        self.input = torch.rand(BATCH, width)
        # Gradients stay where they are, as with an optimizer that sets them to zero. The first steps put buckets into
        # the order in which gradients come: they belong to no measurement.
        for _ in range(3):
            self.backward()

    def backward(self):
        self.ddp(self.input).square().mean().backward()

    def backward_alone(self):
        with self.ddp.no_sync():
            self.backward()

    def zero(self):
        for parameter in self.ddp.parameters():
            parameter.grad.zero_()

    def gradients(self):
        return [parameter.grad for parameter in self.ddp.parameters()]


@functools.cache
def empty(size, bucket_view):
    """The model that communicates nothing, one for all kinds of memory."""
    return Model(size, bucket_view, hook=nothing)


class Step:
    """Iterations take turns: without DDP's work, with it but nothing communicated, and with all."""

    def __init__(self, size, shared, bucket_view):
        state = hook = None
        if shared:
            from tensorwire.torch import SharedGradients, shared_memory_hook

            state, hook = SharedGradients(), shared_memory_hook
        model = Model(size, bucket_view, state, hook)
        without = empty(size, bucket_view)
        self.kinds = [(model, model.backward_alone), (without, without.backward), (model, model.backward)]
        self.alone = None

    def prepare(self, iteration):
        self.model, self.call = self.kinds[iteration % 3]
        self.model.zero()
        dist.barrier()

    def wrong(self, iteration):
        """How many gradients of the first three iterations are wrong: those of the first are what the others have,
        as they are where nothing is communicated, and else their mean."""
        gradients = self.model.gradients()
        if iteration == 0:
            self.alone = [gradient.clone() for gradient in gradients]
        elif iteration == 1:
            return differing(self.alone, gradients)
        elif iteration == 2:
            for gradient in self.alone:
                dist.all_reduce(gradient)
                gradient /= dist.get_world_size()
            wrong = differing(self.alone, gradients)
            self.alone = None
            return wrong
        return 0


def differing(right, gradients):
    pairs = zip(right, gradients, strict=True)
    return sum(int((~torch.isclose(one, other, rtol=1e-4, atol=1e-7)).sum()) for one, other in pairs)
