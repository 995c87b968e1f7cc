"""A checksum of a tensor's bits, on CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from narrowband.kernels.cpu.loops import U32, At, fold_seed, loop, mix
from narrowband.kernels.cpu.threads import spread
from narrowband.kernels.reference.checksums import words_of

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["checksum"]

U64 = np.uint64


@loop
def _checksum_range(words, folded, first, last):
    """Compute the checksum of words [first, last)."""
    total = U64(0)
    for i in range(first, last):
        total += U64(words[At(i)]) * U64(mix(U32(U32(i) + folded)) | U32(1))
    return total


def _total(words: Any, folded: Any) -> int:
    return sum(map(int, spread(words.size, words.size, lambda a, b: _checksum_range(words, folded, a, b))))


def checksum(x: Tensor) -> Tensor:
    folded = int(fold_seed(0))
    total = sum(_total(words.numpy().view(np.uint32), U32(folded + at & 0xFFFFFFFF)) for at, words in words_of(x))
    return torch.from_numpy(np.array(total & 0xFFFFFFFFFFFFFFFF, dtype=np.uint64).view(np.int64))
