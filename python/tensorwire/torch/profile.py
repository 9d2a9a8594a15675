"""Spans for torch's profilers: ``tensorwire:all_reduce`` from the call to the end of the operation.

``torch.autograd.profiler.emit_nvtx()`` is a profiler, too: there a span is a range of NVTX, which tools like Nsight Systems
show.
"""

import threading

import torch
from torch.futures import Future

from tensorwire.torch.work import Flight

#: Whether a profiler runs on this thread. Cheap: asked at each operation.
enabled = torch.autograd._profiler_enabled

_enter = torch._C._autograd._record_function_with_args_enter
_end_with = torch.ops.profiler._call_end_callbacks_on_jit_fut._RecordFunction


#: The kind of the profiler that runs on this thread.
_kind = torch._C._autograd._profiler_type
_NVTX = torch._C._profiler.ActiveProfilerType.NVTX


def span(title: str, inputs: list[torch.Tensor]) -> "Span | Range":
    """A span that begins now, for the profiler that runs."""
    return Range(title) if _kind() == _NVTX else Span(title, inputs)


class Range:
    """One operation as a range of NVTX. It may end on another thread, which what torch makes of its own spans may not."""

    def __init__(self, title: str) -> None:
        self.over = threading.Event()
        self._number = torch.cuda.nvtx.range_start(f"tensorwire:{title}")

    def follow(self, flight: Flight) -> None:
        """Ends with it."""
        flight._on_over(lambda _: self.cancel())

    def cancel(self) -> None:
        """Ends now."""
        try:
            torch.cuda.nvtx.range_end(self._number)
        finally:
            self.over.set()


class Span:
    """One operation in a profile."""

    def __init__(self, title: str, inputs: list[torch.Tensor]) -> None:
        self.over = threading.Event()
        self._thread = threading.get_ident()
        self._future: Future = Future()
        record = _enter(f"tensorwire:{title}", *inputs)
        with torch._C.DisableTorchFunctionSubclass():
            _end_with(record, self._future)

    def follow(self, flight: Flight) -> None:
        """Ends with it."""
        flight._on_over(self._end)

    def cancel(self) -> None:
        """Ends now: the operation was refused."""
        self._set()

    def _end(self, _: Flight) -> None:
        # The profiler takes an event that ends on the thread where it began for a function of this thread, into which
        # everything else that ran meanwhile is nested; and torch's own backends never look like that.
        if threading.get_ident() == self._thread:
            threading.Thread(target=self._set, daemon=True).start()
        else:
            self._set()

    def _set(self) -> None:
        try:
            self._future.set_result(None)
        finally:
            self.over.set()
