"""tensorwire moves tensors between processes, GPUs and machines."""

from tensorwire._native import __version__
from tensorwire.errors import MisuseError, PeerError, TensorwireError, TimeoutError, UnsupportedError

__all__ = ["MisuseError", "PeerError", "TensorwireError", "TimeoutError", "UnsupportedError", "__version__"]
