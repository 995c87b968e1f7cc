"""Models that are compiled, and what their graphs save."""

from __future__ import annotations

import contextlib
import math

import torch
from torch import Tensor, nn

from narrowband.activations.compiled import compiled_hooks

BATCH, WIDTH, HIDDEN = 128, 32, 64


def hooks(bits=8, **options):
    return compiled_hooks(bits, **{"min_numel": 512, "group": 64, **options})


def saving(bits=8, **options):
    return torch.autograd.graph.saved_tensors_hooks(*hooks(bits, **options))


def mlp():
    return nn.Sequential(
        nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, WIDTH)
    )


def compiled_functions(y: Tensor):
    found, seen, todo = [], set(), [y.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if "CompiledFunction" in type(node).__name__:
            found.append(node)
        todo += [there for there, _ in node.next_functions]
    return found


def saved(y: Tensor) -> list[Tensor]:
    """What the compiled functions behind y keep for backward."""
    return [tensor for node in compiled_functions(y) for tensor in node.saved_tensors]


def nbytes(y: Tensor, *living: Tensor) -> int:
    """Memory that is kept for backward, and would not be without it."""
    alive = {tensor.untyped_storage().data_ptr() for tensor in living}
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in saved(y)}
    return sum(size for place, size in storages.items() if place not in alive)


def run(model, x, context=None, wanted=None):
    """Output, bytes kept, gradients."""
    wanted = list(model.parameters()) if wanted is None else wanted
    with context or contextlib.nullcontext():
        y = model(x)
    kept = nbytes(y, x, *wanted)
    return y.detach(), kept, torch.autograd.grad(y.float().square().mean(), wanted)


def error(gradients, wanted):
    flat, right = (torch.cat([g.flatten().double() for g in many]) for many in (gradients, wanted))
    return ((flat - right).norm() / right.norm()).item()


class Broken(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = mlp(), mlp()

    def forward(self, x):
        x = self.first(x)
        torch._dynamo.graph_break()
        if x.sum() > -math.inf:  # and another, before which nothing is compiled
            x = torch.tanh(x)
        torch._dynamo.graph_break()
        return self.second(x)


def broken():
    return torch.compile(Broken(), backend="aot_eager")
