"""The cheapest choice of one item per row within a total weight, on CPU."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from narrowband.kernels.cpu.loops import I32, At, loop

__all__ = ["cheapest_within"]


@loop
def _fill(cost, weight, capacity, least, chosen):
    """Fill the tables of dynamic programming.

    least[row % 2][w] is the smallest cost of the rows up to this one within weight w; chosen[row][w] is the item of
    this row in that choice.
    """
    least[1, :] = 0.0
    for row in range(cost.shape[0]):
        before, now, how = least[1 - row % 2], least[row % 2], chosen[row]
        now[:] = np.inf
        for item in range(cost.shape[1]):
            own, w = cost[row, item], weight[row, item]
            if w > capacity or own == np.inf:
                continue
            this = I32(item)
            for at in range(At(capacity - w + 1)):
                total = before[at] + own
                better = total < now[at + At(w)]
                now[at + At(w)] = total if better else now[at + At(w)]
                how[at + At(w)] = this if better else how[at + At(w)]


@loop
def _trace(weight, capacity, chosen, out):
    left = capacity
    for back in range(weight.shape[0]):
        row = weight.shape[0] - 1 - back
        out[row] = chosen[row, left]
        if out[row] < 0:
            out[:] = -1
            return
        left -= weight[row, out[row]]


def cheapest_within(cost: Tensor, weight: Tensor, capacity: int) -> Tensor:
    rows = cost.shape[0]
    least = np.empty((2, capacity + 1))
    chosen = np.full((rows, capacity + 1), -1, np.int32)
    _fill(cost.numpy(), weight.numpy(), capacity, least, chosen)
    out = np.full(rows, -1, np.int32)
    _trace(weight.numpy(), capacity, chosen, out)
    return torch.from_numpy(out)
