"""Each hot loop against ``y.copy_(x)`` of the same tensor: how far from memory speed is it?

A millisecond means little across machines, a ratio to a plain copy in the same run means the same everywhere. Loop and
copy alternate, so both see the same neighbours; ``ratio_to_copy`` is the smallest time of the loop over the smallest
time of the copy, because on a shared machine noise only adds. ``ratio_median``, the median of the ratios of
neighbouring repeats, stands beside it: where the two differ much, the run was disturbed.

On a GPU (``device=cuda``) a repeat ends when the device has done what it was told, so launching a loop counts, and
``gigabytes_per_s`` says what the copy reaches: the card's limit for what goes through its memory once each way.

Every repeat starts from a like state: what a loop changes is restored before it, outside the timed region. The copy
goes into the tensor that loops write to, so that its place in memory favours neither.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch

from narrowband.bench.loops import BASELINES, LOOPS, Data, Loop, Maker
from narrowband.bench.ranks import check_seed
from narrowband.errors import UnsupportedError
from narrowband.kernels import backend_for
from narrowband.kernels.backends import Backend

__all__ = ["Config", "backends", "count", "loops", "run"]


@dataclass(frozen=True)
class Config:
    """What to measure.

    Attributes:
        numel: Elements of the float32 tensor.
        device: cpu or cuda.
        backend: fast (Numba on the CPU, Triton on a GPU), reference (plain torch), or all.
        repeats: Timed repeats of each loop.
        loops: Only these; all when none is named.
        baselines: Also time what a user would write in plain torch.
        seed: Of the data and the stochastic loops.
    """

    numel: int = 25_000_000
    device: Literal["cpu", "cuda"] = "cpu"
    backend: Literal["fast", "reference", "all"] = "fast"
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
        for name, there in (("device", ("cpu", "cuda")), ("backend", ("fast", "reference", "all"))):
            if getattr(self, name) not in there:
                raise ValueError(f"{name}={getattr(self, name)!r} is none of {', '.join(there)}")
        unknown = [name for name in self.loops if name not in loops()]
        if unknown:
            raise ValueError(f"unknown loop {', '.join(unknown)}; there are: {', '.join(loops())}")


_BASELINE_REPEATS = 2
_REST_S = 0.02


def backends(config: Config) -> tuple[str, ...]:
    """The names of what is measured."""
    fast, every = config.device, (config.device, "reference")
    return every if config.backend == "all" else (fast if config.backend == "fast" else "reference",)


def loops() -> tuple[str, ...]:
    """The names of all loops, in the order in which they run."""
    return tuple(LOOPS)


def count(config: Config) -> int:
    """How many rows :func:`run` yields."""
    return len(backends(config)) * len(_chosen(config)) + (len(BASELINES) if config.baselines else 0)


def _chosen(config: Config) -> tuple[str, ...]:
    """Loops that there are on the device: samples of AQ-SGD are kept in the memory of the CPU."""
    asked = config.loops or loops()
    return asked if config.device == "cpu" else tuple(name for name in asked if not name.startswith("aq-sgd"))


def run(config: Config) -> Iterator[dict[str, Any]]:
    """Measure, and yield one row per loop and backend as it is done.

    Rows hold ``loop``, ``backend``, ``numel``, ``ms`` (smallest), ``ratio_to_copy``, and beside these ``ratio_median``,
    ``copy_ms``, ``gigabytes_per_s`` (of the copy), ``device`` and ``threads``.

    Raises:
        UnsupportedError: there is no such device, or no Triton for it.

    Example:
        >>> rows = list(run(Config(numel=4096, loops=("all-finite",), repeats=2)))
        >>> rows[0]["loop"]
        'all-finite'
    """
    if config.device == "cuda" and not torch.cuda.is_available():
        raise UnsupportedError("there is no GPU here that this build of torch can use; narrowband doctor says why")
    if config.device == "cuda" and "cuda" in backends(config) and backend_for("cuda").name != "cuda":
        raise UnsupportedError("Triton is missing, or this GPU is too old for it; ask for --backend reference")
    data = Data(config.numel, config.seed, config.device)
    for backend in backends(config):
        table = Backend(f"narrowband.kernels.{backend}")
        for name in _chosen(config):
            yield _row(name, backend, data, _made(LOOPS[name], data, table), config.repeats)
    if config.baselines:
        for name, make in BASELINES.items():
            yield _row(name, "torch", data, _made(make, data, None), min(config.repeats, _BASELINE_REPEATS))


def _made(make: Maker, data: Data, backend: Backend | None) -> Loop:
    """A loop, with its tensors where the data is."""
    place = cast("Any", torch.device(data.device))
    with place:
        return make(data, backend)


def _timed(body: Callable[[], object], device: str) -> float:
    """Seconds of one call, begun when the machine is at rest.

    The pause keeps a loop out of the wake of the copy before it, whose worker threads may still hold a core. It is
    spent awake, for a core that has slept is slow to begin with.
    """
    wait: Callable[[], object] = torch.cuda.synchronize if device == "cuda" else lambda: None
    place = cast("Any", torch.device(device))
    wait()
    end = time.perf_counter() + _REST_S
    while (start := time.perf_counter()) < end:
        pass
    with place:
        body()
    wait()
    return time.perf_counter() - start


def _row(name: str, backend: str, data: Data, loop: Loop, repeats: int) -> dict[str, Any]:
    taken, copied = [], []
    for repeat in range(-1, repeats):  # the first compiles and touches memory
        if loop.restore is not None:
            loop.restore()
        copy_s = _timed(lambda: data.y.copy_(data.x), data.device)
        taken_s = _timed(lambda turn=repeat + 1: loop.body(turn), data.device)  # type: ignore[misc]
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
        "gigabytes_per_s": 8e-9 * data.numel / min(copied),
        "device": torch.cuda.get_device_name() if data.device == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
    }
