"""tensorwire's exceptions, which are also torch's here."""

from torch.distributed import DistBackendError

from tensorwire import errors

#: DistBackendError's place in each: behind ours, before the built-in classes.
combined: dict[str, type[errors.TensorwireError]] = {
    name: type(name, (cls, DistBackendError), {"__doc__": cls.__doc__, "__module__": cls.__module__})
    for name, cls in errors.raised.items()
    if not issubclass(cls, DistBackendError)
}
# Native code looks its classes up there.
errors.raised.update(combined)


def misuse(text: str) -> errors.TensorwireError:
    """The call itself was wrong."""
    return errors.raised["MisuseError"](text)


def unsupported(text: str) -> errors.TensorwireError:
    """We cannot do that."""
    return errors.raised["UnsupportedError"](text)


def timed_out(text: str) -> errors.TensorwireError:
    """A deadline passed."""
    return errors.raised["TimeoutError"](text)


def mismatch(text: str, rank: int) -> errors.TensorwireError:
    """Another rank called it with something else."""
    return errors.raised["MismatchError"](text, "mismatch", rank)


def failed(text: str) -> errors.TensorwireError:
    """Anything else."""
    return errors.raised["TensorwireError"](text)
