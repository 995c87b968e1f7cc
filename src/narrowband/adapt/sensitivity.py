"""Measure how sensitive the loss is to each layer's compression (section 5.4 of the L-GreCo paper).

It is slow, and serves to check whether errors of encodings are a good metric.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["correlation", "loss_table"]


def loss_table(
    train: Callable[[Mapping[str, str]], float], layers: Sequence[str], choices: Sequence[str]
) -> NDArray[np.float64]:
    """Return how the loss of a short run changes when one layer alone is compressed: (layers, choices).

    Differences are signed, because a loss may fall by chance. As a metric, use their magnitudes: a fall is a change
    like any other, and in a budget of signed differences it would cost nothing. Compute losses in float64: in float32,
    a loss of 2.5 has steps of 2·10⁻⁷, which is more than the effect of some choices.

    Args:
        train: does one short run, always from the same checkpoint with the same data, compresses the given layers
            (name → spec) and no others, and returns the loss.
        layers: names of layers.
        choices: specs.

    Example:
        >>> loss_table(lambda specs: 0.5 * len(specs), ["w"], ["sign+ef"])
        array([[0.5]])
    """
    plain = train({})
    return np.array([[train({layer: choice}) - plain for choice in choices] for layer in layers])


def correlation(one: ArrayLike, other: ArrayLike) -> tuple[float, float]:
    """Return Pearson's and Spearman's (rank) correlation of two tables.

    Raises:
        ValueError: the tables have different shapes, or one is constant.
    """
    a, b = (np.asarray(x, dtype=np.float64).ravel() for x in (one, other))
    if a.shape != b.shape or not (np.ptp(a) > 0 and np.ptp(b) > 0):
        raise ValueError("correlation needs two tables of the same shape, neither of them constant")
    return float(np.corrcoef(a, b)[0, 1]), float(np.corrcoef(_ranks(a), _ranks(b))[0, 1])


def _ranks(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return ranks from 0 on; ties share their mean rank."""
    _, inverse, counts = np.unique(x, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts + 1) / 2)[inverse]
