"""Low rank in Triton: products of factors, and orthonormal rows.

Results that ranks must agree on are summed in an order that depends on shapes alone: products term by term, and the
float64 sums for orthonormal rows by pieces of fixed size. Loops are not specialized for the alignment of tensors,
because the compiled variants might split sums differently.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from narrowband.kernels.cuda.common import BLOCK, MAGNITUDE, all_below
from narrowband.kernels.cuda.launching import kernel, run
from narrowband.kernels.lowrank import DEPENDENT

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["compensate_project", "low_rank_product", "orthonormalize"]

#: Rows of Q that one launch multiplies by, and elements of a program's tile of products.
_RANKS, _TILE = 16, 4096
#: The most rows that are orthonormalized at once: their products fit in a program's registers. More go one by one.
_TALLEST = 32
#: See ``kernels/cpu/lowrank.py``: a share of this many times its error is known well enough; and the relative error of
#: a sum of products in float64.
_CERTAIN, _ROUNDING, _DEPENDENT = tl.constexpr(100.0), tl.constexpr(1e-15), tl.constexpr(DEPENDENT)

#: The same program for any alignment.
_anywhere: Any = triton.jit(do_not_specialize=["p", "out", "partial", "inverse", "rows", "found"])


# ---- products --------------------------------------------------------------------------------------------------------


@kernel
def _sum_up(p, q, row, column, n, m, r):
    """Compute elements of pᵀ·q, adding term by term."""
    a = tl.load(p + row, mask=row < n, other=0.0)
    total = a[:, None] * tl.load(q + column, mask=column < m, other=0.0)[None, :]
    for k in range(1, r):
        a = tl.load(p + k * n + row, mask=row < n, other=0.0)
        total += a[:, None] * tl.load(q + k * m + column, mask=column < m, other=0.0)[None, :]
    return total


@kernel
def _product(out, p, q, n, m, r, weight, blocks, ACCUMULATE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    at = tl.program_id(0).to(tl.int64)
    row = at // blocks * ROWS + tl.arange(0, ROWS)
    column = at % blocks * WIDTH + tl.arange(0, WIDTH)
    there = (row < n)[:, None] & (column < m)[None, :]
    value = _sum_up(p, q, row, column, n, m, r) * weight
    place = out + row[:, None] * m + column[None, :]
    if ACCUMULATE:
        value = tl.load(place, mask=there, other=0.0) + value
    tl.store(place, value, mask=there)


def low_rank_product(out: Tensor, p: Tensor, q: Tensor, *, weight: float = 1.0, accumulate: bool = False) -> None:
    (r, n), m = p.shape, q.shape[1]
    width = min(BLOCK // 8, triton.next_power_of_2(m))
    tile, blocks = {"ROWS": BLOCK // width, "WIDTH": width}, -(-m // width)
    programs = -(-n // tile["ROWS"]) * blocks
    run(_product, programs, out, p, q, n, m, r, float(weight), blocks, on=out, ACCUMULATE=accumulate, **tile)


@kernel
def _project(
    x, residual, p, q, sent_p, sent_q, tops, n, m, r, sent,
    COMPENSATE: tl.constexpr, SENT: tl.constexpr, RANKS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Compute some whole rows of the new residual, its largest magnitude as an integer, and its products with Q."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    rank = tl.arange(0, RANKS)
    products = tl.zeros((ROWS, RANKS, WIDTH), tl.float32)
    top = tl.zeros((ROWS, WIDTH), tl.int32)
    for first in range(0, m, WIDTH):
        column = first + tl.arange(0, WIDTH)
        there = (row < n)[:, None] & (column < m)[None, :]
        place = row[:, None] * m + column[None, :]
        value = tl.load(residual + place, mask=there, other=0.0)
        if COMPENSATE:
            gradient = tl.load(x + place, mask=there, other=0.0)
            tl.debug_barrier()  # other threads with the same element have read it, too
            tl.store(x + place, value, mask=there)
            if SENT:
                value -= _sum_up(sent_p, sent_q, row, column, n, m, sent)
            value = tl.where(there, value + gradient, 0.0)
            tl.store(residual + place, value, mask=there)
            top = tl.maximum(top, value.to(tl.int32, bitcast=True) & MAGNITUDE)
        taken = (rank < r)[:, None] & (column < m)[None, :]
        factor = tl.load(q + rank[:, None] * m + column[None, :], mask=taken, other=0.0)
        products += value[:, None, :] * factor[None, :, :]
    inside = (row < n)[:, None] & (rank < r)[None, :]
    tl.store(p + rank[None, :] * n + row[:, None], tl.sum(products, 2), mask=inside)
    if COMPENSATE:
        tl.store(tops + tl.program_id(0), tl.max(tl.max(top, 1), 0))


def compensate_project(
    x: Tensor,
    residual: Tensor,
    q: Tensor,
    p: Tensor,
    *,
    sent: tuple[Tensor, Tensor] | None = None,
    below: float = math.inf,
) -> bool:
    (r, m), n = q.shape, p.shape[1]
    ranks = triton.next_power_of_2(max(1, min(r, _RANKS)))
    width = min(256, triton.next_power_of_2(m))
    rows = max(1, min(4, _TILE // (ranks * width)))
    programs = -(-n // rows)
    tops = torch.empty(programs, dtype=torch.int32, device=x.device)
    sent_p, sent_q = (residual, residual) if sent is None else sent
    for first in range(0, max(r, 1), _RANKS):
        some, into = q[first : first + _RANKS], p[first : first + _RANKS]
        run(
            _project, programs, x, residual, into, some, sent_p, sent_q, tops, n, m, some.shape[0],
            0 if sent is None else sent_p.shape[0], on=x,
            COMPENSATE=not first, SENT=sent is not None, RANKS=ranks, ROWS=rows, WIDTH=width,
        )  # fmt: skip
    return all_below(tops, below)


# ---- orthonormal rows ------------------------------------------------------------------------------------------------


@_anywhere
def _gram(p, partial, r, n, pieces, RANKS: tl.constexpr, WIDTH: tl.constexpr):
    """Compute the products of rows with each other, over one piece of their columns."""
    at = tl.program_id(0).to(tl.int64)
    rank = tl.arange(0, RANKS)
    i = at % pieces * WIDTH + tl.arange(0, WIDTH)
    begin = p + at // pieces * r * n
    inside = (rank < r)[:, None] & (i < n)[None, :]
    rows = tl.load(begin + rank[:, None] * n + i[None, :], mask=inside, other=0.0).to(tl.float64)
    gram = tl.zeros((RANKS, RANKS), tl.float64)
    for b in range(r):
        row = tl.load(begin + b * n + i, mask=i < n, other=0.0).to(tl.float64)
        gram = tl.where((rank == b)[None, :], tl.sum(rows * row[None, :], 1)[:, None], gram)
    tl.store(partial + at * RANKS * RANKS + rank[:, None] * RANKS + rank[None, :], gram)


@_anywhere
def _inverse_root(partial, inverse, found, r, pieces, RANKS: tl.constexpr):
    """Invert the lower triangular L with L·Lᵀ = p·pᵀ, one column of L after the other.

    Rows are zero where a row of p depends on those before it. Also note whether all shares were found; see the loop on
    CPU.
    """
    matrix = tl.program_id(0).to(tl.int64)
    rank = tl.arange(0, RANKS)
    down, across = rank[:, None], rank[None, :]
    place = down * RANKS + across
    gram = tl.zeros((RANKS, RANKS), tl.float64)
    for piece in range(pieces):
        gram += tl.load(partial + (matrix * pieces + piece) * RANKS * RANKS + place)
    squares = tl.sum(tl.where(down == across, gram, 0.0), 1)
    root = tl.where(down == across, 1.0, 0.0).to(tl.float64)
    product = tl.sum(tl.zeros((RANKS,), tl.float64), 0) + 1.0
    unsure = tl.sum(tl.zeros((RANKS,), tl.int32), 0)
    for k in range(r):
        column = tl.sum(tl.where(across == k, gram, 0.0), 1)
        rest = tl.sum(tl.where(rank == k, column, 0.0), 0)
        own = tl.sum(tl.where(rank == k, squares, 0.0), 0)
        error = _ROUNDING / product * own * _CERTAIN
        unsure = tl.where((rest < error) & (error > own * _DEPENDENT), 1, unsure)
        dependent = rest <= own * _DEPENDENT  # False for NaN
        product = tl.where(dependent, product, product * (rest / tl.where(dependent, 1.0, own)))
        scale = tl.where(dependent, 0.0, 1.0 / tl.sqrt(tl.where(dependent, 1.0, rest)))
        column *= scale
        line = tl.sum(tl.where(down == k, root, 0.0), 0) * scale
        left = tl.where(down > k, root - column[:, None] * line[None, :], root)
        root = tl.where(down == k, line[None, :], left)
        gram = tl.where((down > k) & (across > k), gram - column[:, None] * column[None, :], gram)
    tl.store(inverse + matrix * RANKS * RANKS + place, root)
    tl.store(found + matrix, 1 - unsure)


@_anywhere
def _combine(inverse, p, out, r, n, pieces, RANKS: tl.constexpr, WIDTH: tl.constexpr):
    """Compute a piece of the columns of ``inverse``·p."""
    at = tl.program_id(0).to(tl.int64)
    rank = tl.arange(0, RANKS)
    i = at % pieces * WIDTH + tl.arange(0, WIDTH)
    matrix = at // pieces
    total = tl.zeros((RANKS, WIDTH), tl.float64)
    for b in range(r):
        row = tl.load(p + (matrix * r + b) * n + i, mask=i < n, other=0.0).to(tl.float64)
        factor = tl.load(inverse + matrix * RANKS * RANKS + rank * RANKS + b)
        total = tl.where((rank >= b)[:, None], total + factor[:, None] * row[None, :], total)
    inside = (rank < r)[:, None] & (i < n)[None, :]
    tl.store(out + (matrix * r + rank)[:, None] * n + i[None, :], total.to(tl.float32), mask=inside)


@_anywhere
def _row_by_row(p, out, rows, found, r, n, RANKS: tl.constexpr, WIDTH: tl.constexpr):
    """Gram–Schmidt for matrices where Cholesky did not find the shares: subtract from each row its projections on all
    rows before it, twice.

    One program has a whole matrix; its threads synchronize wherever one writes what another may read.
    """
    matrix = tl.program_id(0).to(tl.int64)
    if tl.load(found + matrix) == 0:
        begin = matrix * r * n
        rank = tl.arange(0, RANKS)
        table = rows + begin + rank[:, None] * n
        for a in range(r):
            row = rows + begin + a * n
            before = tl.zeros((WIDTH,), tl.float64)
            for first in range(0, n, WIDTH):
                i = first + tl.arange(0, WIDTH)
                value = tl.load(p + begin + a * n + i, mask=i < n, other=0.0).to(tl.float64)
                before += value * value
                tl.store(row + i, value, mask=i < n)
            for _ in range(2):
                tl.debug_barrier()
                shares = tl.zeros((RANKS,), tl.float64)
                for first in range(0, n, WIDTH):
                    i = first + tl.arange(0, WIDTH)
                    others = tl.load(table + i[None, :], mask=(rank < a)[:, None] & (i < n)[None, :], other=0.0)
                    shares += tl.sum(others * tl.load(row + i, mask=i < n, other=0.0)[None, :], 1)
                for first in range(0, n, WIDTH):
                    i = first + tl.arange(0, WIDTH)
                    others = tl.load(table + i[None, :], mask=(rank < a)[:, None] & (i < n)[None, :], other=0.0)
                    value = tl.load(row + i, mask=i < n, other=0.0) - tl.sum(others * shares[:, None], 0)
                    tl.debug_barrier()
                    tl.store(row + i, value, mask=i < n)
            tl.debug_barrier()
            rest = tl.zeros((WIDTH,), tl.float64)
            for first in range(0, n, WIDTH):
                i = first + tl.arange(0, WIDTH)
                value = tl.load(row + i, mask=i < n, other=0.0)
                rest += value * value
            left = tl.sum(rest, 0)
            dependent = left <= tl.sum(before, 0) * _DEPENDENT  # False for NaN
            factor = tl.where(dependent, 0.0, 1.0 / tl.sqrt(tl.where(dependent, 1.0, left)))
            for first in range(0, n, WIDTH):
                i = first + tl.arange(0, WIDTH)
                value = tl.load(row + i, mask=i < n, other=0.0) * factor
                tl.debug_barrier()
                tl.store(row + i, value, mask=i < n)
                tl.store(out + begin + a * n + i, value.to(tl.float32), mask=i < n)


def orthonormalize(p: Tensor) -> Tensor:
    """Orthonormalize by Cholesky, always twice; row by row where Cholesky cannot tell how much of a row remains beside
    those before it.

    Only the device knows which matrices need the row-by-row loop: the programs of those matrices run it, and the others
    do nothing.
    """
    out = torch.empty_like(p)
    if not p.numel():
        return out
    count, r, n = p.shape
    rows = torch.empty(p.shape, dtype=torch.float64, device=p.device)
    found = torch.zeros(count, dtype=torch.int32, device=p.device)
    ranks = triton.next_power_of_2(r)
    tile = {"RANKS": ranks, "WIDTH": min(1024, max(16, _TILE // ranks))}
    if r <= _TALLEST:
        pieces = -(-n // tile["WIDTH"])
        partial = p.new_empty(count, pieces, ranks, ranks, dtype=torch.float64)
        inverse = p.new_empty(count, ranks, ranks, dtype=torch.float64)
        once, again = torch.empty_like(p), torch.empty_like(found)
        for given, result, told in ((p, once, found), (once, out, again)):
            run(_gram, count * pieces, given, partial, r, n, pieces, on=p, **tile)
            run(_inverse_root, count, partial, inverse, told, r, pieces, on=p, RANKS=ranks)
            run(_combine, count * pieces, inverse, given, result, r, n, pieces, on=p, **tile)
    run(_row_by_row, count, p, out, rows, found, r, n, on=p, **tile)
    return out
