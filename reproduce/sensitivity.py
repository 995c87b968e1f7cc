"""Is the error of a gradient the right thing to budget? L-GreCo's metric against the loss (section 5.4 of its paper).

L-GreCo (Alimohammadi et al. 2022, arXiv 2210.17357) spends a budget of errors: norms of what one encoding loses of each
layer's gradient. What one cares about is the loss. So the paper takes checkpoints of a run without compression, and
from each does short runs, always with the same data, in which one layer alone is compressed. What that does to the loss
is the other metric; it takes as long as training itself. The paper finds the two highly correlated (figure 11a), and
plans made by either alike.

Here a small GPT reads bytes of WikiText-2, and one process trains it. For every family, every layer and every choice
there is one short run per checkpoint; then both tables are correlated, and each makes a plan at the same reference.

Run ``python -m reproduce.sensitivity`` (a quarter of an hour on two cores), ``--quick`` (seconds), ``--help``.

Differences from the paper: the model is small, plain SGD is used (Adam divides a layer's gradient by its own size, and
so does not feel that one is too short), and a run's loss is the mean over its steps, which is steadier than the last
one's. The loss can fall by compression, by chance; in a plan such a choice counts as free.
"""

from __future__ import annotations

import copy
import functools
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

import narrowband as nb
from narrowband.adapt import ErrorTable, correlation, error_table, loss_table
from narrowband.adapt.lgreco import solve
from narrowband.report.record import provenance, read_json, write_json
from narrowband.units import format_bytes, format_seconds
from reproduce.command import command_line, show
from reproduce.pictures import Bar, Panel
from reproduce.report import Claim, Column, Layout, Opening, markdown, write_page
from reproduce.tasks import Task, load

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

__all__ = ["FAMILIES", "Options", "claims", "main", "measure"]

#: Family → its reference, and the choices around it.
FAMILIES = {
    "qsgd": ("qsgd:bits=4", tuple(f"qsgd:bits={bits}" for bits in (2, 3, 4, 6, 8))),
    "top-k": ("topk:density=0.01", tuple(f"topk:density={density}" for density in (0.001, 0.003, 0.01, 0.03, 0.1))),
    "low rank": ("lowrank:rank=4", tuple(f"lowrank:rank={rank}" for rank in (1, 2, 4, 8, 16))),
}

#: Correlation, of ranks, from which on two metrics count as highly correlated; share of bytes within which two plans
#: are alike.
_HIGH = 0.7
_ALIKE = 0.2

_MIN_NUMEL = 1024
_QUICK_LIMIT = 20_000
_QUICK_LAYERS = 4


@dataclass(frozen=True)
class Options:
    """Compare L-GreCo's errors with what compression does to the loss."""

    checkpoints: tuple[int, ...] = (50, 400)
    """Steps of plain training after which short runs begin."""
    steps: int = 20
    """Of a short run."""
    looks: int = 20
    """Gradients that are added up for the table of errors, as a handle does between two decisions."""
    batch: int = 16
    """Windows of 128 bytes per step."""
    lr: float = 0.3
    """Of SGD."""
    families: tuple[str, ...] = tuple(FAMILIES)
    """Which; all when left out."""
    seed: int = 0
    """Of parameters, order of samples and rounding."""
    data_dir: Path | None = None
    """Folder with the data; else NARROWBAND_DATA names it; else sets are downloaded."""
    output: Path | None = None
    """Directory of the results; reproduce/results/sensitivity when left out."""
    resume: bool = True
    """Take families that an earlier run with the same options finished; --no-resume measures them again."""
    quick: bool = False
    """One checkpoint, two steps, four layers, little data: to see in seconds that everything works."""
    markdown: Path | None = None
    """Also write the table and claims to this file, for the documentation."""

    def __post_init__(self) -> None:
        for name in self.families:
            if name not in FAMILIES:
                raise ValueError(f"there is no family {name!r}; there are: {', '.join(FAMILIES)}")
        for name in ("steps", "looks", "batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if not self.checkpoints or list(self.checkpoints) != sorted(set(self.checkpoints)) or self.checkpoints[0] < 0:
            raise ValueError(f"checkpoints={self.checkpoints} must be steps, from 0 on, in ascending order")
        if not self.lr > 0:
            raise ValueError(f"lr={self.lr} must be above 0")


#: Inputs and targets.
Batch = tuple[Tensor, Tensor]


class Trainer:
    """A model at a checkpoint, and short runs from there, always with the same data.

    Args:
        task: of one process.
        model: as it is at the checkpoint; it is left so.
        batches: of a short run.
        lr: of SGD.
        seed: of codecs that draw random numbers.
    """

    def __init__(self, task: Task, model: nn.Module, batches: Sequence[Batch], lr: float, seed: int) -> None:
        self.task, self.model, self.batches, self.lr, self.seed = task, model, batches, lr, seed

    def __call__(self, specs: Mapping[str, str]) -> float:
        """The mean loss of a short run in which these layers (name → spec) are compressed."""
        model = copy.deepcopy(self.model)
        codecs = {name: nb.codec(spec) for name, spec in specs.items()}
        losses = []
        for step, (x, y) in enumerate(self.batches):
            losses.append(_gradients(self.task, model, x, y))
            with torch.no_grad():
                for name, p in model.named_parameters():
                    assert p.grad is not None
                    sent = codecs[name].roundtrip(p.grad, seed=self.seed + step) if name in codecs else p.grad
                    p.sub_(sent, alpha=self.lr)
        return math.fsum(losses) / len(losses)


def _gradients(task: Task, model: nn.Module, x: Tensor, y: Tensor) -> float:
    model.zero_grad()
    loss = task.loss(model(x), y)
    torch.autograd.backward(loss)
    return loss.item()


def _stream(task: Task) -> Iterator[Batch]:
    epoch = 0
    while True:
        yield from task.batches(epoch)
        epoch += 1


def measure(
    options: Options, families: Sequence[str], on_run: Callable[[int, int], None] | None = None
) -> list[dict[str, Any]]:
    """One row per family and checkpoint.

    Rows hold ``family``, ``checkpoint``, ``layers``, ``choices``, ``errors`` and ``losses`` (layers × choices),
    ``pearson``, ``spearman``, ``error_bytes`` and ``loss_bytes`` (of the plans that either metric makes),
    ``reference_bytes``, ``same`` (the share of layers with the same choice in both), ``error_s`` and ``loss_s``.

    Args:
        families: names.
        on_run: called with the number of short runs done, and of all.
    """
    limit = _QUICK_LIMIT if options.quick else None
    task = load(
        "gpt", batch=options.batch, seed=options.seed, rank=0, world_size=1, directory=options.data_dir, limit=limit
    )
    torch.manual_seed(options.seed)
    model = task.model()
    layers = [name for name, p in model.named_parameters() if p.dim() > 1 and p.numel() >= _MIN_NUMEL]
    layers = layers[: _QUICK_LAYERS if options.quick else None]
    of = len(options.checkpoints) * sum(1 + len(layers) * len(FAMILIES[family][1]) for family in families)
    done, step, rows = 0, 0, []
    stream = _stream(task)
    for checkpoint in options.checkpoints:
        while step < checkpoint:
            _gradients(task, model, *next(stream))
            with torch.no_grad():
                for p in model.parameters():
                    assert p.grad is not None
                    p.sub_(p.grad, alpha=options.lr)
            step += 1
        sums = _looks(task, model, layers, [next(stream) for _ in range(options.looks)])
        train = Trainer(task, model, [next(stream) for _ in range(options.steps)], options.lr, options.seed)

        def counted(specs: Mapping[str, str], train: Trainer = train) -> float:
            nonlocal done
            loss = train(specs)
            done += 1
            if on_run is not None:
                on_run(done, of)
            return loss

        for family in families:
            reference, choices = FAMILIES[family]
            begin = time.perf_counter()
            table = error_table(sums, choices, seed=options.seed)
            error_s = time.perf_counter() - begin
            begin = time.perf_counter()
            losses = loss_table(counted, layers, choices)
            rows.append(
                {"family": family, "checkpoint": checkpoint, "layers": layers, "choices": list(choices)}
                | {"errors": table.errors.tolist(), "losses": losses.tolist()}
                | _compared(table, losses, reference)
                | {"error_s": error_s, "loss_s": time.perf_counter() - begin}
            )
    return rows


def _looks(task: Task, model: nn.Module, layers: Sequence[str], batches: Sequence[Batch]) -> dict[str, Tensor]:
    """Gradients at a checkpoint, added up."""
    sums = {name: torch.zeros_like(model.get_parameter(name)) for name in layers}
    for x, y in batches:
        _gradients(task, model, x, y)
        for name in layers:
            gradient = model.get_parameter(name).grad
            assert gradient is not None
            sums[name] += gradient
    return sums


def _compared(table: ErrorTable, losses: np.ndarray, reference: str) -> dict[str, Any]:
    """What the two metrics have to do with each other, and the plans that they make at a reference's."""
    uniform = table.column(reference)
    pearson, spearman = correlation(table.errors, losses)
    plans = [_plan(table.sizes, metric, uniform) for metric in (table.errors, losses.clip(min=0.0))]
    by_error, by_loss = (_nbytes(table.sizes, plan) for plan in plans)
    return {
        "pearson": pearson,
        "spearman": spearman,
        "error_bytes": by_error,
        "loss_bytes": by_loss,
        "reference_bytes": float(table.sizes[:, uniform].sum()),
        "same": float((plans[0] == plans[1]).mean()),
    }


def _plan(sizes: np.ndarray, metric: np.ndarray, uniform: int) -> np.ndarray:
    """The choice of every layer: no more of the metric than uniform's, and no more bytes."""
    chosen = solve(sizes, metric, math.fsum(metric[:, uniform]))
    everywhere = np.full_like(chosen, uniform)
    return min(chosen, everywhere, key=functools.partial(_nbytes, sizes))


def _nbytes(sizes: np.ndarray, plan: np.ndarray) -> float:
    return float(sizes[np.arange(len(plan)), plan].sum())


def claims(rows: Sequence[Mapping[str, Any]]) -> list[Claim]:
    """What the paper says, by these rows."""
    said = []
    for family in dict.fromkeys(row["family"] for row in rows):
        own = [row for row in rows if row["family"] == family]
        said.append(
            Claim(
                f"{family}: errors and losses are highly correlated (rank correlation at least {_HIGH:g})",
                all(row["spearman"] >= _HIGH for row in own),
                "; ".join(f"{row['spearman']:.2f} after {row['checkpoint']} steps" for row in own),
            )
        )
        said.append(
            Claim(
                f"{family}: plans by either send as much (within {_ALIKE:.0%})",
                all(abs(row["error_bytes"] - row["loss_bytes"]) <= _ALIKE * row["error_bytes"] for row in own),
                "; ".join(
                    f"{row['reference_bytes'] / row['error_bytes']:.2f} and "
                    f"{row['reference_bytes'] / row['loss_bytes']:.2f} times less than uniform after "
                    f"{row['checkpoint']} steps"
                    for row in own
                ),
            )
        )
    return said


# ---- the command -----------------------------------------------------------------------------------------------------

#: A heading, and what the column says of a row.
_COLUMNS: tuple[Column, ...] = (
    ("family", lambda row: row["family"]),
    ("after", lambda row: f"{row['checkpoint']} steps"),
    ("Pearson", lambda row: f"{row['pearson']:.2f}"),
    ("of ranks", lambda row: f"{row['spearman']:.2f}"),
    ("uniform", lambda row: format_bytes(row["reference_bytes"])),
    ("by error", lambda row: format_bytes(row["error_bytes"])),
    ("by loss", lambda row: format_bytes(row["loss_bytes"])),
    ("same choice", lambda row: f"{row['same']:.0%}"),
    ("error takes", lambda row: format_seconds(row["error_s"])),
    ("loss takes", lambda row: format_seconds(row["loss_s"])),
)

_LEGEND = (
    "Correlation between the error of a layer's gradient and what compressing that layer alone does to the loss, over "
    "all layers and choices; then the bytes of all payloads in a uniform setting, and in plans that keep the sum of "
    "either metric, and how many layers have the same choice in both."
)

_LAYOUT = Layout(
    tables=lambda rows: [("gpt", list(rows))],
    columns=lambda _: _COLUMNS,
    legend=_LEGEND,
    caption=lambda title, rows: f"{title}; layers: {len(rows[0]['layers'])}",
    notes=lambda rows: [f"{family}: {', '.join(f'`{spec}`' for spec in choices)}" for family, choices in _listed(rows)],
)
_TITLES = {"gpt": "WikiText-2 as bytes, GPT, one process"}


def _listed(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[str]]]:
    """Families and their choices."""
    return list({row["family"]: row["choices"] for row in rows}.items())


_PAPER = "Alimohammadi et al. 2022, L-GreCo (arXiv 2210.17357), section 5.4"


def _last(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Of each family the row after most steps."""
    return list({row["family"]: row for row in sorted(rows, key=lambda row: int(row["checkpoint"]))}.values())


def _found(rows: Sequence[Mapping[str, Any]]) -> str:
    own = _last(rows)
    told = "; ".join(
        f"{row['family']} {row['reference_bytes'] / row['error_bytes']:.2f} and "
        f"{row['reference_bytes'] / row['loss_bytes']:.2f} times"
        for row in own
    )
    correlations = "; ".join(f"{row['spearman']:.2f}" for row in own)
    slowest = max(own, key=lambda row: float(row["loss_s"]))
    return (
        f"After {own[0]['checkpoint']} steps of training, plans by errors and by losses send this many times less than "
        f"a uniform setting: {told}. The rank correlations of errors and losses are {correlations}. A table of losses "
        f"takes up to {format_seconds(slowest['loss_s'])}, one of errors {format_seconds(slowest['error_s'])}."
    )


def _panels(rows: Sequence[Mapping[str, Any]]) -> list[Panel]:
    own = _last(rows)
    fewer, takes = [], []
    for row in own:
        for metric in ("error", "loss"):
            label, strong = f"{row['family']}, by {metric}", metric == "error"
            times, seconds = row["reference_bytes"] / row[f"{metric}_bytes"], row[f"{metric}_s"]
            fewer.append(Bar(label, times, f"{times:.2f}×", strong))
            takes.append(Bar(label, seconds, format_seconds(seconds), strong))
    return [
        Panel("Times fewer bytes", "than the uniform setting", fewer),
        Panel("What the table takes", "shorter is better", takes),
    ]


_OPENING = Opening(
    title="Errors against losses",
    says="L-GreCo budgets the error of every layer's gradient. What matters is the loss; the paper says that both are "
    "highly correlated, and that plans made by either send as much.",
    ran="A small GPT on bytes of WikiText-2: one layer at a time is compressed in short runs that begin at the same "
    "checkpoint, for three families of codecs, and the change of the loss is compared with the error of the gradient.",
    found=_found,
    panels=_panels,
)


def page(record: Mapping[str, Any], path: Path) -> None:
    """Write the page of a record: what is in ``summary.json``."""
    rows = record["rows"]
    write_page(
        path,
        lambda pictures: markdown(
            rows,
            _TITLES,
            [Claim(**claim) for claim in record["claims"]],
            _LAYOUT,
            opening=_OPENING,
            paper=_PAPER,
            page=path.stem,
            pictures=pictures,
            record=dict(record),
            commits=sorted({str(row["commit"]) for row in rows}),
        ),
        rows,
        _OPENING,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (``sys.argv`` when None) and return its exit code."""
    return command_line(
        "sensitivity",
        Options,
        _run,
        argv,
        stopped="Families that were finished are kept: the same command goes on from there.",
    )


def _show(progress: Progress, bar: TaskID, done: int, of: int) -> None:
    progress.update(bar, completed=done, total=of)


def _run(options: Options, command: list[str], console: Console) -> None:
    from rich.progress import Progress

    if options.quick:
        options = replace(options, checkpoints=options.checkpoints[:1], steps=2, looks=2)
    record = provenance(options.seed, command)
    written = (options.output or Path(__file__).parent / "results" / "sensitivity") / "summary.json"
    config = {
        key: value
        for key, value in asdict(options).items()
        if key not in ("data_dir", "families", "markdown", "output", "resume")
    }
    config = json.loads(json.dumps(config))
    there: list[dict[str, Any]] = []
    if options.resume and written.exists():
        earlier = read_json(written, ("config", "rows"))
        if earlier["config"] == config:
            there = earlier["rows"]
    with Progress(console=console, transient=True) as progress:
        for family in options.families:
            if any(row["family"] == family for row in there):
                continue
            bar = progress.add_task(f"{family}: short runs", total=None)
            rows = measure(options, [family], functools.partial(_show, progress, bar))
            progress.remove_task(bar)
            there += [row | {"commit": record["commit"]} for row in rows]
            write_json(written, record | {"config": config, "rows": there})
    rows = [row for family in options.families for row in there if row["family"] == family]
    said = [] if options.quick else claims(rows)
    show(console, rows, _TITLES, said, _LAYOUT)
    whole = record | {"config": config, "claims": [asdict(claim) for claim in said], "rows": rows}
    write_json(written, whole | {"rows": there})
    if options.markdown is not None:
        page(whole, options.markdown)
    console.print(f"written: {written}", style="dim", markup=False, highlight=False)


if __name__ == "__main__":
    sys.exit(main())
