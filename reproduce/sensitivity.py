"""Is the error of a gradient the right thing to budget? L-GreCo's metric against the loss (section 5.4 of its paper).

L-GreCo (Alimohammadi et al. 2022, arXiv 2210.17357) budgets errors: the norm of what one encoding loses of each layer's
gradient. The quantity of interest is the loss. The paper therefore measures a second metric: from checkpoints of a run
without compression it does short runs (up to 50 steps), always with the same data, in which one layer alone is
compressed. The metric is the change of the loss against a run without compression; measuring it takes as long as
training itself. The paper finds the two metrics highly correlated (figure 11a), and plans made by either alike.

Here a small GPT is trained on bytes of WikiText-2 until it knows more than the frequencies of bytes. From there on all
arithmetic is float64: parameters, gradients and losses; only codecs get gradients in float32, as usual. For every layer
and choice the metric is |Δ|, the magnitude of the change of the held-out loss after the short run. A lower loss counts
as a change like a higher one: a budget for the sum of signed differences would give lower losses for free.

The reliability of |Δ| is measured, too, in three ways.

* **The floor.** Rounding one layer's gradients to float32 and nothing else changes the loss by 10⁻¹⁴ to 10⁻¹²: a codec
  without any loss would do the same. Cells at or below their layer's floor show no effect of compression; they are
  counted, and left out of the correlations. (A training run in float32 has a floor of 10⁻⁷ in its loss alone, which is
  more than many choices change it by.)
* **The metric against itself.** Every cell is measured twice, with other data in the short run, other held-out windows
  and other random numbers in codecs. The rank correlation of the two tables says how much of |Δ| is due to the choice
  and not to the draw. It bounds the correlation of |Δ| with any other metric.
* **Seeds.** There are three models, with other parameters and other data. A correlation is reported as its mean over
  them, with the interval of Student's t.

All results are reported with and without the head, because the largest layer can make a correlation by itself.

Run ``python -m reproduce.sensitivity`` (a quarter of an hour on two cores), ``--quick`` (seconds), ``--help``.

Differences from the paper: the model is small, and short runs take four steps, which are enough in float64. They use
plain SGD, whose steps are as long as the gradients are. From the last checkpoint they are repeated with the AdamW that
the model was trained with, which divides a layer's gradient by its usual size.

Shapes: R repeats, L layers, C choices, B windows, S bytes of a window.
"""

from __future__ import annotations

import copy
import functools
import json
import math
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

import narrowband as nb
from narrowband.adapt import ErrorTable, correlation, error_table, loss_table
from narrowband.adapt.lgreco import solve
from narrowband.bench.models import GPT, GPTConfig
from narrowband.report.record import provenance, read_json, write_json
from narrowband.units import format_bytes, format_seconds
from reproduce.claims import under
from reproduce.command import QUICK_LIMIT, command_line, show
from reproduce.data import Text, about, wikitext2
from reproduce.groups import Claim, claimed
from reproduce.html import write_beside
from reproduce.pairs import Finding, every, student
from reproduce.pictures import Bar, Panel
from reproduce.report import Column, Layout, Legend, Opening, write_results
from reproduce.row import files_of

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["FAMILIES", "Options", "ShortRun", "Unit", "claims", "main", "measure"]

#: Family of codecs → its reference, and the choices around it.
FAMILIES = {
    "qsgd": ("qsgd:bits=4", tuple(f"qsgd:bits={bits}" for bits in (2, 3, 4, 6, 8))),
    "top-k": ("topk:density=0.01", tuple(f"topk:density={density}" for density in (0.001, 0.003, 0.01, 0.03, 0.1))),
    "low rank": ("lowrank:rank=4", tuple(f"lowrank:rank={rank}" for rank in (1, 2, 4, 8, 16))),
}

#: Rank correlation from which on two metrics count as highly correlated; share of bytes within which two plans count as
#: alike.
_HIGH = 0.7
_ALIKE = 0.2

_SHAPE = GPTConfig(vocab=256, dim=64, blocks=3, heads=4, sequence=64, batch=32)
#: Training with AdamW: learning rate, the steps over which it rises, and the norm at which gradients are clipped.
_LR, _RISING, _CLIP = 2e-3, 50, 1.0
_ADAMW: dict[str, Any] = {"betas": (0.9, 0.999), "weight_decay": 0.01}
_HEAD = "head.weight"
_EXACT = "none"

_MIN_NUMEL = 1024
_QUICK_LAYERS, _QUICK_STEPS = 4, 4

Optimizer = Literal["sgd", "adamw"]


@dataclass(frozen=True)
class Options:
    """Compare L-GreCo's errors with what compression does to the loss."""

    checkpoints: tuple[int, ...] = (200, 600)
    """Steps of plain training, with AdamW, after which short runs begin."""
    steps: int = 4
    """Steps of a short run."""
    repeats: int = 2
    """Short runs per layer and choice, each with its own data."""
    looks: int = 20
    """Gradients that are added up for the table of errors, as a handle does between two decisions."""
    batch: int = 8
    """Windows of 64 bytes per step of a short run, and per look; training takes 32."""
    heldout: int = 16
    """Windows on which the loss after a short run is computed."""
    lr: float = 1e-3
    """Learning rate of SGD in short runs."""
    adamw: bool = True
    """Also short runs with the AdamW of training, from the last checkpoint; --no-adamw leaves them out."""
    families: tuple[str, ...] = tuple(FAMILIES)
    """Families of codecs to measure; all when left out."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of parameters, data and rounding; one model for each."""
    nodes: int = 2
    """Models that are measured at a time."""
    data_dir: Path | None = None
    """Folder with the data; else NARROWBAND_DATA names it; else sets are downloaded."""
    output: Path | None = None
    """Directory of the results; reproduce/results/sensitivity when left out."""
    resume: bool = True
    """Take what an earlier run with the same options finished; --no-resume measures it again."""
    quick: bool = False
    """One model, one checkpoint, two steps, four layers, little data: to see in seconds that everything works."""
    markdown: Path | None = None
    """Also write the tables and claims to this file, for the documentation."""

    def __post_init__(self) -> None:
        for name in self.families:
            if name not in FAMILIES:
                raise ValueError(f"there is no family {name!r}; there are: {', '.join(FAMILIES)}")
        for name in ("steps", "looks", "batch", "heldout", "nodes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.repeats < 2:
            raise ValueError(f"repeats={self.repeats} must be at least 2: the metric is compared with itself")
        if not self.checkpoints or list(self.checkpoints) != sorted(set(self.checkpoints)) or self.checkpoints[0] < 0:
            raise ValueError(f"checkpoints={self.checkpoints} must be steps, from 0 on, in ascending order")
        if not self.seeds or len(set(self.seeds)) < len(self.seeds) or min(self.seeds) < 0:
            raise ValueError(f"seeds={self.seeds} must be whole numbers from 0 on, at least one, none twice")
        if not self.lr > 0:
            raise ValueError(f"lr={self.lr} must be above 0")


@dataclass(frozen=True)
class Unit:
    """A unit of work for one process: a model at a checkpoint, with one optimizer in short runs."""

    seed: int
    checkpoint: int
    optimizer: Optimizer


#: Inputs and targets, (B, S) each.
Batch = tuple[Tensor, Tensor]


class ShortRun:
    """Short runs from a checkpoint, always with the same data, in float64.

    Args:
        model: the model at the checkpoint, in float64. It is not changed.
        optimizer: makes the optimizer, in its state at the checkpoint, for a copy of the model.
        batches: the batches of a run.
        heldout: the batch on which the loss after a run is computed.
        seed: of codecs that draw random numbers.
        clip: norm at which gradients are clipped, after compression; None: never.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Callable[[nn.Module], torch.optim.Optimizer],
        batches: Sequence[Batch],
        heldout: Batch,
        seed: int,
        clip: float | None = None,
    ) -> None:
        self.model, self.optimizer, self.batches, self.heldout = model, optimizer, batches, heldout
        self.seed, self.clip = seed, clip

    def __call__(self, specs: Mapping[str, str]) -> float:
        """Return the held-out loss after a run in which these layers (name → spec) are compressed."""
        model = copy.deepcopy(self.model)
        optimizer = self.optimizer(model)
        codecs = {name: nb.codec(spec) for name, spec in specs.items()}
        for step, (x, y) in enumerate(self.batches):
            _gradients(model, x, y)
            for name, codec in codecs.items():
                gradient = model.get_parameter(name).grad
                assert gradient is not None
                gradient.copy_(codec.roundtrip(gradient.float(), seed=self.seed + step))
            if self.clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), self.clip)
            optimizer.step()
        with torch.no_grad():
            return _loss(model, *self.heldout).item()


def _loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def _gradients(model: nn.Module, x: Tensor, y: Tensor) -> float:
    model.zero_grad()
    loss = _loss(model, x, y)
    torch.autograd.backward(loss)
    return loss.item()


def _windows(text: Tensor, count: int, generator: torch.Generator) -> Batch:
    """Draw windows of a text at random."""
    length = _SHAPE.sequence
    starts = torch.randint(0, text.numel() - length, (count,), generator=generator)
    tokens = text[starts[:, None] + torch.arange(length + 1)].long()
    return tokens[:, :-1], tokens[:, 1:]


def _trained(text: Tensor, steps: int, seed: int) -> tuple[GPT, dict[str, Any]]:
    """Return a model after this many steps of plain training, and the state of its optimizer."""
    torch.manual_seed(seed)
    model = GPT(_SHAPE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LR, **_ADAMW)
    generator = torch.Generator().manual_seed(seed)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = _LR * min(1.0, (step + 1) / _RISING)
        _gradients(model, *_windows(text, _SHAPE.batch, generator))
        nn.utils.clip_grad_norm_(model.parameters(), _CLIP)
        optimizer.step()
    return model, optimizer.state_dict()


def _sgd(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr)


def _adamw(model: nn.Module, state: dict[str, Any]) -> torch.optim.Optimizer:
    """Return AdamW in its state at the checkpoint, converted to float64 like the parameters."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LR, **_ADAMW)
    optimizer.load_state_dict(copy.deepcopy(state))
    return optimizer


def measure(options: Options, unit: Unit) -> list[dict[str, Any]]:
    """Measure a unit, and return one row per family.

    Rows hold the unit's fields and

    * ``family``, ``layers``, ``choices``;
    * ``loss``: held-out, at the checkpoint;
    * ``errors``: (L, C);
    * ``differences``: (R, L, C), signed changes of the loss;
    * ``floors``: (L,), changes of the loss by rounding to float32;
    * the results of :func:`_compared`;
    * ``error_s`` and ``loss_s``: seconds that the errors and the losses took.
    """
    text = _text(options)
    trained, state = _trained(text.train, unit.checkpoint, unit.seed)
    model = trained.double()
    layers = [name for name, p in model.named_parameters() if p.dim() > 1 and p.numel() >= _MIN_NUMEL]
    layers = layers[-_QUICK_LAYERS if options.quick else None :]
    generator = torch.Generator().manual_seed(1_000 + unit.seed)
    draw = functools.partial(_windows, generator=generator)
    sums = _looks(model, layers, [draw(text.train, options.batch) for _ in range(options.looks)])
    make = functools.partial(_sgd, lr=options.lr) if unit.optimizer == "sgd" else functools.partial(_adamw, state=state)
    runs = []
    for repeat in range(options.repeats):
        batches = [draw(text.train, options.batch) for _ in range(options.steps)]
        heldout = draw(text.heldout, options.heldout)
        seed = (unit.seed * options.repeats + repeat) * options.steps
        runs.append(ShortRun(model, make, batches, heldout, seed, _CLIP if unit.optimizer == "adamw" else None))
    floors = np.mean([np.abs(loss_table(run, layers, [_EXACT])[:, 0]) for run in runs], axis=0)
    with torch.no_grad():
        loss = statistics.mean(_loss(model, *run.heldout).item() for run in runs)
    rows = []
    for family in options.families:
        reference, choices = FAMILIES[family]
        error_table(sums, choices)  # compiles its loops, before time is taken
        begin = time.perf_counter()
        table = error_table(sums, choices, seed=unit.seed)
        error_s = time.perf_counter() - begin
        begin = time.perf_counter()
        differences = np.stack([loss_table(run, layers, choices) for run in runs])
        loss_s = time.perf_counter() - begin
        rows.append(
            asdict(unit)
            | {"family": family, "loss": loss, "layers": layers, "choices": list(choices)}
            | {"errors": table.errors.tolist(), "differences": differences.tolist(), "floors": floors.tolist()}
            | _compared(table, differences, floors, reference)
            | {"error_s": error_s, "loss_s": loss_s}
        )
    return rows


def _text(options: Options) -> Text:
    text = wikitext2(options.data_dir)
    limit = QUICK_LIMIT["gpt"] if options.quick else None
    return replace(text, train=text.train[:limit], heldout=text.heldout[:limit])


def _looks(model: nn.Module, layers: Sequence[str], batches: Sequence[Batch]) -> dict[str, Tensor]:
    """Return the sum of gradients at a checkpoint."""
    sums = {name: torch.zeros_like(model.get_parameter(name)) for name in layers}
    for x, y in batches:
        _gradients(model, x, y)
        for name in layers:
            gradient = model.get_parameter(name).grad
            assert gradient is not None
            sums[name] += gradient
    return sums


def _compared(
    table: ErrorTable, differences: NDArray[np.float64], floors: NDArray[np.float64], reference: str
) -> dict[str, Any]:
    """Compare the two metrics, and the plans that each makes within the reference's budget.

    * ``resolved``: the share of cells that are above their layer's floor. Correlations are over these cells;
    * ``pearson`` and ``spearman``: correlations of the two metrics, and the same without the head (``…_rest``);
    * ``itself``: the rank correlation of the first repeat's |Δ| with the second's;
    * ``middle`` and ``floor``: medians of |Δ| and of the floors; ``falls``: the share of differences below zero;
    * ``error_bytes`` and ``loss_bytes``: bytes of the plans by the error and by the loss; ``reference_bytes``: of the
      uniform setting; ``same``: the share of layers with the same choice in both plans.
    """
    magnitudes = np.abs(differences)  # R, L, C
    losses = magnitudes.mean(0)
    above = losses > floors[:, None]
    rest = above & np.array([name != _HEAD for name in table.layers])[:, None]
    uniform = table.column(reference)
    plans = [_plan(table.sizes, metric, uniform) for metric in (table.errors, losses)]
    by_error, by_loss = (_nbytes(table.sizes, plan) for plan in plans)
    pearson, spearman = correlation(table.errors[above], losses[above])
    pearson_rest, spearman_rest = correlation(table.errors[rest], losses[rest])
    return {
        "pearson": pearson,
        "pearson_rest": pearson_rest,
        "spearman": spearman,
        "spearman_rest": spearman_rest,
        "itself": correlation(magnitudes[0][above], magnitudes[1][above])[1],
        "resolved": float(above.mean()),
        "middle": float(np.median(losses)),
        "floor": float(np.median(floors)),
        "falls": float((differences < 0).mean()),
        "error_bytes": by_error,
        "loss_bytes": by_loss,
        "reference_bytes": float(table.sizes[:, uniform].sum()),
        "same": float((plans[0] == plans[1]).mean()),
    }


def _plan(sizes: NDArray[np.float64], metric: NDArray[np.float64], uniform: int) -> NDArray[np.intp]:
    """Choose for every layer so that neither the metric nor the bytes exceed those of the uniform setting."""
    return solve(sizes, metric, math.fsum(metric[:, uniform]), known=[uniform] * len(sizes))


def _nbytes(sizes: NDArray[np.float64], plan: NDArray[np.intp]) -> float:
    return float(sizes[np.arange(len(plan)), plan].sum())


# ---- what rows of several seeds come to ------------------------------------------------------------------------------


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
        betas = f"β₁ {_ADAMW['betas'][0]:g}, β₂ {_ADAMW['betas'][1]:g}"
        step = {
            "sgd": f"SGD, learning rate {row['lr']:g}, no momentum, no clipping",
            "adamw": "AdamW as in training, with its state at the checkpoint",
        }
        return {
            "model": f"GPT with {_SHAPE.blocks} blocks of width {_SHAPE.dim}, {_SHAPE.heads} heads",
            "training": f"AdamW, {betas}, learning rate {_LR:g}, which it rises to over {_RISING} steps, weight decay "
            f"{_ADAMW['weight_decay']:g}, gradients clipped at norm {_CLIP:g}, {_SHAPE.batch} windows of "
            f"{_SHAPE.sequence} bytes",
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


# ---- the command -----------------------------------------------------------------------------------------------------

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
        f"{title}, {len(first['layers'])} layers of a GPT, {_SHAPE.numel():,} parameters, seeds "
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


_LAYOUT = Layout(
    tables=_tables,
    columns=_COLUMNS.__getitem__,
    legend=_LEGEND,
    caption=_caption,
    notes=_specs,
)
_TITLES = {
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
        _TITLES,
        claims(rows) if record["claims"] else [],
        _LAYOUT,
        opening=_OPENING,
        paper=_PAPER,
        record=record,
        commits=sorted({str(row["commit"]) for row in rows}),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (``sys.argv`` when None) and return its exit code."""
    return command_line(
        "sensitivity",
        Options,
        _run,
        argv,
        stopped="Models that were measured are kept: the same command goes on from there.",
    )


def units_of(options: Options) -> list[Unit]:
    """Return the units to measure, the longest first."""
    last, all_of_them = options.checkpoints[-1], sorted(options.checkpoints, reverse=True)
    return [
        *(Unit(seed, last, "adamw") for seed in options.seeds if options.adamw),
        *(Unit(seed, checkpoint, "sgd") for checkpoint in all_of_them for seed in options.seeds),
    ]


def _measured(options: Options, units: Sequence[Unit]) -> Iterator[list[dict[str, Any]]]:
    """Yield the rows of each unit as soon as it is finished; ``options.nodes`` processes work at a time."""
    if min(options.nodes, len(units)) <= 1:
        for unit in units:
            yield measure(options, unit)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.nodes, context, torch.set_num_threads, (1,)) as pool:
        for done in as_completed([pool.submit(measure, options, unit) for unit in units]):
            yield done.result()


def _run(options: Options, command: list[str], console: Console) -> None:
    from rich.progress import Progress

    if options.quick:
        options = replace(options, checkpoints=(_QUICK_STEPS,), seeds=options.seeds[:1], steps=2, looks=2, adamw=False)
    record = provenance(options.seeds[0], command)
    written = (options.output or Path(__file__).parent / "results" / "sensitivity") / "summary.json"
    config = {
        key: value
        for key, value in asdict(options).items()
        if key not in ("data_dir", "markdown", "nodes", "output", "resume", "seeds")
    }
    config = json.loads(json.dumps(config))
    there: list[dict[str, Any]] = []
    if options.resume and written.exists():
        earlier = read_json(written, ("config", "rows"))
        if earlier["config"] == config:
            there = earlier["rows"]
    finished = {Unit(row["seed"], row["checkpoint"], row["optimizer"]) for row in there}
    units = units_of(options)
    settings = {name: getattr(options, name) for name in ("steps", "batch", "lr", "repeats", "heldout", "looks")}
    settings["data"] = about(files_of("gpt"), options.data_dir)
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task("models measured", total=len(units), completed=len(finished.intersection(units)))
        for rows in _measured(options, [unit for unit in units if unit not in finished]):
            there += [row | settings | {"commit": record["commit"]} for row in rows]
            write_json(written, record | {"config": config, "rows": there})
            progress.advance(bar)
    lines = lines_of([row for row in there if Unit(row["seed"], row["checkpoint"], row["optimizer"]) in units])
    wanted = [row for line in lines for row in line.rows]
    said = [] if options.quick else claims(wanted)
    show(console, lines, _TITLES, said, _LAYOUT)
    whole = record | {"config": config, "claims": [claim.record() for claim in said], "rows": wanted}
    write_json(written, whole | {"rows": there})
    if options.markdown is not None:
        page(whole, options.markdown)
    console.print(f"written: {written}", style="dim", markup=False, highlight=False)
    write_beside(written, whole, console)


if __name__ == "__main__":
    sys.exit(main())
