"""Fixed point: integer codes whose sums are exact, for coded averages.

**Fixed point** in units of ``unit``, a power of two in [2**-126, 2**126]. Codes are int32, int16 or int8, at most
``limit`` in magnitude::

    code     = clamp(rint(x / unit), −limit, limit)                     (rint: to nearest, ties to even; limit for NaN)
    checksum = Σ code_i · (2i + 1) mod 2**32
    decoded  = float32(float64(code) · factor)

If float32 cannot represent ``limit``, codes are clamped at the largest float32 below it. Sums and differences of codes
are taken modulo 2**bits. So subtracting all terms but one from a sum leaves that term, to the bit. *Slices* are equally
long parts of one tensor, each given by the index of its first element.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from narrowband.kernels.backends import backend_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = [
    "fixed_decode",
    "fixed_dequantize",
    "fixed_quantize",
    "fixed_sum",
]


def fixed_quantize(x: Tensor, out: Tensor, unit: float, limit: int) -> tuple[float, int]:
    """Write the codes of float32 ``x``, whole multiples of ``unit``, into ``out`` (int32, int16 or int8).

    Returns:
        (the largest magnitude in ``x``, the checksum of the codes). The magnitude is that of ``x`` itself: inf or NaN
        if ``x`` has one, and above ``unit · limit`` if codes were clamped.
    """
    return cast("tuple[float, int]", backend_of(x).fixed_quantize(x, out, unit, limit))


def fixed_sum(source: Tensor, starts: Sequence[int], out: Tensor) -> None:
    """``out`` = the sum of one or more slices of ``source``, modulo 2**bits of ``out``; the codes of ``out`` may be
    wider.
    """
    backend_of(source).fixed_sum(source, starts, out)


def fixed_decode(packet: Tensor, source: Tensor, starts: Sequence[int], total: Tensor) -> None:
    """``total += packet − slices``: recover one slice from a packet, and add it to ``total`` (int32).

    ``packet`` is the sum of the given slices of ``source`` and one other slice. The difference is taken in the packet's
    own width, and then widened.
    """
    backend_of(packet).fixed_decode(packet, source, starts, total)


def fixed_dequantize(total: Tensor, out: Tensor, factor: float) -> None:
    """``out = total · factor``: int32 codes to float32, rounded once."""
    backend_of(total).fixed_dequantize(total, out, factor)
