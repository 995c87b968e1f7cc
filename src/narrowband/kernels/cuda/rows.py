"""Rows of codes with shared ranges, in Triton.

A program has some bytes of some rows, and the elements in these bytes; or it has some of the ranges.

If estimates adapt, the rows of a program share one range, so that it notes only two numbers: the extremes that it has
seen. In a second launch, each program settles the range of its rows from the notes of all programs of that range, and
returns early if its codes are good. Tensors are passed in any shape: the host makes no views.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl

from narrowband.kernels.cuda.common import (
    ALL,
    BLOCK,
    INFINITE,
    LEAST,
    MAGNITUDE,
    TINY,
    code_of,
    ends,
    fold_seed,
    load,
    mix,
    ordered,
    raw,
    store,
)
from narrowband.kernels.cuda.launching import Launch, kernel, run
from narrowband.kernels.reference import rows as reference
from narrowband.kernels.reference.rows import affine_rows, learning
from narrowband.kernels.rows import FEWEST_ZEROED, RAISE, TRIES

if TYPE_CHECKING:
    from torch import Tensor

    from narrowband.kernels.rows import Affine, Rows, Standard

__all__ = [
    "code_ranges",
    "dequantize_rows",
    "learn_ranges",
    "quantize_rows",
    "quantize_rows_adapting",
    "quantize_rows_extremes",
    "quantize_rows_learning",
    "row_extremes",
]

_MOST = tl.constexpr(2**31 - 1)
_TRIES, _RAISE = tl.constexpr(TRIES), tl.constexpr(RAISE)
#: The most neighbouring elements that a thread reads at once.
_VECTOR = 8


#: Arguments that differ from layer to layer and are not specialized: loops gain nothing if one is 1 or divisible by 16,
#: or points to such a place.
counting: Any = triton.jit(
    do_not_specialize=[
        "ranges", "estimates", "made", "note", "count", "outer", "groups", "blocks", "workers", "turns", "pieces",
        "folded",
    ]
)  # fmt: skip


@kernel
def _ints(place):
    """View memory of floats as integers."""
    return place.to(tl.pointer_type(tl.int32), bitcast=True)


@kernel
def _bits(place, HALF: tl.constexpr):
    """View memory of bfloat16 as :func:`load` and :func:`store` take it. A view on the host would cost a third of a
    launch.
    """
    if HALF:
        return place.to(tl.pointer_type(tl.int16), bitcast=True)
    else:
        return place


@kernel
def _numbers(piece, count, ROWS: tl.constexpr, FEW: tl.constexpr):
    """Return the numbers of a piece's rows, also in 64 bits, for addresses. Divisions use 32 bits if FEW: with 64 bits
    a GPU takes four times as long.

    Behind the last of all rows, it is returned again. So a program need not ask whether a row exists before it reads,
    and what it writes twice is the same.
    """
    r = piece.to(tl.int32 if FEW else tl.int64) * ROWS + tl.arange(0, ROWS)
    r = tl.minimum(r, count - 1)
    return r, r.to(tl.int64)


@kernel
def _place(
    count, blocks, outer, groups, ROWS: tl.constexpr, WIDTH: tl.constexpr, FEW: tl.constexpr, PARTED: tl.constexpr,
    GROUPED: tl.constexpr,
):  # fmt: skip
    """Return this program's rows, also in 64 bits; their lines, groups and ranges; and the program's bytes of a row."""
    at = tl.program_id(0)
    piece = at // blocks
    r, wide = _numbers(piece, count, ROWS, FEW)
    t = (at - piece * blocks).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    line, group = _line(r, groups, GROUPED)
    which = group
    if PARTED:
        which = line // outer * groups + group
    return r, wide, line, group, which, t


@kernel
def _line(r, groups, GROUPED: tl.constexpr):
    """Return the lines and groups of rows."""
    line, group = r, r * 0
    if GROUPED:
        line = r // groups
        group = r - line * groups
    return line, group


@kernel
def _there(r, j, length, WHOLE: tl.constexpr):
    """Return which places of rows exist, as a mask. If rows are WHOLE it is a constant, and costs no instruction."""
    if WHOLE:
        return tl.full((r.shape[0], j.shape[0]), 1, tl.int1)
    else:
        return (r >= 0)[:, None] & (j < length)[None, :]


@kernel
def _code(v, i, low, inverse, BITS: tl.constexpr, STOCHASTIC: tl.constexpr):
    """Return codes of values; ``i`` are the sums of elements' indices and the folded seed."""
    shift = 0.5
    if STOCHASTIC:
        shift = (mix(i.to(tl.uint32)) >> 16).to(tl.int32).to(tl.float32) * (2.0**-16)
    return code_of(v, low, inverse, shift, (1 << BITS) - 1.0)


@kernel
def _quantize(
    x, out, lows, steps, count, outer, groups, inner, apart, stride, blocks, folded,
    HALF: tl.constexpr, BITS: tl.constexpr, STOCHASTIC: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    FEW: tl.constexpr, WHOLE: tl.constexpr, PARTED: tl.constexpr, GROUPED: tl.constexpr,
):  # fmt: skip
    _r, wide, line, group, which, t = _place(count, blocks, outer, groups, ROWS, WIDTH, FEW, PARTED, GROUPED)
    low, step = tl.load(lows + which), tl.load(steps + which)
    inverse = tl.where(step < TINY, 0.0, tl.div_rn(tl.zeros_like(step) + 1.0, step))
    begin = line.to(tl.int64) * apart + group.to(tl.int64) * inner
    first = (wide * inner + folded).to(tl.int32)
    byte = tl.zeros((ROWS, WIDTH), tl.int32)
    for part in tl.static_range(8 // BITS):
        j = part * stride + t
        there = _there(wide, tl.where(t < stride, j, inner), inner, WHOLE)
        v = load(x + begin[:, None] + j[None, :], there, HALF)
        code = _code(v, first[:, None] + j[None, :].to(tl.int32), low[:, None], inverse[:, None], BITS, STOCHASTIC)
        byte |= tl.where(there, code, 0) << (part * BITS)
    tl.store(out + (wide * stride)[:, None] + t[None, :], byte.to(tl.uint8), mask=_there(wide, t, stride, WHOLE))


@counting
def _dequantize(
    codes, out, factor, term, ranges, count, outer, groups, inner, stride, blocks, pieces,
    FACTOR: tl.constexpr, TERM: tl.constexpr, MOVES: tl.constexpr, HALF: tl.constexpr, BITS: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, FEW: tl.constexpr, WHOLE: tl.constexpr, PARTED: tl.constexpr,
    GROUPED: tl.constexpr, PIECED: tl.constexpr,
):  # fmt: skip
    """Decode rows. PIECED says how many rows a row of the affine part has: 0 if one, 1 if one of each group."""
    r, wide, line, group, which, t = _place(count, blocks, outer, groups, ROWS, WIDTH, FEW, PARTED, GROUPED)
    low = tl.load(ranges + which)
    step = tl.load(ranges + count // outer + which)
    if PIECED == 0:
        line = r
    elif PIECED == 2:
        line = r // pieces
        group = r - line * pieces
    first = tl.zeros_like(wide)  # of a row of the affine part
    if MOVES == 0:
        first = line.to(tl.int64)
    elif PIECED > 0:
        first = group.to(tl.int64) * inner
    begin = wide * inner
    byte = tl.load(codes + (wide * stride)[:, None] + t[None, :], mask=_there(wide, t, stride, WHOLE))
    for part in tl.static_range(8 // BITS):
        j = part * stride + t
        there = _there(wide, tl.where(t < stride, j, inner), inner, WHOLE)
        code = (byte.to(tl.int32) >> (part * BITS)) & ((1 << BITS) - 1)
        value = code.to(tl.float32) * step[:, None] + low[:, None]
        at = first[:, None] + (j * MOVES)[None, :]
        if FACTOR:
            value = value * tl.load(factor + at, mask=there)
        if TERM:
            value = value + tl.load(term + at, mask=there)
        store(_bits(out, HALF) + begin[:, None] + j[None, :], value, there, HALF)


@kernel
def _extremes(
    x, least, most, count, groups, inner, apart,
    HALF: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, FEW: tl.constexpr, WHOLE: tl.constexpr,
    GROUPED: tl.constexpr,
):  # fmt: skip
    VECTOR: tl.constexpr = 8 if HALF else 4
    r, _ = _numbers(tl.program_id(0), count, ROWS, FEW)
    line, group = _line(r, groups, GROUPED)
    begin = line.to(tl.int64) * apart + group.to(tl.int64) * inner
    high = tl.full((ROWS, WIDTH // VECTOR), LEAST, tl.int32)
    least_raised = tl.full((ROWS, WIDTH // VECTOR), ALL, tl.uint32)
    most_raised = tl.zeros((ROWS, WIDTH // VECTOR), tl.uint32)
    for first in range(0, inner, WIDTH):
        j = first + tl.arange(0, WIDTH)
        there = _there(r, j, inner, WHOLE)
        v = load(x + begin[:, None] + j[None, :], there, HALF)
        high, least_raised, most_raised = _seen(v, there, high, least_raised, most_raised)
    low, high, finite = ends(tl.max(high, 1), tl.min(least_raised, 1), tl.max(most_raised, 1))
    tl.store(least + r, tl.where(finite, ordered(low), LEAST))
    tl.store(most + r, ordered(high))


@kernel
def _seen(v, there, most, least_raised, most_raised):
    """Return extremes of bits, as :func:`ends` takes them, of some values and those before. Neighbours that a thread
    has read at once have extremes of their own.
    """
    bits = v.to(tl.int32, bitcast=True)
    raised = bits.to(tl.uint32, bitcast=True)
    highest, lowest_raised = tl.where(there, bits, LEAST), tl.where(there, raised, ALL)
    highest_raised = tl.where(there, raised, 0)
    shape: tl.constexpr = (most.shape[0], most.shape[1], v.shape[1] // most.shape[1])
    most = tl.maximum(most, tl.max(tl.reshape(highest, shape), 2))
    least_raised = tl.minimum(least_raised, tl.min(tl.reshape(lowest_raised, shape), 2))
    return most, least_raised, tl.maximum(most_raised, tl.max(tl.reshape(highest_raised, shape), 2))


@kernel
def _learn(estimates, lows, highs, learned, seen, groups, decay, rest, WIDTH: tl.constexpr):
    """Compute new estimates; note the largest share by which an end of this program's ranges has moved, or NaN, and
    whether twice an end is infinite.
    """
    g = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    there = g < groups
    low, high = tl.load(lows + g, mask=there, other=0.0), tl.load(highs + g, mask=there, other=0.0)
    width, begin = tl.load(estimates + g, mask=there, other=0.0), tl.load(estimates + groups + g, mask=there, other=0.0)
    wider = width * decay + (high - low) * rest
    later = begin * decay + low * rest
    tl.store(learned + g, wider, mask=there)
    tl.store(learned + groups + g, later, mask=there)
    first = later - begin
    last = tl.abs(first + (wider - width))
    first = tl.abs(first)
    moved = tl.where((first > last) | (first != first), first, last)  # noqa: PLR0124 - NaN stays NaN
    share = tl.where(moved == 0.0, 0.0, tl.div_rn(moved, tl.where(there, wider, 1.0)))
    share = tl.where(there, share, float("-inf"))
    top = tl.where((high > -low) | (high != high), high, -low) * 2.0  # noqa: PLR0124
    unknown = tl.max((share != share).to(tl.int32), 0) > 0  # noqa: PLR0124
    tl.store(seen + tl.program_id(0), tl.where(unknown, float("nan"), tl.max(share, 0)))
    infinite = (top.to(tl.int32, bitcast=True) & MAGNITUDE) >= INFINITE
    tl.store(seen + tl.num_programs(0) + tl.program_id(0), tl.max((there & infinite).to(tl.int32), 0).to(tl.float32))


@counting
def _settle(
    estimates, ranges, count, levels,
    BITS: tl.constexpr, SYMMETRIC: tl.constexpr, ZEROED: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Compute low and step of ranges."""
    i = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    alpha = tl.load(estimates + i, mask=i < count, other=0.0)
    beta = tl.load(estimates + count + i, mask=i < count, other=0.0)
    low, step = _range(alpha, beta, levels, BITS, SYMMETRIC, ZEROED, True)
    tl.store(ranges + i, low, mask=i < count)
    tl.store(ranges + count + i, step, mask=i < count)


@kernel
def _range(
    alpha, beta, levels, BITS: tl.constexpr, SYMMETRIC: tl.constexpr, ZEROED: tl.constexpr, SEVERAL: tl.constexpr
):  # fmt: skip
    """Return low and step of codes for an estimate, or for SEVERAL; see
    :func:`narrowband.kernels.rows.code_ranges`.
    """
    high = alpha + beta
    if SYMMETRIC:
        middle: tl.constexpr = (1 << (BITS - 1)) - 1.0
        top = tl.where((high > -beta) | (high != high), high, -beta) * 2.0  # noqa: PLR0124 - NaN stays NaN
        zero = top * 0.0 + middle
        step = _centred(tl.div_rn(top, zero * 2.0), zero, top == top, SEVERAL)  # noqa: PLR0124
        low = -(step * zero)
    elif ZEROED:
        inside = (beta < 0.0) & (high >= 0.0)
        below = tl.minimum(tl.floor(tl.div_rn(-beta, alpha) * levels), levels)
        above = levels - 1.0 - below
        lower = -beta * above <= high * below
        width, count = tl.where(lower, -beta, high), tl.where(lower, below, above)
        zero = tl.where(lower, below, below + 1.0)
        step = tl.div_rn(tl.where(inside, width, alpha), tl.where(inside, count, levels))
        step = _centred(step, zero, inside, SEVERAL)
        low = tl.where(inside, -(zero * step), beta)
    else:
        low, step = beta, tl.div_rn(alpha, levels)
    return low, step


@kernel
def _centred(step, zero, meant, SEVERAL: tl.constexpr):
    """Return steps with which the codes ``zero`` stand for exactly zero, where this is meant."""
    step = tl.where(meant & (step < TINY), 0.0, step)
    meant = meant & (step > 0.0) & (step < float("inf"))
    word = step.to(tl.int32, bitcast=True)
    step = tl.where(meant, (word + 0xFF) & -0x100, word).to(tl.float32, bitcast=True)
    missed = meant & ((zero * step) * tl.div_rn(step * 0.0 + 1.0, step) != zero)
    tries = 1
    while _any(missed, SEVERAL) & (tries < _TRIES):  # most steps need no other try
        word = step.to(tl.int32, bitcast=True)
        step = tl.where(missed, word + _RAISE, word).to(tl.float32, bitcast=True)
        missed = meant & ((zero * step) * tl.div_rn(step * 0.0 + 1.0, step) != zero)
        tries += 1
    return step


@kernel
def _any(at, SEVERAL: tl.constexpr):
    if SEVERAL:
        return tl.max(at.to(tl.int32), 0) > 0
    else:
        return at


@counting
def _quantize_group(
    x, out, mean, deviation, estimates, made, outer, groups, inner, apart, stride, blocks, workers, turns, pieces,
    levels, folded,
    STANDARD: tl.constexpr, HALF: tl.constexpr, BITS: tl.constexpr, STOCHASTIC: tl.constexpr, ROWS: tl.constexpr,
    WIDTH: tl.constexpr, FEW: tl.constexpr, WHOLE: tl.constexpr, PIECED: tl.constexpr, SYMMETRIC: tl.constexpr,
    ZEROED: tl.constexpr,
):  # fmt: skip
    """Make codes of some tiles of a group by its estimate, and note their extremes."""
    VECTOR: tl.constexpr = 8 if HALF else 4
    at = tl.program_id(0)
    g, worker = at // workers, at % workers
    low, step = _range(tl.load(estimates + g), tl.load(estimates + groups + g), levels, BITS, SYMMETRIC, ZEROED, False)
    most = tl.full((ROWS, WIDTH // VECTOR), LEAST, tl.int32)
    least_raised = tl.full((ROWS, WIDTH // VECTOR), ALL, tl.uint32)
    most_raised = tl.zeros((ROWS, WIDTH // VECTOR), tl.uint32)
    for turn in range(turns):
        most, least_raised, most_raised = _quantize_tile(
            x, out, mean, deviation, low, step, most, least_raised, most_raised, worker + turn * workers, g, outer,
            groups, inner, apart, stride, blocks, pieces, folded, STANDARD, HALF, BITS, STOCHASTIC, ROWS, WIDTH, FEW,
            WHOLE, PIECED, True,
        )  # fmt: skip
    most, most_raised = tl.max(tl.max(most, 1), 0), tl.max(tl.max(most_raised, 1), 0)
    low, high, _finite = ends(most, tl.min(tl.min(least_raised, 1), 0), most_raised)
    seen = _ints(made) + 4 * groups + 2 * at
    tl.store(seen, ordered(low))
    tl.store(seen + 1, ordered(high))


@counting
def _quantize_group_again(
    x, out, mean, deviation, estimates, made, note, outer, groups, inner, apart, stride, blocks, workers, turns,
    pieces, levels, decay, rest, drift, jump, folded,
    STANDARD: tl.constexpr, HALF: tl.constexpr, BITS: tl.constexpr, STOCHASTIC: tl.constexpr, ROWS: tl.constexpr,
    WIDTH: tl.constexpr, FEW: tl.constexpr, WHOLE: tl.constexpr, PIECED: tl.constexpr, SYMMETRIC: tl.constexpr,
    ZEROED: tl.constexpr, TURN: tl.constexpr,
):  # fmt: skip
    """Settle the range of a group, and make the codes of some tiles again if necessary.

    Each program of the group computes the range for itself, and one of them writes it.
    """
    at = tl.program_id(0)
    g, worker = at // workers, at % workers
    low = tl.full((TURN,), _MOST, tl.int32)
    high = tl.full((TURN,), LEAST, tl.int32)
    for first in range(0, workers, TURN):
        other = first + tl.arange(0, TURN)
        place = _ints(made) + 4 * groups + 2 * (g * workers + other)
        low = tl.minimum(low, tl.load(place, mask=other < workers, other=_MOST))
        high = tl.maximum(high, tl.load(place + 1, mask=other < workers, other=LEAST))
    low = tl.min(low, 0)
    high = tl.max(high, 0)
    finite = (high < INFINITE) & (low >= -INFINITE)
    low, high = ordered(low).to(tl.float32, bitcast=True), ordered(high).to(tl.float32, bitcast=True)
    top = tl.where(high > -low, high, -low) * 2.0
    finite = finite & ((top.to(tl.int32, bitcast=True) & MAGNITUDE) < INFINITE)
    width, begin = tl.load(estimates + g), tl.load(estimates + groups + g)
    own = high - low
    wider = width * decay + own * rest
    later = begin * decay + low * rest
    near = later - begin
    far = tl.abs(near + (wider - width))
    near = tl.abs(near)
    moved = tl.where((near > far) | (near != near), near, far)  # noqa: PLR0124 - NaN stays NaN
    moved = tl.where(moved == 0.0, 0.0, tl.div_rn(moved, wider))
    drifted = finite & (moved > drift)
    jumped = own > width * jump
    chosen_width = tl.where(drifted, tl.where(jumped, own, wider), width)
    chosen_low = tl.where(drifted, tl.where(jumped, low, later), begin)
    chosen_low, step = _range(chosen_width, chosen_low, levels, BITS, SYMMETRIC, ZEROED, False)
    chosen_low, step = tl.where(finite, chosen_low, float("nan")), tl.where(finite, step, float("nan"))
    if worker == 0:
        tl.store(made + g, chosen_low)
        tl.store(made + groups + g, step)
        tl.store(made + 2 * groups + g, tl.where(finite, wider, width))
        tl.store(made + 3 * groups + g, tl.where(finite, later, begin))
        share = tl.where(own == 0.0, 0.0, tl.div_rn(own, width))
        tl.atomic_max(_ints(note), tl.where(finite, share, float("inf")).to(tl.int32, bitcast=True))
    if drifted | (finite == 0):
        for turn in range(turns):
            _quantize_tile(
                x, out, mean, deviation, chosen_low, step, g, g, g, worker + turn * workers, g, outer, groups, inner,
                apart, stride, blocks, pieces, folded, STANDARD, HALF, BITS, STOCHASTIC, ROWS, WIDTH, FEW,
                WHOLE, PIECED, False,
            )  # fmt: skip


@kernel
def _quantize_tile(
    x, out, mean, deviation, low, step, most, least_raised, most_raised, tile, g, outer, groups, inner, apart, stride,
    blocks, pieces, folded, STANDARD: tl.constexpr, HALF: tl.constexpr, BITS: tl.constexpr, STOCHASTIC: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, FEW: tl.constexpr, WHOLE: tl.constexpr, PIECED: tl.constexpr,
    SEARCHES: tl.constexpr,
):  # fmt: skip
    """Make codes of some bytes of some rows of a group; return the extremes so far, if it SEARCHES; see
    :func:`_seen`.
    """
    piece = tile // blocks
    o = tl.minimum(piece.to(tl.int64) * ROWS + tl.arange(0, ROWS), outer - 1)  # as in _numbers
    t = (tile - piece * blocks).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    r = o * groups + g
    inverse = tl.where(step < TINY, 0.0, tl.div_rn(1.0, step))
    begin = o * apart + g.to(tl.int64) * inner
    first = (r * inner + folded).to(tl.int32)
    byte = tl.zeros((ROWS, WIDTH), tl.int32)
    if STANDARD:
        row = r
        if PIECED == 1:
            row = o
        elif PIECED == 2:
            row = (r.to(tl.int32) if FEW else r) // pieces
        center, scale = tl.load(mean + row), tl.load(deviation + row)
    for part in tl.static_range(8 // BITS):
        j = part * stride + t
        there = _there(o, tl.where(t < stride, j, inner), inner, WHOLE)
        v = load(_bits(x, HALF) + begin[:, None] + j[None, :], there, HALF)
        if STANDARD:
            v = (v - center[:, None]) * scale[:, None]
        code = _code(v, first[:, None] + j[None, :].to(tl.int32), low, inverse, BITS, STOCHASTIC)
        byte |= tl.where(there, code, 0) << (part * BITS)
        if SEARCHES:
            most, least_raised, most_raised = _seen(v, there, most, least_raised, most_raised)
    tl.store(out + (r * stride)[:, None] + t[None, :], byte.to(tl.uint8), mask=_there(o, t, stride, WHOLE))
    return most, least_raised, most_raised


def _spaced(x: Tensor, rows: Rows) -> tuple[Tensor, int]:
    """Return a tensor, and how far apart neighbouring lines of rows are in it."""
    line = rows.groups * rows.inner
    if x.is_contiguous():
        return x, line
    if x.dim() == 2 and x.shape[1] == line and (x.stride(1) == 1 or line == 1):
        return x, x.stride(0)
    return x.contiguous(), line


#: Ranges per program of :func:`code_ranges`.
_RANGES = 256
#: The narrowest tile of rows that are divided into several tiles without a rest.
_NARROW = 64


def _tile(length: int, rows: Rows, bits: int = 8) -> dict[str, int]:
    """Return constants of loops over rows of ``length`` bytes of codes: rows and columns of a program's tile, whether
    32 bits can count all rows, whether each tile is WHOLE, and whether there are several groups.
    """
    width = length & -length  # the largest power of two that divides the length
    if width < _NARROW:
        width = max(_VECTOR, triton.next_power_of_2(length))
    width = min(BLOCK, width)
    return {
        "ROWS": BLOCK // width, "WIDTH": width, "FEW": int(rows.total <= (1 << 31) - 2 * BLOCK),
        "WHOLE": int(length % width == 0 and rows.inner * bits == 8 * length), "GROUPED": int(rows.groups > 1),
    }  # fmt: skip


def quantize_rows(
    x: Tensor, out: Tensor, rows: Rows, low: Tensor, step: Tensor, *, bits: int, stochastic: bool, seed: int = 0
) -> None:
    if not rows.numel:
        return
    x, apart = _spaced(x, rows)
    programs, stride, blocks, tile = _cut(rows, bits)
    form = rows.total, rows.outer, rows.groups, rows.inner, apart, stride, blocks, fold_seed(seed)
    own, half = raw(x)
    run(_quantize, programs, own, out, low, step, *form, on=x, HALF=half, BITS=bits, STOCHASTIC=stochastic, **tile)


def dequantize_rows(
    codes: Tensor, out: Tensor, rows: Rows, ranges: Tensor, *, bits: int, affine: Affine | None = None
) -> None:
    factor, term, length, by_row = affine or (None, None, rows.inner, False)
    launch = _decoding(rows, bits, length, factor is not None, term is not None, by_row, out.dtype == torch.bfloat16)
    if launch is None:
        affine_rows(dequantize_rows, codes, out, rows, ranges, affine, bits)
        return
    launch(out, (codes, out, ranges if factor is None else factor, ranges if term is None else term, ranges))


@functools.lru_cache(maxsize=1 << 12)
def _decoding(rows: Rows, bits: int, length: int, scaled: bool, moved: bool, by_row: bool, half: bool) -> Launch | None:
    """Return how to decode tensors of one form, whose affine map is of ``length`` elements. None: it does not consist
    of whole rows.
    """
    if not rows.numel:
        return Launch(_dequantize, 0, ())
    if length % rows.inner:
        return None
    programs, stride, blocks, tile = _cut(rows, bits)
    numbers = rows.total, rows.outer, rows.groups, rows.inner, stride, blocks, length // rows.inner
    form = {"FACTOR": scaled, "TERM": moved, "MOVES": 0 if by_row else 1, "HALF": half, "BITS": bits}
    return Launch(_dequantize, programs, numbers, **form, PIECED=_pieced(length, rows), **tile)


def _pieced(length: int, rows: Rows) -> int:
    """Return how a line of this length consists of rows: 0 if it is one row, 1 if it has one row of each group."""
    return 0 if length == rows.inner else 1 if length == rows.groups * rows.inner else 2


@functools.lru_cache(maxsize=1 << 12)
def _cut(rows: Rows, bits: int) -> tuple[int, int, int, dict[str, int]]:
    """Return programs, bytes of a row, pieces of a row, and the tile, if each program has one tile."""
    stride = -(-rows.inner * bits // 8)
    tile = _tile(stride, rows, bits) | {"PARTED": int(rows.parts > 1)}
    blocks = -(-stride // tile["WIDTH"])
    return -(-rows.total // tile["ROWS"]) * blocks, stride, blocks, tile


def row_extremes(x: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
    size, device = rows.parts * rows.groups, x.device
    if not rows.numel:
        low = torch.full((size,), torch.nan, dtype=torch.float32, device=device)
        return low, low.clone()
    x, apart = _spaced(x, rows)
    least, most = (torch.empty(rows.total, dtype=torch.int32, device=device) for _ in range(2))
    tile = _tile(rows.inner, rows)
    form = rows.total, rows.groups, rows.inner, apart
    own, half = raw(x)
    run(_extremes, -(-rows.total // tile["ROWS"]), own, least, most, *form, on=x, HALF=half, **tile)
    shape = rows.parts, rows.outer, rows.groups
    low, high = least.view(shape).amin(1).view(-1), most.view(shape).amax(1).view(-1)
    finite = (high < INFINITE.value) & (low >= -INFINITE.value)
    floats = ((at ^ ((at >> 31) & 0x7FFFFFFF)).view(torch.float32) for at in (low, high))
    least, most = (torch.where(finite, at, torch.nan) for at in floats)
    return least, most


def quantize_rows_extremes(
    x: Tensor, out: Tensor, rows: Rows, low: Tensor, step: Tensor, *, bits: int, stochastic: bool, seed: int = 0
) -> tuple[Tensor, Tensor]:
    quantize_rows(x, out, rows, low, step, bits=bits, stochastic=stochastic, seed=seed)
    return row_extremes(x, rows)


def learn_ranges(estimates: Tensor, low: Tensor, high: Tensor, decay: float) -> tuple[Tensor, bool, float]:
    groups = low.numel()
    learned = torch.empty_like(estimates)
    if not groups:
        return learned, True, 0.0
    programs = -(-groups // BLOCK)
    seen = estimates.new_empty(2, programs)
    arrays = (x.contiguous() for x in (estimates, low, high))
    run(_learn, programs, *arrays, learned, seen, groups, float(decay), 1.0 - decay, on=estimates, WIDTH=BLOCK)
    far, infinite = seen.amax(1).tolist()
    return learned, not infinite, far


def code_ranges(estimates: Tensor, *, bits: int, symmetric: bool, zeroed: bool) -> Tensor:
    estimates, groups = estimates.contiguous(), estimates.shape[1]
    ranges, levels = torch.empty_like(estimates), float((1 << bits) - 1)
    run(
        _settle, -(-groups // _RANGES), estimates, ranges, groups, levels, on=estimates, BITS=bits, SYMMETRIC=symmetric,
        ZEROED=zeroed, WIDTH=_RANGES,
    )  # fmt: skip
    return ranges


quantize_rows_learning = functools.partial(learning, code_ranges, quantize_rows_extremes, learn_ranges)


#: Bytes. If shorter rows lie apart from the next row of their group, most bytes read would belong to the gaps.
_SHORTEST = 64
#: How many notes of a range one program reads at a time.
_TURN = 256
#: The most programs, unless there are more groups: each program of a group reads the notes of all of them.
_PROGRAMS = 4096


class _Adapting(NamedTuple):
    """The launch of both loops that quantize tensors of one form, and how many numbers these note ranges with."""

    launch: Launch
    size: int


@functools.lru_cache(maxsize=1 << 12)
def _adapting(
    rows: Rows, apart: int, length: int, bits: int, stochastic: bool, half: bool, standard: bool, symmetric: bool,
    *rates: float,
) -> _Adapting | None:  # fmt: skip
    """Return how to quantize tensors of one form, which are divided into pieces of ``length`` elements where they are
    standardized. None: as the reference does.
    """
    scattered = rows.groups > 1 and rows.inner * (2 if half else 4) < _SHORTEST
    if not rows.numel or scattered or length % rows.inner:
        return None
    decay, drift, jump = map(float, rates)
    stride = -(-rows.inner * bits // 8)
    tile = _tile(stride, rows, bits)
    del tile["GROUPED"]
    blocks = -(-stride // tile["WIDTH"])
    tiles = -(-rows.outer // tile["ROWS"]) * blocks
    turns = -(-tiles // max(1, _PROGRAMS // rows.groups))
    workers = -(-tiles // turns)  # programs of a group
    numbers = rows.outer, rows.groups, rows.inner, apart, stride, blocks, workers, turns, length // rows.inner
    levels, constants = float((1 << bits) - 1), {"STANDARD": standard, "HALF": half, "BITS": bits}
    constants |= {"STOCHASTIC": stochastic, "PIECED": _pieced(length, rows), "SYMMETRIC": symmetric, **tile}
    constants["ZEROED"] = bits >= FEWEST_ZEROED
    programs, more = rows.groups * workers, (decay, 1.0 - decay, drift, jump)
    first = Launch(_quantize_group, programs, (*numbers, levels), **constants)
    again = Launch(_quantize_group_again, programs, (*numbers, levels, *more), TURN=_TURN, **constants)
    # Low, step, and the new estimates; behind these, the notes of programs.
    return _Adapting(first.then(again, more=1), 4 * rows.groups + 2 * programs)


def quantize_rows_adapting(
    x: Tensor,
    out: Tensor,
    rows: Rows,
    estimates: Tensor,
    decay: float,
    note: Tensor,
    *,
    drift: float,
    jump: float,
    bits: int,
    stochastic: bool,
    seed: int = 0,
    apart: int | None = None,
    standard: Standard | None = None,
    symmetric: bool = False,
) -> tuple[Tensor, Tensor]:
    given = x, apart
    if apart is None:
        x, apart = _spaced(x, rows)
    length, half = rows.inner if standard is None else standard.length, x.dtype == torch.bfloat16
    form = _adapting(rows, apart, length, bits, stochastic, half, standard is not None, symmetric, decay, drift, jump)
    if form is None:
        x, apart = given
        return reference.quantize_rows_adapting(
            x, out, rows, estimates, decay, note, drift=drift, jump=jump, bits=bits, stochastic=stochastic, seed=seed,
            apart=apart, standard=standard, symmetric=symmetric,
        )  # fmt: skip
    made, groups = torch.empty(form.size, dtype=torch.float32, device=x.device), rows.groups
    mean, deviation, _ = standard or (made, made, 0)
    form.launch(x, (x, out, mean, deviation, estimates.contiguous(), made, note), fold_seed(seed))
    return made, made.as_strided((2, groups), (groups, 1), 2 * groups)
