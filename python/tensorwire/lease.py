"""Tensors for other processes of this host, without a copy: share() lends one, open() makes a tensor of its token."""

from __future__ import annotations

import atexit
import struct
import sys

from tensorwire import _native
from tensorwire._native import Lease, Token, collect
from tensorwire.errors import MisuseError, UnsupportedError

TYPE_CHECKING = False  # typing's would cost an import that takes longer than all of ours
if TYPE_CHECKING:
    from datetime import timedelta
    from typing import Any

    from tensorwire._native import Memory

__all__ = ["Lease", "Token", "collect", "lease_stats", "open", "share"]

#: What was copied because it could not be shared, since the start: tensors and bytes.
_copied = [0, 0]
#: What the warning at the end of the process adds where tokens were never opened.
advice: str | None = None


def share(tensor: Any, *, uses: int = 1, lifetime: float | None = 600.0, copy: bool = False) -> Lease:
    """Lends a NumPy array or a torch tensor: whoever opens the lease's token has the same memory.

    The lease says who holds the memory, and takes it back. Pickled, it is its token, so it can be put into any queue. The
    memory stays for ``uses`` openings, also when the tensor and the lease are gone here, and until all who opened it have
    let go of it. A token that nobody opens expires after ``lifetime`` seconds, with a warning; None means: not as long as
    this process lives. Memory of a GPU can be shared, and memory of ``tensorwire.empty``, ``alloc`` and
    ``open`` and of ``tensorwire.torch.empty``. Other memory is refused, or with ``copy=True`` copied once, which is
    logged and counted in ``lease_stats()``.
    """
    if not isinstance(uses, int) or not 0 <= uses < 1 << 16:
        raise MisuseError(f"uses={uses!r}: a number of openings from 0 to 65,535 is needed")
    lease = try_share(tensor, uses, lifetime, copy)
    if lease is None and copy:
        lease = try_share(_copy(tensor), uses, lifetime, copy)
    if lease is None:
        raise UnsupportedError(
            "sharing this memory is not available: needs memory that other processes can map, has ordinary memory, or "
            "that of a parent process; make the tensor with tensorwire.empty() or tensorwire.torch.empty(), or say "
            "copy=True"
        )
    return lease


def open(token: Token | Lease, *, timeout: timedelta | float | None = None) -> Any:
    """The tensor of a token: of the kind that was shared, in the same memory. It is let go when it is gone here.

    On a GPU its data is ready for torch's current stream, and it is let go when the stream that is current then has
    come so far. ``timeout`` is how long the owner may take to answer (300 s unless given).
    """
    if isinstance(token, Lease):
        token = token.token
    if not isinstance(token, Token):
        raise MisuseError(f"tensorwire.open() takes a token that tensorwire.share() gave, not a {type(token).__name__}")
    layout = Layout.parse(token.note, token.nbytes)
    if layout.kind == NUMPY:
        return _open_numpy(token, layout, timeout)
    return _open_torch(token, layout, timeout)


def lease_stats() -> dict[str, int]:
    """What this process has shared, in numbers: tokens and bytes that are granted (not over), redeemed (held by
    somebody), waiting (dropped here, needed elsewhere), expired and copied since the start, and how many other processes
    have opened something."""
    return _native.lease_stats() | {"copied": _copied[0], "copied_bytes": _copied[1]}


NUMPY, TORCH = 0, 1
REQUIRES_GRAD, PARAMETER, READ_ONLY = 1, 2, 4
_VERSION = 1
_HEAD = struct.Struct("<BBBBH")


class Layout:
    """What the bytes of a token mean. It travels beside the memory, as plain numbers."""

    __slots__ = ("dtype", "flags", "kind", "shape", "start", "steps")

    def __init__(
        self, kind: int, flags: int, dtype: str, shape: tuple[int, ...], steps: tuple[int, ...], start: int
    ) -> None:
        self.kind, self.flags, self.dtype = kind, flags, dtype
        #: Strides in bytes, and where the first element is.
        self.shape, self.steps, self.start = shape, steps, start

    def write(self) -> bytes:
        name, ndim = self.dtype.encode(), len(self.shape)
        head = _HEAD.pack(_VERSION, self.kind, self.flags, ndim, len(name))
        return head + name + struct.pack(f"<{2 * ndim + 1}q", *self.shape, *self.steps, self.start)

    @classmethod
    def parse(cls, note: bytes, nbytes: int) -> Layout:
        """Refuses what is not exactly a layout, and one that is not inside so many bytes."""
        try:
            version, kind, flags, ndim, length = _HEAD.unpack_from(note)
            if version != _VERSION:
                raise MisuseError(
                    f"the token's layout has version {version}, and this tensorwire knows version {_VERSION}: use the "
                    "same on both sides"
                )
            name = note[_HEAD.size : _HEAD.size + length].decode()
            numbers = struct.unpack(f"<{2 * ndim + 1}q", note[_HEAD.size + length :])
        except (struct.error, UnicodeDecodeError) as error:
            text = "the token says nothing about a tensor, or its note is damaged; was it made by share()?"
            raise MisuseError(text) from error
        shape, steps, start = numbers[:ndim], numbers[ndim : 2 * ndim], numbers[-1]
        layout = cls(kind, flags, name, shape, steps, start)
        if kind not in (NUMPY, TORCH) or flags >= 8 or any(size < 0 for size in shape):
            raise MisuseError("the token describes a tensor that cannot be; was it made by share()?")
        if 0 not in shape:
            low, high = extent(shape, steps)
            if start + low < 0 or start + high >= nbytes:
                raise MisuseError(f"the token describes a tensor that is not inside its {nbytes} bytes")
        return layout

    def check(self, itemsize: int, nbytes: int) -> None:
        """Refuses elements that do not end inside the memory."""
        if 0 not in self.shape and self.start + extent(self.shape, self.steps)[1] + itemsize > nbytes:
            raise MisuseError(f"the token describes a tensor that is not inside its {nbytes} bytes")


def extent(shape: tuple[int, ...], steps: tuple[int, ...]) -> tuple[int, int]:
    """Where the lowest and the highest element begin, in bytes from the first one."""
    low = high = 0
    for size, step in zip(shape, steps):
        if step < 0:
            low += (size - 1) * step
        else:
            high += (size - 1) * step
    return low, high


def try_share(tensor: Any, uses: int, lifetime: float | None, copy: bool = False) -> Lease | None:
    """The lease; None where the memory is one that cannot be shared."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(tensor, torch.Tensor):
        return _share_torch(torch, tensor, uses, lifetime, copy)
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(tensor, numpy.ndarray):
        return _share_numpy(numpy, tensor, uses, lifetime)
    raise MisuseError(f"tensorwire.share() takes a NumPy array or a torch tensor, not a {type(tensor).__name__}")


def _share_numpy(numpy: Any, array: Any, uses: int, lifetime: float | None) -> Lease | None:
    # Not numpy.ma: that would import it, and a child that is forked meanwhile would wait for the import for ever.
    if isinstance(array, getattr(sys.modules.get("numpy.ma"), "MaskedArray", ())):
        raise MisuseError("a masked array is two arrays: share its data and its mask")
    shape, steps, item = array.shape, array.strides, array.dtype.itemsize
    low, high = (0, -item) if 0 in shape else extent(shape, steps)
    flags = 0 if array.flags.writeable else READ_ONLY
    note = Layout(NUMPY, flags, _numpy_name(numpy, array.dtype), shape, steps, -low).write()
    address = array.__array_interface__["data"][0] + low
    return _native.share(address, high - low + item, array, uses=uses, lifetime=lifetime, note=note)


def _share_torch(torch: Any, tensor: Any, uses: int, lifetime: float | None, copy: bool) -> Lease | None:
    if tensor.requires_grad and not tensor.is_leaf:
        raise MisuseError(
            "a tensor that autograd has computed cannot go to another process with its graph: share tensor.detach()"
        )
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        text = f"a tensor of layout {tensor.layout} and type {tensor.dtype} is not one piece of memory; share its parts"
        raise MisuseError(text)
    if tensor.is_conj() or tensor.is_neg():
        if not copy:
            raise MisuseError(
                "a conjugated or negated view: its memory holds other values; call resolve_conj() or resolve_neg() "
                "first"
            )
        tensor = _count(tensor.detach().resolve_conj().resolve_neg().requires_grad_(tensor.requires_grad))
    device = tensor.device
    if device.type not in ("cpu", "cuda"):
        raise UnsupportedError(f"sharing a tensor on {device} is not available: needs one on the CPU or a CUDA device")
    item, shape = tensor.element_size(), tuple(tensor.shape)
    steps = tuple(stride * item for stride in tensor.stride())
    nbytes = 0 if 0 in shape else extent(shape, steps)[1] + item
    flags = REQUIRES_GRAD if tensor.requires_grad else 0
    if isinstance(tensor, torch.nn.Parameter):
        flags |= PARAMETER
    note = Layout(TORCH, flags, str(tensor.dtype).removeprefix("torch."), shape, steps, 0).write()
    terms = {"uses": uses, "lifetime": lifetime, "note": note}
    if device.type == "cpu":
        return _native.share(tensor.data_ptr(), nbytes, None, **terms)
    index, storage = device.index, tensor.untyped_storage()
    stream = torch._C._cuda_getCurrentRawStream(index)
    try:
        return _native.share(tensor.data_ptr(), nbytes, storage, gpu=index, stream=stream, **terms)
    except UnsupportedError:
        if not copy:
            raise
        # The pool that it is from does not let it out.
        place = view_torch(torch, _native.alloc(max(nbytes, 1), index), tensor.dtype)
        place = place.as_strided(shape, tensor.stride()).copy_(_count(tensor.detach()))
        return _native.share(place.data_ptr(), nbytes, place.untyped_storage(), gpu=index, stream=stream, **terms)


def _copy(tensor: Any) -> Any:
    """The same values in shared memory of the host."""
    _count(tensor)
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(tensor, numpy.ndarray):
        from tensorwire.numpy import empty

        copied = empty(tensor.shape, tensor.dtype)
        copied[...] = tensor
        copied.flags.writeable = tensor.flags.writeable
        return copied
    import torch

    from tensorwire.torch import memory

    with torch.no_grad():
        copied = memory.empty_like(tensor).copy_(tensor)
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(copied, requires_grad=tensor.requires_grad)
    return copied.requires_grad_(tensor.requires_grad)


def _count(tensor: Any) -> Any:
    """Says that a tensor is copied."""
    import logging

    _copied[0] += 1
    _copied[1] += tensor.nbytes
    logging.getLogger("tensorwire").info(
        "share() copies %d bytes, as copy=True allows: memory of tensorwire.empty() needs no copy", tensor.nbytes
    )
    return tensor


def _imported(name: str, title: str) -> Any:
    """The library that the maker of a token used."""
    try:
        return __import__(name)
    except ImportError as error:
        raise UnsupportedError(
            f"opening this token is not available: needs {title} (pip install {name}), which its maker has, has none"
        ) from error


def _open_numpy(token: Token, layout: Layout, timeout: timedelta | float | None) -> Any:
    numpy = _imported("numpy", "NumPy")
    if token.device != "cpu":
        raise MisuseError("the token describes a NumPy array on a GPU; was it made by share()?")
    dtype = _numpy_type(numpy, layout.dtype)
    layout.check(dtype.itemsize, token.nbytes)
    memory = _native.open(token, timeout)
    if memory.nbytes == 0:
        array = numpy.ndarray(layout.shape, dtype, strides=layout.steps)
    else:
        array = numpy.ndarray(layout.shape, dtype, memoryview(memory), layout.start, layout.steps)
    if layout.flags & READ_ONLY:
        array.flags.writeable = False
    return array


def _open_torch(token: Token, layout: Layout, timeout: timedelta | float | None) -> Any:
    torch = _imported("torch", "torch")
    dtype = getattr(torch, layout.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise UnsupportedError(
            f"opening this token is not available: needs a torch that knows {layout.dtype}, has {torch.__version__}"
        )
    layout.check(dtype.itemsize, token.nbytes)
    if layout.start or any(step < 0 or step % dtype.itemsize for step in layout.steps):
        raise MisuseError("the token describes a torch tensor that cannot be; was it made by share()?")
    on_gpu = token.device != "cpu"
    if on_gpu:
        torch.cuda.init()
    memory = _native.open(token, timeout)
    strides = [step // dtype.itemsize for step in layout.steps]
    if memory.nbytes == 0:
        device = f"cuda:{memory.gpu}" if on_gpu else "cpu"
        tensor = torch.empty_strided(layout.shape, strides, dtype=dtype, device=device)
    else:
        tensor = view_torch(torch, memory, dtype).as_strided(layout.shape, strides)
    requires_grad = bool(layout.flags & REQUIRES_GRAD)
    if layout.flags & PARAMETER:
        return torch.nn.Parameter(tensor, requires_grad=requires_grad)
    return tensor.requires_grad_() if requires_grad else tensor


def view_torch(torch: Any, memory: Memory, dtype: Any) -> Any:
    """All of the memory as one flat tensor, which keeps it."""
    if memory.gpu is None:
        flat = torch.frombuffer(memory, dtype=torch.uint8)
    else:
        flat = bytes_on_gpu(torch, memory)
    size = memory.nbytes // dtype.itemsize * dtype.itemsize
    return flat[:size].view(dtype)


def bytes_on_gpu(torch: Any, memory: Memory, far: bool = False) -> Any:
    """All of the memory as bytes. What is `far` lies on another GPU than the one whose streams use it."""
    device = torch.device("cuda", memory.gpu)
    try:
        # torch would copy what is far.
        if not far:
            return torch.as_tensor(memory, device=device)
    except RuntimeError as error:
        # torch needs NumPy to understand the interface of an array, even one of bytes.
        if "umpy" not in str(error):
            raise
    address = memory.__cuda_array_interface__["data"][0]
    storage = torch._C._construct_storage_from_data_pointer(address, device, memory.nbytes)
    # An attribute lives as long as the storage, also when Python has only tensors of it.
    storage._tensorwire_memory = memory
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


def _numpy_name(numpy: Any, dtype: Any) -> str:
    """A type as text: as NumPy's files have it, or the name of one that only an extension knows."""
    if dtype.hasobject:
        text = f"an array of {dtype} holds references to Python objects, which other processes cannot follow"
        raise MisuseError(text)
    if dtype.names is not None or dtype.subdtype is not None:
        return repr(numpy.lib.format.dtype_to_descr(dtype))
    text: str = dtype.str
    return text if numpy.dtype(text) == dtype else dtype.name


def _numpy_type(numpy: Any, name: str) -> Any:
    try:
        if name.startswith(("[", "(", "{")):
            from ast import literal_eval

            dtype = numpy.lib.format.descr_to_dtype(literal_eval(name))
        else:
            dtype = numpy.dtype(name)
    except (TypeError, ValueError, SyntaxError, KeyError) as unknown:
        try:
            import ml_dtypes

            dtype = numpy.dtype(getattr(ml_dtypes, name))
        except (ImportError, AttributeError, TypeError):
            raise UnsupportedError(
                f"opening this token is not available: needs the type {name!r} (pip install ml_dtypes), has NumPy's"
            ) from unknown
    if dtype.hasobject:
        raise MisuseError(f"the token describes an array of {dtype}; was it made by share()?")
    return dtype


def _say_what_is_outstanding() -> None:
    """When the process ends: what others still hold stays valid, but what nobody has opened is lost."""
    util = sys.modules.get("multiprocessing.util")
    if util is not None and not util.is_exiting():
        # It has yet to wait for the process's children, who may still open what was sent to them.
        util.Finalize(None, _say_what_is_outstanding, exitpriority=-1000)
        return
    text = _native.outstanding()
    if text is not None:
        import logging

        if advice is not None and "not redeemed" in text:
            text = f"{text}; {advice}"
        # A child of multiprocessing that ends with messages that nobody has read is what a DataLoader has that is left
        # early; whoever reads one later is told. What somebody holds is worth a warning everywhere.
        processes = sys.modules.get("multiprocessing.process")
        is_child = processes is not None and processes.parent_process() is not None
        unread = is_child and not _native.lease_stats()["redeemed"]
        logging.getLogger("tensorwire").log(
            logging.INFO if unread else logging.WARNING, "at the end of the process, %s", text
        )


atexit.register(_say_what_is_outstanding)
