"""Models under DGC, whose momentum is the method's."""

from __future__ import annotations

import narrowband as nb
from tests.gradients.training import TINY, compress, mlp, wrap

SPARSE = "dgc:density=0.05"


def compressed(spec, *, cap=TINY, optimizer=None, module=None, **options):
    model = wrap(module if module is not None else mlp(), cap)
    optimizer = optimizer(model) if optimizer else nb.DGCSGD(model.parameters(), lr=0.05)
    return model, optimizer, compress(model, spec, min_numel=64, optimizer=optimizer, early=cap == TINY, **options)


def state_of(handle):
    return {key: value.clone() for key, value in handle.state_dict()["feedback"].items()}


def nesterov(model):
    return nb.DGCSGD(model.parameters(), lr=0.05, nesterov=True)
