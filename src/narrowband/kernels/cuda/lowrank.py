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
from narrowband.kernels.cuda.launching import Segments, kernel, run, segment
from narrowband.kernels.lowrank import DEPENDENT

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

__all__ = [
    "compensate_project",
    "compensate_project_all",
    "low_rank_product",
    "low_rank_products",
    "orthonormalize",
    "orthonormalize_all",
]

#: Rows of Q that one launch multiplies by, and elements of a program's tile of products.
_RANKS, _TILE = 16, 4096
#: The most rows that are orthonormalized at once: their products fit in a program's registers. More go one by one.
_TALLEST = tl.constexpr(32)
#: See ``kernels/cpu/lowrank.py``: a share of this many times its error is known well enough; and the relative error of
#: a sum of products in float64.
_CERTAIN, _ROUNDING, _DEPENDENT = tl.constexpr(100.0), tl.constexpr(1e-15), tl.constexpr(DEPENDENT)


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
    _write_product(out, p, q, n, m, r, weight, at // blocks, at % blocks, ACCUMULATE, ROWS, WIDTH)


@kernel
def _write_product(
    out, p, q, n, m, r, weight, down, across, ACCUMULATE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """Compute the elements of one tile."""
    row = down * ROWS + tl.arange(0, ROWS)
    column = across * WIDTH + tl.arange(0, WIDTH)
    there = (row < n)[:, None] & (column < m)[None, :]
    value = _sum_up(p, q, row, column, n, m, r) * weight
    place = out + row[:, None] * m + column[None, :]
    if ACCUMULATE:
        value = tl.load(place, mask=there, other=0.0) + value
    tl.store(place, value, mask=there)


@kernel
def _product_segments(
    table, count, ROWS: tl.constexpr, WIDTH: tl.constexpr, ALIGNED: tl.constexpr, SEGMENTS: tl.constexpr
):  # fmt: skip
    """Run :func:`_product` for several matrices."""
    own, at = segment(table, count, 7, SEGMENTS)
    out = tl.load(own + 1).to(tl.pointer_type(tl.float32))
    p = tl.load(own + 2).to(tl.pointer_type(tl.float32))
    q = tl.load(own + 3).to(tl.pointer_type(tl.float32))
    n, m, r = tl.load(own + 4), tl.load(own + 5), tl.load(own + 6).to(tl.int32)
    if ALIGNED:
        out = tl.multiple_of(out, 16)
        m = tl.multiple_of(m, 4)
    blocks = tl.cdiv(m, WIDTH)
    _write_product(out, p, q, n, m, r, 1.0, at // blocks, at % blocks, False, ROWS, WIDTH)


def low_rank_product(out: Tensor, p: Tensor, q: Tensor, *, weight: float = 1.0, accumulate: bool = False) -> None:
    (r, n), m = p.shape, q.shape[1]
    width = min(BLOCK // 8, triton.next_power_of_2(m))
    tile, blocks = {"ROWS": BLOCK // width, "WIDTH": width}, -(-m // width)
    programs = -(-n // tile["ROWS"]) * blocks
    run(_product, programs, out, p, q, n, m, r, float(weight), blocks, on=out, ACCUMULATE=accumulate, **tile)


def low_rank_products(outs: Sequence[Tensor], ps: Sequence[Tensor], qs: Sequence[Tensor]) -> None:
    tile, segments = {"ROWS": 8, "WIDTH": BLOCK // 8}, Segments(outs[0])
    for out, p, q in zip(outs, ps, qs, strict=True):
        (r, n), m = p.shape, q.shape[1]
        programs = -(-n // tile["ROWS"]) * -(-m // tile["WIDTH"])
        segments.add(programs, out.data_ptr(), p.data_ptr(), q.data_ptr(), n, m, r)
    segments.run(_product_segments, ALIGNED=_aligned(outs, qs), **tile)


def _aligned(matrices: Iterable[Tensor], qs: Iterable[Tensor]) -> bool:
    """Whether 16 bytes of a row can be read at a time, in all matrices."""
    return all(x.data_ptr() % 16 == 0 for x in matrices) and all(q.shape[1] % 4 == 0 for q in qs)


@kernel
def _project(
    x, residual, p, q, sent_p, sent_q, tops, n, m, r, sent,
    COMPENSATE: tl.constexpr, SENT: tl.constexpr, RANKS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0).to(tl.int64)
    _project_rows(
        x, residual, p, q, sent_p, sent_q, tops, n, m, r, sent, part, COMPENSATE, SENT, RANKS, ROWS, WIDTH
    )  # fmt: skip


@kernel
def _project_rows(
    x, residual, p, q, sent_p, sent_q, tops, n, m, r, sent, part,
    COMPENSATE: tl.constexpr, SENT: tl.constexpr, RANKS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Compute some whole rows of the new residual, its largest magnitude as an integer, and its products with Q."""
    row = part * ROWS + tl.arange(0, ROWS)
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


@kernel
def _project_segments(
    table, count, tops, SENT: tl.constexpr, RANKS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    ALIGNED: tl.constexpr, SEGMENTS: tl.constexpr,
):  # fmt: skip
    """Run :func:`_project` for several matrices."""
    own, part = segment(table, count, 11, SEGMENTS)
    x = tl.load(own + 1).to(tl.pointer_type(tl.float32))
    residual = tl.load(own + 2).to(tl.pointer_type(tl.float32))
    p = tl.load(own + 3).to(tl.pointer_type(tl.float32))
    q = tl.load(own + 4).to(tl.pointer_type(tl.float32))
    sent_p = tl.load(own + 5).to(tl.pointer_type(tl.float32))
    sent_q = tl.load(own + 6).to(tl.pointer_type(tl.float32))
    n, m = tl.load(own + 7), tl.load(own + 8)
    r, sent = tl.load(own + 9).to(tl.int32), tl.load(own + 10).to(tl.int32)
    if ALIGNED:
        x = tl.multiple_of(x, 16)
        residual = tl.multiple_of(residual, 16)
        m = tl.multiple_of(m, 4)
    _project_rows(x, residual, p, q, sent_p, sent_q, tops, n, m, r, sent, part, True, SENT, RANKS, ROWS, WIDTH)


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
    form = _form(r, m)
    programs = -(-n // form["ROWS"])
    tops = torch.empty(programs, dtype=torch.int32, device=x.device)
    sent_p, sent_q = (residual, residual) if sent is None else sent
    for first in range(0, max(r, 1), _RANKS):
        some, into = q[first : first + _RANKS], p[first : first + _RANKS]
        run(
            _project, programs, x, residual, into, some, sent_p, sent_q, tops, n, m, some.shape[0],
            0 if sent is None else sent_p.shape[0], on=x, COMPENSATE=not first, SENT=sent is not None, **form,
        )  # fmt: skip
    return all_below(tops, below)


def _form(r: int, m: int) -> dict[str, int]:
    """Return the form of a program's tile, for r rows of Q with m columns."""
    ranks = triton.next_power_of_2(max(1, min(r, _RANKS)))
    width = min(256, triton.next_power_of_2(m))
    return {"RANKS": ranks, "WIDTH": width, "ROWS": max(1, min(4, _TILE // (ranks * width)))}


def compensate_project_all(
    xs: Sequence[Tensor],
    residuals: Sequence[Tensor],
    qs: Sequence[Tensor],
    ps: Sequence[Tensor],
    *,
    sents: Sequence[tuple[Tensor, Tensor] | None],
    below: float = math.inf,
) -> bool:
    every, alike = True, dict[tuple[Any, ...], list[Any]]()
    for one in zip(xs, residuals, qs, ps, sents, strict=True):
        x, residual, q, p, sent = one
        if q.shape[0] > _RANKS:
            every &= compensate_project(x, residual, q, p, sent=sent, below=below)
        else:
            alike.setdefault((*_form(*q.shape).items(), sent is not None), []).append(one)
    for (*form, is_sent), some in alike.items():
        segments, tile = Segments(xs[0]), dict(form)
        for x, residual, q, p, sent in some:
            (r, m), n = q.shape, p.shape[1]
            sent_p, sent_q = sent or (residual, residual)
            places = (own.data_ptr() for own in (x, residual, p, q, sent_p, sent_q))
            segments.add(-(-n // tile["ROWS"]), *places, n, m, r, sent_p.shape[0] if is_sent else 0)
        tops = torch.empty(segments.programs, dtype=torch.int32, device=xs[0].device)
        aligned = _aligned((own for x, residual, *_ in some for own in (x, residual)), (one[2] for one in some))
        segments.run(_project_segments, tops, SENT=is_sent, ALIGNED=aligned, **tile)
        every &= all_below(tops, below)
    return every


# ---- orthonormal rows ------------------------------------------------------------------------------------------------


@kernel
def _gram(table, count, GIVEN: tl.constexpr, RANKS: tl.constexpr, WIDTH: tl.constexpr, SEGMENTS: tl.constexpr):
    """Compute the products of rows with each other, over one piece of their columns."""
    own, piece = segment(table, count, 11, SEGMENTS)
    p = tl.load(own + GIVEN).to(tl.pointer_type(tl.float32))
    partial = tl.load(own + 4).to(tl.pointer_type(tl.float64))
    r, n = tl.load(own + 9).to(tl.int32), tl.load(own + 10)
    rank = tl.arange(0, RANKS)
    i = piece * WIDTH + tl.arange(0, WIDTH)
    inside = (rank < r)[:, None] & (i < n)[None, :]
    rows = tl.load(p + rank[:, None] * n + i[None, :], mask=inside, other=0.0).to(tl.float64)
    gram = tl.zeros((RANKS, RANKS), tl.float64)
    for b in range(r):
        row = tl.load(p + b * n + i, mask=i < n, other=0.0).to(tl.float64)
        gram = tl.where((rank == b)[None, :], tl.sum(rows * row[None, :], 1)[:, None], gram)
    tl.store(partial + piece * RANKS * RANKS + rank[:, None] * RANKS + rank[None, :], gram)


@kernel
def _inverse_root(table, NOTE: tl.constexpr, RANKS: tl.constexpr, WIDTH: tl.constexpr):
    """Invert the lower triangular L with L·Lᵀ = p·pᵀ, one column of L after the other.

    Rows are zero where a row of p depends on those before it. Also note whether all shares were found, if NOTE; see the
    loop on CPU.
    """
    own = table + tl.program_id(0).to(tl.int64) * 11
    partial = tl.load(own + 4).to(tl.pointer_type(tl.float64))
    inverse = tl.load(own + 5).to(tl.pointer_type(tl.float64))
    r, n = tl.load(own + 9).to(tl.int32), tl.load(own + 10)
    rank = tl.arange(0, RANKS)
    down, across = rank[:, None], rank[None, :]
    place = down * RANKS + across
    gram = tl.zeros((RANKS, RANKS), tl.float64)
    for piece in range(tl.cdiv(n, WIDTH)):
        gram += tl.load(partial + piece * RANKS * RANKS + place)
    squares = tl.sum(tl.where(down == across, gram, 0.0), 1)
    root = tl.where(down == across, 1.0, 0.0).to(tl.float64)
    product = tl.sum(tl.zeros((RANKS,), tl.float64), 0) + 1.0
    unsure = tl.sum(tl.zeros((RANKS,), tl.int32), 0)
    for k in range(r):
        column = tl.sum(tl.where(across == k, gram, 0.0), 1)
        rest = tl.sum(tl.where(rank == k, column, 0.0), 0)
        square = tl.sum(tl.where(rank == k, squares, 0.0), 0)
        error = _ROUNDING / product * square * _CERTAIN
        unsure = tl.where((rest < error) & (error > square * _DEPENDENT), 1, unsure)
        dependent = rest <= square * _DEPENDENT  # False for NaN
        product = tl.where(dependent, product, product * (rest / tl.where(dependent, 1.0, square)))
        scale = tl.where(dependent, 0.0, 1.0 / tl.sqrt(tl.where(dependent, 1.0, rest)))
        column *= scale
        line = tl.sum(tl.where(down == k, root, 0.0), 0) * scale
        left = tl.where(down > k, root - column[:, None] * line[None, :], root)
        root = tl.where(down == k, line[None, :], left)
        gram = tl.where((down > k) & (across > k), gram - column[:, None] * column[None, :], gram)
    tl.store(inverse + place, root)
    if NOTE:
        tl.store(tl.load(own + 7).to(tl.pointer_type(tl.int32)), 1 - unsure)


@kernel
def _combine(
    table, count, GIVEN: tl.constexpr, RESULT: tl.constexpr, SPARE: tl.constexpr, RANKS: tl.constexpr,
    WIDTH: tl.constexpr, SEGMENTS: tl.constexpr,
):  # fmt: skip
    """Compute a piece of the columns of ``inverse``·p; with SPARE, replace its rows of zeros."""
    own, piece = segment(table, count, 11, SEGMENTS)
    p = tl.load(own + GIVEN).to(tl.pointer_type(tl.float32))
    out = tl.load(own + RESULT).to(tl.pointer_type(tl.float32))
    inverse = tl.load(own + 5).to(tl.pointer_type(tl.float64))
    r, n = tl.load(own + 9).to(tl.int32), tl.load(own + 10)
    rank = tl.arange(0, RANKS)
    i = piece * WIDTH + tl.arange(0, WIDTH)
    total = tl.zeros((RANKS, WIDTH), tl.float64)
    for b in range(r):
        row = tl.load(p + b * n + i, mask=i < n, other=0.0).to(tl.float64)
        factor = tl.load(inverse + rank * RANKS + b)
        total = tl.where((rank >= b)[:, None], total + factor[:, None] * row[None, :], total)
    inside = (rank < r)[:, None] & (i < n)[None, :]
    value = total.to(tl.float32)
    if SPARE:
        spare = tl.load(own + 8).to(tl.pointer_type(tl.float32))
        weights = tl.load(inverse + rank[:, None] * RANKS + rank[None, :])
        gone = (tl.max((weights != 0).to(tl.int32), 1) == 0) & (rank < r)
        other = tl.load(spare + rank[:, None] * n + i[None, :], mask=inside & gone[:, None], other=0.0)
        value = tl.where(gone[:, None], other, value)
    tl.store(out + rank[:, None] * n + i[None, :], value, mask=inside)


@kernel
def _row_by_row(table, SPARE: tl.constexpr, AGAIN: tl.constexpr, RANKS: tl.constexpr, WIDTH: tl.constexpr):
    """Gram–Schmidt for matrices where Cholesky did not find the shares: subtract from each row its projections on all
    rows before it, twice. With SPARE, replace rows of zeros, and mark such matrices by 2. With AGAIN, take the results
    of matrices whose rows were replaced, and make these rows orthonormal, too.

    One program has a whole matrix; its threads synchronize wherever one writes what another may read.
    """
    own = table + tl.program_id(0).to(tl.int64) * 11
    place = tl.load(own + 7).to(tl.pointer_type(tl.int32))
    mark = tl.load(place)
    r, n = tl.load(own + 9).to(tl.int32), tl.load(own + 10)
    rank = tl.arange(0, RANKS)
    wanted = mark == 2 if AGAIN else mark == 0
    if AGAIN and RANKS <= _TALLEST:
        inverse = tl.load(own + 5).to(tl.pointer_type(tl.float64))
        known = tl.where(mark == 1, r, 0)
        found = (rank < known)[:, None] & (rank < known)[None, :]
        weights = tl.load(inverse + rank[:, None] * RANKS + rank[None, :], mask=found, other=1.0)
        wanted = wanted | (tl.min(tl.max((weights != 0).to(tl.int32), 1), 0) == 0)
    if wanted:
        p = tl.load(own + (3 if AGAIN else 1)).to(tl.pointer_type(tl.float32))
        out = tl.load(own + 3).to(tl.pointer_type(tl.float32))
        rows = tl.load(own + 6).to(tl.pointer_type(tl.float64))
        spare = tl.load(own + 8).to(tl.pointer_type(tl.float32))
        begins = rows + rank[:, None] * n
        lost = mark * 0
        for a in range(r):
            row = rows + a * n
            before = tl.zeros((WIDTH,), tl.float64)
            for first in range(0, n, WIDTH):
                i = first + tl.arange(0, WIDTH)
                value = tl.load(p + a * n + i, mask=i < n, other=0.0).to(tl.float64)
                before += value * value
                tl.store(row + i, value, mask=i < n)
            for _ in range(2):
                tl.debug_barrier()
                shares = tl.zeros((RANKS,), tl.float64)
                for first in range(0, n, WIDTH):
                    i = first + tl.arange(0, WIDTH)
                    others = tl.load(begins + i[None, :], mask=(rank < a)[:, None] & (i < n)[None, :], other=0.0)
                    shares += tl.sum(others * tl.load(row + i, mask=i < n, other=0.0)[None, :], 1)
                for first in range(0, n, WIDTH):
                    i = first + tl.arange(0, WIDTH)
                    others = tl.load(begins + i[None, :], mask=(rank < a)[:, None] & (i < n)[None, :], other=0.0)
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
            lost = tl.where(dependent, 2, lost)
            factor = tl.where(dependent, 0.0, 1.0 / tl.sqrt(tl.where(dependent, 1.0, left)))
            for first in range(0, n, WIDTH):
                i = first + tl.arange(0, WIDTH)
                value = tl.load(row + i, mask=i < n, other=0.0) * factor
                tl.debug_barrier()
                tl.store(row + i, value, mask=i < n)
                result = value.to(tl.float32)
                if SPARE:
                    other = tl.load(spare + a * n + i, mask=i < n, other=0.0)
                    result = tl.where(dependent, other, result)
                tl.store(out + a * n + i, result, mask=i < n)
        if SPARE:
            tl.store(place, lost, mask=lost > 0)


#: Columns of the table of matrices: the memory of p, of the rows after one pass, and of those after two.
_P, _ONCE, _TWICE = 1, 2, 3


def orthonormalize(p: Tensor) -> Tensor:
    return orthonormalize_all([p])[0]


def orthonormalize_all(ps: Sequence[Tensor], spares: Sequence[Tensor] = (), *, again: bool = False) -> list[Tensor]:
    """Orthonormalize by Cholesky, always twice; row by row where Cholesky cannot tell how much of a row remains beside
    those before it.

    Only the device knows which matrices need the row-by-row loop: the programs of those matrices run it, and the others
    do nothing.
    """
    outs = [torch.empty_like(p) for p in ps]
    rows = [row for p, out in zip(ps, outs, strict=True) if p.numel() for row in zip(p, out, strict=True)]
    alike: dict[int, list[tuple[Tensor, Tensor, Tensor]]] = {}
    for (own, out), spare in zip(rows, spares or [own for own, _ in rows], strict=True):
        alike.setdefault(triton.next_power_of_2(own.shape[0]), []).append((own, out, spare))
    for ranks, some in alike.items():
        _orthonormalize_alike(ranks, some, replaces=bool(spares), again=again)
    return outs


def _orthonormalize_alike(
    ranks: int, some: Sequence[tuple[Tensor, Tensor, Tensor]], *, replaces: bool, again: bool
) -> None:
    """Orthonormalize matrices of about the same number of rows, by launches for all of them."""
    tile, device = {"RANKS": ranks, "WIDTH": min(1024, max(16, _TILE // ranks))}, some[0][0].device
    numel, square = sum(p.numel() for p, *_ in some), ranks * ranks
    pieces = [-(-p.shape[1] // tile["WIDTH"]) for p, *_ in some]
    whole = some[0][0].shape[0] <= _TALLEST.value
    once = torch.empty(numel, dtype=torch.float32, device=device)
    wide = torch.empty(numel + square * (sum(pieces) + len(some)) * whole, dtype=torch.float64, device=device)
    found = (torch.empty if whole else torch.zeros)(len(some), dtype=torch.int32, device=device)
    at, wide_at, segments = once.data_ptr(), wide.data_ptr(), Segments(once)
    for number, ((p, out, spare), own) in enumerate(zip(some, pieces, strict=True)):
        (r, n), inverse = p.shape, wide_at + 8 * square * own * whole
        rows = inverse + 8 * square * whole
        places = p.data_ptr(), at, out.data_ptr(), wide_at, inverse, rows, found.data_ptr() + 4 * number
        segments.add(own, *places, spare.data_ptr(), r, n)
        at, wide_at = at + 4 * p.numel(), rows + 8 * p.numel()
    if whole:
        for given, result in ((_P, _ONCE), (_ONCE, _TWICE)):
            segments.run(_gram, GIVEN=given, **tile)
            segments.run_each(_inverse_root, NOTE=given == _P, **tile)
            segments.run(_combine, GIVEN=given, RESULT=result, SPARE=replaces and result == _TWICE, **tile)
    segments.run_each(_row_by_row, SPARE=replaces, AGAIN=False, **tile)
    if replaces and again:
        segments.run_each(_row_by_row, SPARE=False, AGAIN=True, **tile)
