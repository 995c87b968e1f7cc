"""An operator between two layers, whose result can be computed again."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import narrowband as nb


def compress(model, **options):
    return nb.compress_activations(model, **{"min_numel": 64, **options})


class Between(nn.Module):
    """A function between two linear layers, or convolutions. It remembers what went in and came out."""

    def __init__(self, function, layer=None):
        super().__init__()
        self.first, self.function, self.last = (layer or linear)(), function, (layer or linear)()

    def forward(self, x):
        self.x = self.first(x)
        self.y = self.function(self.x)
        return self.last(self.y)


def linear():
    return nn.Linear(32, 32)


def conv():
    return nn.Conv2d(8, 8, 3, padding=1)


def uneven(norm):
    """With parameters that are neither ones nor zeros."""
    with torch.no_grad():
        norm.weight.uniform_(0.5, 2)
        if getattr(norm, "bias", None) is not None:
            norm.bias.normal_()
    return norm


def tokens(samples=10):
    return torch.randn(samples, 8, 32)


def images():
    return torch.randn(4, 8, 6, 6) * torch.logspace(-1, 1, 8).view(8, 1, 1)


class Written(nn.Module):
    """RMS normalization as models of the library Transformers write it: in float32, and back to the dtype it was in."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.weight, self._dtype = nn.Parameter(torch.ones(32)), dtype

    def forward(self, x):
        h = x.to(self._dtype).float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-12)
        return self.weight * h.to(self._dtype).float()


class Multiplied(nn.Module):
    """RMS normalization as T5 writes it: the input itself, in 16 bits, times a factor in float32."""

    def __init__(self, dtype=torch.bfloat16):
        super().__init__()
        self.weight, self._dtype = nn.Parameter(torch.ones(32)), dtype

    def forward(self, x):
        h = x.to(self._dtype)
        h = h * torch.rsqrt(h.float().pow(2).mean(-1, keepdim=True) + 1e-12)
        return self.weight * h.to(self._dtype).float()


#: Name → what is between two layers, and their kind and input.
OPERATORS = {
    "gelu": lambda: Between(F.gelu),
    "gelu, tanh": lambda: Between(nn.GELU("tanh")),
    "silu": lambda: Between(F.silu),
    "silu, gate": lambda: Between(lambda x: F.silu(x) * x),
    "layer norm": lambda: Between(uneven(nn.LayerNorm(32))),
    "layer norm of two dimensions": lambda: Between(uneven(nn.LayerNorm((8, 32)))),
    "layer norm, plain": lambda: Between(nn.LayerNorm(32, elementwise_affine=False)),
    "rms norm": lambda: Between(uneven(nn.RMSNorm(32))),
    "rms norm of two dimensions": lambda: Between(uneven(nn.RMSNorm((8, 32), eps=1e-3))),
    "rms norm, plain": lambda: Between(nn.RMSNorm(32, elementwise_affine=False)),
    "batch norm": lambda: Between(uneven(nn.BatchNorm2d(8)), conv),
    "batch norm, plain": lambda: Between(nn.BatchNorm2d(8, affine=False), conv),
    "batch norm, no running statistics": lambda: Between(nn.BatchNorm2d(8, track_running_stats=False), conv),
    "batch norm, relu": lambda: Between(nn.Sequential(uneven(nn.BatchNorm2d(8)), nn.ReLU()), conv),
    "batch norm, relu in place": lambda: Between(nn.Sequential(uneven(nn.BatchNorm2d(8)), nn.ReLU(inplace=True)), conv),
    "batch norm, silu": lambda: Between(nn.Sequential(uneven(nn.BatchNorm2d(8)), nn.SiLU()), conv),
    "layer norm, relu": lambda: Between(nn.Sequential(uneven(nn.LayerNorm(32)), nn.ReLU(inplace=True))),
}


EVERY = pytest.mark.parametrize("name", OPERATORS)


def made(name):
    torch.manual_seed(0)
    model = OPERATORS[name]()
    return model, tokens() if isinstance(model.first, nn.Linear) else images()


def saved_by(node, *names):
    """What a node has saved under the first of these names that it has."""
    return next(getattr(node, f"_saved_{name}") for name in names if hasattr(node, f"_saved_{name}"))


def behind(y, start):
    """The first node behind a result whose name begins so."""
    queue = [y.grad_fn]
    while queue:
        node = queue.pop(0)
        if node.name().startswith(start):
            return node
        queue += [after for after, _ in node.next_functions if after is not None]
    raise AssertionError(start)


def of_last(y):
    """The input of the last layer, as its node has it."""
    node = behind(y, ("Addmm", "Convolution"))
    return saved_by(node, "mat1", "input")


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def plain(name, *, cast=False):
    model, x = made(name)
    with torch.autocast("cpu", torch.bfloat16, enabled=cast):
        y = model(x)
    y.float().square().sum().backward()
    return y, gradients(model), dict(model.named_buffers())
