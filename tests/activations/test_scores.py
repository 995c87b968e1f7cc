"""Fused attention whose scores are large keeps what it saves as it is, since errors of scores are factors."""

from __future__ import annotations

import contextlib
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import narrowband as nb
from narrowband.activations import packed, scores
from narrowband.activations.scores import score_error


class Attention(nn.Module):
    """Heads whose queries are multiplied by a factor."""

    def __init__(self, factor=1.0, *, shared=False):
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.factor, self.shared = nn.Linear(64, 192, bias=False), factor, shared

    def forward(self, x):
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 4, 16).permute(2, 0, 3, 1, 4)
        if self.shared:
            q = k = v
        return F.scaled_dot_product_attention(query=self.factor * q, key=k, value=v)


def batch(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(4, 64, 64, generator=generator), torch.randn(4, 4, 64, 16, generator=generator)


def gradient(model, context, seed=0):
    x, weights = batch(seed)
    if context is None:
        loss = (model(x) * weights).sum()
    else:
        with context as saved:
            loss = (model(x) * weights).sum()
        model.outliers = saved.by_operator["attention"].outliers
    model.qkv.weight.grad = None
    loss.backward()
    return model.qkv.weight.grad.double()


def off_by(model, context, seed=0):
    exact = gradient(model, None, seed)
    return ((gradient(model, context, seed) - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("keys", [4, 2])
def test_the_error_of_a_score_is_that_of_independent_roundings(keys):
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 4, 256, 32, generator=generator) * torch.tensor([1.0, 2.0, 0.5, 1.0]).view(4, 1, 1) + 0.3
    k = torch.randn(2, keys, 256, 32, generator=generator) - 0.2
    found = score_error(q, k, scale=0.25)

    def rounded(x):
        low, step = x.amin((0, 2, 3), keepdim=True), (x.amax((0, 2, 3)) - x.amin((0, 2, 3))).view(-1, 1, 1) / 255
        return low + ((x - low) / step).round() * step

    k, near = (x.repeat_interleave(4 // keys, 1).double() for x in (k, rounded(k)))
    errors = 0.25 * (rounded(q).double() @ near.mT - q.double() @ k.mT)
    assert found.item() == pytest.approx(errors.std((0, 2, 3)).max().item(), rel=0.05)


@pytest.mark.parametrize(("granularity", "most"), [("layer", 1.05), (32, 1.5)])
def test_the_error_of_a_score_is_that_of_the_ranges_of_the_policy(granularity, most):
    """The step of a head was taken, which may be much smaller than that of the layer, or larger than neighbours'."""
    generator = torch.Generator().manual_seed(0)
    of_heads = torch.tensor([0.5, 1.0, 1.0, 4.0]).view(4, 1, 1)
    q = torch.randn(2, 4, 256, 32, generator=generator) * of_heads
    k = torch.randn(2, 4, 256, 32, generator=generator) * of_heads.flip(0)
    found = score_error(q, k, scale=0.25, granularity=granularity)

    def rounded(x):
        lines = x.double().reshape(-1, x.numel() if granularity == "layer" else granularity)
        low, high = lines.aminmax(dim=1, keepdim=True)
        step = (high - low) / 255
        return (low + ((lines - low) / step).round() * step).view(x.shape)

    errors = 0.25 * (rounded(q) @ rounded(k).mT - q.double() @ k.double().mT)
    assert 0.95 < found.item() / errors.std((0, 2, 3)).max().item() < most


@pytest.mark.parametrize("bits", [8, 4])
def test_what_attention_with_large_scores_saves_is_kept_from_the_first_pass_on(bits):
    for factor, is_kept in ((1.0, False), (1e3, True)):
        model = Attention(factor)
        context = nb.compress_activations(model, bits=bits)
        error = off_by(model, context)
        assert (model.outliers > 0) == is_kept
        assert error < (0.05 if bits == 8 else 0.5)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("times", [10, 30, 100])
def test_scores_of_one_token_that_is_much_larger_than_the_others_are_precise_enough(times, bits):
    """In means over all tokens it hardly shows, and gradients were wrong by factors of thousands."""
    model, (x, weights) = Attention(), batch()
    x[2, 5] *= times
    exact, found = (
        _weight_gradient(model, x, weights, context)
        for context in (contextlib.nullcontext(), nb.compress_activations(model, bits=bits))
    )
    assert (found - exact).norm() < {8: 0.45, 4: 0.5}[bits] * exact.norm()


def _weight_gradient(model, x, weights, context):
    with context:
        loss = (model(x) * weights).sum()
    return torch.autograd.grad(loss, model.qkv.weight)[0].double()


def test_where_all_three_are_one_tensor_it_is_kept():
    model = Attention(1e3, shared=True)
    assert off_by(model, nb.compress_activations(model, bits=8)) < 0.05


def test_scores_that_grow_are_seen_by_chance_and_those_that_shrink_at_once(monkeypatch):
    model = Attention()
    context = nb.compress_activations(model, bits=8)
    assert off_by(model, context) < 0.05
    monkeypatch.setattr(scores, "by_chance", lambda _: False)
    model.factor = 1e3
    gradient(model, context)
    assert not model.outliers
    monkeypatch.setattr(scores, "by_chance", lambda _: True)
    assert off_by(model, context) < 0.05
    assert model.outliers
    monkeypatch.setattr(scores, "by_chance", lambda _: False)
    assert off_by(model, context) < 0.05
    model.factor = 1.0
    gradient(model, context)
    assert not model.outliers


def test_on_a_device_that_works_ahead_the_next_pass_knows(monkeypatch):
    monkeypatch.setattr(packed, "AHEAD", {"cpu"})
    monkeypatch.setattr(scores, "by_chance", lambda _: True)
    model = Attention()
    context = nb.compress_activations(model, bits=8)
    found = []
    for factor in (1.0, 1.0, 1e3, 1e3, 1e3, 1e3):
        model.factor = factor
        gradient(model, context)
        found.append(model.outliers > 0)
    assert not any(found[:3])
    assert found[-1]


def test_a_resumed_run_has_the_same_bits():
    model = Attention(40.0)
    context = nb.compress_activations(model, bits=4)
    for seed in range(3):
        gradient(model, context, seed)
    state = context.state_dict()
    ahead = [gradient(model, context, seed) for seed in range(3, 9)]
    resumed = Attention(40.0)
    context = nb.compress_activations(resumed, bits=4)
    context.load_state_dict(state)
    assert all(
        torch.equal(gradient(resumed, context, seed), mine) for seed, mine in zip(range(3, 9), ahead, strict=True)
    )


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_leaves_a_state_that_can_be_loaded(value):
    model = Attention(value)
    context = nb.compress_activations(model, bits=8)
    gradient(model, context)
    nb.compress_activations(Attention(), bits=8).load_state_dict(context.state_dict())
