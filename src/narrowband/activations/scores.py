"""Attention whose scores are too large for few bits.

Fused attention keeps the logarithm of each row's sum of exponentials, and backward computes the probabilities again:
exp(score − logarithm). An error of a score is then a factor of a probability. In independent roundings, whose variance
is step² / 12, that error has over a head's d features a variance of

    scale² · d / 12 · (step_q² · mean(k²) + step_k² · mean(q²)).

Where its root is a half, gradients are off by about as much as they are long; from there on the error grows as the
exponential does. Probabilities are nearly 0 or 1 then, and gradients of scores are small differences of what values
and results say. So all that such a call saves has more bits, or is kept as it is.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from narrowband.activations.packed import ahead, by_chance

if TYPE_CHECKING:
    from narrowband.activations.calls import Call
    from narrowband.activations.ranges import Estimates

__all__ = ["bits_of_scores", "score_error"]

#: Of a score's error, from which on what a call saves is kept.
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


def bits_of_scores(call: Call, bits: Literal[8, 4, 2], estimates: Estimates, name: str) -> Literal[8, 4, 2, 0]:
    """Of what a call of fused attention saves: as many as asked for if that is enough for its queries and keys, or else
    8, or else 0, for which all is kept as it is.

    That is looked at in the first pass, and then in one call of 64, and in every call while all is kept. On a GPU the
    host waits for the answer in the first pass, and while all is kept.

    Args:
        call: of ``F.scaled_dot_product_attention``.
        bits: of codes, as asked for.
        estimates: of the model. What was seen last is among them, so that a resumed run looks when this one does.
        name: of what was seen.
    """
    query, key = _argument(call, 0, "query"), _argument(call, 1, "key")
    arrived = estimates.notes.read(name)
    if arrived:
        estimates.see(name, arrived)
    seen = estimates.seen(name)
    if seen is None or seen > _LIMIT or by_chance(estimates.draws):
        error = score_error(query, key, _argument(call, 6, "scale"))
        if seen is not None and seen <= _LIMIT and ahead(query.device):
            estimates.notes.place(name, query.device).copy_(error.view(1))
        else:
            seen = float(error)
            estimates.see(name, seen)
    if seen <= _LIMIT * ((1 << bits) - 1) / _LEVELS:
        return bits
    return 8 if seen <= _LIMIT else 0  # also where it is NaN


def _argument(call: Call, at: int, name: str) -> Any:
    return call.args[at] if len(call.args) > at else call.kwargs.get(name)
