"""What averages a module's gradients, for whoever runs several backward passes of it in a step.

A stage of a pipeline is such a one: it knows which of its passes is the last, and cannot know the handle that its user
made. So a handle of a module that nobody else averages is found here.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from torch import nn

__all__ = ["AveragesLater", "averaging_of", "forget", "remember"]


class AveragesLater(Protocol):
    """A handle that can wait with a module's gradients until all passes of a step are done."""

    def no_sync(self) -> AbstractContextManager[None]:
        """In this context gradients add up, and nothing is averaged."""

    def average(self) -> None:
        """Gradients that have added up become their averages; on all ranks, outside of backward and of ``no_sync``."""


#: A handle lives as long as its module, whether or not anybody has kept it.
_handles: weakref.WeakKeyDictionary[nn.Module, AveragesLater] = weakref.WeakKeyDictionary()


def averaging_of(module: nn.Module) -> AveragesLater | None:
    """The handle that averages a module's gradients; None where there is none. ``torch.compile`` is seen through.

    Example:
        >>> averaging_of(nn.Linear(2, 2)) is None
        True
    """
    return _handles.get(getattr(module, "_orig_mod", module))


def remember(module: nn.Module, handle: AveragesLater) -> None:
    """From now on a module has this handle."""
    _handles[module] = handle


def forget(module: nn.Module, handle: AveragesLater) -> None:
    """It has it no longer, if it had it."""
    if _handles.get(module) is handle:
        del _handles[module]
