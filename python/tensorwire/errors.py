"""What can go wrong, sorted by whose fault it is."""

import builtins

__all__ = ["MisuseError", "PeerError", "TensorwireError", "TimeoutError", "UnsupportedError"]


class TensorwireError(RuntimeError):
    """Any error of tensorwire."""


class TimeoutError(TensorwireError, builtins.TimeoutError):
    """A deadline passed; the text names who or what was missing."""


class PeerError(TensorwireError):
    """Another process died, left, sent nonsense or does not fit to us.

    ``kind`` is one of "died", "left", "misbehaved", "incompatible", "refused"; ``rank`` is None where it is not known.
    """

    def __init__(self, message: str, kind: str = "misbehaved", rank: int | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.rank = rank


class MisuseError(TensorwireError, ValueError):
    """The call itself was wrong; the text says how to call instead."""


class UnsupportedError(TensorwireError):
    """This machine does not offer it; the text says what it needs and what it has."""
