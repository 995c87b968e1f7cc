"""Sparse vectors in Triton."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton.language as tl

from narrowband.kernels.cuda.common import kernel, run

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = ["sparse_accumulate", "sparse_sum"]

_BLOCK = 1024


@kernel
def _accumulate(out, indices, values, k, weight, WIDTH: tl.constexpr):
    """Equal neighbours belong to the first of them, which adds one value after the other: the sum has one order."""
    i = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    at = tl.load(indices + i, mask=i < k, other=-1)
    before = tl.load(indices + i - 1, mask=(i > 0) & (i < k), other=-1)
    first = (i < k) & (at != before)
    total = tl.load(out + at, mask=first, other=0.0)
    going = first
    step = 0
    while tl.max(going.to(tl.int32), 0) > 0:
        total = tl.where(going, total + tl.load(values + i + step, mask=going, other=0.0) * weight, total)
        step += 1
        there = going & (i + step < k)
        going = there & (tl.load(indices + i + step, mask=there, other=-1) == at)
    tl.store(out + at, total, mask=first)


def sparse_accumulate(out: Tensor, indices: Tensor, values: Tensor, weight: float = 1.0) -> None:
    k = indices.numel()
    run(_accumulate, -(-k // _BLOCK), out, indices, values, k, float(weight), on=out, WIDTH=_BLOCK)


def sparse_sum(out: Tensor, parts: Sequence[tuple[Tensor, Tensor]], weight: float = 1.0) -> None:
    out.zero_()
    for indices, values in parts:
        sparse_accumulate(out, indices, values, weight)
