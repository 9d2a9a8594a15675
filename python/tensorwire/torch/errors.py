"""tensorwire's exceptions, which are also torch's here."""

from torch.distributed import DistBackendError

from tensorwire import errors


def _combine(cls: type[errors.TensorwireError]) -> type[errors.TensorwireError]:
    """A subclass that is torch's, too. Pickled, it is ours alone: who reads that may not have torch."""

    def reduce(error: errors.TensorwireError) -> tuple:
        return cls, error.args, error.__dict__

    body = {"__doc__": cls.__doc__, "__module__": cls.__module__, "__reduce__": reduce}
    return type(cls.__name__, (cls, DistBackendError), body)


combined: dict[str, type[errors.TensorwireError]] = {
    name: _combine(cls) for name, cls in errors.raised.items() if not issubclass(cls, DistBackendError)
}


def _with_word(error: errors.TimeoutError) -> str:
    """torch's own backends all say "timeout", and programs look for it."""
    return f"{RuntimeError.__str__(error)}; its timeout is over"


combined["TimeoutError"].__str__ = _with_word  # type: ignore[method-assign]
# Native code looks its classes up there.
errors.raised.update(combined)


def misuse(text: str) -> errors.TensorwireError:
    """The call itself was wrong."""
    return errors.raised["MisuseError"](text)


def unsupported(text: str) -> errors.TensorwireError:
    """We cannot do that."""
    return errors.raised["UnsupportedError"](text)


def timed_out(text: str, ranks: list[int] | None = None) -> errors.TensorwireError:
    """A deadline passed; these ranks were waited for."""
    return errors.raised["TimeoutError"](text, ranks)


def failed(text: str) -> errors.TensorwireError:
    """Anything else."""
    return errors.raised["TensorwireError"](text)
