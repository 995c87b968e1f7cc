"""A knapsack of several rows: choose one item per row, at the least total cost within a total weight."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from narrowband.kernels.backends import backend_of

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["cheapest_within"]


def cheapest_within(cost: Tensor, weight: Tensor, capacity: int) -> Tensor:
    """Return the item of every row, int32, for which total cost is least and total weight at most ``capacity``; all -1
    if no choice fits.

    cost (float64; inf: not allowed) and weight (int32, ≥ 0) are (rows, items), contiguous, on CPU. Of items in a row
    that cost the same, the first is chosen.
    """
    return cast("Tensor", backend_of(cost).cheapest_within(cost, weight, capacity))
