"""Momentum correction (DGC): a step of momentum and the selection of its largest elements in one pass."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from narrowband.kernels.backends import backend_of

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
    """One step of momentum correction, and the k largest elements of the corrected sum, in one pass.

    A running sum y of velocities is kept as two of its states, ``now`` and the one ``before``; their difference is the
    velocity. So nothing is lost when the step is undone: ::

        (x, before) ← (before, now + (momentum · (now − before) + scale · x))

    makes ``before`` the newest sum, ``now`` the one before that, and leaves the oldest in ``x``. The corrected sum is
    the newest sum; with ``nesterov`` it is newest + momentum · (newest − now).

    Args:
        threshold: a magnitude that a little more than k elements may reach, as the last call returned it, or 0. It says
            where to look first, and changes no result.
        sampled: choose by a threshold from a sample of the corrected sum, as :func:`select_topk` does; where less than
            k elements reach it, only those are returned, and no second look is taken.
        seed: of that sample.

    Returns:
        (whether the corrected sum is finite, the k sorted indices, its values there, the threshold for the next call).
        When not finite, indices and values are empty.
    """
    options = {"momentum": momentum, "nesterov": nesterov, "scale": scale, "threshold": threshold}
    result = backend_of(x).momentum_topk(x, now, before, k, **options, sampled=sampled, seed=seed)
    return cast("tuple[bool, Tensor, Tensor, float]", result)


def forget(
    now: Tensor, before: Tensor, indices: Tensor, *, momentum: float, nesterov: bool = False, masking: bool = True
) -> Tensor:
    """Set the corrected sum to zero at the indices, after :func:`momentum_topk`; with ``masking`` the velocity, too.

    Returns what ``now`` held there; written back, and ``before`` overwritten with ``x``, it undoes both calls to the
    bit.
    """
    old = backend_of(now).forget(now, before, indices, momentum=momentum, nesterov=nesterov, masking=masking)
    return cast("Tensor", old)
