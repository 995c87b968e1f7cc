"""Tiles of a matrix, in each of which a codec selects by itself.

A tensor with more than two dimensions is a matrix of its first by all others; a vector is cut into pieces as long as a
tile is large. Tiles at the right and lower edges may be smaller.
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
    """Tiles of one size, that fill a rectangle of a matrix.

    Attributes:
        top: first row of the rectangle.
        left: its first column.
        down: how many tiles lie below each other.
        across: how many lie side by side.
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
        """How many there are."""
        return self.down * self.across

    @property
    def numel(self) -> int:
        """Elements of each."""
        return self.height * self.width


def tile_of(text: str) -> tuple[int, int]:
    """The sides that ``"64x64"`` says.

    Raises:
        ValueError: it says none.
    """
    found = re.fullmatch(r"([1-9]\d{0,8})x([1-9]\d{0,8})", text)
    if found is None:
        raise ValueError(f"tile={text!r} is no size of a tile; write rows x columns, such as 64x64")
    return int(found[1]), int(found[2])


@functools.lru_cache(maxsize=1 << 12)
def regions(shape: tuple[int, ...], tile: tuple[int, int]) -> tuple[tuple[int, int], tuple[Region, ...]]:
    """The sides of the matrix that a tensor of this shape is, and its tiles: whole ones, and those at its edges."""
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
    """(where they begin, how many, how long): whole pieces of a side, and what is left of it."""
    whole, rest = divmod(side, size)
    return [(0, whole, size)] * (whole > 0) + [(whole * size, 1, rest)] * (rest > 0)


def select_in_tiles(x: Tensor, shape: tuple[int, ...], tile: tuple[int, int], number: Callable[[int], int]) -> Tensor:
    """The indices (int32, ascending, into the flat tensor) of the elements of largest magnitude in each tile.

    Args:
        x: flat contiguous float32, not empty.
        shape: that of the tensor.
        tile: rows and columns.
        number: how many to take of a tile of so many elements.
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
