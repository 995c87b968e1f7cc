"""The base class of the hook objects that compression registers with a model and that refer to its handle.

A model may be deep-copied (for weight averaging) or pickled (into a file, or for another process), and its hooks are
copied with it. A handle belongs to one model in one process. So the copy of a hook has no handle. A copy that is only
evaluated needs none; one that is trained logs a warning.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from narrowband.averaging.who import ddp_around, handles_of

if TYPE_CHECKING:
    from torch import nn
    from typing_extensions import Self

__all__ = ["Left"]

log = logging.getLogger(__name__)

_L = TypeVar("_L", bound="Left")


class Left(ABC):
    """A hook object that refers to a handle. Constructed without arguments, it has no handle and does nothing."""

    #: For the warning: what happens to the gradients of a copied model.
    without: ClassVar[str]

    def __init__(self) -> None:
        #: Whether it was copied from an object with a handle, and its model has not been trained since.
        self.copied = False

    @property
    @abstractmethod
    def has_handle(self) -> bool:
        """Whether this object refers to a live handle."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return _copy(type(self), self.has_handle or self.copied)

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return _copy, (type(self), self.has_handle or self.copied)

    def say_copied(self, model: nn.Module) -> None:
        """Warn once if a copied model is trained and nobody has set compression up for it. Call in a forward pass that
        keeps gradients.

        Args:
            model: the copied model, of which this is a hook.
        """
        if not self.copied or not model.training or not any(p.requires_grad for p in model.parameters()):
            return
        self.copied = False
        if ddp_around() is None and next(handles_of(model), None) is None:
            log.warning(
                "a model that was copied or read from a file has no compression: %s, unless compress_gradients is "
                "called for it; load a handle.state_dict() there to keep the residuals",
                self.without,
            )


def _copy(kind: type[_L], copied: bool) -> _L:
    """Return what stands in a copied model for a hook object."""
    made = kind()
    made.copied = copied
    return made
