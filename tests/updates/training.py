"""Replicas that train in rounds."""

from __future__ import annotations

import copy

import torch
from torch import nn

import narrowband as nb
from tests.gradients.training import adamw, flat, mlp, train


class Net(nn.Module):
    """Layers of which two share a weight if they are ``tied``, and a norm; a short pass leaves both out."""

    def __init__(self, dtype, norm, *, tied=True):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Linear(16, 24), nn.Linear(24, 24), nn.Linear(24, 8)
        self.d, self.norm = nn.Linear(24, 24), norm(24)
        if tied:
            self.d.weight = self.b.weight
        self.to(dtype)

    def forward(self, x, *, short=False):
        h = self.a(x.to(self.a.weight.dtype)).tanh()
        return self.c(h if short else self.norm(self.d(self.b(h).tanh()))).float()


def nesterov(parameters):
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


def begin(spec, model=None, optimizer=None, **options):
    model = model or mlp()
    optimizer = (optimizer or adamw)(model)
    return model, optimizer, nb.compress_updates(model, optimizer, spec, **{"min_numel": 64, **options})


def whole_and_resumed(rank, options, stop, until):
    """Parameters after ``until`` steps; those of a run that stops after ``stop`` steps and goes on elsewhere; the state
    of the handle that was saved there; and the handle that loaded it.
    """
    whole, optimizer, _ = begin("topk:density=0.1+ef", **options)
    train(whole, rank, range(until), optimizer)
    model, optimizer, handle = begin("topk:density=0.1+ef", **options)
    train(model, rank, range(stop), optimizer)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), handle.state_dict()))
    train(model, rank, range(50, 59), optimizer)  # what comes after does not matter
    again, optimizer, handle = begin("topk:density=0.1+ef", **options)
    train(again, rank, range(70, 74), optimizer)  # nor does what was before
    again.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    handle.load_state_dict(saved[2])
    train(again, rank, range(stop, until), optimizer)
    return flat(whole), flat(again), saved[2], handle
