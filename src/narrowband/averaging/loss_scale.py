"""The loss scale, by which gradients are multiplied in mixed-precision training."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import Tensor

__all__ = ["LossScale", "Scaled"]


class Scaled(Protocol):
    """What is kept in the unit of the scaled gradients."""

    def scale(self, factor: float) -> None:
        """Multiply it by ``factor``."""

    def state_dict(self) -> Mapping[str, Tensor]:
        """Return all of it."""


class LossScale:
    """Follows the scale of a gradient scaler, and keeps residuals in the unit of the scaled gradients.

    Args:
        scaler: the gradient scaler; None if gradients are not scaled, which is a scale of 1.
    """

    def __init__(self, scaler: torch.amp.GradScaler | None) -> None:
        self.scaler = scaler
        #: The scale of this step's gradients.
        self.now = 1.0
        #: The scale of the residuals: that of the last step; 1 before the first step, when there are no residuals.
        self.value = 1.0

    def rises(self) -> bool:
        """Note the scale of this step's gradients. Return whether it is above that of the residuals, so that
        :meth:`fits` has to be asked before :meth:`update`.
        """
        self.now = 1.0 if self.scaler is None else float(self.scaler.get_scale())  # 1 if it is disabled
        return self.now > self.value

    def fits(self, states: Iterable[Scaled]) -> bool:
        """Whether this rank's residuals stay in the range of float32 in the unit of this step's gradients."""
        return not _largest(states) * (self.now / self.value) > torch.finfo(torch.float32).max

    def update(self, states: Iterable[Scaled]) -> None:
        """Multiply residuals by the change of the scale since the last step, which may have been before a resume.

        Ranks whose residuals fit must not call this while those of others do not. The step then does not count
        anywhere, so that the scaler reduces the scale again; and all residuals stay as they are, in one unit.
        """
        if self.value != self.now:
            factor = self.now / self.value
            for state in states:
                state.scale(factor)
            self.value = self.now


def _largest(states: Iterable[Scaled]) -> float:
    """Return the largest magnitude of what is kept. Waits for the device."""
    return max((float(norm) for state in states for norm in _norms([*state.state_dict().values()])), default=0.0)


def _norms(tensors: list[Tensor]) -> Iterable[Tensor]:
    some = [x for x in tensors if x.numel()]
    return torch._foreach_norm(some, math.inf) if some else ()
