"""The default group of this process: init() makes it, group() gives it, finalize() closes it."""

from __future__ import annotations

import atexit
import os
import sys

# All of threading, and typing below, would take longer to import than all of ours.
from _thread import allocate_lock

from tensorwire._native import Group, last_words
from tensorwire.errors import MisuseError, TensorwireError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from datetime import timedelta
    from typing import Any, Never

__all__ = ["finalize", "group", "init"]

_lock = allocate_lock()
_group: Group | None = None
# Groups of the process that we were forked from. They are kept, never used and never closed.
_inherited: list[Group] = []


def init(
    url: str | None = None,
    *,
    store: Any = None,
    rank: int | None = None,
    world: int | None = None,
    timeout: timedelta | float | None = None,
    **others: Never,
) -> Group:
    """Makes the default group of this process, together with all other ranks, and returns it.

    Without arguments the launcher's variables say who we are: torchrun, tensorwire run, Slurm, Open MPI or PMI.
    ``url`` is ``tcp://host:port``, where rank 0 serves the store, or ``file:///path``. ``store`` is one of ours, or any
    object with the methods of torch's stores; it needs ``rank`` and ``world``. ``timeout`` holds for the meeting
    and is the group's default for every operation.
    """
    global _group
    for name in others:
        hint = ": the number of ranks is called 'world'" if name == "world_size" else ""
        raise TypeError(f"tensorwire.init() got an unexpected keyword argument {name!r}{hint}")
    with _lock:
        if _group is not None:
            raise MisuseError(
                f"this process already has its default group, {_group!r}: use tensorwire.group(), close it with "
                "tensorwire.finalize(), or make further groups with Group.subgroup() or Group.split()"
            )
        _group = _form(url, store, rank, world, timeout)
        return _group


def group() -> Group:
    """The default group, which init() has made."""
    if _group is not None:
        return _group
    if _inherited:
        raise MisuseError(
            "a forked process cannot use the group of its parent: call tensorwire.init() here, too, as a rank of its own"
        )
    raise MisuseError("this process has no default group yet: call tensorwire.init() first, on every rank")


def finalize() -> None:
    """Closes the default group, if there is one. After that init() may be called again.

    Raises what :meth:`Group.close` raises; the group is closed all the same.
    """
    global _group
    # Without the lock: the end of the process does not wait for a thread that is still in init().
    closing, _group = _group, None
    if closing is not None:
        closing.close()


def _form(
    url: str | None, store: Any, rank: int | None, world: int | None, timeout: timedelta | float | None
) -> Group:
    if url is not None and store is not None:
        raise MisuseError("tensorwire.init() takes a url or a store, not both")
    if url is not None:
        return Group.from_url(url, rank=rank, world=world, timeout=timeout)
    if store is not None:
        if rank is None or world is None:
            raise MisuseError("tensorwire.init(store=...) also needs rank= and world=")
        return Group.from_store(store, rank, world, timeout=timeout)
    if rank is not None or world is not None:
        raise MisuseError(
            "tensorwire.init(rank=..., world=...) also needs the place where the ranks meet: a url such as "
            "'tcp://host:29500' or 'file:///path', or a store. Without all of them the launcher's variables count"
        )
    return Group.from_env(timeout=timeout)


def _forked() -> None:
    """In a forked child: the group is the parent's, and whoever held the lock did not come along."""
    global _group, _lock
    _lock = allocate_lock()
    if _group is not None:
        _inherited.append(_group)
    _group = None


def _end() -> None:
    """At the end of the process nobody can catch an error any more, and the exit status is decided."""
    try:
        finalize()
    except TensorwireError as error:
        print(f"tensorwire: the default group was closed at the end of the process: {error}", file=sys.stderr)


os.register_at_fork(after_in_child=_forked)
# So that the other ranks hear that this one has left, and not that it died. What ends it is said before.
atexit.register(_end)
atexit.register(last_words)
