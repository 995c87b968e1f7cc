"""What compression leaves in a model: objects that are registered as hooks, and that stand for its handle.

Models are copied, for an average of weights, and pickled, into a file or for another process; and so is what is
registered with them. A handle belongs to one model in one process. So a copy gets an object without one, and says so.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Left"]

log = logging.getLogger(__name__)


class Left(ABC):
    """Stands for a handle. Made without arguments, it stands for none and does nothing."""

    #: What becomes of the gradients of a copy.
    without: ClassVar[str]

    def __init__(self) -> None:
        self._warned_copied = False

    @property
    @abstractmethod
    def has_handle(self) -> bool:
        """Whether there is a handle that it stands for."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        self._say_copied()
        return type(self)()

    def __reduce__(self) -> tuple[type[Self], tuple[()]]:
        self._say_copied()
        return type(self), ()

    def _say_copied(self) -> None:
        if self.has_handle and not self._warned_copied:
            self._warned_copied = True
            log.warning(
                "the copy (or saved file) of a model has no compression: %s, unless compress_gradients is called for "
                "it; save handle.state_dict() to keep the residuals",
                self.without,
            )
