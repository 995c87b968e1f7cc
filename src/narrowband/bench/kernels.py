"""Time each hot loop against ``y.copy_(x)`` of the same tensor, to show how far it is from memory speed.

Milliseconds cannot be compared across machines, but ratios to a plain copy in the same run can. Loop and copy
alternate, so both see the same load. ``ratio_to_copy`` is the smallest time of the loop over the smallest time of the
copy, because on a shared machine noise only adds time. ``ratio_median`` is the median of the ratios of neighbouring
repeats: if the two differ much, the run was disturbed.

``bandwidth_share`` compares bytes per second with the copy's, counting the bytes that a loop has to read and write at
least (each input once, each output once). 1 is memory speed. Loops whose bytes depend on the data have no such share.

On a GPU (``device=cuda``), CUDA events time a loop, and work before it keeps the device busy while the loop is
launched. So ``ms`` is the device's time; if a loop reads a result back in between, it includes the wait for the host.
``host_ms`` is the time that a call occupies the host. ``gigabytes_per_s`` is the rate of the copy.

Every repeat starts from an equal state: what a loop changes is restored before it, outside the timed region. The copy
writes to the same tensor as loops, so that the place in memory favours neither.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator
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
            raise ValueError(
                f"numel={self.numel} is not in [1024, 2**31): smaller tensors fit into a cache, so their times do "
                "not show the speed of memory"
            )
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
#: Bytes that a GPU fills before a loop: takes longer than launching the loop, and exceeds the caches.
_AHEAD_NBYTES = 1 << 30


def backends(config: Config) -> tuple[str, ...]:
    """Return the names of the backends that are measured."""
    fast, every = config.device, (config.device, "reference")
    return every if config.backend == "all" else (fast if config.backend == "fast" else "reference",)


def loops() -> tuple[str, ...]:
    """Return the names of all loops, in the order in which they run."""
    return tuple(LOOPS)


def count(config: Config) -> int:
    """Return the number of rows that :func:`run` yields."""
    return len(backends(config)) * len(_chosen(config)) + (len(BASELINES) + len(_others()) if config.baselines else 0)


def _others() -> dict[str, tuple[str, Maker]]:
    """Return the loops of other packages that are installed."""
    return {name: found for name, found in OTHERS.items() if find_spec(found[0]) is not None}


def _chosen(config: Config) -> tuple[str, ...]:
    """Return the chosen loops that exist on the device: samples of AQ-SGD are kept in the memory of the CPU."""
    asked = config.loops or loops()
    return asked if config.device == "cpu" else tuple(name for name in asked if not name.startswith("aq-sgd"))


def run(config: Config, known: Iterable[dict[str, Any]] = ()) -> Iterator[dict[str, Any]]:
    """Measure, and yield one row per loop and backend as it is done.

    Rows hold ``loop``, ``backend``, ``numel``, ``ms`` (smallest), ``ratio_to_copy``, and beside these ``ratio_median``,
    ``copy_ms``, ``gigabytes_per_s`` (of the copy), ``bandwidth_share``, ``host_ms``, ``device`` and ``threads``.

    Args:
        config: what to measure.
        known: rows that an earlier run finished, which are not measured again.

    Raises:
        UnsupportedError: there is no such device, or no Triton for it.

    Example:
        >>> rows = list(run(Config(numel=4096, loops=("all-finite",), repeats=2)))
        >>> rows[0]["loop"]
        'all-finite'
    """
    if config.device == "cuda" and not torch.cuda.is_available():
        raise UnsupportedError("this build of torch finds no GPU that it can use; narrowband doctor says why")
    if config.device == "cuda" and "cuda" in backends(config) and backend_for("cuda").name != "cuda":
        raise UnsupportedError("Triton is missing, or this GPU is too old for it; ask for --backend reference")
    data = Data(config.numel, config.seed, config.device)
    there = {(row["loop"], row["backend"]): row for row in known}

    def row(name: str, backend: str, make: Maker, table: Backend | None, repeats: int) -> dict[str, Any]:
        return there.get((name, backend)) or _row(name, backend, data, _made(make, data, table), repeats)

    for backend in backends(config):
        table = Backend(f"narrowband.kernels.{backend}")
        for name in _chosen(config):
            yield row(name, backend, LOOPS[name], table, config.repeats)
    if config.baselines:
        for name, make in BASELINES.items():
            yield row(name, "torch", make, None, min(config.repeats, _BASELINE_REPEATS))
        for name, (package, make) in _others().items():
            yield row(name, package, make, None, config.repeats)


def _made(make: Maker, data: Data, backend: Backend | None) -> Loop:
    """Make a loop, with its tensors on the device of the data."""
    place = cast("Any", torch.device(data.device))
    with place:
        return make(data, backend)


@dataclass(frozen=True)
class _Taken:
    """Seconds of one call, and seconds for which it occupied the host."""

    seconds: float
    host: float


def _timed(body: Callable[[], object]) -> _Taken:
    """Time one call on the CPU, after a pause.

    The worker threads of the copy before it may still occupy a core, so wait until they are idle. The wait is a busy
    loop, because a core that has slept is slow at first.
    """
    end = time.perf_counter() + _REST_S
    while (start := time.perf_counter()) < end:
        pass
    body()
    taken = time.perf_counter() - start
    return _Taken(taken, taken)


def _timed_on_gpu(body: Callable[[], object]) -> _Taken:
    """Time one call on the GPU, queued behind work that keeps it busy."""
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
