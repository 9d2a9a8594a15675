"""The name "gloo" for programs and frameworks that know no other backend for the CPU."""

import logging
from typing import Any

from torch import distributed

from tensorwire.torch import backend as ours
from tensorwire.torch import register

#: Which backend a process group has for which device: all of torch's ways to make one go through it.
_Config = distributed.BackendConfig
_before = _Config.__init__


def as_gloo(enable: bool = True) -> None:
    """Lets the name "gloo" mean tensorwire in process groups that are made from now on; ``as_gloo(False)`` undoes it.

    For frameworks that know the names of torch's own backends only. ``get_backend()`` says "gloo" for such a group.
    Groups that exist stay what they are. In "cpu:gloo,cuda:nccl" the first half is tensorwire's. A group that is
    called "gloo" alone takes tensors on the CPU only; for CUDA tensors use the name "tensorwire". The log says that it
    is on.
    """
    if enable == is_on():
        return
    if not enable:
        _Config.__init__ = _before  # type: ignore[method-assign]
        return
    register()
    _Config.__init__ = _init  # type: ignore[method-assign]
    logging.getLogger("tensorwire").warning(
        'as_gloo: process groups with the name "gloo" are made by tensorwire from now on, for tensors on the CPU'
    )


def is_on() -> bool:
    return _Config.__init__ is _init


def _init(self: Any, backend: Any) -> None:
    _before(self, backend)
    backends: dict[str, str] = self.device_backend_map
    if backends.get("cpu") != "gloo":
        return
    if set(backends.values()) == {"gloo"}:
        self.device_backend_map = {"cpu": ours.NAME}
    elif ours.PYTHON_BACKENDS:
        self.device_backend_map = backends | {"cpu": ours.NAME}
    else:
        logging.getLogger("tensorwire").warning(
            "as_gloo: the process group %s keeps Gloo: before 2.14, torch has no other backend beside one in Python", self
        )
