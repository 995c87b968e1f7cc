"""A checksum of a tensor's bits, to see whether anything in it has changed or moved.

Of the words of 32 bits that the tensor's bytes make in memory order, little-endian, the last one filled up with zeros::

    checksum = Σᵢ word(i) · (hash(i, 0) | 1)      (modulo 2**64)

A word that changes makes it another one for certain: its change is below 2**32 and its factor is odd. Words that change
places have other factors there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch

from narrowband.kernels.backends import backend_of

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["checksum"]


def checksum(x: Tensor) -> Tensor:
    """Of any tensor, as one int64 on its device, which is not waited for.

    Example:
        >>> checksum(torch.tensor([1.0, 2.0])) == checksum(torch.tensor([2.0, 1.0]))
        tensor(False)
    """
    data = x.detach().reshape(-1).view(torch.uint8)
    if data.data_ptr() % 4:
        data = data.clone()
    return cast("Tensor", backend_of(x).checksum(data))
