"""tensorwire moves tensors between processes, GPUs and machines."""

from tensorwire._native import FileStore, MemoryStore, PrefixStore, Store, TcpServer, TcpStore, __version__
from tensorwire.errors import (
    AbortedError,
    MismatchError,
    MisuseError,
    PeerDiedError,
    PeerError,
    TensorwireError,
    TimeoutError,
    UnsupportedError,
)

__all__ = [
    "AbortedError",
    "FileStore",
    "MemoryStore",
    "MismatchError",
    "MisuseError",
    "PeerDiedError",
    "PeerError",
    "PrefixStore",
    "Store",
    "TcpServer",
    "TcpStore",
    "TensorwireError",
    "TimeoutError",
    "UnsupportedError",
    "__version__",
]
