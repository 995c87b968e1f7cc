"""How long an exchange takes under different choices, for policies that save time."""

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
    """Measure what a byte of each layer takes, by training under random choices. Call on all ranks, between steps.

    Args:
        handle: of the model.
        step: does one whole training step. There will be ``samples · (warmup_steps + steps)`` of them,
            compressed as the choices say.
        choices: specs; every bucket gets one of them, by chance, in every sample.
        samples: how many times choices are drawn; more than there are buckets.
        steps: whose median is a sample's time; the slowest rank's counts.
        warmup_steps: steps before these.
        seed: of the choices; the same on all ranks.

    Raises:
        RuntimeError: the same was sent whatever was chosen: the handle is paused, or warms up.

    Example:
        >>> times = nb.measure_times(handle, step, ["powersgd:rank=1", "powersgd:rank=8"])
        >>> nb.LGreCo("powersgd:rank=4", objective="time", seconds_per_byte=times.seconds_per_byte)
    """
    if not handle.buckets:
        step()
        step()  # DDP lays out its buckets anew after the first
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
            "measure_times: whatever was chosen, the same was sent, so times say nothing: the handle is paused, or a "
            "warm-up lasts; measure when that is over"
        )
    return fit_times(buckets, nbytes, seconds)
