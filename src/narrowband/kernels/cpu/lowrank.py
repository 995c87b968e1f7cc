"""Products of two factors on CPU, in an order of sums that no machine changes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from narrowband.kernels.cpu.loops import F32, At, loop, spread

if TYPE_CHECKING:
    from torch import Tensor

#: Columns of a low-rank product that are summed up together.
COLUMNS = 1024


@loop
def _product_range(p, q, out, weight, accumulate, first, last):
    """Rows [first, last) of weight · p·q, q of shape (r, m), some columns at a time: that piece of q stays in L2."""
    r, m = q.shape
    total = np.empty(min(m, COLUMNS), np.float32)
    for begin in range(0, m, COLUMNS):
        count = min(COLUMNS, m - begin)
        for i in range(first, last):
            for j in range(count):
                total[At(j)] = F32(p[i, 0] * q[0, At(begin + j)])
            k = 1
            while k + 4 <= r:  # four terms at a time, one after the other
                a, b, c, d = p[i, k], p[i, k + 1], p[i, k + 2], p[i, k + 3]
                for j in range(count):
                    t = F32(total[At(j)] + F32(a * q[k, At(begin + j)]))
                    t = F32(t + F32(b * q[k + 1, At(begin + j)]))
                    t = F32(t + F32(c * q[k + 2, At(begin + j)]))
                    total[At(j)] = F32(t + F32(d * q[k + 3, At(begin + j)]))
                k += 4
            while k < r:
                a = p[i, k]
                for j in range(count):
                    total[At(j)] = F32(total[At(j)] + F32(a * q[k, At(begin + j)]))
                k += 1
            if accumulate:
                for j in range(count):
                    out[i, At(begin + j)] += F32(weight * total[At(j)])
            else:
                for j in range(count):
                    out[i, At(begin + j)] = F32(weight * total[At(j)])


def low_rank_product(out: Tensor, p: Tensor, q: Tensor, *, weight: float = 1.0, accumulate: bool = False) -> None:
    n, r = p.shape
    matrix = out.view(n, -1).numpy()
    form = p.numpy(), np.ascontiguousarray(q.numpy().T), matrix, F32(weight), accumulate
    spread(n, r * matrix.size // 2, lambda a, b: _product_range(*form, a, b))
