"""Tensors with outliers, which 8 bits cannot represent.

A range reaches from the smallest element to the largest. One huge element makes the steps of codes so wide that all
other elements get the same code; :mod:`narrowband.kernels.outliers` defines when. Such a tensor is kept unchanged. This
rule is not the paper's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from narrowband import kernels
from narrowband.kernels import Rows

__all__ = ["EXTREME", "Outliers", "is_masked"]

#: A range is extreme where a range this many times narrower would still be dwarfing.
EXTREME = 8


@dataclass(frozen=True)
class Outliers:
    """Why a tensor is kept unchanged.

    Attributes:
        extreme: whether tensors computed from it must be kept unchanged, too. For example, the gradient of a saturated
            tanh is zero; computed from codes it is not quite zero, and times an input of 1e20 that is a large error.
    """

    extreme: bool


def is_masked(x: Tensor) -> bool:
    """Whether a tensor's only extreme elements are −inf or the lowest number of a dtype, as in an attention mask.

    Args:
        x: a tensor with elements, of a floating dtype with up to 32 bits.

    Example:
        >>> scores = torch.randn(64, 32)
        >>> scores[:, 20:] = -torch.inf
        >>> is_masked(scores), is_masked(-scores)
        (True, False)
    """
    x = x.detach()
    # bfloat16's lowest number is the bound, since it is above float32's; autocast turns the latter into it, or −inf.
    masked = x <= torch.finfo(torch.float16 if x.dtype is torch.float16 else torch.bfloat16).min
    if not bool(masked.any()):
        return False
    rest = torch.where(masked, 0.0, x.float()).contiguous()
    width = rest.amax() - rest.amin()
    if not bool(torch.isfinite(2 * width)):  # nor NaN
        return False
    rows = Rows(1, x.numel() // x.shape[-1], 1, x.shape[-1])
    return not bool(kernels.dwarfed_rows(rest.view(-1), rows, (width / EXTREME).view(1, 1)))
