"""Seconds instead of bytes: what a byte of each layer takes (sections 4 and 5.5 of the L-GreCo paper).

The exchange of gradients overlaps with backward, so a byte of a bucket that is ready early may cost nothing, and one of
the last bucket all its time. How much is measured: exchanges under different choices, and a linear regression of
their durations on the bytes of every bucket.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["Times", "bucket_priority", "fit_times"]


@dataclass(frozen=True)
class Times:
    """What the regression found, and the samples that it is of.

    Attributes:
        seconds_per_byte: of each layer; that of its bucket.
        fixed_s: seconds of an exchange that do not depend on bytes.
        r2: the share of the durations' variance that bytes explain; near 1 is a good fit. Where there are few samples
            it is too good: see ``r2_held_out``.
        nbytes: of each sample, the bytes of each bucket.
        seconds: of each sample, how long the exchange took.
        foretold_s: of each sample, how long the fit of all others says; empty where these are too few for a fit.
    """

    seconds_per_byte: dict[str, float]
    fixed_s: float
    r2: float
    nbytes: tuple[tuple[float, ...], ...] = field(default=(), repr=False)
    seconds: tuple[float, ...] = field(default=(), repr=False)
    foretold_s: tuple[float, ...] = field(default=(), repr=False)

    @property
    def r2_held_out(self) -> float | None:
        """The share of the variance of durations that were not fit: each is foretold from all others. May be below 0;
        None where there are too few samples.
        """
        return _explained(np.array(self.seconds), np.array(self.foretold_s)) if self.foretold_s else None


def bucket_priority(buckets: Sequence[Sequence[str]]) -> dict[str, float]:
    """Weights 1, 2, 3 … for the layers of the first bucket to be sent, the second, the third … (appendix A).

    Example:
        >>> bucket_priority([["head.weight"], ["body.weight"]])
        {'head.weight': 1.0, 'body.weight': 2.0}
    """
    return {name: float(place) for place, names in enumerate(buckets, 1) for name in names}


def fit_times(buckets: Sequence[Sequence[str]], nbytes: ArrayLike, seconds: ArrayLike) -> Times:
    """Fit seconds = fixed + Σ over buckets of bytes · seconds per byte, none of these negative.

    Args:
        buckets: B, the layers of each.
        nbytes: (S, B), the bytes of each bucket in each sample.
        seconds: (S,), how long the exchange took.

    Raises:
        ValueError: shapes that do not match, or fewer samples than there are numbers to find.

    Example:
        >>> times = fit_times([["a"], ["b"]], [[1e6, 1e6], [2e6, 1e6], [1e6, 3e6]], [0.3, 0.4, 0.7])
        >>> {layer: round(seconds, 9) for layer, seconds in times.seconds_per_byte.items()}
        {'a': 1e-07, 'b': 2e-07}
    """
    x, y = np.asarray(nbytes, dtype=np.float64), np.asarray(seconds, dtype=np.float64)
    if x.shape != (len(y), len(buckets)):
        raise ValueError(f"nbytes {x.shape} must be (samples, buckets), here ({len(y)}, {len(buckets)})")
    if len(y) < len(buckets) + 1:
        raise ValueError(f"{len(y)} samples cannot tell {len(buckets)} buckets apart; take at least {len(buckets) + 1}")
    scale = np.maximum(x.max(axis=0), 1.0)
    a = np.column_stack([np.ones(len(y)), x / scale])
    found = _nonnegative(a, y)
    per_byte = found[1:] / scale
    samples = range(len(y)) if len(y) > a.shape[1] else ()
    return Times(
        {name: float(per_byte[at]) for at, names in enumerate(buckets) for name in names},
        float(found[0]),
        _explained(y, a @ found),
        tuple(map(tuple, x.tolist())),
        tuple(y.tolist()),
        tuple(float(a[out] @ _nonnegative(np.delete(a, out, axis=0), np.delete(y, out))) for out in samples),
    )


def _explained(y: NDArray[np.float64], foretold: NDArray[np.float64]) -> float:
    """The share of the variance of ``y`` that is foretold."""
    variance = float(((y - y.mean()) ** 2).sum())
    return 1.0 - float(((y - foretold) ** 2).sum()) / variance if variance else 1.0


def _nonnegative(a: NDArray[np.float64], y: NDArray[np.float64]) -> NDArray[np.float64]:
    """Least squares with coefficients from 0 on (Lawson and Hanson's active sets)."""
    n = a.shape[1]
    found, passive = np.zeros(n), np.zeros(n, dtype=bool)
    tolerance = 1e-10 * float(np.abs(a.T @ y).max(initial=0.0))
    for _ in range(3 * n):
        gain = a.T @ (y - a @ found)
        gain[passive] = -np.inf
        if passive.all() or gain.max() <= tolerance:
            break
        passive[gain.argmax()] = True
        while True:
            wanted = np.zeros(n)
            wanted[passive] = np.linalg.lstsq(a[:, passive], y, rcond=None)[0]
            below = passive & (wanted <= 0)
            if not below.any():
                found = wanted
                break
            step = (found[below] / (found[below] - wanted[below])).min()
            found = found + step * (wanted - found)
            passive &= found > tolerance * 1e-6
            found[~passive] = 0.0
    return found
