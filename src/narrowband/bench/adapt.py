"""Measure what a decision for every layer saves, and what it costs, with real gradients of a GPT in one process.

The model is trained for some steps without compression, and the gradients of the last ones are added up, as a handle
adds up averages between two decisions. Each row is one decision for that sum, among so many ranks: the bytes that a
rank sends with the plan and with the reference for all layers, at no more error; the seconds of the tables and of the
program that chooses; and these as a share of an epoch.
"""

from __future__ import annotations

import itertools
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from narrowband.adapt import LGreCo, Plan, Traffic, error_table, search_space
from narrowband.adapt.lgreco import lower_bound, solve
from narrowband.bench.models import GPT, MODELS
from narrowband.bench.ranks import check_seed
from narrowband.bench.text import standard_library
from narrowband.feedback import compression
from narrowband.units import counted, format_loss

__all__ = ["Config", "count", "run"]

#: Number of gradients that are added up.
_LOOKS = 32

#: Layers and choices of the program alone, at the size of a large model. From one choice to the next the size falls by
#: a random factor of up to _FALL. Errors lie between the layer's least error and _MOST_ERROR times it; the least errors
#: add up to half of the budget.
_LARGE = (200, 16)
_FALL = 4.0
_MOST_ERROR = 3.0
_REPEATS = 5

#: Number of ranks for counting payloads alone: of two ranks, each sends its payload once, with any collective.
_PAYLOADS_ALONE = 2

#: The name of the row of the program alone.
_ALONE = "program alone"

_LEARNING_RATE = 1e-3
_MIN_NUMEL = 1024


@dataclass(frozen=True)
class Config:
    """What to measure.

    Attributes:
        model: Which GPT: gpt-13m, gpt-demo or gpt-tiny (13.3, 3.3 and 0.13 million parameters).
        references: Specs that are known to be safe; each gets the choices around it that the paper searches.
        mixed: Also plan with the choices of all references together, and with none, at each reference's error;
            --no-mixed leaves these rows out.
        steps: Training steps before the decision.
        batch: Windows per step.
        ranks: Among how many ranks; a row for each. What a choice costs depends on it.
        seed: Seed of parameters and data.
    """

    model: str = "gpt-13m"
    references: tuple[str, ...] = ("powersgd:rank=4", "powersgd:rank=16", "topk:density=0.01+ef", "qsgd:bits=4+ef")
    mixed: bool = True
    steps: int = 200
    batch: int = 8
    ranks: tuple[int, ...] = (4, 8, 16, 32)
    seed: int = 0

    def __post_init__(self) -> None:
        if self.model not in MODELS:
            raise ValueError(f"unknown model {self.model!r}; there are: {', '.join(MODELS)}")
        for name in ("steps", "batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if not self.ranks or min(self.ranks) < 2:
            raise ValueError(f"ranks={self.ranks} must be numbers from 2 on: a single rank sends nothing")
        check_seed(self.seed)
        if not self.references:
            raise ValueError("nothing to measure: give at least one reference")
        for reference in self.references:
            search_space(reference)


def count(config: Config) -> int:
    """Return the number of events that :func:`run` reports."""
    return config.steps + len(config.references) * (1 + config.mixed) * len(config.ranks) + 1


def run(
    config: Config,
    on_event: Callable[[str], None] = lambda _: None,
    plans: Path | None = None,
    *,
    known: Iterable[dict[str, Any]] = (),
) -> Iterator[dict[str, Any]]:
    """Train, plan at the error of each reference, and yield one row per decision.

    Rows hold ``name``, ``ranks``, ``layers``, ``choices`` and

    * ``table_s``, ``solve_s`` and ``decide_s``: seconds of the tables, of the program that chooses, and of a whole
      decision; ``share_of_epoch``: the last as a share of an epoch;
    * ``nbytes`` and ``reference_nbytes``: bytes that a rank sends in a step with the plan and with the reference;
      ``times_fewer``: the latter over the former;
    * ``times_fewer_by_payloads``: the same for a plan that counts bytes of payloads, whatever the collective sends;
    * ``error_of_reference``: the plan's error over the reference's, in the measure that is budgeted;
    * ``relative_error`` and ``reference_relative_error``: ‖p − C(p)‖² / ‖p‖² of all layers together.

    The last row is the program alone, at the size of a large model, with ``over_bound``: how far its result is above
    the Lagrangian bound.

    Args:
        on_event: called with what was done, see :func:`count`.
        plans: a directory in which every plan is saved, under the name and the ranks of its row. ``narrowband bench
            ddp`` measures a step with a saved plan.
        known: rows that an earlier run finished. They are not decided again, if their plans are in ``plans``.
    """
    there = {(row["name"], row.get("ranks")): row for row in known}
    trained: tuple[dict[str, Tensor], float, int] | None = None  # only if a decision is left to make
    problems = [(reference, reference, search_space(reference)) for reference in config.references]
    if config.mixed:
        everything = ["none", *dict.fromkeys(choice for _, _, choices in problems for choice in choices)]
        problems += [(f"mixed, at {reference}", reference, everything) for reference in config.references]
    for (name, reference, choices), ranks in itertools.product(problems, config.ranks):
        path = None if plans is None else plans / f"{_file_name(name)}-among-{ranks}.json"
        row = there.get((name, ranks))
        if row is None or (path is not None and not path.exists()):
            gradients, step_s, windows = trained = trained or _gradients(config, on_event)
            epoch_steps = max(1, windows // (config.batch * ranks))
            decided, plan = _decision(gradients, reference, choices, ranks, step_s * epoch_steps)
            row = {"name": name, "ranks": ranks, **decided}
            if path is not None:
                plan.save(path)
        on_event(f"{name}, among {counted(ranks, 'rank')}")
        yield row
    row = there.get((_ALONE, None)) or _program(config.seed)
    on_event("program")
    yield row


def _file_name(name: str) -> str:
    """Join words of letters and digits: ``mixed, at powersgd:rank=4`` → ``mixed-at-powersgd-rank-4-among-….json``."""
    return re.sub(r"[^A-Za-z0-9.]+", "-", name)


def _decision(
    gradients: dict[str, Tensor], reference: str, choices: list[str], ranks: int, epoch_s: float
) -> tuple[dict[str, Any], Plan]:
    policy = LGreCo(reference, choices)
    traffic = Traffic(ranks, policy.start)
    begin = time.perf_counter()
    table = error_table(gradients, policy.specs(), traffic=traffic)
    table_s = time.perf_counter() - begin
    begin = time.perf_counter()
    plan = policy.decide(gradients, step=0, traffic=traffic)
    decide_s = time.perf_counter() - begin
    uniform = table.column(reference)
    begin = time.perf_counter()
    solve(table.sizes, table.errors, math.fsum(table.errors[:, uniform]))
    solve_s = time.perf_counter() - begin
    chosen = [table.column(layer.spec) for layer in plan.layers]
    errors = table.errors[np.arange(len(chosen)), chosen]
    budget = math.fsum(table.errors[:, uniform])
    norm = math.hypot(*table.norms)
    by_payloads = policy.decide(gradients, step=0, traffic=replace(traffic, world_size=_PAYLOADS_ALONE))
    sent = sum(traffic.nbytes([(compression(layer.spec), layer.shape) for layer in by_payloads.layers]))
    row = {
        "layers": len(plan.layers),
        "choices": len(table.choices),
        "table_s": table_s,
        "solve_s": solve_s,
        "decide_s": decide_s,
        "share_of_epoch": decide_s / epoch_s,
        "nbytes": plan.nbytes,
        "reference_nbytes": plan.reference_nbytes,
        "times_fewer": plan.reference_nbytes / plan.nbytes if plan.reference_nbytes and plan.nbytes else None,
        "times_fewer_by_payloads": plan.reference_nbytes / sent if plan.reference_nbytes and sent else None,
        "error_of_reference": math.fsum(errors) / budget if budget else None,
        "relative_error": _relative(errors, norm),
        "reference_relative_error": _relative(table.errors[:, uniform], norm),
        "families": sorted({layer.family for layer in plan.layers}),
    }
    return row, plan


def _relative(errors: Iterable[float], norm: float) -> float | None:
    """Compute ‖p − C(p)‖² / ‖p‖² over all layers from the norms of their errors; None if the gradient is zero."""
    return (math.hypot(*errors) / norm) ** 2 if norm else None


def _program(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    errors = np.sort(rng.uniform(1.0, _MOST_ERROR, _LARGE), axis=1)
    errors[:, 0] = 1.0
    sizes = 10 ** rng.uniform(2, 5, _LARGE[:1])[:, None] * _FALL ** -np.cumsum(rng.uniform(0.0, 1.0, _LARGE), axis=1)
    budget = 2.0 * _LARGE[0]
    taken = []
    for _ in range(_REPEATS):
        begin = time.perf_counter()
        chosen = solve(sizes, errors, budget)
        taken.append(time.perf_counter() - begin)
    total = float(sizes[np.arange(len(chosen)), chosen].sum())
    return {
        "name": _ALONE,
        "layers": _LARGE[0],
        "choices": _LARGE[1],
        "solve_s": min(taken[1:]),
        "over_bound": total / lower_bound(sizes, errors, budget) - 1.0,
    }


def _gradients(config: Config, on_event: Callable[[str], None]) -> tuple[dict[str, Tensor], float, int]:
    """Return the sum of the last steps' gradients, the time of a step of one rank's share, and windows per epoch."""
    shape = MODELS[config.model]
    torch.manual_seed(config.seed)
    model = GPT(shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE)
    tokens = _tokens(shape.vocab)
    sums = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    taken = []
    for step, (x_BL, y_BL) in enumerate(_batches(tokens, config, shape.sequence)):
        begin = time.perf_counter()
        loss = F.cross_entropy(model(x_BL).flatten(0, 1), y_BL.flatten())
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        taken.append(time.perf_counter() - begin)
        if step >= config.steps - _LOOKS:
            for name, p in model.named_parameters():
                assert p.grad is not None
                sums[name] += p.grad
        on_event(f"step {step + 1}, loss {format_loss(loss.item(), 2)}")
    layers = {name: x for name, x in sums.items() if x.dim() > 1 and x.numel() >= _MIN_NUMEL}
    return layers, float(np.median(taken)), tokens.numel() // shape.sequence


def _batches(tokens: Tensor, config: Config, sequence: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(config.seed)
    for _ in range(config.steps):
        starts = torch.randint(tokens.numel() - sequence, (config.batch,), generator=generator)
        windows = tokens[starts[:, None] + torch.arange(sequence + 1)]
        yield windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def _tokens(vocabulary: int) -> Tensor:
    """Return the text of :mod:`narrowband.bench.text` as tokens of two bytes: the most frequent pairs, and 0 for all
    others. If the vocabulary is one of bytes, return the bytes.
    """
    text = standard_library().train.long()
    if vocabulary <= 1 << 8:
        return text
    pairs = text[: text.numel() // 2 * 2].view(-1, 2) @ torch.tensor([256, 1])
    frequent = torch.bincount(pairs, minlength=1 << 16).argsort(descending=True)[: vocabulary - 1]
    token_of = torch.zeros(1 << 16, dtype=torch.long)
    token_of[frequent] = torch.arange(1, len(frequent) + 1)
    return token_of[pairs]
