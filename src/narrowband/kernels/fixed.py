"""Fixed point: whole numbers whose sums are exact, for coded averages.

**Fixed point** of ``unit``, a power of two in [2**-126, 2**126], in int32, int16 or int8 codes of at most ``limit``::

    code     = clamp(rint(x / unit), −limit, limit)                     (rint: to nearest, ties to even; limit for NaN)
    checksum = Σ code_i · (2i + 1) mod 2**32
    decoded  = float32(float64(code) · factor)

Where float32 does not have ``limit``, codes are clamped at the largest number below that it has. Sums and differences
of codes are those of whole numbers modulo 2**bits, so a sum from which all terms but one are subtracted is that one, to
the bit. *Slices* are equally long parts of one tensor, each named by its first element.
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
    """Codes of float32 ``x`` in ``out`` (int32, int16 or int8): whole numbers of ``unit``, a power of two.

    Returns:
        The largest magnitude in ``x``, as it is: inf or NaN where there is one, and above ``unit · limit`` where codes
        were clamped; and the checksum of the codes.
    """
    return cast("tuple[float, int]", backend_of(x).fixed_quantize(x, out, unit, limit))


def fixed_sum(source: Tensor, starts: Sequence[int], out: Tensor) -> None:
    """``out`` = the sum of slices of ``source``, one or more, modulo 2**bits of ``out``, whose codes may be wider."""
    backend_of(source).fixed_sum(source, starts, out)


def fixed_decode(packet: Tensor, source: Tensor, starts: Sequence[int], total: Tensor) -> None:
    """``total`` (int32) ``+= packet −`` the slices of ``source`` that it holds beside one other. The difference is
    taken in the packet's own width, and widened then.
    """
    backend_of(packet).fixed_decode(packet, source, starts, total)


def fixed_dequantize(total: Tensor, out: Tensor, factor: float) -> None:
    """``out = total · factor``: int32 codes as float32, rounded once."""
    backend_of(total).fixed_dequantize(total, out, factor)
