"""How many bytes a forward pass saved for backward: by operator and module, with and without compression."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from narrowband.stats import StepRecord
from narrowband.units import counted, format_bytes

__all__ = ["Saved", "SavedBytes", "SavedStats"]


@dataclass
class SavedBytes:
    """Bytes that are kept for backward.

    Attributes:
        raw_bytes: bytes without compression: the memory of every saved tensor, counted once.
        kept_bytes: bytes with compression.
        seconds: time that packing took so far, and unpacking, once backward has run. On CUDA, the time to launch it.
            No two runs agree in it, so comparisons leave it out.
        outliers: tensors that the policy gives few bits, and that are kept unchanged since they hold inf, NaN or an
            outlier, or a tensor before them held an extreme one; see :mod:`narrowband.kernels.outliers`.
    """

    raw_bytes: int = 0
    kept_bytes: int = 0
    seconds: float = field(default=0.0, compare=False)
    outliers: int = 0

    @property
    def ratio(self) -> float:
        """How many times fewer bytes: raw / kept. 1 where nothing was saved; infinite where all is recomputed."""
        return self.raw_bytes / self.kept_bytes if self.kept_bytes else 1.0 if not self.raw_bytes else math.inf

    def add(self, raw_bytes: int, kept_bytes: int, outliers: int = 0) -> None:
        """Count bytes, and tensors with outliers."""
        self.raw_bytes += raw_bytes
        self.kept_bytes += kept_bytes
        self.outliers += outliers


@dataclass
class Saved:
    """What one forward pass saved for backward. ``print(saved)`` shows how much, by operator.

    Attributes:
        by_operator: operator → bytes; see :data:`~narrowband.activations.policy.OPERATORS`.
        by_module: module → bytes that it saved itself, without its submodules. "" is the model; "(outside)" counts
            tensors that were saved outside of all modules.
    """

    by_operator: dict[str, SavedBytes] = field(default_factory=dict)
    by_module: dict[str, SavedBytes] = field(default_factory=dict)

    def __str__(self) -> str:
        """One sentence: bytes kept of all, and of every operator."""
        parts = [
            f"{operator} {format_bytes(saved.kept_bytes)} of {format_bytes(saved.raw_bytes)}"
            for operator, saved in sorted(self.by_operator.items(), key=lambda item: -item[1].raw_bytes)
            if saved.raw_bytes or saved.kept_bytes
        ]
        exact = f"; {counted(self.outliers, 'tensor')} kept exactly because of outliers" if self.outliers else ""
        by_operator = f" ({', '.join(parts)})" if parts else ""
        kept, raw = format_bytes(self.kept_bytes), format_bytes(self.raw_bytes)
        return f"kept {kept} of {raw}{by_operator}{exact}"

    @property
    def raw_bytes(self) -> int:
        """Bytes without compression."""
        return sum(saved.raw_bytes for saved in self.by_operator.values())

    @property
    def kept_bytes(self) -> int:
        """Bytes with compression."""
        return sum(saved.kept_bytes for saved in self.by_operator.values())

    @property
    def ratio(self) -> float:
        """How many times fewer bytes: raw / kept."""
        return SavedBytes(self.raw_bytes, self.kept_bytes).ratio

    @property
    def outliers(self) -> int:
        """How many tensors are kept unchanged since they, or a tensor before them, hold inf, NaN or an outlier."""
        return sum(saved.outliers for saved in self.by_operator.values())

    def add(self, operator: str, module: str, raw_bytes: int, kept_bytes: int, outliers: int = 0) -> None:
        """Count bytes, and tensors with outliers."""
        for saved in self.tallies(operator, module):
            saved.add(raw_bytes, kept_bytes, outliers)

    def tallies(self, operator: str, module: str) -> tuple[SavedBytes, SavedBytes]:
        """Return the counts of an operator, and those of a module."""
        return (
            self.by_operator.setdefault(operator, SavedBytes()),
            self.by_module.setdefault(module, SavedBytes()),
        )


@dataclass
class SavedStats(StepRecord):
    """Bytes that one run through the context saved for backward, or the sum of several runs.

    The fields are named as in the records of communication.

    Attributes:
        raw_bytes: bytes without compression.
        sent_bytes: bytes that were kept.
        steps: the number of runs.
        outliers: as in :class:`Saved`.
    """

    steps: int = 0
    outliers: int = 0
