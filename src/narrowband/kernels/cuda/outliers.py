"""Outliers that dwarf all other elements, on CUDA: the loop that finds extremes, and PyTorch operators."""

from __future__ import annotations

from typing import TYPE_CHECKING

from narrowband.kernels.cuda.rows import row_extremes
from narrowband.kernels.reference.outliers import dwarfed_by_extremes

if TYPE_CHECKING:
    from torch import Tensor

    from narrowband.kernels.rows import Rows

__all__ = ["dwarfed_rows"]


def dwarfed_rows(x: Tensor, rows: Rows, widths: Tensor) -> Tensor:
    return dwarfed_by_extremes(row_extremes, x, rows, widths)
