"""Momentum correction (DGC): a momentum step and the selection of the largest elements in one pass."""

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

    A running sum of velocities is kept as its last two states, ``now`` and ``before``; their difference is the
    velocity. So the step can be undone without loss: ::

        (x, before) ← (before, now + (momentum · (now − before) + scale · x))

    Afterwards ``before`` is the newest sum, ``now`` the one before that, and ``x`` holds the oldest. The corrected sum
    is the newest sum; with ``nesterov`` it is newest + momentum · (newest − now).

    Args:
        threshold: a guess: a magnitude that slightly more than k elements may reach, as the last call returned it, or
            0. It only saves time, and changes no result.
        sampled: select by a threshold from a sample of the corrected sum, as :func:`select_topk` does. If fewer than k
            elements reach it, only those are returned, without a second pass.
        seed: the seed of that sample.

    Returns:
        (whether the corrected sum is finite, the k sorted indices, the corrected sum at these, the threshold for the
        next call). If the sum is not finite, indices and values are empty.
    """
    options = {"momentum": momentum, "nesterov": nesterov, "scale": scale, "threshold": threshold}
    result = backend_of(x).momentum_topk(x, now, before, k, **options, sampled=sampled, seed=seed)
    return cast("tuple[bool, Tensor, Tensor, float]", result)


def forget(
    now: Tensor, before: Tensor, indices: Tensor, *, momentum: float, nesterov: bool = False, masking: bool = True
) -> Tensor:
    """Set the corrected sum to zero at the indices, after :func:`momentum_topk`; with ``masking`` the velocity, too.

    Returns the old values of ``now`` at the indices. Writing them back, and overwriting ``before`` with ``x``, undoes
    both calls to the bit.
    """
    old = backend_of(now).forget(now, before, indices, momentum=momentum, nesterov=nesterov, masking=masking)
    return cast("Tensor", old)
