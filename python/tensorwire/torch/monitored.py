"""A barrier that says who has not come. It runs through the store, so that it works when the group does not.

Rank 0 looks for each rank's key and then leaves its verdict, which the others wait for. The texts have the words of
torch's own monitored barrier, which its users look for.
"""

import datetime
import time

from torch._C._distributed_c10d import Store

from tensorwire.torch import errors

PREFIX = "tensorwire/monitored_barrier"
PASSED = b"passed"
#: Seconds between two looks at the store: short at first.
FIRST_LOOK, LAST_LOOK = 0.001, 0.02


def barrier(
    store: Store, number: int, rank: int, size: int, timeout: datetime.timedelta, wait_all_ranks: bool
) -> None:
    """Waits until all ranks have come here for the time with this number."""
    key = f"{PREFIX}/{number}"
    end = time.monotonic() + timeout.total_seconds()
    milliseconds = round(timeout.total_seconds() * 1000)
    if rank == 0:
        _lead(store, key, size, end, milliseconds, wait_all_ranks)
        if number:
            # All are here now, so all have read the one before.
            store.delete_key(f"{PREFIX}/{number - 1}/verdict")
        return
    store.set(f"{key}/{rank}", "here")
    verdict = _wait(store, f"{key}/verdict", end)
    store.delete_key(f"{key}/{rank}")
    if verdict == PASSED:
        return
    told = f"it timed out after {milliseconds} ms" if verdict is None else verdict.decode("utf-8", "replace")
    raise errors.failed(
        f"[Rank {rank}]: Rank {rank} successfully reached monitoredBarrier, but received errors while waiting for "
        f"send/recv from rank 0: {told}"
    )


def _lead(store: Store, key: str, size: int, end: float, milliseconds: int, wait_all_ranks: bool) -> None:
    missing = []
    text = ""
    for rank in range(1, size):
        if milliseconds <= 0:
            text = f"[Rank 0]: Rank 0 timed out in monitoredBarrier after {milliseconds} ms; give it more time"
            break
        if _wait(store, f"{key}/{rank}", end) is None:
            missing.append(rank)
            if not wait_all_ranks:
                break
    if missing:
        who = f"Rank {missing[0]}" if len(missing) == 1 else f"Ranks {', '.join(map(str, missing))}"
        text = f"[Rank 0]: {who} failed to pass monitoredBarrier in {milliseconds} ms"
    store.set(f"{key}/verdict", text or PASSED.decode())
    if text:
        raise errors.timed_out(text)


def _wait(store: Store, key: str, end: float) -> bytes | None:
    """A key's value, as soon as it is there; None at the deadline. It asks in short steps: Ctrl-C ends it."""
    pause = FIRST_LOOK
    while not store.check([key]):
        left = end - time.monotonic()
        if left <= 0:
            return None
        time.sleep(min(pause, left))
        pause = min(pause * 2, LAST_LOOK)
    return store.get(key)
