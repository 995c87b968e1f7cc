"""Results that are computed again, in whatever becomes of a graph: changes, checkpoints, lifetimes."""

from __future__ import annotations

import contextlib
import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from narrowband.activations.packed import Payload
from narrowband.activations.recompute import Derivation
from tests.activations.derived import (
    EVERY,
    Between,
    behind,
    compress,
    gradients,
    made,
    of_last,
    saved_by,
    tokens,
    uneven,
)
from tests.activations.models import error, plain_step, same, step

#: PyTorch says so once, of RMS norm under autocast.
pytestmark = pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")

# ---- changes ---------------------------------------------------------------------------------------------------------


def test_a_result_that_was_changed_after_it_was_saved_is_an_error():
    def function(x):
        y = F.gelu(x)
        z = y.cosh()
        y.add_(1)
        return z

    model = Between(function)
    with compress(model) as saved:
        y = model(tokens())
    assert saved.by_operator["other"].kept_bytes == 0
    with pytest.raises(RuntimeError, match=r"which other in the model saved for backward, is at version 1; expected"):
        y.sum().backward()


@pytest.mark.parametrize("graph", [False, True])
def test_a_result_that_was_changed_before_it_is_saved_is_another(graph):
    def function(x):
        y = uneven_norm(x)
        with contextlib.nullcontext() if graph else torch.no_grad():
            y.mul_(100)
        return y

    torch.manual_seed(0)
    uneven_norm = uneven(nn.LayerNorm(32))
    for cast in (False, True):
        model = Between(function)
        with compress(model) as saved, torch.autocast("cpu", torch.bfloat16, enabled=cast):
            y = model(tokens())
        found = of_last(y).view(model.y.shape).float()
        torch.testing.assert_close(found, model.y.float(), rtol=0, atol=5)
        assert saved.by_operator["matmul"].kept_bytes >= model.y.numel()


def test_parameters_may_change_before_backward():
    """Where PyTorch does not need them for the gradient that is asked for, it is that of the former ones."""
    for name in ("layer norm", "batch norm, relu"):
        model, x = made(name)
        norm = model.function if name == "layer norm" else model.function[0]
        found = []
        for change in (False, True):
            torch.manual_seed(1)
            with compress(model, rounding="nearest", decay=0.0) as saved:
                y = model(x)
            assert saved.by_module["last"].kept_bytes < 300
            if change:
                with torch.no_grad():
                    norm.weight.mul_(10)
                    norm.bias.data.add_(3)
            (grad,) = torch.autograd.grad(y.square().sum(), model.last.weight)
            found.append(grad)
        assert same(*found)


def test_batch_norm_that_is_evaluated_uses_the_statistics_of_then():
    model, x = made("batch norm, relu")
    norm = model.function[0]
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.5, 2)
    model.eval()
    with compress(model) as saved:
        y = model(x)
    exact = model.y.detach().clone()
    assert saved.by_operator["conv"].kept_bytes == 2 * 8 * 4
    norm.running_mean.add_(100)
    norm.running_var.mul_(100)
    torch.testing.assert_close(of_last(y), exact, rtol=0.02, atol=0.1)
    assert not same(of_last(y), exact)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 3e38])
@pytest.mark.parametrize("name", ["gelu", "layer norm", "batch norm, relu"])
def test_what_is_not_finite_stays_so(name, bad):
    model, x = made(name)
    with torch.no_grad():
        model.first.bias[3] = bad
    model(x).square().sum().backward()
    expected = gradients(model)
    model.zero_grad()
    with compress(model):
        y = model(x)
    y.square().sum().backward()
    for key, value in gradients(model).items():
        assert torch.equal(value.isfinite(), expected[key].isfinite()), key
    if name != "batch norm, relu":  # whose channels are finite but for one
        assert all(torch.equal(value.isnan(), expected[key].isnan()) for key, value in gradients(model).items())


def test_memory_that_is_used_again_is_not_taken_for_a_result():
    torch.manual_seed(0)
    model, addresses, error_of = Between(F.gelu), [], []
    inputs = [tokens() * 10**at for at in range(4)]
    with compress(model, decay=0.0):
        for at in range(100):  # four times at least, and until memory was used again
            y = model(inputs[at % 4])
            addresses.append(model.y.data_ptr())
            error_of.append((of_last(y).view(model.y.shape) - model.y).norm() / model.y.norm())
            del y, model.x, model.y
            other = torch.full((10, 8, 32), 7.0, requires_grad=True)  # perhaps where the result was
            z = model.last(other)
            addresses.append(other.data_ptr())
            torch.testing.assert_close(saved_by(behind(z, "Addmm"), "mat1").view(10, 8, 32), other)
            del other, z
            if at >= 3 and len(set(addresses)) < len(addresses):
                break
    assert len(set(addresses)) < len(addresses), "no memory was used again: the test says nothing"
    assert max(error_of) < 0.02


# ---- what a graph may be used for ------------------------------------------------------------------------------------


@EVERY
@pytest.mark.parametrize("inside", [False, True])
def test_backward_inside_of_the_context_and_under_autocast_restores_the_same(name, inside):
    found = []
    for within in (False, inside):
        model, x = made(name)
        with contextlib.ExitStack() as stack:
            stack.enter_context(compress(model))
            stack.enter_context(torch.autocast("cpu", torch.bfloat16))
            loss = model(x).float().square().sum()
            if within:
                loss.backward()
        if not within:
            loss.backward()
        found.append(gradients(model))
    assert all(same(found[0][key], found[1][key]) for key in found[0])


@pytest.mark.parametrize("name", ["gelu", "silu", "layer norm", "batch norm"])
def test_double_backward(name):
    def run(**options):
        model, x = made(name)
        x.requires_grad_()
        with compress(model, **options):
            y = model(x).square().sum()
        (grad,) = torch.autograd.grad(y, x, create_graph=True)
        grad.square().sum().backward()
        return gradients(model)

    assert 0 < error(run(), run(bits="off")) < 0.05


def test_backward_twice_of_a_graph_that_is_retained():
    model, x = made("batch norm, relu in place")
    with compress(model):
        y = model(x).square().sum()
    y.backward(retain_graph=True)
    first = gradients(model)
    model.zero_grad()
    y.backward()
    assert all(same(value, first[key]) for key, value in gradients(model).items())


@pytest.mark.parametrize("reentrant", [False, True])
def test_nothing_is_derived_in_a_checkpoint(reentrant):
    torch.manual_seed(0)
    norm = uneven(nn.LayerNorm(32))
    model = Between(lambda x: checkpoint(lambda x: F.gelu(norm(x)), x, use_reentrant=reentrant))
    x = tokens()
    model(x).square().sum().backward()
    expected = gradients(model)
    model.zero_grad()
    with compress(model) as saved:
        y = model(x)
    assert saved.by_operator["matmul"].kept_bytes == model.y.numel()
    y.square().sum().backward()
    assert 0 < error(gradients(model), expected) < 0.02


# ---- lifetimes -------------------------------------------------------------------------------------------------------


def alive():
    return sum(type(x) in (Payload, Derivation) for x in gc.get_objects())


@EVERY
@pytest.mark.usefixtures("no_collector")
def test_nothing_lives_longer_than_who_saved_it(name):
    assert alive() == 0
    model, x = made(name)
    with compress(model):
        y = model(x)
        assert alive() > 0
        model.x = model.y = None
        y.sum().backward()
        del y
        assert alive() == 0
        F.gelu(model.first(x))  # nobody saves it
        y = model(x)
        model.x = model.y = None
        del y
        assert alive() == 0


@pytest.mark.usefixtures("no_collector")
def test_a_result_outlives_no_payload_of_its_input():
    """Of a detached result nobody has the input any more, and it is kept as itself."""

    def function(x):
        y = F.gelu(x).detach().requires_grad_()
        assert alive() == 0
        return y

    model = Between(function)
    with compress(model) as saved:
        y = model(tokens())
    assert saved.by_operator["matmul"].kept_bytes == model.y.numel()
    torch.testing.assert_close(of_last(y).view(model.y.shape), model.y, rtol=0, atol=0.02)


# ---- models ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["vit", "encoder", "resnet"])
@pytest.mark.parametrize("bits", [8, 4])
def test_models_keep_less_and_err_about_the_same(name, bits):
    plain = plain_step(name)
    derived = step(name, {"bits": bits})
    kept = step(name, {"bits": bits, "derive": False})
    assert derived.saved.kept_bytes < kept.saved.kept_bytes
    assert error(derived.grads, plain.grads) < 1.5 * error(kept.grads, plain.grads)
