"""Float32 kept in fewer bits, right on average: what waits in residuals.

Both formats round stochastically, so that what is added to a kept number again and again is not rounded away: the
expected value of what is kept is the number itself.

* ``bfloat16``: the upper half of a float32. The lower half decides how likely the next larger magnitude is.
* 8 bits: in groups of 64, each a whole number from −127 to 127 times a power of two of the group, the smallest one with
  which the largest magnitude fits. With powers of two, what was kept once is kept again to the bit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from narrowband.kernels.backends import backend_of

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["STORE_GROUP", "keep_in_8", "keep_in_16", "read_from_8"]

#: Elements that share a power of two.
STORE_GROUP = 64


def keep_in_16(x: Tensor, out: Tensor, *, seed: int | None) -> None:
    """``out`` (bfloat16) ← ``x`` (flat float32, finite); without a seed rounded to nearest."""
    backend_of(x).keep_in_16(x, out, seed=seed)


def keep_in_8(x: Tensor, codes: Tensor, exponents: Tensor, *, seed: int | None) -> None:
    """``codes`` (int8, one each) and ``exponents`` (int8, one per group of 64) ← ``x`` (flat float32, finite); without
    a seed rounded to nearest.
    """
    backend_of(x).keep_in_8(x, codes, exponents, seed=seed)


def read_from_8(codes: Tensor, exponents: Tensor, out: Tensor) -> None:
    """``out`` (flat float32) ← what they hold."""
    backend_of(out).read_from_8(codes, exponents, out)
