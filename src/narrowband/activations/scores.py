"""Attention whose scores are too large for few bits.

Fused attention saves the logarithm of each row's sum of exponentials, and backward recomputes the probabilities as
exp(score − logarithm). So an error in a score becomes a factor of a probability. With independent rounding errors of
variance step² / 12, the error of a score over a head's d features has a variance of

    scale² · d / 12 · (step_q² · mean(k²) + step_k² · mean(q²)).

Where its root is one half, the error of gradients is about as long as the gradients; beyond that it grows
exponentially. A single token whose queries or keys are much larger than those of the others hardly shows in these
means, and its scores may have errors of any size. So with the largest mean square of one token instead of the mean over
all tokens, the root must not be above one. Probabilities are nearly 0 or 1 then, and gradients of scores are small
differences between terms of values and results. So all tensors that such a call saves get more bits, or are kept
unchanged.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from narrowband.activations.layout import Arrangement, neighbours
from narrowband.activations.packed import ahead, by_chance

if TYPE_CHECKING:
    from narrowband.activations.calls import Call
    from narrowband.activations.policy import ActivationPolicy
    from narrowband.activations.ranges import Estimates

__all__ = ["bits_of_scores", "score_error"]

#: The standard deviation of a score's error beyond which a call's tensors are kept unchanged.
_LIMIT = 0.5
#: How many times as large the error of a single token's scores may be.
_OF_ONE_TOKEN = 2
#: Steps between the extremes of a head. Errors are noted for so many, whatever the bits of the codes.
_LEVELS = 255


@torch.no_grad()
def score_error(
    query: Tensor, key: Tensor, scale: float | None = None, granularity: Literal["group", "layer"] | int = "group"
) -> Tensor:
    """Return the standard deviation of a score's error if queries and keys are rounded to 256 levels.

    The levels lie between the extremes of those elements that share a range. The result is that of the head with the
    largest error, or half of that of the token with the largest error, if this is more.

    Args:
        query: (…, heads, tokens, d), or (tokens, d).
        key: likewise; it may have fewer heads.
        scale: the factor of scores; 1 / √d by default.
        granularity: which elements share a range, as in a policy: those of a head, all, or so many neighbours.

    Returns:
        A tensor of shape (), float32, on the device of the inputs.

    Example:
        >>> q, k = torch.randn(2, 1, 3, 100, 64)
        >>> score_error(q, k).item() < 0.05 < score_error(8 * q, 8 * k).item()
        True
    """
    (q_step, q_square), (k_step, k_square) = _spread(query, granularity), _spread(key, granularity)
    if q_step.shape != k_step.shape:  # queries of several heads share a key
        q_step, q_square, k_step, k_square = (x.amax(-1, keepdim=True) for x in (q_step, q_square, k_step, k_square))
    d = query.shape[-1]
    variance = q_step * k_square + k_step * q_square
    return ((1 / math.sqrt(d) if scale is None else abs(scale)) * math.sqrt(d / 12)) * variance.sqrt().amax()


def _spread(x: Tensor, granularity: Literal["group", "layer"] | int) -> tuple[Tensor, Tensor]:
    """Return for each head the squares of the distance between two levels and of elements to reckon with, (2, heads).

    The first of the two are means over all tokens. The second are the largest of a token; squares of elements are
    divided so that the same limit applies.
    """
    dims = [dim for dim in range(x.dim()) if dim != x.dim() - 3]
    squares = x.float().square().mean(-1, keepdim=True)  # of each token
    both = torch.stack((squares.mean(dims), squares.amax(dims) / _OF_ONE_TOKEN**2))
    if isinstance(granularity, int):
        arrangement = Arrangement.of(x)
        lines_GM = neighbours(arrangement.flat(x.detach()), granularity)[0].view(-1, granularity)
        widths = (lines_GM.amax(1, keepdim=True) - lines_GM.amin(1, keepdim=True)).expand_as(lines_GM)
        steps = arrangement.unflat(widths.reshape(-1)[: x.numel()]).float() / _LEVELS
        return torch.stack((steps.square().mean(dims), steps.amax(dims).square())), both
    width = x.amax() - x.amin() if granularity == "layer" else x.amax(dims) - x.amin(dims)
    return (width.float() / _LEVELS).square().expand_as(both), both


def bits_of_scores(
    call: Call, bits: Literal[8, 4, 2], policy: ActivationPolicy, estimates: Estimates, name: str
) -> Literal[8, 4, 2, 0]:
    """Return how many bits to use for the tensors that a call of fused attention saves.

    The result is ``bits`` where that is precise enough for the call's queries and keys; else 8; else 0, which means:
    keep these tensors unchanged.

    The error is computed in the first pass, then in one of 64 calls, and in every call while tensors are kept
    unchanged. On a GPU the host waits for it in the first pass and while tensors are kept unchanged.

    Args:
        call: a call of ``F.scaled_dot_product_attention``.
        bits: the bits of codes that the policy asks for.
        policy: says which elements share a range.
        estimates: the model's estimates. They hold the last error, so that a resumed run checks the same calls.
        name: the name of the error in the estimates.
    """
    query, key = _argument(call, 0, "query"), _argument(call, 1, "key")
    arrived = estimates.notes.read(name)
    if arrived:
        estimates.see(name, arrived)
    seen = estimates.seen(name)
    if seen is None or seen > _LIMIT or by_chance(estimates.draws):
        error = score_error(query, key, _argument(call, 6, "scale"), policy.granularity)
        if seen is not None and seen <= _LIMIT and ahead(query):
            estimates.notes.place(name, query.device).copy_(error.view(1))
        else:
            seen = float(error)
            estimates.see(name, seen)
    if seen <= _LIMIT * ((1 << bits) - 1) / _LEVELS:
        return bits
    return 8 if seen <= _LIMIT else 0  # 0 also where the error is NaN


def _argument(call: Call, at: int, name: str) -> Any:
    return call.args[at] if len(call.args) > at else call.kwargs.get(name)
