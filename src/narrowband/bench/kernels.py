"""Each hot loop against ``y.copy_(x)`` of the same tensor: how far from memory speed is it?

A millisecond means little across machines, a ratio to a plain copy in the same run means the same everywhere. Loop and
copy alternate, so both see the same neighbours; ``ratio_to_copy`` is the smallest time of the loop over the smallest
time of the copy, because on a shared machine noise only adds. ``ratio_median``, the median of the ratios of
neighbouring repeats, stands beside it: where the two differ much, the run was disturbed.

Every repeat starts from a like state: what a loop changes is restored before it, outside the timed region. The copy
goes into the tensor that loops write to, so that its place in memory favours neither.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal

import torch

from narrowband.bench.loops import BASELINES, LOOPS, Data, Loop
from narrowband.bench.ranks import check_seed

__all__ = ["BACKENDS", "Config", "count", "loops", "run"]

BACKENDS = ("cpu", "reference")


@dataclass(frozen=True)
class Config:
    """What to measure.

    Attributes:
        numel: Elements of the float32 tensor.
        backend: cpu (Numba), reference (plain torch), or all.
        repeats: Timed repeats of each loop.
        loops: Only these; all when none is named.
        baselines: Also time what a user would write in plain torch.
        seed: Of the data and the stochastic loops.
    """

    numel: int = 25_000_000
    backend: Literal["cpu", "reference", "all"] = "cpu"
    repeats: int = 15
    loops: tuple[str, ...] = ()
    baselines: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1024 <= self.numel < 2**31:
            raise ValueError(f"numel={self.numel} is not in [1024, 2**31): smaller tensors fit a cache and say nothing")
        if self.repeats < 1:
            raise ValueError(f"repeats={self.repeats} must be at least 1")
        check_seed(self.seed)
        if self.backend not in (*BACKENDS, "all"):
            raise ValueError(f"backend={self.backend!r} is none of {', '.join((*BACKENDS, 'all'))}")
        unknown = [name for name in self.loops if name not in loops()]
        if unknown:
            raise ValueError(f"unknown loop {', '.join(unknown)}; there are: {', '.join(loops())}")


_BASELINE_REPEATS = 2
_REST_S = 0.02


def loops() -> tuple[str, ...]:
    """The names of all loops, in the order in which they run."""
    return tuple(LOOPS)


def count(config: Config) -> int:
    """How many rows :func:`run` yields."""
    backends = len(BACKENDS) if config.backend == "all" else 1
    return backends * len(config.loops or LOOPS) + (len(BASELINES) if config.baselines else 0)


def run(config: Config) -> Iterator[dict[str, Any]]:
    """Measure, and yield one row per loop and backend as it is done.

    Rows hold ``loop``, ``backend``, ``numel``, ``ms`` (smallest), ``ratio_to_copy``, and beside these ``ratio_median``,
    ``copy_ms`` and ``threads``.

    Example:
        >>> rows = list(run(Config(numel=4096, loops=("all-finite",), repeats=2)))
        >>> rows[0]["loop"]
        'all-finite'
    """
    data = Data(config.numel, config.seed)
    chosen = config.loops or loops()
    backends = BACKENDS if config.backend == "all" else (config.backend,)
    for backend in backends:
        module = import_module(f"narrowband.kernels.{backend}")
        for name in chosen:
            yield _row(name, backend, data, LOOPS[name](data, module), config.repeats)
    if config.baselines:
        for name, make in BASELINES.items():
            yield _row(name, "torch", data, make(data, None), min(config.repeats, _BASELINE_REPEATS))


def _timed(body: Callable[[], object]) -> float:
    """Seconds of one call, begun when the machine is at rest.

    The pause keeps a loop out of the wake of the copy before it, whose worker threads may still hold a core. It is
    spent awake, for a core that has slept is slow to begin with.
    """
    end = time.perf_counter() + _REST_S
    while (start := time.perf_counter()) < end:
        pass
    body()
    return time.perf_counter() - start


def _row(name: str, backend: str, data: Data, loop: Loop, repeats: int) -> dict[str, Any]:
    taken, copied = [], []
    for repeat in range(-1, repeats):  # the first compiles and touches memory
        if loop.restore is not None:
            loop.restore()
        copy_s = _timed(lambda: data.y.copy_(data.x))
        taken_s = _timed(lambda turn=repeat + 1: loop.body(turn))  # type: ignore[misc]
        if repeat >= 0:
            copied.append(copy_s)
            taken.append(taken_s)
    return {
        "loop": name,
        "backend": backend,
        "numel": data.numel,
        "ms": min(taken) * 1e3,
        "ratio_to_copy": min(taken) / min(copied),
        "ratio_median": statistics.median(t / c for t, c in zip(taken, copied, strict=True)),
        "copy_ms": min(copied) * 1e3,
        "threads": torch.get_num_threads(),
    }
