"""Estimate the step time on other links from steps measured here, and derive a verdict.

The model is one sum, deliberately simple enough to check by hand::

    step = compute + codec + 8 · sent_bytes / rate

``compute`` is the time of the same training step without any communication, ``codec`` the measured time in encode and
decode, ``sent_bytes`` the bytes that one rank sends per step and ``rate`` the link's bits per second in each direction.
The model assumes that nothing overlaps, and ignores latency, so its results are marked as estimates wherever they are
shown.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from narrowband.planning.advice import LOSS_TOLERANCE, WORTH_IT
from narrowband.units import format_rate, format_seconds

__all__ = ["FORMULA", "LINKS", "Row", "estimated_step", "estimates", "verdict", "worth_it_below"]

FORMULA = "step = compute + codec + 8 · sent_bytes / rate"

#: The links that a verdict covers, in bits per second.
LINKS = (100e6, 1e9, 10e9)


@dataclass(frozen=True)
class Row:
    """The measurements of one codec.

    Attributes:
        codec: its spec string.
        baseline: whether it is a baseline that compression has to beat (fp32, fp16).
        sent_bytes: bytes one rank sends per step.
        codec_s: seconds per step in encode and decode.
        heldout_loss: nats per token at the end; inf if training diverged.
    """

    codec: str
    baseline: bool
    sent_bytes: float
    codec_s: float
    heldout_loss: float


def estimated_step(row: Row, compute_s: float, rate: float) -> float:
    """Estimate the seconds per step on a link of ``rate`` bits per second, by :data:`FORMULA`."""
    return compute_s + row.codec_s + 8.0 * row.sent_bytes / rate


def estimates(rows: Sequence[Row], compute_s: float, links: Sequence[float] = LINKS) -> list[dict[str, str | float]]:
    """Return one JSON-able entry per codec and link."""
    return [
        {"codec": row.codec, "rate_bits_per_s": rate, "estimated_step_s": estimated_step(row, compute_s, rate)}
        for rate in links
        for row in rows
    ]


def verdict(rows: Sequence[Row], compute_s: float, links: Sequence[float] = LINKS) -> str:
    """Say in plain words which codec to use, how many times less it sends, and what it costs in loss.

    Also say on which links it pays, and which of these statements depend on this machine.

    ``rows`` starts with the uncompressed run. A codec is eligible when its loss is within 2 % of the uncompressed one.
    The eligible codec that sends least is named first. On each link, the fastest eligible codec by estimate is compared
    with the fastest baseline.

    Raises:
        ValueError: ``rows`` is empty or does not begin with a baseline.
    """
    if not rows or not rows[0].baseline:
        raise ValueError("a verdict needs rows, and the first must be the uncompressed baseline")
    uncompressed = rows[0]
    compressed = [row for row in rows if not row.baseline]
    baselines, eligible = ([row for row in _eligible(rows) if row.baseline == kind] for kind in (True, False))
    if not uncompressed.sent_bytes:
        return (
            "One rank sends nothing, so there is nothing to compress and nothing to judge. Run several ranks on this "
            "machine: narrowband demo --nodes 4"
        )
    if not compressed:
        return "Only baselines were run: there is nothing to judge."
    if not math.isfinite(uncompressed.heldout_loss):
        return "The uncompressed run itself diverged: with a lower learning rate there will be something to compare."
    if not eligible:
        close = min(compressed, key=lambda row: row.heldout_loss)
        return (
            f"Do not compress here: no codec came within {LOSS_TOLERANCE:.0%} of the uncompressed held-out loss "
            f"({uncompressed.heldout_loss:.3f}); the closest, {close.codec}, {_ended(close, uncompressed)}."
        )
    best = min(eligible, key=lambda row: row.sent_bytes)
    change = best.heldout_loss / uncompressed.heldout_loss - 1
    times = uncompressed.sent_bytes / best.sent_bytes
    sentences = [
        (
            f"{best.codec} sends {times:.0f} times less than fp32 and ends at a held-out loss of "
            f"{best.heldout_loss:.3f} against {uncompressed.heldout_loss:.3f} ({change:+.1%})."
        )
    ]
    failed = [row for row in compressed if row not in eligible]
    if failed:
        listed = ", ".join(f"{row.codec} ({_change(row, uncompressed)})" for row in failed)
        sentences.append(f"More than {LOSS_TOLERANCE:.0%} above the uncompressed loss after this many steps: {listed}.")
    for rate in links:
        fastest = min(baselines, key=lambda row: estimated_step(row, compute_s, rate))
        before = estimated_step(fastest, compute_s, rate)
        choice = min(eligible, key=lambda row: estimated_step(row, compute_s, rate))
        after = estimated_step(choice, compute_s, rate)
        steps = (
            f"{choice.codec} would take {format_seconds(after)} per step against {format_seconds(before)} with "
            f"{fastest.codec} (estimate)"
        )
        if after <= before * (1 - WORTH_IT):
            sentences.append(f"At {format_rate(rate)} it would be {before / after:.1f} times as fast: {steps}.")
        else:
            sentences.append(f"At {format_rate(rate)} compression is not worth it on this link: {steps}.")
    sentences.append(_where_it_flips(worth_it_below(rows, compute_s)))
    sentences.append(
        f"These times depend on the machine. This one computes a step in {format_seconds(compute_s)} (measured, with "
        "nothing sent); one that computes faster waits longer for the network and gains more, a slower one gains less."
    )
    return "\n".join(sentences)


def _eligible(rows: Sequence[Row]) -> list[Row]:
    """Return the first row and those whose loss is within the tolerance of its loss.

    So a 16-bit baseline that diverged does not have to be beaten.
    """
    first, *rest = rows
    return [first, *(row for row in rest if row.heldout_loss <= first.heldout_loss * (1 + LOSS_TOLERANCE))]


def _change(row: Row, uncompressed: Row) -> str:
    """Format the relative change of the loss, with enough digits to show whether it is above the tolerance."""
    change = row.heldout_loss / uncompressed.heldout_loss - 1
    return f"{change:+.2%}" if math.isfinite(change) else "diverged"


def _ended(row: Row, uncompressed: Row) -> str:
    if not math.isfinite(row.heldout_loss):
        return "diverged"
    return f"ended at {row.heldout_loss:.3f} ({_change(row, uncompressed)})"


def worth_it_below(rows: Sequence[Row], compute_s: float) -> float | None:
    """Return the rate, in bits per second, below which compression saves 5 % of a step or more.

    Infinite if it does on every link, None if it does on none. Codecs whose loss is too high do not count.
    """
    baselines, eligible = ([row for row in _eligible(rows) if row.baseline == kind] for kind in (True, False))
    found = []
    for row in eligible:
        rates = []
        for other in baselines:  # row's step ≤ other's · (1 − WORTH_IT), solved for the rate
            kept = 1 - WORTH_IT
            fewer_bits = 8.0 * (kept * other.sent_bytes - row.sent_bytes)
            more_time = (compute_s + row.codec_s) - kept * (compute_s + other.codec_s)
            if fewer_bits <= 0:
                rates.append(0.0)
            else:
                rates.append(fewer_bits / more_time if more_time > 0 else math.inf)
        found.append(min(rates))
    return max(found, default=0.0) or None


def _where_it_flips(rate: float | None) -> str:
    if rate is None:
        return f"By these estimates compression would not save {WORTH_IT:.0%} of a step on any link."
    if math.isinf(rate):
        return f"By these estimates compression would save {WORTH_IT:.0%} of a step or more on every link."
    return (
        f"The answer flips at about {format_rate(rate)} (estimate): on slower links compression would save "
        f"{WORTH_IT:.0%} of a step or more, on faster ones it would not."
    )
