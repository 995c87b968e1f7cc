"""Masks in Triton. A program has some bytes of a mask, and eight elements for each."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton.language as tl

from narrowband.kernels.cuda.common import BLOCK, kernel, load, raw, run, store

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["apply_mask", "mask_positive"]

_BYTES = BLOCK // 8


@kernel
def _positive(x, out, n, stride, HALF: tl.constexpr, WIDTH: tl.constexpr):
    t = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    byte = tl.zeros((WIDTH,), tl.int32)
    for bit in tl.static_range(8):
        i = bit * stride + t
        ok = (t < stride) & (i < n)
        v = load(x + i, ok, HALF)
        byte |= tl.where(ok & ((v > 0.0) | (v != v)), 1 << bit, 0)  # noqa: PLR0124 - NaN is kept
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


def mask_positive(x: Tensor, out: Tensor) -> None:
    own, half = raw(x.view(-1))
    run(_positive, -(-out.numel() // _BYTES), own, out, x.numel(), out.numel(), on=x, HALF=half, WIDTH=_BYTES)


def apply_mask(mask: Tensor, x: Tensor, out: Tensor, factor: float = 1.0) -> None:
    form = x.numel(), mask.numel(), float(factor)
    (own, half), (into, half_out) = raw(x.view(-1)), raw(out.view(-1))
    halves = {"HALF": half, "HALF_OUT": half_out}
    run(_apply, -(-mask.numel() // _BYTES), mask, own, into, *form, on=x, **halves, WIDTH=_BYTES)
