"""Works for asyncio: ``await work`` waits without blocking the event loop."""

import asyncio
from collections.abc import Generator
from typing import Any

__all__ = ["wait"]


def wait(work: Any) -> Generator[Any, None, None]:
    """What ``await work`` runs: ends when the work is over, with its error if it has failed."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[None] = loop.create_future()

    def settle() -> None:
        if future.done():  # cancelled
            return
        error = work.error()
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)

    def over(_: Any) -> None:
        try:
            loop.call_soon_threadsafe(settle)
        except RuntimeError:  # the loop was closed meanwhile
            pass

    work.on_done(over)
    yield from future.__await__()
