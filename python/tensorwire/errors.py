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
    """A deadline passed; the text names who or what was missing."""


class PeerError(TensorwireError):
    """Another process died, left, called something else, sent nonsense or does not fit to us.

    ``kind`` is one of "died", "left", "mismatch", "stuck", "failed", "misbehaved", "incompatible", "refused"; ``rank``
    is None where it is not known.
    """

    def __init__(self, message: str, kind: str = "misbehaved", rank: int | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.rank = rank


class PeerDiedError(PeerError):
    """Another rank is gone: its process ended (``kind`` "died"), or it closed the group ("left")."""

    def __init__(self, message: str, kind: str = "died", rank: int | None = None) -> None:
        super().__init__(message, kind, rank)


class MismatchError(PeerError):
    """Another rank called another operation than this one, or with another type or size; the text names both sides."""

    def __init__(self, message: str, kind: str = "mismatch", rank: int | None = None) -> None:
        super().__init__(message, kind, rank)


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
