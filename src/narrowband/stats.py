"""Statistics: what was sent, and what would have been sent without compression; in every place of the same shape.

A place derives its record of one step from :class:`StepRecord`, and returns ``Stats(total, last)`` of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Generic, TypeVar

__all__ = ["Stats", "StepRecord", "latest"]


def latest(*, compare: bool = True) -> Any:
    """A field that cannot be summed: of several steps, the latest value that is not None. None at first.

    Args:
        compare: whether two records are equal only if this field is.
    """
    return field(default=None, compare=compare, metadata={"latest": True})


@dataclass
class StepRecord:
    """One step, or the sum of several. A place adds fields of its own, all of which have defaults.

    Fields are numbers, which :meth:`add` sums up, or are declared with :func:`latest`.

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
        """How many times fewer bytes: raw / sent. 1.0 where nothing was sent; never NaN or infinite."""
        return self.raw_bytes / self.sent_bytes if self.sent_bytes else 1.0

    def add(self, step: StepRecord) -> None:
        """Add a step, which is of this record's class, to a sum."""
        for f in fields(self):
            value = getattr(step, f.name)
            if not f.metadata.get("latest"):
                setattr(self, f.name, getattr(self, f.name) + value)
            elif value is not None:
                setattr(self, f.name, value)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ``ratio`` included, for JSON."""
        return {**{f.name: getattr(self, f.name) for f in fields(self)}, "ratio": self.ratio}


Record = TypeVar("Record", bound=StepRecord)


@dataclass(frozen=True)
class Stats(Generic[Record]):
    """Totals since the start (or since the state was loaded), and the last step.

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
