"""One rank of :mod:`reproduce.lgreco_times`: trains a GPT on bytes, measures seconds per byte, plans, and times plans.

The parent process calls :func:`run`; run as ``python -m``, this module is one rank.
"""

from __future__ import annotations

import functools
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
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

__all__ = [
    "BETAS",
    "BYTES",
    "DENSE",
    "LEAST_SAMPLES",
    "PLANS",
    "PRIORITY",
    "SECONDS",
    "UNIFORM",
    "WEIGHT_DECAY",
    "Setting",
    "choices",
    "drawn",
    "run",
]

#: What is timed: no compression, the reference for all layers, and plans for three objectives at the reference's error.
DENSE, UNIFORM, BYTES, SECONDS, PRIORITY = "dense", "uniform", "bytes", "seconds", "priority"
PLANS = (UNIFORM, BYTES, SECONDS, PRIORITY)

#: A step without compression takes ten times as long, and nothing is paired with it. So only one round in this many has
#: such steps: one that is not timed and one that is.
_DENSE_EVERY, _DENSE_STEPS = 5, (1, 1)

#: The least number of samples; fewer can hardly distinguish more than a handful of buckets.
LEAST_SAMPLES = 12

#: AdamW's settings.
BETAS, WEIGHT_DECAY = (0.9, 0.999), 0.01

#: Samples draw from at most this many choices, spaced geometrically: evenly spaced ones would mostly be large.
_DRAWN = 8

#: Untimed steps at the beginning of a sample, and of a plan's turn.
_WAKING = 2

_ANY_MATRIX = (64, 64)


@dataclass(frozen=True)
class Setting:
    """What to measure.

    Attributes:
        nodes: number of ranks.
        rate: rate of every link, in both directions; none: loopback, unshaped.
        model: a key of :data:`narrowband.bench.models.MODELS`, of a model that reads bytes.
        bucket_cap_mb: DDP's setting, small enough that about every block has a bucket of its own.
        message_nbytes: see :func:`narrowband.compress_gradients`; 0: every bucket is sent by itself.
        train_steps: steps under the reference before anything is measured; plans are made from the gradients of the
            second half.
        samples: number of samples in the regression, each with other choices for buckets.
        steps: timed steps of each sample, and of each plan in each round.
        rounds: number of rounds; all plans take turns in each.
        lr: learning rate of AdamW, the same in every step; no gradient is clipped.
        seed: seed of parameters, data and choices.
    """

    nodes: int = 4
    rate: str = "100mbit"
    model: str = "gpt-demo"
    bucket_cap_mb: float = 3.0
    message_nbytes: int = 0
    train_steps: int = 40
    samples: int = 48
    steps: int = 6
    rounds: int = 12
    lr: float = 1e-3
    seed: int = 0

    def place(self) -> Loopback | LabConfig:
        """Return where the ranks run."""
        return Loopback(self.nodes) if self.rate == "none" else LabConfig(nodes=self.nodes, rate=self.rate)

    def count(self) -> int:
        """Return how many steps a rank takes for a reference."""
        turns, dense = self.rounds * len(PLANS), math.ceil(self.rounds / _DENSE_EVERY)
        return self.train_steps + (self.samples + turns) * (_WAKING + self.steps) + dense * sum(_DENSE_STEPS)


def run(references: Sequence[str], setting: Setting, on_event: Callable[[dict[str, Any]], None]) -> None:
    """Start the ranks, and measure one reference after the other.

    A row holds ``reference``, ``parameters``, ``buckets`` (the layers of each), ``times`` (the fields of
    :class:`narrowband.adapt.Times`), ``wall_s``, and ``plans``. Each plan has

    * ``specs`` by layer,
    * ``error_of_reference``: the sum of its errors over the reference's,
    * ``bucket_nbytes``: the bytes that a rank sends for the layers of each bucket,
    * ``sent_bytes``: all bytes that a rank sends in a step,
    * ``step_s`` and ``exchange_s``, a number per round: the median over steps, of the slowest rank.

    Args:
        references: each sets a budget of errors, and the choices of layers around it, see :func:`choices`.
        setting: what to measure.
        on_event: called, from another thread, with ``{"event": "step", "reference": …, "what": …}`` for every step, and
            with ``{"event": "row", "row": …}`` for every finished row.

    Raises:
        UnsupportedError: the machine cannot emulate links; the message says what is missing.
        RankError: a rank ended early.
    """
    config = {"references": list(references), "setting": asdict(setting)}
    run_ranks("reproduce.lgreco_times_ranks", config, setting.place(), on_event)


def choices(reference: str) -> list[str]:
    """Return the specs that layers may get: those that L-GreCo searches around the reference.

    Ranks go further, from a quarter to four times the reference's, as in the paper with Accordion, so that plans differ
    by more than the noise.

    Example:
        >>> choices("powersgd:rank=4")[0], choices("powersgd:rank=4")[-1]
        ('powersgd:rank=1', 'powersgd:rank=16')
    """
    near = search_space(reference)
    if compression(reference).kept_rank(_ANY_MATRIX) is None:
        return near
    return list(dict.fromkeys([*search_space(near[0]), *near, *search_space(near[-1])]))


def drawn(reference: str) -> list[str]:
    """Return the subset of :func:`choices` that samples draw from."""
    found = choices(reference)
    if len(found) <= _DRAWN:
        return found
    places = np.unique(np.geomspace(1, len(found), _DRAWN).round().astype(int))
    return [found[place - 1] for place in places]


# ---- one rank --------------------------------------------------------------------------------------------------------


class _Trainer:
    """Train a model with compressed gradients on this rank, step by step."""

    def __init__(self, reference: str, setting: Setting, text: Text, tell: Callable[[], None]) -> None:
        torch.manual_seed(setting.seed)
        self._shape = MODELS[setting.model]
        self.model = DDP(GPT(self._shape), bucket_cap_mb=setting.bucket_cap_mb, gradient_as_bucket_view=True)
        self.handle = nb.compress_gradients(
            self.model, reference, seed=setting.seed, message_nbytes=setting.message_nbytes
        )
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=setting.lr, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True
        )
        self._text, self._tell = text, tell
        self._batches = torch.Generator().manual_seed(setting.seed * 1_000_003 + dist.get_rank())

    def step(self) -> None:
        """Take one training step. The averages stay in the parameters' gradients until the next step."""
        x_BL, y_BL = batch_of(self._text.train, self._shape.batch, self._shape.sequence, self._batches)
        self._optimizer.zero_grad()
        logits_BLV = self.model(x_BL)
        torch.autograd.backward(F.cross_entropy(logits_BLV.flatten(0, 1), y_BL.flatten()))
        self._optimizer.step()
        self._tell()

    def train(self, steps: int) -> dict[str, Tensor]:
        """Train, and return, for each layer, the sum of averaged gradients over the second half of the steps."""
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
    """Make the plans, from the same gradients and at the same error. Rank 0 decides for all."""
    handle = trainer.handle
    plans: dict[str, dict[str, Any]] = {UNIFORM: {"specs": dict.fromkeys(sums, reference), "error_of_reference": 1.0}}
    if dist.get_rank() == 0:
        prices = {BYTES: None, SECONDS: times.seconds_per_byte, PRIORITY: bucket_priority(handle.buckets)}
        for name, price in prices.items():
            objective: Any = "bytes" if price is None else "time"
            policy = nb.LGreCo(reference, choices(reference), objective=objective, seconds_per_byte=price)
            plan = policy.decide(sums, step=handle.step, traffic=handle.layers.traffic)
            error = math.fsum(layer.error or 0.0 for layer in plan.layers)
            plans[name] = {"specs": plan.specs(), "error_of_reference": error / plan.budget if plan.budget else 1.0}
    shared = [plans]
    dist.broadcast_object_list(shared)
    return shared[0]


def _timed(trainer: _Trainer, plans: dict[str, dict[str, Any]], setting: Setting) -> None:
    """Let the plans take turns, and add to each plan what its steps took on this rank."""
    handle, buckets = trainer.handle, trainer.handle.buckets
    plans[DENSE] = {"specs": {}, "error_of_reference": 0.0}
    for plan in plans.values():
        plan |= {"bucket_nbytes": [], "step_s": [], "exchange_s": []}
    for turn in range(setting.rounds):
        first = turn % len(PLANS)  # rotate, so that each plan takes each place in a round
        names = [*PLANS[first:], *PLANS[:first]]
        for name in [*names, DENSE] if turn % _DENSE_EVERY == 0 else names:
            plan = plans[name]
            if name == DENSE:
                handle.pause()
                step_s, exchange_s = _median_step(trainer, *_DENSE_STEPS)
            else:
                handle.set_layers(plan["specs"])
                step_s, exchange_s = _median_step(trainer, _WAKING, setting.steps)
                own = handle.layer_stats()
                plan["bucket_nbytes"] = [sum(own[name].sent_bytes for name in layers) for layers in buckets]
            plan["sent_bytes"] = handle.stats().last.sent_bytes
            plan["step_s"].append(step_s)
            plan["exchange_s"].append(exchange_s)
            handle.resume()


def _median_step(trainer: _Trainer, waking: int, steps: int) -> tuple[float, float]:
    """Return the median seconds of a step and of an exchange.

    ``waking`` untimed steps come first: they restore the plan's factors and memory.
    """
    for _ in range(waking):
        trainer.step()
    step_s, exchange_s = [], []
    for _ in range(steps):
        begin = time.perf_counter()
        trainer.step()
        step_s.append(time.perf_counter() - begin)
        exchange_s.append(trainer.handle.stats().last.exchange_s)
    return statistics.median(step_s), statistics.median(exchange_s)


def _measured(reference: str, setting: Setting, text: Text, tell: Callable[..., None]) -> dict[str, Any]:
    """Measure a reference, and return its row with this rank's times."""
    begin, stage = time.perf_counter(), "training"
    trainer = _Trainer(reference, setting, text, lambda: tell(what=stage))
    sums = trainer.train(setting.train_steps)
    stage = "samples"
    times = nb.measure_times(
        trainer.handle,
        trainer.step,
        drawn(reference),
        samples=setting.samples,
        steps=setting.steps,
        warmup_steps=_WAKING,
        seed=setting.seed,
    )
    stage = "plans"
    plans = _planned(trainer, sums, times, str(compression(reference)))
    _timed(trainer, plans, setting)
    return {
        "reference": reference,
        "parameters": MODELS[setting.model].numel(),
        "buckets": trainer.handle.buckets,
        "times": asdict(times),
        "plans": plans,
        "wall_s": time.perf_counter() - begin,
    }


def _merged(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Merge the rows of all ranks into one, with the slowest rank's times and the mean bytes."""
    found = rows[0]
    for name, plan in found["plans"].items():
        parts = [row["plans"][name] for row in rows]
        for key in ("step_s", "exchange_s"):
            plan[key] = [max(times) for times in zip(*(part[key] for part in parts), strict=True)]
        plan["sent_bytes"] = statistics.fmean(part["sent_bytes"] for part in parts)
    return found


def _work(process: RankProcess) -> None:
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    dist.init_process_group("gloo")
    setting, text = Setting(**process.config["setting"]), standard_library()
    for reference in process.config["references"]:
        tell = functools.partial(process.tell, event="step", reference=reference)
        own = _measured(reference, setting, text, tell)
        rows: list[Any] = [None] * process.world_size
        dist.all_gather_object(rows, own)
        process.tell(event="row", row=_merged(rows))
    process.finish(None)


if __name__ == "__main__":
    _work(RankProcess(sys.argv[1]))
