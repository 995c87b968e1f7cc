"""What weights a peer's update in the mean of a round: its steps, or what it counts in them, such as tokens."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Weight"]


class Weight:
    """What a peer has counted since it was last in a round.

    Args:
        unit: ``"steps"``, which are counted for the peer; or any other word for what its training loop counts.

    Attributes:
        unit: the argument.
        counted: the sum of what the loop has counted.
    """

    def __init__(self, unit: str) -> None:
        self.unit, self.counted = unit, 0.0
        self._has_counted = False  # since the last step

    def add(self, number: float) -> None:
        """Count.

        Raises:
            ValueError: peers are weighted by steps, or ``number`` is negative or not finite. Nothing has changed then.
        """
        if self.unit == "steps":
            raise ValueError(
                f"count({number}): peers are weighted by their steps; to weight them by what you count, pass "
                "weigh='tokens', or another unit, to compress_updates on all peers"
            )
        if not 0 <= number < math.inf:
            raise ValueError(f"count({number}): must be a number of {self.unit} of at least 0")
        self.counted += float(number)
        self._has_counted = True

    def check(self) -> None:
        """Raise RuntimeError if the loop has not counted for the step that comes."""
        if not self._has_counted:
            raise RuntimeError(
                f"weigh={self.unit!r}, but handle.count(number) was not called since the last step; call it "
                f"before every optimizer.step(), with 0 for a step without {self.unit}"
            )

    def stepped(self) -> None:
        """Note that a step was taken."""
        self._has_counted = False

    def of(self, steps: int) -> float:
        """Return the weight of an update of so many steps."""
        return float(steps) if self.unit == "steps" else self.counted

    def state_dict(self) -> dict[str, Any]:
        """Return unit and sum."""
        return {"weigh": self.unit, "counted": self.counted}

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError if a state is of another unit, or damaged."""
        if state.get("weigh") != self.unit:
            raise ValueError(f"the state was saved with weigh={state.get('weigh')!r}, here it is {self.unit!r}")
        counted = state.get("counted")
        if not (isinstance(counted, (int, float)) and 0 <= counted < math.inf):
            raise ValueError(f"the state has {counted!r} for 'counted'; expected a number of at least 0")
