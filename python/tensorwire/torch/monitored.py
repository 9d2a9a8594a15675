"""A barrier that says who has not come. It runs through the store, but what the group knows counts first.

Rank 0 looks for each rank's key and then leaves its verdict, which the others wait for. The texts have the words of
torch's own monitored barrier, which its users look for. A group that has failed, as when a rank has died, ends it with
the group's own error, which names the rank. The store may be gone with that rank.
"""

import contextlib
import datetime
import time
from collections.abc import Callable
from typing import Any

from torch._C._distributed_c10d import Store

from tensorwire.torch import errors

PREFIX = "tensorwire/monitored_barrier"
PASSED = b"passed"
#: Seconds between two looks at the store: short at first.
FIRST_LOOK, LAST_LOOK = 0.001, 0.02
#: Seconds after the end of a process's connections within which its death is seen.
MOMENT = 1.0

#: Gives how the group has failed, if it has.
Failure = Callable[[], BaseException | None]


def barrier(
    store: Store,
    failure: Failure,
    number: int,
    rank: int,
    size: int,
    timeout: datetime.timedelta,
    wait_all_ranks: bool,
) -> None:
    """Waits until all ranks have come here for the time with this number."""
    asked = _Asked(store, failure, rank)
    asked.check()
    key = f"{PREFIX}/{number}"
    end = time.monotonic() + timeout.total_seconds()
    milliseconds = round(timeout.total_seconds() * 1000)
    if rank == 0:
        _lead(asked, key, size, end, milliseconds, wait_all_ranks)
        if number:
            # All are here now, so all have read the one before.
            asked.delete_key(f"{PREFIX}/{number - 1}/verdict")
        return
    asked.set(f"{key}/{rank}", "here")
    verdict = asked.wait(f"{key}/verdict", end)
    if verdict == PASSED:
        # The rank that serves the store may be gone by now: all have come.
        with contextlib.suppress(Exception):
            store.delete_key(f"{key}/{rank}")
        return
    asked.delete_key(f"{key}/{rank}")
    told = f"it timed out after {milliseconds} ms" if verdict is None else verdict.decode("utf-8", "replace")
    raise errors.failed(
        f"[Rank {rank}]: Rank {rank} successfully reached monitoredBarrier, but received errors while waiting for "
        f"send/recv from rank 0: {told}"
    )


def _lead(asked: "_Asked", key: str, size: int, end: float, milliseconds: int, wait_all_ranks: bool) -> None:
    missing = []
    text = ""
    for rank in range(1, size):
        if milliseconds <= 0:
            text = f"[Rank 0]: Rank 0 timed out in monitoredBarrier after {milliseconds} ms; give it more time"
            break
        if asked.wait(f"{key}/{rank}", end) is None:
            missing.append(rank)
            if not wait_all_ranks:
                break
    if missing:
        who = f"Rank {missing[0]}" if len(missing) == 1 else f"Ranks {', '.join(map(str, missing))}"
        text = f"[Rank 0]: {who} failed to pass monitoredBarrier in {milliseconds} ms"
    asked.set(f"{key}/verdict", text or PASSED.decode())
    if text:
        raise errors.timed_out(text, missing)


class _Asked:
    """A store whose failures are ours: the group's own where it has failed, and otherwise one line."""

    def __init__(self, store: Store, failure: Failure, rank: int) -> None:
        self.store = store
        self.failure = failure
        self.rank = rank

    def check(self) -> None:
        """Raises if the group has failed."""
        error = self.failure()
        if error is not None:
            raise error

    def set(self, key: str, value: str) -> None:
        self._ask(self.store.set, key, value)

    def delete_key(self, key: str) -> None:
        self._ask(self.store.delete_key, key)

    def wait(self, key: str, end: float) -> bytes | None:
        """A key's value, as soon as it is there; None at the deadline. It asks in short steps: Ctrl-C ends it."""
        pause = FIRST_LOOK
        while not self._ask(self.store.check, [key]):
            self.check()
            left = end - time.monotonic()
            if left <= 0:
                return None
            time.sleep(min(pause, left))
            pause = min(pause * 2, LAST_LOOK)
        return self._ask(self.store.get, key)

    def _ask(self, method: Callable, *args: Any) -> Any:
        try:
            return method(*args)
        except RuntimeError as error:
            text = (str(error).splitlines() or [type(error).__name__])[0]
        # The rank that had the store may have died. Its store is gone a moment before its death is seen.
        end = time.monotonic() + MOMENT
        while time.monotonic() < end:
            self.check()
            time.sleep(FIRST_LOOK)
        raise errors.failed(f"[Rank {self.rank}]: the store of monitored_barrier does not answer any more: {text}")
