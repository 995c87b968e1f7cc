"""Low rank in Triton: products of factors, and orthonormal rows. What ranks must agree on is summed up in an order that no
GPU changes. R rows of a matrix, W columns of a program's tile.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from narrowband.kernels.cuda.common import BLOCK, MAGNITUDE, below_limit, kernel, run
from narrowband.kernels.lowrank import DEPENDENT

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["compensate_project", "low_rank_product", "orthonormalize"]

#: Rows of Q that one launch multiplies with: they and a tile of the residual are in a program's registers.
_RANKS = 16
#: Columns whose products one program of a Gram matrix adds up.
_PIECE = 1024
#: See ``kernels/cpu/lowrank.py``: a share that is this many times its error is known well enough, and the relative error
#: of a sum of products in float64.
_CERTAIN, _ROUNDING, _DEPENDENT = tl.constexpr(100.0), tl.constexpr(1e-15), tl.constexpr(DEPENDENT)


@kernel
def _sum_up(p, q, row, column, n, m, r, there):
    """Elements of pᵀ·q, term by term."""
    ok_row, ok_column = row < n, column < m
    a = tl.load(p + row, mask=ok_row, other=0.0)
    total = a[:, None] * tl.load(q + column, mask=ok_column, other=0.0)[None, :]
    for k in range(1, r):
        a = tl.load(p + k * n + row, mask=ok_row, other=0.0)
        total += a[:, None] * tl.load(q + k * m + column, mask=ok_column, other=0.0)[None, :]
    return tl.where(there, total, 0.0)


@kernel
def _product(out, p, q, n, m, r, weight, blocks, ACCUMULATE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    at = tl.program_id(0).to(tl.int64)
    row = at // blocks * ROWS + tl.arange(0, ROWS)
    column = at % blocks * WIDTH + tl.arange(0, WIDTH)
    there = (row < n)[:, None] & (column < m)[None, :]
    value = _sum_up(p, q, row, column, n, m, r, there) * weight
    place = out + row[:, None] * m + column[None, :]
    if ACCUMULATE:
        value = tl.load(place, mask=there, other=0.0) + value
    tl.store(place, value, mask=there)


@kernel
def _project(
    x, residual, p, q, sent_p, sent_q, tops, n, m, r, sent, below,
    COMPENSATE: tl.constexpr, SENT: tl.constexpr, RANKS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Some whole rows: the new residual, its largest magnitude as an integer, and its products with R rows of Q."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    rank = tl.arange(0, RANKS)
    products = tl.zeros((ROWS, RANKS), tl.float32)
    top = tl.zeros((ROWS,), tl.int32)
    for first in range(0, m, WIDTH):
        column = first + tl.arange(0, WIDTH)
        there = (row < n)[:, None] & (column < m)[None, :]
        place = row[:, None] * m + column[None, :]
        value = tl.load(residual + place, mask=there, other=0.0)
        if COMPENSATE:
            gradient = tl.load(x + place, mask=there, other=0.0)
            tl.store(x + place, value, mask=there)
            if SENT:
                value -= _sum_up(sent_p, sent_q, row, column, n, m, sent, there)
            value += gradient
            tl.store(residual + place, value, mask=there)
            top = tl.maximum(top, tl.max(value.to(tl.int32, bitcast=True) & MAGNITUDE, 1))
        taken = (rank < r)[:, None] & (column < m)[None, :]
        factor = tl.load(q + rank[:, None] * m + column[None, :], mask=taken, other=0.0)
        products += tl.sum(value[:, None, :] * factor[None, :, :], 2)
    inside = (row < n)[:, None] & (rank < r)[None, :]
    tl.store(p + rank[None, :] * n + row[:, None], products, mask=inside)
    if COMPENSATE:
        tl.store(tops + tl.program_id(0), tl.max(top, 0))
