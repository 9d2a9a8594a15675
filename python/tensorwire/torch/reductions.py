"""torch.multiprocessing with leases: queues, pipes and arguments of processes carry tokens instead of handles.

| what is sent | how |
|---|---|
| a CUDA tensor, a tensor in memory of tensorwire | a token for its memory |
| another CPU tensor | torch moves it into a file of its own, as before; a token stands for the file |
| a torch.cuda.Event | a token for the point that it marks; one made with ``interprocess=True`` goes torch's way |
"""

import contextlib
import functools
import os
import threading
from multiprocessing import queues
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.multiprocessing import get_sharing_strategy, reductions

from tensorwire import _native, lease
from tensorwire._native import Lease, Token
from tensorwire.errors import UnsupportedError
from tensorwire.torch import errors

#: torch's own, which has another name in each version.
_reduce_shared_event = ForkingPickler._extra_reducers[torch.cuda.Event]  # type: ignore[attr-defined]

#: For whoever ends while nobody has received what it sent.
_ADVICE = "a reader that died leaves messages behind: install_reductions(lifetime=SECONDS) takes them back"

#: What was there before: reducers by what they reduce, and functions by where they were.
_reducers_before: dict[type, Any] = {}
_functions_before: list[tuple[Any, str, Any]] = []
#: How many seconds a message waits for its receiver; None: as long as this process lives.
_lifetime: float | None = None


def install_reductions(*, lifetime: float | None = None) -> None:
    """Has torch.multiprocessing send tensors of CUDA and of the CPU, and events of CUDA, as leases.

    Their memory is let go when all who received them have let go of them, or have died; they may be sent onward and as
    often as one likes. A message that nobody receives, because its reader has died, keeps its memory for ``lifetime``
    seconds; None means: as long as this process lives. Whoever receives it later gets an error. To call it again changes
    the lifetime of what is sent from then on. What a queue is given while a stream of torch is current is ready when that
    stream has come so far. The receiver needs the package, and no call. With torch's sharing strategy ``file_system``
    tensors of the CPU are sent as before.
    """
    global _lifetime
    if lifetime is not None and not lifetime >= 0:
        raise errors.misuse(f"lifetime={lifetime!r}: a number of seconds from 0 on, or None, is needed")
    _lifetime = lifetime
    lease.advice = _ADVICE if lifetime is None else None
    if _reducers_before:
        return
    for kind, reduce in _reducers().items():
        _reducers_before[kind] = ForkingPickler._extra_reducers[kind]  # type: ignore[attr-defined]
        ForkingPickler.register(kind, reduce)
    for owner, name, wrap in (
        (torch.cuda, "ipc_collect", _collecting),
        (queues.Queue, "put", _putting),
        (queues.JoinableQueue, "put", _putting),
    ):
        function = getattr(owner, name)
        _functions_before.append((owner, name, function))
        setattr(owner, name, wrap(function))


def uninstall_reductions() -> None:
    """Undoes install_reductions(). What was sent stays valid."""
    for kind, reduce in _reducers_before.items():
        ForkingPickler.register(kind, reduce)
    for owner, name, function in _functions_before:
        setattr(owner, name, function)
    _reducers_before.clear()
    _functions_before.clear()
    lease.advice = None


def _reducers() -> dict[type, Any]:
    """For what torch has reducers of its own."""
    tensors: dict[type, Any] = dict.fromkeys((*torch._tensor_classes, Tensor, torch.nn.Parameter), _reduce)
    return tensors | {UntypedStorage: _reduce_storage, torch.cuda.Event: _reduce_event}


def _reduce(tensor: Tensor) -> Any:
    if tensor.device.type in ("cpu", "cuda") and _is_plain(tensor):
        if tensor.is_conj() or tensor.is_neg():
            tensor = tensor.resolve_conj().resolve_neg()
        torch.utils.hooks.warn_if_has_hooks(tensor)
        # An empty tensor of the CPU has no memory that could be shared.
        lent = lease.try_share(tensor, 1, _lifetime) if tensor.is_cuda or tensor.numel() else None
        if lent is not None:
            return _rebuild, (_sent(lent),)
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
    with _wanted(data) as token:
        tensor: Tensor = lease.open(token)
    return tensor


def _reduce_storage(storage: UntypedStorage) -> Any:
    """Memory of the CPU that is not ours: torch moves it into a file, in place, as only torch can, and maps that file
    on the other side. The descriptor is what is lent, until the other side has it: then the kernel counts."""
    if storage.device.type != "cpu" or not storage.nbytes() or get_sharing_strategy() != "file_descriptor":
        return reductions.reduce_storage(storage)
    fd, size = storage._share_fd_cpu_()
    key = reductions.fd_id(fd)
    reductions.shared_cache[key] = reductions.StorageWeakRef(storage)
    lent = _native.share(storage.data_ptr(), size, storage, fd=fd, lifetime=_lifetime)
    return _rebuild_storage, (type(storage), _sent(lent), key, size)


def _rebuild_storage(cls: Any, data: bytes, key: tuple[int, int], size: int) -> UntypedStorage:
    with _wanted(data) as token:
        # One file is one storage, as torch does it, too. The numbers of a file that is gone may be those of another one
        # now: only a token that is good says that its file was there all the time.
        known = reductions.storage_from_cache(cls, key)
        if known is not None:
            token.discard()
            return known  # type: ignore[no-any-return]
        fd = _native.open_file(token)
        try:
            storage: UntypedStorage = cls._new_shared_fd_cpu(fd, size)
            reductions.shared_cache[reductions.fd_id(fd)] = reductions.StorageWeakRef(storage)
        finally:
            os.close(fd)
    return storage


def _reduce_event(event: torch.cuda.Event) -> Any:
    """An event that the driver does not let out goes as the point that it marks now. One that it does is the same event
    in both processes, so that either sees when the other records it again: torch sends it."""
    try:
        return _reduce_shared_event(event)
    except RuntimeError:
        pass
    if event.query():
        return type(event), ()
    lent = _native.share(0, 0, None, gpu=event.device.index, event=event.cuda_event, lifetime=_lifetime)
    return _rebuild_event, (type(event), _sent(lent))


def _rebuild_event(cls: Any, data: bytes) -> torch.cuda.Event:
    event: torch.cuda.Event = cls()

    def make(index: int) -> int:
        event.record(torch.cuda.current_stream(index))
        return event.cuda_event

    torch.cuda.init()
    with _wanted(data) as token:
        _native.open_event(token, make)
    return event


#: Tokens that were made while an object is put into a queue, for the thread that does so.
_putting_now = threading.local()


def _sent(lent: Lease | None) -> bytes:
    """The token of what is lent, as it travels."""
    if lent is None:
        raise UnsupportedError("sending it is not available: needs memory that other processes can map, has none")
    data = lent.token.to_bytes()
    tokens = getattr(_putting_now, "tokens", None)
    if tokens is not None:
        tokens.append(data)
    return data


@contextlib.contextmanager
def _wanted(data: bytes) -> Any:
    """The token. If it cannot be opened, nobody will do so later, and it may never expire: its maker must not wait."""
    token = Token(data)
    try:
        yield token
    except BaseException:
        _discard(token)
        raise


def _discard(token: Token) -> None:
    with contextlib.suppress(Exception):
        token.discard(1)


class _Pickled:
    """An object that is pickled already."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def __reduce__(self) -> Any:
        return ForkingPickler.loads, (self.data,)


def _putting(put: Any) -> Any:
    """A queue pickles on a thread of its own, where no stream of torch's is current: what is put while one is, is
    pickled by the thread that puts it."""

    @functools.wraps(put)
    def put_behind_stream(self: Any, obj: Any, block: bool = True, timeout: float | None = None) -> None:
        if not _is_on_stream():
            put(self, obj, block, timeout)
            return
        _putting_now.tokens = tokens = []
        try:
            put(self, _Pickled(bytes(ForkingPickler.dumps(obj))), block, timeout)
        except BaseException:
            for data in tokens:
                _discard(Token(data))
            raise
        finally:
            _putting_now.tokens = None

    return put_behind_stream


def _is_on_stream() -> bool:
    """Whether a stream other than the default one is current, on any GPU."""
    if not torch.cuda.is_initialized():
        return False
    return any(torch._C._cuda_getCurrentRawStream(index) for index in range(torch.cuda.device_count()))


def _collecting(collect: Any) -> Any:
    @functools.wraps(collect)
    def ipc_collect() -> None:
        lease.collect()
        collect()

    return ipc_collect
