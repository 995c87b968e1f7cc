"""Log-probabilities over a vocabulary, which a cross-entropy saves: codes of their fourth roots.

Backward of a cross-entropy computes p = exp(l) from log-probabilities l ≤ 0, and p − 1 for the target. They reach from
−0.001, where the model is certain, to −20 and less. Levels at equal distances over such a range are 0.1 apart: they
cannot tell p = 0.999 from 0.95, so gradients of tokens that are predicted well would be wrong many times over. What
matters is the error relative to l. Therefore codes are made of r = (−l)^¼: an error of d in r is one of 4·d/r in l,
relative to it, and levels of l are close together near zero. tests/docs/test_rounding.py has the errors of gradients.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from narrowband.activations.recompute import Function, formed

if TYPE_CHECKING:
    from narrowband.activations.packed import Source
    from narrowband.activations.recompute import Sizes

__all__ = ["from_roots", "roots"]

#: Elements of which roots are computed at a time. Logits often are a model's largest tensors, and copies in float32
#: would raise the peak of memory.
_PIECE = 1 << 22


def roots(x: Tensor) -> Tensor:
    """Return r = (−l)^¼ of log-probabilities l, in memory as they are, in bfloat16, whose error is that of l · 2^−6.

    Rounding may have made a log-probability positive; it counts as zero. NaN and −inf stay visible: as NaN and inf.
    """
    x = x.detach()
    out = torch.empty_like(x, dtype=torch.bfloat16)
    if x.is_contiguous():
        pieces, outs = torch.split(x.view(-1), _PIECE), torch.split(out.view(-1), _PIECE)
    else:
        pieces, outs = (x,), (out,)
    for piece, into in zip(pieces, outs, strict=True):
        into.copy_(piece.neg().clamp_(min=0).float().sqrt_().sqrt_())
    return out


def from_roots(own: torch.dtype) -> Function:
    """Return the function that computes log-probabilities of dtype ``own`` from their roots."""

    def function(source: Source, sizes: Sizes, dtype: torch.dtype | None) -> Tensor:
        r = source.decode(None, torch.float32)
        return formed(r.square_().square_().neg_(), sizes, dtype or own)

    return function
