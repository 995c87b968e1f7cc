"""What a forward pass saved for backward: bytes by operator and by module, with and without compression."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from narrowband.stats import StepRecord

__all__ = ["Saved", "SavedBytes", "SavedStats"]


@dataclass
class SavedBytes:
    """Bytes that backward needs.

    Attributes:
        raw_bytes: without compression: the memory of every saved tensor, counted once.
        kept_bytes: with compression.
        seconds: that packing took so far, and unpacking, once backward has run. On CUDA, of launching it. No two runs
            agree in them, so comparisons leave them out.
        outliers: tensors that the policy would have in few bits, and that are kept as they are, since inf, NaN or an
            outlier is in them, or an extreme one was in a tensor before them; see
            :mod:`narrowband.kernels.outliers`.
    """

    raw_bytes: int = 0
    kept_bytes: int = 0
    seconds: float = field(default=0.0, compare=False)
    outliers: int = 0

    @property
    def ratio(self) -> float:
        """How many times fewer bytes: raw / kept. 1 where nothing was saved; infinite where all is computed again."""
        return self.raw_bytes / self.kept_bytes if self.kept_bytes else 1.0 if not self.raw_bytes else math.inf

    def add(self, raw_bytes: int, kept_bytes: int, outliers: int = 0) -> None:
        """Count bytes, and tensors with outliers."""
        self.raw_bytes += raw_bytes
        self.kept_bytes += kept_bytes
        self.outliers += outliers


@dataclass
class Saved:
    """What one forward pass saved for backward.

    Attributes:
        by_operator: operator → bytes; see :data:`~narrowband.activations.policy.OPERATORS`.
        by_module: module → bytes that it saved itself. "" is the model; "(outside)" counts what no module saved.
    """

    by_operator: dict[str, SavedBytes] = field(default_factory=dict)
    by_module: dict[str, SavedBytes] = field(default_factory=dict)

    @property
    def raw_bytes(self) -> int:
        """Without compression."""
        return sum(saved.raw_bytes for saved in self.by_operator.values())

    @property
    def kept_bytes(self) -> int:
        """With compression."""
        return sum(saved.kept_bytes for saved in self.by_operator.values())

    @property
    def ratio(self) -> float:
        """How many times fewer bytes: raw / kept."""
        return SavedBytes(self.raw_bytes, self.kept_bytes).ratio

    @property
    def outliers(self) -> int:
        """Tensors that are kept as they are because inf, NaN or an outlier is in them, or was in one before."""
        return sum(saved.outliers for saved in self.by_operator.values())

    def add(self, operator: str, module: str, raw_bytes: int, kept_bytes: int, outliers: int = 0) -> None:
        """Count bytes, and tensors with outliers."""
        for saved in self.tallies(operator, module):
            saved.add(raw_bytes, kept_bytes, outliers)

    def tallies(self, operator: str, module: str) -> tuple[SavedBytes, SavedBytes]:
        """Of an operator, and of a module."""
        return (
            self.by_operator.setdefault(operator, SavedBytes()),
            self.by_module.setdefault(module, SavedBytes()),
        )


@dataclass
class SavedStats(StepRecord):
    """What one run through the context saved for backward, or the sum of several; as other places count what they sent.

    Attributes:
        raw_bytes: without compression.
        sent_bytes: what was kept.
        steps: how many runs.
        outliers: as :class:`Saved` has them.
    """

    steps: int = 0
    outliers: int = 0
