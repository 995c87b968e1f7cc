"""Rows of exact zeros in front of normalization: left padding whose embedding is zero."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import narrowband as nb
from tests.activations.models import error

_WIDTH, _WORDS, _HEADS = 64, 50, 4


class _Block(nn.Module):
    """Attention and an MLP, with a norm before and behind each, as Gemma has them."""

    def __init__(self, norm):
        super().__init__()
        self.norms = nn.ModuleList(norm(_WIDTH, eps=1e-6) for _ in range(4))
        self.qkv, self.out = nn.Linear(_WIDTH, 3 * _WIDTH, bias=False), nn.Linear(_WIDTH, _WIDTH, bias=False)
        self.up, self.down = nn.Linear(_WIDTH, 2 * _WIDTH, bias=False), nn.Linear(2 * _WIDTH, _WIDTH, bias=False)
        for layer in (self.qkv, self.out, self.up, self.down):
            nn.init.normal_(layer.weight, std=0.02)

    def forward(self, x):
        rows, length, _ = x.shape
        q, k, v = self.qkv(self.norms[0](x)).view(rows, length, 3, _HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + self.norms[1](self.out(mixed))
        return x + self.norms[3](self.down(F.gelu(self.up(self.norms[2](x)))))


def worst(found, expected):
    """The largest error of a parameter's gradient."""
    return max(error({name: found[name]}, {name: expected[name]}) for name in expected)


@pytest.mark.parametrize("norm", [nn.RMSNorm, nn.LayerNorm])
def test_symmetric_ranges_keep_rows_of_zeros(norm):
    """The gradient of such rows explodes, also without compression; it is multiplied by zeros that have to stay zeros.

    Levels that do not include zero make parameters' gradients wrong by powers of ten here, as the guide says.
    """
    torch.manual_seed(0)
    words, target = torch.randint(1, _WORDS, (8, 32)), torch.randint(1, _WORDS, (8, 32))
    words[:2, :5] = 0
    target[words == 0] = -100
    model = nn.Sequential(
        nn.Embedding(_WORDS, _WIDTH, padding_idx=0), *(_Block(norm) for _ in range(3)), nn.Linear(_WIDTH, _WORDS)
    )

    def gradients(policy):
        model.zero_grad()
        with nb.compress_activations(model, policy=policy):
            loss = F.cross_entropy(model(words).flatten(0, 1), target.flatten())
        loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters()}

    plain = gradients(nb.ActivationPolicy(bits="off"))
    symmetric = gradients(nb.ActivationPolicy(bits=8, symmetric=True))
    assert worst(symmetric, plain) < 0.3
    usual = gradients(nb.ActivationPolicy(bits=8))
    assert worst(usual, plain) > 1e3, "levels include zero now: the guide need not warn any more"
