"""The paper's equations, re-derived in float64: codes, ranges over several steps, and rounding."""

from __future__ import annotations

import math

import pytest
import torch

from narrowband.activations.ranges import WIDE, drift
from tests.activations.helpers import Heads, compress, linears, with_zero
from tests.kernels.tables import reference


def rederived(x, dims, held, decay):
    """Equations 6 and 7 in float64 for groups that lie along ``dims``: the range (α, β) that the batch has, and the
    estimates (α, β). The range is that of the estimates before, unless an end of it is far from these; and
    the batch's own where that needs a much wider one.
    """
    low, high = x.amin(dims, keepdim=True), x.amax(dims, keepdim=True)
    alpha, beta = high - low, low
    learned = alpha, beta
    if held is not None:
        learned = alpha, beta = decay * held[0] + (1 - decay) * alpha, decay * held[1] + (1 - decay) * beta
        moved = torch.maximum((held[1] - beta).abs(), (sum(held) - alpha - beta).abs())
        if decay and (moved <= drift(decay) * alpha).all():
            alpha, beta = held
        elif decay:
            both = torch.maximum(high, sum(held)) - torch.minimum(low, held[1])
            wide = both > WIDE * held[0]
            alpha, beta = torch.where(wide, high - low, alpha), torch.where(wide, low, beta)
    return (alpha, beta), learned


def rounded(x, low, step, bits):
    """Equation 5 in float64, given the ends that equation 3 takes."""
    return ((x - low) / step).round().clamp(0, 2**bits - 1) * step + low


def check(found, x, dims, held, *, rounding, bits=8, decay=0.9):
    """What was restored against the equations; returns the estimates."""
    (alpha, beta), held = rederived(x.double(), dims, held, decay)
    unit, least = with_zero(alpha, beta, bits)
    assert (unit <= alpha / (2**bits - 1) * (1 + 1 / (2**bits - 2) + 1e-9)).all()
    low, step = (
        reference.code_ranges(  # of float32, and with steps that have one code for zero
            torch.stack((alpha, beta)).float().view(2, -1), bits=bits, symmetric=False, zeroed=bits >= 4
        )
        .double()
        .view(2, *alpha.shape)
    )
    torch.testing.assert_close(step, unit, rtol=1e-3, atol=0)
    torch.testing.assert_close(low, least, rtol=1e-3, atol=0)
    x_hat, unit = rounded(x.double(), low, step, bits), step
    inside = (x >= low) & (x <= low + (2**bits - 1) * step)
    assert (inside | (found.double() - x_hat).abs().le(1e-5 * alpha)).all(), "clipped to the range"
    if rounding == "nearest":
        assert ((found.double() - x_hat).abs() <= unit * 1e-3).double().mean() > 0.98
    assert ((found.double() - x.double()).abs() <= unit * (1.001 if rounding == "stochastic" else 0.501))[inside].all()
    return held


def estimates_of(handle, name):
    return handle.state_dict()["estimates"][name].double()


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize(("bits", "decay"), [(8, 0.9), (4, 0.5), (2, 0.0)])
def test_a_linear_layer_is_the_equations_over_several_steps(bits, decay, rounding):
    model, held = linears(16, 24, 8), None
    handle = compress(model, bits=bits, decay=decay, rounding=rounding, groups=6)
    generator = torch.Generator().manual_seed(1)
    for scale in (1, 2, 2, 5, 4, 4):
        x = torch.randn(40, 16, generator=generator) * scale
        with handle:
            y = model(x)
        h = model[0](x).detach().view(40, 6, 4)  # four neighbouring channels are a group
        found = y.grad_fn._saved_mat1.view(40, 6, 4)
        held = check(found, h, (0, 2), held, rounding=rounding, bits=bits, decay=decay)
        torch.testing.assert_close(estimates_of(handle, "1:matmul:0"), torch.stack(held).view(2, 6), rtol=1e-5, atol=0)
        y.backward(torch.ones_like(y))
        torch.testing.assert_close(model[1].weight.grad, found.view(40, 24).sum(0).expand(8, 24))
        model.zero_grad()


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_attention_is_the_equations_per_head_over_several_steps(rounding):
    """Queries, keys, values and results have a range for each head of each."""
    torch.manual_seed(0)
    model, held = Heads(), {}
    handle = compress(model, rounding=rounding)
    for _ in range(5):
        with handle:
            model(torch.randn(3, 10, 32))
        for name in ("query", "key", "value", "output"):
            exact = getattr(model, name).detach()
            found = getattr(model.output.grad_fn, f"_saved_{name}")
            held[name] = check(found, exact, (0, 2, 3), held.get(name), rounding=rounding)
    estimates = {
        name: value
        for name, value in handle.state_dict()["estimates"].items()
        if name.startswith(":attention:") and not name.endswith(":scores")
    }
    assert len(estimates) == 4
    for alpha_beta in held.values():
        expected = torch.stack(alpha_beta).view(2, 4)
        assert sum(torch.allclose(value.double(), expected, rtol=1e-4) for value in estimates.values()) == 1


def test_stochastic_rounding_of_a_gradient_is_right_on_average():
    model, x, times = linears(8, 16, 4), torch.randn(32, 8), 400
    handle = compress(model, bits=2)
    model(x).square().sum().backward()
    plain = model[1].weight.grad.double()
    found = []
    for _ in range(times):
        model.zero_grad()
        with handle:
            y = model(x)
        y.square().sum().backward()
        found.append(model[1].weight.grad.double())
    found = torch.stack(found)
    assert ((found.mean(0) - plain).abs() <= 5 * found.std(0) / math.sqrt(times) + 1e-6).all()
    assert (found.std(0) > 0).all()
