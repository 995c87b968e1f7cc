"""Outliers that dwarf all other elements, in plain torch. K ranges, M magnitudes of a range."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from narrowband.kernels.outliers import FEW, REACH, has_columns, pieces_of
from narrowband.kernels.reference.rows import row_extremes
from narrowband.kernels.rows import Rows

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

__all__ = ["dwarfed_rows"]


def dwarfed_rows(x: Tensor, rows: Rows, widths: Tensor) -> Tensor:
    return dwarfed_by_extremes(row_extremes, x, rows, widths)


def dwarfed_by_extremes(
    extremes: Callable[[Tensor, Rows], tuple[Tensor, Tensor]], x: Tensor, rows: Rows, widths: Tensor
) -> Tensor:
    """Implement :func:`dwarfed_rows` with ``extremes``, a backend's loop for :func:`row_extremes`."""
    parts, outer, groups, inner = rows.parts, rows.outer, rows.groups, rows.inner
    joined, pieces = pieces_of(rows)

    def magnitudes(cut: Rows) -> Tensor:
        low, high = extremes(x, cut)
        return torch.maximum(high, -low)

    cut = Rows(parts * outer // joined, joined, groups * pieces, inner // pieces)
    by_row = magnitudes(cut).view(parts, -1, groups, pieces).transpose(1, 2).reshape(parts * groups, -1)
    found = _dwarfed(by_row, widths / REACH[0])
    if has_columns(rows):
        by_column = magnitudes(Rows(parts, outer, groups * inner, 1)).view(parts * groups, inner)
        found |= _dwarfed(by_column, widths / REACH[1])
    return found


def _dwarfed(magnitude_KM: Tensor, least_WK: Tensor) -> Tensor:
    """Whether, in any range, only a few magnitudes are at least as large as ``least_WK``."""
    n_K = (magnitude_KM > 0).sum(-1)
    few_K = torch.minimum(torch.div(n_K + (FEW - 1), FEW, rounding_mode="floor"), n_K - 1)
    return ((magnitude_KM >= least_WK.unsqueeze(-1)).sum(-1) <= few_K).any(-1)
