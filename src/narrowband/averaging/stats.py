"""Statistics of averaging: bytes, seconds and relative errors, by step and by layer."""

from __future__ import annotations

from dataclasses import dataclass

from narrowband.stats import StepRecord, latest

__all__ = ["LayerStats", "StepStats"]


@dataclass(frozen=True)
class LayerStats:
    """Statistics of one compressed parameter on this rank.

    Attributes:
        spec: its spec from the next step on; during a warm-up or a pause, its spec after that.
        numel: how many elements it has.
        raw_bytes: bytes per step without compression, by a ring all-reduce.
        sent_bytes: bytes that this rank sent for it in the latest step, with its share of the messages' overhead, such
            as flags; 0 before the first step.
        relative_error: see :class:`StepStats`; of this layer, in the latest step that measured it. None before.
        residual_norm: ‖residual‖, the norm of what this rank has not sent yet; None without a residual.

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
        raw_bytes: bytes that this rank would have sent without compression: 2·(N−1)/N of its gradients' bytes, as a
            ring all-reduce does; for sparse gradients N − 1 times their indices and values, which are all-gathered.
        sent_bytes: bytes that this rank sent: payloads and uncompressed tensors, without network headers.
        encode_s: seconds spent encoding, on the engine's thread.
        wire_s: seconds from issuing a collective to its completion, summed over collectives. Most of this time overlaps
            with backward.
        decode_s: seconds spent decoding and in feedback, on the engine's thread.
        waiting_s: seconds that the optimizer had to wait: from the end of backward's own work to the last average.
        exchange_s: seconds between the first bucket and the last average.
        decide_s: seconds that a policy took to decide; on rank 0 with the time to add up averages for it.
        skipped: steps in which a compressed gradient was inf or NaN on some rank. They changed no residual. Their
            averages are not finite, so that a gradient scaler skips the step on all ranks. Such steps are not counted
            for ``none``, ``fp16`` and ``bf16`` without feedback, although their averages are not finite, either.
            Without feedback the ranks that shard a model with FSDP2 do not tell each other, so only those count the
            step that have a shard which was not finite.
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
