"""Estimate the seconds that a byte of each layer takes (sections 4 and 5.5 of the L-GreCo paper).

The exchange of gradients overlaps with backward. So a byte of a bucket that is ready early may cost no time, while a
byte of the last bucket costs its whole transfer time. The costs are estimated from measured durations of exchanges
under different choices, by a linear regression on the bytes of every bucket.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["Times", "bucket_priority", "fit_times"]


@dataclass(frozen=True)
class Times:
    """Result of the regression, and its samples.

    Attributes:
        seconds_per_byte: layer → seconds per byte of the layer's bucket.
        fixed_s: seconds of an exchange that do not depend on bytes.
        r2: the share of the durations' variance that bytes explain; near 1 is a good fit. With few samples it is too
            optimistic: see ``r2_held_out``.
        nbytes: for each sample, the bytes of each bucket.
        seconds: for each sample, the duration of the exchange.
        foretold_s: for each sample, the duration predicted by the fit of all other samples; empty if these are too few
            for a fit.
    """

    seconds_per_byte: dict[str, float]
    fixed_s: float
    r2: float
    nbytes: tuple[tuple[float, ...], ...] = field(default=(), repr=False)
    seconds: tuple[float, ...] = field(default=(), repr=False)
    foretold_s: tuple[float, ...] = field(default=(), repr=False)

    @property
    def r2_held_out(self) -> float | None:
        """Leave-one-out r²: each duration is predicted by the fit of all others.

        It may be below 0. None if there are too few samples.
        """
        return _explained(np.array(self.seconds), np.array(self.foretold_s)) if self.foretold_s else None


def bucket_priority(buckets: Sequence[Sequence[str]]) -> dict[str, float]:
    """Return weights 1, 2, 3 … for the layers of the first, second, third … bucket that is sent (appendix A).

    Example:
        >>> bucket_priority([["head.weight"], ["body.weight"]])
        {'head.weight': 1.0, 'body.weight': 2.0}
    """
    return {name: float(place) for place, names in enumerate(buckets, 1) for name in names}


def fit_times(buckets: Sequence[Sequence[str]], nbytes: ArrayLike, seconds: ArrayLike) -> Times:
    """Fit seconds = fixed + Σ over buckets of bytes · seconds per byte, with non-negative coefficients.

    Args:
        buckets: the layers of each of the B buckets.
        nbytes: (S, B), the bytes of each bucket in each of S samples.
        seconds: (S,), the duration of each exchange.

    Raises:
        ValueError: shapes do not match, or there are fewer samples than the B + 1 coefficients.

    Example:
        >>> times = fit_times([["a"], ["b"]], [[1e6, 1e6], [2e6, 1e6], [1e6, 3e6]], [0.3, 0.4, 0.7])
        >>> {layer: round(seconds, 9) for layer, seconds in times.seconds_per_byte.items()}
        {'a': 1e-07, 'b': 2e-07}
    """
    x, y = np.asarray(nbytes, dtype=np.float64), np.asarray(seconds, dtype=np.float64)
    if x.shape != (len(y), len(buckets)):
        raise ValueError(f"nbytes {x.shape} must be (samples, buckets), here ({len(y)}, {len(buckets)})")
    if len(y) < len(buckets) + 1:
        raise ValueError(f"{len(y)} samples are too few for {len(buckets)} buckets; take at least {len(buckets) + 1}")
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
    """Return the share of the variance of ``y`` that is explained by the prediction."""
    variance = float(((y - y.mean()) ** 2).sum())
    return 1.0 - float(((y - foretold) ** 2).sum()) / variance if variance else 1.0


def _nonnegative(a: NDArray[np.float64], y: NDArray[np.float64]) -> NDArray[np.float64]:
    """Solve least squares with non-negative coefficients, by Lawson and Hanson's active-set method."""
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
