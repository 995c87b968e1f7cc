"""What compression sent, saved, cost and lost."""

from __future__ import annotations

from dataclasses import dataclass

from narrowband.stats import StepRecord, latest

__all__ = ["LayerStats", "StepStats"]


@dataclass(frozen=True)
class LayerStats:
    """What becomes of one compressed parameter, on this rank.

    Attributes:
        spec: what it is compressed with from the next step on; or, while a warm-up or a pause lasts, after that.
        numel: its elements.
        raw_bytes: what a step would send for it uncompressed, by a ring all-reduce.
        sent_bytes: what this rank sent for it in the latest step, with its share of what messages have of their own,
            such as flags; 0 before the first.
        relative_error: as :class:`StepStats` has it, of this layer in the latest step that measured it; None before.
        residual_norm: ‖residual‖, of what this rank has not sent yet; None where there is none.

    Example:
        >>> for name, own in handle.layer_stats().items():
        ...     print(name, own.spec, own.sent_bytes)
    """

    spec: str
    numel: int
    raw_bytes: int
    sent_bytes: int
    relative_error: float | None
    residual_norm: float | None


@dataclass
class StepStats(StepRecord):
    """One step, or the sum of several.

    Attributes:
        steps: how many steps.
        raw_bytes: what this rank would have sent uncompressed: 2·(N−1)/N of its gradients' bytes, as a ring
            all-reduce does; of sparse ones N − 1 times their indices and values, which are gathered.
        sent_bytes: what this rank sent, payloads and uncompressed tensors; network headers are not counted.
        encode_s: seconds in encoding, on the engine's thread.
        wire_s: seconds from issuing a collective to its arrival, summed over collectives; most of it passes during
            backward.
        decode_s: seconds in decoding and feedback, on the engine's thread.
        waiting_s: seconds that the optimizer had to wait: from the end of backward's own work to the last average.
        exchange_s: seconds between the first bucket and the last average.
        decide_s: seconds that a policy took to decide; on rank 0 also those in which averages were added up for it.
        skipped: steps in which a compressed gradient was inf or NaN on some rank. They changed no residual. Their
            averages are not finite, so that a gradient scaler skips the step on all ranks. Not counted for ``none``,
            ``fp16`` and ``bf16`` without feedback, whose averages are not finite, either.
        relative_error: ``‖p − C(p)‖² / ‖p‖²`` over all compressed gradients p (with feedback: the residual
            included), of the latest step that measured it (the first, and every 50th); None before.
    """

    steps: int = 0
    encode_s: float = 0.0
    wire_s: float = 0.0
    decode_s: float = 0.0
    waiting_s: float = 0.0
    exchange_s: float = 0.0
    decide_s: float = 0.0
    skipped: int = 0
    relative_error: float | None = latest()
