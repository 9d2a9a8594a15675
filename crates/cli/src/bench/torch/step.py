"""A step of DDP for `tensorwire bench ddp`: forward and backward of a plain model, alone and with its communication."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

BATCH = 4


class Step:
    """Even iterations leave communication out, odd ones are the same with it: their difference is what it costs."""

    def __init__(self, size, shared, bucket_view):
        torch.manual_seed(0)
        width = 1024 if size >= 16 << 20 else 128
        layer = 4 * width * (width + 1)
        layers = [torch.nn.Linear(width, width) for _ in range(max(2, round(size / layer)))]
        model = torch.nn.Sequential(*(module for one in layers for module in (one, torch.nn.ReLU())))
        self.model = DistributedDataParallel(model, gradient_as_bucket_view=bucket_view)
        if shared:
            from tensorwire.torch import SharedGradients, shared_memory_hook

            self.model.register_comm_hook(SharedGradients(), shared_memory_hook)
        torch.manual_seed(1 + dist.get_rank())
        self.input = torch.rand(BATCH, width)
        # Gradients stay where they are, as with an optimizer that sets them to zero. The first steps put buckets into
        # the order in which gradients come: they belong to no measurement.
        for _ in range(3):
            self.backward()
        self.alone = None

    def backward(self):
        self.model(self.input).square().mean().backward()

    def prepare(self, iteration):
        self.with_communication = iteration % 2 == 1
        for parameter in self.model.parameters():
            parameter.grad.zero_()
        dist.barrier()

    def call(self):
        if self.with_communication:
            self.backward()
        else:
            with self.model.no_sync():
                self.backward()

    def wrong(self, iteration):
        """How many gradients are not the mean of those that the ranks had alone."""
        gradients = [parameter.grad for parameter in self.model.parameters()]
        if not self.with_communication:
            if iteration == 0:
                self.alone = [gradient.clone() for gradient in gradients]
            return 0
        if self.alone is None:
            return 0
        wrong = 0
        for alone, mean in zip(self.alone, gradients):
            dist.all_reduce(alone)
            alone /= dist.get_world_size()
            wrong += int((~torch.isclose(alone, mean, rtol=1e-4, atol=1e-7)).sum())
        self.alone = None
        return wrong
