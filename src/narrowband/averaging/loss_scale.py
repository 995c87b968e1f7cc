"""The loss scale, by which gradients are multiplied in mixed-precision training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

__all__ = ["LossScale"]


class Scaled(Protocol):
    """What is kept in the unit of the scaled gradients."""

    def scale(self, factor: float) -> None:
        """Multiply it by ``factor``."""


class LossScale:
    """Follows the scale of a gradient scaler, and keeps residuals in the unit of the scaled gradients.

    Args:
        scaler: the gradient scaler; None if gradients are not scaled, which is a scale of 1.
    """

    def __init__(self, scaler: torch.amp.GradScaler | None) -> None:
        self.scaler = scaler
        #: The scale of the residuals: that of the last step; 1 before the first step, when there are no residuals.
        self.value = 1.0

    def update(self, states: Iterable[Scaled]) -> None:
        """Multiply residuals by the change of the scale since the last step, which may have been before a resume."""
        scale = 1.0 if self.scaler is None else float(self.scaler.get_scale())  # 1 if the scaler is disabled
        if self.value != scale:
            for state in states:
                state.scale(scale / self.value)
        self.value = scale
