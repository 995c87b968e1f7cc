"""A network of matrices under PowerSGD."""

from __future__ import annotations

import torch
from torch import nn

from tests.gradients.training import (
    TINY,
    compress,
    wrap,
)

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
