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

from typing import TYPE_CHECKING, NamedTuple, cast

from narrowband.kernels.backends import backend_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = ["SHARE_BLOCK", "Shared", "add_shares_all", "from_share", "share_numel", "split_shares_all"]

#: Successive elements that have the same owner.
SHARE_BLOCK = 16


class Shared(NamedTuple):
    """A tensor whose elements are in a table beside those of other tensors. The table has a row per owner.

    Attributes:
        n: number of elements of the tensor.
        turn: varies the hash from tensor to tensor.
        columns: the columns of the table that the tensor has.
        first: the index of the first element of the tensor's share, among all that an owner has of these tensors.
    """

    n: int
    turn: int
    columns: slice
    first: int

    @property
    def room(self) -> int:
        """The number of its columns."""
        return int(self.columns.stop - self.columns.start)


def share_numel(n: int, ranks: int) -> int:
    """Return the size of a rank's share of n elements, rounded up to whole blocks: the same for all ranks."""
    return -(-n // (SHARE_BLOCK * ranks)) * SHARE_BLOCK


def split_shares_all(
    tensors: Sequence[Shared],
    indices: Sequence[Tensor],
    values: Sequence[Tensor],
    local: Tensor,
    sorted_values: Tensor,
) -> None:
    """Sort the elements of several tensors by their owners, into tables with a row per owner. On a GPU, a few launches
    do so for all tensors, and the host does not wait.

    Where an owner has more elements of a tensor than there are columns, those of the largest magnitude are written; of
    equal ones, those with the lower index.

    Args:
        tensors: where the elements of each tensor go.
        indices: one per tensor: sorted, int32, below n.
        values: the values of these elements, float32.
        local: int32 (ranks, width), written: each owner's elements by their ascending indices in its share, counted
            from ``first``; the share's last index fills the rest of the tensor's columns.
        sorted_values: float32 of the same shape, written: the values of these elements; zeros fill the rest.
    """
    if tensors:
        backend_of(local).split_shares_all(tensors, indices, values, local, sorted_values)


def add_shares_all(
    outs: Sequence[Tensor], tensors: Sequence[Shared], local: Tensor, values: Tensor, weight: float = 1.0
) -> None:
    """``out[i] += weight · value`` for each element i of several tensors, from tables as :func:`split_shares_all`
    writes them. On a GPU, one launch does so for all tensors.

    A value of zero adds nothing; neither do elements behind the last one of a tensor, whose share has whole blocks.

    Args:
        outs: one per tensor, flat float32.
        tensors: where the elements of each are.
        local: int32 (ranks, width). No element may have two values that are not zero.
        values: float32 of the same shape.
        weight: a factor on all values.
    """
    if outs:
        backend_of(local).add_shares_all(outs, tensors, local, values, weight)


def from_share(local: Tensor, *, turn: int) -> Tensor:
    """Return the tensor indices (int32) of elements by their indices in shares: int32 (ranks, any number), a row per
    owner. The result has the same shape.
    """
    return cast("Tensor", backend_of(local).from_share(local, turn=turn))
