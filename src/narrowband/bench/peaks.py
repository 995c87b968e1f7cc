"""Measure the peak of memory of one way to train: of a step, or of training as a whole.

On CPU, the peak is that of the resident set of a process in which nothing else ever ran, because malloc's reuse of
freed memory depends on all that came before; on CUDA it is the allocator's. Beside it there is the peak of the bytes of
tensors, which does not depend on malloc.
"""

from __future__ import annotations

import bisect
import functools
import gc
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from narrowband.activations import compress_activations
from narrowband.activations.arena import Arena
from narrowband.bench.devices import wait_for
from narrowband.bench.loopback import end_with_parent
from narrowband.bench.subjects import Subject
from narrowband.bench.ways import Training, Way, optimizer_of, scalar_of

__all__ = ["alive", "footprint", "most_alive", "peak"]


def peak(training: Training, build: Callable[[], Subject], seed: int) -> int | None:
    """Measure the peak of a step, in bytes, above what is held before the first; None if the system does not report it.

    On CPU a process that does nothing else trains in the same way.
    """
    if training.device != "cpu":
        training.model.zero_grad()
        gc.collect()
        wait_for(training.device)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        training.step()
        training.step()
        return torch.cuda.max_memory_allocated() - before
    return _alone(_peak_alone, training.way, build, seed)


def alive(training: Training) -> int:
    """Measure the peak of bytes of tensors of a step. On CPU the profiler takes gigabytes for thousands of small
    tensors.
    """
    training.model.zero_grad()
    return max(most_alive(lambda _: training.step(), training.device))


def most_alive(run: Callable[[Callable[[], None]], object], device: str = "cpu") -> list[int]:
    """Return the peak of bytes of tensors that are alive at once while something runs, above those before it.

    These are the bytes that PyTorch's allocator has handed out, including temporary memory of operators. They do not
    depend on malloc's behaviour.

    Args:
        run: called once, with a function that it may call where one part ends and the next one begins.
        device: cpu or cuda.

    Returns:
        The peak of each part.

    Example:
        >>> def two_parts(mark):
        ...     x = torch.zeros(1000)
        ...     mark()
        ...     return x.clone()
        >>> most_alive(two_parts)
        [4000, 8000]
    """
    if device != "cpu":
        peaks = []
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()

        def mark() -> None:
            peaks.append(torch.cuda.max_memory_allocated() - before)
            torch.cuda.reset_peak_memory_stats()

        run(mark)
        mark()
        return peaks
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # otherwise it logs each start and stop to the terminal
    # The inner one of PyTorch's two profilers: the outer one imports Inductor and sorts all events, for seconds.
    profile = torch.autograd.profiler.profile(use_kineto=True, profile_memory=True)
    marks: list[int] = []
    Arena.pools = False
    try:
        with profile as found:
            run(lambda: marks.append(time.time_ns()))
    finally:
        Arena.pools = True
    results = found.kineto_results
    assert results is not None
    alive, most = 0, [0] * (len(marks) + 1)
    events = [event for event in results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        part = bisect.bisect(marks, event.start_ns())
        alive += event.nbytes()
        most[part] = max(most[part], alive)
    return most


def footprint(way: Way, build: Callable[[], Subject], *, seed: int = 0, optimizer: str = "adamw") -> int | None:
    """Measure the memory of training as a whole on the CPU, in bytes.

    It includes parameters, gradients, the optimizer's state, inputs, what is kept for backward, and temporary memory.
    It is the peak of the resident set of a separate process over three steps, above its size with all libraries
    loaded. It depends on the process's allocator, which environment variables choose.

    Args:
        way: how to train.
        build: makes the model and its inputs: a function of a module, or a partial of one.
        seed: of parameters and data.
        optimizer: one of :data:`OPTIMIZERS`.

    Returns:
        The bytes; None if the system does not report them.

    Raises:
        BrokenProcessPool: the process was killed, perhaps because memory ran out.

    Example:
        >>> from narrowband.bench.subjects import subject
        >>> footprint(Way("plain"), functools.partial(subject, "gpt", 4)) > 4 * 4 * 10_000_000
        True
    """
    return _alone(functools.partial(_footprint_alone, optimizer), way, build, seed)


def _alone(measure: Callable[..., int | None], way: Way, build: Callable[[], Subject], seed: int) -> int | None:
    """Run a measurement in a process that has done nothing else."""
    if not sys.platform.startswith("linux"):
        return None
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), end_with_parent) as alone:
        return alone.submit(measure, way, build, seed, torch.get_num_threads()).result()


def _peak_alone(way: Way, build: Callable[[], Subject], seed: int, threads: int) -> int | None:
    """Measure the peak of memory in the third step, above the model and its inputs."""
    torch.set_num_threads(threads)
    _load(way)
    training = Training(way, build, "cpu", seed)
    try:
        before = _status("VmRSS")
        training.step()
        training.step()
        _begin_anew()
        training.step()
        return _status("VmHWM") - before
    except OSError:
        return None


def _footprint_alone(optimizer: str, way: Way, build: Callable[[], Subject], seed: int, threads: int) -> int | None:
    """Measure the peak of memory over three steps, including the model."""
    torch.set_num_threads(threads)
    _load(way)
    try:
        before = _status("VmRSS")
        _begin_anew()
        _train(Training(way, build, "cpu", seed), optimizer)
        return _status("VmHWM") - before
    except OSError:
        return None


def _train(training: Training, optimizer: str) -> None:
    """Train for three steps."""
    made = optimizer_of(optimizer, training.model.parameters())
    for _ in range(3):
        training.step()
        made.step()


def _load(way: Way) -> None:
    """Load all libraries and loops that a step needs."""
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    own = way.policy
    named = {own.bits, *own.operators.values(), *own.modules.values()}
    for bits in named & {8, 4, 2} or {8}:
        policy = replace(own, bits=bits, operators={}, modules={})  # type: ignore[arg-type]
        with compress_activations(model, policy=policy), torch.autocast("cpu", torch.bfloat16, enabled=way.amp):
            output = model(torch.randn(policy.min_numel // 64 + 1, 64))
        torch.autograd.backward(scalar_of(output))
    torch.optim.AdamW(model.parameters(), fused=True).step()


def _begin_anew() -> None:
    """Reset the peak of the resident set, as Linux counts it."""
    Path("/proc/self/clear_refs").write_text("5")


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {name}")
