"""Grouped quantization in Triton. A program has some whole groups, a row each.

Groups of a power of two are the usual case, and have loops of their own: a program knows how long its rows are, so that
it reads and writes without masks, 16 bytes at a time, every element once, and packs codes in its registers. What these
leave at the end of a tensor, and groups of other lengths, go through the general loops.
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
    kernel,
    ordered,
    run,
    uniform,
)
from narrowband.kernels.quantized import packed_nbytes

if TYPE_CHECKING:
    from torch import Tensor

    from narrowband.kernels.quantized import Scale

__all__ = ["dequantize_groups", "group_minmax", "quantize_groups"]

#: Longer groups do not fit into a program's registers, and planes of shorter ones do not fill a word.
_LONGEST, _SHORTEST = 8192, 32

_MINMAX, _ABSMAX, _L2, _MEAN = (tl.constexpr(at) for at in range(4))
_SCALES = {"minmax": 0, "absmax": 1, "l2": 2, "mean": 3}
_LEAST, _MOST = tl.constexpr(-(2**31)), tl.constexpr(2**31 - 1)


@kernel
def _rows(n, group, ROWS: tl.constexpr):
    """Numbers of this program's groups, where they begin, and how many elements each has."""
    g = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    begin = g * group
    return g, begin, tl.minimum(n - begin, group)


@kernel
def _extremes(v, inside):
    """Smallest and largest of each row; NaN where the row is not finite."""
    at = ordered(v.to(tl.int32, bitcast=True))
    low = tl.min(tl.where(inside, at, _MOST), 1)
    high = tl.max(tl.where(inside, at, _LEAST), 1)
    finite = (high < INFINITE) & (low >= -INFINITE)
    low = tl.where(finite, ordered(low).to(tl.float32, bitcast=True), float("nan"))
    high = tl.where(finite, ordered(high).to(tl.float32, bitcast=True), float("nan"))
    return low, high


@kernel
def _minmax(x, lows, highs, n, groups, group, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    g, begin, m = _rows(n, group, ROWS)
    j = tl.arange(0, WIDTH)
    inside = j[None, :] < m[:, None]
    low, high = _extremes(tl.load(x + begin[:, None] + j[None, :], mask=inside, other=0.0), inside)
    tl.store(lows + g, low, mask=g < groups)
    tl.store(highs + g, high, mask=g < groups)


@kernel
def _header(v, inside, m, levels, SCALE: tl.constexpr):
    """The smallest level of each row, and the distance of two."""
    low = tl.zeros_like(m).to(tl.float32)
    if SCALE == _MINMAX:
        low, high = _extremes(v, inside)
        step = tl.div_rn(high - low, tl.zeros_like(low) + levels)
    else:
        magnitude = tl.where(inside, v.to(tl.int32, bitcast=True) & MAGNITUDE, 0)
        top = tl.max(magnitude, 1)
        if SCALE == _ABSMAX:
            step = tl.div_rn(top.to(tl.float32, bitcast=True), tl.zeros_like(low) + levels)
        else:
            wide = tl.where(inside, tl.abs(v), 0.0).to(tl.float64)
            if SCALE == _L2:
                step = (tl.sqrt(tl.sum(wide * wide, 1)) / levels).to(tl.float32)
            else:
                step = (2.0 * tl.sum(wide, 1) / m.to(tl.float64)).to(tl.float32)
        step = tl.where(top < INFINITE, step, float("nan"))
    return low, step


@kernel
def _write_plane(
    x, codes, at, begin, m, low, inverse, finite, shift, top, folded,
    BITS: tl.constexpr, PLANE: tl.constexpr, SCALE: tl.constexpr, STOCHASTIC: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The bytes of a plane of this width; how many each row has."""
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
        if SCALE == _MEAN:
            code = ((v >= 0.0) & finite[:, None]).to(tl.int32)
        else:
            own = tl.zeros_like(v) + shift
            if STOCHASTIC:
                own = own + uniform(element, folded)
            code = code_of(v, low[:, None], inverse[:, None], own, top)
        byte |= tl.where(ok, ((code >> down) & ((1 << PLANE) - 1)) << (part * PLANE), 0)
    tl.store(codes + at[:, None] + t[None, :], byte.to(tl.uint8), mask=there)
    return stride


@kernel
def _quantize(
    x, lows, steps, codes, n, groups, group, group_bytes, levels, shift, top, folded,
    BITS: tl.constexpr, SCALE: tl.constexpr, STOCHASTIC: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    g, begin, m = _rows(n, group, ROWS)
    j = tl.arange(0, WIDTH)
    inside = j[None, :] < m[:, None]
    low, step = _header(tl.load(x + begin[:, None] + j[None, :], mask=inside, other=0.0), inside, m, levels, SCALE)
    if SCALE == _MINMAX:
        tl.store(lows + g, low, mask=g < groups)
    tl.store(steps + g, step, mask=g < groups)
    inverse = tl.where(step < TINY, 0.0, tl.div_rn(tl.zeros_like(step) + 1.0, step))
    finite = step == step  # noqa: PLR0124 - not NaN
    at = g * group_bytes
    for plane in tl.static_range(4):
        if BITS & (8 >> plane):
            at += _write_plane(
                x, codes, at, begin, m, low, inverse, finite, shift, top, folded,
                BITS, 8 >> plane, SCALE, STOCHASTIC, ROWS, WIDTH,
            )  # fmt: skip


@kernel
def _write_whole_plane(codes, out, BITS: tl.constexpr, PLANE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """The bytes of a plane of whole rows, four in a word; ``out`` has where the words of each row begin."""
    down: tl.constexpr = BITS // (2 * PLANE) * (2 * PLANE)  # wider planes hold lower bits, and come first
    parts: tl.constexpr = 8 // PLANE
    stride: tl.constexpr = WIDTH // parts
    byte = (codes >> down) & ((1 << PLANE) - 1)
    if parts > 1:
        shift = tl.arange(0, parts) * PLANE
        byte = tl.sum(tl.reshape(byte, (ROWS, parts, stride)) << shift[None, :, None], 1)
    shift = tl.arange(0, 4) * 8
    word = tl.sum(tl.reshape(byte, (ROWS, stride // 4, 4)) << shift[None, None, :], 2)
    tl.store(out[:, None] + WIDTH * down // 32 + tl.arange(0, stride // 4)[None, :], word)


@kernel
def _read_whole_plane(words, BITS: tl.constexpr, PLANE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """The bits of codes that a plane of whole rows holds, in their place."""
    down: tl.constexpr = BITS // (2 * PLANE) * (2 * PLANE)
    parts: tl.constexpr = 8 // PLANE
    stride: tl.constexpr = WIDTH // parts
    word = tl.load(words[:, None] + WIDTH * down // 32 + tl.arange(0, stride // 4)[None, :])
    shift = tl.arange(0, 4) * 8
    byte = tl.reshape((word[:, :, None] >> shift[None, None, :]) & 255, (ROWS, stride))
    shift = tl.arange(0, parts) * PLANE
    return tl.reshape((byte[:, None, :] >> shift[None, :, None]) & ((1 << PLANE) - 1), (ROWS, WIDTH)) << down


@kernel
def _quantize_whole(
    x, lows, steps, words, levels, shift, top, folded,
    BITS: tl.constexpr, SCALE: tl.constexpr, STOCHASTIC: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, ROWS)
    i = row[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    v = tl.load(x + part * (ROWS * WIDTH) + i)
    low, step = _header(v, i >= 0, row * 0 + WIDTH, levels, SCALE)
    if SCALE == _MINMAX:
        tl.store(lows + part * ROWS + row, low)
    tl.store(steps + part * ROWS + row, step)
    if SCALE == _MEAN:
        finite = step == step  # noqa: PLR0124 - not NaN
        code = ((v >= 0.0) & finite[:, None]).to(tl.int32)
    else:
        inverse = tl.where(step < TINY, 0.0, tl.div_rn(tl.zeros_like(step) + 1.0, step))
        own = tl.zeros_like(v) + shift
        if STOCHASTIC:
            own = own + uniform(part * (ROWS * WIDTH) + i, folded)
        code = code_of(v, low[:, None], inverse[:, None], own, top)
    out = words + part * (ROWS * WIDTH * BITS // 32) + row * (WIDTH * BITS // 32)
    for plane in tl.static_range(4):
        if BITS & (8 >> plane):
            _write_whole_plane(code, out, BITS, 8 >> plane, ROWS, WIDTH)


@kernel
def _dequantize_whole(
    lows, steps, words, out, offset, weight,
    BITS: tl.constexpr, HAS_LOW: tl.constexpr, ACCUMULATE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, ROWS)
    step = tl.load(steps + part * ROWS + row)
    low = tl.zeros_like(step)
    if HAS_LOW:
        low = tl.load(lows + part * ROWS + row)
    source = words + part * (ROWS * WIDTH * BITS // 32) + row * (WIDTH * BITS // 32)
    code = tl.zeros((ROWS, WIDTH), tl.int32)
    for plane in tl.static_range(4):
        if BITS & (8 >> plane):
            code |= _read_whole_plane(source, BITS, 8 >> plane, ROWS, WIDTH)
    value = ((code.to(tl.float32) - offset) * step[:, None] + low[:, None]) * weight
    place = out + part * (ROWS * WIDTH) + row[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    if ACCUMULATE:
        value = tl.load(place) + value
    tl.store(place, value)


@kernel
def _read_plane(codes, at, j, m, inside, BITS: tl.constexpr, PLANE: tl.constexpr):
    """The bits of codes that a plane of this width holds, in their place; how many bytes of it each row has."""
    down: tl.constexpr = BITS // (2 * PLANE) * (2 * PLANE)
    stride = tl.maximum((m * PLANE + 7) >> 3, 1)
    part = j[None, :] // stride[:, None]
    place = at[:, None] + (j[None, :] - part * stride[:, None])
    byte = tl.load(codes + place, mask=inside, other=0).to(tl.int32)
    return ((byte >> (part * PLANE).to(tl.int32)) & ((1 << PLANE) - 1)) << down, stride


@kernel
def _dequantize(
    lows, steps, codes, out, n, group, group_bytes, offset, weight,
    BITS: tl.constexpr, HAS_LOW: tl.constexpr, ACCUMULATE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    g, begin, m = _rows(n, group, ROWS)
    j = tl.arange(0, WIDTH)
    inside = j[None, :] < m[:, None]
    step = tl.load(steps + g, mask=m > 0, other=0.0)
    low = tl.zeros_like(step)
    if HAS_LOW:
        low = tl.load(lows + g, mask=m > 0, other=0.0)
    code = tl.zeros((ROWS, WIDTH), tl.int32)
    at = g * group_bytes
    for plane in tl.static_range(4):
        if BITS & (8 >> plane):
            part, stride = _read_plane(codes, at, j, m, inside, BITS, 8 >> plane)
            code |= part
            at += stride
    value = ((code.to(tl.float32) - offset) * step[:, None] + low[:, None]) * weight
    element = begin[:, None] + j[None, :]
    if ACCUMULATE:
        value = tl.load(out + element, mask=inside, other=0.0) + value
    tl.store(out + element, value, mask=inside)


def _tile(group: int) -> dict[str, int]:
    """Rows and columns of a program's tile."""
    width = max(8, triton.next_power_of_2(group))
    return {"ROWS": max(1, BLOCK // width), "WIDTH": width}


def _floats(payload: Tensor, count: int) -> Tensor:
    """The header, in memory where floats may lie: the payload's own where it can be."""
    own = payload[: 4 * count]
    return own.view(torch.float32) if own.data_ptr() % 4 == 0 else own.clone().view(torch.float32)


def group_minmax(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    if group > _LONGEST:
        return reference.group_minmax(x, group)
    groups = -(-x.numel() // group)
    low, high = x.new_empty(groups), x.new_empty(groups)
    tile = _tile(group)
    run(_minmax, -(-groups // tile["ROWS"]), x, low, high, x.numel(), groups, group, on=x, **tile)
    return low, high


def _whole(n: int, group: int, codes: Tensor, tile: dict[str, int]) -> int:
    """How many programs' tiles of whole groups there are, that loops without masks can take."""
    if tile["WIDTH"] != group or group < _SHORTEST or codes.data_ptr() % 4:
        return 0
    return n // (tile["ROWS"] * group)


def quantize_groups(
    x: Tensor, out: Tensor, *, bits: int, group: int, scale: Scale, stochastic: bool, seed: int = 0
) -> None:
    if group > _LONGEST:
        reference.quantize_groups(x, out, bits=bits, group=group, scale=scale, stochastic=stochastic, seed=seed)
        return
    n, groups = x.numel(), -(-x.numel() // group)
    header = groups * (2 if scale == "minmax" else 1)
    end = 4 * header + packed_nbytes(n, bits, group)
    floats, codes = _floats(out, header), out[4 * header : end]
    if end < out.numel():
        out[end:] = 0
    centre = (1 << (bits - 1)) - 1
    levels, offset = ((1 << bits) - 1, 0) if scale == "minmax" else (centre, centre)
    top = (1 << bits) - 1 if scale == "minmax" else 2 * centre
    numbers = float(levels), float(offset if stochastic else offset + 0.5), float(top)
    tile, folded, steps = _tile(group), fold_seed(seed), floats[header - groups :]
    form = {"BITS": bits, "SCALE": _SCALES[scale], "STOCHASTIC": stochastic, **tile}
    programs = _whole(n, group, codes, tile)
    done = programs * tile["ROWS"]
    if programs:
        words = codes[: done * group * bits // 8].view(torch.int32)
        run(_quantize_whole, programs, x, floats, steps, words, *numbers, folded, on=x, **form)
    if done < groups:
        first, group_nbytes = done * group, packed_nbytes(group, bits, group)
        arrays = x[first:], floats[done:], steps[done:], codes[done * group_nbytes :]
        sizes = n - first, groups - done, group, group_nbytes
        rest = fold_seed(seed, first)
        run(_quantize, -(-(groups - done) // tile["ROWS"]), *arrays, *sizes, *numbers, rest, on=x, **form)
    if floats.data_ptr() != out.data_ptr():
        out[: 4 * header] = floats.view(torch.uint8)


def dequantize_groups(
    payload: Tensor, out: Tensor, *, bits: int, group: int, scale: Scale, weight: float = 1.0, accumulate: bool = False
) -> None:
    if group > _LONGEST:
        reference.dequantize_groups(
            payload, out, bits=bits, group=group, scale=scale, weight=weight, accumulate=accumulate
        )
        return
    n, groups = out.numel(), -(-out.numel() // group)
    header = groups * (2 if scale == "minmax" else 1)
    floats, codes = _floats(payload, header), payload[4 * header :]
    offset = {"minmax": 0.0, "mean": 0.5}.get(scale, float((1 << (bits - 1)) - 1))
    tile, steps = _tile(group), floats[header - groups :]
    form = {"BITS": bits, "HAS_LOW": scale == "minmax", "ACCUMULATE": accumulate, **tile}
    programs = _whole(n, group, codes, tile)
    done = programs * tile["ROWS"]
    if programs:
        words = codes[: done * group * bits // 8].view(torch.int32)
        run(_dequantize_whole, programs, floats, steps, words, out, offset, float(weight), on=out, **form)
    if done < groups:
        first, group_nbytes = done * group, packed_nbytes(group, bits, group)
        arrays = floats[done:], steps[done:], codes[done * group_nbytes :], out[first:]
        sizes = n - first, group, group_nbytes
        run(_dequantize, -(-(groups - done) // tile["ROWS"]), *arrays, *sizes, offset, float(weight), on=out, **form)
