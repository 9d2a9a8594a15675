"""torch.multiprocessing with leases: queues, pipes and arguments of processes carry tokens instead of handles."""

import contextlib
import functools
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from tensorwire import lease

#: What was there before.
_before: dict[str, Any] = {}


def install_reductions() -> None:
    """Has torch.multiprocessing send CUDA tensors, and CPU tensors in memory of tensorwire, as leases.

    Their memory is let go when all who received them have let go of them, or have died; they may be sent onward and as
    often as one likes. Tokens do not expire while this process lives. Other CPU tensors are sent as before: torch moves
    their memory in place, which only torch can do. The receiver needs the package, and no call.
    """
    if _before:
        return
    for kind in _kinds():
        ForkingPickler.register(kind, _reduce)
    _before["ipc_collect"] = torch.cuda.ipc_collect
    torch.cuda.ipc_collect = _collecting(torch.cuda.ipc_collect)


def uninstall_reductions() -> None:
    """Undoes install_reductions(). What was sent stays valid."""
    if not _before:
        return
    for kind in _kinds():
        ForkingPickler.register(kind, reductions.reduce_tensor)
    torch.cuda.ipc_collect = _before.pop("ipc_collect")


def _kinds() -> set[type]:
    """What torch has registered itself."""
    return {*torch._tensor_classes, Tensor, torch.nn.Parameter}


def _reduce(tensor: Tensor) -> Any:
    if tensor.device.type in ("cpu", "cuda") and _is_plain(tensor):
        if tensor.is_conj() or tensor.is_neg():
            tensor = tensor.resolve_conj().resolve_neg()
        torch.utils.hooks.warn_if_has_hooks(tensor)
        # An empty tensor of the CPU has no memory that could be shared.
        token = lease.try_share(tensor, 1, None) if tensor.is_cuda or tensor.numel() else None
        if token is not None:
            return _rebuild, (token.to_bytes(),)
    return reductions.reduce_tensor(tensor)


def _is_plain(tensor: Tensor) -> bool:
    """Whether it is one piece of memory that may leave the process; of others torch knows more."""
    return (
        tensor.layout is torch.strided
        and not tensor.is_quantized
        and not tensor.is_nested
        and (tensor.is_leaf or not tensor.requires_grad)
    )


def _rebuild(data: bytes) -> Tensor:
    token = lease.Token(data)
    try:
        tensor: Tensor = lease.open(token)
    except BaseException:
        # Nobody will open it later, and it does not expire: its maker must not wait for it.
        with contextlib.suppress(Exception):
            token.discard(1)
        raise
    return tensor


def _collecting(collect: Any) -> Any:
    @functools.wraps(collect)
    def ipc_collect() -> None:
        lease.collect()
        collect()

    return ipc_collect
