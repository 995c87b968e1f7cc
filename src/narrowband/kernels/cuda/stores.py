"""Residuals stored in fewer bits, in Triton."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton.language as tl

from narrowband.kernels.cuda.common import BLOCK, MAGNITUDE, fold_seed, mix
from narrowband.kernels.cuda.launching import kernel, run
from narrowband.kernels.stores import LEAST_POWER, STORE_GROUP

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["keep_in_8", "keep_in_16", "read_from_8"]

_GROUP, _HALF = tl.constexpr(STORE_GROUP), tl.constexpr(STORE_GROUP // 2)
_LEAST = tl.constexpr(LEAST_POWER)
_ROWS = BLOCK // STORE_GROUP


@kernel
def _noise(i, folded):
    """Return 16 random bits for element i: one half of a hash, whose other half belongs to another element."""
    h = mix((i // _GROUP * _HALF + i % _HALF).to(tl.uint32) + folded.to(tl.uint32))
    return tl.where(i % _GROUP < _HALF, h & 0xFFFF, h >> 16)


@kernel
def _in_16(bits, out, n, folded, WIDTH: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    kept = (tl.load(bits + i, mask=i < n, other=0).to(tl.uint32, bitcast=True) + _noise(i, folded)) >> 16
    tl.store(out + i, kept.to(tl.uint16).to(tl.int16, bitcast=True), mask=i < n)


@kernel
def _in_8(x, codes, exponents, n, folded, STOCHASTIC: tl.constexpr, ROWS: tl.constexpr):
    """Elements are in two halves of groups along the first axis, so that a thread has both elements of a hash.

    Memory is read and written with the groups side by side; see ``quantized._whole``.
    """
    part = tl.program_id(0).to(tl.int64)
    left = tl.minimum(n - part * (ROWS * _GROUP), ROWS * _GROUP).to(tl.int32)
    row = tl.arange(0, ROWS)
    column = tl.arange(0, ROWS * _HALF)
    element = (column // _HALF * _GROUP + column % _HALF)[None, :] + tl.arange(0, 2)[:, None] * _HALF
    x += part * (ROWS * _GROUP)
    v = tl.reshape(tl.load(x + element, mask=element < left, other=0.0), (2, ROWS, _HALF))
    top = tl.max(tl.max(v.to(tl.int32, bitcast=True) & MAGNITUDE, 0), 1)
    exponent = (top >> 23) - 126 - tl.where((top & 0x007FFFFF) <= 0x007E0000, 7, 6)
    exponent = tl.maximum(exponent, _LEAST)
    tl.store(exponents + part * ROWS + row, exponent.to(tl.int8), mask=row * _GROUP < left)
    scaled = v * ((127 + 16 - exponent) << 23).to(tl.float32, bitcast=True)[None, :, None]
    # Magnitudes are below 2**23. Added to it, they are rounded to whole numbers, ties to even, which its bits hold.
    whole = (tl.abs(scaled) + 8388608.0).to(tl.int32, bitcast=True) - 0x4B000000
    fixed = tl.where(scaled < 0.0, -whole, whole)
    if STOCHASTIC:
        place = (row * _HALF)[None, :, None] + tl.arange(0, _HALF)[None, None, :]
        h = mix((part * (ROWS * _HALF) + folded).to(tl.uint32) + place.to(tl.uint32))
        fixed += tl.where(tl.arange(0, 2)[:, None, None] == 0, h & 0xFFFF, h >> 16).to(tl.int32)
    else:
        fixed += 1 << 15
    code = tl.reshape((fixed >> 16).to(tl.int8), (2, ROWS * _HALF))
    tl.store(codes + part * (ROWS * _GROUP) + element, code, mask=element < left)


@kernel
def _from_8(codes, exponents, out, n, ROWS: tl.constexpr):
    g = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    element = g[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
    exponent = tl.load(exponents + g, mask=g * _GROUP < n, other=0).to(tl.int32)
    scale = ((exponent + 127) << 23).to(tl.float32, bitcast=True)
    code = tl.load(codes + element, mask=element < n, other=0)
    tl.store(out + element, code.to(tl.float32) * scale[:, None], mask=element < n)


def keep_in_16(x: Tensor, out: Tensor, *, seed: int | None) -> None:
    if seed is None:
        out.copy_(x)
        return
    arrays = x.view(torch.int32), out.view(torch.int16)
    run(_in_16, -(-x.numel() // BLOCK), *arrays, x.numel(), fold_seed(seed), on=x, WIDTH=BLOCK)


def keep_in_8(x: Tensor, codes: Tensor, exponents: Tensor, *, seed: int | None) -> None:
    programs = -(-exponents.numel() // _ROWS)
    folded = fold_seed(seed or 0)
    form = {"STOCHASTIC": seed is not None, "ROWS": _ROWS, "num_warps": 2}
    run(_in_8, programs, x, codes, exponents, x.numel(), folded, on=x, **form)


def read_from_8(codes: Tensor, exponents: Tensor, out: Tensor) -> None:
    run(_from_8, -(-exponents.numel() // _ROWS), codes, exponents, out, out.numel(), on=out, ROWS=_ROWS)
