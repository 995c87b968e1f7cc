"""Codes in compiled graphs: their levels, their rounding, signs and masks."""

from __future__ import annotations

import contextlib
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.activations.compiling import BATCH, HIDDEN, WIDTH, error, mlp, nbytes, run, saved, saving
from tests.activations.helpers import with_zero
from tests.thorough import thorough

pytestmark = pytest.mark.usefixtures("nothing_compiled_yet")


def restored(x: Tensor, bits: int, **options) -> Tensor:
    """What backward gets in place of x: it is the gradient of w in the sum of x ⊙ w."""
    one = torch.eye(x.shape[-1], dtype=x.dtype)  # products of matrices are saved; what is cheap is computed again
    w = torch.ones_like(x, requires_grad=True)
    with saving(bits, **options):
        y = torch.compile(lambda x, one, w: ((x @ one) * w).sum(), backend="aot_eager")(x, one, w)
    assert any(tensor.dtype == torch.uint8 for tensor in saved(y))
    return torch.autograd.grad(y, w)[0]


def ranges(x: Tensor, bits: int, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Groups, and of each its lowest level and its step, float64; shorter at the end, which is filled up."""
    flat = x.double().flatten()
    flat = torch.cat((flat, flat[-1:].expand(-flat.numel() % group)))
    rows = flat.view(-1, group)
    low = rows.amin(1, keepdim=True)
    high = rows.amax(1, keepdim=True)
    step, low = with_zero(high - low, low, bits)
    # Where zero has a level, steps are rounded up to 16 bits.
    coarse = 2.0 ** (step.log2().floor() - 15)
    wide = (step / coarse).ceil() * coarse
    zeroed = (rows.amin(1, keepdim=True) < 0) & (high >= 0) & (bits > 2)
    return rows, torch.where(zeroed, (low / step).round() * wide, low), torch.where(zeroed, wide, step)


@pytest.mark.parametrize(
    ("bits", "shape"),
    [(8, (16, 64)), (4, (17, 61)), (2, (17, 61)), *thorough((8, (17, 61)), (4, (16, 64)), (2, (16, 64)))],
)
@pytest.mark.parametrize("dtype", [torch.float32, *thorough(torch.bfloat16, torch.float16)])
def test_to_nearest_is_the_nearest_of_the_levels_of_its_group(bits, dtype, shape):
    x = (torch.randn(shape) * 3 + torch.arange(shape[0]).unsqueeze(1)).to(dtype)
    rows, low, step = ranges(x, bits, 64)
    wanted = low + ((rows - low) / step).round() * step
    found = restored(x, bits, stochastic=False).double()
    wanted = wanted.flatten()[: x.numel()].view(shape)
    rounding = torch.finfo(dtype).eps * x.abs().max().item()
    # Where an element lies in the middle between two levels, either is nearest.
    middle = (((rows - low) / step) % 1 - 0.5).abs().flatten()[: x.numel()].view(shape) < 1e-4
    assert not middle.all()
    assert torch.allclose(found[~middle], wanted[~middle], rtol=0, atol=rounding)


@pytest.mark.parametrize(
    ("bits", "dtype"),
    [
        *((8, torch.float32), (4, torch.bfloat16), (2, torch.float32)),
        *thorough((8, torch.bfloat16), (4, torch.float32), (2, torch.bfloat16)),
    ],
)
def test_stochastic_rounding_takes_a_neighbour_and_is_right_on_average(bits, dtype):
    x = torch.randn(256, 128).to(dtype)
    found = restored(x, bits)
    rows, low, step = ranges(x, bits, 64)
    place = (rows - low) / step
    up = place - place.floor()  # the probability of the level above
    errors = ((found.double().view_as(rows) - rows) / step).flatten()
    slack = 0.01 + 2**bits * torch.finfo(dtype).eps * 4
    assert (errors.abs() < 1 + slack).all()
    # Decoded values are rounded to the dtype again, to nearest, which is as right on average.
    deviation = (up * (1 - up)).sum().sqrt()
    assert errors.sum().abs() < 4 * deviation
    # Neither does the error follow the element: which way it goes is independent of where it lies.
    for part in (rows.flatten() > 0.5, rows.flatten() < -0.5):
        assert errors[part].sum().abs() < 4 * (up * (1 - up)).flatten()[part].sum().sqrt()
    assert (errors.abs() > 0.5).any(), "this is rounding to nearest"


@pytest.mark.parametrize("bits", [8, 4])
def test_a_few_zeros_among_others_stay_zeros(bits):
    x = torch.randn(256, 64) * torch.logspace(-6, 6, 256).unsqueeze(1)
    x[:, ::16] = 0.0
    found = restored(x, bits)
    assert (found[:, ::16] == 0).all()
    assert not (found == 0).all()


def test_equal_elements_are_not_rounded_alike():
    x = torch.full((64, 64), 0.3)
    x[:, 0], x[:, 1] = 0.0, 1.0
    found = restored(x, 2)[:, 2:]
    share = (found > 0.5).double().mean().item()  # levels are 0, 1/3, 2/3, 1
    assert set(found.unique().mul(3).round().int().tolist()) == {0, 1}
    assert share == 0
    assert found.double().mean().item() == pytest.approx(0.3, abs=4 * math.sqrt(0.9 * 0.1 / found.numel()) / 3)


def test_an_element_is_rounded_anew_when_it_changes():
    x = torch.full((64, 64), 0.5)
    x[:, 0], x[:, 1] = 0.0, 1.0
    changed = torch.where(x == 0.5, torch.nextafter(x, torch.ones(())), x)
    up, again, anew = (restored(each, 2)[:, 2:] > 0.5 for each in (x, x, changed))  # levels are 0, 1/3, 2/3, 1
    assert torch.equal(up, again)
    assert (up != anew).double().mean().item() == pytest.approx(0.5, abs=4 * 0.5 / math.sqrt(up.numel()))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # as Dynamo does
def test_the_order_in_memory_is_kept():
    class Flat(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.sum()

        @staticmethod
        def backward(ctx, g):
            (x,) = ctx.saved_tensors  # samples, channels, rows, columns; and channels lie innermost
            return g * x.permute(0, 2, 3, 1).view(-1).mul(2).view(*x.shape[:1], *x.shape[2:], -1).permute(0, 3, 1, 2)

    layer = nn.Conv2d(4, 8, 1).to(memory_format=torch.channels_last)
    x = torch.randn(2, 4, 9, 11).to(memory_format=torch.channels_last)
    compiled = torch.compile(lambda x: Flat.apply(layer(x)), backend="aot_eager")
    with saving(8):
        y = compiled(x)
    assert any(tensor.dtype == torch.uint8 for tensor in saved(y))
    wanted = torch.autograd.grad(layer(x).square().sum(), layer.weight)
    assert error(torch.autograd.grad(y, layer.weight), wanted) < 0.02


@pytest.mark.parametrize(
    ("bits", "broken"),
    [
        *((8, math.nan), (4, math.inf), (2, -math.inf)),
        *thorough((8, math.inf), (8, -math.inf), (4, math.nan), (4, -math.inf), (2, math.nan), (2, math.inf)),
    ],
)
def test_a_group_that_is_not_finite_is_nan_and_no_other(bits, broken):
    x = torch.randn(16, 64)
    x[3, 5] = broken
    found = restored(x, bits)
    assert found[3].isnan().all()
    assert found[torch.arange(16) != 3].isfinite().all()


def test_constant_groups_are_exact_and_a_range_that_is_no_float32_is_seen():
    x = torch.randn(16, 64)
    x[0], x[1], x[2] = 0.0, -7.25, 2.0**-140
    x[3] = torch.linspace(-1, 1, 64) * torch.finfo(torch.float32).max
    found = restored(x, 8)
    assert torch.equal(found[:3], x[:3])
    assert found[3].isnan().all()
    assert found[4:].isfinite().all()


@pytest.mark.parametrize("bits", [2, *thorough(8, 4)])
@pytest.mark.parametrize("activation", [nn.LeakyReLU(0.1), *thorough(nn.ReLU())])
def test_activations_with_a_corner_let_the_same_gradients_through(bits, activation):
    model = mlp()
    model[1] = model[3] = activation
    biases = [model[layer].bias for layer in (0, 2)]
    compiled, x = torch.compile(model, backend="aot_eager"), torch.randn(BATCH, WIDTH)
    with saving(bits):
        y = compiled(x)
    assert sum(tensor.dtype == torch.uint8 for tensor in saved(y)) >= 2
    # Gradients of biases know of activations nothing but where they were above zero.
    wanted = torch.autograd.grad(compiled(x).sum(), biases)
    assert all(map(torch.equal, torch.autograd.grad(y.sum(), biases), wanted))


def test_where_backward_is_a_graph_in_the_graph_signs_are_kept():
    layer, x = nn.Linear(WIDTH, WIDTH), torch.randn(BATCH, WIDTH)

    def function(x):
        x = layer(x)
        return torch.cond(x.sum() > -1e9, torch.relu, torch.sin, (x,)).sum()

    compiled = torch.compile(function, backend="aot_eager")
    with saving(2):
        y = compiled(x)
    assert any(tensor.dtype == torch.uint8 for tensor in saved(y))
    assert torch.equal(*(torch.autograd.grad(of, layer.bias)[0] for of in (y, compiled(x))))


def test_masks_take_one_bit_and_lose_nothing():
    x = torch.randn(33, 67, requires_grad=True)
    compiled = torch.compile(lambda x: F.dropout(x, 0.3), backend="aot_eager")
    torch.manual_seed(1)
    wanted = compiled(x)
    assert nbytes(wanted, x) == x.numel()
    torch.manual_seed(1)
    with saving(8):
        y = compiled(x)
    assert nbytes(y, x) == math.ceil(x.numel() / 64) * 8
    assert torch.equal(*(torch.autograd.grad(of.sum(), x)[0] for of in (y, wanted)))


def test_packing_draws_no_random_numbers_and_the_same_step_is_the_same():
    model = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Dropout(0.1), nn.Linear(HIDDEN, WIDTH))
    compiled, x = torch.compile(model, backend="aot_eager"), torch.randn(BATCH, WIDTH)
    ends = []
    for context in (contextlib.nullcontext(), saving(4), saving(4)):
        torch.manual_seed(3)
        ends.append((*run(compiled, x, context), torch.get_rng_state()))
    (plain, _, _, state), (first, _, one, after), (second, _, two, _) = ends
    assert torch.equal(plain, first)
    assert torch.equal(state, after)
    assert torch.equal(first, second)
    assert all(map(torch.equal, one, two))
