"""tensorwire moves tensors between processes, GPUs and machines.

::

    import numpy, tensorwire

    group = tensorwire.init()             # rank, world and address come from the launcher
    numbers = numpy.ones(1000, "float32")
    group.all_reduce(numbers)             # in place
"""

from tensorwire._native import (
    FileStore,
    Group,
    Member,
    Memory,
    MemoryStore,
    PrefixStore,
    Store,
    TcpServer,
    TcpStore,
    Work,
    __version__,
    alloc,
)
from tensorwire.default_group import finalize, group, init
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
from tensorwire.lease import Lease, Token, collect, lease_stats, open, share
from tensorwire.numpy import empty
from tensorwire.pipe import Listener, Pipe

# Not in the list: `open`, which would take the place of Python's own with `from tensorwire import *`.

__all__ = [
    "AbortedError",
    "FileStore",
    "Group",
    "Lease",
    "Listener",
    "Member",
    "Memory",
    "MemoryStore",
    "MismatchError",
    "MisuseError",
    "PeerDiedError",
    "PeerError",
    "Pipe",
    "PrefixStore",
    "Store",
    "TcpServer",
    "TcpStore",
    "TensorwireError",
    "TimeoutError",
    "Token",
    "UnsupportedError",
    "Work",
    "__version__",
    "alloc",
    "collect",
    "empty",
    "finalize",
    "group",
    "init",
    "lease_stats",
    "share",
]
