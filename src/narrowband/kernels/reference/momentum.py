"""Momentum correction in plain torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from narrowband.kernels.reference.compensation import all_finite, restore_all_if, write_indices, write_payload
from narrowband.kernels.reference.selection import select_topk

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


__all__ = ["encode_momentum_topk_all", "forget", "momentum_topk", "remember_all_if"]


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


def encode_momentum_topk_all(
    xs: Sequence[Tensor],
    nows: Sequence[Tensor],
    befores: Sequence[Tensor],
    ks: Sequence[int],
    outs: Sequence[Tensor],
    *,
    momentum: float,
    nesterov: bool = False,
    masking: bool = True,
    values: Sequence[Tensor] = (),
) -> tuple[bool, list[Tensor], list[Tensor]]:
    every, indices, olds = True, [], []
    for number, (x, now, before, k, out) in enumerate(zip(xs, nows, befores, ks, outs, strict=True)):
        finite, at, sent, _ = momentum_topk(x, now, before, k, momentum=momentum, nesterov=nesterov)
        if finite and values:
            values[number].copy_(sent)
            write_indices(at, x.numel(), out)
        elif finite:
            write_payload(at, sent, x.numel(), k, out)
        every &= finite
        indices.append(at)
        olds.append(forget(now, before, at, momentum=momentum, nesterov=nesterov, masking=masking))
    return every, indices, olds


def remember_all_if(bad: Tensor, nows: Sequence[Tensor], indices: Sequence[Tensor], olds: Sequence[Tensor]) -> None:
    values = [now[at] for now, at in zip(nows, indices, strict=True)]
    restore_all_if(bad, values, olds)
    for now, at, value in zip(nows, indices, values, strict=True):
        now[at] = value
