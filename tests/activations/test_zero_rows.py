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


@pytest.mark.parametrize(("bits", "symmetric"), [(8, False), (4, False), (8, True), (2, True)])
@pytest.mark.parametrize("norm", [nn.RMSNorm, nn.LayerNorm])
def test_rows_of_zeros_in_front_of_norms_stay_zeros(norm, bits, symmetric):
    """Gradients of such rows explode, also without compression; they are multiplied by zeros that have to stay zeros.

    With levels of which none is zero, parameters' gradients were wrong by 8 powers of ten in 8 bits, and by 12 in 4.
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
    found = gradients(nb.ActivationPolicy(bits=bits, symmetric=symmetric))
    assert worst(found, plain) < (0.3 if bits == 8 else 2)
