"""Masks of one bit per element, and the places of maxima: what ReLU, dropout and max pooling keep for backward.

**Masks** of n elements have one bit per element, in ``stride = ceil(n / 8)`` bytes: element i sits in byte
``i % stride`` at bit ``i // stride``; unused bits are zero.

**Places of maxima.** PyTorch's max pooling returns for each result which element of its plane it was: the ``position``
row · W + column, int64. The result's window begins at row r₀ and column c₀, which padding may make negative. What is
kept is the ``place`` of the maximum in this window, one byte (see :class:`Windows`)::

    place    = (row − r₀) · kernel + (column − c₀)
    position = (r₀ + place // kernel) · W + c₀ + place % kernel
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from narrowband.kernels.backends import backend_of

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "Windows",
    "apply_mask",
    "mask_between",
    "pool_places",
    "pool_positions",
]


def mask_between(x: Tensor, out: Tensor, low: float = 0.0, high: float = math.nan) -> None:
    """Write the mask of the elements of ``x`` (float32 or bfloat16) that are above ``low`` and below ``high``, or NaN.

    This is what the backward pass of ReLU needs, also of a ReLU that is cut off above. ``out`` is uint8, exactly
    ceil(numel / 8) long. Bounds are compared in float32; a bound of NaN is none.
    """
    backend_of(x).mask_between(x, out, low, high)


def apply_mask(mask: Tensor, x: Tensor, out: Tensor, factor: float = 1.0) -> None:
    """``out = factor · x`` where the mask's bit is set, and +0 elsewhere, even where ``x`` is inf or NaN.

    ``x`` and ``out`` (float32 or bfloat16, each) may be the same tensor; the product is taken in float32.
    """
    backend_of(mask).apply_mask(mask, x, out, factor)


@dataclass(frozen=True)
class Windows:
    """Where the windows of max pooling begin in their planes.

    The results are, in memory order, those of a tensor of shape (outer, rows, columns, inner). The window of (…, r, c,
    …) begins at row r · stride[0] − padding[0] and column c · stride[1] − padding[1] of the input's plane.

    Attributes:
        outer: Planes, or samples where channels are the last in memory.
        rows: Rows of results.
        columns: Results of a row.
        inner: One, or channels where these are the last in memory.
        width: Columns of the input's plane, W.
        kernel: Columns of a window; together with its rows, a window has at most 256 elements.
        stride: Of windows, (rows, columns).
        padding: Before the first row and column.

    Example:
        The pooling of a ResNet, of 56 × 56 results from planes of 112 × 112:

        >>> windows = Windows(32 * 64, 56, 56, 1, width=112, kernel=3, stride=(2, 2), padding=(1, 1))
        >>> windows.numel
        6422528
    """

    outer: int
    rows: int
    columns: int
    inner: int
    width: int
    kernel: int
    stride: tuple[int, int]
    padding: tuple[int, int]

    @property
    def numel(self) -> int:
        """Number of results."""
        return self.outer * self.rows * self.columns * self.inner


def pool_places(position: Tensor, out: Tensor, windows: Windows) -> None:
    """Write the place of each maximum in its window into ``out`` (uint8), from its position in the plane (int64)."""
    backend_of(position).pool_places(position, out, windows)


def pool_positions(places: Tensor, out: Tensor, windows: Windows) -> None:
    """Invert :func:`pool_places`: write positions into ``out`` (int64)."""
    backend_of(places).pool_positions(places, out, windows)
