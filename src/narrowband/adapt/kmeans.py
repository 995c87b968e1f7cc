"""CGX's heuristic: cluster layers by size and error, and compress large layers with small errors most.

Source: Markov et al., arXiv 2111.08617.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from narrowband.adapt.policy import Policy, as_choice, planned, search_space
from narrowband.adapt.tables import error_table
from narrowband.errors import UnsupportedError, pip_install
from narrowband.feedback import Compression, compression

if TYPE_CHECKING:
    from torch import Tensor

    from narrowband.adapt.plan import Plan
    from narrowband.adapt.traffic import Traffic

__all__ = ["KMeans"]


@dataclass
class KMeans(Policy):
    """Assigns choices to clusters of layers, by scikit-learn's k-means on (log of size, error of the reference).

    The error is not bounded. This is a baseline for L-GreCo.

    Args:
        reference: the spec whose errors are a coordinate of the clustering.
        choices: specs that clusters may get; by default those around the reference.
        clusters: number of clusters (6 in the L-GreCo paper's comparison).
        every: steps between decisions.
        warmup_steps: steps before the first decision, which are not compressed.
        seed: seed of k-means.

    Raises:
        ValueError: a spec or a number is not valid.
        UnsupportedError: scikit-learn is not installed.

    Example:
        >>> handle = nb.compress_gradients(model, nb.KMeans("powersgd:rank=4", every=100))
    """

    reference: str
    choices: Sequence[str] | None = None
    clusters: int = 6
    every: int = 500
    warmup_steps: int = 0
    seed: int = 0
    name: ClassVar[str] = "kmeans"

    def __post_init__(self) -> None:
        self._check_times()
        if self.clusters < 1:
            raise ValueError(f"kmeans: clusters={self.clusters} must be at least 1")
        try:
            import sklearn.cluster  # noqa: F401
        except ImportError:
            raise UnsupportedError(f"kmeans needs scikit-learn: {pip_install('adapt')}") from None
        self.specs()

    def specs(self) -> list[str]:
        found = search_space(self.start) if self.choices is None else [str(compression(c)) for c in self.choices]
        return list(dict.fromkeys([*found, str(as_choice(self.start))]))

    @property
    def start(self) -> Compression:
        return compression(self.reference)

    def decide(self, gradients: Mapping[str, Tensor], *, step: int, traffic: Traffic) -> Plan:
        from sklearn.cluster import KMeans as Clustering

        table = error_table(gradients, self.specs(), traffic=traffic)
        error = table.errors[:, table.column(as_choice(self.start))]
        points = np.stack([_unit(np.log([max(1, x.numel()) for x in gradients.values()])), _unit(error)], axis=1)
        clusters = min(self.clusters, len(np.unique(points, axis=0)))
        found = Clustering(clusters, n_init=10, random_state=self.seed).fit(points)
        # Rank 0 is the cluster to compress most: large layers with small errors.
        rank = np.empty(clusters, dtype=int)
        rank[np.argsort(found.cluster_centers_ @ np.array([-1.0, 1.0]), kind="stable")] = np.arange(clusters)
        by_size = np.argsort(table.sizes.sum(axis=0), kind="stable")
        spread = np.linspace(0, len(by_size) - 1, clusters).round().astype(int) if clusters > 1 else [len(by_size) // 2]
        chosen = [int(by_size[spread[rank[label]]]) for label in found.labels_]
        return planned(table, chosen, self, step=step, traffic=traffic, reference=as_choice(self.start), budget=None)


def _unit(values: Sequence[float] | np.ndarray) -> np.ndarray:
    """Return values shifted and scaled to [0, 1]."""
    x = np.asarray(values, dtype=np.float64)
    width = np.ptp(x)
    return (x - x.min()) / width if width else np.zeros_like(x)
