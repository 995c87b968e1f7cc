"""Float32 kept in fewer bits, right on average: what waits in residuals.

Both formats round stochastically, so that what is added to a kept number again and again is not rounded away: the
expected value of what is kept is the number itself. Both draw 16 random bits for an element, and one hash serves two:
of each 64 elements those of the first half take the lower bits of 32 hashes, those of the second half the upper ones::

    h = hash(32 · (i // 64) + i % 32, seed);  noise(i) = h % 2**16 if i % 64 < 32 else h // 2**16

* ``bfloat16``: the upper half of a float32, after the noise was added to its bits. So the lower half decides how likely
  the next larger magnitude is.
* 8 bits: in groups of 64, each a whole number from −127 to 127 times a power of two of the group, the smallest one with
  which the largest magnitude fits, and at least 2**−111. Of x and the power p the code is
  ⌊(round(2**16 · x / p) + noise) / 2**16⌋. With powers of two, what was kept once is kept again to the bit.

Without a seed, both round to the nearest: 8 bits with 2**15 as the noise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from narrowband.kernels.backends import backend_of

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["LEAST_POWER", "STORE_GROUP", "keep_in_8", "keep_in_16", "read_from_8"]

#: Elements that share a power of two.
STORE_GROUP = 64
#: The smallest power of two: with it, 2**16 / p is the largest that a float32 can be.
LEAST_POWER = -111


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
