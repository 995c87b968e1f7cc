"""The knapsack in plain torch."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


__all__ = ["cheapest_within"]


def cheapest_within(cost: Tensor, weight: Tensor, capacity: int) -> Tensor:
    rows = cost.shape[0]
    least = torch.zeros(capacity + 1, dtype=torch.float64, device=cost.device)  # per weight, over the rows so far
    chosen = torch.full((rows, capacity + 1), -1, dtype=torch.int32, device=cost.device)
    for row in range(rows):
        now = torch.full_like(least, math.inf)
        for item, (own, w) in enumerate(zip(cost[row].tolist(), weight[row].tolist(), strict=True)):
            if w <= capacity and own < math.inf:
                total = least[: capacity + 1 - w] + own
                better = total < now[w:]
                now[w:][better] = total[better]
                chosen[row, w:][better] = item
        least = now
    out = torch.full((rows,), -1, dtype=torch.int32, device=cost.device)
    left = capacity
    for row in reversed(range(rows)):
        item = int(chosen[row, left])
        if item < 0:
            return torch.full_like(out, -1)
        out[row] = item
        left -= int(weight[row, item])
    return out
