"""The classes that torch.distributed works with, made from the table of operations.

Since torch 2.14 a backend can be written in Python. But C++ wraps the works that it returns, and the wrapper forwards
little more than wait(). So there is a process group around it, whose methods go through torch's dispatcher (where the
flight recorder, the profiler and the checks are hooked in) and then return the work itself. Before 2.14 a process group
stands alone, and torch calls it directly.
"""

import hashlib
import threading
import types
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import distributed
from torch._C._distributed_c10d import Backend as TorchBackend
from torch._C._distributed_c10d import ErrorType, PrefixStore, ProcessGroup, Store, Work

from tensorwire.torch import errors, join_works, phrases, recorder, registry
from tensorwire.torch.operations import Operations
from tensorwire.torch.table import TABLE, Row, arguments

NAME = "tensorwire"
CPU = torch.device("cpu")
#: One group serves all of them.
DEVICES = [CPU, torch.device("cuda")]
CUSTOM = ProcessGroup.BackendType.CUSTOM
#: What a wrong call raises; the second for a negative rank.
WRONG = errors.errors.MisuseError, OverflowError


class _Made(threading.local):
    """The last work that a backend made on this thread, for the method of the process group that called it."""

    work: Callable[[], Work | None] | None = None


_made = _Made()
_is_registering = registry.is_on
_MISSING = object()


def create(options: Any, caller: types.FrameType | None) -> Any:
    """Makes a group. `caller` is torch's function that wants it."""
    backends = _backends(caller)
    if backends is not None:
        # Before anything is made of it: all ranks are refused alike.
        _check_beside(backends)
    own_store = _own_store(options.store, options.global_ranks_in_group)
    rank, size, name = options.group_rank, options.group_size, _unique(options.group_id)
    within = _within(options.global_ranks_in_group)
    operations = Operations(own_store, rank, size, options.timeout, name, within)
    operations.torch_name = options.group_id
    if not PYTHON_BACKENDS:
        return PlainGroup(options.store, operations)
    ranks = list(options.global_ranks_in_group)
    backend = Backend(operations, ranks, recorder.recorder_of(ranks[rank] if ranks else rank))
    if backends is None or set(backends.values()) != {NAME}:
        # A process group of ours would replace the whole of it. If torch does not say, we are careful.
        return backend
    group = getattr(options, "process_group", None)
    store = options.store if group is None else group.get_group_store()
    made = BackedGroup(store, backend, own_store, options.group_id)
    if group is not None and group.bound_device_id is not None:
        made.bound_device_id = group.bound_device_id
    return made


def _check_beside(backends: dict[str, str]) -> None:
    """Refuses other backends in the group that torch would put ours in the place of."""
    others = {backend for backend in backends.values() if backend != NAME}
    config = ",".join(f"{device}:{backend}" for device, backend in backends.items())
    if others and not PYTHON_BACKENDS:
        raise errors.unsupported(
            f'the process group "{config}": before 2.14, torch has no other backend beside one in Python, which would '
            f"replace them all. Update torch (this is {torch.__version__}), or use "
            f'init_process_group("{NAME}"): one group serves the CPU and CUDA'
        )
    types = distributed.Backend.backend_type_map
    # "fake" does nothing, and nobody misses it.
    for other in sorted(others - {"fake"}):
        if types.get(other, CUSTOM) == CUSTOM:
            raise errors.unsupported(
                f'the process group "{config}": torch keeps one backend of all that it does not bring along, {NAME} and '
                f"{other} among them, and would use it for all devices. Make a group for each"
            )


def _backends(caller: types.FrameType | None) -> dict[str, str] | None:
    """The backends of the group that is being made, by their devices, as in "cpu:tensorwire,cuda:nccl".

    torch does not tell its backends about each other, so we look at the variable in which it keeps the list. None if that
    is not there.
    """
    config = None if caller is None else caller.f_locals.get("backend_config")
    try:
        return dict(config.get_device_backend_map())
    except Exception:
        return None


def _own_store(store: Store, ranks: list[int]) -> Store:
    """The store for these ranks alone.

    torch numbers groups on each rank by itself: groups of other ranks may have the same name and the same store, such
    as the sub-groups of two groups that were made by new_subgroups(group=...).
    """
    if not ranks:
        return store
    tag = hashlib.sha1(",".join(map(str, ranks)).encode(), usedforsecurity=False).hexdigest()[:12]
    return PrefixStore(f"ranks-{tag}", store)


def _within(ranks: list[int]) -> tuple[Operations, list[int]] | None:
    """The default group, if it is ours, and the ranks there of a new one. It knows who has died."""
    world = distributed.group.WORLD
    operations = getattr(world, "operations", None)
    if operations is None and world is not None:
        try:
            operations = world._get_backend(CPU).operations
        except (AttributeError, RuntimeError):
            return None
    if operations is None or not all(rank < operations.size for rank in ranks):
        return None
    return operations, list(ranks) or list(range(operations.size))


def _unique(group_id: str) -> str:
    """The name of the native group: torch's, which is the same on all ranks."""
    return f"torch-{group_id}"


class Control:
    """What is no collective; the same for a backend and for a process group that stands alone."""

    operations: Operations

    supports_splitting = property(lambda self: True)
    supports_coalescing = property(lambda self: True)
    supports_shrinking = property(lambda self: False)
    supports_reconfigure = property(lambda self: False)
    supports_window = property(lambda self: False)
    _supports_time_estimate = property(lambda self: False)
    supports_time_estimate = _supports_time_estimate
    options = property(lambda self: self._options())

    def getBackendName(self) -> str:
        return NAME

    def name(self) -> str:
        return NAME

    def supports_tensor_alloc(self, device: Any) -> bool:
        return False

    def start_coalescing(self, *_: Any) -> None:
        self.operations.calls.start_coalescing()

    def end_coalescing(self, *_: Any) -> Work:
        work = self.operations.end_coalescing()
        _made.work = weakref.ref(work)
        return work

    def monitored_barrier(self, opts: Any = None, wait_all_ranks: bool = False, *, timeout: Any = None) -> None:
        # C++ gives options, Python a time, which may be seconds.
        limit = timeout if opts is None else getattr(opts, "timeout", opts)
        if isinstance(limit, int | float):
            limit = timedelta(seconds=limit)
        self.operations.monitored_barrier(limit, wait_all_ranks)

    def set_timeout(self, timeout: timedelta) -> None:
        self.operations.set_timeout(timeout)

    def abort(self) -> None:
        self.operations.abort()

    def shutdown(self) -> None:
        self.operations.shutdown()

    def get_error(self) -> ErrorType:
        error = self.operations.error()
        if error is None:
            return ErrorType.SUCCESS
        if isinstance(error, TimeoutError):
            return ErrorType.TIMEOUT
        return ErrorType.REMOTE_ERROR if isinstance(error, errors.errors.PeerError) else ErrorType.COMM_ERROR

    def eager_connect_single_device(self, device: Any = None) -> None:
        """Groups are connected when they are made."""

    def perform_nocolor_split(self, device: Any = None) -> None:
        """Ranks that are not in a new group have nothing to do."""

    def _set_sequence_number_for_group(self) -> None:
        """Numbers begin at 0 on every rank."""

    def _get_sequence_number_for_group(self) -> int:
        return self.operations.calls.issued

    def _enable_collectives_timing(self) -> None:
        """Works that begin from now on tell how long they took."""
        self.operations.calls.enable_timing()

    def _wait_for_pending_works(self) -> None:
        """Works end by themselves, and nothing of torch is called from them."""

    def explain(self) -> str:
        """How this rank reaches the others, and why not better."""
        return self.operations.group.explain()

    def _options(self) -> TorchBackend.Options:
        options = TorchBackend.Options(NAME, self.operations.timeout)
        options.group_name = self.operations.torch_name
        options.global_ranks_in_group = getattr(self, "global_ranks", [])
        return options


class Backend(Control, TorchBackend):
    """The backend, since torch 2.14."""

    def __init__(self, operations: Operations, global_ranks: list[int], recorder_name: str) -> None:
        super().__init__(operations.rank, operations.size)
        self.operations = operations
        self.global_ranks = global_ranks
        self.recorder_name = recorder_name

    def getBackendName(self) -> str:
        # torch's recorder asks for it. Everybody else asks the process group, or for name().
        return self.recorder_name

    def split(self, store: Store, ranks: list[int], opts: Any) -> "Backend":
        if self.operations.rank not in ranks:
            # torch's C++ cannot take a None here.
            raise errors.unsupported(
                "split_group with ranks that are in none of the new groups, in a process group of several backends; "
                "use new_group"
            )
        name = getattr(opts, "group_name", "") or f"{self.operations.torch_name}.split"
        rank, timeout = ranks.index(self.operations.rank), getattr(opts, "_timeout", None)
        return self._another(store, rank, len(ranks), timeout, name, (self.operations, list(ranks)))

    def merge(self, store: Store, opts: Any, rank: int, size: int) -> "Backend":
        name = getattr(opts, "group_name", "") or f"{self.operations.torch_name}.merge"
        return self._another(store, rank, size, getattr(opts, "_timeout", None), name)

    def _another(
        self,
        store: Store,
        rank: int,
        size: int,
        timeout: timedelta | None,
        name: str,
        within: tuple[Operations, list[int]] | None = None,
    ) -> "Backend":
        operations = Operations(store, rank, size, timeout or self.operations.timeout, _unique(name), within)
        operations.torch_name = name
        return Backend(operations, [], self.recorder_name)


class Regroup:
    """How process groups make others."""

    operations: Operations

    def split_group(
        self,
        new_ranks: list[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Any = None,
    ) -> ProcessGroup | None:
        """A group of some of these ranks, in the given order; None for the others."""
        if self.operations.rank not in new_ranks:
            return None
        name = group_name or f"{self.operations.torch_name}.{'_'.join(map(str, new_ranks))}"
        store = PrefixStore(f"{name}/", self.get_group_store())
        rank = new_ranks.index(self.operations.rank)
        timeout = timeout or getattr(opts, "_timeout", None)
        within = self.operations, list(new_ranks)
        return self._made(store, rank, len(new_ranks), timeout, name, group_desc, within)

    def merge_remote_group(
        self,
        store: Store,
        size: int,
        timeout: timedelta | None = None,
        group_name: str | None = None,
        group_desc: str | None = None,
    ) -> ProcessGroup:
        """A group with everyone who calls this with the same store: `size` ranks in all, in the order of calling."""
        name = group_name or "merged"
        store = PrefixStore(f"{name}/", store)
        rank = store.add("tensorwire/merge", 1) - 1
        if rank >= size:
            raise errors.misuse(f"merge of {size} ranks: this is one more; use a fresh store or another group_name")
        return self._made(store, rank, size, timeout, name, group_desc)

    def _made(
        self,
        store: Store,
        rank: int,
        size: int,
        timeout: timedelta | None,
        name: str,
        desc: str | None,
        within: tuple[Operations, list[int]] | None = None,
    ) -> ProcessGroup:
        prefix = PrefixStore("cpu/", store)
        operations = Operations(prefix, rank, size, timeout or self.operations.timeout, _unique(name), within)
        operations.torch_name = name
        if PYTHON_BACKENDS:
            group = BackedGroup(store, Backend(operations, [], self.backend.recorder_name), prefix, name)
        else:
            group = PlainGroup(store, operations)
        group._set_group_name(name)
        group._set_group_desc("undefined" if desc is None else desc)
        return group


class BackedGroup(Regroup, ProcessGroup):
    """The process group around our backend, since torch 2.14."""

    def __init__(self, store: Store, backend: Backend, backend_store: Store, group_id: str) -> None:
        operations = backend.operations
        super().__init__(store, operations.rank, operations.size)
        self.backend = backend
        self.operations = operations
        self._set_default_backend(CUSTOM)
        checked = _checked(backend, backend_store, group_id)
        for device in DEVICES:
            self._register_backend(device, CUSTOM, checked)

    def getBackendName(self) -> str:
        # C++ would say "custom", in DDP's log too.
        return NAME

    def name(self) -> str:
        return NAME

    def _end_coalescing(self, device: torch.device) -> Work:
        return _taken(ProcessGroup._end_coalescing(self, device))

    def _enable_collectives_timing(self) -> None:
        self.backend._enable_collectives_timing()

    def explain(self) -> str:
        """How this rank reaches the others, and why not better."""
        return self.backend.explain()


def _checked(backend: Backend, store: Store, group_id: str) -> Any:
    """With TORCH_DISTRIBUTED_DEBUG=DETAIL torch's own checks around it. torch does that for plain backends only."""
    if distributed.get_debug_level() != distributed.DebugLevel.DETAIL or not distributed.is_gloo_available():
        return backend
    return distributed.distributed_c10d._create_process_group_wrapper(
        wrapped_pg=backend,
        store_prefix=group_id,
        store=store,
        rank=backend.operations.rank,
        world_size=backend.operations.size,
        timeout=backend.operations.timeout,
    )


class PlainGroup(Control, Regroup, ProcessGroup):
    """The process group that is all of it, before torch 2.14."""

    def __init__(self, store: Store, operations: Operations) -> None:
        super().__init__(operations.rank, operations.size)
        self.operations = operations
        self._store = store
        self._group_name = operations.torch_name
        self._group_desc = "undefined"

    # torch asks a group for its backends, of which this one has none; it answers itself.
    _device_types = property(lambda self: list(DEVICES))
    group_name = property(lambda self: self._group_name)
    group_desc = property(lambda self: self._group_desc)

    def _get_backend(self, device: torch.device) -> "PlainGroup":
        if torch.device(device).type not in ("cpu", "cuda"):
            raise errors.unsupported(f"tensorwire has no backend for {device}; use tensors of the CPU or of CUDA")
        return self

    def _get_backend_name(self) -> str:
        return NAME

    def get_group_store(self) -> Store:
        return self._store

    def setGroupName(self, name: str) -> None:
        self._group_name = self.operations.torch_name = name

    def getGroupName(self) -> str:
        return self._group_name

    def setGroupDesc(self, desc: str) -> None:
        self._group_desc = desc

    def getGroupDesc(self) -> str:
        return self._group_desc

    def _set_group_name(self, name: str) -> None:
        self.setGroupName(name)

    def _set_group_desc(self, desc: str) -> None:
        self.setGroupDesc(desc)

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self.set_timeout(timeout)

    def _start_coalescing(self, device: torch.device) -> None:
        self.operations.calls.start_coalescing()

    def _end_coalescing(self, device: torch.device) -> Work:
        return self.operations.end_coalescing()

    def _has_hooks(self) -> bool:
        return False


def _taken(wrapped: Work | None) -> Work | None:
    """The work that our backend has just made, for the one in which C++ wrapped it; none for an operation that is over."""
    made = _made.work
    work = None if made is None else made()
    return wrapped if work is None else work


def _backend_method(row: Row) -> Callable:
    function = row.function

    def method(self: Backend, *args: Any, **kwargs: Any) -> Work | None:
        try:
            work = function(self.operations, *args, **kwargs)
        except WRONG as error:
            raise phrases.told(error, row.name, self.operations.rank, self.operations.size, args) from None
        if work is not None:
            # Weakly: if nobody takes it, it must not keep tensors alive.
            _made.work = weakref.ref(work)
        return work

    return method


def _dispatched_method(row: Row) -> Callable:
    inherited, direct = getattr(ProcessGroup, row.name), _direct_method(row)
    writes = row.name not in ("send", "barrier")

    def method(self: ProcessGroup, *args: Any, **kwargs: Any) -> Work | None:
        if writes:
            _refuse_views(args[:1] or tuple(kwargs.values())[:1])
        if _is_registering() and (opts := _waited_for(row, args, kwargs)) is not None:
            # torch's C++ notes a work here even if it gets none, and ends the process when that is waited for.
            opts.asyncOp = True
            try:
                work = method(self, *args, **kwargs)
            finally:
                opts.asyncOp = False
            work.wait()
            return None
        # The call must be here: pybind looks at the calling frame's name and self to see that a method calls what it
        # overrides, and would call this one again otherwise.
        _made.work = None
        try:
            return _taken(inherited(self, *args, **kwargs))
        except NotImplementedError:
            if not _are_compressed(args[:1] or tuple(kwargs.values())[:1]):
                raise
            # It came from the dispatcher, and nothing was called yet.
            return direct(self, *args, **kwargs)

    return method


def _waited_for(row: Row, args: tuple, kwargs: dict) -> Any:
    """The options of a call that is over when it returns."""
    for given in (*args, *kwargs.values()):
        if row.options is not None and isinstance(given, row.options):
            return None if given.asyncOp else given
    return None


def _refuse_views(tensors: Any) -> None:
    """Refuses results that stand for other values than their memory has: the dispatcher would write to a copy of them."""
    for tensor in tensors:
        if isinstance(tensor, list | tuple):
            _refuse_views(tensor)
        elif isinstance(tensor, torch.Tensor) and (tensor.is_conj() or tensor.is_neg()):
            raise errors.misuse(
                "the result cannot be written to a conjugated or negated view; give it resolve_conj() or resolve_neg() of it"
            )


def _are_compressed(tensors: Any) -> bool:
    """Whether there is a tensor of CSR or its like among them, which torch's dispatcher has no collectives for."""
    return any(
        _are_compressed(tensor)
        if isinstance(tensor, list | tuple)
        else isinstance(tensor, torch.Tensor) and tensor.layout not in (torch.strided, torch.sparse_coo)
        for tensor in tensors
    )


def _direct_method(row: Row) -> Callable:
    function, options, count = row.function, row.options, len(row.data) + 1

    # The first two have names because a tuple of them costs half a microsecond.
    def method(self: Any, data: Any = _MISSING, other: Any = _MISSING, /, *more: Any, **kwargs: Any) -> Work | None:
        # How torch itself calls it; looking at all that others may write costs microseconds.
        args: list = []
        try:
            if type(data) is list and not kwargs and len(more) == count - 2:
                if not more:
                    if type(other) is options:
                        args = [data, other]
                        return function(self.operations, data, other)
                elif type(more[-1]) is options:
                    args = [data, other, *more]
                    return function(self.operations, *args)
            args = arguments(row, (*(given for given in (data, other) if given is not _MISSING), *more), kwargs)
            return function(self.operations, *args)
        except WRONG as error:
            raise phrases.told(error, row.name, self.operations.rank, self.operations.size, args) from None

    return method


def _add(cls: type, row: Row, method: Callable, names: tuple[str, ...]) -> None:
    name = names[0]
    method.__code__ = method.__code__.replace(co_name=name, co_qualname=f"{cls.__name__}.{name}")
    method.__name__, method.__qualname__ = name, f"{cls.__name__}.{name}"
    method.__doc__ = row.function.__doc__
    for alias in filter(None, names):
        setattr(cls, alias, method)


def _python_backends() -> bool:
    """Whether this torch lets Python derive from Backend."""
    try:
        type("Probe", (TorchBackend,), {})(0, 1)
    except TypeError:
        return False
    return True


join_works.keep_works()
PYTHON_BACKENDS = _python_backends()
#: Old names that torch's C++ looks for when it finds the new one in use: an alias of ours would call itself.
FALLBACKS = ("alltoall_base", "allgather_into_tensor_coalesced", "reduce_scatter_tensor_coalesced")
for _row in TABLE:
    if not PYTHON_BACKENDS:
        _add(PlainGroup, _row, _direct_method(_row), (_row.old or _row.name, _row.name))
        continue
    if _row.dispatched:
        _add(Backend, _row, _backend_method(_row), (_row.name, _row.old))
    else:
        _add(Backend, _row, _direct_method(_row), (_row.name, _row.old))
    if _row.dispatched and hasattr(ProcessGroup, _row.name):
        _add(BackedGroup, _row, _dispatched_method(_row), (_row.name, "" if _row.old in FALLBACKS else _row.old))
    else:
        _add(BackedGroup, _row, _direct_method(_row), (_row.name, _row.old))
