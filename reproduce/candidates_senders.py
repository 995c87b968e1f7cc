"""The encodings and rows of :mod:`reproduce.candidates`, and the senders that simulate all ranks in one process.

Shapes: R ranks, N elements of a tensor.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

import narrowband as nb
from narrowband.adapt import Traffic
from narrowband.codecs import TopK
from narrowband.collectives import Operand, Peers, collective
from narrowband.feedback import Compression, Feedback, PowerSGD

__all__ = [
    "CANDIDATES",
    "DENSE",
    "DGC",
    "DGC_8",
    "DGC_16",
    "DGC_STORES",
    "SUBJECTS",
    "OfLibrary",
    "Sender",
    "Subject",
    "natural",
    "sender",
]


# ---- candidates ------------------------------------------------------------------------------------------------------


def natural(x: Tensor, generator: torch.Generator) -> Tensor:
    """Round each element at random to one of the two powers of two around it, without bias."""
    mantissa, exponent = torch.frexp(x.abs())  # of magnitudes from 0.5 up to 1
    below = torch.ldexp(torch.ones_like(x), exponent - 1)
    up = _uniform(x, generator) < 2 * mantissa - 1
    return torch.where(x == 0, 0.0, x.sign() * torch.where(up, 2 * below, below))


def natural_dithering(x: Tensor, generator: torch.Generator, bits: int, bucket: int = 128) -> Tensor:
    """Round as QSGD, to levels 0, 2^(1−s), …, 1/2, 1 times a bucket's largest magnitude, with s = 2^(bits−1) − 1."""
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
    """Clip at ``clip`` standard deviations, then round to −1, 0 or 1 times the largest magnitude that is left."""
    limit = clip * x.std()
    clipped = x.clamp(-limit, limit)
    largest = clipped.abs().amax()
    return clipped.sign() * largest * (_uniform(x, generator) * largest < clipped.abs())


def block(x: Tensor, generator: torch.Generator, density: float) -> Tensor:
    """Keep a block of consecutive elements from a random position on, wrapping at the end; the rest becomes 0."""
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
        arrives: gets a flat tensor and a random generator, and returns the decoded tensor.
        like: spec of a codec of the library whose payload has the same length.
        shared: whether all ranks draw the same random numbers.
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

Kind = Literal["stream", "adamw", "sgd", "own"]


@dataclass(frozen=True)
class Subject:
    """One row of a table: a way to compress, and how it is measured.

    Attributes:
        group: the table that the row is in.
        name: unique in the group.
        spec: a spec of the library, or ``NAME[+ef]`` with a name of ``CANDIDATES``.
        kind: ``stream`` measures the cumulated error; ``adamw`` and ``sgd`` train with that optimizer; ``own``: every
            rank has an optimizer of its own.
        densities: of DGC's warm-up, each for equally many steps.
        warmup: the share of steps that the warm-up takes; without ``densities``, everything is sent in it.
        clip: norm at which gradients are clipped before they are sent; each rank's is clipped at ``clip`` · √R.
        by_layer: clip each of the L compressed layers by itself, at the same norm divided by √L.
        every: steps between two plans of L-GreCo, with ``spec`` as the reference; 0: no plans.
        last: how many of these steps, counted from the last, a plan's averages come from; 0: all.
        rounds: rounds of power iteration in the first step of a layer whose rank has changed.
        rate: learning rate; 0: the default of the kind.
        moments: average AdamW's moments over ranks once in this many steps; 0: never.
    """

    group: str
    name: str
    spec: str
    kind: Kind = "stream"
    densities: tuple[float, ...] = ()
    warmup: float = 0.0
    clip: float = math.inf
    by_layer: bool = False
    every: int = 0
    last: int = 0
    rounds: int = 1
    rate: float = 0.0
    moments: int = 0


def _of(group: str, kind: Kind, *specs: str) -> tuple[Subject, ...]:
    return tuple(Subject(group, spec, spec, kind) for spec in specs)


DENSE = "none"
DGC = "dgc:density=0.01"
#: DGC with shorter values, at densities that make the payload as long as that of ``DGC``.
DGC_16, DGC_8 = "dgc:density=0.0164,values=fp16", "dgc:density=0.0245,values=int8"
_WARM = 0.2
_CLIP = 1.0
#: L-GreCo's plans: the reference, the steps between two plans, and the authors' settings of ``last`` and ``rounds``.
_PLANNED, _EVERY, _LAST, _ROUNDS = "powersgd:rank=4", 100, 10, 5

#: Codecs whose residuals are kept in fewer bits, and the settings for that.
STORED = ("topk:density=0.01", "uniform:bits=2,symmetric=true")
STORES = (":store=bf16", ":store=int8")
DGC_STORES = (",store=bf16", ",store=int8")

#: What ranks with optimizers of their own send: name → spec. DeMo sends as many coefficients as take the bytes of the
#: top 1 %. κ of 0/1 Adam is that of DeepSpeed (16), and one that takes about the bytes of two bits (3).
UPDATES = {"updates": DENSE, "updates, top 1 %": "topk:density=0.01+ef", "updates, signs": "sign+ef",
           "updates, 2 bits": "qsgd:bits=2+ef"}  # fmt: skip
DEMO, ZERO_ONE, ZERO_ONE_RARE = "DeMo of 37", "0/1 Adam of 16", "0/1 Adam of 3"
MOMENTUM = {"DeMo": DEMO, "0/1 Adam": ZERO_ONE, "0/1 Adam, rarer": ZERO_ONE_RARE}
MOMENTS = "updates, moments averaged every 10 steps"
GRADIENTS = "gradients"


def rates(name: str) -> tuple[float, ...]:
    """Return the learning rates that a row is trained with.

    Rows differ because DeMo steps along signs, and the mean of updates is scaled by up to √R.
    """
    if name == GRADIENTS:
        return (0.004, 0.008, 0.016)
    return (0.001, 0.002, 0.004) if name in MOMENTUM else (0.002, 0.004, 0.008)


def at_rate(name: str, rate: float) -> str:
    """Return the name of the row with this learning rate."""
    return f"{name}, rate {rate:g}"


def _own() -> Iterator[Subject]:
    for name, spec in {GRADIENTS: DENSE, MOMENTS: DENSE, **UPDATES, **MOMENTUM}.items():
        for rate in rates(name):
            kind: Kind = "adamw" if name == GRADIENTS else "own"
            yield Subject("own", at_rate(name, rate), spec, kind, rate=rate, moments=10 * (name == MOMENTS))


SUBJECTS: tuple[Subject, ...] = (
    *_of("bits", "stream", "qsgd:bits=8", "natural compression", "natural compression+ef", "qsgd:bits=4+ef"),
    *_of("bits", "stream", "qsgd:bits=3", "natural dithering, 3 bits", "natural dithering, 3 bits+ef"),
    *_of("bits", "stream", "uniform:bits=3,symmetric=true+ef", "qsgd:bits=2", "TernGrad", "qsgd:bits=2+ef"),
    *_of("bits", "stream", "TernGrad+ef", "uniform:bits=2,symmetric=true+ef", "sign+ef"),
    *_of("random", "stream", "randomk:density=0.1+ef", "random block, 10 %+ef"),
    *_of("rank", "stream", "powersgd:rank=2", "powersgd:rank=4,halves=1", "powersgd:rank=2,halves=2"),
    *_of("rank", "stream", "powersgd:rank=4", "powersgd:rank=8,halves=1", "powersgd:rank=4,halves=2"),
    *_of("plans", "stream", _PLANNED),
    Subject("plans", "plans of all steps", _PLANNED, every=_EVERY),
    Subject("plans", "plans of the last steps", _PLANNED, every=_EVERY, last=_LAST),
    Subject("plans", "five rounds for new ranks", _PLANNED, every=_EVERY, rounds=_ROUNDS),
    *_of("training", "adamw", DENSE, "powersgd:rank=4", "powersgd:rank=8,halves=1", "powersgd:rank=4,halves=2"),
    *_of("training", "adamw", "qsgd:bits=2", "TernGrad", "uniform:bits=2,symmetric=true+ef"),
    *_of("training", "adamw", "topk:density=0.01+ef", "topk:density=0.01+ef:decay=0.99"),
    *_of("training", "adamw", "topk:density=0.01+ef:decay=0.95", "topk:density=0.01+ef:decay=0.9"),
    *_of("training", "adamw", "topk:density=0.01+ef:store=bf16", "topk:density=0.01+ef:store=int8"),
    *_of("stores", "stream", *(f"{codec}+ef{store}" for codec in STORED for store in ("", *STORES))),
    *_of("stores, trained", "adamw", *(f"{STORED[1]}+ef{store}" for store in ("", *STORES))),
    *_of("dgc", "sgd", DENSE, DGC, DGC_16, DGC_8, *(f"{DGC}{store}" for store in DGC_STORES)),
    Subject("dgc", "warm-up of the paper", DGC, "sgd", (0.25, 0.0625, 0.015625), _WARM),
    Subject("dgc", "warm-up of the authors' code", DGC, "sgd", tuple(0.01 ** (k / 6) for k in range(1, 6)), _WARM),
    Subject("dgc", "warm-up by everything", DGC, "sgd", (), _WARM),
    Subject("dgc", "clipped as a whole", DGC, "sgd", clip=_CLIP),
    Subject("dgc", "clipped by layers", DGC, "sgd", clip=_CLIP, by_layer=True),
    *_own(),
)


# ---- senders ---------------------------------------------------------------------------------------------------------


class Sender(ABC):
    """Simulate one way to compress on all ranks; keeps the state of error feedback, by key."""

    @abstractmethod
    def send(self, key: str, x_RN: Tensor, shape: torch.Size, step: int) -> Tensor:
        """Send the tensors of all ranks, and return the average that arrives, flat; may overwrite ``x_RN``."""

    @abstractmethod
    def nbytes(self, shape: torch.Size, step: int) -> float:
        """Return the bytes of one rank's payload of a tensor of this shape."""

    def mean_nbytes(self, shapes: Sequence[torch.Size], steps: int) -> float:
        """Return the bytes that one rank sends per step for tensors of these shapes, a mean from the first step on."""
        return math.fsum(self.nbytes(shape, step) for shape in shapes for step in range(steps)) / steps


class OfLibrary(Sender):
    """A codec of the library with its feedback on every rank; payloads are decoded and averaged as after an all-gather.

    Args:
        chosen: codec and feedback.
        ranks: number of ranks.
        seed: of rounding.
        densities, begin: a warm-up over the first ``begin`` steps: each density for equally many of them, or
            everything is sent where there are no densities.
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
    """PowerSGD. It is linear, so compressing the average of all ranks' tensors gives the same result."""

    def __init__(self, chosen: Compression, seed: int) -> None:
        self.chosen, self.seed, self.state = chosen, seed, chosen.new_feedback()
        assert self.state is not None
        assert self.state.collective is not None
        self.kind = collective(self.state.collective)

    def send(self, key: str, x_RN: Tensor, shape: torch.Size, step: int) -> Tensor:
        return self._exchanged(self.chosen, key, x_RN, shape, step)

    def _exchanged(self, own: Compression, key: str, x_RN: Tensor, shape: torch.Size, step: int) -> Tensor:
        operand = Operand(key, x_RN.mean(0), shape, own.codec, None, lambda _: (self.seed << 20) + step)
        exchange = self.kind([operand], Peers(None, 0, 1), measure=False, state=self.state)
        exchange.encode()
        for _ in exchange.job():
            pass
        exchange.deliver(good=True)
        return operand.average

    def nbytes(self, shape: torch.Size, step: int) -> float:
        return self.chosen.layer_nbytes(shape)


class OfPlans(OfAverages):
    """PowerSGD with ranks from L-GreCo's plans, which are made from the averages that arrived.

    Args:
        chosen: the spec of all layers until the first plan, and the plans' reference.
        ranks, seed: the number of processes that send, and the seed of new factors.
        every, last, rounds: see :class:`Subject`.
    """

    def __init__(self, chosen: Compression, ranks: int, seed: int, every: int, last: int, rounds: int) -> None:
        super().__init__(chosen, seed)
        self.policy, self.traffic = nb.LGreCo(str(chosen), every=every, last=last), Traffic(ranks)
        self.rounds = rounds
        self.ranks: dict[str, Compression] = {}
        self.sums: dict[str, Tensor] = {}
        self.planned = 0
        self.changed: set[str] = set()
        self.sent = 0.0

    def send(self, key: str, x_RN: Tensor, shape: torch.Size, step: int) -> Tensor:
        assert isinstance(self.state, PowerSGD)
        if step - self.planned == self.policy.every:
            plan = self.policy.decide(self.sums, step=step, traffic=self.traffic)
            ranks = {name: nb.compression(spec) for name, spec in plan.specs().items()}
            self.changed = {name for name, own in ranks.items() if own != self.ranks.get(name, self.chosen)}
            self.ranks, self.sums, self.planned = ranks, {}, step
        own = self.ranks.get(key, self.chosen)
        self.state.iterations = self.rounds if step == self.planned and key in self.changed else 1
        arrived = self._exchanged(own, key, x_RN, shape, step)
        self.sent += own.layer_nbytes(shape) * self.state.iterations
        if self.policy.sees(step):
            self.sums[key] = self.sums.get(key, 0.0) + arrived.view(shape)
        return arrived

    def mean_nbytes(self, shapes: Sequence[torch.Size], steps: int) -> float:
        """Return the bytes per step as counted while sending."""
        return self.sent / steps


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
    """Make the sender of a row."""
    name, _, behind = subject.spec.rpartition("+") if subject.spec.endswith("+ef") else (subject.spec, "", "")
    if name in CANDIDATES:
        return OfCandidate(CANDIDATES[name], bool(behind), ranks, seed)
    chosen = nb.compression(subject.spec)
    if subject.every:
        return OfPlans(chosen, ranks, seed, subject.every, subject.last, subject.rounds)
    if chosen.feedback is not None and chosen.feedback.collective is not None:
        return OfAverages(chosen, seed)
    return OfLibrary(chosen, ranks, seed, subject.densities, round(subject.warmup * steps))
