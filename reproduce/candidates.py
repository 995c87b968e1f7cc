"""Compare methods that the library does not have (from authors' code and other papers) with its own, at equal bytes.

Each candidate is in a table with the method that it would replace. A small GPT is trained on bytes of WikiText-2, and
one process simulates all of its ranks. There are two measures.

*The cumulated error.* The model is trained without compression, by SGD. Every codec gets the same stream: what every
rank would send in step t, its gradient times the learning rate, g_t. With d_t the average that arrives, the error after
T steps is ‖Σ_{t≤T} (d_t − mean of g_t)‖: how far compression would have moved the parameters of plain SGD from their
path. The error is divided by the mean of ‖mean of g_t‖ over all steps, so its unit is the mean step, and it is averaged
over T. A number that error feedback delays counts as error until it is sent.

*Training.* Where the question is what late numbers do to an optimizer, the model is trained with the compression, and
judged by the perplexity of held-out text.

Candidates are written in plain PyTorch and make no payloads: their bytes are those that a payload would take.

* natural compression: the nearest powers of two, rounded at random (Horváth et al. 2019, arXiv 1905.10988), in 8 bits;
  natural dithering: 0 and the powers of two below a bucket's largest magnitude, with the same paper's rounding;
* TernGrad (Wen et al. 2017, arXiv 1705.07878): −1, 0 or 1 times a layer's largest magnitude, after it was clipped at
  2.5 standard deviations, in 2 bits;
* random blocks: consecutive elements from a random position on, as in the code of PowerSGD's paper
  (github.com/epfml/powersgd);
* how L-GreCo's authors plan (github.com/LGrCo/L-GreCo): five rounds of power iteration in the first step of a layer
  whose rank has changed, and errors measured on the sum of the last ten steps of a window (here: ``last=10``);
* DGC's warm-up in the authors' code (github.com/synxlin/deep-gradient-compression): a list of densities, by default
  powers of the (n+1)-th root of the density, instead of the paper's powers of a quarter; and clipping each layer by
  itself, for which that code has a hook;
* where every rank has an optimizer of its own, sending momentum instead of updates (DeMo, 0/1 Adam), and averaging
  moments over ranks: :mod:`reproduce.candidates_steps`.

Run ``python -m reproduce.candidates`` (an hour and a half on two cores), ``--quick`` (seconds), ``--help``.

Shapes: R ranks, N elements of a tensor.
"""

from __future__ import annotations

import functools
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from narrowband.bench.models import GPT, GPTConfig
from narrowband.report.record import provenance, read_json, write_json
from reproduce.candidates_page import LAYOUT, TITLES, claims, lines, page
from reproduce.candidates_senders import DENSE, SUBJECTS, OfLibrary, Sender, Subject, sender
from reproduce.candidates_steps import BETAS, WEIGHT_DECAY, Stepping, stepping
from reproduce.command import QUICK_LIMIT, RESULTS, command_line, progress, show
from reproduce.data import Text, about, wikitext2
from reproduce.html import write_pages
from reproduce.row import files_of
from reproduce.tasks import Wikitext

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Options", "main", "stream", "train"]

_MIN_NUMEL = 1024
_RISES = 0.1
#: Learning rates of rows that set none: plain SGD, AdamW, and SGD with momentum.
_RATES = {"stream": 0.3, "adamw": 4e-3, "sgd": 0.05}


@dataclass(frozen=True)
class Options:
    """Compare methods that the library does not have with its own, at equal bytes."""

    ranks: int = 4
    """Ranks that the process simulates."""
    steps: int = 600
    """Training steps of a run."""
    batch: int = 16
    """Windows of 64 bytes per step, over all ranks."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of parameters, order of samples and rounding."""
    data_dir: Path | None = None
    """Folder with the data; else NARROWBAND_DATA names it; else sets are downloaded."""
    output: Path | None = None
    """Directory of the results; reproduce/results/candidates when left out."""
    resume: bool = True
    """Take rows that an earlier run with the same options finished; --no-resume measures them again."""
    quick: bool = False
    """One seed, two steps, little data: to see in seconds that everything works."""
    markdown: Path | None = None
    """Also write the tables and claims to this file, for the documentation."""

    def __post_init__(self) -> None:
        if self.ranks < 1 or self.steps < 1 or not self.seeds:
            raise ValueError(f"ranks={self.ranks} and steps={self.steps} must be at least 1, and there must be a seed")
        if self.batch % self.ranks:
            raise ValueError(f"batch={self.batch} cannot be shared evenly by ranks={self.ranks}")


# ---- runs ------------------------------------------------------------------------------------------------------------


class _Bytes(Wikitext):
    """WikiText-2 with a smaller GPT and shorter windows than the other experiments use."""

    length = 64

    def model(self) -> nn.Module:
        return GPT(GPTConfig(vocab=256, dim=64, blocks=2, heads=4, sequence=self.length, batch=4))


@dataclass
class _Run:
    """A model, its ranks' batches, and the learning rate of every step."""

    options: Options
    seed: int
    lr: float
    tasks: list[_Bytes] = field(init=False)

    def __post_init__(self) -> None:
        text = wikitext2(self.options.data_dir)
        limit = QUICK_LIMIT["gpt"] if self.options.quick else None
        cut = Text(text.train[:limit], text.heldout[:limit], text.vocabulary, text.digest)
        ranks = self.options.ranks
        self.tasks = [_Bytes(self.options.batch, self.seed, rank, ranks, cut) for rank in range(ranks)]
        torch.manual_seed(self.seed)
        self.model = self.tasks[0].model()
        self.named = dict(self.model.named_parameters())
        self.compressed = {name for name, p in self.named.items() if p.dim() > 1 and p.numel() >= _MIN_NUMEL}

    def rate(self, step: int) -> float:
        steps = self.options.steps
        return self.lr * min(1.0, (step + 1) / (_RISES * steps)) * 0.5 * (1.0 + math.cos(math.pi * step / steps))

    def gradients(self) -> Iterator[dict[str, Tensor]]:
        """Yield, for every step, name → the gradients of all ranks, (R, N)."""
        streams = [self._batches(task) for task in self.tasks]
        for _ in range(self.options.steps):
            found: dict[str, list[Tensor]] = {name: [] for name in self.named}
            for task, batches in zip(self.tasks, streams, strict=True):
                x, y = next(batches)
                self.model.zero_grad()
                torch.autograd.backward(task.loss(self.model(x), y))
                for name, p in self.named.items():
                    assert p.grad is not None
                    found[name].append(p.grad.reshape(-1).clone())
            yield {name: torch.stack(parts) for name, parts in found.items()}

    @staticmethod
    def _batches(task: _Bytes) -> Iterator[tuple[Tensor, Tensor]]:
        epoch = 0
        while True:
            yield from task.batches(epoch)
            epoch += 1

    @torch.no_grad()
    def perplexity(self) -> float:
        sums = [task.tally(self.model) for task in self.tasks]
        total, count = (math.fsum(parts) for parts in zip(*sums, strict=True))
        return self.tasks[0].value(total, count)


def stream(options: Options, seed: int, subjects: Sequence[Subject]) -> list[dict[str, Any]]:
    """Measure the cumulated errors of all subjects in one uncompressed run.

    Returns a row per subject, with ``nbytes`` (per step and rank) and ``cumulated``.
    """
    run = _Run(options, seed, lr=_RATES["stream"])
    senders = [sender(subject, options.ranks, seed, options.steps) for subject in subjects]
    astray = [{name: torch.zeros(run.named[name].numel()) for name in run.compressed} for _ in subjects]
    cumulated, lengths = [0.0] * len(subjects), 0.0
    optimizer = torch.optim.SGD(run.model.parameters(), lr=run.lr)
    for step, gradients in enumerate(run.gradients()):
        rate = run.rate(step)
        steps = {name: gradients[name] * rate for name in sorted(run.compressed)}
        lengths += _norm([x.mean(0) for x in steps.values()])
        for at, own in enumerate(senders):
            for name, x in steps.items():
                arrived = own.send(name, x.clone(), run.named[name].shape, step)
                astray[at][name] += arrived - x.mean(0)
            cumulated[at] += _norm(list(astray[at].values()))
        _advance(run, optimizer, rate, {name: x.mean(0) for name, x in gradients.items()})
    return [
        _row(subject, seed, run, own, options) | {"cumulated": total / lengths, "perplexity": None}
        for subject, own, total in zip(subjects, senders, cumulated, strict=True)
    ]


def train(options: Options, seed: int, subject: Subject) -> dict[str, Any]:
    """Train with one subject, and return its row: ``nbytes`` (per step and rank) and ``perplexity``."""
    if subject.kind == "own":
        return _train_own(options, seed, subject)
    adamw = subject.kind == "adamw"
    run = _Run(options, seed, lr=subject.rate or _RATES[subject.kind])
    own = sender(subject, options.ranks, seed, options.steps)
    optimizer: torch.optim.Optimizer
    if adamw:
        optimizer = torch.optim.AdamW(run.model.parameters(), lr=run.lr, betas=BETAS, weight_decay=WEIGHT_DECAY)
    else:  # DGC applies momentum itself
        plain = subject.spec == DENSE
        optimizer = torch.optim.SGD(run.model.parameters(), lr=run.lr, momentum=0.9 if plain else 0.0)
    for step, gradients in enumerate(run.gradients()):
        _clip(gradients, subject, run.compressed)
        averages = {name: x.mean(0) for name, x in gradients.items() if name not in run.compressed}
        if isinstance(own, OfLibrary) and own.feedbacks[0] is not None:
            own.feedbacks[0].advance_uncompressed(list(averages.items()))
        for name in sorted(run.compressed):
            averages[name] = own.send(name, gradients[name], run.named[name].shape, step)
        _advance(run, optimizer, run.rate(step), averages)
    return _row(subject, seed, run, own, options) | {"cumulated": None, "perplexity": run.perplexity()}


def _train_own(options: Options, seed: int, subject: Subject) -> dict[str, Any]:
    """Train with a subject whose ranks have optimizers of their own, and return its row."""
    run = _Run(options, seed, lr=subject.rate)
    own = stepping(subject, frozenset(run.compressed), options.ranks, seed, options.steps)
    parameters = {name: p.detach() for name, p in run.named.items()}
    for step, gradients in enumerate(run.gradients()):
        for name, move in own.moves(gradients, parameters, run.rate(step), step).items():
            parameters[name].view(-1).add_(move)
    return _row(subject, seed, run, own, options) | {"cumulated": None, "perplexity": run.perplexity()}


def _alone(options: Options, seed: int, subject: Subject) -> list[dict[str, Any]]:
    return [train(options, seed, subject)]


def _row(subject: Subject, seed: int, run: _Run, own: Sender | Stepping, options: Options) -> dict[str, Any]:
    shapes = [run.named[name].shape for name in run.compressed]
    return {
        "group": subject.group, "name": subject.name, "spec": subject.spec, "kind": subject.kind, "seed": seed,
        "nbytes": own.mean_nbytes(shapes, options.steps), "dense_nbytes": 4 * sum(shape.numel() for shape in shapes),
    }  # fmt: skip


def _advance(run: _Run, optimizer: torch.optim.Optimizer, rate: float, averages: Mapping[str, Tensor]) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate
    for name, p in run.named.items():
        p.grad = averages[name].view_as(p)
    optimizer.step()


def _clip(gradients: Mapping[str, Tensor], subject: Subject, compressed: set[str]) -> None:
    """Clip each rank's gradients in place, as the subject says."""
    if not math.isfinite(subject.clip):
        return
    own = [gradients[name] for name in sorted(compressed)]
    groups = [[x] for x in own] if subject.by_layer else [list(gradients.values())]
    limit = subject.clip * math.sqrt(own[0].shape[0] / len(groups))
    for group in groups:
        norms = torch.stack([x.square().sum(1) for x in group]).sum(0).sqrt()
        for x in group:
            x.mul_((limit / norms.clamp_min(limit))[:, None])


def _norm(parts: Sequence[Tensor]) -> float:
    return math.sqrt(math.fsum(float(part.double().square().sum()) for part in parts))


# ---- the command -----------------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (``sys.argv`` when None) and return its exit code."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # makes sums, and so the streams of gradients, independent of the number of cores
    try:
        return command_line(
            "candidates", Options, _run, argv, stopped="Finished rows are kept: the same command goes on from there."
        )
    finally:
        torch.set_num_threads(threads)


def _run(options: Options, command: list[str], console: Console) -> None:
    if options.quick:
        options = replace(options, steps=2, seeds=options.seeds[:1])
    record = provenance(options.seeds[0], command) | {"data": about(files_of(_Bytes.name), options.data_dir)}
    written = (options.output or RESULTS / "candidates") / "summary.json"
    left_out = ("data_dir", "seeds", "markdown", "output", "resume")
    config = {key: value for key, value in asdict(options).items() if key not in left_out}
    rows: list[dict[str, Any]] = []
    if options.resume and written.exists():
        earlier = read_json(written, ("config", "rows"))
        rows = earlier["rows"] if earlier["config"] == json.loads(json.dumps(config)) else []
    with progress(console) as bars:
        bar = bars.add_task("rows", total=len(SUBJECTS) * len(options.seeds), completed=len(rows), said="")
        for seed in options.seeds:
            lacking = [subject for subject in SUBJECTS if not any(_same(row, subject, seed) for row in rows)]
            streamed = [subject for subject in lacking if subject.kind == "stream"]
            work = [functools.partial(stream, options, seed, streamed)] if streamed else []
            work += [functools.partial(_alone, options, seed, one) for one in lacking if one.kind != "stream"]
            for finished in (one() for one in work):
                rows += [row | {"commit": record["commit"]} for row in finished]
                write_json(written, record | {"config": config, "rows": rows})
                bars.advance(bar, len(finished))
    found = lines([row for row in rows if any(_same(row, subject, row["seed"]) for subject in SUBJECTS)])
    show(console, found, TITLES, [] if options.quick else claims(found), LAYOUT)
    whole = record | {"config": config, "rows": rows}
    write_json(written, whole)
    write_pages(written, whole, options.markdown, page, console)


def _same(row: Mapping[str, Any], subject: Subject, seed: int) -> bool:
    own = row["group"], row["name"], row["spec"], row["kind"], row["seed"]
    return own == (subject.group, subject.name, subject.spec, subject.kind, seed)


if __name__ == "__main__":
    sys.exit(main())
