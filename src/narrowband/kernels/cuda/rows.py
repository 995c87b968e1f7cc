"""Rows of codes with shared ranges, in Triton.

A program has some bytes of some rows, and the elements in these bytes; or it has some of the ranges.

If estimates adapt, the rows of a program share one range, so that it notes only two numbers: the extremes that it has
seen. In a second launch, each program settles the range of its rows from the notes of all programs of that range, and
returns early if its codes are good. Tensors are passed in any shape: the host makes no views.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from narrowband.kernels.cuda.common import (
    BLOCK,
    INFINITE,
    MAGNITUDE,
    TINY,
    code_of,
    fold_seed,
    load,
    mix,
    ordered,
    raw,
    store,
)
from narrowband.kernels.cuda.launching import kernel, run
from narrowband.kernels.reference import rows as reference
from narrowband.kernels.reference.rows import affine_rows, learning

if TYPE_CHECKING:
    from torch import Tensor

    from narrowband.kernels.rows import Affine, Rows, Standard

__all__ = [
    "dequantize_rows",
    "learn_ranges",
    "quantize_rows",
    "quantize_rows_adapting",
    "quantize_rows_extremes",
    "quantize_rows_learning",
    "row_extremes",
]

_LEAST, _MOST = tl.constexpr(-(2**31)), tl.constexpr(2**31 - 1)


#: Arguments that differ from layer to layer and are not specialized: loops gain nothing if one is 1 or divisible by 16.
counting: Any = triton.jit(
    do_not_specialize=["count", "outer", "groups", "blocks", "workers", "turns", "pieces", "folded"]
)


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
def _first(piece, ROWS: tl.constexpr, FEW: tl.constexpr):
    """Return the numbers of a piece's rows, also in 64 bits, for addresses. Divisions use 32 bits if FEW: with 64 bits
    a GPU takes four times as long.
    """
    r = piece.to(tl.int32 if FEW else tl.int64) * ROWS + tl.arange(0, ROWS)
    return r, r.to(tl.int64)


@kernel
def _place(blocks, outer, groups, ROWS: tl.constexpr, WIDTH: tl.constexpr, FEW: tl.constexpr):
    """Return this program's rows, also in 64 bits, the range of each row, and the program's bytes of a row."""
    at = tl.program_id(0)
    piece = at // blocks
    r, wide = _first(piece, ROWS, FEW)
    t = (at - piece * blocks).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    line = r // groups
    return r, wide, line // outer * groups + (r - line * groups), t


@kernel
def _begin(r, groups, inner, apart):
    """Return where rows begin in the tensor."""
    line = r // groups
    return line.to(tl.int64) * apart + (r - line * groups).to(tl.int64) * inner


@kernel
def _quantize(
    x, out, lows, steps, count, outer, groups, inner, apart, stride, blocks, folded,
    HALF: tl.constexpr, BITS: tl.constexpr, STOCHASTIC: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    FEW: tl.constexpr,
):  # fmt: skip
    r, wide, which, t = _place(blocks, outer, groups, ROWS, WIDTH, FEW)
    low = tl.load(lows + which, mask=r < count, other=0.0)
    step = tl.load(steps + which, mask=r < count, other=0.0)
    inverse = tl.where(step < TINY, 0.0, tl.div_rn(tl.zeros_like(step) + 1.0, step))
    begin = _begin(r, groups, inner, apart)
    there = (r < count)[:, None] & (t < stride)[None, :]
    byte = tl.zeros((ROWS, WIDTH), tl.int32)
    for part in tl.static_range(8 // BITS):
        j = part * stride + t
        ok = there & (j < inner)[None, :]
        v = load(x + begin[:, None] + j[None, :], ok, HALF)
        shift = tl.zeros_like(v) + 0.5
        if STOCHASTIC:
            h = mix((wide[:, None] * inner + j[None, :]).to(tl.uint32) + folded.to(tl.uint32))
            shift = (h >> 16).to(tl.int32).to(tl.float32) * (2.0**-16)
        code = code_of(v, low[:, None], inverse[:, None], shift, (1 << BITS) - 1.0)
        byte |= tl.where(ok, code << (part * BITS), 0)
    tl.store(out + wide[:, None] * stride + t[None, :], byte.to(tl.uint8), mask=there)


@counting
def _dequantize(
    codes, out, ranges, factor, term, count, outer, groups, inner, stride, blocks, pieces,
    FACTOR: tl.constexpr, TERM: tl.constexpr, MOVES: tl.constexpr, HALF: tl.constexpr, BITS: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, FEW: tl.constexpr,
):  # fmt: skip
    r, wide, which, t = _place(blocks, outer, groups, ROWS, WIDTH, FEW)
    low = tl.load(ranges + which, mask=r < count, other=0.0)
    step = tl.load(ranges + count // outer + which, mask=r < count, other=0.0)
    there = (r < count)[:, None] & (t < stride)[None, :]
    first = (r % pieces).to(tl.int64) * inner if MOVES else (r // pieces).to(tl.int64)  # of a row of the tensor
    byte = tl.load(codes + wide[:, None] * stride + t[None, :], mask=there, other=0).to(tl.int32)
    for part in tl.static_range(8 // BITS):
        j = part * stride + t
        ok = there & (j < inner)[None, :]
        code = (byte >> (part * BITS)) & ((1 << BITS) - 1)
        value = code.to(tl.float32) * step[:, None] + low[:, None]
        at = first[:, None] + (j * MOVES)[None, :]
        if FACTOR:
            value = value * tl.load(factor + at, mask=ok, other=0.0)
        if TERM:
            value = value + tl.load(term + at, mask=ok, other=0.0)
        store(_bits(out, HALF) + wide[:, None] * inner + j[None, :], value, ok, HALF)


@kernel
def _extremes(
    x, least, most, count, groups, inner, apart,
    HALF: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, FEW: tl.constexpr,
):  # fmt: skip
    r, _ = _first(tl.program_id(0), ROWS, FEW)
    begin = _begin(r, groups, inner, apart)
    low = tl.full((ROWS,), _MOST, tl.int32)
    high = tl.full((ROWS,), _LEAST, tl.int32)
    for first in range(0, inner, WIDTH):
        j = first + tl.arange(0, WIDTH)
        ok = (r < count)[:, None] & (j < inner)[None, :]
        v = load(x + begin[:, None] + j[None, :], ok, HALF)
        at = ordered(v.to(tl.int32, bitcast=True))
        low = tl.minimum(low, tl.min(tl.where(ok, at, _MOST), 1))
        high = tl.maximum(high, tl.max(tl.where(ok, at, _LEAST), 1))
    tl.store(least + r, low, mask=r < count)
    tl.store(most + r, high, mask=r < count)


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
def _quantize_group(
    x, out, mean, deviation, estimates, made, outer, groups, inner, apart, stride, blocks, workers, turns, pieces,
    levels, folded,
    STANDARD: tl.constexpr, HALF: tl.constexpr, BITS: tl.constexpr, STOCHASTIC: tl.constexpr, ROWS: tl.constexpr,
    WIDTH: tl.constexpr, FEW: tl.constexpr,
):  # fmt: skip
    """Make codes of some tiles of a group by its estimate, and note their extremes."""
    at = tl.program_id(0)
    g, worker = at // workers, at % workers
    low, step = tl.load(estimates + groups + g), tl.div_rn(tl.load(estimates + g), levels)
    least = tl.full((ROWS, WIDTH), _MOST, tl.int32)
    most = tl.full((ROWS, WIDTH), _LEAST, tl.int32)
    for turn in range(turns):
        least, most = _quantize_tile(
            x, out, mean, deviation, low, step, least, most, worker + turn * workers, g, outer, groups, inner, apart,
            stride, blocks, pieces, folded, STANDARD, HALF, BITS, STOCHASTIC, ROWS, WIDTH, FEW,
        )  # fmt: skip
    seen = _ints(made) + 4 * groups + 2 * at
    tl.store(seen, tl.min(tl.min(least, 1), 0))
    tl.store(seen + 1, tl.max(tl.max(most, 1), 0))


@counting
def _quantize_group_again(
    x, out, mean, deviation, estimates, made, note, outer, groups, inner, apart, stride, blocks, workers, turns,
    pieces, levels, folded, decay, rest, drift, jump,
    STANDARD: tl.constexpr, HALF: tl.constexpr, BITS: tl.constexpr, STOCHASTIC: tl.constexpr, ROWS: tl.constexpr,
    WIDTH: tl.constexpr, FEW: tl.constexpr, TURN: tl.constexpr,
):  # fmt: skip
    """Settle the range of a group, and make the codes of some tiles again if necessary.

    Each program of the group computes the range for itself, and one of them writes it.
    """
    at = tl.program_id(0)
    g, worker = at // workers, at % workers
    low = tl.full((TURN,), _MOST, tl.int32)
    high = tl.full((TURN,), _LEAST, tl.int32)
    for first in range(0, workers, TURN):
        other = first + tl.arange(0, TURN)
        place = _ints(made) + 4 * groups + 2 * (g * workers + other)
        low = tl.minimum(low, tl.load(place, mask=other < workers, other=_MOST))
        high = tl.maximum(high, tl.load(place + 1, mask=other < workers, other=_LEAST))
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
    chosen_low = tl.where(finite, chosen_low, float("nan"))
    step = tl.where(finite, tl.div_rn(chosen_width, levels), float("nan"))
    if worker == 0:
        tl.store(made + g, chosen_low)
        tl.store(made + groups + g, step)
        tl.store(made + 2 * groups + g, tl.where(finite, wider, width))
        tl.store(made + 3 * groups + g, tl.where(finite, later, begin))
        share = tl.where(own == 0.0, 0.0, tl.div_rn(own, width))
        tl.atomic_max(_ints(note), tl.where(finite, share, float("inf")).to(tl.int32, bitcast=True))
    if drifted | (finite == 0):
        least = tl.full((ROWS, WIDTH), _MOST, tl.int32)
        for turn in range(turns):
            _quantize_tile(
                x, out, mean, deviation, chosen_low, step, least, least, worker + turn * workers, g, outer, groups,
                inner, apart, stride, blocks, pieces, folded, STANDARD, HALF, BITS, STOCHASTIC, ROWS, WIDTH, FEW,
            )  # fmt: skip


@kernel
def _quantize_tile(
    x, out, mean, deviation, low, step, least, most, tile, g, outer, groups, inner, apart, stride, blocks, pieces,
    folded, STANDARD: tl.constexpr, HALF: tl.constexpr, BITS: tl.constexpr, STOCHASTIC: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, FEW: tl.constexpr,
):  # fmt: skip
    """Make codes of some bytes of some rows of a group; return the extremes so far for each place in the tile."""
    piece = tile // blocks
    o = piece.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    t = (tile - piece * blocks).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    r = o * groups + g
    inverse = tl.where(step < TINY, 0.0, tl.div_rn(1.0, step))
    begin = o * apart + g.to(tl.int64) * inner
    there = (o < outer)[:, None] & (t < stride)[None, :]
    byte = tl.zeros((ROWS, WIDTH), tl.int32)
    if STANDARD:
        row = (r.to(tl.int32) if FEW else r) // pieces
        center = tl.load(mean + row, mask=o < outer, other=0.0)
        scale = tl.load(deviation + row, mask=o < outer, other=0.0)
    for part in tl.static_range(8 // BITS):
        j = part * stride + t
        ok = there & (j < inner)[None, :]
        v = load(_bits(x, HALF) + begin[:, None] + j[None, :], ok, HALF)
        if STANDARD:
            v = (v - center[:, None]) * scale[:, None]
        shift = tl.zeros_like(v) + 0.5
        if STOCHASTIC:
            h = mix((r[:, None] * inner + j[None, :]).to(tl.uint32) + folded.to(tl.uint32))
            shift = (h >> 16).to(tl.int32).to(tl.float32) * (2.0**-16)
        byte |= tl.where(ok, code_of(v, low, inverse, shift, (1 << BITS) - 1.0) << (part * BITS), 0)
        place = ordered(v.to(tl.int32, bitcast=True))
        least = tl.minimum(least, tl.where(ok, place, _MOST))
        most = tl.maximum(most, tl.where(ok, place, _LEAST))
    tl.store(out + r[:, None] * stride + t[None, :], byte.to(tl.uint8), mask=there)
    return least, most


def _spaced(x: Tensor, rows: Rows) -> tuple[Tensor, int]:
    """Return a tensor, and how far apart neighbouring lines of rows are in it."""
    line = rows.groups * rows.inner
    if x.is_contiguous():
        return x, line
    if x.dim() == 2 and x.shape[1] == line and (x.stride(1) == 1 or line == 1):
        return x, x.stride(0)
    return x.contiguous(), line


def _tile(length: int, rows: Rows) -> dict[str, int]:
    """Return rows and columns of a program's tile for rows of this length, and whether 32 bits can count all rows."""
    width = min(BLOCK, triton.next_power_of_2(max(length, 1)))
    return {"ROWS": max(1, BLOCK // width), "WIDTH": width, "FEW": int(rows.total <= (1 << 31) - 2 * BLOCK)}


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
    if not rows.numel:
        return
    factor, term, length, by_row = affine or (None, None, rows.inner, False)
    if length % rows.inner:
        affine_rows(dequantize_rows, codes, out, rows, ranges, affine, bits)
        return
    programs, stride, blocks, tile = _cut(rows, bits)
    numbers = rows.total, rows.outer, rows.groups, rows.inner, stride, blocks, length // rows.inner
    run(
        _dequantize, programs, codes, out, ranges, ranges if factor is None else factor,
        ranges if term is None else term, *numbers, on=out, FACTOR=factor is not None, TERM=term is not None,
        MOVES=0 if by_row else 1, HALF=out.dtype == torch.bfloat16, BITS=bits, **tile,
    )  # fmt: skip


@functools.lru_cache(maxsize=1 << 12)
def _cut(rows: Rows, bits: int) -> tuple[int, int, int, dict[str, int]]:
    """Return programs, bytes of a row, pieces of a row, and the tile, if each program has one tile."""
    stride = -(-rows.inner * bits // 8)
    tile = _tile(stride, rows)
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


quantize_rows_learning = functools.partial(learning, quantize_rows_extremes, learn_ranges)


#: Bytes. If shorter rows lie apart from the next row of their group, most bytes read would belong to the gaps.
_SHORTEST = 64
#: How many notes of a range one program reads at a time.
_TURN = 256
#: The most programs, unless there are more groups: each program of a group reads the notes of all of them.
_PROGRAMS = 4096


@functools.lru_cache(maxsize=1 << 12)
def _shared(rows: Rows, bits: int) -> tuple[int, int, int, int, dict[str, int]]:
    """Return bytes of a row, pieces of a row, programs of a group, tiles of a program, and the tile."""
    stride = -(-rows.inner * bits // 8)
    tile = _tile(stride, rows)
    blocks = -(-stride // tile["WIDTH"])
    tiles = -(-rows.outer // tile["ROWS"]) * blocks
    turns = -(-tiles // max(1, _PROGRAMS // rows.groups))
    return stride, blocks, -(-tiles // turns), turns, tile


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
) -> tuple[Tensor, Tensor]:
    scattered = rows.groups > 1 and rows.inner * x.element_size() < _SHORTEST
    if not rows.numel or scattered or (standard is not None and standard.length % rows.inner):
        return reference.quantize_rows_adapting(
            x, out, rows, estimates, decay, note, drift=drift, jump=jump, bits=bits, stochastic=stochastic, seed=seed,
            apart=apart, standard=standard,
        )  # fmt: skip
    if apart is None:
        x, apart = _spaced(x, rows)
    estimates, groups = estimates.contiguous(), rows.groups
    stride, blocks, workers, turns, tile = _shared(rows, bits)
    # Low, step, and the new estimates; behind these, the notes of programs.
    made = torch.empty(4 * groups + 2 * groups * workers, dtype=torch.float32, device=x.device)
    levels = float((1 << bits) - 1)
    mean, deviation, length = standard or (estimates, estimates, rows.inner)
    pieces = length // rows.inner
    shape = rows.outer, groups, rows.inner, apart, stride, blocks, workers, turns, pieces, levels, fold_seed(seed)
    form = {
        "STANDARD": standard is not None, "HALF": x.dtype == torch.bfloat16, "BITS": bits, "STOCHASTIC": stochastic,
        **tile,
    }  # fmt: skip
    run(_quantize_group, groups * workers, x, out, mean, deviation, estimates, made, *shape, on=x, **form)
    numbers = float(decay), 1.0 - decay, float(drift), float(jump)
    run(
        _quantize_group_again, groups * workers, x, out, mean, deviation, estimates, made, note, *shape, *numbers,
        on=x, TURN=_TURN, **form,
    )  # fmt: skip
    return made, made.as_strided((2, groups), (groups, 1), 2 * groups)
