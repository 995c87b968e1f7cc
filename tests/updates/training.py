"""Replicas that train in rounds."""

from __future__ import annotations

import torch

import narrowband as nb
from tests.gradients.training import adamw, mlp


def nesterov(parameters):
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


def begin(spec, model=None, optimizer=None, **options):
    model = model or mlp()
    optimizer = (optimizer or adamw)(model)
    return model, optimizer, nb.compress_updates(model, optimizer, spec, **{"min_numel": 64, **options})
