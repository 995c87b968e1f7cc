"""Selection: the indices of the elements of largest magnitude, or of random ones.

**Selection** compares magnitudes by the bits of the float with the sign cleared, as integers: inf and NaN are the
largest of all. Ties go to the lower index.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, cast

from narrowband.kernels.backends import backend_for, backend_of

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "OVERSAMPLE",
    "randomk_indices",
    "sample_rank",
    "sample_size",
    "select_threshold",
    "select_topk",
    "select_topk_rows",
]


#: How far the sampled threshold overshoots: it aims at this many survivors per element wanted (DGC's constant).
OVERSAMPLE = 1.3


def sample_size(n: int, k: int) -> int:
    """How many elements the sampled threshold looks at: enough to see about 128 of the k wanted.

    The relative error of the count of survivors is then about 1/√(1.3·128) = 8 %, well inside the 30 % of slack.
    """
    return min(n, max(1024, -(-128 * n // max(k, 1))))


def sample_rank(n: int, k: int, oversample: float = OVERSAMPLE) -> int:
    """Which of the sample's s largest is the threshold: ceil(oversample·s·k / n), at most s."""
    size = sample_size(n, k)
    return min(size, math.ceil(oversample * size * k / n))


def select_topk(x: Tensor, k: int, *, sampled: bool = False, seed: int = 0) -> Tensor:
    """Sorted int32 indices of the k elements of largest magnitude.

    ``sampled=True`` is DGC's hierarchical selection: a threshold from a sample (see :func:`sample_size`: position i of
    s is ``lo + (hash(i, seed)·(hi − lo) >> 32)`` with lo = i·n // s, hi = (i+1)·n // s) that about 1.3·k elements
    should pass (see :func:`sample_rank`), then the k largest among those that do. When fewer than k pass, only those
    are returned; the exact variant then looks again.
    """
    return cast("Tensor", backend_of(x).select_topk(x, k, sampled=sampled, seed=seed))


def select_topk_rows(x: Tensor, k: int) -> Tensor:
    """The k elements of largest magnitude in each row of a contiguous matrix (R, W): R·k sorted int32 indices into the
    flat matrix. What :func:`select_topk` finds in every row, in one call.
    """
    return cast("Tensor", backend_of(x).select_topk_rows(x, k))


def select_threshold(x: Tensor, value: float) -> Tensor:
    """Sorted int32 indices of all elements with |x| ≥ value > 0 (NaN counts as large)."""
    return cast("Tensor", backend_of(x).select_threshold(x, value))


def randomk_indices(n: int, k: int, seed: int, device: Any = "cpu") -> Tensor:
    """k distinct sorted int32 indices below n, one from each of k equal strata: ``lo + (hash(i, seed)·(hi − lo) >>
    32)`` with lo = i·n // k, hi = (i+1)·n // k.
    """
    import torch

    device = torch.device(device)
    return cast("Tensor", backend_for(device.type).randomk_indices(n, k, seed, device))
