"""Fixed point in Triton: codes with a range check, and sums of slices modulo 2**bits, from which slices can be
subtracted again.
"""

from __future__ import annotations

import math
import struct
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from narrowband.kernels.cuda.common import BLOCK, MAGNITUDE, nearest
from narrowband.kernels.cuda.launching import kernel, run

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = ["fixed_decode", "fixed_dequantize", "fixed_quantize", "fixed_sum"]

#: The most slices that one launch adds up.
_SLICES = 8

#: Slices begin anywhere; specializing on their begins (a multiple of 16, 1) would compile many programs.
_anywhere: Any = triton.jit(do_not_specialize=[f"s{number}" for number in range(_SLICES)])
_any_factor: Any = triton.jit(do_not_specialize=["factor"])


@kernel
def _quantize(x, out, tops, sums, n, inverse, top, WIDTH: tl.constexpr):
    """Write codes; note, per program, the largest magnitude as an integer, and the checksum."""
    i = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    v = tl.load(x + i, mask=i < n, other=0.0)
    tl.store(tops + tl.program_id(0), tl.max(v.to(tl.int32, bitcast=True) & MAGNITUDE, 0))
    scaled = nearest(v * inverse)
    scaled = tl.where(scaled < top, scaled, top)
    code = tl.where(scaled > -top, scaled, -top).to(tl.int32)
    tl.store(out + i, code.to(out.dtype.element_ty), mask=i < n)
    weighted = (code.to(tl.int64) * (2 * i + 1)) & 0xFFFFFFFF
    tl.store(sums + tl.program_id(0), tl.sum(tl.where(i < n, weighted, 0), 0))


@_anywhere
def _slices(
    base, source, out, n, s0, s1, s2, s3, s4, s5, s6, s7,
    COUNT: tl.constexpr, SIGN: tl.constexpr, FRESH: tl.constexpr, WIDEN: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """``out`` = the base (zero for a fresh sum) plus or minus COUNT slices, modulo 2**bits of the base.

    With WIDEN, the result is added, as a signed number, to ``out``.
    """
    i = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    total = tl.zeros((WIDTH,), tl.int32)
    if not FRESH:
        total = tl.load(base + i, mask=i < n, other=0).to(tl.int32)
    starts = s0, s1, s2, s3, s4, s5, s6, s7
    for number in tl.static_range(COUNT):
        total += SIGN * tl.load(source + (starts[number] + i), mask=i < n, other=0).to(tl.int32)
    total = total.to(base.dtype.element_ty)
    if WIDEN:
        total = total.to(tl.int32) + tl.load(out + i, mask=i < n, other=0)
    tl.store(out + i, total, mask=i < n)


@_any_factor
def _dequantize(total, out, n, factor, WIDTH: tl.constexpr):
    """Decode. The factor is passed as the bits of a float64: as a number it would be rounded to float32."""
    i = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    by = tl.full((WIDTH,), factor, tl.int64).to(tl.float64, bitcast=True)
    code = tl.load(total + i, mask=i < n, other=0)
    tl.store(out + i, (code.to(tl.float64) * by).to(tl.float32), mask=i < n)


def fixed_quantize(x: Tensor, out: Tensor, unit: float, limit: int) -> tuple[float, int]:
    n = x.numel()
    if not n:
        return 0.0, 0
    programs = -(-n // BLOCK)
    tops = torch.empty(programs, dtype=torch.int32, device=x.device)
    sums = torch.empty(programs, dtype=torch.int64, device=x.device)
    run(_quantize, programs, x, out, tops, sums, n, 1.0 / unit, _largest_float(limit), on=x, WIDTH=BLOCK)
    largest, checksum = torch.stack([tops.amax().long(), sums.sum()]).tolist()
    return struct.unpack("f", struct.pack("i", largest))[0], checksum & 0xFFFFFFFF


def _largest_float(limit: int) -> float:
    """Return the largest float32 that is at most ``limit``."""
    mantissa, exponent = math.frexp(limit)
    return math.ldexp(math.floor(math.ldexp(mantissa, 24)), exponent - 24)


def _run(base: Tensor, source: Tensor, starts: Sequence[int], out: Tensor, **constants: Any) -> None:
    padded = (*starts, *[0] * (_SLICES - len(starts)))
    form = {"COUNT": len(starts), "WIDTH": BLOCK, **constants}
    run(_slices, -(-out.numel() // BLOCK), base, source, out, out.numel(), *padded, on=out, **form)


def fixed_sum(source: Tensor, starts: Sequence[int], out: Tensor) -> None:
    for first in range(0, len(starts), _SLICES):
        _run(out, source, starts[first : first + _SLICES], out, SIGN=1, FRESH=not first, WIDEN=False)


def fixed_decode(packet: Tensor, source: Tensor, starts: Sequence[int], total: Tensor) -> None:
    last = max(0, len(starts) - 1) // _SLICES * _SLICES
    for first in range(0, last, _SLICES):  # a launch takes few slices; ``rest`` is the difference so far
        rest = torch.empty_like(packet)
        _run(packet, source, starts[first : first + _SLICES], rest, SIGN=-1, FRESH=False, WIDEN=False)
        packet = rest
    _run(packet, source, starts[last:], total, SIGN=-1, FRESH=False, WIDEN=True)


def fixed_dequantize(total: Tensor, out: Tensor, factor: float) -> None:
    (bits,) = struct.unpack("q", struct.pack("d", factor))
    run(_dequantize, -(-out.numel() // BLOCK), total, out, out.numel(), bits, on=out, WIDTH=BLOCK)
