"""Measure what one saved tensor costs, by its size, for ``narrowband bench memory --tensors``.

A chain of layers that save one tensor each, and compute next to nothing, trains in three ways that take turns: plain;
inside the context, with every tensor kept as it is; and with every tensor packed. The difference to plain steps, over
the number of tensors, is the cost of one tensor, forward and backward together.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from narrowband.activations import ActivationPolicy, compress_activations
from narrowband.activations.policy import Bits

__all__ = ["Config", "run"]


#: Elements of a row.
_WIDTH = 64
_FIRST: Mapping[str, Bits] = {"layer_norm": "off"}


@dataclass(frozen=True)
class Config:
    """What to measure.

    Attributes:
        sizes: Elements of a tensor.
        layers: That save one each.
        bits: Of what is packed.
        rounds: Timed steps of each way.
        seed: Seed of the data.
    """

    sizes: tuple[int, ...] = (256, 1024, 4096, 16384, 65536, 262144, 1048576)
    layers: int = 100
    bits: Literal[8, 4, 2] = 8
    rounds: int = 15
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.sizes or any(size < _WIDTH or size % _WIDTH for size in self.sizes):
            raise ValueError(f"sizes={self.sizes} must be numbers of elements that are multiples of {_WIDTH}")
        for name in ("layers", "rounds"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")


def run(config: Config, known: Iterable[dict[str, Any]] = ()) -> Iterator[dict[str, Any]]:
    """A row for every size, as soon as it is measured.

    Rows hold ``numel``, and in microseconds per tensor ``plain_us``, a whole layer, and what comes to it where the
    tensor is kept as it is, ``kept_us``, and where it is packed, ``packed_us``; and ``saved_nbytes``, by which packing
    is smaller. Medians of rounds, in which the three take turns.

    Args:
        config: what to measure.
        known: rows that an earlier run finished, which are not measured again.
    """
    there = {row["numel"]: row for row in known}
    for numel in config.sizes:
        if numel in there:
            yield there[numel]
            continue
        torch.manual_seed(config.seed)
        x = torch.randn(numel // _WIDTH, _WIDTH)
        kept, packed = (ActivationPolicy(bits, min_numel=1, operators=_FIRST) for bits in ("off", config.bits))
        ways = [_way(config.layers, policy) for policy in (None, kept, packed)]
        for way in ways:
            _step(*way, x)
            _step(*way, x)  # learns ranges
        taken: list[list[float]] = [[], [], []]
        for turn in range(config.rounds):
            for at in range(3):
                one = (turn + at) % 3
                taken[one].append(_step(*ways[one], x))
        plain = taken[0]
        extra = [statistics.median(a - b for a, b in zip(own, plain, strict=True)) for own in taken[1:]]
        with ways[2][1] as saved:
            ways[2][0](x)
        codes = saved.by_operator["other"]
        yield {
            "numel": numel,
            "plain_us": statistics.median(plain) / config.layers * 1e6,
            "kept_us": extra[0] / config.layers * 1e6,
            "packed_us": extra[1] / config.layers * 1e6,
            "saved_nbytes": (codes.raw_bytes - codes.kept_bytes) / config.layers,
        }


def _way(layers: int, policy: ActivationPolicy | None) -> tuple[nn.Module, Any]:
    # The first layer has a weight, because without one there is no backward.
    model = nn.Sequential(nn.LayerNorm(_WIDTH, bias=False), *(nn.Tanh() for _ in range(layers)))
    return model, nullcontext() if policy is None else compress_activations(model, policy=policy)


def _step(model: nn.Module, context: Any, x: torch.Tensor) -> float:
    """Seconds of forward and backward."""
    begin = time.perf_counter()
    with context:
        y = model(x)
    y.sum().backward()
    return time.perf_counter() - begin
