"""Operations in flight, as torch sees them."""

import contextlib
import datetime
import threading
import time
from collections.abc import Callable, Generator
from typing import Any, Protocol

import torch
from torch._C._distributed_c10d import ProcessGroup
from torch._C._distributed_c10d import Work as TorchWork
from torch.futures import Future

from tensorwire import aio
from tensorwire.torch import errors, registry

NONE = datetime.timedelta()
_registered, _found = registry.size, registry._found
#: Before 2.14 torch does not see what our process group is asked to do.
_NOTES = not hasattr(ProcessGroup, "all_gather_single")


class Flight(Protocol):
    """What tensorwire.Work offers. The classes below are flights that are not one native operation."""

    name: str
    duration: float | None
    source: int | None
    gpu: int | None

    def wait(self, timeout: datetime.timedelta | float | None = None) -> None: ...
    def done(self) -> bool: ...
    def error(self) -> BaseException | None: ...
    def on_done(self, callback: Callable[[Any], None]) -> None: ...
    def _on_over(self, callback: Callable[[Any], None]) -> None: ...
    def _on_queued(self, callback: Callable[[Any], None]) -> None: ...
    def _has_failed(self) -> bool: ...
    def withdraw(self) -> bool: ...


class Work(TorchWork):
    """An operation of a group. The tensors stay alive for as long as it is in flight."""

    # Most works need none of these: then the class has them.
    _source = -1
    _future: Future | None = None
    # The span of this operation where a profiler runs: a profile.Span.
    span: Any = None
    # Whether it began when the group measured how long works take.
    timed = False

    def __init__(self, flight: Flight, tensors: list, sequence: int, source: int = -1) -> None:
        TorchWork.__init__(self)
        self._flight = flight
        self._tensors = tensors
        self._sequence = sequence
        if source >= 0:
            self._source = source
        if _NOTES and registry.is_on():
            registry.note(self, tensors)

    def wait(self, timeout: datetime.timedelta = NONE) -> bool:
        """Waits until it is over; raises how it failed. Zero means the operation's own time-out only.

        On CUDA tensors the current stream waits, and this thread only until the operation is queued; with a time-out, this
        thread waits for the end."""
        if _found and registry.is_found(self):
            return True
        try:
            self._flight.wait(timeout if timeout > NONE else None)
        except BaseException:
            if _registered() and self._flight.done():
                registry.forget(self, self._tensors)
            raise
        if _registered():
            registry.forget(self, self._tensors)
        # A profile that is read now has its end. On a GPU that would hold this thread until the GPU is done.
        if self.span is not None and self._flight.gpu is None:
            self.span.over.wait(1.0)
        return True

    def synchronize(self) -> None:
        """Makes the results safe to use: on the CPU that means to wait, on CUDA the current stream waits."""
        self.wait()

    def block_current_stream(self) -> None:
        """The same."""
        self.wait()

    def is_completed(self) -> bool:
        return self._flight.done()

    def is_success(self) -> bool:
        return self._flight.done() and self._flight.error() is None

    def exception(self) -> BaseException | None:
        return self._flight.error() if self._flight.done() else None

    def result(self) -> list:
        # What is on a stream may be used behind it.
        if self._flight.gpu is None and not self._flight.done():
            raise errors.misuse("the result of an operation that is not over yet; call wait() first")
        return self._tensors

    def get_future(self) -> Future:
        """Completes with the tensors, or with the error. Made when it is asked for first: most works need none."""
        with _lock:
            if self._future is not None:
                return self._future
            gpu = self._flight.gpu
            base: Future = Future() if gpu is None else Future(devices=[torch.device("cuda", gpu)])
            # An exception that is set on a future reaches C++ as a value; one that is raised in a callback as an error.
            self._future = future = base.then(self._finish)
        if gpu is None:
            self._flight.on_done(lambda _: base.set_result(None))
        else:
            self._flight._on_queued(lambda flight: _complete(base, flight, self._tensors))
        return future

    def get_future_result(self) -> Future:
        """Completes with a WorkResult as a number: 0 success, 1 time-out, 2 trouble with a peer, 100 other."""
        base: Future = Future()
        future = base.then(lambda _: _verdict(self._flight.error()))
        self._flight.on_done(lambda _: base.set_result(None))
        return future

    def source_rank(self) -> int:
        """The rank that a message came from."""
        source = self._flight.source
        source = self._source if source is None else source
        if source < 0:
            raise errors.misuse(f"only a received message has a source; this is {self._flight.name}")
        return source

    _source_rank = source_rank

    def _get_duration(self) -> float:
        """Milliseconds of its execution."""
        if not self.timed:
            raise errors.misuse(
                "getDuration only works if timing was enabled: call _enable_collectives_timing() of the process group before "
                f"the operation begins; this {self._flight.name} began without it"
            )
        duration = self._flight.duration
        if duration is None:
            raise errors.misuse("the duration of an operation that is not over yet; call wait() first")
        return duration * 1e3

    def _get_sequence_number(self) -> int:
        return self._sequence

    def abort(self) -> None:
        raise errors.unsupported("one operation cannot be aborted alone; abort its group, or give it a time-out")

    def __await__(self) -> Generator[Any, None, list]:
        yield from aio.wait(self._flight)
        self.wait()
        return self._tensors

    def __repr__(self) -> str:
        state = "failed" if self._flight._has_failed() else "done" if self._flight.done() else "in flight"
        return f"<tensorwire.torch.Work {self._flight.name} {state}>"

    def _finish(self, _: Future) -> list:
        # Of what is only queued, how it ends is told by the next call.
        error = self._flight.error() if self._flight.done() else None
        if error is not None:
            raise error
        return self._tensors


def _complete(future: Future, flight: Flight, tensors: list) -> None:
    """Completes a future of a GPU in the order of its streams: whoever waits for it has its stream wait. torch marks the
    streams of the GPUs that the value lives on, so that the value must be the tensors themselves."""
    stream = torch.cuda.Stream(flight.gpu)
    try:
        with torch.cuda.stream(stream):
            # An error is told by whoever asks the flight for it.
            with contextlib.suppress(Exception):
                flight.wait()
            future.set_result(tensors)
    except BaseException as error:  # Nobody may wait for ever.
        if not future.done():
            future.set_exception(error if isinstance(error, Exception) else RuntimeError(str(error)))


class Together:
    """Several operations as one."""

    source = None

    def __init__(self, name: str, flights: list[Flight]) -> None:
        self.name = name
        self.flights = flights

    def wait(self, timeout: datetime.timedelta | float | None = None) -> None:
        if isinstance(timeout, datetime.timedelta):
            timeout = timeout.total_seconds()
        end = None if timeout is None else time.monotonic() + timeout
        for flight in self.flights:
            flight.wait(None if end is None else max(end - time.monotonic(), 0.0))

    def done(self) -> bool:
        return all(flight.done() for flight in self.flights)

    def error(self) -> BaseException | None:
        return next((error for flight in self.flights if (error := flight.error()) is not None), None)

    def on_done(self, callback: Callable[[Any], None]) -> None:
        self._after_each([flight.on_done for flight in self.flights], callback)

    def _on_over(self, callback: Callable[[Any], None]) -> None:
        self._after_each([flight._on_over for flight in self.flights], callback)

    def _on_queued(self, callback: Callable[[Any], None]) -> None:
        self._after_each([flight._on_queued for flight in self.flights], callback)

    def _has_failed(self) -> bool:
        return any(flight._has_failed() for flight in self.flights)

    @property
    def gpu(self) -> int | None:
        return next((flight.gpu for flight in self.flights if flight.gpu is not None), None)

    def withdraw(self) -> bool:
        """The receives among them are withdrawn; the rest goes on."""
        return any([flight.withdraw() for flight in self.flights])

    def _after_each(self, hooks: list[Callable], callback: Callable[[Any], None]) -> None:
        left = len(hooks)
        if not left:
            callback(self)
            return
        lock = threading.Lock()

        def one(_: Flight) -> None:
            nonlocal left
            with lock:
                left -= 1
                last = left == 0
            if last:
                callback(self)

        for hook in hooks:
            hook(one)

    @property
    def duration(self) -> float | None:
        durations = [flight.duration for flight in self.flights]
        return None if None in durations else max(durations, default=0.0)


#: For the little state above that two threads may meet in; held for a moment only.
_lock = threading.Lock()


def _verdict(error: BaseException | None) -> int:
    if error is None:
        return 0
    if isinstance(error, TimeoutError):
        return 1
    return 2 if isinstance(error, errors.errors.PeerError) else 100
