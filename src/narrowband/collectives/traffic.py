"""Bytes that one of N ranks sends in a collective of ``torch.distributed``, for a tensor of P bytes."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["all_gather_nbytes", "all_reduce_nbytes", "reduce_scatter_nbytes", "shares_of"]


def all_reduce_nbytes(nbytes: int, size: int) -> int:
    """Return 2·(N − 1)/N · P: in a ring all-reduce, a rank sends all but one of the N parts, twice.

    Example:
        >>> all_reduce_nbytes(1000, size=4)
        1500
    """
    return 2 * (size - 1) * nbytes // size


def all_gather_nbytes(nbytes: int, size: int) -> int:
    """Return (N − 1) · P: every rank's payload reaches every other rank.

    Example:
        >>> all_gather_nbytes(1000, size=4)
        3000
    """
    return (size - 1) * nbytes


def reduce_scatter_nbytes(nbytes: int, size: int, *, by_gloo: bool) -> int:
    """Return (N − 1)/N · P: in a ring reduce-scatter, a rank sends all but one of the N parts, once.

    PyTorch has no such algorithm for gloo: it makes an all-reduce, and each rank keeps its part. That is twice as much.

    Example:
        >>> reduce_scatter_nbytes(1000, size=4, by_gloo=False), reduce_scatter_nbytes(1000, size=4, by_gloo=True)
        (750, 1500)
    """
    return all_reduce_nbytes(nbytes, size) if by_gloo else (size - 1) * nbytes // size


def shares_of(nbytes: int, parts: Sequence[int]) -> list[int]:
    """Divide the bytes of a message among its parts in proportion to their sizes, in whole bytes that add up.

    Args:
        nbytes: bytes of the message, including those that belong to no part, such as flags.
        parts: size of each part. Where all are zero, parts have equal shares.

    Example:
        >>> shares_of(1000, [100, 100, 199])
        [250, 251, 499]
    """
    ends = list(accumulate(parts if any(parts) else [1] * len(parts)))
    up_to = [nbytes * end // ends[-1] for end in ends]
    return [there - before for there, before in zip(up_to, [0, *up_to], strict=False)]
