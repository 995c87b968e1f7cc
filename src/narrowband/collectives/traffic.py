"""Bytes that a rank sends in the collectives of ``torch.distributed``, among N ranks, for a tensor of P bytes."""

from __future__ import annotations

__all__ = ["all_gather_nbytes", "all_reduce_nbytes"]


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
