"""Momentum correction in plain torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from narrowband.kernels.reference.compensation import all_finite
from narrowband.kernels.reference.selection import select_topk

if TYPE_CHECKING:
    from torch import Tensor


__all__ = ["forget", "momentum_topk"]


def momentum_topk(
    x: Tensor,
    now: Tensor,
    before: Tensor,
    k: int,
    *,
    momentum: float,
    nesterov: bool = False,
    scale: float = 1.0,
    threshold: float = 0.0,
    sampled: bool = False,
    seed: int = 0,
) -> tuple[bool, Tensor, Tensor, float]:
    oldest = before.clone()
    before.copy_(now + ((now - oldest) * momentum + x * scale))
    x.copy_(oldest)
    corrected = before + (before - now) * momentum if nesterov else before
    if not all_finite(corrected):
        return False, torch.empty(0, dtype=torch.int32, device=x.device), x.new_empty(0), threshold
    at = select_topk(corrected, k, sampled=sampled, seed=seed)
    return True, at, corrected[at], 0.0


def forget(
    now: Tensor, before: Tensor, indices: Tensor, *, momentum: float, nesterov: bool = False, masking: bool = True
) -> Tensor:
    old = now[indices]
    velocity = torch.zeros_like(old) if masking else before[indices] - old
    sum_left = velocity * -momentum if nesterov else torch.zeros_like(old)
    before[indices] = sum_left
    now[indices] = sum_left - velocity
    return old
