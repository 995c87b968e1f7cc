"""Selection: the indices of the elements of largest magnitude, or of random ones.

**Selection** compares the bits of floats with the sign cleared, as integers: inf and NaN are the largest magnitudes.
Ties go to the lower index.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, cast

from narrowband.kernels.backends import backend_for, backend_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = [
    "OVERSAMPLE",
    "randomk_indices",
    "sample_rank",
    "sample_size",
    "select_threshold",
    "select_topk",
    "select_topk_all",
    "select_topk_rows",
]


#: The sampled threshold aims at this many survivors per element wanted (DGC's constant).
OVERSAMPLE = 1.3


def sample_size(n: int, k: int) -> int:
    """Return how many elements the sampled threshold looks at: enough to see about 128 of the k wanted.

    The relative error of the count of survivors is then about 1/√(1.3·128) = 8 %, well inside the 30 % of slack.
    """
    return min(n, max(1024, -(-128 * n // max(k, 1))))


def sample_rank(n: int, k: int, oversample: float = OVERSAMPLE) -> int:
    """Return which of the sample's s largest is the threshold: ceil(oversample·s·k / n), at most s."""
    size = sample_size(n, k)
    return min(size, math.ceil(oversample * size * k / n))


def select_topk(x: Tensor, k: int, *, sampled: bool = False, seed: int = 0) -> Tensor:
    """Return the sorted int32 indices of the k elements of largest magnitude.

    ``sampled=True`` is DGC's hierarchical selection: it takes a threshold from a sample of s elements (see
    :func:`sample_size`), chosen so that about 1.3·k elements should pass (see :func:`sample_rank`), and selects the k
    largest among those that pass. Sample i is at position ``lo + (hash(i, seed)·(hi − lo) >> 32)`` with lo = i·n // s,
    hi = (i+1)·n // s. If fewer than k pass, only those are returned; the exact variant would then look again.
    """
    return cast("Tensor", backend_of(x).select_topk(x, k, sampled=sampled, seed=seed))


def select_topk_all(xs: Sequence[Tensor], ks: Sequence[int]) -> list[Tensor]:
    """Apply :func:`select_topk`, exact, to several tensors, with no more GPU kernel launches than for one."""
    return cast("list[Tensor]", backend_of(xs[0]).select_topk_all(xs, ks)) if xs else []


def select_topk_rows(x: Tensor, k: int) -> Tensor:
    """Apply :func:`select_topk` to every row of a contiguous matrix (R, W), in one call.

    Returns R·k sorted int32 indices into the flat matrix.
    """
    return cast("Tensor", backend_of(x).select_topk_rows(x, k))


def select_threshold(x: Tensor, value: float) -> Tensor:
    """Return the sorted int32 indices of all elements with |x| ≥ value > 0 (NaN counts as large)."""
    return cast("Tensor", backend_of(x).select_threshold(x, value))


def randomk_indices(n: int, k: int, seed: int, device: Any = "cpu") -> Tensor:
    """Return k distinct sorted int32 indices below n, one from each of k equal strata.

    Index i is ``lo + (hash(i, seed)·(hi − lo) >> 32)`` with lo = i·n // k, hi = (i+1)·n // k.
    """
    import torch

    device = torch.device(device)
    return cast("Tensor", backend_for(device.type).randomk_indices(n, k, seed, device))
