"""Rows of codes with shared ranges: saved activations in few bits.

**Rows of saved activations.** A tensor is seen, in memory order, as (parts, outer, groups, inner): rows of ``inner``
elements, where the ``outer`` rows of one part and one group share a range (see :class:`Rows`). The caller chooses the
ranges and keeps them: ``low`` and ``step``, float32 tensors of parts · groups elements, which elements may exceed. With
``bits`` of 2, 4 or 8, ``inv`` as above, and ``u`` ½ or (hash(i, seed) >> 16) · 2**-16 (``i`` counts the elements of the
tensor), all in float32 without fused multiply-add::

    code    = clamp(floor((x − low)·inv + u), 0, 2**bits − 1)           (0 where the sum is NaN)
    decoded = low + code·step

Sixteen bits make the sum of ``u`` and a whole number exact: what lies on a level stays there, whatever the seed.

What is quantized, and looked at for extremes, may also have gaps: a matrix of (parts · outer, groups · inner) whose
rows are contiguous, and any distance apart. Elements are counted without what is between them.

**Estimates** of such ranges are (2, groups): α = high − low and β = low. Taking the extremes of a batch in is, in
float32 without fused multiply-add, with μ and 1 − μ rounded to it::

    α ← μ·α + (1 − μ)·(high − low)          β ← μ·β + (1 − μ)·low

An end, β or β + α, then has moved by a share of the range's new width: |Δβ| / α or |Δβ + Δα| / α, the larger one; 0
where nothing has moved.

Each row is packed like a group, into ``stride = ceil(inner·bits / 8)`` bytes of its own: element j sits in byte
``j % stride`` at bit ``(j // stride)·bits``, and unused bits are zero. There is no header and no padding between rows.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, NamedTuple, cast

from narrowband.kernels.backends import backend_of

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "Affine",
    "Rows",
    "Standard",
    "dequantize_rows",
    "largest_divisor",
    "learn_ranges",
    "quantize_rows",
    "quantize_rows_adapting",
    "quantize_rows_extremes",
    "quantize_rows_learning",
    "row_extremes",
]


class Rows(NamedTuple):
    """How a contiguous tensor is cut into rows, and which rows share a range: its elements, in memory order, are those
    of a tensor of shape (parts, outer, groups, inner), and row (p, o, g) has the range of (p, g).

    Attributes:
        parts: Slices of the tensor that share nothing.
        outer: Rows of a part that share a range.
        groups: Ranges of a part; neighbouring rows belong to different ones.
        inner: Elements of a row.

    Example:
        Three heads of 64 features each, a range per head, for any number of tokens:

        >>> rows = Rows(parts=1, outer=197, groups=3, inner=64)
        >>> rows.numel, rows.nbytes(4)
        (37824, 18912)
    """

    parts: int
    outer: int
    groups: int
    inner: int

    @property
    def total(self) -> int:
        """Number of rows."""
        return self.parts * self.outer * self.groups

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.total * self.inner

    def nbytes(self, bits: int) -> int:
        """Bytes of the codes: each row ends with a whole byte."""
        return self.total * -(-self.inner * bits // 8)


@functools.lru_cache(maxsize=1 << 12)
def largest_divisor(size: int, at_most: int) -> int:
    """The largest divisor of a size that is no larger than a bound; at least 1.

    Example:
        >>> largest_divisor(768, 100)
        96
    """
    return next((divisor for divisor in range(min(size, at_most), 1, -1) if size % divisor == 0), 1)


def row_extremes(x: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
    """Smallest and largest element of the rows that share a range: two float32 tensors of parts · groups; NaN where one
    is not finite or there is none.
    """
    return cast("tuple[Tensor, Tensor]", backend_of(x).row_extremes(x, rows))


def quantize_rows(
    x: Tensor, out: Tensor, rows: Rows, low: Tensor, step: Tensor, *, bits: int, stochastic: bool, seed: int = 0
) -> None:
    """Codes of ``x`` (float32 or bfloat16) written into ``out`` (uint8, exactly :meth:`Rows.nbytes` long).

    ``low`` and ``step`` (float32, parts · groups) are the ranges: codes stand for low, low + step, and so on up to
    low + (2**bits − 1)·step, and what is outside is clamped. ``bits`` is 2, 4 or 8.
    """
    backend_of(x).quantize_rows(x, out, rows, low, step, bits=bits, stochastic=stochastic, seed=seed)


def quantize_rows_extremes(
    x: Tensor, out: Tensor, rows: Rows, low: Tensor, step: Tensor, *, bits: int, stochastic: bool, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """:func:`quantize_rows` and :func:`row_extremes` in one pass over ``x``: the codes of the one, returning the other.

    Where extremes are NaN, codes of elements that are not finite mean nothing.
    """
    result = backend_of(x).quantize_rows_extremes(x, out, rows, low, step, bits=bits, stochastic=stochastic, seed=seed)
    return cast("tuple[Tensor, Tensor]", result)


def learn_ranges(estimates: Tensor, low: Tensor, high: Tensor, decay: float) -> tuple[Tensor, bool, float]:
    """Take the extremes of a batch (float32, groups) into estimates of their ranges (float32, (2, groups)).

    Returns:
        The new estimates; whether all extremes are finite, and have a range in float32 on both sides of zero; and the
        largest share of its width by which an end has moved, which says nothing where they are not.
    """
    return cast("tuple[Tensor, bool, float]", backend_of(estimates).learn_ranges(estimates, low, high, decay))


def quantize_rows_learning(
    x: Tensor,
    out: Tensor,
    rows: Rows,
    estimates: Tensor,
    decay: float,
    *,
    bits: int,
    stochastic: bool,
    seed: int = 0,
    apart: int | None = None,
    drift: float = math.inf,
) -> tuple[Tensor, bool, float]:
    """:func:`quantize_rows_extremes` with the ranges that estimates say, low = β and step = α / (2**bits − 1), and
    :func:`learn_ranges` with what it sees.

    Args:
        estimates: are replaced, in place, by what they learn: all of them, or none.
        drift: none are where an end of one would move by more than this; nor where something is not finite.
        apart: how many elements neighbouring lines, of a row of every group, are apart in memory: ``x`` may then have
            any shape and strides.

    Returns:
        (4, parts · groups): low and step, as :func:`dequantize_rows` takes them, and behind these the extremes,
        smallest and largest; and what :func:`learn_ranges` says of them.
    """
    result = backend_of(x).quantize_rows_learning(
        x, out, rows, estimates, decay, bits=bits, stochastic=stochastic, seed=seed, apart=apart, drift=drift
    )
    return cast("tuple[Tensor, bool, float]", result)


def quantize_rows_adapting(
    x: Tensor,
    out: Tensor,
    rows: Rows,
    estimates: Tensor,
    decay: float,
    note: Tensor,
    *,
    drift: float,
    jump: float,
    bits: int,
    stochastic: bool,
    seed: int = 0,
    apart: int | None = None,
    standard: Standard | None = None,
) -> tuple[Tensor, Tensor]:
    """:func:`quantize_rows_learning` of a tensor of one part, with codes made anew where they have to be, and nothing
    that the host would have to wait for.

    Each group is judged by itself. Where an end has moved by more than ``drift``, its codes are made again with the new
    estimate; or, where the batch is more than ``jump`` times as wide as the estimate was, with the batch's own range.
    Where an element is not finite, or the range is not, nothing is learned, and the range is NaN, so that all of the
    group decodes to NaN.

    Args:
        note: one float32: becomes the largest of what it is and of the widths of the batch over those of the estimates.
            Infinite where something is not finite, or an estimate has no width and the batch has one.
        apart: how many elements neighbouring lines, of a row of every group, are apart in memory: ``x`` may then have
            any shape and strides.
        standard: makes of the elements what is quantized, which then has no gaps.

    Returns:
        Low and step of the codes, as :func:`dequantize_rows` takes them, and the new estimates.
    """
    result = backend_of(x).quantize_rows_adapting(
        x, out, rows, estimates, decay, note, drift=drift, jump=jump, bits=bits, stochastic=stochastic, seed=seed,
        apart=apart, standard=standard,
    )  # fmt: skip
    return cast("tuple[Tensor, Tensor]", result)


class Standard(NamedTuple):
    """What becomes of rows of a tensor before they are quantized: (value − mean) · deviation, each rounded to float32.

    Attributes:
        mean: of every row, float32, contiguous.
        deviation: one over it, of every row, float32, contiguous.
        length: elements of a row of the tensor.
    """

    mean: Tensor
    deviation: Tensor
    length: int


class Affine(NamedTuple):
    """What becomes of values when they are decoded: value · factor + term, each rounded to float32.

    Attributes:
        factor: float32, contiguous; None: 1.
        term: float32, contiguous; None: 0.
        length: elements of a row of the tensor. Its numbers have one in each row, or in each column.
        by_row: whether there is one for every row.
    """

    factor: Tensor | None
    term: Tensor | None
    length: int
    by_row: bool = False


def dequantize_rows(
    codes: Tensor, out: Tensor, rows: Rows, ranges: Tensor, *, bits: int, affine: Affine | None = None
) -> None:
    """``out = low + code·step`` (float32 or bfloat16), from what :func:`quantize_rows` wrote.

    Args:
        ranges: float32, contiguous: the low of every range, then the step of every range. What is behind is not read.
        affine: is applied to these, before they are rounded to the dtype of ``out``.
    """
    backend_of(codes).dequantize_rows(codes, out, rows, ranges, bits=bits, affine=affine)
