"""How far gradients are from the exact ones: the figures of :mod:`reproduce.fidelity`, and their arithmetic.

With g the exact gradient of a batch and ĝ the one to compare, these figures are shares of √E‖g‖², over batches:

* the *error*, √E‖ĝ − g‖², of a single step;
* the *bias*, √E‖E[ĝ − g]‖², with the inner mean over roundings: what would remain of a batch's error if rounding were
  repeated forever and averaged. Rounding to the nearest gives the same result every time: all of its error is bias;
* what remains *over batches*, ‖E[ĝ − g]‖, with the mean over batches and roundings: what training does not average out.

The last two are squared norms of means, estimated from only m samples. The squared norm of the sample mean would
include the mean's noise. The mean inner product of two different samples does not, so it is used here. It is still
uncertain where few elements carry most of an error, and it hardly tells a small bias from none.

The yardstick is another batch: √E‖g − g′‖² for two batches. Half of its square is the noise variance σ² that every
gradient has. An error adds to the variance as a smaller batch would: the variance is inverse to the batch size.

Two rows are compared batch by batch, since every row has the same batches. The comparison is of squares, whose roots
the figures are. The margin is half of the 95 % interval of the mean difference (Student's t over batches,
:mod:`reproduce.pairs`). Error and bias are means over batches, and so have a value per batch. What remains over batches
has none; its jackknife pseudo-values are used instead (Tukey 1958, "Bias and confidence in not-quite large samples",
Annals of Mathematical Statistics 29, 614): m·θ − (m − 1)·θ₋ᵢ, with θ of all m batches and θ₋ᵢ of all but the i-th. A
claim about a difference within the margin is not resolved.

Shapes: B batches, R roundings, N elements of a gradient, P parameters.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

__all__ = [
    "BETWEEN",
    "FIGURES",
    "KINDS",
    "MIXED",
    "Fidelity",
    "between_batches",
    "deviation",
    "of_blocks",
    "places_of",
    "shares",
    "spread",
]

#: Names of rows: the yardstick, and bfloat16 autocast with nothing compressed.
BETWEEN, MIXED = "another batch", "bf16"

#: Fields of :class:`Fidelity` that are figures.
FIGURES = ("error", "bias", "over_batches")


@dataclass(frozen=True)
class Fidelity:
    """Errors of gradients with one policy; or, as the yardstick, the difference to another batch's gradient.

    Errors are shares of the gradient's norm, for each place: "all"; kinds of layers ("embed", "qkv", …); "block 1" and
    so on; "behind", which is all after the blocks; and every parameter. An error is None where the exact gradient is
    zero.

    Attributes:
        task: gives the model.
        name: name of the row.
        bits: bits of the policy. This and the policy's other fields are None for the yardstick.
        norms: bits of layer norms, where they differ from ``bits``.
        granularity: what has a range of its own.
        rounding: rounding of the policy.
        plain_bytes: bytes that backward keeps of a batch without the policy.
        kept_bytes: bytes that it keeps with the policy.
        added: variance of the error, as a share of the variance between batches.
        error: error of a single gradient.
        bias: error of a batch's mean over roundings.
        over_batches: error of the mean over batches and roundings.
        amp: whether forward runs under bfloat16 autocast.
        per_batch: for each of these three figures, of the whole gradient, a value per batch; the mean of the values is
            the square of the figure. Empty for the yardstick.
    """

    task: str
    name: str
    bits: int | None
    norms: int | None
    granularity: str | None
    rounding: str | None
    plain_bytes: int | None
    kept_bytes: int | None
    added: float | None
    error: dict[str, float | None]
    bias: dict[str, float | None]
    over_batches: dict[str, float | None]
    amp: bool = False
    per_batch: dict[str, list[float]] = field(default_factory=dict)


# ---- arithmetic ------------------------------------------------------------------------------------------------------


def deviation(exact_BN: Tensor, rough_BRN: Tensor, sizes: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the squared norms of the errors of rough gradients, of each parameter, float64 (P,) each: of a single
    gradient, of a batch's mean over roundings, and of the mean over roundings and batches.

    The last two are unbiased estimates, and may be slightly negative. With one rounding there is no mean to take, and
    the second equals the first.

    Args:
        exact_BN: the exact gradient of each batch.
        rough_BRN: rough gradients of the same batches, one per rounding.
        sizes: number of elements of each parameter.

    Example:
        >>> exact = torch.zeros(2, 1)
        >>> rough = torch.tensor([[[3.0], [1.0]], [[3.0], [1.0]]])
        >>> [float(each) for each in deviation(exact, rough, [1])]
        [5.0, 3.0, 4.0]
    """
    missed_BRN = rough_BRN - exact_BN[:, None]
    single = torch.stack([_squares(missed_RN, sizes).mean(0) for missed_RN in missed_BRN]).mean(0)
    bias = torch.stack([_square_of_mean(missed_RN, sizes) for missed_RN in missed_BRN]).mean(0)
    return single, bias, _square_of_mean(missed_BRN.mean(1), sizes)


def spread(exact_BN: Tensor, rough_BRN: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return what :func:`deviation` measures, of the whole gradient and batch by batch, float64 (B,) each.

    The third figure has no value per batch; the jackknife's pseudo-values take its place.

    Args:
        exact_BN: the exact gradient of each batch.
        rough_BRN: rough gradients of the same batches, one per rounding.

    Example:
        >>> exact = torch.zeros(3, 1)
        >>> rough = torch.tensor([[[3.0], [1.0]], [[3.0], [1.0]], [[2.0], [2.0]]])
        >>> [each.tolist() for each in spread(exact, rough)]
        [[5.0, 5.0, 4.0], [3.0, 3.0, 4.0], [4.0, 4.0, 4.0]]
    """
    missed_BRN = rough_BRN - exact_BN[:, None]
    sizes = [missed_BRN.shape[-1]]
    single = torch.stack([_squares(missed_RN, sizes).mean() for missed_RN in missed_BRN])
    bias = torch.stack([_square_of_mean(missed_RN, sizes).sum() for missed_RN in missed_BRN])
    means_BN = missed_BRN.mean(1)
    whole, count = _square_of_mean(means_BN, sizes).sum(), len(means_BN)
    without = [_square_of_mean(torch.cat((means_BN[:at], means_BN[at + 1 :])), sizes).sum() for at in range(count)]
    return single, bias, count * whole - (count - 1) * torch.stack(without)


def between_batches(exact_BN: Tensor, sizes: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return E‖g‖² and, for two different batches, E‖g − g′‖², of each parameter."""
    norms = _squares(exact_BN, sizes).mean(0)
    return norms, 2 * (norms - _square_of_mean(exact_BN, sizes))


def _square_of_mean(x_MN: Tensor, sizes: Sequence[int]) -> Tensor:
    """Estimate ‖E x‖² of each parameter from m samples, as the mean inner product of two different samples."""
    count = len(x_MN)
    own = _squares(x_MN, sizes).sum(0)
    if count == 1:
        return own
    return (_squares(x_MN.double().sum(0, keepdim=True), sizes)[0] - own) / (count * (count - 1))


def _squares(x_MN: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return the squared norm of each parameter in each sample, float64 (M, P)."""
    return torch.stack([part.double().square().sum(1) for part in torch.split(x_MN, list(sizes), 1)], 1)


def shares(squares_P: Tensor, of_P: Tensor, places: dict[str, list[int]]) -> dict[str, float | None]:
    """Return √(squares / of) for each place, summed over the place's parameters."""
    found: dict[str, float | None] = {}
    for place, own in places.items():
        square, of = (max(0.0, float(each[own].sum())) for each in (squares_P, of_P))
        found[place] = math.sqrt(square / of) if of else None
    return found


# ---- places ----------------------------------------------------------------------------------------------------------

#: Kinds of layers, by their names in the models. "embed" is all before the blocks; "norm" includes "norm1" and "norm2".
KINDS = ("embed", "norm", "qkv", "proj", "up", "down", "head")
_EMBEDDINGS = ("tokens", "token", "positions", "patches")


def places_of(names: Sequence[str]) -> dict[str, list[int]]:
    """Return place → indices of its parameters."""
    found: dict[str, list[int]] = {"all": list(range(len(names)))}
    for at, name in enumerate(names):
        module = name.removesuffix(".weight").removesuffix(".bias")
        own = module.rpartition(".")[2].rstrip("12")
        kind = "embed" if own in _EMBEDDINGS else own
        block = f"block {int(module.split('.')[1]) + 1}" if module.startswith("blocks.") else "behind"
        for place in dict.fromkeys((kind, "embed" if kind == "embed" else block, name)):
            found.setdefault(place, []).append(at)
    return found


def of_blocks(found: Iterable[str]) -> list[str]:
    """Return the places that are blocks, in the model's order, with what comes before and behind them."""
    return ["embed", *(place for place in found if place.startswith("block ")), "behind"]
