"""Selection in plain torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from narrowband.kernels.reference.common import magnitude_bits, strata
from narrowband.kernels.selection import sample_rank, sample_size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


__all__ = [
    "randomk_indices",
    "select_threshold",
    "select_topk",
    "select_topk_all",
    "select_topk_rows",
]


def _kth_largest(magnitudes: Tensor, k: int) -> Tensor:
    return torch.topk(magnitudes, k, sorted=False).values.amin()


def _indices(chosen: Tensor) -> Tensor:
    """Return the sorted int32 indices where a mask is set."""
    return chosen.nonzero().view(-1).to(torch.int32)


def _largest(magnitudes: Tensor, k: int) -> Tensor:
    """Return the sorted int32 indices of the k largest; ties go to the lower index."""
    if k == 0:
        return torch.empty(0, dtype=torch.int32, device=magnitudes.device)
    threshold = _kth_largest(magnitudes, k)
    above = _indices(magnitudes > threshold)
    ties = _indices(magnitudes == threshold)
    return torch.cat([above, ties[: k - above.numel()]]).sort().values


def select_topk(x: Tensor, k: int, *, sampled: bool = False, seed: int = 0) -> Tensor:
    n = x.numel()
    magnitudes = magnitude_bits(x)
    if sampled and 0 < k < n:
        sample = magnitudes[strata(n, sample_size(n, k), seed, x.device)]
        survivors = _indices(magnitudes >= _kth_largest(sample, sample_rank(n, k)))
        if survivors.numel() <= k:
            return survivors
        return survivors[_largest(magnitudes[survivors], k)]
    return _largest(magnitudes, k)


def select_topk_all(xs: Sequence[Tensor], ks: Sequence[int]) -> list[Tensor]:
    return [select_topk(x, k) for x, k in zip(xs, ks, strict=True)]


def select_topk_rows(x: Tensor, k: int) -> Tensor:
    rows, width = x.shape
    parts = [select_topk(x[r], k) + r * width for r in range(rows)]
    return torch.cat(parts).to(torch.int32) if parts else torch.empty(0, dtype=torch.int32, device=x.device)


def select_threshold(x: Tensor, value: float) -> Tensor:
    least = torch.tensor(value, dtype=torch.float32, device="cpu").view(torch.int32).item()
    return _indices(magnitude_bits(x) >= least)


def randomk_indices(n: int, k: int, seed: int, device: torch.device) -> Tensor:
    return strata(n, k, seed, device).to(torch.int32)
