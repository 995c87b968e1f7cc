"""One rank of :mod:`reproduce.lgreco_times`: a GPT that reads bytes, its seconds per byte, plans, and their steps.

The parent calls :func:`measured`; this module run as ``python -m`` is one rank.
"""

from __future__ import annotations

import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP

import narrowband as nb
from narrowband.adapt import Times, bucket_priority, search_space
from narrowband.bench.models import GPT, MODELS
from narrowband.bench.ranks import Loopback, RankProcess, run_ranks
from narrowband.bench.text import Text, batch_of, standard_library
from narrowband.feedback import compression
from narrowband.lab import LabConfig

__all__ = ["BYTES", "DENSE", "LEAST_SAMPLES", "PLANS", "PRIORITY", "SECONDS", "UNIFORM", "Setting", "drawn", "measured"]

#: What is timed: no compression, the reference for all layers, and the plans of three objectives at its error.
DENSE, UNIFORM, BYTES, SECONDS, PRIORITY = "dense", "uniform", "bytes", "seconds", "priority"
PLANS = (UNIFORM, BYTES, SECONDS, PRIORITY)

#: A step without compression takes ten times as long, and nothing is paired with it: one round in so many has it.
_DENSE_EVERY = 5

#: Fewer samples than these hardly tell more than a handful of buckets apart.
LEAST_SAMPLES = 12

#: Samples draw from no more choices than these, spread as powers are: of a hundred densities most are large.
_DRAWN = 8

#: Steps of a sample, and of a plan's turn, before those that are timed.
_WAKING = 2

_LEARNING_RATE = 1e-3
_BETAS = (0.9, 0.999)


@dataclass(frozen=True)
class Setting:
    """What to measure.

    Attributes:
        reference: the spec that sets the budget of errors, and whose search space layers choose from.
        nodes: ranks.
        rate: of every link in both directions; none: loopback, unshaped.
        model: which of :data:`narrowband.bench.models.MODELS`; one that reads bytes.
        bucket_cap_mb: DDP's, so small that there are some buckets.
        message_nbytes: as :func:`narrowband.compress_gradients` takes it; 0: every bucket travels by itself.
        train_steps: under the reference, before anything is measured; gradients of the second half of them are planned
            from.
        samples: of choices for buckets.
        steps: that are timed of each sample, and of each plan in each round.
        rounds: in which all plans take turns.
        seed: of parameters, data and choices.
    """

    reference: str
    nodes: int = 4
    rate: str = "100mbit"
    model: str = "gpt-demo"
    bucket_cap_mb: float = 2.0
    message_nbytes: int = 0
    train_steps: int = 60
    samples: int = 60
    steps: int = 8
    rounds: int = 20
    seed: int = 0

    def place(self) -> Loopback | LabConfig:
        """Where the ranks run."""
        return Loopback(self.nodes) if self.rate == "none" else LabConfig(nodes=self.nodes, rate=self.rate)

    def count(self) -> int:
        """How many steps a rank takes, but for those without compression."""
        turns = self.rounds * len(PLANS)
        return self.train_steps + (self.samples + turns) * (_WAKING + self.steps)


def measured(setting: Setting, on_event: Callable[[dict[str, Any]], None] | None = None) -> dict[str, Any]:
    """Start the ranks and return what they found: ``reference``, ``parameters``, ``buckets`` (the layers of each),
    ``times`` (the fields of :class:`narrowband.adapt.Times`), and ``plans``.

    Each of the plans has ``specs`` by layer, ``error_of_reference`` (the sum of errors over the reference's),
    ``bucket_nbytes`` (that a rank sends for the layers of each bucket), ``sent_bytes`` (all that it sends in a step),
    and ``step_s`` and ``exchange_s``, a number per round: the median over steps, of the slowest rank.

    Args:
        setting: what to measure.
        on_event: called with ``{"event": "step", "what": …}`` for every step of rank 0.

    Raises:
        UnsupportedError: the machine cannot emulate links; says what is missing.
        RankError: a rank ended early.
    """
    ranks = run_ranks("reproduce.lgreco_times_ranks", asdict(setting), setting.place(), on_event)
    found: dict[str, Any] = ranks[0]
    for name, plan in found["plans"].items():
        parts = [rank["plans"][name] for rank in ranks]
        for key in ("step_s", "exchange_s"):
            plan[key] = [max(times) for times in zip(*(part[key] for part in parts), strict=True)]
        plan["sent_bytes"] = statistics.fmean(part["sent_bytes"] for part in parts)
    return found


def drawn(reference: str) -> list[str]:
    """The choices that samples draw from."""
    choices = search_space(reference)
    if len(choices) <= _DRAWN:
        return choices
    places = np.unique(np.geomspace(1, len(choices), _DRAWN).round().astype(int))
    return [choices[place - 1] for place in places]


# ---- one rank --------------------------------------------------------------------------------------------------------


class _Trainer:
    """A model on this rank, its handle, and one step after the other."""

    def __init__(self, setting: Setting, text: Text, rank: int, tell: Callable[[], None]) -> None:
        torch.manual_seed(setting.seed)
        self._shape = MODELS[setting.model]
        self.model = DDP(GPT(self._shape), bucket_cap_mb=setting.bucket_cap_mb, gradient_as_bucket_view=True)
        self.handle = nb.compress_gradients(
            self.model, setting.reference, seed=setting.seed, message_nbytes=setting.message_nbytes
        )
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=_LEARNING_RATE, betas=_BETAS, fused=True)
        self._text, self._tell = text, tell
        self._batches = torch.Generator().manual_seed(setting.seed * 1_000_003 + rank)

    def step(self) -> None:
        """One step of training; averages are in the parameters' gradients until the next."""
        x_BL, y_BL = batch_of(self._text.train, self._shape.batch, self._shape.sequence, self._batches)
        self._optimizer.zero_grad()
        logits_BLV = self.model(x_BL)
        torch.autograd.backward(F.cross_entropy(logits_BLV.flatten(0, 1), y_BL.flatten()))
        self._optimizer.step()
        self._tell()

    def train(self, steps: int) -> dict[str, Tensor]:
        """Train, and return the sums of the averages that the second half of the steps delivered to layers."""
        shapes = self.handle.layers.parameters.shapes
        layers = {name: p for name, p in self.model.module.named_parameters() if name in shapes}
        sums = {name: torch.zeros_like(p) for name, p in layers.items()}
        for step in range(steps):
            self.step()
            if step >= steps // 2:
                for name, p in layers.items():
                    assert p.grad is not None
                    sums[name] += p.grad
        return sums


def _planned(trainer: _Trainer, sums: Mapping[str, Tensor], times: Times, reference: str) -> dict[str, dict[str, Any]]:
    """The plans, from the same gradients and at the same error: rank 0 decides."""
    handle = trainer.handle
    plans: dict[str, dict[str, Any]] = {UNIFORM: {"specs": dict.fromkeys(sums, reference), "error_of_reference": 1.0}}
    if dist.get_rank() == 0:
        prices = {BYTES: None, SECONDS: times.seconds_per_byte, PRIORITY: bucket_priority(handle.buckets)}
        for name, price in prices.items():
            objective: Any = "bytes" if price is None else "time"
            policy = nb.LGreCo(reference, objective=objective, seconds_per_byte=price)
            plan = policy.decide(sums, step=handle.step, traffic=handle.layers.traffic)
            error = math.fsum(layer.error or 0.0 for layer in plan.layers)
            plans[name] = {"specs": plan.specs(), "error_of_reference": error / plan.budget if plan.budget else 1.0}
    shared = [plans]
    dist.broadcast_object_list(shared)
    return shared[0]


def _timed(trainer: _Trainer, plans: dict[str, dict[str, Any]], setting: Setting) -> None:
    """Let plans take turns, and add to each what its steps took on this rank."""
    handle, buckets = trainer.handle, trainer.handle.buckets
    plans[DENSE] = {"specs": {}, "error_of_reference": 0.0}
    for plan in plans.values():
        plan |= {"bucket_nbytes": [], "step_s": [], "exchange_s": []}
    for turn in range(setting.rounds):
        first = turn % len(PLANS)  # so that no plan always follows the same other
        names = [*PLANS[first:], *PLANS[:first]]
        for name in [*names, DENSE] if turn % _DENSE_EVERY == 0 else names:
            plan = plans[name]
            if name == DENSE:
                handle.pause()
                step_s, exchange_s = _median_step(trainer, waking=1, steps=1)
            else:
                handle.set_layers(plan["specs"])
                plan["bucket_nbytes"] = [sum(map(handle.layers.sent_nbytes, names)) for names in buckets]
                step_s, exchange_s = _median_step(trainer, waking=_WAKING, steps=setting.steps)
            plan["sent_bytes"] = handle.stats().last.sent_bytes
            plan["step_s"].append(step_s)
            plan["exchange_s"].append(exchange_s)
            handle.resume()


def _median_step(trainer: _Trainer, *, waking: int, steps: int) -> tuple[float, float]:
    """The median step and the median exchange of some, after steps that bring a plan's factors and memory back."""
    for _ in range(waking):
        trainer.step()
    step_s, exchange_s = [], []
    for _ in range(steps):
        begin = time.perf_counter()
        trainer.step()
        step_s.append(time.perf_counter() - begin)
        exchange_s.append(trainer.handle.stats().last.exchange_s)
    return statistics.median(step_s), statistics.median(exchange_s)


def _work(process: RankProcess) -> None:
    setting = Setting(**process.config)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    dist.init_process_group("gloo")
    stage = "training"
    trainer = _Trainer(setting, standard_library(), process.rank, lambda: process.tell(event="step", what=stage))
    sums = trainer.train(setting.train_steps)
    stage = "samples"
    times = nb.measure_times(
        trainer.handle,
        trainer.step,
        drawn(setting.reference),
        samples=setting.samples,
        steps=setting.steps,
        warmup_steps=_WAKING,
        seed=setting.seed,
    )
    stage = "plans"
    plans = _planned(trainer, sums, times, str(compression(setting.reference)))
    _timed(trainer, plans, setting)
    process.finish(
        {
            "reference": setting.reference,
            "parameters": MODELS[setting.model].numel(),
            "buckets": trainer.handle.buckets,
            "times": asdict(times),
            "plans": plans,
        }
    )


if __name__ == "__main__":
    _work(RankProcess(sys.argv[1]))
