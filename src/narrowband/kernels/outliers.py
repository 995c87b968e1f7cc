"""Detect a few outliers that dwarf all other elements, so that codes in a shared range would say nothing of most.

The magnitude of a *row* is that of its largest element. Rows are those of :class:`~narrowband.kernels.Rows`; rows of
fewer than :data:`SHORT` elements are joined, and rows of more than :data:`LONG` elements are cut into pieces, see
:func:`pieces_of`. A *column* is the elements at the same place in all rows of a range; its magnitude is that of its
largest element, too. Columns are looked at if there are at least :data:`FEW` rows and at most :data:`CHANNELS` columns,
because rows and columns are then tokens and channels of a linear layer's input. In longer rows a column is no channel,
but a pixel or a product of a query and a key.

Among magnitudes of which ``n`` are not zero, a range's ``width`` is *dwarfing* if

    number of magnitudes ≥ width / reach    ≤    min(ceil(n / FEW), n − 1)

with a reach of 128 for rows and of 512 for columns (:data:`REACH`). All elements of all other rows then lie within two
8-bit steps of zero, and codes of however many bits say next to nothing of them. (Some channels are often 100 times as
large as the others, hence the wider reach for columns.) Rows and columns with inf or NaN have no magnitude: they count
as zero, and as smaller than any width.

The rule compares ratios only. It does not apply to tensors that are heavy-tailed as a whole, nor to softmax, where
every row has a large element.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from narrowband.kernels.backends import backend_of
from narrowband.kernels.rows import largest_divisor

if TYPE_CHECKING:
    from torch import Tensor

    from narrowband.kernels.rows import Rows

__all__ = ["CHANNELS", "FEW", "LONG", "REACH", "SHORT", "dwarfed_rows", "has_columns", "pieces_of"]

#: The reach of rows, and that of columns.
REACH = 128, 512
FEW = 16
LONG, SHORT = 512, 16
CHANNELS = 1024


def dwarfed_rows(x: Tensor, rows: Rows, widths: Tensor) -> Tensor:
    """Whether any range's width dwarfs its rows or columns; one bool for each given set of widths.

    Args:
        x: The elements, at least one, float32 or bfloat16, as :func:`~narrowband.kernels.quantize_rows` takes them.
        rows: How the elements are cut.
        widths: W sets of widths, float32 (W, parts · groups): one width for the range of every group of every part.

    Returns:
        W bools, on the tensor's device.

    Example:
        >>> from narrowband.kernels import Rows
        >>> x, rows = torch.randn(64, 32), Rows(parts=1, outer=64, groups=1, inner=32)
        >>> dwarfed_rows(x, rows, torch.stack(((x.amax() - x.amin()).view(1), torch.tensor([1e6]))))
        tensor([False,  True])
    """
    return cast("Tensor", backend_of(x).dwarfed_rows(x, rows, widths))


def pieces_of(rows: Rows) -> tuple[int, int]:
    """Return (how many rows are joined, into how many pieces each row is cut), divisors of outer and of inner.

    Example:
        >>> from narrowband.kernels import Rows
        >>> pieces_of(Rows(1, 100, 12, 1)), pieces_of(Rows(1, 8, 1, 768)), pieces_of(Rows(1, 31, 1, 64))
        ((10, 1), (1, 2), (1, 1))
    """
    joined = largest_divisor(rows.outer, SHORT // max(rows.inner, 1))
    pieces = rows.inner // largest_divisor(rows.inner, LONG)
    return joined, 1 if pieces == rows.inner else pieces  # no divisor up to LONG: not cut


def has_columns(rows: Rows) -> bool:
    """Whether the magnitudes of columns are compared, too."""
    return rows.outer >= FEW and 1 < rows.inner <= CHANNELS
