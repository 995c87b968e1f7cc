"""Products in compiled graphs: backward computes them where it has their factors, and else reads them as before."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from narrowband.activations import compiled
from narrowband.activations.compiled import graph_bytes
from tests.activations.compiling import error, run, saved, saving
from tests.thorough import thorough

pytestmark = [
    pytest.mark.usefixtures("nothing_compiled_yet"),
    pytest.mark.filterwarnings("ignore:.*torch.jit"),  # which is deprecated, and still used
]

#: Traces and partitions graphs as Inductor does, without its code generation.
BACKEND = "aot_eager_decomp_partition"

ROWS, WIDTH, HIDDEN, GROUP = 64, 64, 192, 64


class Norm(nn.Module):
    """RMS normalization as models of the library Transformers write it."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, x):
        h = x.to(torch.float32)
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * h.to(x.dtype)


class Gated(nn.Module):
    """A residual block of a language model."""

    def __init__(self, gate=F.silu):
        super().__init__()
        self.norm, self.function = Norm(), gate
        self.gate, self.up = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x):
        n = self.norm(x)
        return x + self.down(self.function(self.gate(n)) * self.up(n))


def without(monkeypatch):
    monkeypatch.setattr(compiled, "compute_products", lambda *_: None)


def both(monkeypatch, model, x, bits=8, *, cast=False):
    """Bytes that codes take, and errors of gradients, without products that are computed again and with them."""
    found = []
    with torch.autocast("cpu", torch.bfloat16, enabled=cast):
        _, _, wanted = run(model, x)
        for patched in (True, False):
            torch._dynamo.reset()
            with monkeypatch.context() as patch:
                if patched:
                    without(patch)
                made = torch.compile(model, backend=BACKEND)
                with saving(bits, stochastic=False):
                    y = made(x)
                gradients = torch.autograd.grad(y.float().square().mean(), list(model.parameters()), retain_graph=True)
            found.append((graph_bytes(saved(y)), error(gradients, wanted)))
    return found


def tokens(rows=ROWS):
    """With a gradient, as what an embedding makes has."""
    return torch.randn(rows, WIDTH, requires_grad=True)


def nbytes_of(elements, bits=8):
    return elements * bits // 8 + elements // GROUP * 8


@pytest.mark.parametrize("gate", [F.silu, *thorough(F.gelu, torch.sigmoid, F.relu, F.tanh)])
@pytest.mark.parametrize(("bits", "bound"), [(8, 1.2), *thorough((4, 1.2))])
def test_of_gated_blocks_neither_products_nor_normalized_forms_are_kept(monkeypatch, gate, bits, bound):
    torch.manual_seed(0)
    model, x = nn.Sequential(Gated(gate), Gated(gate)), tokens()
    (before, error_before), (after, error_after) = both(monkeypatch, model, x, bits)
    assert before[0] == after[0]  # bytes without compression
    # Of each block gate and up, and of the first one what it adds.
    assert after[1] == nbytes_of(ROWS * (4 * HIDDEN + WIDTH), bits)
    assert before[1] == after[1] + nbytes_of(ROWS * (2 * HIDDEN + 2 * WIDTH), bits)
    assert 0 < error_after < bound * error_before


def test_under_autocast_too(monkeypatch):
    torch.manual_seed(0)
    model, x = Gated(), tokens()
    (before, error_before), (after, error_after) = both(monkeypatch, model, x, cast=True)
    assert after[1] < 0.75 * before[1]
    assert 0 < error_after < 1.2 * error_before


class Of(nn.Module):
    """A function of what a layer makes, in front of another layer."""

    def __init__(self, function, width=WIDTH):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, width), nn.Linear(width, WIDTH)
        self.function, self.weight = function, nn.Parameter(torch.ones(width))

    def forward(self, x):
        return self.last(self.function(self.first(x), self.weight))


def rms(x):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


@pytest.mark.parametrize(
    ("function", "width"),
    [
        (lambda h, w: w * rms(h), WIDTH // 2),  # rows that share a range
        (lambda h, w: w * (h - h.mean(-1, keepdim=True)), WIDTH),
        (lambda h, w: w * h.exp(), WIDTH),
        *thorough((lambda h, w: w * (h / (h.abs() + 1e-3)), WIDTH), (lambda h, w: w * h.softmax(-1), WIDTH)),
    ],
)
def test_what_would_make_errors_larger_is_kept_as_before(monkeypatch, function, width):
    torch.manual_seed(0)
    model, x = Of(function, width), tokens(2 * ROWS)
    (before, error_before), (after, error_after) = both(monkeypatch, model, x)
    assert before == after
    assert error_before == error_after


def test_small_rows_come_back_of_a_norm_whose_rows_are_whole_groups(monkeypatch):
    """Each row has ranges of its own: none is rounded as coarsely as the largest one."""
    torch.manual_seed(0)
    model, x = Gated(), (torch.logspace(-3, 3, ROWS)[:, None] * tokens()).detach().requires_grad_()
    (before, error_before), (after, error_after) = both(monkeypatch, model, x)
    assert after[1] < 0.7 * before[1]
    assert 0 < error_after < 1.2 * error_before


def test_a_product_that_the_model_returns_is_kept_anyway(monkeypatch):
    class Two(Of):
        def forward(self, x):
            h = torch.tanh(self.first(x))
            p = h * self.weight
            return self.last(p).sum() + p

    torch.manual_seed(0)
    model, x = Two(None), tokens()
    (before, error_before), (after, error_after) = both(monkeypatch, model, x)
    assert after[1] <= before[1]
    assert error_after <= 1.6 * error_before  # 1.0 to 1.5 times, by seed


def test_names_of_nodes_that_only_forward_has_are_no_values_of_backward(monkeypatch):
    """A node that is added to backward may get the name of a node of forward."""

    def function(h, w):
        for _ in range(40):
            h = h * 1.01 + 0.01  # forward has many products, and backward needs none of their results
        p = torch.tanh(h) * w
        return p * F.silu(h)

    torch.manual_seed(0)
    model = Of(function)
    (before, error_before), (after, error_after) = both(monkeypatch, model, tokens())
    assert after[1] < before[1]
    assert 0 < error_after < 1.2 * error_before


def test_it_is_so_without_a_gradient_of_the_weight(monkeypatch):
    torch.manual_seed(0)
    model, x = nn.Sequential(Gated(), Gated()), tokens()
    for block in model:
        block.norm.weight.requires_grad_(False)
    wanted = [p for p in model.parameters() if p.requires_grad]
    _, _, exact = run(model, x, wanted=wanted)
    made = torch.compile(model, backend=BACKEND)
    with saving(8, stochastic=False):
        y = made(x)
    assert graph_bytes(saved(y))[1] == nbytes_of(ROWS * (4 * HIDDEN + WIDTH))
    assert 0 < error(torch.autograd.grad(y.square().mean(), wanted), exact) < 0.02
