"""Attention whose scores are too large for queries and keys in few bits.

Fused attention keeps the logarithm of each row's sum of exponentials, and backward computes the probabilities again:
exp(score − logarithm). An error of a score is then a factor of a probability. In independent roundings, whose variance
is step² / 12, that error has over a head's d features a variance of

    scale² · d / 12 · (step_q² · mean(k²) + step_k² · mean(q²)).

Where its root is a half, gradients are off by about as much as they are long; from there on the error grows as the
exponential does. So queries and keys of such a call are kept as they are.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from narrowband.activations.packed import ahead, by_chance

if TYPE_CHECKING:
    from narrowband.activations.calls import Call
    from narrowband.activations.ranges import Estimates

__all__ = ["is_value", "score_error", "scores_are_too_large"]

#: Of a score's error, from which on queries and keys are kept.
_LIMIT = 0.5
#: Levels between the extremes of a head that errors are noted for, whatever the bits.
_LEVELS = 255


@torch.no_grad()
def score_error(query: Tensor, key: Tensor, scale: float | None = None) -> Tensor:
    """The standard deviation of the error of a score, of the head that has the largest, if queries and keys are rounded
    to 256 levels between a head's extremes.

    Args:
        query: (…, heads, tokens, d), or (tokens, d).
        key: likewise; it may have fewer heads.
        scale: of scores; 1 / √d by default.

    Returns:
        Of shape (), float32, where the tensors are.

    Example:
        >>> q, k = torch.randn(2, 1, 3, 100, 64)
        >>> score_error(q, k).item() < 0.05 < score_error(8 * q, 8 * k).item()
        True
    """
    (q_step, q_square), (k_step, k_square) = _spread(query), _spread(key)
    if q_step.shape != k_step.shape:  # queries of several heads share a key
        q_step, q_square, k_step, k_square = (x.amax() for x in (q_step, q_square, k_step, k_square))
    d = query.shape[-1]
    variance = q_step.square() * k_square + k_step.square() * q_square
    return ((1 / math.sqrt(d) if scale is None else abs(scale)) * math.sqrt(d / 12)) * variance.sqrt().amax()


def _spread(x: Tensor) -> tuple[Tensor, Tensor]:
    """By heads: the distance of two levels, and the mean square."""
    dims = [dim for dim in range(x.dim()) if dim != x.dim() - 3]
    return (x.amax(dims) - x.amin(dims)).float() / _LEVELS, x.float().square().mean(dims)


def scores_are_too_large(call: Call, bits: int, estimates: Estimates, name: str) -> bool:
    """Whether queries and keys of a call of fused attention are to be kept as they are.

    That is looked at in the first pass, in one call of 64 of those where they are small, and in every call of those
    where they are not. On a GPU the host waits for the answer where they are large, and in the first pass.

    Args:
        call: of ``F.scaled_dot_product_attention``.
        bits: of codes.
        estimates: of the model. What was seen last is among them, so that a resumed run looks when this one does.
        name: of what was seen.
    """
    query, key = (_argument(call, at, name) for at, name in enumerate(("query", "key")))
    limit = _LIMIT * ((1 << bits) - 1) / _LEVELS
    arrived = estimates.notes.read(name)
    if arrived:
        estimates.see(name, arrived)
    seen = estimates.seen(name)
    if seen is not None and seen <= limit and not by_chance(estimates.draws):
        return False
    error = score_error(query, key, _argument(call, 6, "scale"))
    if seen is not None and seen <= limit and ahead(query.device):
        estimates.notes.place(name, query.device).copy_(error.view(1))
        return False
    seen = float(error)
    estimates.see(name, seen)
    return not seen <= limit  # where it is NaN, too


def is_value(x: Tensor, call: Call) -> bool:
    """Whether a saved tensor is what fused attention averages, and neither queries nor keys."""
    query, key, value = (_argument(call, at, name).data_ptr() for at, name in enumerate(("query", "key", "value")))
    return x.data_ptr() == value and value not in (query, key)


def _argument(call: Call, at: int, name: str) -> Any:
    return call.args[at] if len(call.args) > at else call.kwargs.get(name)
