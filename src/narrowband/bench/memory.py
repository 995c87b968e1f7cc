"""Measure the memory of a model's saved activations, and the time of a step: plain, in few bits, and recomputed.

``compare`` measures ways to train in less memory, and ``run`` those of a configuration. All rows run in one process and
take turns, so that other load on the machine affects them alike. ``ratio_to_plain`` is the median over rounds of a
row's step over the plain step right before it. A step is forward and backward. A timed step follows a step of the same
kind, as in training; on CUDA it ends when the device has finished it. Before anything is timed, every row takes three
steps, in the first of which Triton compiles its loops. There are two measures of memory:

* ``kept_bytes``: what autograd keeps between forward and backward, every tensor's memory counted once, without
  parameters, buffers and inputs;
* ``peak_bytes``: the peak of memory above what is held before the first step, including gradients and temporary memory
  (:mod:`~narrowband.bench.peaks`).
"""

from __future__ import annotations

import fnmatch
import functools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from narrowband.activations import ActivationPolicy, Saved
from narrowband.bench.devices import Device, check_device, default_device, wait_for
from narrowband.bench.peaks import alive, peak
from narrowband.bench.ranks import check_seed
from narrowband.bench.subjects import SUBJECTS, Subject, subject, tried
from narrowband.bench.ways import Training, Way

__all__ = ["Config", "compare", "count", "run"]


@dataclass(frozen=True)
class Config:
    """What to measure.

    Attributes:
        model: deit-tiny, deit-small, gpt, resnet18, or yours: file.py:function, called with the batch size, returns a
            module and the tuple of its inputs.
        batch: Samples.
        bits: Of what is kept; a row each.
        baselines: Also bfloat16 autocast, full activation checkpointing, and combinations; of few bits also with MLPs
            recomputed, where modules are called mlp.
        compiled: Also torch.compile, which needs a C++ compiler and minutes; with baselines under bfloat16, too.
        only: Only these of all rows that baselines and compiled can give, by name: "8 bits" "bf16, 8 bits". The row
            that they are compared with is always there: plain or, where all of them are bf16, bf16.
        rounds: Timed steps of every row.
        peaks: Also measure peaks of memory; on CPU each row then trains in a process of its own, too. --no-peaks leaves
            these out, which is faster.
        device: Where to train; CUDA where there is any, when left out.
        seed: Seed of parameters and data.
    """

    model: str = "deit-tiny"
    batch: int = 32
    bits: tuple[int, ...] = (8, 4)
    baselines: bool = False
    compiled: bool = False
    only: tuple[str, ...] = ()
    rounds: int = 5
    peaks: bool = True
    device: Device | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("batch", "rounds"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        check_seed(self.seed)
        check_device(self.device)
        for bits in self.bits:
            if bits not in (8, 4, 2):
                raise ValueError(f"bits={bits}: there are 8, 4 and 2")
        if not (self.bits or self.baselines or self.compiled or self.only):
            raise ValueError("nothing to measure: give bits, such as 8 4, or ask for baselines")
        if self.model not in SUBJECTS and ":" not in self.model:
            subject(self.model, self.batch)


#: Pattern of the names that transformers give to the feed-forward part of a block.
_MLPS = "*.mlp"


def _ways(config: Config) -> list[Way]:
    """Return the ways to measure. The others are compared with the first.

    Raises:
        ValueError: the configuration asks for a row that does not exist.
    """
    if not config.only:
        return _all_ways(config)
    ways = {way.name: way for way in _all_ways(replace(config, only=(), baselines=True, compiled=True))}
    unknown = [name for name in config.only if name not in ways]
    if unknown:
        raise ValueError(f"no row is called {', '.join(map(repr, unknown))}; there are: {', '.join(map(repr, ways))}")
    of_bf16 = [ways[name].amp for name in config.only]
    needed = {*config.only, *(["bf16"] if any(of_bf16) else []), *([] if all(of_bf16) else ["plain"])}
    return [way for name, way in ways.items() if name in needed]


def _all_ways(config: Config) -> list[Way]:
    few = {bits: ActivationPolicy(bits=bits) for bits in config.bits}  # type: ignore[arg-type]
    ways = [Way("plain"), *(Way(f"{bits} bits", policy) for bits, policy in few.items())]
    if config.baselines:
        mlps = few if _has_mlps(config) else {}
        again = {bits: replace(policy, modules={_MLPS: "checkpoint"}) for bits, policy in mlps.items()}
        ways += [Way(f"{bits} bits, MLPs recomputed", policy) for bits, policy in again.items()]
        ways += [Way("checkpoint", checkpoint=True)]
        ways += [Way(f"checkpoint, {bits} bits", few[bits], checkpoint=True) for bits in config.bits[:1]]
        ways += [Way("bf16", amp=True), *(Way(f"bf16, {bits} bits", policy, amp=True) for bits, policy in few.items())]
        ways += [Way(f"bf16, {bits} bits, MLPs recomputed", policy, amp=True) for bits, policy in again.items()]
        ways += [Way("bf16, checkpoint", amp=True, checkpoint=True)]
        ways += [
            Way(f"bf16, checkpoint, {bits} bits", few[bits], amp=True, checkpoint=True) for bits in config.bits[:1]
        ]
    if config.compiled:
        kinds = {"compiled": False} | ({"bf16, compiled": True} if config.baselines else {})
        for name, amp in kinds.items():
            ways += [Way(name, amp=amp, compiled=True)]
            ways += [Way(f"{name}, {bits} bits", policy, amp=amp, compiled=True) for bits, policy in few.items()]
    return ways


def _has_mlps(config: Config) -> bool:
    # Names need only a batch of one; a user's own model may need the batch of the configuration.
    model, _ = subject(config.model, 1 if config.model in SUBJECTS else config.batch)
    return any(fnmatch.fnmatchcase(name, _MLPS) for name, _ in model.named_modules())


def count(config: Config) -> int:
    """Return the number of events of a run."""
    return len(_ways(config)) * (1 + config.rounds + config.peaks)


class _Row(Training):
    """One way to train, with its measurements so far."""

    def __init__(self, way: Way, build: Callable[[], Subject], device: str, seed: int) -> None:
        super().__init__(way, build, device, seed)
        self.steps: list[float] = []
        self.hosts: list[float] = []  # the part of each step until Python was done
        self.ratios: list[float] = []  # over the first row's step right before
        self.saved: Saved
        self.error: float | None = None
        self.cosine: float | None = None
        self.peak: int | None = None

    def settled(self) -> tuple[float, float]:
        """Time a step that follows one of its kind, as in training.

        Returns its seconds, and the part of them until the host has launched all work.
        """
        self.step()
        wait_for(self.device)
        begin = time.perf_counter()
        self.step()
        told = time.perf_counter()
        wait_for(self.device)
        return time.perf_counter() - begin, told - begin


def run(
    config: Config,
    on_event: Callable[[str], None] | None = None,
    on_round: Callable[[list[dict[str, Any]]], None] | None = None,
) -> list[dict[str, Any]]:
    """Measure all rows of a configuration; see :func:`compare`.

    Args:
        config: what to measure.
        on_event: called with the name of the row that is measured.
        on_round: called after each round with the rows so far.
    """
    ways, device = _ways(config), config.device or default_device()
    if config.model not in SUBJECTS:
        tried(config.model, config.batch, device)
    return compare(
        ways,
        functools.partial(subject, config.model, config.batch),
        rounds=config.rounds,
        peaks=config.peaks,
        device=device,
        seed=config.seed,
        on_event=on_event,
        on_round=on_round,
    )


def compare(
    ways: Sequence[Way],
    build: Callable[[], Subject],
    *,
    rounds: int = 5,
    peaks: bool | Literal["alive"] = True,
    device: Device | None = None,
    seed: int = 0,
    on_event: Callable[[str], None] | None = None,
    on_round: Callable[[list[dict[str, Any]]], None] | None = None,
) -> list[dict[str, Any]]:
    """Measure ways to train one model, which take turns in this process.

    Rows hold

    * ``name``;
    * ``step_s``: the median step; ``host_s``: the part of it until the host has launched all work of a GPU; None on the
      CPU;
    * ``ratios``: for each round, the step over the first row's step; ``ratio_to_plain``: their median, or None if the
      first row is in bf16;
    * ``ratio_to_same_precision``: the step over that of the row that compresses nothing in the same precision, as the
      median over rounds of the quotient of both rows' ``ratios``; None if there is no such row;
    * ``kept_bytes``, and ``kept_ratio``: the first row's kept bytes over this row's; ``saved_of_own``: the share of
      bytes that the row saves of those that it would keep uncompressed;
    * ``peak_bytes`` and ``peak_ratio``: the same of peaks; ``peak_to_same_precision``: the peak over that of the row
      that compresses nothing in the same precision. None if the system does not report peaks, or without ``peaks``;
    * ``compress_s``: seconds of a step that packing and unpacking take;
    * ``gradient_error``: the norm of the difference from exact gradients over the norm of these, and
      ``gradient_cosine``: the cosine of the angle between both. Exact gradients are the plain row's, for rows in bf16
      those of the row bf16;
    * ``by_operator``: operator → its bytes and seconds.

    Args:
        ways: ways to train. The others are compared with the first.
        build: makes the model and its inputs. It must be a function of a module, or a partial of one, because peaks are
            measured in other processes.
        rounds: timed steps of every row, each right after a step of the first way.
        peaks: whether to measure peaks, too; ``alive``: measure peaks of bytes of tensors above those of the model and
            its inputs, which do not depend on malloc (see :func:`~narrowband.bench.peaks.most_alive`), in this process.
        device: cpu or cuda; CUDA where there is any, if not given.
        seed: of parameters and data.
        on_event: called with the name of the row that is measured.
        on_round: called after each round with the rows so far. Peaks are missing, because they are measured last.
    """
    tell = on_event or (lambda _: None)
    rows = [_Row(way, build, device or default_device(), seed) for way in ways]
    exact: dict[bool, list[Tensor]] = {}
    for row in rows:
        tell(row.way.name)
        row.step()
        row.step()  # estimates ranges, compiles loops, fills caches
        torch.manual_seed(seed)  # dropout leaves out the same elements in all rows
        saved = row.step(counted=True)
        assert saved is not None
        row.saved = saved
        gradients = [p.grad for p in row.model.parameters() if p.grad is not None]
        if row.way.policy.is_off and row.way.amp not in exact:
            exact[row.way.amp] = [x.clone() for x in gradients]  # the next step writes into the same memory
        if row.way.amp in exact:
            row.error, row.cosine = _beside(gradients, exact[row.way.amp])
    first = rows[0]
    for turn in range(rounds):
        for row in rows[turn % len(rows) :] + rows[: turn % len(rows)]:
            tell(row.way.name)
            before = first.settled()[0] if row is not first else 0.0
            taken, host = row.settled()
            row.steps.append(taken)
            row.hosts.append(host)
            row.ratios.append(taken / before if before else 1.0)
        if on_round is not None:
            on_round([_told(row, rows) for row in rows])
    if peaks:
        for row in rows:
            tell(row.way.name)
            row.peak = alive(row) if peaks == "alive" else peak(row, build, seed)
    return [_told(row, rows) for row in rows]


def _told(row: _Row, rows: Sequence[_Row]) -> dict[str, Any]:
    first, saved = rows[0], row.saved
    same = next((each for each in rows if each.way.is_plain and each.way.amp == row.way.amp), None)
    ratio = statistics.median(row.ratios)
    return {
        "name": row.way.name,
        "step_s": statistics.median(row.steps),
        "host_s": None if row.device == "cpu" else statistics.median(row.hosts),
        "ratio_to_plain": None if first.way.amp else ratio,
        "ratio_to_same_precision": None
        if same is None
        else statistics.median(own / its for own, its in zip(row.ratios, same.ratios, strict=True)),
        "ratios": list(row.ratios),
        "kept_bytes": saved.kept_bytes,
        "kept_ratio": first.saved.raw_bytes / saved.kept_bytes if saved.kept_bytes else None,
        "saved_of_own": 1 - saved.kept_bytes / saved.raw_bytes if saved.raw_bytes else 0.0,
        "peak_bytes": row.peak,
        "peak_ratio": first.peak / row.peak if row.peak and first.peak else None,
        "peak_to_same_precision": row.peak / same.peak if same is not None and row.peak and same.peak else None,
        "compress_s": sum(kept.seconds for kept in saved.by_operator.values()),
        "gradient_error": row.error,
        "gradient_cosine": row.cosine,
        "by_operator": {name: asdict(kept) for name, kept in saved.by_operator.items()},
    }


def _beside(own: Sequence[Tensor], reference: Sequence[Tensor]) -> tuple[float | None, float | None]:
    """Compare gradients with a reference.

    Returns the norm of the difference over that of the reference, and the cosine of the angle between both; None if
    they mean nothing, because a gradient is zero or not finite. Sums are in float64, on the gradients' device, one
    parameter at a time: a GPU has no room for copies of all gradients, and a link to the CPU would be slower than
    training.
    """
    sums = torch.zeros(4, dtype=torch.float64, device=reference[0].device if reference else None)
    for own_x, reference_x in zip(own, reference, strict=True):
        x, y = own_x.double(), reference_x.double()
        sums += torch.stack(((x - y).square().sum(), x.square().sum(), y.square().sum(), (x * y).sum()))
    difference, one, other, product = sums.tolist()
    error = math.sqrt(difference / other) if other else math.nan
    cosine = product / math.sqrt(one * other) if one and other else math.nan
    return error if math.isfinite(error) else None, cosine if math.isfinite(cosine) else None
