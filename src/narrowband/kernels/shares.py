"""Shares of a flat tensor: which of N ranks owns an element, and where it lies among that rank's own.

Where a rank averages the elements that it owns, all ranks should own about as many of the largest ones, wherever these
lie. So shares are not N pieces of the tensor. Elements are owned in blocks of 16; N successive blocks make a *row*, of
which every rank owns one, and which one is drawn by a hash from row to row::

    row = i // (16·N)       block = i // 16 mod N       owner = (block + hash(row, turn)) mod N
    local = 16·row + i mod 16

Both directions are arithmetic, so nobody has to be told, and nothing has to be kept. Indices that ascend ascend among
an owner's own, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from narrowband.kernels.backends import backend_of

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["SHARE_BLOCK", "from_share", "share_numel", "split_shares"]

#: Elements in a row that have the same owner.
SHARE_BLOCK = 16


def share_numel(n: int, ranks: int) -> int:
    """Elements of a rank's share of n, rounded up to whole blocks: the same for all ranks."""
    return -(-n // (SHARE_BLOCK * ranks)) * SHARE_BLOCK


def split_shares(indices: Tensor, values: Tensor, local: Tensor, sorted_values: Tensor, *, n: int, turn: int) -> int:
    """Sort elements by their owners, into a table with a row for each.

    Args:
        indices: sorted, int32, below n.
        values: of these elements, float32.
        local: int32 of shape (ranks, room): gets each owner's own indices, ascending; its last index fills the rest.
        sorted_values: float32 of the same shape: gets their values, and zeros.
        n: elements of the tensor.
        turn: another hash for another tensor.

    Returns:
        How many elements the owner with the most has. Where that is more than there is room for, its last ones lack.
    """
    return int(backend_of(indices).split_shares(indices, values, local, sorted_values, n=n, turn=turn))


def from_share(local: Tensor, *, turn: int) -> Tensor:
    """The indices (int32) of the elements in such a table, in its shape."""
    return cast("Tensor", backend_of(local).from_share(local, turn=turn))
