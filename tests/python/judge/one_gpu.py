"""Lets the tests that ask for GPUs run on one GPU, with tensors there: all ranks share it.

Each rank is told that there are eight GPUs. Every number of a GPU means the first.
"""

import functools
import os
import sys

#: How many GPUs a rank is told of.
COUNT = 8
#: What it can do, as far as a process is told that has not opened it: bfloat16 and what triton needs.
CAPABILITY = (8, 0)
#: What one GPU cannot show.
REALLY = {
    "test_ddp_device": "looks for the GPU's number in device_ids",
    "test_ddp_logging_data_gpu": "looks for the GPU's number in DDP's log",
}


def count_gpus() -> None:
    """Before anything else of torch is imported. It asks no driver: a process that has done so cannot fork ranks."""
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    import torch
    import torch.utils._triton as triton

    # Torch opens a GPU to know whether triton compiles for it and what it can do. Ranks have opened theirs by then.
    triton.has_triton = triton.has_triton_package
    capability = torch.cuda.get_device_capability
    torch.cuda.get_device_capability = lambda *args: capability(*args) if torch.cuda.is_initialized() else CAPABILITY
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = torch.accelerator.device_count = lambda: COUNT


def begin() -> None:
    """From here on this process and its ranks take the first GPU for each."""
    import gpus
    import torch

    gpus.let_through()
    for module in list(sys.modules.values()):
        # Not every entry is a module.
        names = getattr(module, "__dict__", {})
        if (index := names.get("_get_device_index")) and names.get("__name__", "").startswith("torch"):
            module._get_device_index = the_first(index)
    torch.accelerator.set_device_index = torch.cuda.set_device
    torch.serialization._validate_device = on_first(torch.serialization._validate_device)
    gpus.Carried(first).__enter__()


def the_first(index):
    @functools.wraps(index)
    def found(*args, **kwargs):
        return min(index(*args, **kwargs), 0)

    return found


def on_first(validate):
    return lambda *args, **kwargs: first(validate(*args, **kwargs))


def first(value):
    """The first GPU for any that is named, else the value."""
    import gpus
    import torch

    if not gpus.names_device(value):
        return value
    device = torch.device("cuda", value) if isinstance(value, int) else torch.device(value)
    return torch.device("cuda", 0) if device.type == "cuda" else device


def bytes_used() -> int:
    """The most that tensors of this process have taken of the GPU."""
    import torch

    return torch.cuda.max_memory_allocated() if torch.cuda.is_initialized() else 0
