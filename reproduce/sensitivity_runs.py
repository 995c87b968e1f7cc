"""The measurement of :mod:`reproduce.sensitivity`: errors of gradients, and losses after short runs, of one model.

Shapes: R repeats, L layers, C choices, B windows, S bytes of a window.
"""

from __future__ import annotations

import copy
import functools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

import narrowband as nb
from narrowband.adapt import ErrorTable, correlation, error_table, loss_table
from narrowband.adapt.lgreco import solve
from narrowband.bench.models import GPT, GPTConfig
from reproduce.command import QUICK_LIMIT
from reproduce.data import Text, wikitext2

__all__ = [
    "ADAMW",
    "CLIP",
    "FAMILIES",
    "LR",
    "QUICK_STEPS",
    "RISING",
    "SHAPE",
    "Optimizer",
    "Options",
    "ShortRun",
    "Unit",
    "measure",
]

#: Family of codecs → its reference, and the choices around it.
FAMILIES = {
    "qsgd": ("qsgd:bits=4", tuple(f"qsgd:bits={bits}" for bits in (2, 3, 4, 6, 8))),
    "top-k": ("topk:density=0.01", tuple(f"topk:density={density}" for density in (0.001, 0.003, 0.01, 0.03, 0.1))),
    "low rank": ("lowrank:rank=4", tuple(f"lowrank:rank={rank}" for rank in (1, 2, 4, 8, 16))),
}

SHAPE = GPTConfig(vocab=256, dim=64, blocks=3, heads=4, sequence=64, batch=32)
#: Training with AdamW: learning rate, the steps over which it rises, and the norm at which gradients are clipped.
LR, RISING, CLIP = 2e-3, 50, 1.0
ADAMW: dict[str, Any] = {"betas": (0.9, 0.999), "weight_decay": 0.01}
_HEAD = "head.weight"
_EXACT = "none"

_MIN_NUMEL = 1024
_QUICK_LAYERS, QUICK_STEPS = 4, 4

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
    length = SHAPE.sequence
    starts = torch.randint(0, text.numel() - length, (count,), generator=generator)
    tokens = text[starts[:, None] + torch.arange(length + 1)].long()
    return tokens[:, :-1], tokens[:, 1:]


def _trained(text: Tensor, steps: int, seed: int) -> tuple[GPT, dict[str, Any]]:
    """Return a model after this many steps of plain training, and the state of its optimizer."""
    torch.manual_seed(seed)
    model = GPT(SHAPE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, **ADAMW)
    generator = torch.Generator().manual_seed(seed)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = LR * min(1.0, (step + 1) / RISING)
        _gradients(model, *_windows(text, SHAPE.batch, generator))
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
    return model, optimizer.state_dict()


def _sgd(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr)


def _adamw(model: nn.Module, state: dict[str, Any]) -> torch.optim.Optimizer:
    """Return AdamW in its state at the checkpoint, converted to float64 like the parameters."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, **ADAMW)
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
        runs.append(ShortRun(model, make, batches, heldout, seed, CLIP if unit.optimizer == "adamw" else None))
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
