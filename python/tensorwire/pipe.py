"""Messages of tensors between two processes: one listens, the other connects. Neither needs a group.

::

    listener = tensorwire.Listener()             # in one process
    print(listener.address)                      # goes to the other one
    pipe = listener.accept()
    pipe.send(weights, metadata=b"layer 3")

    pipe = tensorwire.Pipe.connect(address)      # in the other one
    message = pipe.recv()
    message.tensors[0]
"""

from __future__ import annotations

import sys
from importlib import import_module

from tensorwire import _native
from tensorwire.closing import Closing
from tensorwire.errors import MisuseError, UnsupportedError

TYPE_CHECKING = False  # typing's would cost an import that takes longer than all of ours
if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
    from datetime import timedelta
    from typing import Any, Literal, Self, overload

    from tensorwire._native import Member, Memory, _Outgoing, Work

__all__ = ["Incoming", "Listener", "Message", "Part", "Pipe", "Receiving"]

#: What made a tensor, as a number that travels with it. Of Rust, and of what is neither, it is 0.
_OTHER, _NUMPY, _TORCH = range(3)


class Listener(Closing):
    """Where pipes of this process begin. It takes connections until it is closed, or gone; pipes stay.

    Without an address, only processes of this machine can connect that are given ``address``, which holds a secret.
    ``"tcp://0.0.0.0:7000"`` is for other machines, too: who connects needs the key of the job (``TENSORWIRE_KEY``).
    ``"tcp://0.0.0.0:7000/open"`` lets anybody in who reaches the port. Port 0 takes a free one.
    """

    def __init__(self, address: str | None = None) -> None:
        self._native = _native.Listener(address)

    @property
    def address(self) -> str:
        """What a process needs to connect. Hand it over as you would a password."""
        return self._native.address

    def accept(self, timeout: timedelta | float | None = None) -> Pipe:
        """Waits for the next process that connects."""
        return Pipe(self._native.accept(timeout))

    def close(self) -> None:
        """Takes no connections any more. Closing it again does nothing."""
        self._native.close()

    def __repr__(self) -> str:
        # Not all of it: it may hold a secret.
        return f"<tensorwire.Listener at {self.address.split('/')[2]}>"


class Pipe(Closing):
    """One end of a connection between two processes; ``Listener.accept`` and ``Pipe.connect`` give it. Threads may share it.

    ``for message in pipe`` receives until the other end sends no more.
    """

    def __init__(self, native: _native.Pipe) -> None:
        self._native = native

    @classmethod
    def connect(cls, address: str, timeout: timedelta | float | None = None) -> Self:
        """Connects to the listener with this address."""
        return cls(_native.Pipe.connect(address, timeout))

    def send(
        self,
        *tensors: Any,
        metadata: bytes = b"",
        payloads: Iterable[Any] = (),
        delivered: bool = False,
        timeout: timedelta | float | None = None,
        async_op: bool = False,
    ) -> Work:
        """Sends a message of tensors: NumPy's, torch's, or any that speak DLPack or the buffer protocol. Those of CUDA are read behind
        what is on torch's current stream.

        It is over when the tensors may be changed, with ``delivered`` when the reader has them, and with ``async_op`` when the
        work is done that it returns. A message that is small does not wait for the reader. ``payloads`` are bytes, which
        are copied now.
        """
        return self._native.send(*outgoing(tensors, metadata, payloads), delivered, timeout, async_op)

    if TYPE_CHECKING:

        @overload
        def recv(
            self,
            timeout: timedelta | float | None = None,
            *,
            into: Mapping[int, Any] | Sequence[Any] | None = None,
            async_op: Literal[False] = False,
        ) -> Message | None: ...
        @overload
        def recv(
            self,
            timeout: timedelta | float | None = None,
            *,
            into: Mapping[int, Any] | Sequence[Any] | None = None,
            async_op: Literal[True],
        ) -> Receiving: ...

    def recv(
        self,
        timeout: timedelta | float | None = None,
        *,
        into: Mapping[int, Any] | Sequence[Any] | None = None,
        async_op: bool = False,
    ) -> Message | Receiving | None:
        """Receives the next message; None if the other end sends no more.

        A tensor comes into new memory, as a NumPy array or a tensor of torch, as it was sent. One of CUDA comes to the same GPU, or to
        another one where this process does not have it, or to the CPU where it has none. ``into`` says where tensors come
        instead: a list, or a dictionary by their number.

        With ``async_op`` the receive is started: wait for what it returns, or await it. Receives get their messages in the order in
        which they were started. One that is cancelled, or let go, loses no message: the next one gets it.
        """
        if async_op:
            if into is not None:
                raise MisuseError("recv with async_op brings tensors into new memory: say into= without it")
            return Receiving(self._native.recv(timeout))
        incoming = self.next(timeout)
        return None if incoming is None else incoming.read(into, timeout=timeout)

    def next(self, timeout: timedelta | float | None = None) -> Incoming | None:
        """Receives the description of the next message; None if the other end sends no more. Its ``read`` brings the rest."""
        native = self._native.next(timeout)
        return None if native is None else Incoming(native)

    def finish(self) -> None:
        """Says that this end sends no more. It may receive all the same."""
        self._native.finish()

    def close(self) -> None:
        """Closes the pipe; an error if works of ``send`` are not done. Closing it again does nothing."""
        self._native.close()

    def check(self) -> None:
        """Raises if the pipe has failed, or is closed."""
        self._native.check()

    @property
    def peer(self) -> Member:
        """The process at the other end."""
        return self._native.peer

    def explain(self) -> str:
        """Which channel tensors take, and why not those in front of it."""
        return self._native.explain()

    def __iter__(self) -> Iterator[Message]:
        while (message := self.recv()) is not None:
            yield message

    def __repr__(self) -> str:
        return f"<tensorwire.Pipe with process {self.peer.pid} on {self.peer.host}>"


class Receiving:
    """A message that is to come: what a started receive gives, or a started call. ``await`` it, or ``wait``.

    If its await is cancelled, it is withdrawn. The next receive gets the message, even if that was here; the other end of a call
    hears that nobody waits for the answer. The same happens if it is let go.
    """

    def __init__(self, native: _native.Receiving) -> None:
        self._native = native
        #: What has come, once somebody was told.
        self._message: list[Message | None] = []

    def wait(self, timeout: timedelta | float | None = None) -> Message | None:
        """Waits for the message and gives it. With a time-out that passes first, it goes on."""
        if not self._message:
            came = self._native.wait(timeout)
            self._message.append(None if came is None else _came(*came))
        return self._message[0]

    def done(self) -> bool:
        """Whether it is over, well or not."""
        return self._native.done()

    def withdraw(self) -> bool:
        """Withdraws it. False if it is too late: somebody has the message, or it has failed."""
        return self._native.withdraw()

    def __await__(self) -> Generator[Any, None, Message | None]:
        from tensorwire.aio import over

        if not self._message:
            yield from over(self._native)
        # Nothing can be cancelled between this and the end.
        return self.wait()

    def __repr__(self) -> str:
        return f"<tensorwire.pipe.Receiving {'done' if self.done() else 'in flight'}>"


class Message:
    """What has come."""

    __slots__ = ("metadata", "payloads", "tensors")

    def __init__(self, metadata: bytes, payloads: list[memoryview], tensors: list[Any]) -> None:
        #: The bytes that came with the description.
        self.metadata = metadata
        #: The payloads, each a writable memoryview of bytes.
        self.payloads = payloads
        #: The tensors: NumPy's or torch's, as they were sent.
        self.tensors = tensors

    def __repr__(self) -> str:
        count, sizes = len(self.tensors), [len(payload) for payload in self.payloads]
        return f"<tensorwire.pipe.Message of {len(self.metadata)} bytes, payloads of {sizes}, {count} tensors>"


class Part:
    """A tensor of a message, as the description says."""

    __slots__ = ("channel", "dtype", "maker", "shape")

    def __init__(self, dtype: str, shape: tuple[int, ...], channel: str, maker: int) -> None:
        #: The name of its type, like "float32".
        self.dtype = dtype
        self.shape = shape
        #: How it comes: "basic", "xth", "gpu_xth", "share", "gpu_share", "ring", "wire" or "gpu_basic". A view is possible of one that is
        #: "share" or "gpu_share", or comes from a thread of this process ("xth", "gpu_xth").
        self.channel = channel
        self.maker = maker

    def __repr__(self) -> str:
        return f"<tensorwire.pipe.Part {self.dtype} {self.shape}, {self.channel}>"


class Incoming:
    """A message whose description is here. If it is dropped unread, its bytes are dropped as well."""

    def __init__(self, native: _native.Incoming) -> None:
        self._native = native
        #: The bytes that came with the description.
        self.metadata = native.metadata
        #: The sizes of the payloads.
        self.payloads = native.payloads
        #: What its tensors are.
        self.parts = [Part(*part) for part in native.parts]

    def read(
        self,
        into: Mapping[int, Any] | Sequence[Any] | None = None,
        *,
        views: Iterable[int] = (),
        devices: Mapping[int, Any] | None = None,
        timeout: timedelta | float | None = None,
    ) -> Message:
        """Brings the payloads and tensors. After a time-out it may be called again, and goes on.

        ``into`` says where tensors come: a list, or a dictionary by their number; others come into new memory. ``devices`` says of
        which device that is, by the number of the tensor: ``{0: "cpu", 1: "cuda:1"}``. ``views`` are the
        numbers of tensors that are looked at where they are, in memory of the sender, without a copy. Neither side may change
        them then, and the send is not over until they are gone here.

        Tensors of CUDA that have a place or a device are written behind what is on torch's current stream, and are there for what
        comes on it. The others are there on return.
        """
        places = _places(into, len(self.parts))
        for index, tensor in places.items():
            part, maker = self.parts[index], _maker(tensor)
            # What has no shape of its own, like a bytearray, has the one that comes.
            shape = _shape(tensor, maker) if maker != _OTHER else (part.shape, _dense(part.shape))
            self._native.place(index, tensor, shape)
        for index, device in (devices or {}).items():
            self._native.bring_to(index, _ordinal(device))
        for index in views:
            self._native.view(index)
        payloads, memories = self._native.read(timeout)
        tensors = [
            places[index] if index in places else _tensor(part, *memory)
            for index, (part, memory) in enumerate(zip(self.parts, memories))
        ]
        return Message(self.metadata, [memoryview(payload) for payload in payloads], tensors)

    def __repr__(self) -> str:
        return f"<tensorwire.pipe.Incoming of {self.parts}>"


def outgoing(tensors: Iterable[Any], metadata: bytes, payloads: Iterable[Any]) -> _Outgoing:
    """What native code takes of a message."""
    tensors = list(tensors)
    makers = [_maker(tensor) for tensor in tensors]
    shapes = [_shape(tensor, maker) for tensor, maker in zip(tensors, makers)]
    copies = [bytes(memoryview(payload)) for payload in payloads]
    return tensors, shapes, makers, bytes(metadata), copies


def _came(metadata: bytes, parts: list[Any], payloads: list[Memory], memories: list[Any]) -> Message:
    """A message of what native code gives."""
    tensors = [_tensor(Part(*part), *memory) for part, memory in zip(parts, memories)]
    return Message(metadata, [memoryview(payload) for payload in payloads], tensors)


def _maker(tensor: Any) -> int:
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and isinstance(tensor, torch.Tensor):
        return _TORCH
    if numpy is not None and isinstance(tensor, numpy.ndarray):
        return _NUMPY
    return _OTHER


def _shape(tensor: Any, maker: int) -> tuple[Sequence[int], Sequence[int]] | None:
    """Shape and strides in elements; None where the tensor tells in another way."""
    if maker == _TORCH:
        return tuple(tensor.shape), tensor.stride()
    if maker == _NUMPY:
        return tensor.shape, tuple(step // max(tensor.itemsize, 1) for step in tensor.strides)
    return None


def _dense(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a tensor without gaps."""
    steps, step = [], 1
    for size in reversed(shape):
        steps.append(step)
        step *= max(size, 1)
    return tuple(reversed(steps))


def _ordinal(device: Any) -> int | None:
    """The number of a GPU; None for the CPU."""
    kind, _, number = str(device).partition(":")
    if kind == "cpu":
        return None
    if kind != "cuda" or not (number or "0").isdigit():
        raise MisuseError(f"devices={device!r}: a tensor of a pipe comes to 'cpu', 'cuda' or 'cuda:NUMBER'")
    if number:
        return int(number)
    torch = sys.modules.get("torch")
    return 0 if torch is None else torch.cuda.current_device()


def _places(into: Any, count: int) -> dict[int, Any]:
    if into is None:
        return {}
    places = dict(into.items()) if hasattr(into, "items") else dict(enumerate(into))
    places = {index: tensor for index, tensor in places.items() if tensor is not None}
    if any(not 0 <= index < count for index in places):
        raise MisuseError(f"into={list(places)}: the message has {count} tensors")
    return places


def _tensor(part: Part, memory: Memory, steps: tuple[int, ...], start: int) -> Any:
    """A tensor of the kind that was sent, over memory that has come."""
    if part.maker == _TORCH or memory.gpu is not None:
        return _as_torch(part, memory, steps)
    from tensorwire.numpy import numpy_type

    name: Any = part.dtype
    try:
        numpy, kind = numpy_type(name, "a tensor of a pipe")
    except MisuseError:
        numpy, kind = numpy_type(getattr(import_module("ml_dtypes"), name), "a tensor of a pipe")
    if 0 in part.shape:
        return numpy.empty(part.shape, kind)
    return numpy.ndarray(part.shape, kind, memoryview(memory), start, steps)


def _as_torch(part: Part, memory: Memory, steps: tuple[int, ...]) -> Any:
    try:
        import torch
    except ImportError as error:
        text = "receiving this tensor is not available: needs torch, which its sender has, has none; say where it goes with into="
        raise UnsupportedError(text) from error
    kind = getattr(torch, part.dtype, None)
    if not isinstance(kind, torch.dtype):
        text = f"receiving this tensor is not available: needs a torch that knows {part.dtype}, has {torch.__version__}"
        raise UnsupportedError(text)
    if 0 in part.shape:
        return torch.empty(part.shape, dtype=kind, device="cpu" if memory.gpu is None else f"cuda:{memory.gpu}")
    from tensorwire.lease import view_torch

    return view_torch(torch, memory, kind).as_strided(part.shape, [step // kind.itemsize for step in steps])
