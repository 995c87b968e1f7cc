"""Momentum correction in Triton: the momentum step is made in the pass where a selection first reads the sums."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import triton.language as tl

from narrowband.kernels.cuda.common import BLOCK, all_below
from narrowband.kernels.cuda.launching import kernel, run
from narrowband.kernels.cuda.selection import choose, choose_sampled
from narrowband.kernels.cuda.sources import MOMENTUM, NESTEROV, Source

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
    """Implement :func:`narrowband.kernels.momentum_topk`. The given threshold saves nothing here: without it, the k-th
    largest takes as many launches.
    """
    n = x.numel()
    if not n:
        return True, *_nothing(x), 0.0
    source = Source(NESTEROV if nesterov else MOMENTUM, x, now, before, float(momentum), float(scale))
    sampled = sampled and 0 < k < n
    chosen = choose_sampled(source, k, seed) if sampled else choose(source, max(k, 1))
    if not all_below(chosen.tops, math.inf):
        return False, *_nothing(x), threshold
    return (True, chosen.indices, chosen.values, 0.0) if k else (True, *_nothing(x), 0.0)


def _nothing(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return empty indices and values."""
    return torch.empty(0, dtype=torch.int32, device=x.device), x.new_empty(0)


@kernel
def _forget(now, before, indices, old, k, momentum, NESTEROV: tl.constexpr, MASKING: tl.constexpr, WIDTH: tl.constexpr):
    """Implement ``forget``.

    One thread may store to a scattered place that another has loaded, so all have to have read before one writes.
    """
    i = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    there = i < k
    at = tl.load(indices + i, mask=there, other=0).to(tl.int64)
    value = tl.load(now + at, mask=there, other=0.0)
    velocity = tl.zeros_like(value)
    if not MASKING:
        velocity = tl.load(before + at, mask=there, other=0.0) - value
    tl.debug_barrier()
    tl.store(old + i, value, mask=there)
    left = tl.zeros_like(value)
    if NESTEROV:
        left = velocity * momentum * -1.0  # not −momentum: Triton may lose the sign of −0 on the way here
    tl.store(before + at, left, mask=there)
    tl.store(now + at, left - velocity, mask=there)


def forget(
    now: Tensor, before: Tensor, indices: Tensor, *, momentum: float, nesterov: bool = False, masking: bool = True
) -> Tensor:
    k = indices.numel()
    old = torch.empty(k, dtype=torch.float32, device=now.device)
    form = {"NESTEROV": nesterov, "MASKING": masking, "WIDTH": BLOCK}
    run(_forget, -(-k // BLOCK), now, before, indices, old, k, float(momentum), on=now, **form)
    return old
