"""Calls by name over a pipe: bytes and tensors go there, and bytes and tensors come back.

::

    rpc = tensorwire.rpc.Rpc(pipe, {"add": add})     # one end
    rpc.wait()                                       # until the other end has closed

    def add(call):
        first, second = call.read().tensors
        return first + second

    rpc = tensorwire.rpc.Rpc(pipe)                   # the other end
    answer = rpc.call("add", first, second)
    answer.tensors[0]

Both ends may call and be called. Nothing is pickled: how arguments become ``metadata`` is up to the program.
"""

from __future__ import annotations

from tensorwire import _native
from tensorwire.closing import Closing
from tensorwire.errors import MisuseError, TensorwireError
from tensorwire.pipe import Incoming, Message, Pipe, Receiving, outgoing

TYPE_CHECKING = False  # typing's would cost an import that takes longer than all of ours
if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
    from datetime import timedelta
    from typing import Any, Literal, overload

    from tensorwire._native import Member, _Outgoing

__all__ = ["Answer", "Answering", "Call", "Rpc"]


class Answer:
    """What a handler gives back, where that is more than bytes or tensors."""

    __slots__ = ("metadata", "payloads", "tensors")

    def __init__(self, *tensors: Any, metadata: bytes = b"", payloads: Iterable[Any] = ()) -> None:
        self.tensors = tensors
        self.metadata = metadata
        self.payloads = payloads


class Rpc(Closing):
    """One end of a pipe that calls what the other end has, and answers its calls.

    ``handlers`` are functions by their names. Each is given a ``Call``, on a thread of the library, and gives back None, bytes, a
    tensor, a tuple or list of tensors, or an ``Answer``. If it raises, the caller gets an error with the name of the call and the text.
    Tensors of CUDA are read behind what is on the current stream of its thread when it returns.

    ``threads`` calls run at a time. Others wait, and begin in the order in which they were made. The pipe is used up: it sends and
    receives nothing else from now on. Threads may share this. Close it when you are done: the handlers are kept until then.
    """

    def __init__(
        self, pipe: Pipe, handlers: Mapping[str, Callable[[Call], Any]] | None = None, *, threads: int = 8
    ) -> None:
        own = dict(handlers or {})
        if threads < 1:
            raise MisuseError(f"threads={threads}: at least one is needed")

        def answer(native: _native.Call) -> _Outgoing:
            return _outgoing(own[native.name](Call(native)))

        self._native = _native.Rpc(pipe._native, list(own), answer, threads)

    if TYPE_CHECKING:

        @overload
        def call(
            self,
            name: str,
            *tensors: Any,
            metadata: bytes = b"",
            payloads: Iterable[Any] = (),
            into: Mapping[int, Any] | Sequence[Any] | None = None,
            timeout: timedelta | float | None = None,
            async_op: Literal[False] = False,
        ) -> Message: ...
        @overload
        def call(
            self,
            name: str,
            *tensors: Any,
            metadata: bytes = b"",
            payloads: Iterable[Any] = (),
            into: Mapping[int, Any] | Sequence[Any] | None = None,
            timeout: timedelta | float | None = None,
            async_op: Literal[True],
        ) -> Answering: ...

    def call(
        self,
        name: str,
        *tensors: Any,
        metadata: bytes = b"",
        payloads: Iterable[Any] = (),
        into: Mapping[int, Any] | Sequence[Any] | None = None,
        timeout: timedelta | float | None = None,
        async_op: bool = False,
    ) -> Message | Answering:
        """Calls what the other end has by this name, and waits for the answer. The tensors may be changed then. Those of CUDA are read
        behind what is on torch's current stream.

        ``into`` says where tensors of the answer come, as in ``Pipe.recv``. If the time-out passes, or Ctrl-C ends the wait, the other end
        hears that nobody waits any more. With ``async_op`` the call is started: wait for what it returns, or await it. The other end
        hears it if that is withdrawn, cancelled or let go.
        """
        message = outgoing(tensors, metadata, payloads)
        if async_op:
            if into is not None:
                raise MisuseError("a call with async_op brings tensors into new memory: say into= without it")
            return Answering(self._native.start(name, message, timeout))
        return Incoming(self._native.call(name, message, timeout)).read(into, timeout=timeout)

    def wait(self, timeout: timedelta | float | None = None) -> None:
        """Waits until the other end has closed. Calls are answered meanwhile, and also if nobody waits. None waits without an end."""
        self._native.wait(timeout)

    def close(self) -> None:
        """Closes the pipe: calls that are not answered fail. Closing it again does nothing."""
        self._native.close()

    @property
    def peer(self) -> Member:
        """The process at the other end."""
        return self._native.peer

    def explain(self) -> str:
        """Which channel tensors take, and why not those in front of it."""
        return self._native.explain()

    def __repr__(self) -> str:
        return f"<tensorwire.rpc.Rpc with process {self.peer.pid} on {self.peer.host}>"


class Answering(Receiving):
    """The answer of a call that was started."""

    def wait(self, timeout: timedelta | float | None = None) -> Message:
        """Waits for the answer and gives it. With a time-out that passes first, the call goes on."""
        answer = super().wait(timeout)
        if answer is None:
            raise TensorwireError("this is a fault of tensorwire, please report it: an answer that is none")
        return answer

    def __await__(self) -> Generator[Any, None, Message]:
        yield from super().__await__()
        return self.wait()


class Call(Incoming):
    """A call that a handler answers: the description of its message. ``read`` brings the rest, as for a message that was received.

    The call is over for its caller when the views of its tensors are gone, too: an answer must not hold any.
    """

    def __init__(self, native: _native.Call) -> None:
        super().__init__(native.incoming)
        self._call = native

    @property
    def name(self) -> str:
        """What was called."""
        return self._call.name

    @property
    def wanted(self) -> bool:
        """Whether somebody waits for the answer: the caller has not given the call up, and its time-out has not passed."""
        return self._call.wanted

    @property
    def left(self) -> float:
        """Seconds until nobody waits for the answer any more. It is a good time-out for what the handler waits for."""
        return self._call.left

    def __repr__(self) -> str:
        return f"<tensorwire.rpc.Call of {self.name!r} with {self.parts}>"


def _outgoing(answer: Any) -> _Outgoing:
    if answer is None:
        return outgoing((), b"", ())
    if isinstance(answer, (bytes, bytearray)):
        return outgoing((), bytes(answer), ())
    if isinstance(answer, (tuple, list)):
        return outgoing(answer, b"", ())
    if isinstance(answer, (Answer, Message)):
        return outgoing(answer.tensors, answer.metadata, answer.payloads)
    return outgoing((answer,), b"", ())
