"""What compression sent, saved, cost and lost."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

__all__ = ["Stats", "StepStats"]


@dataclass
class StepStats:
    """One step, or the sum of several.

    Attributes:
        steps: how many steps.
        raw_bytes: what this rank would have sent uncompressed: 2·(N−1)/N of its gradients' bytes, as a ring
            all-reduce does.
        sent_bytes: what it sent: payloads, trailers, and what travelled dense; without the headers of the network.
        encode_s: seconds in encoding, on the engine's thread.
        wire_s: seconds from issuing a collective to its arrival, summed over collectives; most of it passes during
            backward.
        decode_s: seconds in decoding and feedback, on the engine's thread.
        waiting_s: seconds between the end of backward's own work and the last average: what compression costs you.
        exchange_s: seconds between the first bucket and the last average.
        decide_s: seconds in which a policy decided, or was waited for.
        skipped: steps in which a compressed gradient was inf or NaN on some rank. They changed no residual.
        relative_error: ``‖p − C(p)‖² / ‖p‖²`` over all compressed gradients p (with feedback: what was owed
            included), of the latest step that measured it (the first, and every 50th); None before.
    """

    steps: int = 0
    raw_bytes: int = 0
    sent_bytes: int = 0
    encode_s: float = 0.0
    wire_s: float = 0.0
    decode_s: float = 0.0
    waiting_s: float = 0.0
    exchange_s: float = 0.0
    decide_s: float = 0.0
    skipped: int = 0
    relative_error: float | None = None

    @property
    def ratio(self) -> float:
        """How many times less is sent: raw / sent. 1.0 where nothing would be sent anyway: one rank, or no step yet."""
        return self.raw_bytes / self.sent_bytes if self.sent_bytes else 1.0

    def add(self, step: StepStats) -> None:
        """Add a step to a sum; the relative error is the latest, not a sum."""
        for f in fields(self):
            if f.name != "relative_error":
                setattr(self, f.name, getattr(self, f.name) + getattr(step, f.name))
        if step.relative_error is not None:
            self.relative_error = step.relative_error

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ``ratio`` included, for JSON."""
        return {**{f.name: getattr(self, f.name) for f in fields(self)}, "ratio": self.ratio}


@dataclass(frozen=True)
class Stats:
    """Totals since the start (or since the state was loaded), and the last step."""

    total: StepStats
    last: StepStats
