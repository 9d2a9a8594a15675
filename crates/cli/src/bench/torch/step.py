"""A step of DDP for `tensorwire bench ddp`: forward and backward of a plain model, with less and with all of DDP."""

import functools

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future
from torch.nn.parallel import DistributedDataParallel

BATCH = 4


def plain(size):
    """Linear layers of about this many bytes, the same on all ranks, and their width."""
    torch.manual_seed(0)
    width = 1024 if size >= 16 << 20 else 128
    layer = 4 * width * (width + 1)
    layers = [torch.nn.Linear(width, width) for _ in range(max(2, round(size / layer)))]
    return torch.nn.Sequential(*(module for one in layers for module in (one, torch.nn.ReLU()))), width


def done(value):
    future = torch.futures.Future()
    future.set_result(value)
    return future


def nothing(_state, bucket):
    """A hook that communicates nothing: what is left is what DDP does itself where there is a hook."""
    return done(bucket.buffer())


class Nothing(dist.ProcessGroup):
    """A group that communicates nothing: what is left is what DDP does itself with any backend."""

    def __init__(self):
        super().__init__(dist.get_rank(), dist.get_world_size())

    def getBackendName(self):
        return "nothing"

    def allreduce(self, tensors, _options=None):
        return _create_work_from_future(done(tensors))

    broadcast = allreduce

    def allgather(self, outputs, inputs, _options=None):
        for tensors, one in zip(outputs, inputs, strict=True):
            for tensor in tensors:
                tensor.copy_(one)
        return _create_work_from_future(done(outputs))


class Model:
    """A model in DDP, with its input."""

    def __init__(self, size, bucket_view, group=None, state=None, hook=None):
        module, width = plain(size)
        self.ddp = DistributedDataParallel(module, process_group=group, gradient_as_bucket_view=bucket_view)
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
def empty(size, bucket_view, hooked):
    """The model that communicates nothing. Where there is no hook DDP divides gradients by the number of ranks itself,
    with views in a pass of its own."""
    return Model(size, bucket_view, hook=nothing) if hooked else Model(size, bucket_view, group=Nothing())


class Step:
    """Iterations take turns: without DDP's work, with it but nothing communicated, and with all."""

    def __init__(self, size, shared, bucket_view):
        state = hook = None
        if shared:
            from tensorwire.torch import SharedGradients, shared_memory_hook

            state, hook = SharedGradients(), shared_memory_hook
        model = Model(size, bucket_view, state=state, hook=hook)
        without = empty(size, bucket_view, hooked=shared)
        self.kinds = [(model, model.backward_alone), (without, without.backward), (model, model.backward)]
        self.alone = None
        self.divided = 1 if shared else dist.get_world_size()

    # Its tensors are on the host.
    device = "cpu"

    def prepare(self, iteration, write=True):
        self.model, self.call = self.kinds[iteration % 3]
        self.model.zero()
        dist.barrier()

    def wrong(self, iteration):
        """How many gradients of the first three iterations are wrong: those of the first are what the others have, only
        divided by DDP where nothing is communicated, and else their mean."""
        gradients = self.model.gradients()
        if iteration == 0:
            self.alone = [gradient.clone() for gradient in gradients]
        elif iteration == 1:
            return differing([gradient / self.divided for gradient in self.alone], gradients)
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
