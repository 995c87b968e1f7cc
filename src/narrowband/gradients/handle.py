"""What :func:`~narrowband.compress_gradients` returns, whatever kind of model it was given."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager

from narrowband.averaging.handle import Handle

__all__ = ["GradientCompression"]


class GradientCompression(Handle, ABC):
    """The handle of :func:`compress_gradients`. ``repr(handle)`` says what it does and what it has saved."""

    _buckets: list[list[str]]

    @property
    def buckets(self) -> list[list[str]]:
        """The layers that travel together, in the order in which they are sent, as of the last step."""
        return [list(names) for names in self._buckets]

    @abstractmethod
    def no_sync(self) -> AbstractContextManager[None]:
        """A context in which backward passes add up gradients and average nothing, for gradient accumulation.

        Example:
            >>> with handle.no_sync():
            ...     loss(model(x), y).backward()
            >>> loss(model(x), y).backward()  # averages the sum of both
        """
