"""Whether a few numbers dwarf all others, so that codes in one range say nothing of most.

The magnitude of a *row* is that of its largest element. Rows are what :class:`~narrowband.kernels.Rows` cuts: of fewer
than :data:`SHORT` elements, several are taken together; of more than :data:`LONG`, pieces are taken; see
:func:`pieces_of`. The magnitude of a *column*, the elements that have one place in the rows of a range, is found
likewise, where there are at least :data:`FEW` rows and at most :data:`CHANNELS` columns: rows and columns are then
tokens and channels of a linear layer's input. In longer rows a column is no channel any more: pixels, products of
queries and keys.

A range's ``width`` is *dwarfing*, with magnitudes of which ``n`` are not zero, where

    number of magnitudes ≥ width / reach    ≤    min(ceil(n / FEW), n − 1)

with a reach of 128 for rows or of 512 for columns (:data:`REACH`). All elements of all other rows then lie within two
steps of 8 bits on either side of zero, and codes, of however many bits, say next to nothing of them. (Some channels are
often 100 times as large as the others, hence the wider reach.) Rows and columns with inf or NaN have no magnitude: they
count as zero, and as smaller than any width.

All these numbers are ratios. Tensors that are heavy-tailed as a whole do not fall under the rule, nor does softmax,
where every row has a large element.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from narrowband.kernels.backends import backend_of
from narrowband.kernels.rows import largest_divisor

if TYPE_CHECKING:
    from torch import Tensor

    from narrowband.kernels.rows import Rows

__all__ = ["CHANNELS", "FEW", "LONG", "REACH", "SHORT", "dwarfed_rows", "has_columns", "pieces_of"]

#: Of rows, and of columns.
REACH = 128, 512
FEW = 16
LONG, SHORT = 512, 16
CHANNELS = 1024


def dwarfed_rows(x: Tensor, rows: Rows, widths: Tensor) -> Tensor:
    """Whether one of the widths of all ranges dwarfs its rows or columns.

    Args:
        x: The elements, at least one, float32 or bfloat16, as :func:`~narrowband.kernels.quantize_rows` takes them.
        rows: How they are cut.
        widths: Of the range of every group of every part, float32: several such, (W, parts · groups).

    Returns:
        W bools, where the tensor is.

    Example:
        >>> from narrowband.kernels import Rows
        >>> x, rows = torch.randn(64, 32), Rows(parts=1, outer=64, groups=1, inner=32)
        >>> dwarfed_rows(x, rows, torch.stack(((x.amax() - x.amin()).view(1), torch.tensor([1e6]))))
        tensor([False,  True])
    """
    return cast("Tensor", backend_of(x).dwarfed_rows(x, rows, widths))


def pieces_of(rows: Rows) -> tuple[int, int]:
    """(how many rows are taken together, into how many pieces each is cut), both divisors.

    Example:
        >>> from narrowband.kernels import Rows
        >>> pieces_of(Rows(1, 100, 12, 1)), pieces_of(Rows(1, 8, 1, 768)), pieces_of(Rows(1, 31, 1, 64))
        ((10, 1), (1, 2), (1, 1))
    """
    joined = largest_divisor(rows.outer, SHORT // max(rows.inner, 1))
    pieces = rows.inner // largest_divisor(rows.inner, LONG)
    return joined, 1 if pieces == rows.inner else pieces  # of a prime number, or nearly, there is one


def has_columns(rows: Rows) -> bool:
    """Whether columns are looked at, too."""
    return rows.outer >= FEW and 1 < rows.inner <= CHANNELS
