"""Rows of codes with shared ranges: saved activations in few bits.

**Rows of saved activations.** A tensor is taken, in memory order, as (parts, outer, groups, inner): rows of ``inner``
elements, where the ``outer`` rows of one part and one group share a range (see :class:`Rows`). The caller chooses and
keeps the ranges: ``low`` and ``step``, float32 tensors of parts · groups elements. Elements may lie outside their
range. ``bits`` is 2, 4 or 8; ``inv`` is as in :mod:`narrowband.kernels.quantized`; ``u`` is ½ (nearest) or
(hash(i, seed) >> 16) · 2**-16 (stochastic; ``i`` counts the elements of the tensor). All arithmetic is float32 without
fused multiply-add::

    code    = clamp(floor((x − low)·inv + u), 0, 2**bits − 1)           (0 where the sum is NaN)
    decoded = low + code·step

**Ranges of codes** are made of estimates, α = high − low and β = low, by :func:`code_ranges`: low = β and step = α /
(2**bits − 1), equation 3 of Pan et al. 2021, Mesa (arXiv 2111.11124). With 8 and 4 bits, a range that contains zero is
then widened until one of its levels is zero. Otherwise elements that are exactly zero would come back slightly off.
That would be harmless but for rows of zeros in front of a norm, such as left padding: their gradients explode, and
the zeros that these are multiplied by have to stay zeros. With L = 2**bits − 1 and k = floor(−low / α · L), either
level k or level k + 1 becomes zero, whichever has the smaller step::

    step of k = −low / k            step of k + 1 = high / (L − 1 − k)

So a step grows by at most 1 / 254 in 8 bits and 1 / 14 in 4, and no element is clipped. In 2 bits it would grow by up
to a half, so there ranges stay as they are.

A code z stands for exactly zero where low = −z·step, the product is exact, and (z·step)·inv is z in float32. So steps
are rounded up to 16 significant bits. About one in eight still misses its code by one bit, since ``inv`` is rounded;
5 is added to its sixteenth bit, up to six times. This succeeds for every step and every code, which a test
shows by trying all of them, and widens a range by at most 0.1 %.

Because ``u`` has sixteen bits, its sum with a whole number is exact: a value on a level stays there, whatever the seed.

The input of quantization, and of the search for extremes, may have gaps: a matrix of (parts · outer, groups · inner)
whose rows are contiguous and any distance apart. The gaps do not count as elements.

**Estimates** of ranges are (2, groups): α, then β. They learn from the extremes of a batch, in float32 without fused
multiply-add, with μ and 1 − μ rounded to float32::

    α ← μ·α + (1 − μ)·(high − low)          β ← μ·β + (1 − μ)·low

The ends of the range, β and β + α, have then moved by a share of the range's new width: |Δβ| / α and |Δβ + Δα| / α.
The larger of the two counts; it is 0 if nothing has moved.

Each row is packed like a quantization group, into ``stride = ceil(inner·bits / 8)`` bytes of its own: element j sits in
byte ``j % stride`` at bit ``(j // stride)·bits``, and unused bits are zero. There is no header and no padding between
rows.
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
    "code_ranges",
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
    """How a contiguous tensor is cut into rows, and which rows share a range.

    The tensor's elements, in memory order, are those of a tensor of shape (parts, outer, groups, inner). Row (p, o, g)
    has the range of (p, g).

    Attributes:
        parts: Slices of the tensor that share no range.
        outer: Rows of a part that share a range.
        groups: Ranges of a part; neighbouring rows belong to different ranges.
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
        return self.parts * self.outer * self.groups * self.inner

    def nbytes(self, bits: int) -> int:
        """Return the bytes of the codes; each row takes whole bytes."""
        return self.parts * self.outer * self.groups * -(-self.inner * bits // 8)


@functools.lru_cache(maxsize=1 << 12)
def largest_divisor(size: int, at_most: int) -> int:
    """Return the largest divisor of ``size`` that is no larger than ``at_most``; at least 1.

    Example:
        >>> largest_divisor(768, 100)
        96
    """
    return next((divisor for divisor in range(min(size, at_most), 1, -1) if size % divisor == 0), 1)


def row_extremes(x: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
    """Return the smallest and the largest element of the rows of each range: two float32 tensors of parts · groups.
    Both are NaN if an element is not finite, or if there is none.
    """
    return cast("tuple[Tensor, Tensor]", backend_of(x).row_extremes(x, rows))


def quantize_rows(
    x: Tensor, out: Tensor, rows: Rows, low: Tensor, step: Tensor, *, bits: int, stochastic: bool, seed: int = 0
) -> None:
    """Write the codes of ``x`` (float32 or bfloat16) into ``out`` (uint8, exactly :meth:`Rows.nbytes` long).

    ``low`` and ``step`` (float32, parts · groups) are the ranges. Codes stand for low, low + step, and so on up to low
    + (2**bits − 1)·step; elements outside are clamped. ``bits`` is 2, 4 or 8.
    """
    backend_of(x).quantize_rows(x, out, rows, low, step, bits=bits, stochastic=stochastic, seed=seed)


def quantize_rows_extremes(
    x: Tensor, out: Tensor, rows: Rows, low: Tensor, step: Tensor, *, bits: int, stochastic: bool, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Run :func:`quantize_rows` and return :func:`row_extremes`, in one pass over ``x``.

    Where extremes are NaN, the codes of elements that are not finite are meaningless.
    """
    result = backend_of(x).quantize_rows_extremes(x, out, rows, low, step, bits=bits, stochastic=stochastic, seed=seed)
    return cast("tuple[Tensor, Tensor]", result)


def learn_ranges(estimates: Tensor, low: Tensor, high: Tensor, decay: float) -> tuple[Tensor, bool, float]:
    """Update estimates of ranges (float32, (2, groups)) with the extremes of a batch (float32, groups).

    Returns:
        The new estimates; whether all extremes are finite, and so are symmetric ranges that contain them, 2 · max(high,
        −low); and the largest share of its width by which an end has moved, meaningless if they are not finite.
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
    symmetric: bool = False,
) -> tuple[Tensor, bool, float]:
    """Run :func:`quantize_rows_extremes` with :func:`code_ranges` of the estimates, and :func:`learn_ranges` with its
    extremes.

    Args:
        estimates: replaced, in place, by the new estimates: all of them, or none.
        drift: nothing is replaced if an end of any range would move by more than this, or if something is not finite.
        apart: the distance in memory, in elements, of neighbouring lines (one row of every group); ``x`` may then have
            any shape and strides.
        symmetric: as :func:`code_ranges` takes it.

    Returns:
        (4, parts · groups): low and step, as :func:`dequantize_rows` takes them, then the smallest and the largest
        element; and the last two results of :func:`learn_ranges`.
    """
    result: tuple[Tensor, bool, float] = backend_of(x).quantize_rows_learning(
        x, out, rows, estimates, decay, bits=bits, stochastic=stochastic, seed=seed, apart=apart, drift=drift,
        symmetric=symmetric,
    )  # fmt: skip
    return result


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
    symmetric: bool = False,
) -> tuple[Tensor, Tensor]:
    """Run :func:`quantize_rows_learning` on a tensor of one part, and quantize again what has to be, without any result
    that the host would have to wait for.

    Each group is judged by itself. If an end of its range has moved by more than ``drift``, its codes are made again:
    with the new estimate, or, if the batch is more than ``jump`` times as wide as the estimate was, with the batch's
    own range. If an element or the range is not finite, the group learns nothing, and its range is NaN, so that all of
    the group decodes to NaN.

    Args:
        note: one float32: becomes the maximum of its value and of the ratios of the batch's width to the estimate's
            width. Infinite if something is not finite, or if an estimate has no width and the batch has one.
        apart: the distance in memory, in elements, of neighbouring lines (one row of every group); ``x`` may then have
            any shape and strides.
        standard: standardizes the elements before they are quantized; the quantized tensor then has no gaps.
        symmetric: as :func:`code_ranges` takes it. Estimates do not depend on that.

    Returns:
        Low and step of the codes, as :func:`dequantize_rows` takes them, and the new estimates.
    """
    result: tuple[Tensor, Tensor] = backend_of(x).quantize_rows_adapting(
        x, out, rows, estimates, decay, note, drift=drift, jump=jump, bits=bits, stochastic=stochastic, seed=seed,
        apart=apart, standard=standard, symmetric=symmetric,
    )  # fmt: skip
    return result


def code_ranges(estimates: Tensor, *, bits: int, symmetric: bool, zeroed: bool) -> Tensor:
    """Return low and step of codes for estimates of ranges: (2, groups) float32, as :func:`dequantize_rows` takes them.

    Args:
        estimates: (2, groups) float32, contiguous: α and β.
        bits: 2, 4 or 8.
        symmetric: make ranges as wide below zero as above. The code 2**(bits − 1) − 1 stands for zero, and the last
            code is not used.
        zeroed: widen each range that contains zero until one of its levels is zero, unless it is symmetric.

    Example:
        >>> code_ranges(torch.tensor([[15.0], [-0.5]]), bits=4, symmetric=False, zeroed=True)
        tensor([[-1.0357],
                [ 1.0357]])
    """
    result: Tensor = backend_of(estimates).code_ranges(estimates, bits=bits, symmetric=symmetric, zeroed=zeroed)
    return result


#: With fewer bits, running estimates have no level for zero.
FEWEST_ZEROED = 4
#: The most attempts to find a step with which a code is exactly zero; what is added to the bits of a step that fails.
TRIES, RAISE = 7, 5 << 8


class Standard(NamedTuple):
    """Standardization of rows before they are quantized: (value − mean) · deviation, each rounded to float32.

    Attributes:
        mean: of every row, float32, contiguous.
        deviation: one over the deviation of every row, float32, contiguous.
        length: elements of a row of the tensor.
    """

    mean: Tensor
    deviation: Tensor
    length: int


class Affine(NamedTuple):
    """An affine map that is applied to decoded values: value · factor + term, each rounded to float32.

    The tensor has whole rows. Behind it there may be padding, which is of no use and may have any value.

    Attributes:
        factor: float32, contiguous; None: 1.
        term: float32, contiguous; None: 0.
        length: elements of a row of the tensor. ``factor`` and ``term`` have one number per row or per column.
        by_row: whether they have one per row.
    """

    factor: Tensor | None
    term: Tensor | None
    length: int
    by_row: bool = False


def dequantize_rows(
    codes: Tensor, out: Tensor, rows: Rows, ranges: Tensor, *, bits: int, affine: Affine | None = None
) -> None:
    """``out = low + code·step`` (float32 or bfloat16), from the codes that :func:`quantize_rows` wrote.

    Args:
        ranges: float32, contiguous: the low of every range, then the step of every range. Anything behind is ignored.
        affine: is applied to the decoded values before they are rounded to the dtype of ``out``.
    """
    backend_of(codes).dequantize_rows(codes, out, rows, ranges, bits=bits, affine=affine)
