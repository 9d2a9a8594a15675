"""DDP's join() hands a work to C++ and forgets it. C++ keeps only its own half, which cannot wait: we keep the other."""

import functools
import weakref
from typing import Any

from torch.distributed.algorithms.join import Join

#: Not an attribute of the module: modules are pickled.
_works: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def keep_works() -> None:
    """Each module in a join context holds the work of its last announcement, until the next one. Once is enough."""
    notify = Join.notify_join_context
    if getattr(notify, "keeps_works", False):
        return

    @functools.wraps(notify)
    def notify_and_keep(joinable: Any) -> Any:
        work = notify(joinable)
        _works[joinable] = work
        return work

    notify_and_keep.keeps_works = True  # type: ignore[attr-defined]
    Join.notify_join_context = staticmethod(notify_and_keep)
