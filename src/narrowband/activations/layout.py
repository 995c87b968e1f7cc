"""How a tensor lies in memory, and where its groups are.

A tensor is read in the order of its memory, whatever the order of its dimensions. So quantizing needs no copy, and a
transposed view of a tensor that is packed already is recognized. One dimension is cut into groups, so that the tensor
becomes (parts, outer, groups, inner). Each group of each part has its own range. With running estimates there is one
part, whose ranges all samples share; with statistics per sample, each sample is a part.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from narrowband.kernels import Rows
from narrowband.kernels.rows import largest_divisor

__all__ = ["Arrangement", "Cut", "Grouping", "neighbours"]


@dataclass(frozen=True)
class Grouping:
    """Where the groups of a tensor are.

    Attributes:
        dim: the dimension that is cut into groups.
        groups: the number of groups.
        major: the dimension is seen as (major, groups, rest): 1 where neighbours form a group, as channels do; B where
            the dimension is B samples × heads.
    """

    dim: int
    groups: int
    major: int = 1


@dataclass(frozen=True)
class Arrangement:
    """The order in which a tensor's dimensions lie in memory, slowest first.

    Attributes:
        order: the dimensions, in memory order.
        sizes: the sizes of the dimensions, in that order.
        without_gaps: whether the tensor's memory has no gaps and no overlap.
    """

    order: tuple[int, ...]
    sizes: tuple[int, ...]
    without_gaps: bool

    @classmethod
    def of(cls, x: Tensor) -> Arrangement:
        """Return the arrangement of a strided tensor."""
        return _arranged(x.shape, x.stride())

    @functools.cached_property
    def is_usual(self) -> bool:
        """Whether the dimensions lie in memory in their own order."""
        return self.order == tuple(range(len(self.order)))

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's shape: the sizes in the order of its dimensions."""
        return tuple(size for _, size in sorted(zip(self.order, self.sizes, strict=True)))

    def matches(self, other: Arrangement) -> bool:
        """Whether elements at the same place in both tensors come at the same time in memory order, apart from gaps."""
        return self is other or (self.order, self.sizes) == (other.order, other.sizes)

    @functools.cached_property
    def neighbours(self) -> int:
        """How many neighbouring elements should share a range, from 32 to 256: a row, or the largest even part of it.

        64 where rows are shorter, or have no such part.

        Example:
            >>> [Arrangement.of(torch.empty(2, 3, size)).neighbours for size in (192, 768, 4096, 7, 509)]
            [192, 256, 256, 64, 64]
        """
        share = largest_divisor(self.sizes[-1], 256) if self.sizes else 1
        return share if share >= 32 else 64

    def flat(self, x: Tensor) -> Tensor:
        """Return the elements in memory order, contiguous; a view where there are no gaps."""
        if self.is_usual and x.is_contiguous():
            return x.view(-1)
        return x.permute(self.order).reshape(-1).contiguous()  # for one row with gaps, reshape returns a view with gaps

    def lines(self, x: Tensor, rows: Rows) -> Tensor:
        """Return the elements in memory order as kernels read them.

        Flat, or with gaps between lines as (parts · outer, groups · inner). A view, unless there are gaps elsewhere.
        """
        if not self.without_gaps:
            with contextlib.suppress(RuntimeError):  # the tensor cannot be viewed as a matrix
                lines = x.permute(self.order).view(rows.parts * rows.outer, rows.groups * rows.inner)
                if lines.stride(1) == 1:
                    return lines
        return self.flat(x)

    def unflat(self, flat: Tensor) -> Tensor:
        """The inverse of :meth:`flat`."""
        return self.ordered(flat.view(self.sizes))

    def ordered(self, x: Tensor) -> Tensor:
        """Return the tensor in the order of its dimensions, from one in memory order."""
        return x if self.is_usual else x.permute(self._back)

    @functools.cached_property
    def _back(self) -> tuple[int, ...]:
        """The position of each dimension in memory order."""
        return tuple(self.order.index(dim) for dim in range(len(self.order)))

    def rows(self, grouping: Grouping, *, samples: int = 1) -> Rows:
        """Return how the flat tensor is cut.

        Args:
            grouping: where its groups are.
            samples: the number of samples in the first dimension. Each becomes a part, if that dimension is outermost
                in memory; otherwise there is one part.
        """
        place = self.order.index(grouping.dim)
        before = math.prod(self.sizes[:place]) * grouping.major
        groups = grouping.groups
        inner = math.prod(self.sizes) // max(1, before * groups)
        parts = samples if self.order[0] == 0 and before % samples == 0 else 1
        return Rows(parts, before // parts, groups, inner)


class Cut(NamedTuple):
    """How tensors of one shape and layout are cut and read, found once and cached.

    Attributes:
        rows: how the elements in memory order are cut.
        apart: the distance of neighbouring lines of rows, in elements, where kernels can read the tensor itself; None:
            its elements must be copied into memory order first.
    """

    rows: Rows
    apart: int | None

    @classmethod
    def of(cls, x: Tensor, arrangement: Arrangement, rows: Rows) -> Cut:
        """Return the cut of a tensor of this arrangement."""
        lines = arrangement.lines(x.detach(), rows)
        if lines.data_ptr() != x.data_ptr():
            return cls(rows, None)
        return cls(rows, rows.groups * rows.inner if lines.dim() == 1 else lines.stride(0))


@functools.lru_cache(maxsize=1 << 12)
def _arranged(shape: Sequence[int], strides: Sequence[int]) -> Arrangement:
    usual = tuple(range(len(shape)))
    if _is_dense(shape, strides):
        return Arrangement(usual, tuple(shape), without_gaps=True)
    order = tuple(sorted(usual, key=lambda dim: (-strides[dim], dim)))
    sizes = tuple(shape[dim] for dim in order)
    return Arrangement(order, sizes, without_gaps=_is_dense(sizes, [strides[dim] for dim in order]))


def _is_dense(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether a tensor of these sizes and strides is contiguous by PyTorch's rule: strides of size 1 do not count."""
    if 0 in sizes:
        return True
    expected = 1
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def neighbours(flat: Tensor, count: int) -> tuple[Tensor, Rows]:
    """Pad flat elements with the last one to a multiple of ``count``, and cut them into parts of ``count`` elements.

    Example:
        >>> filled, rows = neighbours(torch.arange(20.0), 8)
        >>> filled.numel(), rows.parts, filled[-5:].tolist()
        (24, 3, [19.0, 19.0, 19.0, 19.0, 19.0])
    """
    missing = -flat.numel() % count
    filled = torch.cat((flat, flat[-1:].expand(missing))) if missing else flat
    return filled, Rows(filled.numel() // count, 1, 1, count)
