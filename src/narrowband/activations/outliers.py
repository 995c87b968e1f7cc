"""Tensors with outliers, which 8 bits cannot represent.

A range is as wide as its extremes are apart. One huge element makes the steps of codes so wide that all others have the
same code. Such a tensor is kept as it is; this rule is not the paper's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from narrowband import kernels
from narrowband.activations.layout import largest_divisor
from narrowband.kernels import Rows

__all__ = ["Magnitudes", "Outliers", "is_masked"]


@dataclass(frozen=True)
class Outliers:
    """Why a tensor is kept as it is.

    Attributes:
        extreme: whether tensors computed from it are to be kept as they are, too. A saturated tanh passes on a gradient
            of zero; from its codes it is not quite zero, and times an input of 1e20 that is a large error.
    """

    extreme: bool


class Magnitudes:
    """How large the rows and the columns of a tensor are, by which outliers are found.

    A range is *dwarfing* where no more than one row in 16 (:data:`FEW`) has an element as large as a 128th
    (:data:`REACH`) of its width: all elements of all other rows lie within two steps of 8 bits on either side of zero,
    and codes, of however many bits, say next to nothing of them. Rows are what :class:`~narrowband.kernels.Rows` cuts,
    in pieces of at most 512 neighbours. The same for columns, the elements that have one place in rows, and a 512th:
    tokens and channels of a linear layer's input. (Some channels are often 100 times as large as the others.) Rows and
    columns of zeros do not count.

    All these numbers are ratios. Tensors that are heavy-tailed as a whole do not fall under the rule, nor does softmax,
    where every row has a large element.

    Args:
        x: the tensor's elements in the order of memory; see :meth:`Arrangement.lines`.
        rows: how they are cut.

    Example:
        >>> x, rows = torch.randn(64, 32), Rows(parts=1, outer=64, groups=1, inner=32)
        >>> Magnitudes(x, rows).is_dwarfed_by(x.amax() - x.amin())
        False
        >>> x[5, 7] = 1e6
        >>> Magnitudes(x, rows).is_dwarfed_by(x.amax() - x.amin())
        True
    """

    #: Of rows, and of columns.
    REACH = 128, 512
    FEW = 16
    #: A range that is dwarfing by so many times more is extreme.
    EXTREME = 8
    #: Neighbours in a piece of a row, at most, and in rows of less that are put together.
    _LONG, _SHORT = 512, 16
    #: In longer rows a column is no channel any more: pixels, products of queries and keys.
    _CHANNELS = 1024

    def __init__(self, x: Tensor, rows: Rows) -> None:
        parts, outer, groups, inner = rows.parts, rows.outer, rows.groups, rows.inner
        joined = largest_divisor(outer, self._SHORT // max(inner, 1))
        count = parts * outer // joined
        pieces = inner // largest_divisor(inner, self._LONG)
        if pieces == inner:  # a prime number, or nearly
            pieces = 1
        form = Rows(count, joined, groups * pieces, inner // pieces)
        rows_PNGM = _largest(x, form).view(parts, -1, groups, pieces)
        largest_PGN = [rows_PNGM.transpose(1, 2).flatten(2)]  # of every range the largest magnitudes of its rows
        if outer >= self.FEW and 1 < inner <= self._CHANNELS:  # and of its columns
            largest_PGN.append(_largest(x, Rows(parts, outer, groups * inner, 1)).view(parts, groups, inner))
        #: These, of as many ranges as there are; and so many of them are a few, and not all.
        self._largest = [largest.flatten(0, 1) for largest in largest_PGN]
        self._few = [self._few_of((largest > 0).sum(-1)) for largest in self._largest]

    def _few_of(self, count: Tensor) -> Tensor:
        few = torch.div(count + (self.FEW - 1), self.FEW, rounding_mode="floor")
        return torch.minimum(few, count - 1)

    def dwarfed_by(self, width: Tensor) -> Tensor:
        """Whether one of the widths of all ranges dwarfs its rows, or columns: a bool, where the tensor is.

        Args:
            width: of the range of every group of every part, float32; or several such widths, (W, parts · groups).

        Returns:
            Of no dimension, or (W,).
        """
        found = [
            ((largest >= (width / reach).unsqueeze(-1)).sum(-1) <= few).any(-1)
            for largest, few, reach in zip(self._largest, self._few, self.REACH, strict=False)
        ]
        return found[0] if len(found) == 1 else found[0] | found[1]

    def is_dwarfed_by(self, width: Tensor) -> bool:
        """The same, for the host."""
        return bool(self.dwarfed_by(width))

    def outliers(self, width: Tensor) -> Outliers:
        """What is wrong with ranges of these widths, which dwarf rows or columns."""
        return Outliers(extreme=self.is_dwarfed_by(width / self.EXTREME))


def is_masked(x: Tensor) -> bool:
    """Whether what is large in a tensor is −inf, or the lowest number of a dtype, as masks have it for what is not to
    count, and nothing else is extreme.

    Args:
        x: of a floating dtype with up to 32 bits, and with elements.

    Example:
        >>> scores = torch.randn(64, 32)
        >>> scores[:, 20:] = -torch.inf
        >>> is_masked(scores), is_masked(-scores)
        (True, False)
    """
    x = x.detach()
    # float32's lowest is lower than bfloat16's, and autocast makes the one of the other, or −inf.
    masked = x <= torch.finfo(torch.float16 if x.dtype is torch.float16 else torch.bfloat16).min
    if not bool(masked.any()):
        return False
    rest = torch.where(masked, 0.0, x.float()).contiguous()
    width = (rest.amax() - rest.amin()).view(1)
    if not bool(torch.isfinite(2 * width)):  # nor NaN
        return False
    rows = Rows(1, x.numel() // x.shape[-1], 1, x.shape[-1])
    return not Magnitudes(rest.view(-1), rows).is_dwarfed_by(width / Magnitudes.EXTREME)


def _largest(x: Tensor, rows: Rows) -> Tensor:
    """The largest magnitude of each range."""
    low, high = kernels.row_extremes(x, rows)
    return torch.maximum(high, -low)
