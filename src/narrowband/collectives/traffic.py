"""Bytes that a rank sends in the collectives of ``torch.distributed``, among N ranks, for a tensor of P bytes."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["all_gather_nbytes", "all_reduce_nbytes", "shares_of"]


def all_reduce_nbytes(nbytes: int, size: int) -> int:
    """2·(N − 1)/N · P: a ring all-reduce sends everything but the rank's own share, twice.

    Example:
        >>> all_reduce_nbytes(1000, size=4)
        1500
    """
    return 2 * (size - 1) * nbytes // size


def all_gather_nbytes(nbytes: int, size: int) -> int:
    """(N − 1) · P: every rank's payload reaches every other rank.

    Example:
        >>> all_gather_nbytes(1000, size=4)
        3000
    """
    return (size - 1) * nbytes


def shares_of(nbytes: int, parts: Sequence[int]) -> list[int]:
    """What each part of a message has of its bytes, in whole bytes that add up to all of them.

    Args:
        nbytes: that are sent, with what belongs to no part, such as flags.
        parts: how large each is. Where all are empty, they have equal shares.

    Example:
        >>> shares_of(1000, [100, 100, 199])
        [250, 251, 499]
    """
    ends = list(accumulate(parts if any(parts) else [1] * len(parts)))
    up_to = [nbytes * end // ends[-1] for end in ends]
    return [there - before for there, before in zip(up_to, [0, *up_to], strict=False)]
