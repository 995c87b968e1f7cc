"""Values of large magnitude in 4 or 2 bits: a sign, and one of 8 or 2 levels that a group of values has of its own.

What a selection keeps has no values near zero. Levels that begin at zero, as those of a quantizer for whole tensors do,
would be wasted there. So the levels lie between two magnitudes ``low`` and ``high`` of each group, evenly::

    4 bits: low, high = the least and the largest magnitude
    2 bits: low, high = the mean magnitude of those below the mean of all, and of the others (low = high if none is)
    step    = (high − low) / (levels − 1)
    code    = clamp(floor((|v| − low) / step + 1/2), 0, levels − 1)       (0 where the step is 0)
    decoded = ±(low + code · step)

Means are taken in float64. Both magnitudes are kept in bfloat16, rounded to nearest, ties to even, and clamped to its
largest; the step and codes come from what is kept. Where a group has a value that is not finite, both are NaN, and all
codes 0.

**Levels** of k values in groups of ``group``: first ``low, high`` for each group, then the codes with their sign as the
highest bit, as many to a byte as fit, the first in the lowest bits. Zeros fill the last byte.

No decoded value is further from the value than zero is, but for the rounding of the two: the nearest of levels, of
which one lies at or below a magnitude, in 4 bits; and in 2 bits the sum of squares over a group, as of any means.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from narrowband.kernels.backends import backend_of

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["levels_decode", "levels_encode", "levels_nbytes"]


def levels_nbytes(k: int, bits: int, group: int) -> int:
    """Bytes of k values in so many bits: 4 for each group, and the codes."""
    return 4 * -(-k // group) + -(-k * bits // 8)


def levels_encode(values: Tensor, out: Tensor, *, bits: int, group: int) -> None:
    """Write float32 ``values`` into ``out`` (uint8, at least :func:`levels_nbytes` long; zeros fill the rest).

    Args:
        bits: 4 or 2.
        group: values that share their levels; a multiple of 8.
    """
    backend_of(values).levels_encode(values, out, bits=bits, group=group)


def levels_decode(payload: Tensor, k: int, *, bits: int, group: int) -> Tensor:
    """The k values (float32) that :func:`levels_encode` wrote."""
    return cast("Tensor", backend_of(payload).levels_decode(payload, k, bits=bits, group=group))
