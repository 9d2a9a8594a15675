"""Lets the tests that ask for GPUs run with CPU tensors.

Most of what PyTorch tests of DDP asks for GPUs and needs none: it says .cuda(rank) and device_ids=[rank]. Here those
words mean the CPU. What a test then says about a backend is true for CPU tensors. A test that does need a GPU, and
says so by its error, counts as skipped, with either backend.
"""

import contextlib
import functools
import re

import gpus
import torch
from torch.nn.parallel import DistributedDataParallel

#: What says that a test does need one, in its error.
NEEDS_GPU = re.compile(
    "SyncBatchNorm layers only work with GPU modules"
    "|CUDA driver version is insufficient"
    "|requires at least one CUDA device"
    "|ProcessGroupNCCL is only supported with GPUs"
)
#: The same, where the error does not say it.
REALLY = {
    "test_ddp_compile_static_graph": "compiles a model for the GPU; on a CPU it did not end in 60 s with Gloo, nor in 150 s with tensorwire",
    "test_ddp_device": "looks for the GPU's number in device_ids",
    "test_ddp_logging_data_gpu": "looks for the GPU's number in DDP's log",
}


def begin(suite) -> None:
    """From here on this process takes the CPU for its GPU."""
    gpus.let_through()
    suite.init_multigpu_helper = lambda world, _backend: {rank: [rank] for rank in range(world)}
    nothing = lambda *_, **__: None  # noqa: E731
    for name in ("set_device", "synchronize", "manual_seed", "manual_seed_all", "empty_cache"):
        setattr(torch.cuda, name, nothing)
    for name in ("set_device_index", "synchronize"):
        setattr(torch.accelerator, name, nothing)
    torch.cuda.current_device = lambda: 0
    torch.cuda.device = torch.cuda.stream = lambda *_: contextlib.nullcontext()
    torch.cuda.Stream = nothing
    module_to = torch.nn.Module.to
    torch.nn.Module.cuda = lambda module, *_: module
    torch.nn.Module.to = lambda module, *args, **kwargs: module_to(module, *map(cpu, args), **gpus.carried(cpu, kwargs))
    init = DistributedDataParallel.__init__

    @functools.wraps(init)
    def without_devices(self, module, device_ids=None, output_device=None, **kwargs):
        init(self, module, **kwargs)

    DistributedDataParallel.__init__ = without_devices
    OnCpu(cpu).__enter__()


class OnCpu(gpus.Carried):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.cuda:
            return args[0].clone()
        return super().__torch_function__(func, types, args, kwargs)


def cpu(value):
    """The CPU for anything that names a device, else the value."""
    return torch.device("cpu") if gpus.names_device(value) else value
