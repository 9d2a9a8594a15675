"""What is used in a ``with``, and closed at its end."""

from __future__ import annotations

TYPE_CHECKING = False  # typing's would cost an import that takes longer than all of ours
if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self


class Closing:
    """Closed at the end of a ``with``."""

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
