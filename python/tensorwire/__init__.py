"""tensorwire moves tensors between processes, GPUs and machines."""

from tensorwire._native import FileStore, MemoryStore, PrefixStore, Store, TcpServer, TcpStore, __version__
from tensorwire.errors import MisuseError, PeerError, TensorwireError, TimeoutError, UnsupportedError

__all__ = [
    "FileStore",
    "MemoryStore",
    "MisuseError",
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
