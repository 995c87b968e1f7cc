"""The base class of the hook objects that compression registers with a model and that refer to its handle.

A model may be deep-copied (for weight averaging) or pickled (into a file, or for another process), and its hooks are
copied with it. A handle belongs to one model in one process. So the copy of a hook has no handle, and a warning is
logged.
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
    """A hook object that refers to a handle. Constructed without arguments, it has no handle and does nothing."""

    #: For the warning: what happens to the gradients of a copied model.
    without: ClassVar[str]

    def __init__(self) -> None:
        self._warned_copied = False

    @property
    @abstractmethod
    def has_handle(self) -> bool:
        """Whether this object refers to a live handle."""

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
                "a copied (or saved) model has no compression: %s, unless compress_gradients is called for the copy; "
                "save handle.state_dict() to keep the residuals",
                self.without,
            )
