"""Masks and places of maxima, in Triton.

A program has some bytes of a mask, with eight elements for each byte; or some results of pooling.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import triton.language as tl

from narrowband.kernels.cuda.common import BLOCK, load, raw, store
from narrowband.kernels.cuda.launching import kernel, run

if TYPE_CHECKING:
    from torch import Tensor

    from narrowband.kernels.masks import Windows

__all__ = ["apply_mask", "mask_between", "pool_places", "pool_positions"]

_BYTES = BLOCK // 8


@kernel
def _between(x, out, n, stride, low, high, HALF: tl.constexpr, WIDTH: tl.constexpr):
    t = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    byte = tl.zeros((WIDTH,), tl.int32)
    for bit in tl.static_range(8):
        i = bit * stride + t
        ok = (t < stride) & (i < n)
        v = load(x + i, ok, HALF)
        beyond = (v <= low) | (v >= high)  # False for NaN
        byte |= tl.where(ok & (beyond == 0), 1 << bit, 0)
    tl.store(out + t, byte.to(tl.uint8), mask=t < stride)


@kernel
def _apply(mask, x, out, n, stride, factor, HALF: tl.constexpr, HALF_OUT: tl.constexpr, WIDTH: tl.constexpr):
    t = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    byte = tl.load(mask + t, mask=t < stride, other=0).to(tl.int32)
    for bit in tl.static_range(8):
        i = bit * stride + t
        ok = (t < stride) & (i < n)
        v = load(x + i, ok, HALF) * factor
        kept = tl.where((byte >> bit) & 1 != 0, v, 0.0)
        store(out + i, kept, ok, HALF_OUT)


def mask_between(x: Tensor, out: Tensor, low: float = 0.0, high: float = math.nan) -> None:
    own, half = raw(x.view(-1))
    form = x.numel(), out.numel(), float(low), float(high)
    run(_between, -(-out.numel() // _BYTES), own, out, *form, on=x, HALF=half, WIDTH=_BYTES)


def apply_mask(mask: Tensor, x: Tensor, out: Tensor, factor: float = 1.0) -> None:
    form = x.numel(), mask.numel(), float(factor)
    (own, half), (into, half_out) = raw(x.view(-1)), raw(out.view(-1))
    halves = {"HALF": half, "HALF_OUT": half_out}
    run(_apply, -(-mask.numel() // _BYTES), mask, own, into, *form, on=x, **halves, WIDTH=_BYTES)


# ---- places of maxima ------------------------------------------------------------------------------------------------


@kernel
def _begin(i, rows, columns, inner, down, across, above, before):
    """Return the row and the column where the window of each result begins."""
    line = i // inner
    return line // columns % rows * down - above, line % columns * across - before


@kernel
def _to_places(
    position, out, n, rows, columns, inner, width, window, down, across, above, before, WIDTH: tl.constexpr
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    row, column = _begin(i, rows, columns, inner, down, across, above, before)
    at = tl.load(position + i, mask=i < n, other=0)
    place = (at // width - row) * window + (at % width - column)
    tl.store(out + i, place.to(tl.uint8), mask=i < n)


@kernel
def _to_positions(
    places, out, n, rows, columns, inner, width, window, down, across, above, before, WIDTH: tl.constexpr
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    row, column = _begin(i, rows, columns, inner, down, across, above, before)
    place = tl.load(places + i, mask=i < n, other=0).to(tl.int64)
    tl.store(out + i, (row + place // window) * width + (column + place % window), mask=i < n)


def _form(windows: Windows) -> tuple[int, ...]:
    own = windows.numel, windows.rows, windows.columns, windows.inner, windows.width, windows.kernel
    return *own, *windows.stride, *windows.padding


def pool_places(position: Tensor, out: Tensor, windows: Windows) -> None:
    run(_to_places, -(-windows.numel // BLOCK), position, out, *_form(windows), on=position, WIDTH=BLOCK)


def pool_positions(places: Tensor, out: Tensor, windows: Windows) -> None:
    run(_to_positions, -(-windows.numel // BLOCK), places, out, *_form(windows), on=places, WIDTH=BLOCK)
