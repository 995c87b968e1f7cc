"""Whole numbers in place of floats: contributions rounded to multiples of a unit, so that sums are exact in any order.

Each block contributes Σ ∂loss/∂w over its samples, divided by the samples of the mini-batch, and the average is the sum
of all contributions (equation 17 of CSSGD). They are rounded to whole numbers of a *unit*, a power of two, in ``bits``
bits, and everything after that is exact: sums of slices, what is left of them, the sum of all blocks. The unit is
chosen so that a stated *span* is covered: contributions of C blocks may reach span/C, and their sum, therefore, ±span
(the paper: 10). With 32 bits the sum of all blocks stays inside of int32; with 16 or 8 packets are narrower, and sums
are int32 still.

A contribution out of reach makes the unit larger, and the step is exchanged again. In a unit that one large step has
left, small ones after it would be rounded to nothing. So where the largest contribution of a step is far below what
the unit reaches, that becomes smaller again, down to the stated span's, and this step, too, is exchanged again.
"""

from __future__ import annotations

import math
from typing import Literal

import torch

__all__ = ["DTYPES", "EXPONENTS", "FixedPoint", "Span"]

Span = float | Literal["auto"]

DTYPES = {32: torch.int32, 16: torch.int16, 8: torch.int8}
#: The span of 32 bits where none is stated: the paper's.
_PAPERS_SPAN = 10.0
#: How far beyond a step's largest contribution ``span="auto"`` reaches in the next: what exceeds it is sent twice.
_HEADROOM = {32: 16.0, 16: 2.0, 8: 2.0}
#: A step whose largest contribution would have had room for this times its headroom is sent again in a finer unit.
_COARSE = 16.0
#: Exponents of units, so that a unit and one over it are normal float32.
EXPONENTS = (-126, 126)


class FixedPoint:
    """The unit of contributions, and how it follows what they need.

    Args:
        bits: of a number on the wire: 32, 16 or 8.
        span: what the average may reach, or ``auto``: as far as the last step says is needed. None: the paper's, 10,
            with 32 bits, and ``auto`` with fewer.
        blocks: how many contributions there are.

    Attributes:
        dtype: of a number on the wire.
        limit: the largest whole number, whose float32 is exact.
        exponent: the unit is two to the power of this.
        follows: whether the span is ``auto``.

    Raises:
        ValueError: bits or a span that do not exist.

    Example:
        >>> FixedPoint(16, 10.0, blocks=4).unit
        0.0001220703125
    """

    def __init__(self, bits: int, span: Span | None, blocks: int) -> None:
        if bits not in DTYPES:
            raise ValueError(f"bits={bits} is none of {', '.join(map(str, DTYPES))}")
        span = (_PAPERS_SPAN if bits == 32 else "auto") if span is None else span
        if span != "auto" and not 0 < span < math.inf:
            raise ValueError(f"span={span!r} is neither 'auto' nor a positive number")
        self.dtype = DTYPES[bits]
        self.follows, self._headroom = span == "auto", _HEADROOM[bits]
        largest = (2**31 - 1) // blocks if bits == 32 else 2 ** (bits - 1) - 1
        inexact = max(0, largest.bit_length() - 24)  # bits that a float32 does not have
        self.limit = largest >> inexact << inexact
        self._finest = EXPONENTS[0] if span == "auto" else self._fit(span / blocks)
        self.exponent = self._finest

    @property
    def unit(self) -> float:
        """What a whole number stands for."""
        return math.ldexp(1.0, self.exponent)

    @property
    def reach(self) -> float:
        """The largest contribution that the unit covers."""
        return math.ldexp(self.limit, self.exponent)

    def fits(self, magnitude: float) -> bool:
        """Whether a step with this largest contribution can have the unit: it is in reach, and not far below that. A
        unit that is as fine as the stated span has it is never too coarse.
        """
        if self.exponent <= self._finest or not magnitude:
            return magnitude <= self.reach
        return magnitude <= self.reach <= magnitude * self._headroom * _COARSE

    def refit(self, magnitude: float) -> None:
        """Take the unit for a step that it does not fit: the smallest that reaches as far; or a finer one, with
        headroom, but none finer than the stated span has it.
        """
        self.exponent = self._fit(magnitude) if magnitude > self.reach else self._with_headroom(magnitude)

    def follow(self, magnitude: float) -> None:
        """Take the unit for the next step after one with this largest contribution; a stated span only narrows here."""
        if magnitude:
            wanted = self._with_headroom(magnitude)
            self.exponent = wanted if self.follows else min(self.exponent, wanted)

    def _with_headroom(self, magnitude: float) -> int:
        return max(self._finest, self._fit(magnitude * self._headroom))

    def _fit(self, magnitude: float) -> int:
        exponent = math.ceil(math.log2(magnitude / self.limit)) - 1
        while math.ldexp(self.limit, exponent) < magnitude:
            exponent += 1
        return min(max(exponent, EXPONENTS[0]), EXPONENTS[1])
