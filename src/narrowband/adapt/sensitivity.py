"""How sensitive layers are, by the loss (section 5.4 of the L-GreCo paper): slow, and good to check errors by."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["correlation", "loss_table"]


def loss_table(
    train: Callable[[Mapping[str, str]], float], layers: Sequence[str], choices: Sequence[str]
) -> NDArray[np.float64]:
    """What compressing one layer alone does to the loss of a short run: (layers, choices), in units of the loss.

    Differences have signs, because a loss may fall by chance. As a metric take their magnitudes: what falls is a change
    like any other, and a budget of signed differences would have it for free. Have losses in float64: in float32 one
    that is 2.5 has steps of 2·10⁻⁷, which is more than some choices do.

    Args:
        train: does one short run, always from the same checkpoint with the same data, compressing the given layers
            (name → spec) and no others; returns its loss.
        layers: names.
        choices: specs.

    Example:
        >>> loss_table(lambda specs: 0.5 * len(specs), ["w"], ["sign+ef"])
        array([[0.5]])
    """
    plain = train({})
    return np.array([[train({layer: choice}) - plain for choice in choices] for layer in layers])


def correlation(one: ArrayLike, other: ArrayLike) -> tuple[float, float]:
    """Pearson's correlation of two tables, and that of their ranks (Spearman's).

    Raises:
        ValueError: tables of different shapes, or one that is constant.
    """
    a, b = (np.asarray(x, dtype=np.float64).ravel() for x in (one, other))
    if a.shape != b.shape or not (np.ptp(a) > 0 and np.ptp(b) > 0):
        raise ValueError("correlation is between two tables of one shape, neither of them constant")
    return float(np.corrcoef(a, b)[0, 1]), float(np.corrcoef(_ranks(a), _ranks(b))[0, 1])


def _ranks(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Ranks from 0 on; ties share the mean of theirs."""
    _, inverse, counts = np.unique(x, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts + 1) / 2)[inverse]
