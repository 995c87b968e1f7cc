"""Momentum correction (DGC): a momentum step and the selection of the largest elements in one pass."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from narrowband.kernels.backends import backend_of

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
    """Apply :func:`momentum_topk`, exact, and :func:`forget` to several tensors, and write their payloads, with no more
    GPU kernel launches than for one.

    Args:
        xs, nows, befores: flat float32, not empty.
        ks: how many elements of each are selected, at least one.
        outs: where each payload is written: values in float32, indices in Elias–Fano form.
        values: if given, float32, one per tensor: the values are written there instead, and indices alone to ``outs``.

    Returns:
        (whether all is finite, or True while :class:`Findings` note that on the device; for each tensor: its indices;
        the old values of ``now`` there).
    """
    options = {"momentum": momentum, "nesterov": nesterov, "masking": masking, "values": values}
    result = backend_of(xs[0]).encode_momentum_topk_all(xs, nows, befores, ks, outs, **options)
    return cast("tuple[bool, list[Tensor], list[Tensor]]", result)


def remember_all_if(bad: Tensor, nows: Sequence[Tensor], indices: Sequence[Tensor], olds: Sequence[Tensor]) -> None:
    """Write old values back that :func:`forget` returned, for several tensors, if ``bad`` is not zero.

    Args:
        bad: one int32 on the tensors' device; the host does not wait for it.
        nows: the sums.
        indices: int32, ascending, where values are written in each.
        olds: float32, the values.
    """
    if nows:
        backend_of(nows[0]).remember_all_if(bad, nows, indices, olds)
