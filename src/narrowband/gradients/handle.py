"""What :func:`~narrowband.compress_gradients` returns, whatever kind of model it was given."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager

from narrowband.averaging.core import is_in_backward
from narrowband.averaging.handle import Handle

__all__ = ["GradientCompression"]


class GradientCompression(Handle, ABC):
    """The handle of :func:`compress_gradients`. ``repr(handle)`` says what it does and what it has saved."""

    _buckets: list[list[str]]

    @property
    def buckets(self) -> list[list[str]]:
        """The layers that travel together, in the order in which they are sent, as of the last step."""
        return [list(names) for names in self._buckets]

    def _broke_off(self) -> bool:
        """Backward returns when its step has ended, and not before."""
        return self._open_step is not None and not self._open_step.abandoned and not is_in_backward()

    @abstractmethod
    def no_sync(self) -> AbstractContextManager[None]:
        """A context in which backward passes add up gradients and average nothing, for gradient accumulation.

        Example:
            >>> with handle.no_sync():
            ...     loss(model(x), y).backward()
            >>> loss(model(x), y).backward()  # averages the sum of both
        """
