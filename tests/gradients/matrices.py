"""A network of matrices under PowerSGD."""

from __future__ import annotations

import contextlib

import torch
import torch.distributed as dist
from torch import nn

from tests.gradients.training import TINY, Fork, compress, data, loss_of, wrap

SPEC = "powersgd:rank=2"


def net(dtype=torch.float32):
    """Three matrices of one shape, one of another, one that factors would not shorten, biases."""
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 40),
        nn.Linear(40, 4), nn.Linear(4, 8),
    ).to(dtype)  # fmt: skip


def compressed(spec=SPEC, *, cap=TINY, module=None, coalesced=False, **options):
    """A model with a bucket for every parameter, each sent by itself; ``coalesced``: sent as users have it."""
    model = wrap(module if module is not None else net(), cap)
    return model, compress(model, spec, min_numel=16, coalesced=coalesced, **options)


def state_of(handle):
    return {key: value.clone() for key, value in handle.state_dict()["feedback"].items()}


def gradients_of(ranks, step):
    """In float64: name → one for each rank."""
    model = net(torch.float64)
    found = []
    for rank in range(ranks):
        model.zero_grad()
        loss_of(model, step, rank, torch.float64).backward()
        found.append({name: p.grad.clone() for name, p in model.named_parameters()})
    return {name: torch.stack([one[name] for one in found]) for name in found[0]}


@contextlib.contextmanager
def all_reduced():
    """How many elements each all-reduce has meanwhile."""
    calls, original = [], dist.all_reduce

    def all_reduce(x, *arguments, **options):
        calls.append(x.numel())
        return original(x, *arguments, **options)

    dist.all_reduce = all_reduce
    try:
        yield calls
    finally:
        dist.all_reduce = original


def sent_and_kept(rank, world_size, spec):
    """A step with gradients for ``sometimes`` on all ranks, on one, on none, on the other, on all.

    Returns:
        The sum of what was delivered, the sum of this rank's own gradients, and its residual after every step.
    """
    model = wrap(Fork(30), find_unused_parameters=True)
    handle = compress(model, spec, min_numel=64)
    plain, sent, own, residuals = Fork(30), torch.zeros(30, 30), torch.zeros(30, 30), []
    for step, both in enumerate(((True, True), (True, False), (False, False), (False, True), (True, True))):
        model.zero_grad()
        plain.zero_grad()
        x = data(step, rank)[0]
        model(x, both[rank]).square().mean().backward()
        plain(x, both[rank]).square().mean().backward()
        if model.module.sometimes.weight.grad is not None:
            sent += model.module.sometimes.weight.grad
        if plain.sometimes.weight.grad is not None:
            own += plain.sometimes.weight.grad
        residuals.append(state_of(handle)["residual/sometimes.weight"].view(30, 30))
    return sent, own, residuals
