"""A network of matrices under PowerSGD."""

from __future__ import annotations

import torch
from torch import nn

from tests.gradients.training import TINY, compress, data, wrap

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


class Fork(nn.Module):
    """Two layers of which a batch may use one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.always, self.sometimes = nn.Linear(24, 30), nn.Linear(30, 30)

    def forward(self, x, both):
        y = self.always(x)
        return self.sometimes(y) if both else y


def sent_and_kept(rank, world_size, spec):
    """A step with gradients for ``sometimes`` on all ranks, on one, on none, on the other, on all.

    Returns:
        The sum of what was delivered, the sum of this rank's own gradients, and its residual after every step.
    """
    model = wrap(Fork(), find_unused_parameters=True)
    handle = compress(model, spec, min_numel=64)
    plain, sent, own, residuals = Fork(), torch.zeros(30, 30), torch.zeros(30, 30), []
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
