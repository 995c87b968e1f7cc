"""A checksum of a tensor's bits, in plain torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from narrowband.kernels.reference import common

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

__all__ = ["checksum"]


def words_of(x: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield (index of the first word, words as int32): the whole words, then the last one, filled up with zeros."""
    whole = x.numel() // 4
    yield 0, x[: 4 * whole].view(torch.int32)
    if x.numel() % 4:
        yield whole, torch.nn.functional.pad(x[4 * whole :], (0, -x.numel() % 4)).view(torch.int32)


def checksum(x: Tensor) -> Tensor:
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    for first, words in words_of(x):
        for begin in range(0, words.numel(), common.CHUNK):
            part = words[begin : begin + common.CHUNK].long().bitwise_and_(common.UINT32)
            at = first + begin
            total += part.mul_(common.hashes(at, at + part.numel(), 0, x.device).bitwise_or_(1)).sum()
    return total
