"""What can go wrong, sorted by whose fault it is.

::

    TensorwireError (RuntimeError)
    ├── TimeoutError (also builtins.TimeoutError)
    ├── PeerError
    │   ├── PeerDiedError
    │   └── MismatchError
    ├── AbortedError
    ├── MisuseError (also ValueError)
    └── UnsupportedError
"""

import builtins

__all__ = [
    "AbortedError",
    "MismatchError",
    "MisuseError",
    "PeerDiedError",
    "PeerError",
    "TensorwireError",
    "TimeoutError",
    "UnsupportedError",
]


class TensorwireError(RuntimeError):
    """Any error of tensorwire. Itself raised where the operating system or a device failed."""


class TimeoutError(TensorwireError, builtins.TimeoutError):
    """A deadline passed; the text names who or what was missing, and whose time-out it was.

    ``ranks`` are the ranks that were waited for, and ``rank`` is the first of them; None where no rank is known.
    """

    def __init__(self, message: str, ranks: list[int] | None = None) -> None:
        super().__init__(message)
        self.ranks = list(ranks or ())
        self.rank = self.ranks[0] if self.ranks else None


class PeerError(TensorwireError):
    """Another process died, left, called something else, sent nonsense or does not fit to us.

    ``kind`` is one of "died", "left", "mismatch", "stuck", "failed", "misbehaved", "incompatible", "refused"; ``rank``
    is None where it is not known. ``ranks`` are all ranks that it is about, and ``rank`` is the lowest of them.
    """

    def __init__(
        self, message: str, kind: str = "misbehaved", rank: int | None = None, ranks: list[int] | None = None
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.rank = rank
        self.ranks = ranks if ranks is not None else [] if rank is None else [rank]


class PeerDiedError(PeerError):
    """Another rank is gone: its process ended (``kind`` "died"), or it closed the group ("left")."""

    def __init__(
        self, message: str, kind: str = "died", rank: int | None = None, ranks: list[int] | None = None
    ) -> None:
        super().__init__(message, kind, rank, ranks)


class MismatchError(PeerError):
    """The ranks did not call the same operation, or not with the same type, size or root.

    The text says which ranks called what, and what this rank called. ``ranks`` are those that called something else than
    most; it is empty, and ``rank`` is None, where no call has more ranks than each other one.
    """

    def __init__(
        self, message: str, kind: str = "mismatch", rank: int | None = None, ranks: list[int] | None = None
    ) -> None:
        super().__init__(message, kind, rank, ranks)


class AbortedError(TensorwireError):
    """Somebody called abort(); the text has the reason that was given."""


class MisuseError(TensorwireError, ValueError):
    """The call itself was wrong; the text says how to call instead."""


class UnsupportedError(TensorwireError):
    """This machine does not offer it; the text says what it needs and what it has."""


#: The classes that native code raises, by their names. tensorwire.torch puts subclasses in here that are torch's, too.
raised: dict[str, type[TensorwireError]] = {
    cls.__name__: cls
    for cls in (
        TensorwireError,
        TimeoutError,
        PeerError,
        PeerDiedError,
        MismatchError,
        AbortedError,
        MisuseError,
        UnsupportedError,
    )
}
