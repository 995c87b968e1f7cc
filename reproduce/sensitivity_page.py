"""What the rows of :mod:`reproduce.sensitivity` come to over seeds: claims, tables and the page."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from narrowband.units import format_bytes, format_seconds
from reproduce.claims import under
from reproduce.groups import Claim, claimed
from reproduce.pairs import Finding, every, student
from reproduce.pictures import Bar, Panel
from reproduce.report import Column, Layout, Legend, Opening, write_results
from reproduce.sensitivity_runs import ADAMW, CLIP, FAMILIES, LR, RISING, SHAPE, Optimizer

__all__ = ["LAYOUT", "TITLES", "Interval", "Line", "claims", "lines_of", "page"]

#: Rank correlation from which on two metrics count as highly correlated; share of bytes within which two plans count as
#: alike.
_HIGH = 0.7
_ALIKE = 0.2


@dataclass(frozen=True)
class Interval:
    """A mean over seeds, and half of its 95 % interval (Student's t). A single seed has no margin."""

    mean: float
    margin: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> Interval:
        """Return the interval of values, one per seed."""
        n = len(values)
        margin = student(n - 1) * statistics.stdev(values) / math.sqrt(n) if n > 1 else None
        return cls(statistics.mean(values), margin)

    def at_least(self, bound: float) -> bool | None:
        """Whether the whole interval is at or above the bound; None if the bound is inside, or without a margin."""
        if self.margin is None:
            return None
        return True if self.mean - self.margin >= bound else False if self.mean + self.margin < bound else None

    def within(self, bound: float) -> bool | None:
        """Whether the whole interval is between −bound and bound; None if either is inside, or without a margin."""
        if self.margin is None:
            return None
        far = abs(self.mean)
        return True if far + self.margin <= bound else False if far - self.margin > bound else None

    def text(self, form: str = ".2f") -> str:
        """Format the mean and its margin."""
        return format(self.mean, form) + ("" if self.margin is None else f" ± {format(self.margin, form)}")


@dataclass(frozen=True)
class Line:
    """Rows that differ in their seeds alone: a family at a checkpoint, with one optimizer in short runs."""

    family: str
    checkpoint: int
    optimizer: Optimizer
    rows: tuple[Mapping[str, Any], ...]
    #: Whether the line has settings for a table to list.
    told: bool = True

    def over_seeds(self, key: str) -> Interval:
        """Return the interval of a number that every row has."""
        return Interval.of([float(row[key]) for row in self.rows])

    def mean(self, key: str) -> float:
        """Return the mean of a number over seeds."""
        return self.over_seeds(key).mean

    def fewer(self, plan: str) -> Interval:
        """Return the uniform setting's bytes over a plan's; ``plan`` is ``error`` or ``loss``."""
        return Interval.of([row["reference_bytes"] / row[f"{plan}_bytes"] for row in self.rows])

    def apart(self) -> Interval:
        """Return how many more bytes the plan by the loss sends, as a share of those of the plan by the error."""
        return Interval.of([row["loss_bytes"] / row["error_bytes"] - 1.0 for row in self.rows])

    @property
    def settings(self) -> dict[str, str]:
        """The settings of the measurement, in words."""
        if not self.told:
            return {}
        row = self.rows[0]
        betas = f"β₁ {ADAMW['betas'][0]:g}, β₂ {ADAMW['betas'][1]:g}"
        step = {
            "sgd": f"SGD, learning rate {row['lr']:g}, no momentum, no clipping",
            "adamw": "AdamW as in training, with its state at the checkpoint",
        }
        return {
            "model": f"GPT with {SHAPE.blocks} blocks of width {SHAPE.dim}, {SHAPE.heads} heads",
            "training": f"AdamW, {betas}, learning rate {LR:g}, which it rises to over {RISING} steps, weight decay "
            f"{ADAMW['weight_decay']:g}, gradients clipped at norm {CLIP:g}, {SHAPE.batch} windows of "
            f"{SHAPE.sequence} bytes",
            "short runs": f"{row['steps']} steps in float64, {row['batch']} windows; {row['repeats']} per layer and "
            f"choice; judged by {row['heldout']} held-out windows",
            "their optimizer": step[self.optimizer],
            "errors": f"of the sum of {row['looks']} gradients, {row['batch']} windows each",
            "data": str(row["data"]),
        }

    @property
    def name(self) -> str:
        """The line's name in lists of settings that differ between lines."""
        return f"{self.family}, {self.run}"

    @property
    def run(self) -> str:
        """The checkpoint at which short runs began, and their optimizer."""
        return f"{self.checkpoint}, {_NAMES[self.optimizer]}"


_NAMES = {"sgd": "SGD", "adamw": "AdamW"}


def lines_of(rows: Sequence[Mapping[str, Any]]) -> list[Line]:
    """Group rows by optimizer, checkpoint and family."""
    together: dict[tuple[str, int, str], list[Mapping[str, Any]]] = {}
    order = list(_NAMES), list(FAMILIES)
    for row in sorted(
        rows,
        key=lambda row: (
            order[0].index(row["optimizer"]), row["checkpoint"], order[1].index(row["family"]), row["seed"],
        ),
    ):  # fmt: skip
        together.setdefault((row["optimizer"], row["checkpoint"], row["family"]), []).append(row)
    return [
        Line(family, checkpoint, "sgd" if optimizer == "sgd" else "adamw", tuple(own))
        for (optimizer, checkpoint, family), own in together.items()
    ]


def claims(rows: Sequence[Mapping[str, Any]]) -> list[Claim]:
    """Judge the paper's claims by these rows."""
    lines, said = lines_of(rows), []
    for optimizer, family in dict.fromkeys((line.optimizer, line.family) for line in lines):
        own = [line for line in lines if (line.optimizer, line.family) == (optimizer, family)]
        where = f"{family}, short runs with {_NAMES[optimizer]}"
        alike, much = "errors and changes of the loss are highly correlated", "plans by either send as much"
        how = f"(rank correlation at least {_HIGH:g}, with the head and without it)"
        both = (
            (f"{alike} {how}", every(_correlated(line) for line in own)),
            (f"{much} (within {_ALIKE:.0%})", every(map(_alike, own))),
        )
        for topic, finding in both:
            claim = replace(claimed(f"{where}: {topic}", finding), said=family)
            said += under(f"{topic[0].upper()}{topic[1:]}", [claim], case=f"short runs with {_NAMES[optimizer]}")
    return said


def _correlated(line: Line) -> Finding:
    all_of_them, rest = line.over_seeds("spearman"), line.over_seeds("spearman_rest")
    figures = f"{all_of_them.text()}, without the head {rest.text()} after {line.checkpoint} steps"
    return Finding(all_of_them.at_least(_HIGH), (figures,)) & Finding(rest.at_least(_HIGH))


def _alike(line: Line) -> Finding:
    by_error, by_loss = line.fewer("error").text(), line.fewer("loss").text()
    figures = f"{by_error} and {by_loss} times less than uniform after {line.checkpoint} steps"
    return Finding(line.apart().within(_ALIKE), (figures,))


# ---- tables and page -------------------------------------------------------------------------------------------------

#: Table → its columns: a heading, and a function from a line to the text of its cell.
_COLUMNS: dict[str, tuple[Column, ...]] = {
    "correlations": (
        ("family", lambda line: line.family),
        ("run", lambda line: line.run),
        ("of ranks", lambda line: line.over_seeds("spearman").text()),
        ("no head", lambda line: line.over_seeds("spearman_rest").text()),
        ("Pearson", lambda line: line.over_seeds("pearson").text()),
        ("no head", lambda line: line.over_seeds("pearson_rest").text()),
    ),
    "metric": (
        ("family", lambda line: line.family),
        ("run", lambda line: line.run),
        ("itself", lambda line: line.over_seeds("itself").text()),
        ("above", lambda line: f"{line.mean('resolved'):.0%}"),
        ("|Δ|", lambda line: f"{line.mean('middle'):.1e}"),
        ("floor", lambda line: f"{line.mean('floor'):.1e}"),
        ("falls", lambda line: f"{line.mean('falls'):.0%}"),
        ("loss takes", lambda line: format_seconds(line.mean("loss_s"))),
    ),
    "plans": (
        ("family", lambda line: line.family),
        ("run", lambda line: line.run),
        ("uniform", lambda line: format_bytes(line.mean("reference_bytes"))),
        ("by error", lambda line: f"{line.fewer('error').text()}×"),
        ("by loss", lambda line: f"{line.fewer('loss').text()}×"),
        ("same", lambda line: f"{line.mean('same'):.0%}"),
        ("error takes", lambda line: format_seconds(line.mean("error_s"))),
    ),
}

_LEGEND: Legend = (
    ("run", "steps of training, and what takes the steps of short runs"),
    ("all figures", "means over seeds, ± half of the interval at 95 % (Student's t)"),
    (
        "|Δ|",
        (
            "how far compressing one layer alone takes the held-out loss after a short run, in nats per byte, the mean "
            "over repeats; in the table its median"
        ),
    ),
    (
        "of ranks, Pearson",
        (
            "correlations between |Δ| and the error of the layer's gradient, over all layers and choices; no head: "
            "without the last layer"
        ),
    ),
    ("itself", "the rank correlation of |Δ| with that of other data and draws"),
    (
        "above",
        (
            "the share of layers and choices where |Δ| is more than what rounding the layer's gradients to float32 "
            "makes; floor: the median of that over layers; falls: the share where compression lowers the loss"
        ),
    ),
    (
        "uniform",
        (
            "bytes of all payloads; by error, by loss: how many times fewer plans send that keep the sum of either "
            "metric; same: the share of layers with one choice in both"
        ),
    ),
    ("takes", "seconds for the table of a metric"),
)


def _caption(title: str, lines: Sequence[Line]) -> str:
    first = lines[0].rows[0]
    losses = "; ".join(
        f"after {checkpoint} steps {mean:.2f}"
        for checkpoint, mean in {line.checkpoint: line.mean("loss") for line in lines}.items()
    )
    return (
        f"{title}, {len(first['layers'])} layers of a GPT, {SHAPE.numel():,} parameters, seeds "
        f"{', '.join(str(row['seed']) for row in lines[0].rows)}; held-out loss {losses} (nats per byte)"
    )


def _specs(lines: Sequence[Line]) -> list[str]:
    if not lines[0].told:
        return []
    listed = {line.family: line.rows[0]["choices"] for line in lines}
    return [f"{family}: {', '.join(f'`{spec}`' for spec in choices)}" for family, choices in listed.items()]


def _tables(lines: Sequence[Line]) -> list[tuple[str, list[Line]]]:
    """Return the tables. Settings and choices are listed once, with the first table."""
    return [(key, [replace(line, told=not at) for line in lines]) for at, key in enumerate(_COLUMNS)]


LAYOUT = Layout(
    tables=_tables,
    columns=_COLUMNS.__getitem__,
    legend=_LEGEND,
    caption=_caption,
    notes=_specs,
)
TITLES = {
    "correlations": "Errors against changes of the loss",
    "metric": "What changes of the loss are worth",
    "plans": "Plans by either",
}

_PAPER = "Alimohammadi et al. 2022, L-GreCo (arXiv 2210.17357), section 5.4"


def _last(lines: Sequence[Line]) -> list[Line]:
    """Return the lines of the last checkpoint."""
    last = max(line.checkpoint for line in lines)
    return [line for line in lines if line.checkpoint == last]


def _found(lines: Sequence[Line]) -> str:
    own = _last(lines)
    told = []
    for optimizer in dict.fromkeys(line.optimizer for line in own):
        correlations = ", ".join(
            f"{line.mean('spearman'):.2f} ({line.family})" for line in own if line.optimizer == optimizer
        )
        told.append(f"with {_NAMES[optimizer]} {correlations}")
    plans = ", ".join(
        f"{line.fewer('error').mean:.2f} and {line.fewer('loss').mean:.2f} ({line.family})"
        for line in own
        if line.optimizer == own[0].optimizer
    )
    return (
        f"After {own[0].checkpoint} steps of training the rank correlation of errors and changes of the loss is, in "
        f"short runs {'; '.join(told)}. Plans by errors and by losses send {plans} times less than a uniform setting, "
        f"with {_NAMES[own[0].optimizer]}."
    )


def _panels(lines: Sequence[Line]) -> list[Panel]:
    own = _last(lines)
    correlations = [
        Bar(f"{line.family}, {_NAMES[line.optimizer]}", max(0.0, line.mean("spearman")), f"{line.mean('spearman'):.2f}",
            line.optimizer == "sgd")
        for line in own
    ]  # fmt: skip
    fewer = []
    for line in own:
        if line.optimizer == own[0].optimizer:
            for metric in ("error", "loss"):
                times = line.fewer(metric).mean
                fewer.append(Bar(f"{line.family}, by {metric}", times, f"{times:.2f}×", metric == "error"))
    return [
        Panel("Rank correlation", "of errors and changes of the loss", correlations),
        Panel("Times fewer bytes", f"than uniform; {_NAMES[own[0].optimizer]}", fewer),
    ]


_OPENING = Opening(
    title="Errors against losses",
    says="L-GreCo budgets the error of every layer's gradient, where what matters is the loss. Does one foretell the "
    "other? The paper says that both are highly correlated, and that plans made by either send as much.",
    ran="A small GPT learned bytes of WikiText-2. One layer at a time was compressed in short runs from the same "
    "checkpoint, with three families of codecs. How far that takes the held-out loss, in float64, is compared with the "
    "error of the gradient.",
    found=_found,
    panels=_panels,
    covers=(
        (
            "figure 11a, values of both metrics",
            "the first table, of another model; what they are worth is in the second",
        ),
        (
            "section 5.4, parameters and ratios by either metric",
            "the third table; nothing was trained with these plans",
        ),
        ("all other tables and figures", "on [L-GreCo's page](lgreco.md)"),
    ),
)


def page(record: Mapping[str, Any], path: Path) -> None:
    """Write the page of a record (the content of ``summary.json``)."""
    rows = record["rows"]
    lines = lines_of(rows)
    write_results(
        path,
        lines,
        TITLES,
        claims(rows) if record["claims"] else [],
        LAYOUT,
        opening=_OPENING,
        paper=_PAPER,
        record=record,
        commits=sorted({str(row["commit"]) for row in rows}),
    )
