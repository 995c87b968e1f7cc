"""Shares of a flat tensor: which of N ranks owns an element, and its index within that rank's share.

When each rank averages the elements that it owns, all ranks should own about the same number of the largest elements,
wherever in the tensor these are. So shares are not N contiguous pieces. Elements are owned in blocks of 16. N
successive blocks make a *row*; every rank owns one block of each row, and a hash of the row decides which one::

    row = i // (16·N)       block = i // 16 mod N       owner = (block + hash(row, turn)) mod N
    local = 16·row + i mod 16

Both directions are computed, so ranks exchange and store no table. Indices that ascend in the tensor ascend within a
share, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from narrowband.kernels.backends import backend_of

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["SHARE_BLOCK", "from_share", "share_numel", "split_shares"]

#: Successive elements that have the same owner.
SHARE_BLOCK = 16


def share_numel(n: int, ranks: int) -> int:
    """Return the size of a rank's share of n elements, rounded up to whole blocks: the same for all ranks."""
    return -(-n // (SHARE_BLOCK * ranks)) * SHARE_BLOCK


def split_shares(indices: Tensor, values: Tensor, local: Tensor, sorted_values: Tensor, *, n: int, turn: int) -> Tensor:
    """Sort elements by their owners, into tables with a row per owner.

    Args:
        indices: sorted, int32, below n.
        values: values of these elements, float32.
        local: int32 (ranks, room), written: each owner's elements by their ascending indices in its share; the last
            index fills the rest of a row.
        sorted_values: float32 of the same shape, written: the values of these elements; zeros fill the rest.
        n: number of elements of the tensor.
        turn: varies the hash from tensor to tensor.

    Returns:
        One int: the largest number of elements of any owner. If it exceeds the room, the last elements of that owner
        are missing from the tables.
    """
    return cast("Tensor", backend_of(indices).split_shares(indices, values, local, sorted_values, n=n, turn=turn))


def from_share(local: Tensor, *, turn: int) -> Tensor:
    """Return the tensor indices (int32) of the elements in a table ``local`` of :func:`split_shares`, in its shape."""
    return cast("Tensor", backend_of(local).from_share(local, turn=turn))
