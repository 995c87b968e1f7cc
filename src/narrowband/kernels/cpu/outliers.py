"""Outliers that dwarf all other elements, on CPU: one pass finds the magnitudes of rows and columns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from narrowband.kernels.cpu.elements import bits_of
from narrowband.kernels.cpu.extremes import PER_THREAD, lines_of
from narrowband.kernels.cpu.loops import F32, I32, MAGNITUDE, NON_FINITE, At, inlined, loop
from narrowband.kernels.cpu.threads import spread
from narrowband.kernels.outliers import FEW, REACH, has_columns, pieces_of

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

    from narrowband.kernels.rows import Rows

    Array = npt.NDArray[Any]

_BY_ROW, _BY_COLUMN = (F32(1 / reach) for reach in REACH)  # reaches are powers of two: multiplying is exact division
_FEW = int(FEW)


@loop
def _magnitudes(x, pitch, inner, groups, joined, pieces, per_part, by_row, by_column, first, last):
    """Find bits of the magnitudes of units [first, last), ``joined`` lines each; also of columns if there is room."""
    length, watched = inner // pieces, by_column.size > 0
    for unit in range(first, last):
        part = unit // per_part
        for line in range(unit * joined, (unit + 1) * joined):
            if inner == 1:  # the rows of a line are neighbouring elements
                for group in range(groups):
                    at = At(unit * groups + group)
                    by_row[at] = max(by_row[at], I32(bits_of(x, line * pitch + group) & MAGNITUDE))
                continue
            for group in range(groups):
                begin = line * pitch + group * inner
                column = (part * groups + group) * inner
                at = (unit * groups + group) * pieces
                for piece in range(pieces):
                    top = by_row[At(at + piece)]
                    if watched:
                        for j in range(piece * length, (piece + 1) * length):
                            bits = I32(bits_of(x, begin + j) & MAGNITUDE)
                            top = max(top, bits)
                            by_column[At(column + j)] = max(by_column[At(column + j)], bits)
                    else:
                        for j in range(piece * length, (piece + 1) * length):
                            top = max(top, I32(bits_of(x, begin + j) & MAGNITUDE))
                    by_row[At(at + piece)] = top


@inlined
def _is_few(count, present):
    return count <= min((present + _FEW - 1) // _FEW, present - 1)


@loop
def _judge(by_row, by_column, widths, parts, per_part, groups, pieces, inner, found):
    """Find which of the widths dwarf rows or columns. Magnitudes are bits; non-finite ones do not count."""
    rows, columns = by_row.view(np.float32), by_column.view(np.float32)
    for w in range(found.size):
        for part in range(parts):
            for group in range(groups):
                width = widths[w, part * groups + group]
                least, count, present = F32(width * _BY_ROW), 0, 0
                for unit in range(part * per_part, (part + 1) * per_part):
                    for piece in range(pieces):
                        at = At((unit * groups + group) * pieces + piece)
                        if by_row[at] < NON_FINITE:
                            count += rows[at] >= least
                            present += by_row[at] > 0
                found[At(w)] |= _is_few(count, present)
                if by_column.size > 0:
                    least, count, present = F32(width * _BY_COLUMN), 0, 0
                    for j in range((part * groups + group) * inner, (part * groups + group + 1) * inner):
                        if by_column[At(j)] < NON_FINITE:
                            count += columns[At(j)] >= least
                            present += by_column[At(j)] > 0
                    found[At(w)] |= _is_few(count, present)


def dwarfed_rows(x: Tensor, rows: Rows, widths: Tensor) -> Tensor:
    lines, pitch = lines_of(x, rows)
    joined, pieces = pieces_of(rows)
    per_part, inner, groups = rows.outer // joined, rows.inner, rows.groups
    units = rows.parts * per_part
    by_row = np.zeros(units * groups * pieces, np.int32)
    columns = rows.parts * groups * inner if has_columns(rows) else 0

    def work(first: int, last: int) -> Array:
        by_column = np.zeros(columns, np.int32)
        _magnitudes(lines, pitch, inner, groups, joined, pieces, per_part, by_row, by_column, first, last)
        return by_column

    by_column, *others = spread(units, rows.numel, work, least=PER_THREAD)
    for other in others:
        np.maximum(by_column, other, out=by_column)
    found = np.zeros(widths.shape[0], np.bool_)
    wide = widths.contiguous().numpy()
    _judge(by_row, by_column, wide, rows.parts, per_part, groups, pieces, inner, found)
    return torch.from_numpy(found)
