"""Residuals stored in fewer bits than float32, without bias.

Both formats round stochastically: the expected value of the stored number is the number itself, so small values that
are added again and again are not rounded away. Both draw 16 random bits per element, and one hash serves two elements:
of each 64 elements, the first half takes the lower bits of 32 hashes, and the second half the upper bits::

    h = hash(32 · (i // 64) + i % 32, seed);  noise(i) = h % 2**16 if i % 64 < 32 else h // 2**16

* ``bfloat16``: the upper half of a float32, after the noise has been added to its bits. So the lower half is the
  probability of rounding up to the next larger magnitude.
* 8 bits: each number is a whole number from −127 to 127 times a power of two. Each group of 64 has its own power: the
  smallest with which the group's largest magnitude fits, and at least 2**−111. The code of x with the power p is
  ⌊(round(2**16 · x / p) + noise) / 2**16⌋. Because p is a power of two, storing a stored number again keeps its bits.

Without a seed, both round to nearest; 8 bits do so with 2**15 as the noise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from narrowband.kernels.backends import backend_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = ["LEAST_POWER", "STORE_GROUP", "Stored", "keep_all", "keep_in_8", "keep_in_16", "read_all", "read_from_8"]

#: What is stored of a tensor: int8 codes and their exponents; or bfloat16 and None.
Stored: TypeAlias = "tuple[Tensor, Tensor | None]"

#: Elements that share a power of two.
STORE_GROUP = 64
#: Exponent of the smallest power of two p, with which 2**16 / p = 2**127 is the largest power of two in float32.
LEAST_POWER = -111


def keep_in_16(x: Tensor, out: Tensor, *, seed: int | None) -> None:
    """Store ``x`` (flat float32, finite) in ``out`` (bfloat16); without a seed, round to nearest."""
    backend_of(x).keep_in_16(x, out, seed=seed)


def keep_in_8(x: Tensor, codes: Tensor, exponents: Tensor, *, seed: int | None) -> None:
    """Store ``x`` (flat float32, finite) in ``codes`` (int8, one per element) and ``exponents`` (int8, one per group of
    64); without a seed, round to nearest.
    """
    backend_of(x).keep_in_8(x, codes, exponents, seed=seed)


def read_from_8(codes: Tensor, exponents: Tensor, out: Tensor) -> None:
    """Write the numbers that ``codes`` and ``exponents`` hold into ``out`` (flat float32)."""
    backend_of(out).read_from_8(codes, exponents, out)


def read_all(stored: Sequence[Stored], outs: Sequence[Tensor]) -> None:
    """Write what is stored of several tensors into ``outs`` (flat float32), with no more GPU kernel launches than for
    one.
    """
    if outs:
        backend_of(outs[0]).read_all(stored, outs)


def keep_all(
    xs: Sequence[Tensor],
    stored: Sequence[Stored],
    *,
    seeds: Sequence[int],
    formers: Sequence[Tensor] = (),
    least: Tensor | None = None,
) -> None:
    """Store several tensors, with no more GPU kernel launches than for one.

    Args:
        xs: flat float32, finite.
        stored: where each is stored.
        seeds: one per tensor.
        formers: if given, one per tensor, flat uint8: what was stored before is copied there, codes and then exponents.
        least: with 8 bits, float32, one per tensor: NaN then stands for an element that was sent, whose code is zero.
            For its group's power of two it counts as a number of this magnitude, as in :func:`compensate_kept`.
    """
    if xs:
        backend_of(xs[0]).keep_all(xs, stored, seeds=seeds, formers=formers, least=least)
