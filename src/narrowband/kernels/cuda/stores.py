"""Residuals stored in fewer bits, in Triton. There are loops for one tensor, and for several at once."""

from __future__ import annotations

from itertools import repeat
from typing import TYPE_CHECKING

import torch
import triton.language as tl

from narrowband.kernels.cuda.common import BLOCK, INFINITE, MAGNITUDE, fold_seed, mix
from narrowband.kernels.cuda.launching import Segments, kernel, run, segment
from narrowband.kernels.stores import LEAST_POWER, STORE_GROUP

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from narrowband.kernels.stores import Stored

__all__ = ["keep_all", "keep_in_8", "keep_in_16", "read_all", "read_from_8"]

_GROUP, _HALF = tl.constexpr(STORE_GROUP), tl.constexpr(STORE_GROUP // 2)
_LEAST = tl.constexpr(LEAST_POWER)
_ROWS = BLOCK // STORE_GROUP


@kernel
def _noise(i, folded):
    """Return 16 random bits for element i: one half of a hash, whose other half belongs to another element."""
    h = mix((i // _GROUP * _HALF + i % _HALF).to(tl.uint32) + folded.to(tl.uint32))
    return tl.where(i % _GROUP < _HALF, h & 0xFFFF, h >> 16)


@kernel
def _keep_16(bits, out, former, part, n, folded, WIDTH: tl.constexpr, FORMER: tl.constexpr):
    """Store a program's part of a tensor. With FORMER, first copy there what was stored."""
    i = part * WIDTH + tl.arange(0, WIDTH)
    if FORMER:
        tl.store(former + i, tl.load(out + i, mask=i < n), mask=i < n)
        tl.debug_barrier()  # a thread may store what another has loaded
    kept = (tl.load(bits + i, mask=i < n, other=0).to(tl.uint32, bitcast=True) + _noise(i, folded)) >> 16
    tl.store(out + i, kept.to(tl.uint16).to(tl.int16, bitcast=True), mask=i < n)


@kernel
def _in_16(bits, out, n, folded, WIDTH: tl.constexpr):
    _keep_16(bits, out, out, tl.program_id(0).to(tl.int64), n, folded, WIDTH, False)


@kernel
def _in_16_segments(
    table, count, WIDTH: tl.constexpr, ALIGNED: tl.constexpr, FORMER: tl.constexpr, SEGMENTS: tl.constexpr
):  # fmt: skip
    own, part = segment(table, count, 6, SEGMENTS)
    bits = tl.load(own + 1).to(tl.pointer_type(tl.int32))
    out = tl.load(own + 2).to(tl.pointer_type(tl.int16))
    former = tl.load(own + 3).to(tl.pointer_type(tl.int16))
    n = tl.load(own + 4)
    if ALIGNED:
        bits = tl.multiple_of(bits, 16)
        out = tl.multiple_of(out, 16)
        n = tl.multiple_of(n, 16)
    _keep_16(bits, out, former, part, n, tl.load(own + 5).to(tl.int32), WIDTH, FORMER)


@kernel
def _keep_8(
    x, codes, exponents, former, least, part, n, folded,
    STOCHASTIC: tl.constexpr, ROWS: tl.constexpr, ALIGNED: tl.constexpr, FORMER: tl.constexpr, SENT: tl.constexpr,
):  # fmt: skip
    """Store a program's part of a tensor. With FORMER, first copy there what was stored. With SENT, see
    :func:`narrowband.kernels.keep_all`.

    Elements are in two halves of groups along the first axis, so that a thread has both elements of a hash. Memory is
    read and written with the groups side by side; see ``quantized._whole``.
    """
    left = tl.minimum(n - part * (ROWS * _GROUP), ROWS * _GROUP).to(tl.int32)
    row = tl.arange(0, ROWS)
    column = tl.arange(0, ROWS * _HALF)
    element = (column // _HALF * _GROUP + column % _HALF)[None, :] + tl.arange(0, 2)[:, None] * _HALF
    x += part * (ROWS * _GROUP)
    codes += part * (ROWS * _GROUP)
    exponents += part * ROWS
    if ALIGNED:
        x = tl.multiple_of(x, 16)
        codes = tl.multiple_of(codes, 16)
        left = tl.multiple_of(left, 16)
    if FORMER:
        behind = former + n + part * ROWS + row
        former += part * (ROWS * _GROUP)
        tl.store(former + element, tl.load(codes + element, mask=element < left), mask=element < left)
        tl.store(behind, tl.load(exponents + row, mask=row * _GROUP < left), mask=row * _GROUP < left)
        tl.debug_barrier()  # a thread may store what another has loaded
    v = tl.reshape(tl.load(x + element, mask=element < left, other=0.0), (2, ROWS, _HALF))
    magnitude = v.to(tl.int32, bitcast=True) & MAGNITUDE
    if SENT:
        sent = magnitude > INFINITE
        magnitude = tl.where(sent, tl.load(least), magnitude)
        v = tl.where(sent, 0.0, v)
    top = tl.max(tl.max(magnitude, 0), 1)
    exponent = (top >> 23) - 126 - tl.where((top & 0x007FFFFF) <= 0x007E0000, 7, 6)
    exponent = tl.maximum(exponent, _LEAST)
    tl.store(exponents + row, exponent.to(tl.int8), mask=row * _GROUP < left)
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
    tl.store(codes + element, code, mask=element < left)


@kernel
def _in_8(x, codes, exponents, n, folded, STOCHASTIC: tl.constexpr, ROWS: tl.constexpr):
    part = tl.program_id(0).to(tl.int64)
    _keep_8(x, codes, exponents, codes, codes, part, n, folded, STOCHASTIC, ROWS, False, False, False)


@kernel
def _in_8_segments(
    table, count, ROWS: tl.constexpr, ALIGNED: tl.constexpr, FORMER: tl.constexpr, SENT: tl.constexpr,
    SEGMENTS: tl.constexpr,
):  # fmt: skip
    own, part = segment(table, count, 8, SEGMENTS)
    x = tl.load(own + 1).to(tl.pointer_type(tl.float32))
    codes = tl.load(own + 2).to(tl.pointer_type(tl.int8))
    exponents = tl.load(own + 3).to(tl.pointer_type(tl.int8))
    former = tl.load(own + 4).to(tl.pointer_type(tl.int8))
    least = tl.load(own + 5).to(tl.pointer_type(tl.int32))
    n, folded = tl.load(own + 6), tl.load(own + 7).to(tl.int32)
    _keep_8(x, codes, exponents, former, least, part, n, folded, True, ROWS, ALIGNED, FORMER, SENT)


@kernel
def _read_8(codes, exponents, out, part, n, ROWS: tl.constexpr):
    g = part * ROWS + tl.arange(0, ROWS)
    element = g[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
    exponent = tl.load(exponents + g, mask=g * _GROUP < n, other=0).to(tl.int32)
    scale = ((exponent + 127) << 23).to(tl.float32, bitcast=True)
    code = tl.load(codes + element, mask=element < n, other=0)
    tl.store(out + element, code.to(tl.float32) * scale[:, None], mask=element < n)


@kernel
def _from_8(codes, exponents, out, n, ROWS: tl.constexpr):
    _read_8(codes, exponents, out, tl.program_id(0).to(tl.int64), n, ROWS)


@kernel
def _from_8_segments(table, count, ROWS: tl.constexpr, ALIGNED: tl.constexpr, SEGMENTS: tl.constexpr):
    own, part = segment(table, count, 5, SEGMENTS)
    codes = tl.load(own + 1).to(tl.pointer_type(tl.int8))
    exponents = tl.load(own + 2).to(tl.pointer_type(tl.int8))
    out = tl.load(own + 3).to(tl.pointer_type(tl.float32))
    n = tl.load(own + 4)
    if ALIGNED:
        codes = tl.multiple_of(codes, 16)
        out = tl.multiple_of(out, 16)
        n = tl.multiple_of(n, 16)
    _read_8(codes, exponents, out, part, n, ROWS)


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


# ---- several tensors -------------------------------------------------------------------------------------------------


def _aligned(xs: Sequence[Tensor], codes: Sequence[Tensor]) -> bool:
    """Whether 16 bytes can be read at a time, of any part of these tensors."""
    return not any(x.data_ptr() % 16 or own.data_ptr() % 16 or x.numel() % 16 for x, own in zip(xs, codes, strict=True))


def keep_all(
    xs: Sequence[Tensor],
    stored: Sequence[Stored],
    *,
    seeds: Sequence[int],
    formers: Sequence[Tensor] = (),
    least: Tensor | None = None,
) -> None:
    halves, bytes_ = Segments(xs[0]), Segments(xs[0])
    lesser = 0 if least is None else least.data_ptr()
    for x, (codes, exponents), seed, former in zip(xs, stored, seeds, formers or repeat(None, len(xs)), strict=True):
        n, arrays, memory = x.numel(), (x.data_ptr(), codes.data_ptr()), 0 if former is None else former.data_ptr()
        if exponents is None:
            halves.add(-(-n // BLOCK), *arrays, memory, n, fold_seed(seed))
        else:
            groups = exponents.numel()
            bytes_.add(-(-groups // _ROWS), *arrays, exponents.data_ptr(), memory, lesser, n, fold_seed(seed))
        lesser += 4 if lesser else 0
    form = {"ALIGNED": _aligned(xs, [codes for codes, _ in stored]), "FORMER": bool(formers)}
    halves.run(_in_16_segments, WIDTH=BLOCK, **form)
    bytes_.run(_in_8_segments, ROWS=_ROWS, SENT=least is not None, num_warps=2, **form)


def read_all(stored: Sequence[Stored], outs: Sequence[Tensor]) -> None:
    halves = [(codes, out) for (codes, exponents), out in zip(stored, outs, strict=True) if exponents is None]
    if halves:
        torch._foreach_copy_([out for _, out in halves], [codes for codes, _ in halves])
    segments = Segments(outs[0])
    for (codes, exponents), out in zip(stored, outs, strict=True):
        if exponents is not None:
            arrays = codes.data_ptr(), exponents.data_ptr(), out.data_ptr()
            segments.add(-(-exponents.numel() // _ROWS), *arrays, out.numel())
    segments.run(_from_8_segments, ROWS=_ROWS, ALIGNED=_aligned(outs, [codes for codes, _ in stored]))
