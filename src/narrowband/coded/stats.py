"""What coded data parallelism sent, and the seconds that took."""

from __future__ import annotations

from dataclasses import dataclass

from narrowband.stats import StepRecord

__all__ = ["CodedStepStats"]


@dataclass
class CodedStepStats(StepRecord):
    """One step, or the sum of several.

    Attributes:
        raw_bytes: the model's gradient in float32, which a rank would send once without redundancy.
        sent_bytes: handed to the transport: packets and headers, each once however many ranks need it.
        steps: how many steps.
        exchanges: how often gradients were exchanged: more often than there were steps where the unit did not fit
            contributions, or a rank was lost.
        encode_s: seconds in rounding gradients and adding slices up.
        exchange_s: seconds in the transport, waiting for other ranks included.
        decode_s: seconds in taking packets apart.
    """

    steps: int = 0
    exchanges: int = 0
    encode_s: float = 0.0
    exchange_s: float = 0.0
    decode_s: float = 0.0
