"""What authors' code and other papers have that might be here, too: what it brings at equal bytes, beside what is here.

Each candidate stands in a table with what it would replace. A small GPT reads bytes of WikiText-2, and one process
plays all of its ranks. There are two measures.

*The cumulated error.* The model is trained without compression, by SGD. Every codec gets the same stream of what every
rank would send, its gradient times the learning rate, g_t. With d_t the average that arrives, the error after T steps
is ‖Σ_{t≤T} (d_t − mean of g_t)‖: how far the parameters of plain SGD would have been led astray. It is given in mean
steps, divided by the mean of ‖mean of g_t‖ over all steps, and is itself a mean over T. What feedback delays counts as
long as it is late.

*Training.* Where the question is what late numbers do to an optimizer, the model is trained with the compression, and
judged by the perplexity of held-out text.

Candidates are written here in plain PyTorch, with no payload: their bytes are those that a payload would take.

* natural compression: the nearest powers of two, rounded at random (Horváth et al. 2019, arXiv 1905.10988), in 8 bits;
  natural dithering: 0 and the powers of two below a bucket's largest magnitude, with the same paper's rounding;
* TernGrad (Wen et al. 2017, arXiv 1705.07878): −1, 0 or 1 times a layer's largest magnitude, after it was clipped at
  2.5 standard deviations, in 2 bits;
* random blocks: neighbours from a random place on, as in the code of PowerSGD's paper (github.com/epfml/powersgd);
* DGC's warm-up in the authors' code (github.com/synxlin/deep-gradient-compression): a list of densities, by default
  powers of the (n+1)-th root of the density, instead of the paper's powers of a quarter; and clipping each layer by
  itself, for which that code has a place.

Run ``python -m reproduce.candidates`` (an hour on two cores), ``--quick`` (seconds), ``--help``.

Shapes: R ranks, N elements of a tensor.
"""

from __future__ import annotations

import functools
import json
import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

import narrowband as nb
from narrowband.bench.models import GPT, GPTConfig
from narrowband.codecs import TopK
from narrowband.collectives import Operand, Peers, collective
from narrowband.feedback import Compression, Feedback
from narrowband.report.record import provenance, read_json, write_json
from narrowband.units import format_bytes
from reproduce.command import QUICK_LIMIT, command_line, progress, show
from reproduce.data import Text, wikitext2
from reproduce.pairs import Difference, difference
from reproduce.pictures import Bar, Panel
from reproduce.report import Claim, Column, Layout, Opening, claimed, markdown, write_page
from reproduce.tasks import Wikitext

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["CANDIDATES", "SUBJECTS", "Options", "Subject", "claims", "main", "natural", "sender", "stream", "train"]

_MIN_NUMEL = 1024
_BETAS, _WEIGHT_DECAY = (0.9, 0.999), 0.01
_RISES = 0.1
#: Learning rates: of plain SGD, of AdamW, and of SGD with momentum.
_RATES = {"stream": 0.3, "adamw": 4e-3, "sgd": 0.05}


@dataclass(frozen=True)
class Options:
    """Measure what is not in the library at equal bytes with what is."""

    ranks: int = 4
    """That the process plays."""
    steps: int = 600
    """Of a run."""
    batch: int = 16
    """Windows of 64 bytes per step, over all ranks."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Of parameters, order of samples and rounding."""
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


# ---- candidates ------------------------------------------------------------------------------------------------------


def natural(x: Tensor, generator: torch.Generator) -> Tensor:
    """Each element becomes one of the two powers of two around it, the right value in the mean."""
    mantissa, exponent = torch.frexp(x.abs())  # of magnitudes from 0.5 up to 1
    below = torch.ldexp(torch.ones_like(x), exponent - 1)
    up = _uniform(x, generator) < 2 * mantissa - 1
    return torch.where(x == 0, 0.0, x.sign() * torch.where(up, 2 * below, below))


def natural_dithering(x: Tensor, generator: torch.Generator, bits: int, bucket: int = 128) -> Tensor:
    """QSGD's rounding with levels 0, 2^(1−s), …, 1/2, 1 times a bucket's largest magnitude, s = 2^(bits−1) − 1."""
    count = 2 ** (bits - 1) - 1
    levels = torch.tensor([0.0] + [2.0**-power for power in range(count - 1, -1, -1)])
    padded = nn.functional.pad(x, (0, -x.numel() % bucket)).view(-1, bucket)
    largest = padded.abs().amax(1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    share = padded.abs() / largest
    at = (torch.bucketize(share, levels, right=True) - 1).clamp(0, count - 1)
    low, high = levels[at], levels[at + 1]
    rounded = torch.where(_uniform(share, generator) < (share - low) / (high - low), high, low)
    return (padded.sign() * rounded * largest).view(-1)[: x.numel()]


def ternary(x: Tensor, generator: torch.Generator, clip: float = 2.5) -> Tensor:
    """−1, 0 or 1 times the largest magnitude of what is clipped at so many standard deviations."""
    limit = clip * x.std()
    clipped = x.clamp(-limit, limit)
    largest = clipped.abs().amax()
    return clipped.sign() * largest * (_uniform(x, generator) * largest < clipped.abs())


def block(x: Tensor, generator: torch.Generator, density: float) -> Tensor:
    """As many neighbours as the density says, from a random place on and around the end."""
    count = max(1, round(density * x.numel()))
    first = int(torch.randint(x.numel(), (), generator=generator))
    at = (torch.arange(count) + first) % x.numel()
    return torch.zeros_like(x).index_put_((at,), x[at])


def _uniform(x: Tensor, generator: torch.Generator) -> Tensor:
    return torch.rand(x.shape, generator=generator)


@dataclass(frozen=True)
class Candidate:
    """An encoding that the library does not have.

    Attributes:
        arrives: gets a flat tensor and a source of chance, and returns what would be decoded.
        like: the codec whose payload would be as long.
        shared: whether all ranks draw the same.
    """

    arrives: Callable[[Tensor, torch.Generator], Tensor]
    like: str
    shared: bool = False


CANDIDATES = {
    "natural compression": Candidate(natural, "qsgd:bits=8,bucket=1048576"),
    "natural dithering, 3 bits": Candidate(functools.partial(natural_dithering, bits=3), "qsgd:bits=3"),
    "TernGrad": Candidate(ternary, "qsgd:bits=2,bucket=1048576"),
    "random block, 10 %": Candidate(functools.partial(block, density=0.1), "randomk:density=0.1", shared=True),
}


# ---- what is compared ------------------------------------------------------------------------------------------------

Kind = Literal["stream", "adamw", "sgd"]


@dataclass(frozen=True)
class Subject:
    """A row.

    Attributes:
        group: the table that it stands in.
        name: unique there.
        spec: of the library, or ``NAME[+ef]`` of one of ``CANDIDATES``.
        kind: the stream, or the optimizer that trains with it.
        densities: of DGC's warm-up, each for equally many steps.
        warmup: the share of steps over which these are, or in which everything is sent.
        clip: the norm at which the average gradient is clipped, before it is sent: each rank's at so much times √R.
        by_layer: whether each of L compressed layers is clipped by itself, at that divided by √L.
    """

    group: str
    name: str
    spec: str
    kind: Kind = "stream"
    densities: tuple[float, ...] = ()
    warmup: float = 0.0
    clip: float = math.inf
    by_layer: bool = False


def _of(group: str, kind: Kind, *specs: str) -> tuple[Subject, ...]:
    return tuple(Subject(group, spec, spec, kind) for spec in specs)


_DENSE = "none"
_DGC = "dgc:density=0.01"
#: Densities at which a payload with shorter values takes as many bytes.
_DGC_16, _DGC_8 = "dgc:density=0.0164,values=fp16", "dgc:density=0.0245,values=int8"
_WARM = 0.2
_CLIP = 1.0

SUBJECTS: tuple[Subject, ...] = (
    *_of("bits", "stream", "qsgd:bits=8", "natural compression", "natural compression+ef", "qsgd:bits=4+ef"),
    *_of("bits", "stream", "qsgd:bits=3", "natural dithering, 3 bits", "natural dithering, 3 bits+ef"),
    *_of("bits", "stream", "uniform:bits=3,symmetric=true+ef", "qsgd:bits=2", "TernGrad", "qsgd:bits=2+ef"),
    *_of("bits", "stream", "TernGrad+ef", "uniform:bits=2,symmetric=true+ef", "sign+ef"),
    *_of("random", "stream", "randomk:density=0.1+ef", "random block, 10 %+ef"),
    *_of("rank", "stream", "powersgd:rank=2", "powersgd:rank=4,halves=1", "powersgd:rank=2,halves=2"),
    *_of("rank", "stream", "powersgd:rank=4", "powersgd:rank=8,halves=1", "powersgd:rank=4,halves=2"),
    *_of("training", "adamw", _DENSE, "powersgd:rank=4", "powersgd:rank=8,halves=1", "powersgd:rank=4,halves=2"),
    *_of("training", "adamw", "qsgd:bits=2", "TernGrad", "uniform:bits=2,symmetric=true+ef"),
    *_of("training", "adamw", "topk:density=0.01+ef", "topk:density=0.01+ef:decay=0.99"),
    *_of("training", "adamw", "topk:density=0.01+ef:decay=0.95", "topk:density=0.01+ef:decay=0.9"),
    *_of("dgc", "sgd", _DENSE, _DGC, _DGC_16, _DGC_8),
    Subject("dgc", "warm-up of the paper", _DGC, "sgd", (0.25, 0.0625, 0.015625), _WARM),
    Subject("dgc", "warm-up of the authors' code", _DGC, "sgd", tuple(0.01 ** (k / 6) for k in range(1, 6)), _WARM),
    Subject("dgc", "warm-up by everything", _DGC, "sgd", (), _WARM),
    Subject("dgc", "clipped as a whole", _DGC, "sgd", clip=_CLIP),
    Subject("dgc", "clipped by layers", _DGC, "sgd", clip=_CLIP, by_layer=True),
)


# ---- senders ---------------------------------------------------------------------------------------------------------


class Sender(ABC):
    """What one way to compress makes of all ranks' tensors; keeps what feedback keeps, by key."""

    @abstractmethod
    def send(self, key: str, x_RN: Tensor, shape: torch.Size, step: int) -> Tensor:
        """The average that arrives, flat; ``x_RN`` may be overwritten."""

    @abstractmethod
    def nbytes(self, shape: torch.Size, step: int) -> float:
        """Of one rank's payload of a tensor of this shape."""


class OfLibrary(Sender):
    """A codec with its feedback on every rank, as all-gather delivers it.

    Args:
        chosen: both.
        ranks: how many.
        seed: of rounding.
        densities, begin: a warm-up: each density for equally many of the first ``begin`` steps; no density: everything.
    """

    def __init__(
        self, chosen: Compression, ranks: int, seed: int, densities: Sequence[float] = (), begin: int = 0
    ) -> None:
        self.chosen, self.seed, self.densities, self.begin = chosen, seed, densities, begin
        self.feedbacks = [chosen.new_feedback() for _ in range(ranks)]

    def _codec(self, step: int) -> nb.Codec:
        if step >= self.begin:
            return self.chosen.codec
        if not self.densities:
            return nb.codec("none")
        assert isinstance(self.chosen.codec, TopK)
        return replace(self.chosen.codec, density=self.densities[step * len(self.densities) // self.begin])

    def send(self, key: str, x_RN: Tensor, shape: torch.Size, step: int) -> Tensor:
        codec, payloads, seeds = self._codec(step), [], []
        for rank, (x, feedback) in enumerate(zip(x_RN, self.feedbacks, strict=True)):
            seed = ((self.seed << 20) + step << 8) + (0 if codec.shared_seed else rank)
            if feedback is None:
                payloads.append(codec.encode(x.view(shape), seed=seed))
            else:
                assert isinstance(feedback, Feedback)
                payloads.append(feedback.encode(key, x, codec, shape=shape, seed=seed, commit=True)[1])
            seeds.append(seed)
        return codec.decode_mean(payloads, torch.empty(shape), seeds=seeds).view(-1)

    def nbytes(self, shape: torch.Size, step: int) -> float:
        return self._codec(step).payload_nbytes(shape)


class OfAverages(Sender):
    """PowerSGD. It is linear, so it makes of all ranks' tensors what it makes of their average."""

    def __init__(self, chosen: Compression, seed: int) -> None:
        self.chosen, self.seed, self.state = chosen, seed, chosen.new_feedback()
        assert self.state is not None
        assert self.state.collective is not None
        self.kind = collective(self.state.collective)

    def send(self, key: str, x_RN: Tensor, shape: torch.Size, step: int) -> Tensor:
        operand = Operand(key, x_RN.mean(0), shape, self.chosen.codec, None, lambda _: (self.seed << 20) + step)
        exchange = self.kind([operand], Peers(None, 0, 1), measure=False, state=self.state)
        exchange.encode()
        for _ in exchange.job():
            pass
        exchange.deliver(good=True)
        return operand.average

    def nbytes(self, shape: torch.Size, step: int) -> float:
        return self.chosen.layer_nbytes(shape)


class OfCandidate(Sender):
    """One of ``CANDIDATES``, with error feedback or without."""

    def __init__(self, candidate: Candidate, ef: bool, ranks: int, seed: int) -> None:
        self.candidate, self.ef = candidate, ef
        self.generators = [torch.Generator().manual_seed(seed if candidate.shared else seed + r) for r in range(ranks)]
        self.residuals: dict[str, Tensor] = {}

    def send(self, key: str, x_RN: Tensor, shape: torch.Size, step: int) -> Tensor:
        if self.ef and key in self.residuals:
            x_RN = x_RN + self.residuals[key]
        arrived = torch.stack([self.candidate.arrives(x, g) for x, g in zip(x_RN, self.generators, strict=True)])
        if self.ef:
            self.residuals[key] = x_RN - arrived
        return arrived.mean(0)

    def nbytes(self, shape: torch.Size, step: int) -> float:
        return nb.codec(self.candidate.like).payload_nbytes(shape)


def sender(subject: Subject, ranks: int, seed: int, steps: int) -> Sender:
    """What a row sends with."""
    name, _, behind = subject.spec.rpartition("+") if subject.spec.endswith("+ef") else (subject.spec, "", "")
    if name in CANDIDATES:
        return OfCandidate(CANDIDATES[name], bool(behind), ranks, seed)
    chosen = nb.compression(subject.spec)
    if chosen.feedback is not None and chosen.feedback.collective is not None:
        return OfAverages(chosen, seed)
    return OfLibrary(chosen, ranks, seed, subject.densities, round(subject.warmup * steps))


# ---- runs ------------------------------------------------------------------------------------------------------------


class _Bytes(Wikitext):
    """A smaller GPT, and shorter windows."""

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
        """Of every step, name → all ranks' gradients (R, N)."""
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
    """A row per subject, of one run without compression: ``nbytes`` per step and rank, and ``cumulated``."""
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
    """The row of one subject, trained with it: ``nbytes`` per step and rank, and ``perplexity``."""
    adamw = subject.kind == "adamw"
    run = _Run(options, seed, lr=_RATES[subject.kind])
    own = sender(subject, options.ranks, seed, options.steps)
    optimizer: torch.optim.Optimizer
    if adamw:
        optimizer = torch.optim.AdamW(run.model.parameters(), lr=run.lr, betas=_BETAS, weight_decay=_WEIGHT_DECAY)
    else:  # DGC has the momentum
        plain = subject.spec == _DENSE
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


def _alone(options: Options, seed: int, subject: Subject) -> list[dict[str, Any]]:
    return [train(options, seed, subject)]


def _row(subject: Subject, seed: int, run: _Run, own: Sender, options: Options) -> dict[str, Any]:
    shapes = [run.named[name].shape for name in run.compressed]
    sent = math.fsum(own.nbytes(shape, step) for shape in shapes for step in range(options.steps)) / options.steps
    return {
        "group": subject.group, "name": subject.name, "spec": subject.spec, "kind": subject.kind, "seed": seed,
        "nbytes": sent, "dense_nbytes": 4 * sum(shape.numel() for shape in shapes),
    }  # fmt: skip


def _advance(run: _Run, optimizer: torch.optim.Optimizer, rate: float, averages: Mapping[str, Tensor]) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate
    for name, p in run.named.items():
        p.grad = averages[name].view_as(p)
    optimizer.step()


def _clip(gradients: Mapping[str, Tensor], subject: Subject, compressed: set[str]) -> None:
    """Each rank's gradients, in place."""
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


# ---- what came of it -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Line:
    """A row over its seeds."""

    group: str
    name: str
    spec: str
    kind: str
    nbytes: float
    ratio: float
    scores: dict[int, float]

    @property
    def mean(self) -> float:
        return math.fsum(self.scores.values()) / len(self.scores)


def lines(rows: Sequence[Mapping[str, Any]]) -> list[Line]:
    """Rows put together by group and name."""
    found: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        found.setdefault((row["group"], row["name"]), []).append(row)
    return [
        Line(
            group, name, own[0]["spec"], own[0]["kind"], own[0]["nbytes"], own[0]["dense_nbytes"] / own[0]["nbytes"],
            {row["seed"]: row["perplexity" if row["cumulated"] is None else "cumulated"] for row in own},
        )
        for (group, name), own in found.items()
    ]  # fmt: skip


def _beside(found: Sequence[Line], group: str, one: str, other: str) -> Difference:
    """How far the first row's score is from the second's, as a share of it."""
    own = {line.name: line.scores for line in found if line.group == group}
    if one not in own or other not in own:
        raise LookupError(f"needs {one} and {other}")
    return difference(own[one], own[other], names=(one, other), higher_is_better=False, relative=True)


#: What is said, the table that it is about, and the rows of which the first is better than the second.
_BETTER = (
    ("natural compression loses more than qsgd with half of its bits and feedback", "bits", "qsgd:bits=4+ef",
     "natural compression+ef"),
    ("natural dithering loses less than qsgd:bits=3 without feedback", "bits", "natural dithering, 3 bits",
     "qsgd:bits=3"),
    ("and more than what is there with feedback", "bits", "uniform:bits=3,symmetric=true+ef",
     "natural dithering, 3 bits+ef"),
    ("TernGrad loses less than qsgd:bits=2 without feedback", "bits", "TernGrad", "qsgd:bits=2"),
    ("and more than what is there with feedback", "bits", "uniform:bits=2,symmetric=true+ef", "TernGrad+ef"),
    ("models trained with TernGrad are better than those with qsgd:bits=2", "training", "TernGrad", "qsgd:bits=2"),
    ("and worse than those with two bits and feedback", "training", "uniform:bits=2,symmetric=true+ef", "TernGrad"),
    ("random elements lose less than a random block", "random", "randomk:density=0.1+ef", "random block, 10 %+ef"),
    ("two half rounds lose less than one round, rank 2", "rank", "powersgd:rank=2,halves=2", "powersgd:rank=2"),
    ("two half rounds lose less than one round, rank 4", "rank", "powersgd:rank=4,halves=2", "powersgd:rank=4"),
    ("half a round of twice the rank loses less than one round, rank 2", "rank", "powersgd:rank=4,halves=1",
     "powersgd:rank=2"),
    ("half a round of twice the rank loses less than one round, rank 4", "rank", "powersgd:rank=8,halves=1",
     "powersgd:rank=4"),
    ("two half rounds train a better model than one round, rank 4", "training", "powersgd:rank=4,halves=2",
     "powersgd:rank=4"),
    ("half a round of twice the rank trains a better model than one round", "training", "powersgd:rank=8,halves=1",
     "powersgd:rank=4"),
    ("a residual that decays by 5 % a step trains a better model", "training", "topk:density=0.01+ef:decay=0.95",
     "topk:density=0.01+ef"),
    ("DGC sends more values in 16 bits to better effect", "dgc", _DGC_16, _DGC),
    ("and in 8 bits", "dgc", _DGC_8, _DGC),
    ("the authors' warm-up is better than the paper's", "dgc", "warm-up of the authors' code", "warm-up of the paper"),
    ("clipping by layers is better than clipping as a whole", "dgc", "clipped by layers", "clipped as a whole"),
)  # fmt: skip


def claims(found: Sequence[Line]) -> list[Claim]:
    """What may be said of candidates, by these rows."""
    said = []
    for text, group, one, other in _BETTER:
        try:
            said.append(claimed(text, _beside(found, group, one, other).better()))
        except LookupError:
            said.append(Claim(text, None, "not measured"))
    return said


# ---- the command -----------------------------------------------------------------------------------------------------

_TITLES = {
    "bits": "A few bits per element",
    "random": "Elements at random",
    "rank": "Low rank: rounds and half rounds",
    "training": "Training with AdamW",
    "dgc": "Deep Gradient Compression",
}


def _score(line: Line) -> str:
    own = list(line.scores.values())
    spread = max(own) - min(own)
    return f"{line.mean:.3f}" + (f" (seeds {spread:.3f} apart)" if len(own) > 1 else "")


def _columns(group: str) -> Sequence[Column]:
    trained = group in ("training", "dgc")
    return (
        ("row", lambda line: line.name),
        ("in the library", lambda line: "no" if _is_candidate(line) else "yes"),
        ("sent", lambda line: format_bytes(line.nbytes)),
        ("ratio", lambda line: f"{line.ratio:.1f}"),
        ("perplexity" if trained else "cumulated error", _score),
    )


def _is_candidate(line: Line) -> bool:
    return line.spec.removesuffix("+ef") in CANDIDATES or "authors" in line.name or line.name == "clipped by layers"


_LAYOUT = Layout(
    tables=lambda found: [(group, [line for line in found if line.group == group]) for group in _of_groups(found)],
    columns=_columns,
    legend=(
        "Sent: bytes of one rank's payloads of all compressed matrices in a step, a mean over steps; ratio: how many "
        "times less that is than in 32 bits. Cumulated error: how far the parameters of plain SGD would be led astray, "
        "in mean steps. Perplexity: of held-out text. Less is better in both. Compared are pairs of one seed."
    ),
    caption=lambda title, own: f"{title}; {len(own[0].scores)} seeds",
    notes=lambda own: [f"{line.name}: `{line.spec}`" for line in own if line.name != line.spec],
)


def _of_groups(found: Sequence[Line]) -> list[str]:
    return list(dict.fromkeys(line.group for line in found))


def _found(found: Sequence[Line]) -> str:
    own = {(line.group, line.name): line.mean for line in found}
    try:
        rank = 1 - own["rank", "powersgd:rank=4,halves=2"] / own["rank", "powersgd:rank=4"]
        blocks = own["random", "random block, 10 %+ef"] / own["random", "randomk:density=0.1+ef"] - 1
        fp16, dgc = own["dgc", _DGC_16], own["dgc", _DGC]
        terngrad, qsgd, uniform = (
            own["bits", name] for name in ("TernGrad", "qsgd:bits=2", "uniform:bits=2,symmetric=true+ef")
        )
    except KeyError as missing:
        raise LookupError(f"needs {missing}") from None
    return (
        f"half rounds of PowerSGD lose {rank:.0%} less than whole ones at rank 4, and DGC's perplexity is {fp16:.2f} "
        f"with values in 16 bits and {dgc:.2f} with fewer of them in 32, so both are here; a random block loses "
        f"{blocks:.0%} more than random elements, and TernGrad {terngrad:.1f} mean steps where qsgd:bits=2 loses "
        f"{qsgd:.1f} and two bits with feedback {uniform:.2f}, so neither is here."
    )


def _panels(found: Sequence[Line]) -> list[Panel]:
    own = {(line.group, line.name): line.mean for line in found}

    def bars(group: str, *names: str) -> list[Bar]:
        return [Bar(name, own[group, name], f"{own[group, name]:.2f}", "halves" in name) for name in names]

    ranks = ("powersgd:rank=4", "powersgd:rank=8,halves=1", "powersgd:rank=4,halves=2")
    two = ("qsgd:bits=2", "TernGrad", "uniform:bits=2,symmetric=true+ef")
    return [
        Panel("Low rank", "cumulated error, in mean steps", bars("rank", *ranks)),
        Panel("Two bits", "cumulated error, in mean steps", bars("bits", *two)),
    ]


_OPENING = Opening(
    title="What is not here, and why",
    says="Authors' code and other papers have codecs and settings that might be here, too, and each has to bring "
    "something at equal bytes.",
    ran="A GPT of 137 thousand parameters read bytes of WikiText-2 (validation split) on four ranks that one process "
    "plays, 600 steps of 16 windows of 64 bytes: either without compression, by SGD (rate 0.3), for the error that "
    "every codec would have cumulated, or with it, by AdamW (rate 0.004, β₁ 0.9, β₂ 0.999, weight decay 0.01) or SGD "
    "(rate 0.05, momentum 0.9; DGC's own); rates rise over a tenth of the steps and fall along a cosine to zero.",
    found=_found,
    panels=_panels,
)
_PAPER = (
    "Horváth et al. 2019, natural compression (arXiv 1905.10988); Wen et al. 2017, TernGrad (arXiv 1705.07878); the "
    "code of PowerSGD (github.com/epfml/powersgd) and of DGC (github.com/synxlin/deep-gradient-compression)"
)


def page(record: Mapping[str, Any], path: Path) -> None:
    """Write the page of a record: what is in ``summary.json``."""
    found = lines(record["rows"])
    write_page(
        path,
        lambda pictures: markdown(
            found,
            _TITLES,
            claims(found),
            _LAYOUT,
            opening=_OPENING,
            paper=_PAPER,
            page=path.stem,
            pictures=pictures,
            record=dict(record),
            commits=sorted({str(row["commit"]) for row in record["rows"]}),
        ),
        found,
        _OPENING,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (``sys.argv`` when None) and return its exit code."""
    return command_line(
        "candidates", Options, _run, argv, stopped="Finished rows are kept: the same command goes on from there."
    )


def _run(options: Options, command: list[str], console: Console) -> None:
    if options.quick:
        options = replace(options, steps=2, seeds=options.seeds[:1])
    record = provenance(options.seeds[0], command)
    written = (options.output or Path(__file__).parent / "results" / "candidates") / "summary.json"
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
    show(console, found, _TITLES, [] if options.quick else claims(found), _LAYOUT)
    whole = record | {"config": config, "rows": rows}
    write_json(written, whole)
    if options.markdown is not None:
        page(whole, options.markdown)
    console.print(f"written: {written}", style="dim", markup=False, highlight=False)


def _same(row: Mapping[str, Any], subject: Subject, seed: int) -> bool:
    own = row["group"], row["name"], row["spec"], row["kind"], row["seed"]
    return own == (subject.group, subject.name, subject.spec, subject.kind, seed)


if __name__ == "__main__":
    sys.exit(main())
