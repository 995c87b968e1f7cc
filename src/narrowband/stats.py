"""Statistics: bytes sent, and bytes that would have been sent without compression.

Every place that compresses (gradients, activations, …) derives the record of one step from :class:`StepRecord`, and
returns ``Stats(total, last)`` of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Generic, TypeVar

__all__ = ["Stats", "StepRecord", "latest"]


def latest(*, compare: bool = True) -> Any:
    """Declare a field that cannot be summed. Over several steps it keeps the latest value that is not None; at first it
    is None.

    Args:
        compare: whether ``==`` of two records compares this field.
    """
    return field(default=None, compare=compare, metadata={"latest": True})


@dataclass
class StepRecord:
    """One step, or the sum of several. A derived class adds fields of its own, all with defaults.

    Fields are numbers, which :meth:`add` sums, or are declared with :func:`latest`.

    Attributes:
        raw_bytes: what would have been sent (or kept) without compression.
        sent_bytes: what was sent (or kept).

    Example:
        >>> total = StepRecord(raw_bytes=400, sent_bytes=50)
        >>> total.add(StepRecord(raw_bytes=400, sent_bytes=150))
        >>> total.ratio
        4.0
    """

    raw_bytes: int = 0
    sent_bytes: int = 0

    @property
    def ratio(self) -> float:
        """The compression ratio, raw / sent bytes. 1.0 if nothing was sent; never NaN or infinite."""
        return self.raw_bytes / self.sent_bytes if self.sent_bytes else 1.0

    def add(self, step: StepRecord) -> None:
        """Add a step's record, of the same class, to this sum."""
        for f in fields(self):
            value = getattr(step, f.name)
            if not f.metadata.get("latest"):
                setattr(self, f.name, getattr(self, f.name) + value)
            elif value is not None:
                setattr(self, f.name, value)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON, with ``ratio``."""
        return {**{f.name: getattr(self, f.name) for f in fields(self)}, "ratio": self.ratio}


Record = TypeVar("Record", bound=StepRecord)


@dataclass(frozen=True)
class Stats(Generic[Record]):
    """Totals since the start (or since a state was loaded), and the last step.

    Attributes:
        total: the sum of all steps.
        last: the last step alone.

    Example:
        >>> stats = handle.stats()
        >>> stats.total.sent_bytes <= stats.total.raw_bytes
        True
    """

    total: Record
    last: Record
