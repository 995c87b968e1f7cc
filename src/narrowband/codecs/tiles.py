"""Tiles of a matrix; a codec selects elements in each tile by itself.

A tensor of more than two dimensions is taken as a matrix: its first dimension by all others. A vector is cut into
pieces of as many elements as a tile has. Tiles at the right and lower edges may be smaller.
"""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING, NamedTuple

import torch

from narrowband import kernels

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

__all__ = ["Region", "regions", "select_in_tiles", "tile_of"]


class Region(NamedTuple):
    """Tiles of one size that fill a rectangle of a matrix.

    Attributes:
        top: first row of the rectangle.
        left: first column of the rectangle.
        down: number of rows of tiles.
        across: number of columns of tiles.
        height: rows of a tile.
        width: columns of a tile.
    """

    top: int
    left: int
    down: int
    across: int
    height: int
    width: int

    @property
    def tiles(self) -> int:
        """Number of tiles."""
        return self.down * self.across

    @property
    def numel(self) -> int:
        """Elements of a tile."""
        return self.height * self.width


def tile_of(text: str) -> tuple[int, int]:
    """Return (rows, columns) of a tile given as ``"64x64"``.

    Raises:
        ValueError: ``text`` has another form.
    """
    found = re.fullmatch(r"([1-9]\d{0,8})x([1-9]\d{0,8})", text)
    if found is None:
        raise ValueError(f"tile={text!r} is not the size of a tile; write rows x columns, such as 64x64")
    return int(found[1]), int(found[2])


@functools.lru_cache(maxsize=1 << 12)
def regions(shape: tuple[int, ...], tile: tuple[int, int]) -> tuple[tuple[int, int], tuple[Region, ...]]:
    """Return the (rows, columns) of the matrix that a tensor of this shape is, and its regions: the whole tiles, and
    those at its edges.
    """
    height, width = tile
    if len(shape) < 2:
        height, width = 1, height * width
    rows = shape[0] if len(shape) > 1 else 1
    columns = torch.Size(shape).numel() // rows if rows else 0
    found = []
    for top, down, h in _along(rows, height):
        found += [Region(top, left, down, across, h, w) for left, across, w in _along(columns, width)]
    return (rows, columns), tuple(found)


def _along(side: int, size: int) -> list[tuple[int, int, int]]:
    """Return (begin, number, length) of the whole pieces of a side, and of the shorter piece that is left."""
    whole, rest = divmod(side, size)
    return [(0, whole, size)] * (whole > 0) + [(whole * size, 1, rest)] * (rest > 0)


def select_in_tiles(x: Tensor, shape: tuple[int, ...], tile: tuple[int, int], number: Callable[[int], int]) -> Tensor:
    """Return the indices (int32, ascending, into the flat tensor) of the largest magnitudes in each tile.

    Args:
        x: flat contiguous float32, not empty.
        shape: the shape of the tensor.
        tile: rows and columns of a tile.
        number: how many elements to select in a tile, given the number of its elements.
    """
    sides, parts = regions(shape, tile)
    matrix = x.view(sides)
    found = []
    for r in parts:
        rectangle = matrix[r.top : r.top + r.down * r.height, r.left : r.left + r.across * r.width]
        tiles = rectangle.reshape(r.down, r.height, r.across, r.width).transpose(1, 2).reshape(r.tiles, r.numel)
        at = kernels.select_topk_rows(tiles.contiguous(), number(r.numel))
        which, inside = at // r.numel, at % r.numel
        row = r.top + which // r.across * r.height + inside // r.width
        found.append(row * sides[1] + r.left + which % r.across * r.width + inside % r.width)
    return torch.cat(found).sort().values
