"""Values of large magnitude in 4 or 2 bits: a sign, and one of 8 or 2 levels of the value's group.

The elements that a selection keeps are not near zero. Levels near zero, as a quantizer for whole tensors has them,
would be wasted. So the levels are evenly spaced between two magnitudes ``low`` and ``high`` of each group::

    4 bits: low, high = the least and the largest magnitude
    2 bits: low, high = the mean magnitude of those below the mean of all, and of the others (low = high if none is)
    step    = (high − low) / (levels − 1)
    code    = clamp(floor((|v| − low) / step + 1/2), 0, levels − 1)       (0 where the step is 0)
    decoded = ±(low + code · step)

Means are taken in float64. Both magnitudes are stored in bfloat16, rounded to nearest, ties to even, and clamped to the
largest bfloat16; step and codes are computed from the stored magnitudes. If a group has a value that is not finite,
both magnitudes are NaN and all codes 0.

**Levels** of k values in groups of ``group``: first ``low, high`` for each group, then the codes with their sign as the
highest bit, as many to a byte as fit, the first in the lowest bits. Zeros fill the last byte.

Apart from the rounding of the two magnitudes, encoding is never worse than sending zeros. In 4 bits this holds for
every value: it decodes to its nearest level, and one level lies at or below its magnitude. In 2 bits it holds for the
sum of squared errors over a group, because the levels are means.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from narrowband.kernels.backends import backend_of

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["levels_decode", "levels_encode", "levels_nbytes"]


def levels_nbytes(k: int, bits: int, group: int) -> int:
    """Return the bytes that k values take in ``bits`` bits each: 4 for each group, and the codes."""
    return 4 * -(-k // group) + -(-k * bits // 8)


def levels_encode(values: Tensor, out: Tensor, *, bits: int, group: int) -> None:
    """Write float32 ``values`` into ``out`` (uint8, at least :func:`levels_nbytes` long; zeros fill the rest).

    Args:
        bits: 4 or 2.
        group: values that share their levels; a multiple of 8.
    """
    backend_of(values).levels_encode(values, out, bits=bits, group=group)


def levels_decode(payload: Tensor, k: int, *, bits: int, group: int) -> Tensor:
    """Return the k values (float32) that :func:`levels_encode` wrote."""
    return cast("Tensor", backend_of(payload).levels_decode(payload, k, bits=bits, group=group))
