"""Steps of DDP for `tensorwire bench ddp`: forward and backward of a plain model."""

import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

BATCH = 4


class Step:
    """Even iterations leave communication out, odd ones are the same with it: their difference is what DDP adds."""

    def __init__(self, size, shared, bucket_view):
        torch.manual_seed(0)
        width = 1024 if size >= 16 << 20 else 128
        layer = 4 * width * (width + 1)
        layers = [torch.nn.Linear(width, width) for _ in range(max(2, round(size / layer)))]
        model = torch.nn.Sequential(*(module for one in layers for module in (one, torch.nn.ReLU())))
        self.model = DistributedDataParallel(model, gradient_as_bucket_view=bucket_view)
        self.register(shared)
        torch.manual_seed(1 + dist.get_rank())
        self.input = torch.rand(BATCH, width)
        # Gradients stay where they are, as with an optimizer that sets them to zero. The first steps put buckets into
        # the order in which gradients come: they belong to no measurement.
        for _ in range(3):
            self.backward()
        self.alone = None

    def register(self, shared):
        if shared:
            from tensorwire.torch import SharedGradients, shared_memory_hook

            self.model.register_comm_hook(SharedGradients(), shared_memory_hook)

    def backward(self):
        self.model(self.input).square().mean().backward()

    def backward_alone(self):
        with self.model.no_sync():
            self.backward()

    def zero(self):
        for parameter in self.model.parameters():
            parameter.grad.zero_()

    def gradients(self):
        return [parameter.grad for parameter in self.model.parameters()]

    def prepare(self, iteration):
        self.with_communication = iteration % 2 == 1
        self.zero()
        dist.barrier()

    def call(self):
        if self.with_communication:
            self.backward()
        else:
            self.backward_alone()

    def wrong(self, iteration):
        if self.with_communication:
            return self.compare()
        if iteration == 0:
            self.alone = [gradient.clone() for gradient in self.gradients()]
        return 0

    def compare(self):
        """How many gradients are not the mean of those that the ranks had alone, which are compared once."""
        wrong = 0
        for alone, mean in zip(self.alone or (), self.gradients()):
            dist.all_reduce(alone)
            alone /= dist.get_world_size()
            wrong += int((~torch.isclose(alone, mean, rtol=1e-4, atol=1e-7)).sum())
        self.alone = None
        return wrong


class WatchedStep(Step):
    """A step whose hook notes when all-reduces of buckets are under way: from the call until the future is complete.

    Each step has three iterations, which give its time, how long at least one all-reduce was under way, and its tail:
    the time from the call for the last bucket to the end of the step, when DDP has waited for all buckets and has put
    the gradients into their places.
    """

    def __init__(self, size, shared, bucket_view):
        self.spans = []
        super().__init__(size, shared, bucket_view)
        self.zero()
        self.backward_alone()
        self.alone = [gradient.clone() for gradient in self.gradients()]

    def register(self, shared):
        # DDP keeps the hook out of sight of Python's garbage collection: it must not hold the model.
        spans = self.spans

        def note(begin, future):
            # Runs on the thread that completes the future: with Gloo that which did the work. DDP waits for what comes
            # of this call, so that the time is noted before its wait is over.
            spans.append((begin, time.perf_counter_ns()))
            return future.value()

        def average(state, bucket):
            gradients = bucket.buffer().div_(dist.get_world_size())
            begin = time.perf_counter_ns()
            work = dist.all_reduce(gradients, async_op=True)
            return work.get_future().then(lambda future: note(begin, future)[0])

        def move_and_average(state, bucket):
            begin = time.perf_counter_ns()
            return shared_memory_hook(state, bucket).then(lambda future: note(begin, future))

        if shared:
            from tensorwire.torch import SharedGradients, shared_memory_hook

            self.model.register_comm_hook(SharedGradients(), move_and_average)
        else:
            self.model.register_comm_hook(None, average)

    def prepare(self, iteration):
        self.figure = iteration % 3
        if self.figure == 0:
            self.spans.clear()
            self.zero()
            dist.barrier()

    def call(self):
        if self.figure == 0:
            self.backward()
            self.end = time.perf_counter_ns()
            return None
        if self.figure == 1:
            return union(self.spans)
        return self.end - max(begin for begin, _ in self.spans)

    def wrong(self, iteration):
        return self.compare() if self.figure == 0 else 0


def union(spans):
    """For how long there was at least one of these spans of time."""
    total = until = 0
    for begin, end in sorted(spans):
        total += max(end - max(begin, until), 0)
        until = max(until, end)
    return total
