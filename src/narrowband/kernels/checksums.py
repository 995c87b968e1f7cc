"""A checksum of a tensor's bits, to see whether any of its values has changed or moved.

The tensor's bytes, in memory order, are read as little-endian words of 32 bits; zeros fill up the last word::

    checksum = Σᵢ word(i) · (hash(i, 0) | 1)      (modulo 2**64)

Changing one word changes the checksum for certain: the word's change is below 2**32 and its factor is odd. Words that
swap places usually change it, too, because they get other factors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch

from narrowband.kernels.backends import backend_of

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["checksum"]


def checksum(x: Tensor) -> Tensor:
    """Return the checksum of any tensor as one int64 on its device; the host does not wait for the result.

    Example:
        >>> checksum(torch.tensor([1.0, 2.0])) == checksum(torch.tensor([2.0, 1.0]))
        tensor(False)
    """
    data = x.detach().reshape(-1).view(torch.uint8)
    if data.data_ptr() % 4:
        data = data.clone()
    return cast("Tensor", backend_of(x).checksum(data))
