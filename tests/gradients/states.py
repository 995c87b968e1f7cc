"""A model whose gradients are given, and EF21 as its paper has it, in float64."""

from __future__ import annotations

import torch
from torch import nn

SHAPES = {"one": (20, 30), "two": (16, 40), "bias": (30,), "gain": (7,)}


class Given(nn.Module):
    """A model whose gradients are given: the loss is linear in every parameter."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape, dtype=dtype)))

    def forward(self, gradients):
        return sum((p * gradients[name]).sum() for name, p in self.named_parameters())


def gradients(step, rank, dtype=torch.float32):
    """One layer of one rank has, in some steps, a gradient of exactly zero; those of all have in step 8."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    found = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}
    if (step % 3 == 1 and rank == 1) or step == 8:
        found["one"].zero_()
    return found


def cut(x, k):
    """x where it is one of the k largest, and zeros."""
    return torch.zeros_like(x).index_put_((at := x.abs().topk(k).indices,), x[at])


class DerivedEF21:
    """Algorithm 2, of all ranks at once: rows are ranks."""

    def __init__(self, ranks, numel):
        self.g = torch.zeros(ranks, numel, dtype=torch.float64)

    def step(self, x, k):
        for rank in range(len(x)):
            self.g[rank] += cut(x[rank] - self.g[rank], k)
        return self.g.mean(0)
