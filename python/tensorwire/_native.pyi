"""The part of tensorwire that is written in Rust. Import its names from ``tensorwire``."""

from collections.abc import Callable, Generator, Sequence
from datetime import timedelta
from os import PathLike
from types import TracebackType
from typing import Any, Literal, Protocol, Self, TypeAlias, TypeVar, final, overload

from typing_extensions import Buffer

__all__ = [
    "Call",
    "Calls",
    "FileStore",
    "Group",
    "Incoming",
    "Lease",
    "Listener",
    "Member",
    "Memory",
    "MemoryStore",
    "Pipe",
    "PrefixStore",
    "Receiving",
    "Rpc",
    "Store",
    "Symmetric",
    "TcpServer",
    "TcpStore",
    "Token",
    "Work",
    "_CHANNELS",
    "__version__",
    "_own_stream",
    "alloc",
    "collect",
    "is_shared",
    "is_strict",
    "last_words",
    "lease_stats",
    "main",
    "open",
    "open_event",
    "open_file",
    "operation_on",
    "outstanding",
    "pooled",
    "rendezvous",
    "share",
]

__version__: str

# How many signals of a pair of ranks are told apart.
_CHANNELS: int

class _SpeaksDLPack(Protocol):
    def __dlpack__(self) -> Any: ...
    def __dlpack_device__(self) -> tuple[Any, int]: ...

# A tensor on the CPU: torch's, NumPy's, any that speaks DLPack or the buffer protocol. Outputs must be writable.
_Tensor: TypeAlias = Buffer | _SpeaksDLPack
_Op: TypeAlias = (
    Literal["sum", "product", "min", "max", "avg", "band", "bor", "bxor"] | tuple[Literal["premul_sum"], float]
)
_Timeout: TypeAlias = timedelta | float
#: A shape, and strides in elements.
_Shape: TypeAlias = tuple[Sequence[int], Sequence[int]]
#: Memory of a tensor, its strides in bytes, and where its first element is.
_Place: TypeAlias = tuple[Memory, tuple[int, ...], int]
#: Tensors with their shapes, what made each, metadata and payloads.
_Outgoing: TypeAlias = tuple[Sequence[_Tensor], Sequence[_Shape | None], Sequence[int], bytes, Sequence[bytes]]
_S = TypeVar("_S")

def alloc(nbytes: int, gpu: int | None = None) -> Memory:
    """Allocates zeroed shared memory: of the host, or of the GPU with this number. Collectives on memory of the host
    copy each byte only once."""

def pooled(nbytes: int, gpu: int | None = None, name: str | None = None) -> Memory:
    """Takes memory from the pool of the host or of a GPU, with whatever is in it. Small pieces share one allocation."""

def is_shared(address: int) -> bool:
    """Whether the byte at an address is shared memory of this process."""

def rendezvous(group: Group, address: int, nbytes: int, timeout: _Timeout | None = None) -> Symmetric:
    """What tensorwire.symmetric.rendezvous() is made of: the memory is that which lies at an address."""

def share(
    address: int,
    nbytes: int,
    keep: object,
    *,
    gpu: int | None = None,
    stream: int = 0,
    event: int | None = None,
    fd: int | None = None,
    uses: int = 1,
    lifetime: float | None = None,
    note: bytes | None = None,
) -> Lease | None:
    """What tensorwire.share() is made of: lends the memory at an address; None where that is memory of the host
    which others cannot map. With ``fd`` it is memory that somebody else has mapped from that file, for open_file()."""

def open(token: Token, timeout: _Timeout | None = None) -> Memory:
    """What tensorwire.open() is made of: the memory of a token."""

def open_file(token: Token, timeout: _Timeout | None = None) -> int:
    """The file of a token that was made with ``fd``, as a descriptor to close."""

def open_event(token: Token, make: Callable[[int], int], timeout: _Timeout | None = None) -> None:
    """Has an event stand for the one of a token that was made with ``event``: the one that ``make`` gives for the number
    of a GPU."""

def collect() -> int:
    """Lets go of memory that was shared and that nobody needs any more, and asks others to unmap what they do not use;
    gives the bytes that were let go here. It happens by itself, too: this only hurries it."""

def lease_stats() -> dict[str, int]: ...
def operation_on(address: int, nbytes: int) -> str | None:
    """The started operation that uses memory of torch between these addresses, if there is one."""

def outstanding() -> str | None: ...
def _own_stream(ordinal: int) -> int:
    """The number of a stream of a GPU that only this package uses; always the same."""

def is_strict() -> bool:
    """Whether a fallback to a slower path is an error."""

def last_words() -> None:
    """Tells the other ranks of all groups which exception ends this process, if one does."""

def main(args: Sequence[str]) -> int:
    """Runs the command with its arguments, without its name, and gives its exit code.

    It handles signals and ends child processes as the command does: for a process that does nothing else.
    """

@final
class Group:
    """Ranks that talk.

    Operations take tensors of torch, NumPy or whatever speaks DLPack or the buffer protocol, and write their results in
    place. They are over when the call returns, or with ``async_op=True`` when the Work that it returns is done. They
    run in the order in which they are called, which is the same on all ranks. Without a ``timeout`` the group's counts.
    """

    @staticmethod
    def from_env(*, name: str | None = None, timeout: _Timeout | None = None) -> Group:
        """The group of this process's launcher: torchrun, tensorwire run, Slurm, Open MPI or PMI."""

    @staticmethod
    def from_url(
        url: str,
        *,
        rank: int | None = None,
        world: int | None = None,
        name: str | None = None,
        timeout: _Timeout | None = None,
    ) -> Group:
        """A group that meets at tcp://host:port (rank 0 serves the store there) or file:///path."""

    @staticmethod
    def from_store(
        store: Any,
        rank: int,
        world: int,
        *,
        name: str | None = None,
        timeout: _Timeout | None = None,
        within: tuple[Group, Sequence[int]] | None = None,
    ) -> Group:
        """A group that meets in a store: one of ours, or any object with the methods of torch's stores.

        `within` is a group that these ranks are in already, and their ranks there: if one of them dies, the new group is
        not waited for.
        """

    @property
    def rank(self) -> int:
        """This process's rank."""

    @property
    def world(self) -> int:
        """How many ranks there are."""

    @property
    def name(self) -> str:
        """The name of the group in its store."""

    @property
    def timeout(self) -> timedelta:
        """How long an operation may take that has no time-out of its own."""

    def set_timeout(self, timeout: _Timeout) -> None:
        """Changes it, for this rank's later operations."""

    @property
    def sequence(self) -> int:
        """How many operations this rank has called."""

    @property
    def members(self) -> list[Member]:
        """All ranks with host and process, in order."""

    @property
    def hosts(self) -> list[list[int]]:
        """The ranks of each host: those that share memory."""

    def check(self) -> None:
        """Raises if the group has failed: a rank died, left while it was needed, or somebody aborted."""

    def explain(self) -> str:
        """How this rank reaches every other one, and why not better."""

    def barrier(self, *, timeout: _Timeout | None = None, async_op: bool = False) -> Work:
        """Waits until every rank has come here."""

    def _barrier_behind(
        self, gpus: Sequence[int], *, timeout: _Timeout | None = None, async_op: bool = False
    ) -> Work:
        """The same, behind what torch's current streams of these GPUs have to do now."""

    def all_reduce(
        self, tensor: _Tensor, op: _Op = "sum", *, timeout: _Timeout | None = None, async_op: bool = False
    ) -> Work:
        """Reduces a tensor over all ranks; every rank gets the result in its place."""

    def all_reduce_coalesced(
        self, tensors: Sequence[_Tensor], op: _Op = "sum", *, timeout: _Timeout | None = None, async_op: bool = False
    ) -> Work:
        """Reduces several tensors over all ranks, each for itself, in one operation."""

    def all_reduce_multi(
        self, tensors: Sequence[_Tensor], op: _Op = "sum", *, timeout: _Timeout | None = None, async_op: bool = False
    ) -> Work:
        """Reduces several tensors of each rank together, over all ranks; the result goes to every one of them."""

    @overload
    def all_reduce_sparse(
        self, tensor: _S, op: _Op = "sum", *, timeout: _Timeout | None = None, async_op: Literal[False] = False
    ) -> _S:
        """Reduces a sparse tensor over all ranks. Gives the result, which is new, or with ``async_op=True`` a Work whose
        ``result()`` gives it.

        The tensor is a COO, CSR or CSC array or matrix of SciPy, such a tensor of torch, or NumPy arrays as ``(keys, rows,
        shape)``: integer keys in one dimension, a row for each, and a number or tuple that says which keys there can be.
        Without ``shape`` keys may be any numbers from 0 on. The result is of the same kind, with sorted keys, and has the
        same bits on all ranks. Values that have the same key in the tensor of a rank are added up first. Elements that a
        rank does not have take no part. An average is divided by the number of all ranks.
        """

    @overload
    def all_reduce_sparse(
        self, tensor: Any, op: _Op = "sum", *, timeout: _Timeout | None = None, async_op: Literal[True]
    ) -> Work: ...
    @overload
    def all_reduce_sparse(
        self, tensor: Any, op: _Op = "sum", *, timeout: _Timeout | None = None, async_op: bool = False
    ) -> Any: ...
    def _all_reduce_sparse(
        self,
        keys: _Tensor,
        rows: _Tensor,
        shape: Sequence[int],
        dims: Sequence[int],
        op: _Op = "sum",
        make: Callable[[Memory, Memory], tuple[Any, Callable[[], None] | None]] | None = None,
        dense: bool | None = None,
        memory: Callable[[int], _Tensor] | None = None,
        refused: tuple[str, bool] | None = None,
        *,
        timeout: _Timeout | None = None,
        async_op: bool = False,
    ) -> Work:
        """What it is made of: sorted int64 keys and a row for each. ``shape`` are the sparse dimensions, ``dims`` those of
        a row. ``make(keys, rows)`` makes the work's result of the memory of both; without it, that is the result.
        ``memory(count)`` gives the tensor of so many rows that becomes those of the result: rows of a GPU need it.
        ``refused`` ends the operation on all ranks, with this reason; it says whether memory is short."""

    def reduce(
        self, tensor: _Tensor, root: int, op: _Op = "sum", *, timeout: _Timeout | None = None, async_op: bool = False
    ) -> Work:
        """Reduces a tensor over all ranks; rank ``root`` gets the result in its place, all others keep theirs."""

    def broadcast(self, tensor: _Tensor, root: int, *, timeout: _Timeout | None = None, async_op: bool = False) -> Work:
        """Every rank gets what rank ``root`` has in the tensor."""

    def broadcast_coalesced(
        self, tensors: Sequence[_Tensor], root: int, *, timeout: _Timeout | None = None, async_op: bool = False
    ) -> Work:
        """The same for several tensors in one operation."""

    def all_gather(
        self, outputs: Sequence[_Tensor], input: _Tensor, *, timeout: _Timeout | None = None, async_op: bool = False
    ) -> Work:
        """Every rank gets the input of each: one output for each rank, as large as that rank's input."""

    def all_gather_into(
        self, output: _Tensor, input: _Tensor, *, timeout: _Timeout | None = None, async_op: bool = False
    ) -> Work:
        """Every rank gets the inputs of all, which are equally large, one after the other in one tensor."""

    def all_gather_coalesced(
        self,
        outputs: Sequence[_Tensor],
        inputs: Sequence[_Tensor],
        *,
        timeout: _Timeout | None = None,
        async_op: bool = False,
    ) -> Work:
        """Several tensors in one operation: outputs[i] holds the inputs[i] of all ranks, one after the other."""

    def gather(
        self,
        outputs: Sequence[_Tensor] | None,
        input: _Tensor,
        root: int,
        *,
        timeout: _Timeout | None = None,
        async_op: bool = False,
    ) -> Work:
        """Rank ``root`` gets the input of each rank, all equally large; others give None, or no outputs."""

    def scatter(
        self,
        output: _Tensor,
        inputs: Sequence[_Tensor] | None,
        root: int,
        *,
        timeout: _Timeout | None = None,
        async_op: bool = False,
    ) -> Work:
        """Every rank gets its part of what rank ``root`` has, all equally large; others give None, or no inputs."""

    def reduce_scatter(
        self,
        output: _Tensor,
        inputs: Sequence[_Tensor],
        op: _Op = "sum",
        *,
        timeout: _Timeout | None = None,
        async_op: bool = False,
    ) -> Work:
        """Every rank gets its part of the reduction: one input for each rank, as large as that rank's output."""

    def reduce_scatter_from(
        self,
        output: _Tensor,
        input: _Tensor,
        op: _Op = "sum",
        *,
        timeout: _Timeout | None = None,
        async_op: bool = False,
    ) -> Work:
        """The same where the parts are equally large and lie one after the other in one tensor."""

    def reduce_scatter_coalesced(
        self,
        outputs: Sequence[_Tensor],
        inputs: Sequence[_Tensor],
        op: _Op = "sum",
        *,
        timeout: _Timeout | None = None,
        async_op: bool = False,
    ) -> Work:
        """Several tensors in one operation: outputs[i] is this rank's part of the reduction of inputs[i]."""

    def all_to_all(
        self,
        outputs: Sequence[_Tensor],
        inputs: Sequence[_Tensor],
        *,
        timeout: _Timeout | None = None,
        async_op: bool = False,
    ) -> Work:
        """inputs[j] goes to rank j, outputs[i] comes from rank i. Parts may have any sizes that fit together."""

    def all_to_all_into(
        self, output: _Tensor, input: _Tensor, *, timeout: _Timeout | None = None, async_op: bool = False
    ) -> Work:
        """The same where all parts are equally large and lie one after the other in one tensor."""

    def send(
        self, tensor: _Tensor, to: int, tag: int = 0, *, timeout: _Timeout | None = None, async_op: bool = False
    ) -> Work:
        """Sends a tensor to a rank. One on a GPU is copied behind torch's current stream, and waits for nobody."""

    def recv(
        self, tensor: _Tensor, source: int, tag: int = 0, *, timeout: _Timeout | None = None, async_op: bool = False
    ) -> Work:
        """Receives the next message of a rank that has this tag. It has the tensor's type and size."""

    def recv_any(
        self, tensor: _Tensor, tag: int = 0, *, timeout: _Timeout | None = None, async_op: bool = False
    ) -> Work:
        """Receives the next message of any rank that has this tag; the work's ``source`` says which."""

    def subgroup(self, ranks: Sequence[int]) -> Group:
        """A group of some of these ranks, in the given order. Those ranks call it, with the same list."""

    def split(self, colour: int | None, key: int = 0) -> Group | None:
        """Splits the group by colour: all ranks call it. None for a rank whose colour is None."""

    def shrink(self) -> Group:
        """A group of the ranks that are still there, after others have died or left."""

    def abort(self, reason: str = "") -> None:
        """Ends every pending and later operation of this group, on all ranks, with an error that carries the reason."""

    def close(self) -> None:
        """Closes the group on this rank; ranks that need this one later get an error that says so.

        Raises MismatchError if the ranks did not call the same as their last collective and no operation has raised
        that yet. The group is closed all the same.
        """

@final
class Member:
    """One rank of a group, and where it runs."""

    @property
    def rank(self) -> int:
        """Its rank."""

    @property
    def host(self) -> str:
        """The name of its host."""

    @property
    def pid(self) -> int:
        """Its process, as that sees itself."""

    @property
    def identity(self) -> str:
        """The random name of its process, 32 hexadecimal digits: two processes never have the same."""

@final
class Calls:
    """Calls operations of one group as torch's options say."""

    def __new__(
        cls,
        group: Group,
        *,
        work: Callable[[Any, Any, int, int], Any],
        profiled: Callable[[], bool],
        span: Callable[[str, Any], Any],
        recent: Any | None,
    ) -> Self: ...
    @property
    def issued(self) -> int:
        """How many operations were called: the number of the last one."""

    def enable_timing(self) -> None:
        """Works of operations that begin from now on tell how long they took."""

    @property
    def timed(self) -> bool:
        """Whether they do."""

    def start_coalescing(self) -> None:
        """From here on this thread's operations only start, whatever their options say."""

    def take_coalesced(self) -> list[Any] | None:
        """The flights of this thread since then, and the end of it; None outside of it."""

    def run(
        self, title: Any, method: Any, call: tuple[Any, ...], inputs: Any, outputs: Any, opts: Any, source: int = -1
    ) -> Any:
        """Calls a method of the group, or what behaves like one, with ``call`` and as torch's options say."""

    def all_reduce(self, tensors: Sequence[Any], opts: Any) -> Any:
        """The operation that programs call most with little data, without any Python on its way. Several tensors of one
        rank are reduced together, too. NotImplemented for tensors that are not dense."""

    @staticmethod
    def reduction(opts: Any) -> Any:
        """The reduction that torch's options name, as the methods of a group take it."""

@final
class Work:
    """An operation: in flight, or over. Dropping it does not stop the operation. May be awaited in asyncio: if the await
    of a receive is cancelled, the receive is withdrawn, and the next one gets the message. A send of a
    pipe is taken back. Other operations go on."""

    def wait(self, timeout: _Timeout | None = None) -> None:
        """Waits until it is over; raises how it failed. If only this time-out passes, the operation itself goes on."""

    def done(self) -> bool:
        """Whether it is over, well or not."""

    def error(self) -> BaseException | None:
        """How it failed, if it has."""

    def on_done(self, callback: Callable[[Work], object]) -> None:
        """Calls ``callback(work)`` once it is over: now, if it is over already, or else on a thread of ours, where it
        may wait for other works."""

    def _on_over(self, callback: Callable[[Work], object]) -> None:
        """The same, for those that then ask how it ended: until they do, a receive can still be withdrawn."""

    def _on_queued(self, callback: Callable[[Work], object]) -> None:
        """Calls `callback(work)` once wait() does not hold its caller any more: when an operation on tensors of a GPU is
        queued."""

    def _has_failed(self) -> bool:
        """Whether it has failed. Nobody is told how."""

    @property
    def gpu(self) -> int | None:
        """The number of the GPU whose tensors it is on; None for operations on the host."""

    def withdraw(self) -> bool:
        """Withdraws a receive: it takes no message and ends with an error. A message that has begun to arrive goes to
        the next receive that asks for it. A send of a pipe is taken back. False where nothing was withdrawn: it is
        over, or neither of the two."""

    @property
    def duration(self) -> float | None:
        """Seconds from the begin of its execution to its end; None as long as it is not over."""

    @property
    def source(self) -> int | None:
        """The rank that a message came from."""

    def result(self) -> Any:
        """What ``all_reduce_sparse`` gives; None for other operations, which write their results to tensors. Raises how it
        failed, or MisuseError as long as it is not over."""

    @property
    def name(self) -> str:
        """What it does, like "all_reduce"."""

    def __await__(self) -> Generator[Any, None, None]: ...

@final
class Listener:
    """Where pipes of this process begin."""

    def __new__(cls, address: str | None = None) -> Self:
        """One at an address, or for processes of this machine alone."""

    @property
    def address(self) -> str:
        """What a process needs to connect."""

    def accept(self, timeout: _Timeout | None = None) -> Pipe:
        """The next process that connects."""

    def close(self) -> None:
        """Takes no connections any more. Pipes stay."""

@final
class Pipe:
    """One end of a connection between two processes."""

    @staticmethod
    def connect(address: str, timeout: _Timeout | None = None) -> Pipe:
        """Connects to a listener."""

    def send(
        self,
        tensors: Sequence[_Tensor],
        shapes: Sequence[_Shape | None],
        makers: Sequence[int],
        metadata: bytes,
        payloads: Sequence[bytes],
        delivered: bool,
        timeout: _Timeout | None,
        async_op: bool,
    ) -> Work:
        """Sends a message. Each tensor has its shape and strides, and a number that says what made it."""

    def next(self, timeout: _Timeout | None = None) -> Incoming | None:
        """The description of the next message; None if the other end sends no more."""

    def recv(self, timeout: _Timeout | None = None) -> Receiving:
        """Starts to receive the next message."""

    def finish(self) -> None:
        """Says that this end sends no more."""

    def close(self) -> None:
        """Closes the pipe."""

    def check(self) -> None:
        """Raises if the pipe has failed."""

    @property
    def peer(self) -> Member:
        """The process at the other end."""

    def explain(self) -> str:
        """Which channel tensors take, and why."""

@final
class Incoming:
    """A message whose description is here."""

    @property
    def metadata(self) -> bytes:
        """The bytes that came with the description."""

    @property
    def payloads(self) -> list[int]:
        """The sizes of the payloads."""

    @property
    def parts(self) -> list[tuple[str, tuple[int, ...], str, int]]:
        """Of each tensor: type, shape, channel, and what made it."""

    def place(self, index: int, tensor: _Tensor, shape: tuple[Sequence[int], Sequence[int]] | None) -> None:
        """Has a tensor of the message come into this one, which has this shape and these strides."""

    def bring_to(self, index: int, gpu: int | None) -> None:
        """Has a tensor of the message come into new memory: of the GPU with this number, or of the host."""

    def view(self, index: int) -> None:
        """Has a tensor of the message be the sender's memory."""

    def read(self, timeout: _Timeout | None = None) -> tuple[list[Memory], list[_Place]]:
        """Reads the message: the memory of its payloads, and of its tensors. Those of GPUs are there for what comes on torch's
        current streams."""

@final
class Receiving:
    """A message that is to come: one that is received, or the answer of a call. If Python lets go of it, it is withdrawn."""

    def wait(
        self, timeout: _Timeout | None = None
    ) -> tuple[bytes, list[tuple[str, tuple[int, ...], str, int]], list[Memory], list[_Place]] | None:
        """Waits for it and gives it, once; None if the other end sends no more. With a time-out that passes first, it goes on."""

    def done(self) -> bool:
        """Whether it is over, well or not. It can still be withdrawn then."""

    def withdraw(self) -> bool:
        """Withdraws it: the next receive gets the message, or whoever answers the call hears it. False if somebody was told."""

@final
class Rpc:
    """One end of a pipe that calls and is called."""

    def __new__(cls, pipe: Pipe, names: Sequence[str], answer: Callable[[Call], _Outgoing], threads: int) -> Self:
        """Makes an end of a pipe one that calls, and of which these names can be called."""

    def call(self, name: str, outgoing: _Outgoing, timeout: _Timeout | None) -> Incoming:
        """Calls, and waits for the description of the answer."""

    def start(self, name: str, outgoing: _Outgoing, timeout: _Timeout | None) -> Receiving:
        """Starts a call."""

    def wait(self, timeout: _Timeout | None = None) -> None:
        """Waits until the other end has closed."""

    def close(self) -> None:
        """Closes the pipe."""

    @property
    def peer(self) -> Member:
        """The process at the other end."""

    def explain(self) -> str:
        """Which channel tensors take, and why."""

@final
class Call:
    """A call that Python answers."""

    @property
    def name(self) -> str:
        """What was called."""

    @property
    def incoming(self) -> Incoming:
        """Its message, of which the description is here."""

    @property
    def wanted(self) -> bool:
        """Whether somebody waits for the answer."""

    @property
    def left(self) -> float:
        """Seconds until nobody waits for the answer any more."""

@final
class Lease:
    """Memory that is lent, in the process that lends it.

    It stands for the lender's interest: when it is gone, the memory is let go as soon as it was opened as often as
    expected and nobody holds it. Pickled, it is its token.
    """

    @property
    def token(self) -> Token:
        """What goes to whoever may open it."""

    @property
    def nbytes(self) -> int:
        """Bytes of its memory."""

    @property
    def device(self) -> str:
        """Where the memory is: "cpu", or the GPU by its UUID."""

    def holders(self) -> list[int]:
        """Who holds it now: a pid for each tensor that was opened."""

    def wait(self, timeout: _Timeout | None = None) -> None:
        """Waits until it was opened as often as expected (or has expired), and everybody is done with it."""

    def reclaim(self, timeout: _Timeout | None = None) -> None:
        """Takes the memory back, to write to it again: waits until everybody has let go of it. On a GPU torch's current
        stream waits for what the holders' streams still do; on the host that is done on return, as with wait()."""

    def renew(self, lifetime: float | None) -> None:
        """Gives its token longer: so many seconds from now; None: as long as this process lives."""

@final
class Token:
    """Memory on its way to another process: whoever of the same user opens it has the same memory, without a copy.

    It can be pickled, and is as secret as the memory.
    """

    def __new__(cls, data: bytes) -> Self: ...
    def to_bytes(self) -> bytes:
        """What travels; Token(bytes) makes a token of it again."""

    @property
    def nbytes(self) -> int:
        """Bytes of its memory."""

    @property
    def device(self) -> str:
        """Where the memory is: "cpu", or the GPU by its UUID."""

    @property
    def pid(self) -> int:
        """The process that made it, as that sees itself."""

    @property
    def note(self) -> bytes:
        """What its maker put beside the memory."""

    def discard(self, timeout: _Timeout | None = None) -> None:
        """Uses it up without opening it: for one that is not wanted. Its maker does not wait for it any more."""

@final
class Memory:
    """Shared memory. On the host it is a writable buffer; collectives on it, or on any part of it, copy each byte
    only once. On a GPU it has ``__cuda_array_interface__``.

    It is given back when nothing refers to it any more.
    """

    @property
    def nbytes(self) -> int:
        """Its size."""

    @property
    def gpu(self) -> int | None:
        """The number of its GPU in this process; None on the host."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...
    def __len__(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

@final
class Symmetric:
    """What a handle of tensorwire.symmetric is made of."""

    @property
    def rank(self) -> int: ...
    @property
    def world(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def gpu(self) -> int | None: ...
    def buffer(self, rank: int) -> tuple[Memory, bool]:
        """The memory of a rank, and whether it lives on another GPU than this rank's."""

    def pad(self, rank: int) -> tuple[Memory, bool]: ...
    @property
    def buffer_ptrs(self) -> list[int]: ...
    @property
    def pad_ptrs(self) -> list[int]: ...
    @property
    def offsets(self) -> list[int]:
        """Where the memory of each rank begins in the allocation that it is a part of, in bytes."""

    def buffer_addresses(self) -> Memory: ...
    def pad_addresses(self) -> Memory: ...
    def put_signal(self, to: int, channel: int = 0, timeout: _Timeout | None = None) -> None: ...
    def wait_signal(self, source: int, channel: int = 0, timeout: _Timeout | None = None) -> None: ...
    def barrier(self, channel: int = 0, timeout: _Timeout | None = None) -> None: ...
    def all_reduce(self, tensor: _Tensor, op: _Op = "sum", **how: Any) -> None:
        """The keywords are channel and timeout, and of what may be done by copy engines, engines."""

    def one_shot(self, output: _Tensor, input: _Tensor, op: _Op = "sum", **how: Any) -> None: ...
    def reduce_scatter(self, output: _Tensor, input: _Tensor, op: _Op = "sum", **how: Any) -> None: ...
    def all_gather(self, output: _Tensor, input: _Tensor | None = None, **how: Any) -> None: ...
    def all_to_all(self, output: _Tensor, input: _Tensor, **how: Any) -> None: ...
    def broadcast(self, tensor: _Tensor, root: int, **how: Any) -> None: ...
    def check(self) -> None: ...
    def why_not(self, rank: int) -> str | None:
        """Why this rank does not reach the memory of another; None if it does."""

    def explain(self) -> str: ...
    def close(self) -> None: ...

class Store:
    """A key-value service where ranks meet. Values are bytes; a str is stored as UTF-8.

    Waits let other threads run and end by Ctrl-C. A barrier that was left by Ctrl-C counts its caller until the time-out.
    """

    @property
    def timeout(self) -> timedelta: ...
    def set_timeout(self, timeout: _Timeout) -> None: ...
    def set(self, key: str, value: str | bytes) -> None: ...
    def get(self, key: str) -> bytes: ...
    def add(self, key: str, amount: int) -> int: ...
    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes: ...
    def delete_key(self, key: str) -> bool: ...
    def check(self, keys: Sequence[str]) -> bool: ...
    def wait(self, keys: Sequence[str], timeout: _Timeout | None = None) -> None: ...
    def num_keys(self) -> int: ...
    def list_keys(self) -> list[str]: ...
    def append(self, key: str, value: str | bytes) -> None: ...
    def multi_get(self, keys: Sequence[str]) -> list[bytes]: ...
    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None: ...
    def queue_push(self, key: str, value: str | bytes) -> None: ...
    def queue_pop(self, key: str, block: bool = True) -> bytes: ...
    def queue_len(self, key: str) -> int: ...
    def barrier(self, key: str, world_size: int, timeout: _Timeout | None = None) -> None: ...
    def clone(self) -> Store: ...
    def has_extended_api(self) -> bool: ...

@final
class FileStore(Store):
    """A store in a file, shared by all processes that open it."""

    def __new__(cls, path: str | PathLike[str]) -> Self: ...

@final
class MemoryStore(Store):
    """A store in this process's memory, for threads and tests."""

    def __new__(cls) -> Self: ...

@final
class PrefixStore(Store):
    """A part of another store: its keys are kept apart by a prefix."""

    def __new__(cls, prefix: str, store: Store) -> Self: ...

@final
class TcpServer:
    """A server for TcpStore, and for torch's TCPStore. It ends with close(), or when nobody holds it any more.

    Port 0 lets the system choose; an empty host means all addresses of this machine.
    """

    def __new__(cls, host: str = "", port: int = 0) -> Self: ...
    @property
    def host(self) -> str: ...
    @property
    def port(self) -> int: ...
    def close(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

@final
class TcpStore(Store):
    """A client of a TcpServer, or of torch's TCPStore server. It tries to connect until the time-out."""

    def __new__(cls, host: str, port: int, timeout: _Timeout | None = None) -> Self: ...
