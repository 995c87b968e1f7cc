"""What stays exact: statistics, parameters and their copies, what lies outside of the model."""

from __future__ import annotations

import contextlib
from collections import UserDict
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from narrowband.activations.storages import tensors_in
from tests.activations.helpers import Heads, compress, linears, saved_of


def inexact(model, *inputs, autocast=False, **options):
    """(Node, attribute) of what is not restored to the bit, of all that is saved; and the names of the rest."""
    cast = (lambda: torch.autocast("cpu", dtype=torch.bfloat16)) if autocast else contextlib.nullcontext
    with cast():
        plain = model(*inputs)
    with compress(model, **{"min_numel": 1, "bits": 4, **options}), cast():
        y = model(*inputs)
    expected, found = saved_of(plain), saved_of(y)
    assert expected.keys() == found.keys()
    differ = {name[1:] for name in found if not same_values(found[name], expected[name])}
    return differ, {name[1:] for name in found} - differ


def same_values(a, b):
    if a.is_sparse:
        a, b = a.to_dense(), b.to_dense()
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)


def test_statistics_of_norms_stay_exact():
    norms = {
        "NativeLayerNormBackward0": nn.LayerNorm(32),
        "NativeBatchNormBackward0": nn.BatchNorm1d(32),
        "NativeGroupNormBackward0": nn.GroupNorm(16, 32),
    }
    for name, norm in norms.items():
        model = nn.Sequential(nn.Linear(32, 32), norm)
        differ, rest = inexact(model, torch.randn(64, 32))
        assert differ == {(name, "_saved_input")}
        assert {(name, "_saved_result1"), (name, "_saved_result2")} <= rest


def test_log_sum_exp_of_attention_stays_exact():
    differ, rest = inexact(Heads(), torch.randn(3, 10, 32))
    node = "ScaledDotProductFlashAttentionForCpuBackward0"
    assert differ == {(node, f"_saved_{name}") for name in ("query", "key", "value", "output")}
    assert (node, "_saved_logsumexp") in rest


class Holds(nn.Module):
    """Calls a function of itself: it has its input x, a linear layer's result h, parameters, buffers, a constant."""

    def __init__(self, function):
        super().__init__()
        self.function, self.first = function, nn.Linear(32, 32)
        self.weight = nn.Parameter(torch.randn(32, 32))
        self.frozen = nn.Parameter(torch.randn(32, 32), requires_grad=False)
        self.register_buffer("buffer", torch.randn(32, 32))
        self.constant = torch.randn(32, 32)
        self.tables, self.named = [torch.randn(32, 32), "first"], {"second": torch.randn(32, 32), "of": 2}
        self.register_buffer("places", torch.randint(32, (32, 32)))
        self.register_buffer("sparse", (torch.randn(32, 32) * (torch.rand(32, 32) < 0.1)).to_sparse())

    def forward(self, x):
        self.x, self.h = x, self.first(x)
        return self.function(self)


#: Functions, and what they save beside that must stay exact.
EXACT = {
    "inputs": (lambda m: m.h * m.x + m.x.t().sinh().t(), {("MulBackward0", "_saved_self")}),
    "buffers": (lambda m: m.h * m.buffer + m.h * m.buffer.t(), set()),
    "constants in attributes": (lambda m: m.h * m.constant + m.h * m.constant.t(), set()),
    "constants in lists and dictionaries": (lambda m: m.h * m.tables[0] + m.h * m.named["second"], set()),
    "parameters": (lambda m: m.weight.sinh() + m.h, set()),
    "parameters, to a product": (lambda m: m.h @ m.weight.t(), {("MmBackward0", "_saved_self")}),
    "frozen parameters": (lambda m: m.h @ m.frozen, set()),
    "integers": (lambda m: F.embedding(m.places, m.weight).mean(0) + m.h.index_select(0, m.places[0]), set()),
    "integers that were computed": (lambda m: m.h.sort(1).values, set()),
    "complex numbers": (lambda m: (m.h * 1j).exp().abs(), set()),
    "float64": (lambda m: m.h.double().exp(), set()),
    "rows that are expanded": (lambda m: (m.h[:1] + 1).expand(32, 32).sinh(), set()),
    "columns that are expanded": (lambda m: (m.h[:, :1] + 1).expand(32, 32).cosh(), set()),
    "a part that is expanded": (lambda m: (m.h + 1)[:1].expand(3, 32).sinh(), set()),
    "windows": (lambda m: (m.h + 1).view(-1).unfold(0, 32, 16).sinh(), set()),
    "sparse tensors": (lambda m: torch.sparse.mm(m.sparse, m.h), set()),
    "a sign that is not in memory": (lambda m: (m.h * (1 - 1j)).conj().imag.sinh(), set()),
}


@pytest.mark.parametrize("name", EXACT)
def test_it_stays_exact(name):
    torch.manual_seed(0)
    function, but = EXACT[name]
    model = Holds(function)
    differ, rest = inexact(model, torch.randn(32, 32, requires_grad=True))
    assert differ == but
    assert rest


@pytest.mark.parametrize("name", ["constants in attributes", "constants in lists and dictionaries"])
def test_a_constant_in_an_attribute_is_not_counted(name):
    model = Holds(EXACT[name][0])
    with compress(model, min_numel=1) as saved:
        model(torch.randn(32, 32))
    assert saved.raw_bytes == 0


def test_what_an_attribute_held_before_the_pass_is_kept_like_any_other_tensor_once_it_was_replaced():
    """A recurrent state: of the last pass when this one begins, and held for backward only."""
    model = Holds(lambda m: m.state * m.h)
    model.state = torch.randn(32, 32)
    context = compress(model, min_numel=1)
    model.state = torch.randn(32, 32)
    with context as saved:
        model(torch.randn(32, 32))
    assert saved.raw_bytes == 32 * 32 * 4
    assert saved.kept_bytes < saved.raw_bytes / 3


def test_small_tensors_stay_exact():
    differ, _ = inexact(linears(8, 8, 8), torch.randn(8, 8), min_numel=65)
    assert differ == set()
    differ, _ = inexact(linears(8, 8, 8), torch.randn(8, 8), min_numel=64)
    assert differ == {("AddmmBackward0", "_saved_mat1")}


def cast_layers(conv, frozen):
    torch.manual_seed(0)
    layer = (lambda: nn.Conv2d(8, 8, 3, padding=1)) if conv else (lambda: nn.Linear(32, 32))
    first, last = layer(), layer()
    last.requires_grad_(not frozen)
    model = nn.Sequential(first, nn.GELU(), last, nn.GELU(), layer())
    if conv == "channels last":
        model = model.to(memory_format=torch.channels_last)
    return model, torch.randn(2, 8, 6, 6) if conv else torch.randn(32, 32)  # as many elements as the weight has


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("conv", [False, True, "channels last"])
def test_autocasts_copies_of_parameters_come_back_exactly(conv, frozen):
    model, x = cast_layers(conv, frozen)
    differ, rest = inexact(model, x, autocast=True)
    weight = ("ConvolutionBackward0", "_saved_weight") if conv else ("AddmmBackward0", "_saved_mat2")
    assert weight in rest
    assert weight not in differ
    assert ("GeluBackward0", "_saved_self") in differ


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("conv", [False, True, "channels last"])
def test_autocasts_copies_of_parameters_are_cast_again_instead_of_kept(conv, frozen):
    model, x = cast_layers(conv, frozen)
    with compress(model, min_numel=1) as saved, torch.autocast("cpu", torch.bfloat16):
        model(x)
    name, weights = ("conv", 8 * 8 * 9) if conv else ("matmul", 32 * 32)
    assert saved.by_operator[name].raw_bytes >= 2 * (2 * x.numel() + 2 * weights)
    assert saved.by_operator[name].kept_bytes == x.numel()  # codes of the first layer's input; others' comes of GELU's


LAID_OUT = {
    "transposed": lambda w, x: x @ w.t().to(torch.bfloat16),
    "in another order": lambda w, x: x @ w.t().to(torch.bfloat16, memory_format=torch.contiguous_format),
    "a part": lambda w, x: x[:, :16] @ w.as_strided((16, 32), (32, 1)).to(torch.bfloat16),
    "a part of the copy": lambda w, x: x[:, :16] @ w.to(torch.bfloat16).as_strided((16, 32), (32, 1), 512),
    "twice": lambda w, x: (x @ w.to(torch.bfloat16)) @ w.to(torch.bfloat16).t(),
}


@pytest.mark.parametrize("how", LAID_OUT)
def test_copies_of_parameters_in_another_order_or_of_a_part_come_back_exactly(how):
    torch.manual_seed(0)
    model = nn.Linear(32, 32)
    model.forward = lambda x: LAID_OUT[how](model.weight, x)
    _, rest = inexact(model, torch.randn(32, 32, dtype=torch.bfloat16, requires_grad=True))
    assert ("MmBackward0", "_saved_mat2") in rest


def test_a_copy_of_a_parameter_in_another_memory_format_comes_back_exactly():
    torch.manual_seed(0)
    model = nn.Conv2d(8, 8, 3)
    model.forward = lambda x: F.conv2d(x, model.weight.to(torch.bfloat16, memory_format=torch.channels_last))
    _, rest = inexact(model, torch.randn(2, 8, 6, 6, dtype=torch.bfloat16, requires_grad=True))
    assert ("ConvolutionBackward0", "_saved_weight") in rest


def test_a_parameter_that_is_cast_again_must_not_change_before():
    model = linears(32, 32, 32)
    with compress(model, min_numel=1), torch.autocast("cpu", torch.bfloat16):
        y = model(torch.randn(20, 32))
    with torch.no_grad():
        model[1].weight.add_(1)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation: float32 \[32, 32\], which matmul in 1"):
        y.sum().backward()


def test_an_input_that_autocast_copies_is_no_parameter():
    """Only parameters live anyway in another dtype: a copy of an input is kept for backward alone."""
    model = linears(32, 32)
    differ, _ = inexact(model, torch.randn(64, 32, requires_grad=True), autocast=True)
    assert differ == {("AddmmBackward0", "_saved_mat1")}


def test_what_a_loss_saves_outside_stays_exact():
    model, x = linears(32, 32, 32), torch.randn(64, 32)
    with compress(model) as saved:
        loss = F.mse_loss(model(x).exp(), torch.zeros(64, 32))
    assert saved.by_module["(outside)"].raw_bytes == saved.by_module["(outside)"].kept_bytes == 2 * 64 * 32 * 4
    assert set(saved.by_operator) == {"matmul", "other"}
    loss.backward()


class Classifier(nn.Module):
    """Ends in a function of logits that are far apart, and in a tensor beside it."""

    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.head, self.function = nn.Linear(32, 16), function

    def forward(self, x):
        logits = 8 * self.head(x)
        return {"result": self.function(logits), "logits": logits}


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.softmax(-1),
        torch.sigmoid,
        nn.Sigmoid(),
        lambda x: x.transpose(0, 1).softmax(0).transpose(0, 1),
        lambda x: x.unsqueeze(0).sigmoid().squeeze(0),
    ],
)
def test_probabilities_that_a_model_returns_are_exact_since_a_loss_may_take_the_logarithm(function):
    model, x, of = Classifier(function), torch.randn(256, 32), torch.randint(16, (256, 1))

    def gradient():
        return torch.autograd.grad((model(x)["result"] + 1e-8).log().gather(1, of).sum(), model.head.weight)[0]

    exact = gradient()
    with compress(model, min_numel=1) as saved:
        loss = (model(x)["result"] + 1e-8).log().gather(1, of).sum()
    (ours,) = torch.autograd.grad(loss, model.head.weight)
    assert (ours - exact).norm() < 1e-3 * exact.norm()
    assert saved.kept_bytes < 1.3 * saved.raw_bytes


@dataclass
class Batch:
    x: torch.Tensor
    more: object = None


class Slotted:
    __slots__ = ("x",)

    def __init__(self, x):
        self.x = x


#: Batches and outputs as users write them.
OBJECTS = {
    "dataclass": Batch,
    "mapping": lambda x: UserDict(x=x),
    "slots": Slotted,
    "object in an object": lambda x: Batch(torch.zeros(1), {"more": [Batch(x)]}),
}


@pytest.mark.parametrize("name", OBJECTS)
def test_inputs_in_objects_are_kept_as_they_are(name):
    class Reads(nn.Linear):
        def forward(self, batch):
            return super().forward(tensors_in(batch)[-1])

    x = torch.randn(256, 32)
    model = Reads(32, 16)
    with compress(model, min_numel=1) as saved:
        y = model(OBJECTS[name](x))
    assert saved.raw_bytes == saved.kept_bytes == 0  # it lives anyway
    (ours,) = torch.autograd.grad(y.square().sum(), model.weight)
    assert torch.equal(ours, torch.autograd.grad(model(OBJECTS[name](x)).square().sum(), model.weight)[0])


@pytest.mark.parametrize("name", OBJECTS)
def test_probabilities_in_objects_that_a_model_returns_are_exact(name):
    class Result(Classifier):
        def forward(self, x):
            return OBJECTS[name](super().forward(x)["result"])

    model, x, of = Result(lambda x: x.softmax(-1)), torch.randn(256, 32), torch.randint(16, (256, 1))

    def gradient(result):
        (p,) = (each for each in tensors_in(result) if each.numel() > 1)
        return torch.autograd.grad((p + 1e-8).log().gather(1, of).sum(), model.head.weight)[0]

    exact = gradient(model(x))
    with compress(model, min_numel=1):
        result = model(x)
    assert (gradient(result) - exact).norm() < 1e-3 * exact.norm()


def test_what_is_kept_as_it_is_after_codes_were_made_of_it_takes_their_place():
    def function(logits):
        p = logits.softmax(-1)  # has codes
        half = F.gelu(p)  # is computed again from them
        return (half * half + p.log()).sum(-1)  # and p is kept as it is

    model, x = Classifier(function), torch.randn(256, 32)
    exact = torch.autograd.grad(model(x)["result"].sum(), model.head.weight)[0]
    with compress(model, min_numel=1):
        result = model(x)["result"]
    for _ in range(2):  # what was kept is as it was, though gelu is computed in place
        ours = torch.autograd.grad(result.sum(), model.head.weight, retain_graph=True)[0]
        assert (ours - exact).norm() < 0.01 * exact.norm()


@pytest.mark.parametrize("change", [F.relu_, lambda h: (F.relu(h), h.add_(1))[0]])
def test_an_input_of_relu_may_change_though_something_keeps_it_as_it_is(change):
    def function(h):
        model.statistic = h.abs().mean()  # keeps h as it is, and takes no part in the loss
        return F.gelu(change(h))

    model, x = Classifier(function), torch.randn(256, 32)
    exact = torch.autograd.grad(model(x)["result"].sum(), model.head.weight)[0]
    with compress(model, min_numel=1):
        result = model(x)["result"]
    ours = torch.autograd.grad(result.sum(), model.head.weight)[0]
    assert (ours - exact).norm() < 0.02 * exact.norm()


def test_lazy_modules_are_initialised_inside():
    model = nn.Sequential(nn.LazyLinear(32), nn.GELU(), nn.LazyLinear(32))
    x = torch.randn(20, 16)
    with compress(model, min_numel=1) as saved:
        y = model(x)
    assert saved.raw_bytes == 2 * 20 * 32 * 4
    weight = next(value for name, value in saved_of(y).items() if name[1:] == ("AddmmBackward0", "_saved_mat2"))
    assert torch.equal(weight, model[2].weight.t())
