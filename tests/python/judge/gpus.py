"""Tests that ask for a GPU for each rank: which they are, and what carries their words for devices to where they run.

There are two places: the CPU (pretend.py), and one GPU that all ranks share (one_gpu.py).
"""

import functools

from torch.overrides import TorchFunctionMode
from torch.testing._internal import common_distributed

import torch

#: Whether they are let through, in this process.
active = False
#: The names of the tests that ask for GPUs.
tests: set[str] = set()


def watch_decorators() -> None:
    """Before the suite is imported: finds out which tests ask for GPUs, and lets them through while active."""
    no_gpu, few_gpus = common_distributed.skip_if_no_gpu, common_distributed.skip_if_lt_x_gpu
    common_distributed.skip_if_no_gpu = either(no_gpu)
    common_distributed.skip_if_lt_x_gpu = lambda *args, **kwargs: either(few_gpus(*args, **kwargs))


def either(decorator):
    """The decorator, which steps aside while active."""

    def decorate(test):
        tests.add(test.__name__)
        skipping = decorator(test)

        @functools.wraps(test)
        def run(*args, **kwargs):
            return (test if active else skipping)(*args, **kwargs)

        return run

    return decorate


def let_through() -> None:
    global active
    active = True


class Carried(TorchFunctionMode):
    """Every device that is named in a call of torch is another one: place() tells which."""

    def __init__(self, place):
        super().__init__()
        self.place = place

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in (torch.Tensor.to, torch.Tensor.cuda):
            args = (args[0], *map(self.place, args[1:]))
        return func(*args, **carried(self.place, kwargs or {}))


def carried(place, kwargs: dict) -> dict:
    return kwargs | {"device": place(kwargs["device"])} if "device" in kwargs else kwargs


def names_device(value) -> bool:
    return isinstance(value, int | str | torch.device) and not isinstance(value, bool)
