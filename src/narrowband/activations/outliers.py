"""Tensors with outliers, which 8 bits cannot represent.

A range is as wide as its extremes are apart. One huge element makes the steps of codes so wide that all others have the
same code; :mod:`narrowband.kernels.outliers` says when. Such a tensor is kept as it is; this rule is not the paper's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from narrowband import kernels
from narrowband.kernels import Rows

__all__ = ["EXTREME", "Outliers", "is_masked"]

#: A range that is dwarfing by so many times more is extreme.
EXTREME = 8


@dataclass(frozen=True)
class Outliers:
    """Why a tensor is kept as it is.

    Attributes:
        extreme: whether tensors computed from it are to be kept as they are, too. A saturated tanh passes on a gradient
            of zero; from its codes it is not quite zero, and times an input of 1e20 that is a large error.
    """

    extreme: bool


def is_masked(x: Tensor) -> bool:
    """Whether what is large in a tensor is −inf, or the lowest number of a dtype, as masks have it for what is not to
    count, and nothing else is extreme.

    Args:
        x: of a floating dtype with up to 32 bits, and with elements.

    Example:
        >>> scores = torch.randn(64, 32)
        >>> scores[:, 20:] = -torch.inf
        >>> is_masked(scores), is_masked(-scores)
        (True, False)
    """
    x = x.detach()
    # float32's lowest is lower than bfloat16's, and autocast makes the one of the other, or −inf.
    masked = x <= torch.finfo(torch.float16 if x.dtype is torch.float16 else torch.bfloat16).min
    if not bool(masked.any()):
        return False
    rest = torch.where(masked, 0.0, x.float()).contiguous()
    width = rest.amax() - rest.amin()
    if not bool(torch.isfinite(2 * width)):  # nor NaN
        return False
    rows = Rows(1, x.numel() // x.shape[-1], 1, x.shape[-1])
    return not bool(kernels.dwarfed_rows(rest.view(-1), rows, (width / EXTREME).view(1, 1)))
