"""Fixed-point numbers: contributions are rounded to multiples of a unit, so that sums are exact in any order.

Each block contributes Σ ∂loss/∂w over its samples, divided by the samples of the mini-batch. The average is the sum of
all contributions (equation 17 of CSSGD). Contributions are rounded to multiples of a *unit*, a power of two, in
``bits`` bits. Everything after that is exact: sums of slices, their decoding, the sum of all blocks. The unit is chosen
to cover a stated *span*: contributions of C blocks may reach span/C, and therefore their sum ±span (in the paper, 10).
With 32 bits the sum of all blocks fits into int32. With 16 or 8 bits packets are narrower, and sums are still int32.

If a contribution is out of reach, the unit is made larger, and the step is exchanged again. A unit that one large step
has left would round the small contributions of later steps to nothing. So if the largest contribution of a step is far
below what the unit reaches, the unit is made smaller again, down to that of the stated span, and this step is exchanged
again, too.
"""

from __future__ import annotations

import math
from typing import Literal

import torch

__all__ = ["DTYPES", "EXPONENTS", "FixedPoint", "Span"]

Span = float | Literal["auto"]

DTYPES = {32: torch.int32, 16: torch.int16, 8: torch.int8}
#: The default span with 32 bits, which is the paper's.
_PAPERS_SPAN = 10.0
#: How many times a step's largest contribution ``span="auto"`` reaches in the next step. A step that exceeds it is sent
#: twice.
_HEADROOM = {32: 16.0, 16: 2.0, 8: 2.0}
#: A step is sent again in a finer unit if the reach is more than this many times its largest contribution times the
#: headroom.
_COARSE = 16.0
#: Least and largest exponent of a unit, such that the unit and its reciprocal are normal float32.
EXPONENTS = (-126, 126)


class FixedPoint:
    """The unit of contributions, and how it adapts to their magnitudes.

    Args:
        bits: bits of a number on the wire: 32, 16 or 8.
        span: the largest magnitude of the average; or ``auto``: chosen by the contributions of the last step. None: the
            paper's, 10, with 32 bits, and ``auto`` with fewer.
        blocks: number of contributions.

    Attributes:
        dtype: dtype of a number on the wire.
        limit: the largest whole number that is used; float32 represents it exactly.
        exponent: the unit is two to the power of this.
        follows: whether the span is ``auto``.

    Raises:
        ValueError: unsupported ``bits``, or an invalid ``span``.

    Example:
        >>> FixedPoint(16, 10.0, blocks=4).unit
        0.0001220703125
    """

    def __init__(self, bits: int, span: Span | None, blocks: int) -> None:
        if bits not in DTYPES:
            raise ValueError(f"bits={bits}; expected one of {', '.join(map(str, DTYPES))}")
        span = (_PAPERS_SPAN if bits == 32 else "auto") if span is None else span
        if span != "auto" and not 0 < span < math.inf:
            raise ValueError(f"span={span!r}; expected 'auto' or a positive number")
        self.dtype = DTYPES[bits]
        self.follows, self._headroom = span == "auto", _HEADROOM[bits]
        largest = (2**31 - 1) // blocks if bits == 32 else 2 ** (bits - 1) - 1
        inexact = max(0, largest.bit_length() - 24)  # low bits beyond the 24 of a float32's significand
        self.limit = largest >> inexact << inexact
        self._finest = EXPONENTS[0] if span == "auto" else self._fit(span / blocks)
        self.exponent = self._finest

    @property
    def unit(self) -> float:
        """The value of the whole number 1."""
        return math.ldexp(1.0, self.exponent)

    @property
    def reach(self) -> float:
        """The largest contribution that the unit covers."""
        return math.ldexp(self.limit, self.exponent)

    def fits(self, magnitude: float) -> bool:
        """Return whether the unit fits a step with this largest contribution: the contribution is within reach, and not
        far below it. The unit of the stated span is never too coarse.
        """
        if self.exponent <= self._finest or not magnitude:
            return magnitude <= self.reach
        return magnitude <= self.reach <= magnitude * self._headroom * _COARSE

    def refit(self, magnitude: float) -> None:
        """Change the unit for a step that it does not fit. If it is too fine: the finest whose reach suffices. If it is
        too coarse: a finer one, with headroom, but no finer than the unit of the stated span.
        """
        self.exponent = self._fit(magnitude) if magnitude > self.reach else self._with_headroom(magnitude)

    def follow(self, magnitude: float) -> None:
        """Set the unit for the step after one with this largest contribution. With a stated span, it only becomes finer
        here.
        """
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
