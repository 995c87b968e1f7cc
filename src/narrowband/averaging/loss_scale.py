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
        scaler: None: gradients are not scaled, as if the scale were 1.
    """

    def __init__(self, scaler: torch.amp.GradScaler | None) -> None:
        self.scaler = scaler
        #: The scale that residuals have: that of the last step, and 1 before the first, when there are none.
        self.value = 1.0

    def update(self, states: Iterable[State]) -> None:
        """Multiply residuals by the change of the scale since the last step, which may be one before a checkpoint."""
        scale = 1.0 if self.scaler is None else float(self.scaler.get_scale())  # which is 1 if it is switched off
        if self.value != scale:
            for state in states:
                state.scale(scale / self.value)
        self.value = scale
