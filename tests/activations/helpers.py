"""Small models, and what a run of one saves."""

from __future__ import annotations

import gc
import itertools
import math

import torch
import torch.nn.functional as F
from torch import nn

import narrowband as nb
from narrowband.activations.packed import Payload
from tests.activations.models import SMALL


def compress(model, **options):
    return nb.compress_activations(model, **{"min_numel": SMALL, **options})


def with_zero(alpha, beta, bits):
    """Step and low of codes for α and β, in float64: equation 3 of Mesa, with a level at zero if a range contains zero.

    A range is widened to the nearer side: its lowest level stays where it is, or its highest.
    """
    top, high = 2**bits - 1, alpha + beta
    if bits < 4:
        return alpha / top, beta
    choices = [(step, -k * step) for k in range(top + 1) for step in [(torch.maximum(-beta / k, high / (top - k)))]]
    steps, lows = (torch.stack(column).nan_to_num(math.inf, math.inf) for column in zip(*choices, strict=True))
    best = steps.argmin(0, keepdim=True)
    inside = (beta < 0) & (high >= 0)
    step, low = (column.gather(0, best).squeeze(0) for column in (steps, lows))
    return torch.where(inside, step, alpha / top), torch.where(inside, low, beta)


def grads_of(model):
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def linears(*sizes):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(sizes)))


class Calls(nn.Module):
    """A function of a linear layer's result, as a model; heads where it has them."""

    def __init__(self, function, dim=32, **attributes):
        super().__init__()
        self.first, self.function = nn.Linear(dim, dim), function
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x):
        return self.function(self.first(x))


class Checks(torch.autograd.Function):
    """The identity; notes whether backward has what forward saved, to the bit."""

    @staticmethod
    def forward(ctx, x, exact):
        ctx.save_for_backward(x)
        ctx.copy, ctx.exact = x.clone(), exact
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        ctx.exact.append(torch.equal(ctx.saved_tensors[0], ctx.copy))
        return gradient, None


class Heads(nn.Module):
    """Attention in one call, of heads that differ in size; remembers what it saw."""

    num_heads = 4

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(32, 96)
        with torch.no_grad():
            self.qkv.weight.mul_(torch.logspace(-1, 1, 12)[torch.randperm(12)].repeat_interleave(8).view(-1, 1))

    def forward(self, x):
        self.query, self.key, self.value = self.qkv(x).view(3, 10, 3, 4, 8).permute(2, 0, 3, 1, 4).unbind(0)
        self.output = F.scaled_dot_product_attention(self.query, self.key, self.value)
        return self.output


def saved_of(y):
    """What the graph of a result has saved, restored: (place, node, attribute) → tensor."""
    found, seen, queue = {}, set(), [y.grad_fn]
    while queue:
        node = queue.pop(0)
        if node is None or node in seen:
            continue
        seen.add(node)
        queue += [after for after, _ in node.next_functions]
        for name in dir(node):
            if name.startswith("_saved_"):
                value = getattr(node, name)
                if isinstance(value, torch.Tensor):
                    found[len(seen), node.name(), name] = value
    return found


def payloads():
    return sum(type(x) is Payload for x in gc.get_objects())
