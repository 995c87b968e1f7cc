"""The unit of gradients in mixed-precision training: a gradient times the loss scale."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

    from narrowband.feedback import State

__all__ = ["LossScale"]


class LossScale:
    """Follows the scale of a scaler, and keeps residuals in the unit of the gradients.

    Args:
        scaler: None: gradients are not scaled.
    """

    def __init__(self, scaler: torch.amp.GradScaler | None) -> None:
        self.scaler = scaler
        #: The scale of the last step; None before the first, and without a scaler.
        self.value: float | None = None

    def update(self, states: Iterable[State]) -> None:
        """Multiply residuals by the change of the scale since the last step."""
        if self.scaler is None or not self.scaler.is_enabled():
            return
        scale = float(self.scaler.get_scale())
        if self.value is not None and self.value != scale:
            for state in states:
                state.scale(scale / self.value)
        self.value = scale
