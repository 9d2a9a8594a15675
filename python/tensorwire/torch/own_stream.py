"""Work of ours on a GPU, on a stream beside all those that a program has."""

import contextlib
import time
from collections.abc import Iterator

import torch

from tensorwire import _native, errors

#: Seconds between two looks at a stream.
LOOK = 0.00002
#: Seconds that work on our stream may take: a few copies, of which none waits for anybody.
LONGEST = 60


@contextlib.contextmanager
def on_own_stream(device: torch.device) -> Iterator[None]:
    """Has torch work on a stream that only this module uses; what was put on it is done at the end.

    So nobody has to be ordered with it, and what is freed there is in use by nobody. torch's own streams are shared by all: it
    has 32 of them, and deals them in turn. On the CPU it does nothing.
    """
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.ExternalStream(_native._own_stream(device.index), device=device)
    with torch.cuda.stream(stream):
        try:
            yield
        finally:
            wait(stream, time.monotonic() + LONGEST, "a copy of ours on a GPU", "what was queued there in the same call")


def hand_over(tensor: torch.Tensor, stream: torch.cuda.Stream) -> None:
    """Says that a tensor that was made on our stream is used on a stream of the program: its memory is given to somebody else
    only when that stream is done with it."""
    if tensor.layout is torch.sparse_coo:
        parts = [tensor._indices(), tensor._values()]
    elif tensor.layout is torch.sparse_csr:
        parts = [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    elif tensor.layout is torch.sparse_csc:
        parts = [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    else:
        parts = [tensor]
    for part in parts:
        part.record_stream(stream)


def wait(
    stream: torch.cuda.Stream, end: float, what: str, behind: str = "work that torch's current stream had to do before"
) -> None:
    """Waits until a stream has done what it has to do now, until a time of the monotonic clock at most."""
    event = stream.record_event()
    while not event.query():
        if time.monotonic() > end:
            raise errors.raised["TimeoutError"](f"{what} waited for {behind}; look at the GPU, or give it more time")
        time.sleep(LOOK)
