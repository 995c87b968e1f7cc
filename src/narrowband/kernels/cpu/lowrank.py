"""Low rank on CPU: products of factors, and orthonormal rows. Results that ranks must agree on are summed in an order
that is the same on every machine.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from llvmlite import ir
from numba import types

from narrowband.kernels.cpu.loops import (
    F32,
    I32,
    LANES,
    At,
    inlined,
    instruction,
    loop,
    max_magnitude,
    neighbours,
    rolled,
    variant,
)
from narrowband.kernels.cpu.threads import spread
from narrowband.kernels.lowrank import DEPENDENT

if TYPE_CHECKING:
    from torch import Tensor

#: Elements of a float64 vector; rows that are multiplied with each other at once; elements of these rows per step, and
#: per update of the sums in memory.
WIDE, TILE, RUN, PIECE = 8, 4, 64, 256
#: Columns of a low-rank product that are computed together.
COLUMNS = 1024
#: If the product of the rows' shares (:func:`_inverse_root`) is at least this, rows are orthonormal to float32
#: precision after one pass; otherwise a second pass is made.
WELL_APART = 1e-8
#: A share of this many times its error is known well enough for a second pass to repair the rest.
CERTAIN = 100.0
#: The relative error of a sum of products in float64.
ROUNDING = 1e-15


@inlined
def _sum_up(p, q, i, begin, count, terms, total):
    """Add up the first ``terms`` terms of row i of pᵀ·q from column ``begin`` on."""
    a = p[0, i]
    for j in range(count):
        total[At(j)] = F32(a * q[0, At(begin + j)])
    k = 1
    while k + 4 <= terms:  # four terms per round, added one after the other
        a, b, c, d = p[k, i], p[k + 1, i], p[k + 2, i], p[k + 3, i]
        for j in range(count):
            t = F32(total[At(j)] + F32(a * q[k, At(begin + j)]))
            t = F32(t + F32(b * q[k + 1, At(begin + j)]))
            t = F32(t + F32(c * q[k + 2, At(begin + j)]))
            total[At(j)] = F32(t + F32(d * q[k + 3, At(begin + j)]))
        k += 4
    while k < terms:
        a = p[k, i]
        for j in range(count):
            total[At(j)] = F32(total[At(j)] + F32(a * q[k, At(begin + j)]))
        k += 1


@functools.cache
def _product(four: bool, accumulate: bool) -> Any:
    """Return the loop of a product of rank 4, the most common one, or of any rank; each is compiled by itself."""

    def _product_range(p, q, out, weight, total, first, last):
        """Compute rows [first, last) of weight · pᵀ·q, some columns at a time: that piece of q stays in L2."""
        r, m = q.shape
        for begin in range(0, m, COLUMNS):
            count = min(COLUMNS, m - begin)
            for i in range(first, last):
                if four:  # all terms at once
                    a, b, c, d = p[0, i], p[1, i], p[2, i], p[3, i]
                    for j in range(count):
                        t = F32(F32(a * q[0, At(begin + j)]) + F32(b * q[1, At(begin + j)]))
                        t = F32(t + F32(c * q[2, At(begin + j)]))
                        out[i, At(begin + j)] = F32(weight * F32(t + F32(d * q[3, At(begin + j)])))
                else:
                    _sum_up(p, q, i, begin, count, r, total)
                    for j in range(count):
                        value = F32(weight * total[At(j)])
                        if accumulate:
                            out[i, At(begin + j)] += value
                        else:
                            out[i, At(begin + j)] = value

    return variant(_product_range, int(four), int(accumulate))


def low_rank_product(out: Tensor, p: Tensor, q: Tensor, *, weight: float = 1.0, accumulate: bool = False) -> None:
    matrix = out.view(p.shape[1], -1).numpy()
    product, form = (
        _product(p.shape[0] == 4 and not accumulate, accumulate),
        (p.numpy(), q.numpy(), matrix, F32(weight)),
    )

    def work(first: int, last: int) -> None:
        product(*form, np.empty(COLUMNS, np.float32), first, last)

    spread(p.shape[1], p.shape[0] * matrix.size // 2, work)


@instruction
def _dot_tile(typing, sums, values, at, q, stride, start):  # noqa: ARG001 - they are types here
    """Add up the products of RUN neighbours in ``values`` with those of TILE rows of ``q`` from ``start`` on.

    Each of the TILE sums has LANES lanes, which stay in registers meanwhile.
    """

    def generate(context, builder, signature, arguments):
        kinds, i64 = signature.args, ir.IntType(64)

        def lanes(array, index):
            value = builder.load(neighbours(context, builder, kinds[array], arguments[array], index))
            value.align = 4
            return value

        def plus(index, number):
            return builder.add(index, ir.Constant(i64, number))

        totals = [lanes(0, ir.Constant(i64, LANES * k)) for k in range(TILE)]
        rows = [builder.add(arguments[5], builder.mul(arguments[4], ir.Constant(i64, k))) for k in range(TILE)]
        for step in range(0, RUN, LANES):
            value = lanes(1, plus(arguments[2], step))
            for k in range(TILE):
                totals[k] = builder.fadd(totals[k], builder.fmul(value, lanes(3, plus(rows[k], step))))
        for k, total in enumerate(totals):
            place = neighbours(context, builder, kinds[0], arguments[0], ir.Constant(i64, LANES * k))
            builder.store(total, place).align = 4
        return context.get_dummy_value()

    index = types.uintp
    return types.void(sums, values, index, q, index, index), generate


@loop
def _project_range(x, residual, values, bits, sent_p, sent_q, q, rows, p, total, sums, first, last):
    """Update rows [first, last) of the residual, and multiply them by q.

    What was sent is subtracted from the residual, and the gradient is added. ``values`` and ``bits`` are the residual,
    flat, and ``rows`` is q, flat. ``total`` has zeros where nothing was sent.
    """
    m = x.shape[1]
    r, stride = q.shape  # rows of zeros fill up the last tile
    top = I32(0)
    for i in range(first, last):
        if sent_p.shape[0]:
            _sum_up(sent_p, sent_q, i, 0, m, sent_p.shape[0], total)
        gradient, row = x[i], residual[i]
        for j in range(m):
            old = row[At(j)]
            row[At(j)] = F32(F32(old - total[At(j)]) + gradient[At(j)])
            gradient[At(j)] = old
        top = max(top, max_magnitude(bits, i * m, m))
        whole = m // RUN * RUN
        for a in range(0, r, TILE):
            for k in range(sums.size):
                sums[At(k)] = 0
            for j in range(0, whole, RUN):
                _dot_tile(sums, values, At(i * m + j), rows, At(stride), At(a * stride + j))
            for k in range(min(TILE, p.shape[0] - a)):
                product = F32(0)
                for lane in range(LANES):
                    product += sums[At(k * LANES + lane)]
                for j in range(whole, m):
                    product += F32(row[At(j)] * q[a + k, At(j)])
                p[a + k, i] = product
    return top


def compensate_project(
    x: Tensor,
    residual: Tensor,
    q: Tensor,
    p: Tensor,
    *,
    sent: tuple[Tensor, Tensor] | None = None,
    below: float = math.inf,
) -> bool:
    (r, n), m = p.shape, q.shape[1]
    tall = np.zeros((-(-r // TILE) * TILE, m), np.float32)
    tall[:r] = q.numpy()
    nothing = np.empty((0, 0), np.float32)
    sent_p, sent_q = (nothing, nothing) if sent is None else (sent[0].numpy(), sent[1].numpy())
    values = residual.view(-1).numpy()
    residuals = values.reshape(n, m), values, values.view(np.int32)
    form = x.view(n, m).numpy(), *residuals, sent_p, sent_q, tall, tall.reshape(-1), p.numpy()

    def work(first: int, last: int) -> Any:
        return _project_range(*form, np.zeros(m, np.float32), np.empty(TILE * LANES, np.float32), first, last)

    tops = spread(n, 2 * n * m, work)
    return all(top < np.float32(min(below, np.inf)).view(np.int32) for top in tops)


def _wide(builder: Any, data: Any, index: Any) -> Any:
    """Return the address of WIDE float64 from an index on."""
    return builder.bitcast(builder.gep(data, [index]), ir.VectorType(ir.DoubleType(), WIDE).as_pointer())


def _load(builder: Any, place: Any) -> Any:
    value = builder.load(place)
    value.align = 8
    return value


@instruction
def _add_tile(typing, sums, at, rows, stride, a, b):  # noqa: ARG001 - they are types here
    """Add up the products of the next RUN elements of TILE rows from place ``a`` on with those of TILE rows from ``b``
    on.

    Each of the TILE² sums has WIDE lanes in ``sums[at:]``, which stay in registers meanwhile.
    """

    def generate(context, builder, signature, arguments):
        into, data = (context.make_array(signature.args[k])(context, builder, arguments[k]).data for k in (0, 2))
        i64 = ir.IntType(64)
        places = [
            _wide(builder, into, builder.add(arguments[1], ir.Constant(i64, WIDE * k))) for k in range(TILE * TILE)
        ]
        totals = [_load(builder, place) for place in places]
        starts = [
            [builder.add(arguments[k], builder.mul(arguments[3], ir.Constant(i64, row))) for row in range(TILE)]
            for k in (4, 5)
        ]
        for step in range(0, RUN, WIDE):
            one, other = (
                [_load(builder, _wide(builder, data, builder.add(start, ir.Constant(i64, step)))) for start in side]
                for side in starts
            )
            for k in range(TILE * TILE):
                product = builder.fmul(one[k // TILE], other[k % TILE])
                totals[k] = builder.fadd(totals[k], product)
        for place, total in zip(places, totals, strict=True):
            builder.store(total, place).align = 8
        return context.get_dummy_value()

    index = types.uintp
    return types.void(sums, index, rows, index, index, index), generate


@instruction
def _combine_tile(typing, out, stride, to, factors, at, rows, start):  # noqa: ARG001
    """Add multiples of the rows from ``start`` on to 2 · WIDE elements of each of TILE rows from place ``to`` on.

    ``factors[at:]`` holds TILE factors for the first of the added rows, then for the next.
    """

    def generate(context, builder, signature, arguments):
        into, scalars, data = (
            context.make_array(signature.args[k])(context, builder, arguments[k]).data for k in (0, 3, 5)
        )
        i64, vector = ir.IntType(64), ir.VectorType(ir.DoubleType(), WIDE)
        unset, first = ir.Constant(vector, ir.Undefined), ir.Constant(ir.VectorType(ir.IntType(32), WIDE), [0] * WIDE)

        def row(base, k, half):
            offset = builder.mul(arguments[1], ir.Constant(i64, k))
            return builder.add(base, builder.add(offset, ir.Constant(i64, half * WIDE)))

        halves = range(2)
        places = [[_wide(builder, into, row(arguments[2], k, half)) for half in halves] for k in range(TILE)]
        totals = [[_load(builder, place) for place in pair] for pair in places]
        for b in range(TILE):
            values = [_load(builder, _wide(builder, data, row(arguments[6], b, half))) for half in halves]
            for k in range(TILE):
                index = builder.add(arguments[4], ir.Constant(i64, b * TILE + k))
                scalar = builder.load(builder.gep(scalars, [index]))
                one = builder.insert_element(unset, scalar, ir.Constant(ir.IntType(32), 0))
                factor = builder.shuffle_vector(one, unset, first)
                for half in halves:
                    totals[k][half] = builder.fadd(totals[k][half], builder.fmul(factor, values[half]))
        for pair, sums in zip(places, totals, strict=True):
            for place, total in zip(pair, sums, strict=True):
                builder.store(total, place).align = 8
        return context.get_dummy_value()

    index = types.uintp
    return types.void(out, index, index, factors, index, rows, index), generate


@inlined
def _widen(p, begin, rows):
    """Return PIECE columns of p from ``begin`` on, as float64; zeros behind the end of p."""
    count = min(PIECE, p.shape[1] - begin)
    for a in range(p.shape[0]):
        for i in range(count):
            rows[a, At(i)] = p[a, At(begin + i)]
        for i in range(count, PIECE):
            rows[a, At(i)] = 0.0


@loop
def _gram(p, rows, flat, sums, gram):
    """Compute ``gram ← p·pᵀ``, on and below the diagonal, piece by piece: the float64 pieces stay in the caches."""
    tall, stride = rows.shape
    for at in range(sums.size):
        sums[At(at)] = 0.0
    for begin in range(0, p.shape[1], PIECE):
        _widen(p, begin, rows)
        at = 0
        for a in range(0, tall, TILE):
            for b in range(0, a + 1, TILE):
                for i in range(0, rolled(PIECE), RUN):
                    _add_tile(sums, At(at), flat, At(stride), At(a * stride + i), At(b * stride + i))
                at += TILE * TILE * WIDE
    at = 0
    for a in range(0, tall, TILE):
        for b in range(0, a + 1, TILE):
            for k in range(rolled(TILE * TILE)):
                total = 0.0
                for lane in range(WIDE):
                    total += sums[at + lane]
                gram[a + k // TILE, b + k % TILE] = total
                at += WIDE


@loop
def _inverse_root(gram, root, inverse):
    """Invert the lower triangular L with L·Lᵀ = gram; rows are zero where a row of p depends on those before it.

    A row's share is the part of its squared norm that remains after subtracting its projection on the rows before it.
    Returns the product of all shares except those of dependent rows, and whether each share was found. If the shares of
    the rows before have a product of π, a row's factors are known to ROUNDING / π of the row, and so is its share: rows
    of very different length, each nearly dependent on the last, leave nothing of that precision.
    """
    r = gram.shape[0]
    product, found = 1.0, True
    for a in range(r):
        for b in range(a):
            rest = gram[a, b]
            for c in range(b):
                rest -= root[a, c] * root[b, c]
            root[a, b] = rest / root[b, b] if root[b, b] > 0 else 0.0
        rest = gram[a, a]
        for c in range(a):
            rest -= root[a, c] * root[a, c]
        for b in range(r):
            inverse[a, b] = 0.0
        error = ROUNDING / product * gram[a, a]
        if rest < CERTAIN * error and CERTAIN * error > DEPENDENT * gram[a, a]:
            found = False
        if rest > DEPENDENT * gram[a, a]:
            product *= rest / gram[a, a]
            root[a, a] = np.sqrt(rest)
            for b in range(a):
                total = 0.0
                for c in range(b, a):
                    total += root[a, c] * inverse[c, b]
                inverse[a, b] = -total / root[a, a]
            inverse[a, a] = 1.0 / root[a, a]
        else:
            for b in range(r):
                root[a, b] = 0.0
    return product, found


@loop
def _combine(inverse, p, rows, flat, sums, into, factors, out):
    """Compute ``out ← inverse·p`` for a lower triangular inverse."""
    tall, stride = rows.shape
    at = 0
    for a in range(0, tall, TILE):
        for b in range(a + TILE):
            for k in range(TILE):
                factors[at] = inverse[a + k, b]
                at += 1
    for begin in range(0, p.shape[1], PIECE):
        _widen(p, begin, rows)
        for at in range(into.size):
            into[At(at)] = 0.0
        for i in range(0, rolled(PIECE), 2 * WIDE):
            at = 0
            for a in range(0, tall, TILE):
                for b in range(0, a + 1, TILE):
                    _combine_tile(into, At(stride), At(a * stride + i), factors, At(at), flat, At(b * stride + i))
                    at += TILE * TILE
        count = min(PIECE, p.shape[1] - begin)
        for a in range(p.shape[0]):
            for i in range(count):
                out[a, At(begin + i)] = sums[a, At(i)]


@inlined
def _dot(a, b, n, sums):
    """Return a·b of the first n elements; ``sums`` has WIDE elements."""
    for lane in range(WIDE):
        sums[At(lane)] = 0.0
    whole = n // WIDE * WIDE
    for i in range(0, whole, WIDE):
        for lane in range(WIDE):
            sums[At(lane)] += a[At(i + lane)] * b[At(i + lane)]
    total = 0.0
    for lane in range(WIDE):
        total += sums[At(lane)]
    for i in range(whole, n):
        total += a[At(i)] * b[At(i)]
    return total


@loop
def _row_by_row(p, out, sums):
    """Gram–Schmidt: subtract from each row its projection on every row before it, twice."""
    r, n = p.shape
    rows = np.empty((r, n))
    for a in range(r):
        row = rows[a]
        for i in range(n):
            row[At(i)] = p[a, At(i)]
        before = _dot(row, row, n, sums)
        for _ in range(2):
            for b in range(a):
                share = _dot(row, rows[b], n, sums)
                for i in range(n):
                    row[At(i)] -= share * rows[b, At(i)]
        rest = _dot(row, row, n, sums)
        factor = 0.0 if rest <= DEPENDENT * before else 1.0 / np.sqrt(rest)
        for i in range(n):
            row[At(i)] *= factor
            out[a, At(i)] = row[At(i)]


def orthonormalize(p: Tensor) -> Tensor:
    """Orthonormalize by Cholesky: p·pᵀ = L·Lᵀ, and the rows of L⁻¹·p are orthonormal.

    The pass is repeated if the rows of p are hardly independent. Sums are in float64. If even these do not determine
    how much of a row remains beside those before it, Gram–Schmidt treats the rows one by one, which takes longer.
    """
    out = torch.empty_like(p)
    if not p.numel():
        return out
    tall = -(-p.shape[1] // TILE) * TILE
    tiles = tall // TILE
    rows = np.zeros((tall, PIECE + WIDE))  # WIDE more: rows a power of two apart would collide in caches
    gram, root, inverse = (np.zeros((tall, tall)) for _ in range(3))
    sums, factors = np.empty_like(rows), np.empty(tall * tall)  # factors tile by tile, in the order of their use
    products = np.empty(tiles * (tiles + 1) // 2 * TILE * TILE * WIDE)
    flat, flat_sums = rows.reshape(-1), sums.reshape(-1)
    for matrix, result in zip(p.numpy(), out.numpy(), strict=True):
        _gram(matrix, rows, flat, products, gram)
        product, found = _inverse_root(gram, root, inverse)
        if not found:
            _row_by_row(matrix, result, np.empty(WIDE))
            continue
        _combine(inverse, matrix, rows, flat, sums, flat_sums, factors, result)
        if product < WELL_APART:
            once = result.copy()
            _gram(once, rows, flat, products, gram)
            _inverse_root(gram, root, inverse)
            _combine(inverse, once, rows, flat, sums, flat_sums, factors, result)
    return out
