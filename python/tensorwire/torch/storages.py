"""Storages of torch keep their memory while a started operation uses it.

A storage that is resized, or moved to a file, frees the memory that it had, also while an operation on another thread
reads or writes it. No reference can hold that memory. So the methods of torch that do this look first, and refuse.

C++ code that resizes a storage without these methods is not seen: an operator with an ``out=`` tensor of another size, or
an extension.
"""

import functools
from collections.abc import Callable
from math import prod
from typing import Any

from torch import Tensor, UntypedStorage

# Not the module of the backend: that would make all exceptions torch's, too, for programs that do not use the backend.
from tensorwire import _native, errors

#: Methods that give a storage other memory; not every version of torch has all of them. share_memory_() and
#: torch.multiprocessing are made of `_share_fd_cpu_` and `_share_filename_cpu_`.
_MOVES = ("resize_", "_resize_with_addr_", "_swap_data_ptr_", "_share_fd_cpu_", "_share_filename_cpu_")


def guard() -> None:
    """Has the methods look. Native code calls it once, before the first operation that is started on such memory."""
    for name in _MOVES:
        if hasattr(UntypedStorage, name):
            _guard(UntypedStorage, name, _check_storage)
    _guard(Tensor, "resize_", _check_size)
    _guard(Tensor, "resize_as_", _check_template)


def _guard(cls: type, name: str, check: Callable[..., None]) -> None:
    method = getattr(cls, name)

    @functools.wraps(method)
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        check(self, *args, **kwargs)
        return method(self, *args, **kwargs)

    setattr(cls, name, checked)


def _check_storage(*given: Any, **_: Any) -> None:
    """Refuses if a started operation uses the memory of one of the storages that a method was given. A storage that is in
    a file already is not moved again."""
    for storage in given:
        if not isinstance(storage, UntypedStorage) or storage.device.type != "cpu" or storage.is_shared():
            continue
        operation = _native.operation_on(storage.data_ptr(), storage.nbytes())
        if operation is not None:
            raise errors.raised["MisuseError"](
                f"a storage of {storage.nbytes()} bytes cannot get other memory now: {operation}, which was started "
                "before, still uses what it has; wait for its work first"
            )


def _check_size(tensor: Tensor, *given: Any, **named: Any) -> None:
    """Refuses a size for which the tensor's storage would have to grow."""
    size = given or ((named["size"],) if "size" in named else ())
    if not tensor.is_cpu or not size:
        return
    sizes = size if isinstance(size[0], int) else size[0]
    try:
        storage = tensor.untyped_storage()
        grows = (tensor.storage_offset() + prod(sizes)) * tensor.element_size() > storage.nbytes()
    except (NotImplementedError, RuntimeError, TypeError):
        return  # A subclass without memory of its own, or a size that torch itself refuses.
    if grows:
        _check_storage(storage)


def _check_template(tensor: Tensor, *given: Any, **named: Any) -> None:
    """The same for the size of another tensor."""
    template = given[0] if given else named.get("the_template")
    if isinstance(template, Tensor):
        _check_size(tensor, template.shape)
