"""Statistics of coded data parallelism: bytes sent, and seconds."""

from __future__ import annotations

from dataclasses import dataclass

from narrowband.stats import StepRecord

__all__ = ["CodedStepStats"]


@dataclass
class CodedStepStats(StepRecord):
    """Statistics of one step, or of several steps together.

    Attributes:
        raw_bytes: bytes of the model's gradient in float32, which a rank would send once without redundancy.
        sent_bytes: bytes handed to the transport: packets, headers, meetings and averages for a returning rank, each
            counted once, however many ranks need them.
        steps: number of steps.
        exchanges: number of exchanges of gradients. It exceeds ``steps`` if the unit did not fit contributions, or a
            rank was lost.
        encode_s: seconds spent rounding gradients and adding up slices.
        exchange_s: seconds spent in the transport, including the wait for other ranks.
        decode_s: seconds spent decoding packets.
    """

    steps: int = 0
    exchanges: int = 0
    encode_s: float = 0.0
    exchange_s: float = 0.0
    decode_s: float = 0.0
