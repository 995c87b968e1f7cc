"""A knapsack of several rows: the cheapest choice of one item per row within a total weight."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from narrowband.kernels.backends import backend_of

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["cheapest_within"]


def cheapest_within(cost: Tensor, weight: Tensor, capacity: int) -> Tensor:
    """The item of every row, int32, that together cost least with a total weight of at most ``capacity``; all -1 if
    there are none.

    cost (float64, inf: not allowed) and weight (int32, ≥ 0) are (rows, items), contiguous, on CPU. Of rows' items that
    cost as much, the first.
    """
    return cast("Tensor", backend_of(cost).cheapest_within(cost, weight, capacity))
