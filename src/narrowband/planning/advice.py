"""Recommend an option, with the reason in a plain sentence. The advice may be "do not compress".

A compressing option is advised if it saves a twentieth of the step compared with the best uncompressed one, DDP in 32
or 16 bits, and if the mean loss that was measured with the same optimizer is within a tolerance; the margin of that
mean is not considered. 16 bits always count as a baseline, whatever the tolerance, and even where they save too little
to be advised themselves. The sentence also names up to two options that are faster, but lose more or were never
measured, to show what was left out: the one that loses least, and the fastest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from narrowband.feedback import compression
from narrowband.planning.facts import Fact, akin, known
from narrowband.planning.links import Cluster
from narrowband.planning.options import Network, Option, Predicted
from narrowband.units import format_seconds

__all__ = ["LOSS_TOLERANCE", "WORTH_IT", "Advice", "Row", "advise", "call_of", "outer_of"]

#: A loss counts as equal if it is at most this share above the loss without compression.
LOSS_TOLERANCE = 0.02

#: Compression that saves less than this share of a step is not worth its place in a training script.
WORTH_IT = 0.05


@dataclass(frozen=True)
class Row:
    """An option with its predicted times and what is known of its loss."""

    predicted: Predicted
    fact: Fact | None

    @property
    def option(self) -> Option:
        """The option that was predicted."""
        return self.predicted.option

    @property
    def step_s(self) -> float:
        """Predicted seconds of a step."""
        return self.predicted.outcome.step_s

    @property
    def name(self) -> str:
        """The option's name in tables and sentences."""
        return self.option.name

    def within(self, tolerance: float) -> bool:
        """Return whether the mean loss is within a tolerance. Uncompressed gradients and fp16 need no measurement."""
        if self.option.spec in (None, "none", "fp16") and not self.option.every:
            return True
        return self.fact is not None and self.fact.within(tolerance)


@dataclass(frozen=True)
class Advice:
    """What to do.

    Attributes:
        row: the option to take.
        compress: whether that option compresses.
        times: the speedup over the fastest option that does not compress; 1 if ``compress`` is False.
        sentence: the reason, in plain words.
    """

    row: Row
    compress: bool
    times: float
    sentence: str


def advise(
    predicted: Sequence[Predicted], optimizer: str, network: Network, *, tolerance: float = LOSS_TOLERANCE
) -> tuple[list[Row], Advice]:
    """Sort the options by predicted step time, the fastest first, and recommend one.

    Args:
        predicted: the options; plain DDP, ``Option(None)``, must be among them.
        optimizer: use the losses that were measured with this optimizer.
        network: named in the sentence.
        tolerance: how much the loss may rise, as a share of it; 0.02 by default.

    Raises:
        ValueError: plain DDP, which all other options are compared with, is not among the options.
    """
    rows = [Row(each, known(optimizer, each.option.spec, each.option.every)) for each in predicted]
    plain = next((row for row in rows if row.option == Option(None)), None)
    if plain is None:
        raise ValueError("plain DDP is missing, with which all other options are compared: predict Option(None), too")
    rows.sort(key=lambda row: row.step_s)
    eligible = [row for row in rows if row.within(tolerance)]
    without = [row for row in eligible if not row.option.compresses]
    # Compression has to beat the fastest uncompressed option. If none is worth it, the advice is plain DDP unless
    # another uncompressed option saves enough: plain DDP needs the least change to a script.
    baseline, instead = min((plain, *without), key=lambda row: row.step_s), _worth_it(without, plain) or plain
    best = _worth_it([row for row in eligible if row.option.compresses], baseline) or instead
    sentence = _sentence(best, baseline, plain, optimizer, f"{network.cluster} behind {network.link}", tolerance)
    faster = [row for row in rows if not row.within(tolerance) and row.step_s < best.step_s * (1 - WORTH_IT)]
    if faster:
        least = min(faster, key=lambda row: math.inf if row.fact is None else row.fact.gap)
        sentence = " ".join([sentence, *(_about(row, optimizer) for row in dict.fromkeys((least, faster[0])))])
    times = baseline.step_s / best.step_s if best.option.compresses else 1.0
    return rows, Advice(best, best.option.compresses, times, sentence)


def _worth_it(rows: Sequence[Row], against: Row) -> Row | None:
    """Return the fastest row if it saves at least ``WORTH_IT`` of the other's step, else None."""
    best = min(rows, key=lambda row: row.step_s, default=against)
    return best if best.step_s <= against.step_s * (1 - WORTH_IT) else None


def _sentence(best: Row, baseline: Row, plain: Row, optimizer: str, where: str, tolerance: float) -> str:
    if best.option.compresses:
        assert best.fact is not None
        return (
            f"Compress: among {where}, {best.name} would take {format_seconds(best.step_s)} per step and "
            f"{baseline.name} {format_seconds(baseline.step_s)}, so it is {baseline.step_s / best.step_s:.1f} times as "
            f"fast. With {optimizer} the loss of a small model changed by {best.fact} ({best.fact.what})."
        )
    alone = plain.predicted.outcome.compute_s
    nothing = (
        f"No codec saves {WORTH_IT:.0%} of the {format_seconds(baseline.step_s)} that {baseline.name} would take, at a "
        f"loss that was measured within {tolerance:.0%} with {optimizer}."
    )
    if best is not plain:
        return (
            f"Do not compress, but {_instead(best.option)}: among {where}, {best.name} would take "
            f"{format_seconds(best.step_s)} per step and {plain.name} {format_seconds(plain.step_s)}. {nothing}"
        )
    return (
        f"Do not compress: among {where}, {plain.name} would take {format_seconds(plain.step_s)} per step, of which "
        f"{format_seconds(alone)} are compute. {nothing}"
    )


def _instead(option: Option) -> str:
    """Word an uncompressed option as an instruction."""
    first = "sum inside each machine first" if option.levels else ""
    return " and ".join(filter(None, (first, "" if option.spec == "none" else "send 16 bits")))


def _about(row: Row, optimizer: str) -> str:
    if row.fact is None:
        other = akin(optimizer, row.option.spec, row.option.every)
        beside = "" if other is None else f" (that of {other.spec} changed by {other})"
        return (
            f"Faster, but its loss with {optimizer} was never measured here{beside}: {row.name}, "
            f"{format_seconds(row.step_s)}."
        )
    return (
        f"Faster, but with {optimizer} the loss of a small model changed by {row.fact}: {row.name}, "
        f"{format_seconds(row.step_s)}."
    )


def outer_of(option: Option, fact: Fact | None) -> str:
    """Return the outer step of an option (see :class:`~narrowband.planning.facts.Fact`).

    This is the one that the fact was measured with. Without a fact, it is DiLoCo's Nesterov step for uncompressed
    rounds of several steps, and otherwise ``auto``: a length that training measures.
    """
    if fact is not None:
        return fact.outer
    return "nesterov" if option.spec == "none" and option.every > 1 else "auto"


def call_of(option: Option, cluster: Cluster, plan: str | None = None, fact: Fact | None = None) -> str:
    """Return the line of a training script that applies an option.

    Args:
        option: the option.
        cluster: the machines and ranks that train.
        plan: the path of a plan file to load; None: write the spec itself.
        fact: what was measured of the option's loss, if anything.
    """
    if option.spec is None:
        return "DistributedDataParallel(model)"
    spec = f'"{option.spec}"' if plan is None else f'nb.Plan.load("{plan}")'
    if option.every:
        said = outer_of(option, fact)
        outer = {"auto": ', outer="auto"', "nesterov": ', outer="nesterov"', "1": ""}.get(said, f", outer={said}")
        where = "" if fact is None or fact.residuals == "apart" else f', residuals="{fact.residuals}"'
        return f"nb.compress_updates(model, optimizer, {spec}, every={option.every}{where}{outer})"
    levels = f", nodes={cluster.nodes}" if option.levels else ""
    feedback = compression(option.spec).feedback
    # The feedback applies momentum before sending: the optimizer must have none, and is passed for its learning rates.
    optimizer = ", optimizer=optimizer" if feedback is not None and feedback.observes_uncompressed else ""
    return f"nb.compress_gradients(model, {spec}{levels}{optimizer})"
