"""The handle that :func:`~narrowband.compress_gradients` returns, for every kind of model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from narrowband.averaging.core import is_in_backward
from narrowband.averaging.handle import Handle

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from narrowband.averaging.agreement import Facts
    from narrowband.codecs import Codec
    from narrowband.feedback import Compression, Method
    from narrowband.gradients.steps import Steps

__all__ = ["GradientCompression"]


class GradientCompression(Handle, ABC):
    """The handle of :func:`compress_gradients`. ``repr(handle)`` shows its settings and how much traffic it saved."""

    _buckets: list[list[str]]
    #: Layers of which this rank has too little to be compressed, and another rank may have more.
    _small: Collection[str] = ()
    _steps: Steps | None = None  # None for a single rank

    @property
    def buckets(self) -> list[list[str]]:
        """The names of the layers that travel together, one list per bucket, in the sending order of the last step."""
        return [list(names) for names in self._buckets]

    def _checked_layers(self, specs: Mapping[str, str | Codec | Compression | Method]) -> Mapping[str, Compression]:
        """See :meth:`Handle._checked_layers`. Layers of which this rank has too little are left out."""
        return super()._checked_layers({name: spec for name, spec in specs.items() if name not in self._small})

    def _state_facts(self, state: Mapping[str, Any]) -> Facts:
        """See :meth:`Handle._state_facts`.

        Raises:
            ValueError: a state of updates, whose residuals are no parts of gradients.
        """
        if "updates" in state:
            raise ValueError("the state is one of compress_updates; pass what the handle of gradients had returned")
        return super()._state_facts(state)

    def _broke_off(self) -> bool:
        """Backward returns only after its step has ended. So a step that is open outside of backward broke off."""
        return self._open_step is not None and not self._open_step.abandoned and not is_in_backward()

    @abstractmethod
    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which backward passes only accumulate gradients and average nothing.

        Example:
            >>> with handle.no_sync():
            ...     loss(model(x), y).backward()
            >>> loss(model(x), y).backward()  # averages the sum of both
        """
