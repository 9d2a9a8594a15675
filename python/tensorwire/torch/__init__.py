"""tensorwire as a backend of torch.distributed, and shared memory for torch's tensors.

Nothing of this has to be imported to use the backend: torch finds it by its name, ``init_process_group("tensorwire")``.
"""

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tensorwire.torch.gloo import as_gloo
    from tensorwire.torch.hooks import SharedGradients, shared_memory_hook
    from tensorwire.torch.memory import empty, empty_like, full, zeros
    from tensorwire.torch.recorder import dump_flight_record, flight_record
    from tensorwire.torch.reductions import install_reductions, uninstall_reductions

__all__ = [
    "SharedGradients",
    "as_gloo",
    "dump_flight_record",
    "empty",
    "empty_like",
    "flight_record",
    "full",
    "install_reductions",
    "register",
    "shared_memory_hook",
    "uninstall_reductions",
    "zeros",
]

#: Which module has which name. They import torch, which is imported only when one of them is used: this module is also
#: loaded from inside torch's own import.
_MODULES = {
    "SharedGradients": "hooks",
    "as_gloo": "gloo",
    "dump_flight_record": "recorder",
    "empty": "memory",
    "empty_like": "memory",
    "flight_record": "recorder",
    "full": "memory",
    "install_reductions": "reductions",
    "shared_memory_hook": "hooks",
    "uninstall_reductions": "reductions",
    "zeros": "memory",
}


def register() -> None:
    """Tells torch.distributed about the backend. torch calls it through entry points; calling it again does nothing."""
    from torch import distributed

    if not distributed.is_available() or hasattr(distributed.Backend, "TENSORWIRE"):
        return
    distributed.Backend.register_backend("tensorwire", _create, extended_api=True, devices=["cpu", "cuda"])


def _create(options: Any, pg_options: Any) -> Any:
    """Makes a group for torch.distributed."""
    from tensorwire.torch.backend import create

    return create(options, sys._getframe(1))


def __getattr__(name: str) -> Any:
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)


def __dir__() -> list[str]:
    return __all__
