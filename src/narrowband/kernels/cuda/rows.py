"""Rows of codes with shared ranges, in Triton.

A program has some bytes of some rows, and the elements in these; or some of the ranges.

Where estimates adapt, the rows of a program share a range: what it has seen is then two numbers. A range is settled by
one program, and a second look at the rows, which is launched whatever it found, returns at once where none is needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from narrowband.kernels import reference
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

if TYPE_CHECKING:
    from torch import Tensor

    from narrowband.kernels.rows import Rows

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


@kernel
def _place(blocks, outer, groups, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """This program's rows, the range of each, and its bytes of a row."""
    at = tl.program_id(0).to(tl.int64)
    r = at // blocks * ROWS + tl.arange(0, ROWS)
    t = at % blocks * WIDTH + tl.arange(0, WIDTH)
    return r, r // (outer * groups) * groups + r % groups, t


@kernel
def _quantize(
    x, out, lows, steps, count, outer, groups, inner, apart, stride, blocks, folded,
    HALF: tl.constexpr, BITS: tl.constexpr, STOCHASTIC: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    r, which, t = _place(blocks, outer, groups, ROWS, WIDTH)
    low = tl.load(lows + which, mask=r < count, other=0.0)
    step = tl.load(steps + which, mask=r < count, other=0.0)
    inverse = tl.where(step < TINY, 0.0, tl.div_rn(tl.zeros_like(step) + 1.0, step))
    begin = r // groups * apart + r % groups * inner
    there = (r < count)[:, None] & (t < stride)[None, :]
    byte = tl.zeros((ROWS, WIDTH), tl.int32)
    for part in tl.static_range(8 // BITS):
        j = part * stride + t
        ok = there & (j < inner)[None, :]
        v = load(x + begin[:, None] + j[None, :], ok, HALF)
        shift = tl.zeros_like(v) + 0.5
        if STOCHASTIC:
            h = mix((r[:, None] * inner + j[None, :]).to(tl.uint32) + folded.to(tl.uint32))
            shift = (h >> 16).to(tl.int32).to(tl.float32) * (2.0**-16)
        code = code_of(v, low[:, None], inverse[:, None], shift, (1 << BITS) - 1.0)
        byte |= tl.where(ok, code << (part * BITS), 0)
    tl.store(out + r[:, None] * stride + t[None, :], byte.to(tl.uint8), mask=there)


@kernel
def _dequantize(
    codes, out, lows, steps, count, outer, groups, inner, stride, blocks,
    HALF: tl.constexpr, BITS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    r, which, t = _place(blocks, outer, groups, ROWS, WIDTH)
    low = tl.load(lows + which, mask=r < count, other=0.0)
    step = tl.load(steps + which, mask=r < count, other=0.0)
    there = (r < count)[:, None] & (t < stride)[None, :]
    byte = tl.load(codes + r[:, None] * stride + t[None, :], mask=there, other=0).to(tl.int32)
    for part in tl.static_range(8 // BITS):
        j = part * stride + t
        code = (byte >> (part * BITS)) & ((1 << BITS) - 1)
        value = code.to(tl.float32) * step[:, None] + low[:, None]
        place = out + r[:, None] * inner + j[None, :]
        store(place, value, there & (j < inner)[None, :], HALF)


@kernel
def _extremes(
    x, least, most, count, groups, inner, apart, HALF: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    begin = r // groups * apart + r % groups * inner
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
    """New estimates; and of this program's ranges the largest share by which an end has moved, or NaN, and whether
    twice an end is infinite.
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


@kernel
def _quantize_group(
    x, out, ranges, seen, outer, groups, inner, apart, stride, sharers, blocks, levels, folded,
    AGAIN: tl.constexpr, HALF: tl.constexpr, BITS: tl.constexpr, STOCHASTIC: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Codes of some rows of a group, and their extremes; or again, if the group's range was changed.

    The first time ``ranges`` are the estimates, and the second time what :func:`_settle` made of them.
    """
    at = tl.program_id(0).to(tl.int64)
    g = at // (sharers * blocks)
    share = at % (sharers * blocks)
    wanted = True
    if AGAIN:
        wanted = tl.load(seen + g) != 0
        low, step = tl.load(ranges + g), tl.load(ranges + groups + g)
    else:
        low, step = tl.load(ranges + groups + g), tl.div_rn(tl.load(ranges + g), levels)
    if wanted:
        o = share // blocks * ROWS + tl.arange(0, ROWS)
        t = share % blocks * WIDTH + tl.arange(0, WIDTH)
        r = o * groups + g
        inverse = tl.where(step < TINY, 0.0, tl.div_rn(1.0, step))
        begin = o * apart + g * inner
        there = (o < outer)[:, None] & (t < stride)[None, :]
        byte = tl.zeros((ROWS, WIDTH), tl.int32)
        least = tl.full((ROWS, WIDTH), _MOST, tl.int32)
        most = tl.full((ROWS, WIDTH), _LEAST, tl.int32)
        for part in tl.static_range(8 // BITS):
            j = part * stride + t
            ok = there & (j < inner)[None, :]
            v = load(x + begin[:, None] + j[None, :], ok, HALF)
            shift = tl.zeros_like(v) + 0.5
            if STOCHASTIC:
                h = mix((r[:, None] * inner + j[None, :]).to(tl.uint32) + folded.to(tl.uint32))
                shift = (h >> 16).to(tl.int32).to(tl.float32) * (2.0**-16)
            byte |= tl.where(ok, code_of(v, low, inverse, shift, (1 << BITS) - 1.0) << (part * BITS), 0)
            if not AGAIN:
                place = ordered(v.to(tl.int32, bitcast=True))
                least = tl.minimum(least, tl.where(ok, place, _MOST))
                most = tl.maximum(most, tl.where(ok, place, _LEAST))
        tl.store(out + r[:, None] * stride + t[None, :], byte.to(tl.uint8), mask=there)
        if not AGAIN:
            tl.store(seen + 2 * at, tl.min(tl.min(least, 1), 0))
            tl.store(seen + 2 * at + 1, tl.max(tl.max(most, 1), 0))


@kernel
def _settle(
    estimates, seen, ranges, again, note, groups, shares, levels, decay, rest, drift, jump, WIDTH: tl.constexpr
):  # fmt: skip
    """What a group has learned, its range, and whether its codes are to be made again."""
    g = tl.program_id(0)
    low = tl.full((WIDTH,), _MOST, tl.int32)
    high = tl.full((WIDTH,), _LEAST, tl.int32)
    for first in range(0, shares, WIDTH):
        share = first + tl.arange(0, WIDTH)
        place = seen + 2 * (g.to(tl.int64) * shares + share)
        low = tl.minimum(low, tl.load(place, mask=share < shares, other=_MOST))
        high = tl.maximum(high, tl.load(place + 1, mask=share < shares, other=_LEAST))
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
    tl.store(ranges + g, tl.where(finite, chosen_low, float("nan")))
    tl.store(ranges + groups + g, tl.where(finite, tl.div_rn(chosen_width, levels), float("nan")))
    tl.store(ranges + 2 * groups + g, tl.where(finite, wider, width))
    tl.store(ranges + 3 * groups + g, tl.where(finite, later, begin))
    tl.store(again + g, tl.where(finite, drifted.to(tl.int32), 1))
    share = tl.where(own == 0.0, 0.0, tl.div_rn(own, width))
    share = tl.where(finite, share, float("inf"))
    tl.atomic_max(note, share.to(tl.int32, bitcast=True))


def _spaced(x: Tensor, rows: Rows) -> tuple[Tensor, int]:
    """A tensor, and how far neighbouring lines of rows are apart in it."""
    line = rows.groups * rows.inner
    if x.is_contiguous():
        return x, line
    if x.dim() == 2 and x.shape[1] == line and (x.stride(1) == 1 or line == 1):
        return x, x.stride(0)
    return x.contiguous(), line


def _tile(length: int) -> dict[str, int]:
    """Rows and columns of a program's tile, where rows are so long."""
    width = min(BLOCK, triton.next_power_of_2(max(length, 1)))
    return {"ROWS": max(1, BLOCK // width), "WIDTH": width}


def quantize_rows(
    x: Tensor, out: Tensor, rows: Rows, low: Tensor, step: Tensor, *, bits: int, stochastic: bool, seed: int = 0
) -> None:
    if not rows.numel:
        return
    x, apart = _spaced(x, rows)
    stride = -(-rows.inner * bits // 8)
    tile = _tile(stride)
    blocks = -(-stride // tile["WIDTH"])
    form = rows.count, rows.outer, rows.groups, rows.inner, apart, stride, blocks, fold_seed(seed)
    programs = -(-rows.count // tile["ROWS"]) * blocks
    own, half = raw(x)
    run(_quantize, programs, own, out, low, step, *form, on=x, HALF=half, BITS=bits, STOCHASTIC=stochastic, **tile)


def dequantize_rows(codes: Tensor, out: Tensor, rows: Rows, low: Tensor, step: Tensor, *, bits: int) -> None:
    if not rows.numel:
        return
    stride = -(-rows.inner * bits // 8)
    tile = _tile(stride)
    blocks = -(-stride // tile["WIDTH"])
    form = rows.count, rows.outer, rows.groups, rows.inner, stride, blocks
    programs = -(-rows.count // tile["ROWS"]) * blocks
    own, half = raw(out)
    run(_dequantize, programs, codes, own, low, step, *form, on=out, HALF=half, BITS=bits, **tile)


def row_extremes(x: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
    size, device = rows.parts * rows.groups, x.device
    if not rows.numel:
        return torch.full((size,), torch.nan, device=device), torch.full((size,), torch.nan, device=device)
    x, apart = _spaced(x, rows)
    least, most = (torch.empty(rows.count, dtype=torch.int32, device=device) for _ in range(2))
    tile = _tile(rows.inner)
    form = rows.count, rows.groups, rows.inner, apart
    own, half = raw(x)
    run(_extremes, -(-rows.count // tile["ROWS"]), own, least, most, *form, on=x, HALF=half, **tile)
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


def quantize_rows_learning(
    x: Tensor, out: Tensor, rows: Rows, estimates: Tensor, decay: float, *, bits: int, stochastic: bool, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, bool, float]:
    levels = estimates.new_full((), (1 << bits) - 1)  # a number would be inverted, and multiplied, on some devices
    ranges = torch.stack((estimates[1], estimates[0] / levels))
    low, high = quantize_rows_extremes(x, out, rows, *ranges, bits=bits, stochastic=stochastic, seed=seed)
    learned, finite, moved = learn_ranges(estimates, low, high, decay)
    return ranges, torch.stack((low, high)), learned, finite, moved


#: Shorter rows, in bytes, that lie apart from the next one of their group, would be read mostly for what is between.
_SHORTEST = 64
#: Numbers of a range that one program looks at in a turn.
_SHARES = 1024


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
) -> tuple[Tensor, Tensor]:
    if not rows.numel or (rows.groups > 1 and rows.inner * x.element_size() < _SHORTEST):
        return reference.quantize_rows_adapting(
            x, out, rows, estimates, decay, note, drift=drift, jump=jump, bits=bits, stochastic=stochastic, seed=seed
        )
    x, apart = _spaced(x, rows)
    outer, groups, inner = rows.outer, rows.groups, rows.inner
    stride, levels = -(-inner * bits // 8), float((1 << bits) - 1)
    tile = _tile(stride)
    blocks, sharers = -(-stride // tile["WIDTH"]), -(-outer // tile["ROWS"])
    programs = groups * sharers * blocks
    notes = torch.empty(4 * groups + groups + 2 * programs, dtype=torch.int32, device=x.device)
    made, again, seen = notes[: 4 * groups].view(torch.float32), notes[4 * groups : 5 * groups], notes[5 * groups :]
    own, half = raw(x)
    shape = outer, groups, inner, apart, stride, sharers, blocks, levels, fold_seed(seed)
    form = {"HALF": half, "BITS": bits, "STOCHASTIC": stochastic, **tile}
    run(_quantize_group, programs, own, out, estimates, seen, *shape, on=x, AGAIN=False, **form)
    numbers = groups, sharers * blocks, levels, float(decay), 1.0 - decay, float(drift), float(jump)
    run(_settle, groups, estimates, seen, made, again, note.view(torch.int32), *numbers, on=x, WIDTH=_SHARES)
    run(_quantize_group, programs, own, out, made, again, *shape, on=x, AGAIN=True, **form)
    made = made.view(4, groups)
    return made[:2], made[2:]
