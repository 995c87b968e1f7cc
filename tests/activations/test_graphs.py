"""What a graph may be used for: changes in place, differentiating twice, checkpoints, accumulation."""

from __future__ import annotations

import contextlib
import math

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.activations.helpers import Calls, Checks, compress, grads_of, linears
from tests.activations.models import Attention, error, mlp, same

# ---- changed in place ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [8, "off"])
def test_what_was_changed_after_it_was_saved_is_an_error(bits):
    def function(h):
        y = h.sinh()
        h.add_(1)
        return y

    model = Calls(function)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model(torch.randn(20, 32)).sum().backward()
    with compress(model, bits=bits, min_numel=1):
        y = model(torch.randn(20, 32))
    message = (
        r"modified by an inplace operation: float32 \[20, 32\], which other in the model saved for backward, "
        r"is at version 1; expected version 0 instead"
    )
    with pytest.raises(RuntimeError, match=message):
        y.sum().backward()


def test_parameters_changed_between_forward_and_backward_are_an_error():
    model = linears(32, 32, 32)
    with compress(model):
        y = model(torch.randn(20, 32))
    with torch.no_grad():
        model[1].weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


# ---- not finite ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 3e38])
def test_what_is_not_finite_is_kept_exactly_and_teaches_nothing(bad):
    model = linears(16, 32, 8)
    handle = compress(model, min_numel=1)
    with handle:
        model(torch.randn(20, 16))
    before = handle.state_dict()
    with torch.no_grad():
        model[0].bias[3] = bad
    x = torch.randn(20, 16)
    model(x).sum().backward()
    plain = grads_of(model)
    model.zero_grad()
    with handle as saved:
        y = model(x)
    y.sum().backward()
    assert all(same(p.grad, plain[name]) for name, p in model.named_parameters())
    assert not plain["1.weight"].isfinite().all() or bad == 3e38
    assert saved.kept_bytes == saved.raw_bytes
    after = handle.state_dict()
    assert all(torch.equal(after["estimates"][name], value) for name, value in before["estimates"].items())


# ---- what a graph may be used for ------------------------------------------------------------------------------------


def test_double_backward_works_on_approximate_values():
    def run(bits):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 1))
        x = torch.randn(50, 16, requires_grad=True)
        with compress(model, bits=bits):
            y = model(x).sum()
        (grad,) = torch.autograd.grad(y, x, create_graph=True)
        grad.square().sum().backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    found, plain = run(8), run("off")
    assert found.keys() == plain.keys()
    assert 0 < error(found, plain) < 0.05


def test_a_gradient_that_forward_computes_is_close_and_exact_where_its_module_is_off():
    class Forces(nn.Module):
        def __init__(self):
            super().__init__()
            self.energy = nn.Sequential(
                nn.Linear(8, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 1, bias=False)
            )
            self.last = nn.Linear(8, 8)

        def forward(self, x):
            x = x.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)
            return self.last(-gradient)

    torch.manual_seed(0)
    model, x = Forces(), torch.randn(40, 8)
    exact = model(x)
    exact.square().sum().backward()
    gradients = grads_of(model)
    for modules, most in (({}, 0.02), ({"energy*": "off"}, 0)):
        model.zero_grad()
        with compress(model, modules=modules):
            y = model(x)
        y.square().sum().backward()
        assert (y - exact).norm() <= most * exact.norm()
        assert error(grads_of(model), gradients) < 0.02


def test_double_backward_may_be_inside_of_the_context():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))
    x = torch.randn(50, 16, requires_grad=True)
    with compress(model) as saved:
        (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        grad.square().sum().backward()
    assert model[0].weight.grad.isfinite().all()
    assert saved.by_module["(outside)"].raw_bytes == saved.by_module["(outside)"].kept_bytes > 0
    assert "custom" not in saved.by_operator


def test_backward_twice_of_a_graph_that_is_retained():
    model = linears(16, 32, 8)
    with compress(model):
        y = model(torch.randn(20, 16)).square().sum()
    y.backward(retain_graph=True)
    first = grads_of(model)
    model.zero_grad()
    y.backward()
    assert all(same(p.grad, first[name]) for name, p in model.named_parameters())


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints(reentrant, inside):
    """Their inputs are quantized, and what is computed again agrees, with ReLU, dropout and attention inside."""

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(32, 32)
            self.parts = nn.ModuleList(nn.Sequential(mlp()[:-1], nn.Linear(48, 32)) for _ in range(2))
            self.attn = Attention(fused=False)

        def forward(self, x):
            x = self.first(x)
            for part in self.parts:
                x = checkpoint(part, x, use_reentrant=reentrant)
            return checkpoint(self.attn, x[None], use_reentrant=reentrant).mean((0, 1))

    def run(**options):
        torch.manual_seed(0)
        model, x = Checkpointed(), torch.randn(40, 32)
        with compress(model, **options) as saved:
            y = model(x)
            if inside:
                y.square().sum().backward()
        if not inside:
            y.square().sum().backward()
        return y.detach(), grads_of(model), saved

    y, plain, counted = run(bits="off")
    found_y, grads, saved = run(bits=8)
    assert same(found_y, y)
    assert 0 < error(grads, plain) < 0.05
    inputs = saved.by_operator["checkpoint"]
    assert (inputs.raw_bytes, inputs.kept_bytes) == (3 * 40 * 32 * 4, 3 * 40 * (32 + 8))
    if not (reentrant and inside):  # there, what an input was restored to is saved again
        assert saved.raw_bytes == counted.raw_bytes
    assert "custom" not in saved.by_operator
    exact, grads, _ = run(operators={"checkpoint": "off"} | ({} if inside else {"matmul": "off"}), bits=8)
    assert same(exact, y)
    if not inside:  # what is computed again is computed from the same, and the rest is outside of checkpoints
        assert all(same(grads[name], plain[name]) for name in plain)


def test_custom_functions_within_a_checkpoint_are_left_alone():
    exact = []
    model = Calls(lambda h: checkpoint(lambda h: Checks.apply(h.sinh(), exact), h, use_reentrant=True))
    with compress(model):
        model(torch.randn(20, 32)).sum().backward()
    assert exact == [True]


def test_gradient_accumulation():
    """Several forwards in one context or in several: all have the same estimates, and gradients add up."""

    def run(together, **options):
        torch.manual_seed(0)
        model = mlp()
        handle = compress(model, **options)
        with handle if together else contextlib.nullcontext():
            for _ in range(3):
                with contextlib.nullcontext() if together else handle:
                    loss = model(torch.randn(16, 32)).square().mean()
                loss.backward()
        return grads_of(model), handle.state_dict()

    plain, _ = run(True, bits="off")
    grads, state = run(True)
    apart, apart_state = run(False)
    assert 0 < error(grads, plain) < 0.02
    assert all(same(grads[name], apart[name]) for name in plain)
    assert state["draws"] == apart_state["draws"]
    for name, value in state["estimates"].items():
        assert torch.equal(value, apart_state["estimates"][name])
