"""Each hot loop against ``y.copy_(x)`` of the same tensor: how far from memory speed is it?

A millisecond means little across machines, a ratio to a plain copy in the same run means the same everywhere. Loop and
copy alternate, so both see the same neighbours; ``ratio_to_copy`` is the smallest time of the loop over the smallest
time of the copy, because on a shared machine noise only adds. ``ratio_median``, the median of the ratios of
neighbouring repeats, stands beside it: where the two differ much, the run was disturbed.

``bandwidth_share`` compares with the copy by bytes: those that a loop has to read and write at least (each input once,
each output once), per second, over the copy's. 1 is memory speed; loops whose bytes depend on the data have none.

On a GPU (``device=cuda``) the device itself says when a loop begins and ends, and work before it keeps the device busy
while the loop is launched: ``ms`` is the device's time, its waiting for the host included where a loop asks it for an
answer. How long a call holds the host stands beside it as ``host_ms``. ``gigabytes_per_s`` says what the copy reaches.

Every repeat starts from a like state: what a loop changes is restored before it, outside the timed region. The copy
goes into the tensor that loops write to, so that its place in memory favours neither.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal, cast

import torch

from narrowband.bench.loops import BASELINES, LOOPS, OTHERS, Data, Loop, Maker
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
        baselines: Also time what a user would write in plain torch, and bitsandbytes' quantizer where it is installed.
        seed: Seed of the data and the stochastic loops.
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
#: What a GPU fills before a loop: longer than it takes to launch one, and than its caches.
_AHEAD_NBYTES = 1 << 30


def backends(config: Config) -> tuple[str, ...]:
    """The names of what is measured."""
    fast, every = config.device, (config.device, "reference")
    return every if config.backend == "all" else (fast if config.backend == "fast" else "reference",)


def loops() -> tuple[str, ...]:
    """The names of all loops, in the order in which they run."""
    return tuple(LOOPS)


def count(config: Config) -> int:
    """How many rows :func:`run` yields."""
    return len(backends(config)) * len(_chosen(config)) + (len(BASELINES) + len(_others()) if config.baselines else 0)


def _others() -> dict[str, tuple[str, Maker]]:
    """What is timed of other packages: of those that are installed."""
    return {name: found for name, found in OTHERS.items() if find_spec(found[0]) is not None}


def _chosen(config: Config) -> tuple[str, ...]:
    """Loops that there are on the device: samples of AQ-SGD are kept in the memory of the CPU."""
    asked = config.loops or loops()
    return asked if config.device == "cpu" else tuple(name for name in asked if not name.startswith("aq-sgd"))


def run(config: Config) -> Iterator[dict[str, Any]]:
    """Measure, and yield one row per loop and backend as it is done.

    Rows hold ``loop``, ``backend``, ``numel``, ``ms`` (smallest), ``ratio_to_copy``, and beside these ``ratio_median``,
    ``copy_ms``, ``gigabytes_per_s`` (of the copy), ``bandwidth_share``, ``host_ms``, ``device`` and ``threads``.

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
        for name, (package, make) in _others().items():
            yield _row(name, package, data, _made(make, data, None), config.repeats)


def _made(make: Maker, data: Data, backend: Backend | None) -> Loop:
    """A loop, with its tensors where the data is."""
    place = cast("Any", torch.device(data.device))
    with place:
        return make(data, backend)


@dataclass(frozen=True)
class _Taken:
    """Seconds of one call, and those in which it held the host."""

    seconds: float
    host: float


def _timed(body: Callable[[], object]) -> _Taken:
    """One call on the CPU, begun when the machine is at rest.

    The pause keeps a loop out of the wake of the copy before it, whose worker threads may still hold a core. It is
    spent awake, for a core that has slept is slow to begin with.
    """
    end = time.perf_counter() + _REST_S
    while (start := time.perf_counter()) < end:
        pass
    body()
    taken = time.perf_counter() - start
    return _Taken(taken, taken)


def _timed_on_gpu(body: Callable[[], object]) -> _Taken:
    """One call on the GPU, behind something that it is still busy with."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    ahead = torch.empty(_AHEAD_NBYTES, dtype=torch.uint8)
    torch.cuda.synchronize()
    for _ in range(2):
        ahead.zero_()
    begin.record()
    start = time.perf_counter()
    body()
    host = time.perf_counter() - start
    end.record()
    torch.cuda.synchronize()
    return _Taken(begin.elapsed_time(end) / 1e3, host)


def _row(name: str, backend: str, data: Data, loop: Loop, repeats: int) -> dict[str, Any]:
    timed = _timed if data.device == "cpu" else _timed_on_gpu
    taken, copied = [], []
    for repeat in range(-1, repeats):  # the first compiles and touches memory
        with cast("Any", torch.device(data.device)):
            if loop.restore is not None:
                loop.restore()
            copy = timed(lambda: data.y.copy_(data.x))
            own = timed(lambda turn=repeat + 1: loop.body(turn))  # type: ignore[misc]
        if repeat >= 0:
            copied.append(copy.seconds)
            taken.append(own)
    fastest, copy_s = min(own.seconds for own in taken), min(copied)
    return {
        "loop": name,
        "backend": backend,
        "numel": data.numel,
        "ms": fastest * 1e3,
        "ratio_to_copy": fastest / copy_s,
        "ratio_median": statistics.median(t.seconds / c for t, c in zip(taken, copied, strict=True)),
        "copy_ms": copy_s * 1e3,
        "gigabytes_per_s": 8e-9 * data.numel / copy_s,
        "bandwidth_share": None if loop.nbytes is None else loop.nbytes / fastest / (8 * data.numel / copy_s),
        "host_ms": min(own.host for own in taken) * 1e3,
        "device": torch.cuda.get_device_name() if data.device == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
    }
