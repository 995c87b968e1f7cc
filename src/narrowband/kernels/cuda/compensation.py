"""Sums and differences of whole tensors, and whether these are finite, in one pass each, in Triton.

Every program notes the largest magnitude that it has seen, as an integer; the largest of these says whether all are
finite.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import triton.language as tl

from narrowband.kernels.cuda.common import BLOCK, MAGNITUDE, all_below, kernel, run

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["all_finite", "compensate", "difference", "take_difference"]


@kernel
def _note(tops, v):
    tl.store(tops + tl.program_id(0), tl.max(v.to(tl.int32, bitcast=True) & MAGNITUDE, 0))


@kernel
def _look(x, tops, n, WIDTH: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    _note(tops, tl.load(x + i, mask=i < n, other=0.0))


@kernel
def _compensate(x, residual, tops, n, decay, WIDTH: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    old = tl.load(residual + i, mask=i < n, other=0.0)
    total = old * decay + tl.load(x + i, mask=i < n, other=0.0)
    tl.store(residual + i, total, mask=i < n)
    tl.store(x + i, old, mask=i < n)
    _note(tops, total)


@kernel
def _difference(x, base, out, tops, n, WIDTH: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    apart = tl.load(x + i, mask=i < n, other=0.0) - tl.load(base + i, mask=i < n, other=0.0)
    tl.store(out + i, apart, mask=i < n)
    _note(tops, apart)


@kernel
def _take_difference(x, base, tops, n, WIDTH: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    old = tl.load(base + i, mask=i < n, other=0.0)
    apart = tl.load(x + i, mask=i < n, other=0.0) - old
    tl.store(x + i, old, mask=i < n)
    tl.store(base + i, apart, mask=i < n)
    _note(tops, apart)


def _below(loop: Any, below: float, n: int, *arrays: Tensor, **scalars: float) -> bool:
    """Run a loop over n elements; whether all that it has noted is smaller in magnitude."""
    if not n:
        return True
    programs = -(-n // BLOCK)
    tops = torch.empty(programs, dtype=torch.int32, device=arrays[0].device)
    run(loop, programs, *arrays, tops, n, *scalars.values(), on=arrays[0], WIDTH=BLOCK)
    return all_below(tops, below)


def all_finite(x: Tensor, *, below: float = math.inf) -> bool:
    return _below(_look, below, x.numel(), x)


def compensate(x: Tensor, residual: Tensor, *, decay: float = 1.0, below: float = math.inf) -> bool:
    return _below(_compensate, below, x.numel(), x, residual, decay=float(decay))


def difference(x: Tensor, base: Tensor, out: Tensor, *, below: float = math.inf) -> bool:
    return _below(_difference, below, x.numel(), x, base, out)


def take_difference(x: Tensor, base: Tensor) -> bool:
    return _below(_take_difference, math.inf, x.numel(), x, base)
