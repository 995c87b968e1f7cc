"""A small model and its mini-batches, the same on every rank, for tests of coded data parallelism."""

from __future__ import annotations

import math

import torch
from torch import nn

INPUTS, OUTPUTS = 12, 5


def mlp(dropout=0.0, dtype=torch.float32):
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(INPUTS, 17), nn.Tanh(), nn.Dropout(dropout), nn.LayerNorm(17), nn.Linear(17, OUTPUTS)
    ).to(dtype)


def batch(step, samples):
    """Features, float32 (samples, INPUTS), and classes."""
    generator = torch.Generator().manual_seed(1000 + step)
    x = torch.randn(samples, INPUTS, generator=generator)
    return x, torch.randint(OUTPUTS, (samples,), generator=generator)


loss_of = nn.functional.cross_entropy


def gradient(model):
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def computed_in_one_place(net, assignment, x, y, exponent):
    """The average of a mini-batch: gradients of its blocks, in whole numbers of a unit, added up as Python does."""
    samples, rows = len(x), max(assignment.work(len(x)))
    begin, total = 0, None
    parameters = list(net.parameters())
    for size in assignment.sizes(samples):
        outputs, classes = net(x[begin : begin + size]), y[begin : begin + size]
        begin += size
        at = torch.arange(rows) % size  # a batch of so many rows, of which the loss is the mean
        leaf = outputs.detach()[at].requires_grad_()
        loss_of(leaf, classes[at]).backward()
        found = torch.autograd.grad(outputs, parameters, leaf.grad[:size])
        part = torch.cat([g.flatten() for g in found]) * (rows / samples)
        codes = [round(value) for value in (part.double() / math.ldexp(1.0, exponent)).tolist()]
        total = codes if total is None else [a + b for a, b in zip(total, codes, strict=True)]
    return torch.tensor([code * math.ldexp(1.0, exponent) for code in total], dtype=torch.float64).float()
