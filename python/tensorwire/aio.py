"""Works for asyncio: ``await work`` waits without blocking the event loop."""

import asyncio
from collections.abc import Generator
from typing import Any

__all__ = ["over", "wait"]


def wait(work: Any) -> Generator[Any, None, None]:
    """What ``await work`` runs: ends when the work is over, with its error if it has failed.

    If it is cancelled, a receive is withdrawn, even if its message has come but this coroutine has not gone on since: the
    next receive gets the message.
    """
    yield from over(work)
    # Nothing can be cancelled between this look at the result and the end.
    error = work.error()
    if error is not None:
        raise error


def over(work: Any) -> Generator[Any, None, None]:
    """Ends when the work is over, and tells nobody how. If it is cancelled, the work is withdrawn."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[None] = loop.create_future()

    def settle() -> None:
        if not future.done():  # cancelled
            future.set_result(None)

    def ended(_: Any) -> None:
        try:
            loop.call_soon_threadsafe(settle)
        except RuntimeError:  # the loop was closed meanwhile
            pass

    work._on_over(ended)
    try:
        yield from future.__await__()
    except BaseException:  # also GeneratorExit: the coroutine was thrown away
        work.withdraw()
        raise
