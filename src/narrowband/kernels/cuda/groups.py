"""Groups of a quantizer in a GPU's registers: their scales, their codes, and planes of bits in memory. In Triton.

A program has some groups, a row each. Groups whose length is a power of two are the usual case and have functions of
their own, with ``whole`` in their names. Because a program knows the length of its rows, these read and write without
masks, 16 bytes at a time, read every element once, and pack codes in registers. The other functions handle rests at the
end of a tensor, and groups of other lengths.
"""

from __future__ import annotations

import triton.language as tl

from narrowband.kernels.cuda.common import ALL, INFINITE, LEAST, MAGNITUDE, TINY, code_of, ends, uniform
from narrowband.kernels.cuda.launching import kernel

__all__ = [
    "MINMAX", "PER_WARP", "PIECES", "SCALES", "extremes", "header", "load_whole", "not_finite", "read_codes",
    "read_whole_codes", "rows_of_program", "store_whole", "value_of", "write_codes", "write_whole_codes",
]  # fmt: skip

#: Pieces of a row in loops of whole groups: as many as the narrowest plane has parts. With so many elements per warp, a
#: thread has all pieces of the same columns.
PIECES, PER_WARP = tl.constexpr(8), 1024

MINMAX, _ABSMAX, _L2, MEAN = (tl.constexpr(at) for at in range(4))
SCALES = {"minmax": 0, "absmax": 1, "l2": 2, "mean": 3}


@kernel
def rows_of_program(n, group, ROWS: tl.constexpr):
    """Return the numbers of this program's groups, where they begin, and how many elements each has."""
    g = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    begin = g * group
    return g, begin, tl.minimum(n - begin, group)


@kernel
def _least(x):
    """Return the smallest number of each row; rows of three-dimensional tensors are in pieces, along the first axis."""
    if len(x.shape) == 3:
        x = tl.min(x, 0)
    return tl.min(x, 1)


@kernel
def _most(x):
    """Return the largest number of each row; see :func:`_least`."""
    if len(x.shape) == 3:
        x = tl.max(x, 0)
    return tl.max(x, 1)


@kernel
def _total(x):
    """Return the sum of each row; see :func:`_least`."""
    if len(x.shape) == 3:
        x = tl.sum(x, 0)
    return tl.sum(x, 1)


@kernel
def extremes(v, inside):
    """Return the smallest and largest value of each row; NaN if the row is not finite."""
    bits = v.to(tl.int32, bitcast=True)
    raised = bits.to(tl.uint32, bitcast=True)
    low, high, finite = ends(
        _most(tl.where(inside, bits, LEAST)), _least(tl.where(inside, raised, ALL)), _most(tl.where(inside, raised, 0))
    )
    low = tl.where(finite, low.to(tl.float32, bitcast=True), float("nan"))
    high = tl.where(finite, high.to(tl.float32, bitcast=True), float("nan"))
    return low, high


@kernel
def header(v, inside, m, levels, SCALE: tl.constexpr):
    """Return the smallest level of each row, and the step."""
    low = tl.zeros_like(m).to(tl.float32)
    if SCALE == MINMAX:
        low, high = extremes(v, inside)
        step = tl.div_rn(high - low, tl.zeros_like(low) + levels)
        step = tl.where(step == step, step, float("nan"))  # noqa: PLR0124 - a GPU's NaN has bits of its own
    else:
        magnitude = tl.where(inside, v.to(tl.int32, bitcast=True) & MAGNITUDE, 0)
        top = _most(magnitude)
        if SCALE == _ABSMAX:
            step = tl.div_rn(top.to(tl.float32, bitcast=True), tl.zeros_like(low) + levels)
        else:
            wide = tl.where(inside, tl.abs(v), 0.0).to(tl.float64)
            if SCALE == _L2:
                step = (tl.sqrt(_total(wide * wide)) / levels).to(tl.float32)
            else:
                step = (2.0 * _total(wide) / m.to(tl.float64)).to(tl.float32)
        step = tl.where(top < INFINITE, step, float("nan"))
    return low, step


@kernel
def not_finite(low, step, levels, SCALE: tl.constexpr, FEEDBACK: tl.constexpr):
    """Return which rows are not finite; with FEEDBACK, nor any of their levels, see ``levels_are_finite``."""
    bad = (step != step) | (low != low)  # noqa: PLR0124 - NaN
    if FEEDBACK:
        last = step
        if SCALE != MEAN:
            last = step * levels + low
        bad = bad | (last != last) | (tl.abs(last) == float("inf"))  # noqa: PLR0124 - NaN
    return bad


@kernel
def _shift(i, shift, BITS: tl.constexpr, SCALE: tl.constexpr, STOCHASTIC: tl.constexpr):
    """Return what is added to elements, in steps, before rounding down; ``i`` is as in :func:`uniform`."""
    if STOCHASTIC and SCALE == MINMAX:
        return uniform(i, 24)
    elif STOCHASTIC:
        return uniform(i, 25 - BITS) + shift
    else:
        return shift


@kernel
def _write_plane(
    x, codes, at, begin, m, low, inverse, finite, shift, top, folded,
    BITS: tl.constexpr, PLANE: tl.constexpr, SCALE: tl.constexpr, STOCHASTIC: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write the bytes of a plane of this width; return how many each row has."""
    down: tl.constexpr = BITS // (2 * PLANE) * (2 * PLANE)  # wider planes hold lower bits
    t = tl.arange(0, WIDTH * PLANE // 8)
    stride = (m * PLANE + 7) >> 3
    there = t[None, :] < stride[:, None]
    byte = tl.zeros((ROWS, WIDTH * PLANE // 8), tl.int32)
    for part in tl.static_range(8 // PLANE):
        index = part * stride[:, None] + t[None, :]
        ok = there & (index < m[:, None])
        element = begin[:, None] + index
        v = tl.load(x + element, mask=ok, other=0.0)
        if SCALE == MEAN:
            code = ((v >= 0.0) & finite[:, None]).to(tl.int32)
        else:
            own = _shift(element + folded, shift, BITS, SCALE, STOCHASTIC)
            code = code_of(v, low[:, None], inverse[:, None], own, top)
        byte |= tl.where(ok, ((code >> down) & ((1 << PLANE) - 1)) << (part * PLANE), 0)
    tl.store(codes + at[:, None] + t[None, :], byte.to(tl.uint8), mask=there)
    return stride


@kernel
def write_codes(
    x, codes, at, begin, m, low, step, shift, top, folded,
    BITS: tl.constexpr, SCALE: tl.constexpr, STOCHASTIC: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write the codes of rows of ``x``, to the bytes ``at``."""
    inverse = tl.where(step < TINY, 0.0, tl.div_rn(tl.zeros_like(step) + 1.0, step))
    finite = step == step  # noqa: PLR0124 - not NaN
    for plane in tl.static_range(4):
        if BITS & (8 >> plane):
            at += _write_plane(
                x, codes, at, begin, m, low, inverse, finite, shift, top, folded,
                BITS, 8 >> plane, SCALE, STOCHASTIC, ROWS, WIDTH,
            )  # fmt: skip


@kernel
def _read_plane(codes, at, j, m, inside, BITS: tl.constexpr, PLANE: tl.constexpr):
    """Return the bits of codes that a plane of this width holds, shifted into their place, and its bytes per row."""
    down: tl.constexpr = BITS // (2 * PLANE) * (2 * PLANE)
    stride = tl.maximum((m * PLANE + 7) >> 3, 1)
    part = j[None, :] // stride[:, None]
    place = at[:, None] + (j[None, :] - part * stride[:, None])
    byte = tl.load(codes + place, mask=inside, other=0).to(tl.int32)
    return ((byte >> (part * PLANE).to(tl.int32)) & ((1 << PLANE) - 1)) << down, stride


@kernel
def read_codes(codes, at, j, m, inside, BITS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Return the codes of rows that begin at the bytes ``at``."""
    code = tl.zeros((ROWS, WIDTH), tl.int32)
    for plane in tl.static_range(4):
        if BITS & (8 >> plane):
            part, stride = _read_plane(codes, at, j, m, inside, BITS, 8 >> plane)
            code |= part
            at += stride
    return code


@kernel
def _whole(first, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Number the elements of whole rows in pieces, from ``first`` on. Shape: (PIECES, ROWS * (WIDTH // PIECES)).

    With rows in pieces, a thread has elements of few rows, and of these all that it packs into a word. So threads need
    not exchange codes, and each computes few scales.

    Memory is read and written in this shape, with the pieces of all rows side by side, because then one axis alone has
    adjacent elements: threads share that one. Of three axes, Triton 3.6 shares the first and 3.9 the second.
    """
    piece: tl.constexpr = WIDTH // PIECES
    column = tl.arange(0, ROWS * piece)
    return (first + (column // piece * WIDTH + column % piece))[None, :] + tl.arange(0, PIECES)[:, None] * piece


@kernel
def _in_rows(x, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Tell rows apart in a tensor of the shape of :func:`_whole`. Shape: (PIECES, ROWS, WIDTH // PIECES)."""
    return tl.reshape(x, (PIECES, ROWS, WIDTH // PIECES))


@kernel
def load_whole(x, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Read whole rows in pieces. Shape: (PIECES, ROWS, WIDTH // PIECES)."""
    return _in_rows(tl.load(x + _whole(0, ROWS, WIDTH)), ROWS, WIDTH)


@kernel
def store_whole(x, v, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Write whole rows in pieces."""
    tl.store(x + _whole(0, ROWS, WIDTH), tl.reshape(v, (PIECES, ROWS * (WIDTH // PIECES))))


@kernel
def _write_whole_plane(
    codes, out, BITS: tl.constexpr, PLANE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """Write the bytes of a plane of whole rows, four to a word; ``out`` has the addresses where the words of rows
    begin.
    """
    down: tl.constexpr = BITS // (2 * PLANE) * (2 * PLANE)  # wider planes hold lower bits, and come first
    parts: tl.constexpr = 8 // PLANE
    each: tl.constexpr = PIECES // parts  # pieces of a part
    quarter: tl.constexpr = WIDTH // PIECES // 4
    byte = codes >> down
    if down + PLANE < BITS:
        byte = byte & ((1 << PLANE) - 1)
    shift = tl.arange(0, parts)[:, None, None, None, None] * PLANE + tl.arange(0, 4)[None, None, None, None, :] * 8
    word = tl.sum(tl.sum(tl.reshape(byte, (parts, each, ROWS, quarter, 4)) << shift, 4), 0)
    place = tl.arange(0, each)[:, None, None] * quarter + tl.arange(0, quarter)[None, None, :]
    tl.store(out[None, :, None] + WIDTH * down // 32 + place, word)


@kernel
def _read_whole_plane(words, BITS: tl.constexpr, PLANE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Return the bits of codes that a plane of whole rows holds, shifted into their place; rows are in pieces."""
    down: tl.constexpr = BITS // (2 * PLANE) * (2 * PLANE)
    parts: tl.constexpr = 8 // PLANE
    each: tl.constexpr = PIECES // parts  # pieces of a part
    quarter: tl.constexpr = WIDTH // PIECES // 4
    place = tl.arange(0, each)[:, None, None] * quarter + tl.arange(0, quarter)[None, None, :]
    word = tl.load(words[None, :, None] + WIDTH * down // 32 + place)
    shift = tl.arange(0, parts)[:, None, None, None, None] * PLANE + tl.arange(0, 4)[None, None, None, None, :] * 8
    code = (word[None, :, :, :, None] >> shift) & ((1 << PLANE) - 1)
    return tl.reshape(code, (PIECES, ROWS, WIDTH // PIECES)) << down


@kernel
def read_whole_codes(words, BITS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Return the codes of whole rows in pieces; ``words`` has the addresses where the words of rows begin."""
    code = tl.zeros((PIECES, ROWS, WIDTH // PIECES), tl.int32)
    for plane in tl.static_range(4):
        if BITS & (8 >> plane):
            code |= _read_whole_plane(words, BITS, 8 >> plane, ROWS, WIDTH)
    return code


@kernel
def write_whole_codes(
    v, low, step, words, part, shift, top, folded,
    BITS: tl.constexpr, SCALE: tl.constexpr, STOCHASTIC: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write and return the codes of whole rows in pieces."""
    if SCALE == MEAN:
        finite = step == step  # noqa: PLR0124 - not NaN
        code = ((v >= 0.0) & finite[None, :, None]).to(tl.int32)
    else:
        inverse = tl.where(step < TINY, 0.0, tl.div_rn(tl.zeros_like(step) + 1.0, step))
        i = _in_rows(_whole((part * (ROWS * WIDTH) + folded).to(tl.int32), ROWS, WIDTH), ROWS, WIDTH)
        own = _shift(i, shift, BITS, SCALE, STOCHASTIC)
        code = code_of(v, low[None, :, None], inverse[None, :, None], own, top)
    out = words + part * (ROWS * WIDTH * BITS // 32) + tl.arange(0, ROWS) * (WIDTH * BITS // 32)
    for plane in tl.static_range(4):
        if BITS & (8 >> plane):
            _write_whole_plane(code, out, BITS, 8 >> plane, ROWS, WIDTH)
    return code


@kernel
def value_of(code, step, low, offset, HAS_LOW: tl.constexpr):
    """Return what codes stand for. Scales with a smallest level have no ``offset``."""
    value = code.to(tl.float32)
    if not HAS_LOW:
        value = value - offset
    return value * step + low
