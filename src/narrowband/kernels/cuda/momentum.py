"""Momentum correction in Triton: the momentum step is made in the pass where a selection first reads the sums, and
several tensors take one launch.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import triton.language as tl

from narrowband.kernels.cuda.common import BLOCK, all_below, whole_words
from narrowband.kernels.cuda.launching import Segments, kernel, run, segment
from narrowband.kernels.cuda.selection import choose, choose_sampled, encode_all
from narrowband.kernels.cuda.sources import MOMENTUM, NESTEROV, Source, forget_at
from narrowband.kernels.findings import open_place

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
    i = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    there = i < k
    at = tl.load(indices + i, mask=there, other=0).to(tl.int64)
    tl.store(old + i, forget_at(now, before, at, there, momentum, NESTEROV, MASKING), mask=there)


def forget(
    now: Tensor, before: Tensor, indices: Tensor, *, momentum: float, nesterov: bool = False, masking: bool = True
) -> Tensor:
    k = indices.numel()
    old = torch.empty(k, dtype=torch.float32, device=now.device)
    form = {"NESTEROV": nesterov, "MASKING": masking, "WIDTH": BLOCK}
    run(_forget, -(-k // BLOCK), now, before, indices, old, k, float(momentum), on=now, **form)
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
    kind, place = NESTEROV if nesterov else MOMENTUM, open_place(xs[0].device)
    sources = [
        Source(kind, x, now, before, float(momentum), 1.0) for x, now, before in zip(xs, nows, befores, strict=True)
    ]
    room = torch.empty(2 * sum(ks), dtype=torch.int32, device=xs[0].device)
    gone = list(room.split([2 * k for k in ks]))
    with whole_words(outs) as words:
        tops = encode_all(
            sources, ks, words, values=values, forget=1 if masking else 2, gone=gone, always=True, place=place
        )  # fmt: skip
    pairs = [own.chunk(2) for own in gone]
    finite = place is not None or all_below(tops, math.inf)
    return finite, [at for at, _ in pairs], [old.view(torch.float32) for _, old in pairs]


@kernel
def _remember(table, count, bad, WIDTH: tl.constexpr, SEGMENTS: tl.constexpr):
    """Write values back to scattered places of several tensors."""
    if tl.load(bad) != 0:
        own, part = segment(table, count, 5, SEGMENTS)
        now = tl.load(own + 1).to(tl.pointer_type(tl.float32))
        indices = tl.load(own + 2).to(tl.pointer_type(tl.int32))
        old = tl.load(own + 3).to(tl.pointer_type(tl.float32))
        i = part * WIDTH + tl.arange(0, WIDTH)
        there = i < tl.load(own + 4)
        at = tl.load(indices + i, mask=there, other=0).to(tl.int64)
        tl.store(now + at, tl.load(old + i, mask=there, other=0.0), mask=there)


def remember_all_if(bad: Tensor, nows: Sequence[Tensor], indices: Sequence[Tensor], olds: Sequence[Tensor]) -> None:
    segments = Segments(nows[0])
    for now, at, old in zip(nows, indices, olds, strict=True):
        segments.add(-(-at.numel() // BLOCK), now.data_ptr(), at.data_ptr(), old.data_ptr(), at.numel())
    segments.run(_remember, bad, WIDTH=BLOCK)
