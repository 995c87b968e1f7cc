"""Measure how the time of an exchange depends on the chosen specs, for policies that minimize time."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from narrowband.adapt.timing import Times, fit_times

if TYPE_CHECKING:
    from narrowband.gradients.handle import GradientCompression

__all__ = ["measure_times"]


def measure_times(
    handle: GradientCompression,
    step: Callable[[], object],
    choices: Sequence[str],
    *,
    samples: int = 20,
    steps: int = 10,
    warmup_steps: int = 2,
    seed: int = 0,
) -> Times:
    """Measure how many seconds a byte of each layer costs, by training under randomly drawn specs. Call on all ranks,
    between steps.

    Args:
        handle: of the model.
        step: runs one whole training step. It is called ``samples · (warmup_steps + steps)`` times, compressed with
            the drawn specs.
        choices: the specs to draw from. In every sample, each bucket gets one of them at random.
        samples: how many times specs are drawn; should be more than there are buckets.
        steps: how many steps of a sample are timed. The sample's time is their median, on the slowest rank.
        warmup_steps: untimed steps at the start of every sample.
        seed: of the random draws; must be the same on all ranks.

    Raises:
        RuntimeError: all draws sent the same number of bytes, because the handle is paused or in its warm-up.

    Example:
        >>> times = nb.measure_times(handle, step, ["powersgd:rank=1", "powersgd:rank=8"])
        >>> nb.LGreCo("powersgd:rank=4", objective="time", seconds_per_byte=times.seconds_per_byte)
    """
    if not handle.buckets:
        step()
        step()  # DDP rebuilds its buckets after the first step
    buckets = handle.buckets
    before = {name: handle.layers.spec_for(name) for names in buckets for name in names}
    generator = torch.Generator().manual_seed(seed)
    nbytes: list[list[float]] = []
    seconds: list[float] = []
    try:
        for _ in range(samples):
            drawn = [choices[int(torch.randint(len(choices), (), generator=generator, device="cpu"))] for _ in buckets]
            handle.set_layers({name: spec for names, spec in zip(buckets, drawn, strict=True) for name in names})
            taken = []
            for at in range(warmup_steps + steps):
                step()
                if at >= warmup_steps:
                    taken.append(handle.stats().last.exchange_s)
            layers = handle.layer_stats()
            sent = [float(sum(layers[name].sent_bytes for name in names)) for names in buckets]
            # A rank may send more than another, and all have to come to the same times.
            most = torch.tensor([statistics.median(taken), *sent], dtype=torch.float64, device=handle.device)
            dist.all_reduce(most, op=dist.ReduceOp.MAX, group=handle.process_group)
            slowest, *sent = most.tolist()
            seconds.append(slowest)
            nbytes.append(sent)
    finally:
        handle.set_layers(before)
    if handle.size > 1 and len(set(choices)) > 1 and len({tuple(row) for row in nbytes}) == 1:
        raise RuntimeError(
            "measure_times: all choices sent the same bytes, so their times cannot be compared: the handle is paused, "
            "or still in its warm-up; measure afterwards"
        )
    return fit_times(buckets, nbytes, seconds)
